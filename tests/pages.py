"""Runs the Python of a Markdown page as written: its blocks in order, in one namespace."""

from __future__ import annotations

import doctest
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)


def blocks(page: Path, *languages: str) -> Iterator[tuple[str, str, int]]:
    """(language, code, line of the page) of every fenced block in one of the languages."""
    text = page.read_text()
    for match in _FENCE.finditer(text):
        if match[1] in languages:
            yield match[1], match[2], text.count("\n", 0, match.start()) + 1


def run(page: Path, skip: Callable[[str], bool] = lambda code: False) -> dict[str, Any]:
    """The namespace after every `python` block and every `pycon` block, whose printed results are compared.

    Raises:
        doctest.DocTestFailure, doctest.UnexpectedException: a `pycon` example that prints something else.
    """
    namespace: dict[str, Any] = {"__name__": f"page_{page.stem}"}
    runner = doctest.DebugRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE, verbose=False)
    for language, code, line in blocks(page, "python", "pycon"):
        if skip(code):
            continue
        if language == "python":
            exec(compile("\n" * line + code, str(page), "exec"), namespace)
        else:
            example = doctest.DocTestParser().get_doctest(code, namespace, page.name, str(page), line)
            runner.run(example, clear_globs=False)
            namespace = example.globs
    return namespace
