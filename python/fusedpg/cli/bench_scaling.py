"""Scaling: time and memory against N, V and D, ours beside eager PyTorch, TRL's head and the bare work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from fusedpg import dispatch

from . import bench_hidden, bench_logits, hidden_rivals, memory
from .availability import TRL_HEAD, absent
from .bench_options import DTYPES, Options
from .report import Gauge, Job, Section, broken, bytes_gauge, columns, flops_gauge, refusals, rounds_note, row_cells
from .timing import Contender, Row, Tick, measure, ticks

LOGITS_ROWS = (bench_logits.INPLACE, bench_logits.OUT_OF_PLACE, bench_logits.EAGER, bench_logits.COPIES[0])
HIDDEN_ROWS = (bench_hidden.OURS, hidden_rivals.EAGER, TRL_HEAD, bench_hidden.GEMMS)
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Point:
    """One size of a sweep, ready to be measured: its rows, the first of them ours and the last their ceiling."""

    contenders: list[Contender]
    prepare: Callable[[], None]
    gauge: Callable[[Row], Gauge]


def from_logits(shape: Shape, options: Options) -> Point:
    """The loss and its gradient from (N, V) logits; D does not matter."""
    problem = bench_logits.make_problem(shape[0], shape[1], DTYPES[options.dtypes[0]], options.place)
    return Point(
        _some(bench_logits.contenders(problem, compiled=False), LOGITS_ROWS),
        problem.prepare,
        lambda copy: bytes_gauge("GB/s (1R+1W)", problem.bytes, copy),
    )


def from_hidden(shape: Shape, options: Options) -> Point:
    """The loss and its gradients from (N, D) hidden states and a (V, D) head."""
    problem = bench_hidden.make_problem(*shape, DTYPES[options.dtypes[0]], options.place)
    return Point(
        _some(bench_hidden.contenders(problem), HIDDEN_ROWS),
        lambda: None,
        lambda product: flops_gauge(problem.flops, product),
    )


def _some(contenders: list[Contender], names: tuple[str, ...]) -> list[Contender]:
    by_name = {contender.name: contender for contender in contenders}
    return [by_name[name] for name in names if name in by_name]


def jobs(options: Options) -> Iterator[Job]:
    """A table for each size that grows, in the first of the dtypes."""
    sources: list[tuple[str, str, Callable[[Shape, Options], Point]]] = [
        ("logits", "N", from_logits),
        *(("hidden", axis, from_hidden) for axis in ("N", "V", "D")),
    ]
    for source, axis, point in sources:
        shapes = options.sweeps[axis]
        count = len(point((4, 64, 8), options).contenders)
        total = len(shapes) * ticks(count, options.hidden_rounds)
        yield Job(total, partial(section, options, source, axis, point))


def section(options: Options, source: str, axis: str, point: Callable[[Shape, Options], Point], tick: Tick) -> Section:
    """Measure every point of one sweep."""
    device, dtype, rounds = options.place, options.dtypes[0], options.hidden_rounds
    cells: list[list[str]] = []
    records: list[dict[str, Any]] = []
    everyone: list[Row] = []
    unit: Gauge | None = None
    for shape in options.sweeps[axis]:
        here = point(shape, options)
        rows = measure(here.contenders, here.prepare, rounds, device, tick)
        unit = here.gauge(rows[-1])
        sizes = dict(zip(("tokens", "vocab", "width"), shape, strict=True))
        size = str(shape["NVD".index(axis)])
        cells += [[size, *row_cells(row, rows[0], unit)] for row in rows]
        records += [{**row.to_json(), **sizes, "gauge": unit.to_json()} for row in rows]
        everyone += rows
    names = {"logits": "from logits", "hidden": "from hidden states"}
    return Section(
        title=f"Scaling in {axis}: policy loss and gradient {names[source]}, {dtype}{_fixed(options, axis, source)}",
        columns=[axis, *columns("fusedpg", "loss / gradients", unit)],
        cells=cells,
        notes=[
            f"{rounds_note(everyone, rounds)}; the ceiling is '{everyone[-1].name}' of the same shape",
            f"extra memory: {memory.HOW[device.type]}",
            *(absent([TRL_HEAD], device) if source == "hidden" else []),
            *refusals(everyone),
        ],
        record={
            "suite": "scaling",
            "source": source,
            "axis": axis,
            "dtype": dtype,
            "model": options.model,
            "backend": dispatch.resolve("auto", device, DTYPES[dtype]),
            "rows": records,
        },
        broken=broken(everyone),
    )


def _fixed(options: Options, axis: str, source: str) -> str:
    """The sizes that stay."""
    shape = dict(zip("NVD", options.sweeps[axis][0], strict=True))
    kept = {name: size for name, size in shape.items() if name != axis and (source == "hidden" or name == "V")}
    return "".join(f", {name} = {size}" for name, size in kept.items())
