"""The command line: `python -m fusedpg demo`, `bench`, `doctor` and others."""

from __future__ import annotations

import sys
from importlib.util import find_spec

#: modules of the `cli` extra
EXTRA = ("typer", "rich", "matplotlib")


def main() -> None:
    """Run the command line, or say in one line what to install; `doctor` needs nothing of the extra."""
    missing = [name for name in EXTRA if find_spec(name) is None]
    if missing and sys.argv[1:2] == ["doctor"]:
        from .doctor import plain

        raise SystemExit(plain(sys.argv[2:]))
    if missing:
        raise SystemExit(f"the fusedpg command line needs {', '.join(missing)}: pip install 'fusedpg[cli]'")
    from .app import app

    app()
