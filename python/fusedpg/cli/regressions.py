"""A run against an older one, row by row, and against the copy or the bare products of the same table in each.

Machines differ, and one machine differs from hour to hour: the ratio to the yardstick is what is judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import results
from .results import Record

#: (section, row) by the row's name in every run
Pairs = Mapping[tuple[Any, ...], tuple[Record, Record]]

THRESHOLD = 1.15
#: rows that do no more than the table's least work, then rivals that change little: the first that both runs have
YARDSTICKS = (
    *("copy into a buffer", "three bare products", "bare product", "read both, write one"),
    *("torch eager", "verl's function, eager", "GRPOTrainer"),
)
#: memory may grow by this and the threshold: what a page cache or an allocator rounds
MEMORY_SLACK = 16e6
MACHINE = ("cpu", "device", "threads", "isa", "torch", "triton", "python", "fusedpg", "backend", "system")
HEADERS = ("row", "old ms", "new ms", "new / old", "relative to", "relative", "extra MB", "")


@dataclass(frozen=True)
class Change:
    """One row in both runs. `relative` is the ratio of the medians over that of the yardstick's medians."""

    where: str
    name: str
    ours: bool
    old: float
    new: float
    yardstick: str | None
    relative: float
    relative_best: float
    old_bytes: int | None
    new_bytes: int | None

    @property
    def ratio(self) -> float:
        """New time over old."""
        return self.new / self.old

    def slower(self, threshold: float) -> bool:
        """Whether the median and the minimum both say so: one alone is noise."""
        return min(self.relative, self.relative_best) > threshold

    def larger(self, threshold: float) -> bool:
        """Whether it takes more memory."""
        if self.old_bytes is None or self.new_bytes is None:
            return False
        return self.new_bytes > threshold * self.old_bytes + MEMORY_SLACK

    def verdict(self, threshold: float) -> str:
        """Of our own rows; a rival's changes are no regressions of ours."""
        if not self.ours:
            return ""
        found = [word for word, is_so in (("SLOWER", self.slower), ("MORE MEMORY", self.larger)) if is_so(threshold)]
        return ", ".join(found) or ("faster" if max(self.relative, self.relative_best) < 1 / threshold else "")


@dataclass(frozen=True)
class Comparison:
    """What two runs share, and what they do not."""

    changes: list[Change]
    differences: list[str]
    wrong: list[str]
    unmatched: list[str]
    threshold: float

    @property
    def regressions(self) -> list[Change]:
        """Our rows that are slower or larger."""
        return [c for c in self.changes if c.ours and (c.slower(self.threshold) or c.larger(self.threshold))]

    @property
    def failed(self) -> bool:
        """Whether there are any, a row lost its time to a wrong result, or nothing could be compared."""
        return bool(self.regressions or self.wrong or not self.changes)


def compare(old: Record, new: Record, threshold: float = THRESHOLD) -> Comparison:
    """Match the rows of two runs by suite, shape, dtype and name."""
    before, after = ({results.key(*pair): pair for pair in results.rows(run)} for run in (old, new))
    changes, wrong = [], []
    for key in (key for key in after if key in before):
        (old_section, old_row), (section, row) = before[key], after[key]
        where = results.label(section, row)
        if "median_s" in old_row and "median_s" in row:
            changes.append(_change(where, (old_section, old_row), (section, row)))
        elif "median_s" in old_row and row.get("wrong"):
            wrong.append(f"{where}: {row['name']}: {row['wrong']}")
    unmatched = [*_alone("old", before, after), *_alone("new", after, before)]
    return Comparison(changes, _differences(old, new), wrong, unmatched, threshold)


def _alone(which: str, rows: Pairs, others: Pairs) -> list[str]:
    """A line for each table with rows that the other run lacks; a table that it lacks altogether is named alone."""
    missing: dict[str, list[str]] = {}
    shared = set()
    for key, (section, row) in rows.items():
        where = results.label(section)
        missing.setdefault(where, [])
        if key in others:
            shared.add(where)
        else:
            missing[where].append(row["name"])
    return [
        f"only in the {which} run: {where}{': ' + ', '.join(dict.fromkeys(names)) if where in shared else ''}"
        for where, names in missing.items()
        if names
    ]


def _change(where: str, old: tuple[Record, Record], new: tuple[Record, Record]) -> Change:
    yardstick = _yardstick(old, new)
    median, best = (_relative(field, old, new, yardstick) for field in ("median_s", "min_s"))
    return Change(
        where=where,
        name=new[1]["name"],
        ours=is_ours(new[1]),
        old=old[1]["median_s"],
        new=new[1]["median_s"],
        yardstick=yardstick,
        relative=median,
        relative_best=best,
        old_bytes=old[1].get("peak_extra_bytes"),
        new_bytes=new[1].get("peak_extra_bytes"),
    )


def is_ours(row: Record) -> bool:
    """Reports of earlier versions do not say whose a row is; the names do."""
    return bool(row.get("ours", row["name"].startswith(("fusedpg", "FusedGRPO"))))


def _timed_peers(section: Record, row: Record) -> dict[str, Record]:
    """The timed rows of the same table and shape."""
    shape = [row.get(name) for name in results.ROW_KEYS]
    peers = (r for r in section["rows"] if [r.get(name) for name in results.ROW_KEYS] == shape)
    return {peer["name"]: peer for peer in peers if "median_s" in peer}


def _yardstick(old: tuple[Record, Record], new: tuple[Record, Record]) -> str | None:
    both = set(_timed_peers(*old)) & set(_timed_peers(*new))
    return next((name for name in YARDSTICKS if name in both), None)


def _relative(field: str, old: tuple[Record, Record], new: tuple[Record, Record], yardstick: str | None) -> float:
    ratio = float(new[1][field] / old[1][field])
    if yardstick is None:
        return ratio
    return ratio / float(_timed_peers(*new)[yardstick][field] / _timed_peers(*old)[yardstick][field])


def _differences(old: Record, new: Record) -> list[str]:
    """Of the machines, their versions and the rivals' packages."""
    pairs: list[tuple[str, Any, Any]] = [(name, old["machine"].get(name), new["machine"].get(name)) for name in MACHINE]
    packages = [run["machine"].get("packages", {}) for run in (old, new)]
    if all(packages):
        pairs += [(name, packages[0].get(name), packages[1].get(name)) for name in sorted({*packages[0], *packages[1]})]
    return [f"{name}: {before} before, {after} now" for name, before, after in pairs if before != after]


# ------------------------------------------------------------------ for people


def show(console: Console, comparison: Comparison) -> None:
    """The table, then what differs and what is missing."""
    for line in comparison.differences:
        console.print(f"  [yellow]differs: {escape(line)}[/yellow]", highlight=False, soft_wrap=True)
    table = Table(title="Compared with the older run", title_justify="left", title_style="bold")
    for number, header in enumerate(HEADERS):
        table.add_column(header, justify="left" if number in (0, 4, 7) else "right", overflow="fold")
    for where, row in _cells(comparison):
        if where is not None:
            table.add_section()
            table.add_row(f"[bold]{escape(where)}[/bold]")
        style = "bold red" if row[-1].isupper() else "green" if row[-1] else ""
        table.add_row(*map(escape, row), style=style)
    console.print(table, highlight=False)
    for line in conclusions(comparison):
        console.print(f"  {escape(line)}", highlight=False, soft_wrap=True)


def markdown(comparison: Comparison) -> str:
    """The same for a page."""
    lines = [f"| {' | '.join(HEADERS)} |", "|" + " :-- |" * len(HEADERS)]
    for where, row in _cells(comparison):
        if where is not None:
            lines.append(f"| **{where}** |" + " |" * (len(HEADERS) - 1))
        lines.append(f"| {' | '.join(row)} |")
    notes = [f"- {line}" for line in (*comparison.differences, *conclusions(comparison))]
    return "\n".join(["**Compared with the older run**", "", *lines, "", *notes])


def _cells(comparison: Comparison) -> Iterator[tuple[str | None, list[str]]]:
    """(the table's label before its first row, cells) of each change."""
    last = None
    for change in comparison.changes:
        sizes = [change.old_bytes, change.new_bytes]
        memory = " -> ".join("n/a" if size is None else f"{size / 1e6:.1f}" for size in sizes)
        row = [
            change.name,
            f"{change.old * 1e3:.2f}",
            f"{change.new * 1e3:.2f}",
            f"{change.ratio:.2f}x",
            change.yardstick or "-",
            f"{change.relative:.2f}x",
            memory,
            change.verdict(comparison.threshold),
        ]
        yield (change.where if change.where != last else None), row
        last = change.where


def conclusions(comparison: Comparison) -> list[str]:
    """What was lost, what stands alone, and how many rows regressed."""
    rule = f"more than {comparison.threshold:g}x in median and minimum, relative to the yardstick where there is one"
    total = sum(change.ours for change in comparison.changes)
    if not comparison.changes:
        return [*comparison.unmatched, "no row is in both runs: nothing was compared"]
    return [
        *(f"no time any more, the result is wrong: {line}" for line in comparison.wrong),
        *comparison.unmatched,
        f"{len(comparison.regressions)} of {total} own rows regressed ({rule})",
    ]
