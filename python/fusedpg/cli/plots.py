"""PNGs of a finished run: time and memory against the size, percent of the ceiling, accuracy against speed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from . import results
from .regressions import is_ours
from .results import Record

OURS = ("#0b3c8c", "#3f7fd0", "#8fb8e8", "#1c9cb5", "#5a6fd6", "#2b5d9b")
OTHERS = ("#d95f02", "#1b9e77", "#b5179e", "#e6ab02", "#7a5195", "#66a61e", "#a6761d", "#ef476f", "#444444")
BARE = "#8a8a8a"
MARKERS = "osD^vP*X<>"
SIZES = {"N": "tokens", "V": "vocab", "D": "width"}
SIZE_NAMES = {"N": "tokens N", "V": "vocabulary V", "D": "hidden size D"}
SOURCES = {"logits": "from logits", "hidden": "from hidden states"}
LEAST_ERROR = 1e-10
#: below this many MB a row's memory is named instead of drawn: a logarithmic axis has no zero
LEAST_MEMORY = 0.1


def draw(run: Record, folder: Path) -> list[Path]:
    """Every plot that the run has the tables for; the paths of the files."""
    folder.mkdir(parents=True, exist_ok=True)
    timed = [s for s in run["sections"] if any("median_s" in row for row in s.get("rows", ()))]
    figures: list[tuple[str, Figure | None]] = [
        ("time-and-memory", _growth([s for s in timed if s.get("axis") == "N"], memory=True)),
        ("vocabulary-and-width", _growth([s for s in timed if s.get("axis") in ("V", "D")], memory=False)),
        *((f"ceiling-{name}", _ceilings(_of(timed, suite))) for name, suite in _SUITES),
        *((f"accuracy-{name}", _accuracy(_of(timed, suite))) for name, suite in _SUITES),
    ]
    paths = []
    for name, figure in figures:
        if figure is not None:
            paths.append(folder / f"{name}.png")
            figure.savefig(paths[-1], dpi=120)
    return paths


_SUITES = (("logits", "P1"), ("hidden", "P2"), ("scoring", "scoring"))


def _of(sections: list[Record], suite: str) -> list[Record]:
    return [section for section in sections if section["suite"] == suite]


def _panels(rows: int, columns: int, width: float, height: float) -> tuple[Figure, list[list[Axes]]]:
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    return figure, [list(line) for line in grid]


# ------------------------------------------------------------------ time and memory against a size


def _growth(sections: list[Record], memory: bool) -> Figure | None:
    """A column for each sweep: time above, extra memory below."""
    if not sections:
        return None
    figure, grid = _panels(1 + memory, len(sections), 6.2, 4.2)
    for column, section in enumerate(sections):
        axis = section["axis"]
        rows = [row for row in section["rows"] if "median_s" in row]
        styles = _styles(rows)
        _lines(grid[0][column], axis, rows, styles, lambda row: row["median_s"] * 1e3)
        grid[0][column].set_title(
            f"{SOURCES[section['source']]}, {section['dtype']}{_kept(section, rows)}", fontsize=10
        )
        grid[0][column].set_ylabel("loss and gradient, median ms")
        if memory:
            _lines(grid[1][column], axis, rows, styles, _megabytes)
            grid[1][column].set_ylabel("extra memory, MB")
            hidden = [name for name in styles if not any(_megabytes(row) for row in rows if row["name"] == name)]
            if hidden:
                note = f"under {LEAST_MEMORY:g} MB: {', '.join(hidden)}"
                grid[1][column].text(0.02, 0.95, note, transform=grid[1][column].transAxes, fontsize=8)
        grid[0][column].legend(fontsize=8)
    return figure


def _megabytes(row: Record) -> float | None:
    """None where the count is missing or too small to draw."""
    megabytes = (row.get("peak_extra_bytes") or 0) / 1e6
    return megabytes if megabytes > LEAST_MEMORY else None


def _log_ticks(axis: Axis, text: str) -> None:
    """1, 2 and 5 of each decade in plain figures: the default writes powers, or nothing within a decade."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: format(value, text)))
    axis.set_minor_formatter(NullFormatter())


def _lines(
    axes: Axes,
    axis: str,
    rows: list[Record],
    styles: dict[str, dict[str, Any]],
    value: Callable[[Record], float | None],
) -> None:
    sizes = sorted({row[SIZES[axis]] for row in rows})
    for name, style in styles.items():
        points = [(row[SIZES[axis]], value(row)) for row in rows if row["name"] == name]
        shown = [(x, y) for x, y in points if y is not None]
        axes.plot([x for x, _ in shown], [y for _, y in shown], label=name, **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    _log_ticks(axes.yaxis, "g")
    axes.set_xlabel(SIZE_NAMES[axis])
    axes.grid(True, which="both", alpha=0.2)


def _kept(section: Record, rows: list[Record]) -> str:
    """The sizes that stay the same."""
    others = [letter for letter in SIZES if letter != section["axis"]]
    shown = [letter for letter in others if section["source"] == "hidden" or letter == "V"]
    return "".join(f", {letter} = {rows[0][SIZES[letter]]}" for letter in shown)


# ------------------------------------------------------------------ percent of the ceiling


def _ceilings(sections: list[Record]) -> Figure | None:
    """A panel of bars for each table, the fastest on top."""
    shown = [section for section in sections if _shares(section)]
    if not shown:
        return None
    columns = min(2, len(shown))
    lines = -(-len(shown) // columns)
    most = max(len(_shares(section)) for section in shown)
    figure, grid = _panels(lines, columns, 7.2, 1.1 + 0.27 * most)
    for place, section in enumerate(shown):
        _bars(grid[place // columns][place % columns], section)
    for empty in range(len(shown), lines * columns):
        grid[empty // columns][empty % columns].axis("off")
    return figure


def _shares(section: Record) -> list[tuple[Record, float]]:
    """(row, percent of the ceiling's rate) of every timed row, the least first."""
    timed = {row["name"]: row for row in section["rows"] if "median_s" in row}
    top = timed.get(_ceiling(section) or "")
    if top is None:
        return []
    rates = [(row, row.get("work", 1.0) / row["median_s"]) for row in timed.values()]
    of_top = top.get("work", 1.0) / top["median_s"]
    return sorted(((row, 100 * rate / of_top) for row, rate in rates), key=lambda pair: pair[1])


def _ceiling(section: Record) -> str | None:
    """Reports of earlier versions have a ceiling for P1 alone: elsewhere a row's share of the work is not in them."""
    if "gauge" in section:
        name = section["gauge"]["ceiling"]
        return None if name is None else str(name)
    return "copy into a buffer" if section["suite"] == "P1" else None


def _bars(axes: Axes, section: Record) -> None:
    shares = _shares(section)
    ceiling = _ceiling(section)
    names = [row["name"] for row, _ in shares]
    colours = [OURS[1] if is_ours(row) else BARE if not row["errors_vs_fp64"] else OTHERS[0] for row, _ in shares]
    longest = max(share for _, share in shares)
    axes.barh(range(len(shares)), [share for _, share in shares], color=colours, height=0.7)
    for place, (_, share) in enumerate(shares):
        axes.text(share + longest * 0.01, place, f"{share:.0f}", va="center", fontsize=8)
    axes.axvline(100, color="black", linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xlim(0, 1.08 * max(longest, 100))
    axes.set_xlabel(f"% of '{ceiling}'", fontsize=8)
    axes.set_title(results.label(section), fontsize=10)


# ------------------------------------------------------------------ accuracy against speed


def _accuracy(sections: list[Record]) -> Figure | None:
    """A column for each table, a row for each kind of error; left is faster, down is more accurate."""
    whole = [(section, [row for row in section["rows"] if _is_whole(row)]) for section in sections]
    kinds = list(dict.fromkeys(kind for _, rows in whole for row in rows for kind in _errors(row)))
    if not kinds:
        return None
    figure, grid = _panels(len(kinds), len(sections), 4.6, 3.6)
    styles = _styles([row for _, rows in whole for row in rows])
    for line, kind in enumerate(kinds):
        errors = [max(_errors(row)[kind], LEAST_ERROR) for _, rows in whole for row in rows if kind in _errors(row)]
        for column, (_, rows) in enumerate(whole):
            _cloud(grid[line][column], rows, kind, styles)
            # one range for all tables: within one, rounding alone would fill the panel
            grid[line][column].set_ylim(min(errors) / 3, max(errors) * 3)
    for column, section in enumerate(sections):
        grid[0][column].set_title(results.label(section), fontsize=10)
        grid[-1][column].set_xlabel("median ms")
    handles = [grid[0][0].plot([], [], label=name, **{**style, "linestyle": ""})[0] for name, style in styles.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), fontsize=8)
    return figure


def _is_whole(row: Record) -> bool:
    """Timed, checked, and the whole of the table's work: half a batch is no faster way to the same result."""
    return "median_s" in row and bool(row["errors_vs_fp64"]) and row.get("work", 1.0) == 1.0


def _errors(row: Record) -> dict[str, float]:
    """The errors with one name for a gradient of logits, of hidden states and of the weight: the largest of them."""
    found: dict[str, float] = {}
    for name, value in row["errors_vs_fp64"].items():
        kind = "gradient" if name in ("grad", "d hidden", "d weight") else name
        found[kind] = max(value, found.get(kind, 0.0))
    return found


def _cloud(axes: Axes, rows: Iterable[Record], kind: str, styles: dict[str, dict[str, Any]]) -> None:
    for row in rows:
        if kind in _errors(row):
            style = {**styles[row["name"]], "linestyle": "", "markersize": 8}
            axes.plot([row["median_s"] * 1e3], [max(_errors(row)[kind], LEAST_ERROR)], **style)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylabel(f"{kind} error against fp64")
    _log_ticks(axes.xaxis, "g")
    axes.yaxis.set_major_locator(LogLocator(numticks=20))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}"))
    axes.grid(True, which="both", alpha=0.2)


def _styles(rows: Iterable[Record]) -> dict[str, dict[str, Any]]:
    """A colour and a marker for each name: blues are ours, grey is bare work."""
    styles: dict[str, dict[str, Any]] = {}
    ours = others = 0
    for row in rows:
        if row["name"] in styles:
            continue
        if is_ours(row):
            colour, ours = OURS[ours % len(OURS)], ours + 1
        elif not row["errors_vs_fp64"]:
            colour = BARE
        else:
            colour, others = OTHERS[others % len(OTHERS)], others + 1
        line = "--" if colour == BARE else "-"
        styles[row["name"]] = {"color": colour, "marker": MARKERS[len(styles) % len(MARKERS)], "linestyle": line}
    return styles
