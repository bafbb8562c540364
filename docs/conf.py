"""Sphinx: `make docs`. Pages are Markdown; the reference comes from the docstrings."""

from __future__ import annotations

import re
from typing import Any

import fusedpg

project = "fusedpg"
author = "The fusedpg developers"
project_copyright = author
release = version = fusedpg.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"fusedpg {release}"
html_show_sphinx = False
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # README-like fragments may start below the first level

# docstrings write code in single backticks and name several arguments of one meaning together
default_role = "literal"
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_param = napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style")]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
# their pages are built where the trainers are not installed
autodoc_mock_imports = ["trl", "verl", "ray", "tensordict", "transformers", "peft"]


def escape_formulas(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Outside backticks a docstring's `*`, `|` and trailing `_` are themselves, not markup."""
    parts = "\n".join(lines).split("`")
    parts[::2] = [re.sub(r"(?<!\\)([*|])|(?<=\w)_(?=\W|$)", lambda m: "\\" + m.group(), p) for p in parts[::2]]
    lines[:] = "`".join(parts).split("\n")


def setup(app: Any) -> None:
    # napoleon listens at 500
    app.connect("autodoc-process-docstring", escape_formulas, priority=400)
