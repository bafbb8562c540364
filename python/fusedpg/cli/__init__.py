"""The command line: `python -m fusedpg demo` and `python -m fusedpg bench`."""

from __future__ import annotations

from importlib.util import find_spec

#: modules of the `cli` extra
EXTRA = ("typer", "rich", "matplotlib")


def main() -> None:
    """Run the command line, or say in one line what to install."""
    missing = [name for name in EXTRA if find_spec(name) is None]
    if missing:
        raise SystemExit(f"the fusedpg command line needs {', '.join(missing)}: pip install 'fusedpg[cli]'")
    from .app import app

    app()
