"""`python -m fusedpg parity`: every preset against its trainer's own code, as a table."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..certify import Row

_STYLES = {
    "equal": "green",
    "differs": "bold red",
    "trainer errs": "yellow",
    "not installed": "yellow",
    "not run": "yellow",
}
_HEADERS = ("trainer", "version", "loss", "reduction", "option", "cases", "value", "gradient", "verdict")


def cells(row: Row) -> tuple[str, ...]:
    """A row as text."""
    numbers = (str(row.cases), f"{row.value:.1e}", f"{row.gradient:.1e}") if row.cases else ("0", "", "")
    return (row.trainer, row.version, row.loss, row.reduction, row.option, *numbers, row.verdict)


def show(console: Console, rows: Iterable[Row]) -> None:
    """The table, then the notes under it."""
    rows = list(rows)
    table = Table(*_HEADERS, title="largest difference of value and gradient from the trainer's formula in fp64")
    notes: dict[str, int] = {}
    for row in rows:
        mark = f" [{notes.setdefault(row.note, len(notes) + 1)}]" if row.note else ""
        *text, verdict = cells(row)
        table.add_row(*map(escape, text), Text(verdict + mark, style=_STYLES[row.verdict]))
    console.print(table, highlight=False)
    for note, number in notes.items():
        console.print(f"[{number}] {note}", highlight=False, markup=False, soft_wrap=True)
    console.print(summary(rows), highlight=False)


def summary(rows: Iterable[Row]) -> str:
    """How many rows have which verdict."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.verdict] = counts.get(row.verdict, 0) + 1
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "no rows"


def markdown(rows: Iterable[Row]) -> str:
    """The table for a page."""
    lines = ["| " + " | ".join(_HEADERS) + " | note |", "|" + "---|" * (len(_HEADERS) + 1)]
    for row in rows:
        lines.append("| " + " | ".join((*cells(row), row.note)).replace("\n", " ") + " |")
    return "\n".join(lines) + "\n"
