"""Tables with targets, rendered for a terminal, for Markdown and for JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .timing import Row


@dataclass(frozen=True)
class Target:
    """One promise of the performance table: what was measured (None when it could not be) and the bound."""

    what: str
    value: float | None
    bound: float
    at_least: bool
    unit: str = "x"
    also: str = ""

    @property
    def met(self) -> bool:
        """Whether the bound holds; never when nothing could be measured."""
        if self.value is None:
            return False
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def line(self) -> str:
        """`what: 9.7x (minima 9.9x), target at least 9x: met`."""
        got = "not measured" if self.value is None else f"{self.value:.3g}{self.unit}"
        also = f" ({self.also})" if self.also else ""
        bound = f"target {'at least' if self.at_least else 'at most'} {self.bound:g}{self.unit}"
        return f"{self.what}: {got}{also}, {bound}: {'met' if self.met else 'MISSED'}"

    def to_json(self) -> dict[str, Any]:
        """All fields and the verdict."""
        return {**vars(self), "met": self.met}


@dataclass
class Section:
    """One table: a title, cells, the targets judged on it, remarks, and the full record for JSON."""

    title: str
    columns: list[str]
    cells: list[list[str]]
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)
    broken: bool = False

    def show(self, console: Console) -> None:
        """To a terminal."""
        table = Table(title=escape(self.title), title_justify="left", title_style="bold")
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
        for row in self.cells:
            table.add_row(*map(escape, row))
        console.print(table)
        for target in self.targets:
            style = "green" if target.met else "yellow"
            console.print(f"  [{style}]{escape(target.line())}[/{style}]", highlight=False, soft_wrap=True)
        for note in self.notes:
            console.print(f"  [dim]{escape(note)}[/dim]", highlight=False, soft_wrap=True)
        console.print()

    def markdown(self) -> str:
        """A heading, the table, the targets as a list, the notes."""
        align = [":--"] + ["--:"] * (len(self.columns) - 1)
        rows = [f"| {' | '.join(row)} |" for row in (self.columns, align, *self.cells)]
        tail = [f"- {target.line()}" for target in self.targets]
        notes = [f"*{note}*" for note in self.notes]
        blocks = ["**" + self.title + "**", "\n".join(rows), "\n".join(tail), "  \n".join(notes)]
        return "\n\n".join(block for block in blocks if block)

    def to_json(self) -> dict[str, Any]:
        """The record with the judged targets."""
        return {"title": self.title, **self.record, "targets": [t.to_json() for t in self.targets]}


def milliseconds(row: Row) -> list[str]:
    """[median, min] cells; a wrong result has no time."""
    if not row.samples:
        return ["wrong result", "-"]
    return [f"{row.median * 1e3:.2f}", f"{row.best * 1e3:.2f}"]


def times(row: Row, base: Row) -> str:
    """How many times the median of `base` this row takes."""
    return f"{row.median / base.median:.2f}x" if row.samples and base.samples else "-"


def row_cells(row: Row, base: Row, moved: int | None = None) -> list[str]:
    """A row's cells: name, times, GB/s where the bytes it moves are given, ratio to `base`, memory, errors."""
    speed = [] if moved is None else [f"{moved / row.median / 1e9:.1f}" if row.samples else "-"]
    return [row.name, *milliseconds(row), *speed, times(row, base), megabytes(row.peak_bytes), worst_error(row)]


def megabytes(count: int | None) -> str:
    """A memory cell."""
    return "n/a" if count is None else f"{count / 1e6:.1f}"


def worst_error(row: Row) -> str:
    """The errors that the check measured, or that nothing was computed."""
    errors = row.verdict.errors
    return " / ".join(f"{value:.0e}" for value in errors.values()) if errors else "-"


def speed_target(what: str, slow: Row | None, fast: Row, bound: float) -> Target:
    """`slow` takes at least `bound` times as long as `fast`."""
    if slow is None or not slow.samples or not fast.samples:
        return Target(what, None, bound, at_least=True)
    also = f"of minima {slow.best / fast.best:.3g}x"
    return Target(what, slow.median / fast.median, bound, at_least=True, also=also)


def refusals(rows: list[Row]) -> list[str]:
    """A line for every row without a time."""
    return [
        f"{row.name}: no time reported, its result is wrong: {row.verdict.wrong}" for row in rows if row.verdict.wrong
    ]


def broken(rows: list[Row]) -> bool:
    """Whether one of our own results is wrong."""
    return any(row.ours and row.verdict.wrong is not None for row in rows)
