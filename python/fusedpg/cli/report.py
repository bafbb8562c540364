"""Tables with targets, rendered for a terminal, for Markdown and for JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .timing import Row, Tick

UNMEASURED = "not measured"
_PROMISE = re.compile(r"P\d+")


@dataclass(frozen=True)
class Target:
    """One promise of the performance table: what was measured (None when it could not be) and the bound.

    `what` may begin with the promise (`P3: ...`); where it does not, the promise is that of its section.
    """

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
        bound = f"target {'at least' if self.at_least else 'at most'} {self.bound:g}{self.unit}"
        if self.value is None:
            return f"{self.what}: {UNMEASURED}, {bound}"
        also = f" ({self.also})" if self.also else ""
        return f"{self.what}: {self.value:.3g}{self.unit}{also}, {bound}: {'met' if self.met else 'MISSED'}"

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
        judged = [target.to_json() for target in self.targets]
        return {"title": self.title, **self.record, "targets": judged, "broken": self.broken}


@dataclass(frozen=True)
class Job:
    """One table that is to be measured, or several that are measured together, and how often that ticks."""

    ticks: int
    measure: Callable[[Tick], Section | Iterable[Section]]

    def sections(self, tick: Tick) -> Iterator[Section]:
        """Each table as soon as it is there."""
        measured = self.measure(tick)
        yield from [measured] if isinstance(measured, Section) else measured


def promise(target: dict[str, Any], section: dict[str, Any]) -> str | None:
    """The promise (`P1`) that a target in JSON belongs to: its own, else its section's, else none."""
    for name in (target["what"], section.get("suite", "")):
        found = _PROMISE.match(name)
        if found:
            return found.group()
    return None


@dataclass(frozen=True)
class Gauge:
    """What a row of `work` 1 moves or computes at least, and the rows that do nothing else: the fastest is the ceiling.

    `unit` heads the column; `amount` is in bytes or operations, `scale` those of one unit.
    """

    unit: str
    amount: float
    scale: float
    ceilings: tuple[Row, ...] = ()

    @property
    def ceiling(self) -> Row | None:
        """The fastest of the ceilings."""
        timed = [row for row in self.ceilings if row.samples]
        return min(timed, key=lambda row: row.median / row.work) if timed else None

    @property
    def columns(self) -> list[str]:
        """Of `cells`."""
        return [self.unit, "% of ceiling"]

    def cells(self, row: Row) -> list[str]:
        """Rate, and its share of the ceiling's."""
        share = self.share(row)
        rate = f"{row.work * self.amount / row.median / self.scale:.3g}" if row.samples else "-"
        return [rate, "-" if share is None else f"{share:.0f}"]

    def share(self, row: Row) -> float | None:
        """Percent of the ceiling's rate."""
        top = self.ceiling
        if top is None or not row.samples:
            return None
        return 100 * (row.work / row.median) / (top.work / top.median)

    def to_json(self) -> dict[str, Any]:
        """For plots and comparisons."""
        top = self.ceiling
        name = None if top is None else top.name
        return {"unit": self.unit, "amount": self.amount, "scale": self.scale, "ceiling": name}

    def note(self) -> str:
        """What the ceiling is and reaches."""
        top = self.ceiling
        if top is None:
            return "no ceiling was measured"
        return f"ceiling: '{top.name}', {self.cells(top)[0]} {self.unit.split(' ')[0]}"


def bytes_gauge(unit: str, moved: float, *ceilings: Row) -> Gauge:
    """GB/s of at least `moved` bytes."""
    return Gauge(unit, moved, 1e9, ceilings)


def flops_gauge(flops: float, *ceilings: Row) -> Gauge:
    """TFLOP/s of the products that the result needs."""
    return Gauge("TFLOP/s", flops, 1e12, ceilings)


def milliseconds(row: Row) -> list[str]:
    """[median, min, spread] cells; a wrong result has no time."""
    if not row.samples:
        return ["wrong result", "-", "-"]
    spread = "-" if row.spread is None else f"{100 * row.spread:.0f} %"
    return [f"{row.median * 1e3:.2f}", f"{row.best * 1e3:.2f}", spread]


def times(row: Row, base: Row) -> str:
    """How many times the median of `base` this row takes."""
    return f"{row.median / base.median:.2f}x" if row.samples and base.samples else "-"


def columns(base: str, errors: str, gauge: Gauge | None = None) -> list[str]:
    """The headers of `row_cells`."""
    speed = [] if gauge is None else gauge.columns
    return ["what", "median ms", "min ms", "spread", *speed, f"time / {base}", "extra MB", f"error {errors}"]


def row_cells(row: Row, base: Row, gauge: Gauge | None = None) -> list[str]:
    """A row's cells: name, times, rate and share of the ceiling, ratio to `base`, memory, errors."""
    speed = [] if gauge is None else gauge.cells(row)
    return [row.name, *milliseconds(row), *speed, times(row, base), megabytes(row.peak_bytes), worst_error(row)]


def rounds_note(rows: Sequence[Row], rounds: int) -> str:
    """How the rows were timed, and who sat rounds out."""
    fewest = min((len(row.samples) for row in rows if row.samples), default=rounds)
    slow = f"; slow rows take part in as few as {fewest} of them, spread evenly" if fewest < rounds else ""
    plural = "s" if rounds != 1 else ""
    spread = "spread: distance of the quartiles over the median"
    return f"{rounds} round{plural} interleaved in one process{slow}; {spread}"


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
