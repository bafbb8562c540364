"""The table of P1 for one dtype, with its targets."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from fusedpg import dispatch

from . import availability, bench_logits, memory
from .bench_logits import COPIES, INPLACE
from .bench_options import DTYPES, Options
from .report import (
    Job,
    Section,
    Target,
    broken,
    bytes_gauge,
    columns,
    refusals,
    rounds_note,
    row_cells,
    speed_target,
)
from .timing import Row, Tick, measure, ticks


def jobs(options: Options) -> Iterator[Job]:
    """A table for each dtype."""
    for name in options.dtypes:
        tiny = bench_logits.make_problem(1, 2, DTYPES[name], options.place)
        count = len(bench_logits.contenders(tiny, options.compiled))
        yield Job(ticks(count, options.rounds), partial(section, options, name))


def section(options: Options, dtype: str, tick: Tick) -> Section:
    """Measure all rows and judge them."""
    device = options.place
    problem = bench_logits.make_problem(options.tokens, options.vocab, DTYPES[dtype], device)
    rows = measure(bench_logits.contenders(problem, options.compiled), problem.prepare, options.rounds, device, tick)
    by_name = {row.name: row for row in rows}
    ours = by_name[INPLACE]
    gauge = bytes_gauge("GB/s (1R+1W)", problem.bytes, by_name[COPIES[0]])
    logits_bytes = problem.bytes // 2
    targets = _cpu_targets(by_name, logits_bytes) if device.type == "cpu" else [_one_pass_target(ours, by_name)]
    return Section(
        title=f"P1: policy loss and gradient from logits, {dtype}, N = {options.tokens}, V = {options.vocab}",
        columns=columns("in place", "loss / grad", gauge),
        cells=[row_cells(row, ours, gauge) for row in rows],
        targets=targets,
        notes=[
            f"{rounds_note(rows, options.rounds)}; inputs restored before each run outside its time; every row active",
            f"the logits are {logits_bytes / 1e6:.0f} MB; GB/s counts one read and one write of them; {gauge.note()}",
            f"extra memory: {memory.HOW[device.type]}",
            *availability.absent(bench_logits.OTHERS, device),
            *refusals(rows),
        ],
        record={
            "suite": "P1",
            "tokens": options.tokens,
            "vocab": options.vocab,
            "dtype": dtype,
            "bytes": problem.bytes,
            "gauge": gauge.to_json(),
            "backend": dispatch.resolve("auto", device, DTYPES[dtype]),
            "rows": [row.to_json() for row in rows],
        },
        broken=broken(rows),
    )


def _cpu_targets(rows: dict[str, Row], logits_bytes: int) -> list[Target]:
    ours = rows[INPLACE]
    result = [
        speed_target(f"in place against {name}", rows.get(name), ours, bound) for name, bound in bench_logits.TARGETS
    ]
    copied, multiplied = (rows[name] for name in COPIES)
    value, also = None, ""
    if ours.samples:
        value = ours.median / copied.median
        also = (
            f"of minima {ours.best / copied.best:.3g}x; against '{multiplied.name}', which reads no second buffer, "
            f"{ours.median / multiplied.median:.3g}x"
        )
    copy = Target("in place / a copy of the same bytes", value, bench_logits.COPY_TARGET, at_least=False, also=also)
    extra = None if ours.peak_bytes is None else 100 * ours.peak_bytes / logits_bytes
    bound = 100 * bench_logits.MEMORY_TARGET
    return [*result, copy, Target("in place, extra memory / logits", extra, bound, at_least=False, unit="%")]


def _one_pass_target(ours: Row, rows: dict[str, Row]) -> Target:
    """On a GPU: the share of the copy's rate."""
    share = 100 * rows[COPIES[0]].median / ours.median if ours.samples else None
    return Target("P6: in place, share of a copy's rate", share, bench_logits.GPU_TARGET, at_least=True, unit="%")
