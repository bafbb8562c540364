"""The promises P1 to P7 at the end of a run: met or missed, with every figure, from the targets of all sections."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .report import UNMEASURED, promise
from .results import Record

PROMISES = {
    "P1": "CPU, loss and gradient from logits",
    "P2": "CPU, loss and gradients from hidden states",
    "P3": "half of the rows inactive",
    "P4": "the loss alone over log-probs",
    "P5": "Triton kernels, as compiled",
    "P6": "GPU (measured on one)",
    "P7": "accuracy against fp64",
}
STYLES = {"MISSED": "yellow", UNMEASURED: "dim", "met": "green"}
#: worst first
VERDICTS = tuple(STYLES)
HEADERS = ("", "target", "bound", "figures", "")


@dataclass
class Line:
    """One target of one promise over all tables that judge it."""

    promise: str
    what: str
    bound: str
    figures: list[str] = field(default_factory=list)
    verdicts: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """The worst of its tables: `MISSED`, `not measured` or `met`."""
        return min(self.verdicts, key=VERDICTS.index)


def lines(sections: Iterable[Record]) -> list[Line]:
    """Every target that belongs to a promise, the same target of several tables in one line."""
    found: dict[tuple[str, str], Line] = {}
    for section in sections:
        for target in section.get("targets", ()):
            name = promise(target, section)
            if name is None:
                continue
            what = target["what"].removeprefix(f"{name}: ")
            line = found.setdefault((name, what), Line(name, what, _bound(target)))
            line.figures.append(_figure(section, target))
            line.verdicts.append(_verdict(target))
    return sorted(found.values(), key=lambda line: line.promise)


def _bound(target: dict[str, Any]) -> str:
    return f"{'at least' if target['at_least'] else 'at most'} {target['bound']:g}{target['unit']}"


def _verdict(target: dict[str, Any]) -> str:
    return UNMEASURED if target["value"] is None else "met" if target["met"] else "MISSED"


def _figure(section: Record, target: dict[str, Any]) -> str:
    """`2.5x (fp32, V = 32768)`; what is missed says so."""
    where = [str(section["dtype"])] if section.get("dtype") else []
    if section.get("width"):
        where.append(f"V = {section['vocab']}")
    value = UNMEASURED if target["value"] is None else f"{target['value']:.3g}{target['unit']}"
    miss = " MISSED" if _verdict(target) == "MISSED" else ""
    return f"{value}{miss} ({', '.join(where)})" if where else f"{value}{miss}"


def verdicts(sections: Iterable[Record]) -> dict[str, str]:
    """`met`, `MISSED (2 of 8)`, `not measured (1 of 8)` or `not measured` for each promise."""
    result = {}
    judged = [
        (promise(target, section), _verdict(target)) for section in sections for target in section.get("targets", ())
    ]
    for name in PROMISES:
        mine = [verdict for other, verdict in judged if other == name]
        worst = min(mine, key=VERDICTS.index, default=UNMEASURED)
        result[name] = worst if worst == "met" or not mine else f"{worst} ({mine.count(worst)} of {len(mine)})"
    return result


def show(console: Console, sections: list[Record]) -> None:
    """To a terminal."""
    table = Table(title="Promises", title_justify="left", title_style="bold")
    for header in HEADERS:
        table.add_column(header, overflow="fold")
    outcome = verdicts(sections)
    for name, about in PROMISES.items():
        style = STYLES[outcome[name].partition(" (")[0]]
        table.add_row(name, f"[bold]{escape(about)}[/bold]", "", "", f"[{style}]{outcome[name]}[/{style}]")
        for line in (line for line in lines(sections) if line.promise == name):
            verdict = f"[{STYLES[line.verdict]}]{line.verdict}"
            table.add_row("", escape(line.what), line.bound, escape("\n".join(line.figures)), verdict)
        table.add_section()
    console.print(table)


def markdown(sections: list[Record]) -> str:
    """The same for a page."""
    rows = [f"| {' | '.join(HEADERS)} |", "|" + " :-- |" * len(HEADERS)]
    outcome = verdicts(sections)
    for name, about in PROMISES.items():
        rows.append(f"| **{name}** | **{about}** | | | **{outcome[name]}** |")
        for line in (line for line in lines(sections) if line.promise == name):
            figures = ", ".join(line.figures)
            rows.append(f"| {name} | {line.what} | {line.bound} | {figures} | {line.verdict} |")
    return "**Promises**\n\n" + "\n".join(rows)
