"""The table of P2 and P3 for one dtype and vocabulary, with its targets."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from fusedpg import dispatch
from fusedpg.linear_plan import MIB

from . import availability, bench_hidden, memory
from .availability import LIGER_CHUNKED, LIGER_SCALED, TRL_HEAD
from .bench_hidden import GEMMS, GEMMS_FP32, IDLE, INACTIVE, OURS, SCORE, Problem
from .bench_options import DTYPES, Options
from .report import (
    Gauge,
    Job,
    Section,
    Target,
    broken,
    columns,
    flops_gauge,
    refusals,
    rounds_note,
    row_cells,
    speed_target,
)
from .timing import Row, Tick, measure, ticks

PRODUCTS_TARGET, RIVAL_TARGET, INACTIVE_TARGET = 1.10, 1.3, 0.6
#: on a GPU
GPU_PRODUCTS_TARGET = 1.12
#: memory and time of N rows against N/2 and against the plan
FLAT_TARGET, DOUBLE_TARGET = 1.1, 2.1


def jobs(options: Options) -> Iterator[Job]:
    """A table for each dtype and each head."""
    for name in options.dtypes:
        for tokens, vocab in options.heads:
            count = rows_of(DTYPES[name], vocab, options.place)
            shape = (tokens, vocab, options.width)
            yield Job(ticks(count, options.hidden_rounds), partial(section, options, name, shape))


def rows_of(dtype: torch.dtype, vocab: int, device: torch.device) -> int:
    """How many rows a table has: fewer for a large vocabulary."""
    tiny = bench_hidden.make_problem(4, 64, 8, dtype, device)
    count = len(bench_hidden.contenders(tiny))
    halved = sum(availability.runs(name, device) for name in bench_hidden.HALVED)
    return count - halved if vocab > bench_hidden.HALVED_VOCAB else count


def section(options: Options, dtype: str, shape: tuple[int, int, int], tick: Tick) -> Section:
    """Measure all rows and judge them."""
    device, rounds = options.place, options.hidden_rounds
    problem = bench_hidden.make_problem(*shape, DTYPES[dtype], device)
    rows = measure(bench_hidden.contenders(problem), lambda: None, rounds, device, tick)
    by_name = {row.name: row for row in rows}
    ours = by_name[OURS]
    products = sorted((by_name[name] for name in (GEMMS, GEMMS_FP32) if name in by_name), key=lambda row: row.median)
    gauge = flops_gauge(problem.flops, *products)
    sizes = "N = {}, V = {}, D = {}".format(*shape) + (f", {options.model}" if options.model else "")
    return Section(
        title=f"P2, P3: policy loss and gradients from hidden states, {dtype}, {sizes}",
        columns=columns("fusedpg", "loss / d hidden / d weight", gauge),
        cells=[row_cells(row, ours, gauge) for row in rows],
        targets=_targets(problem, by_name, products),
        notes=[
            rounds_note(rows, rounds),
            "all tokens active where a row says nothing else; TFLOP/s counts the products that the result needs "
            f"(6NDV of the dense loss); {gauge.note()}",
            f"bare products, into buffers that are there, no cast in their time: {_rates(gauge, products)}",
            *_plan_notes(problem),
            f"extra memory: {memory.HOW[device.type]}",
            *bench_hidden.absent(device),
            *refusals(rows),
        ],
        record={
            "suite": "P2",
            **dict(zip(("tokens", "vocab", "width"), shape, strict=True)),
            "dtype": dtype,
            "model": options.model,
            "backend": dispatch.resolve("auto", device, DTYPES[dtype]),
            "flops": problem.flops,
            "gauge": gauge.to_json(),
            "gradient_bytes": problem.gradient_bytes,
            "rows": [row.to_json() for row in rows],
        },
        broken=broken(rows),
    )


def _rates(gauge: Gauge, products: list[Row]) -> str:
    return "; ".join(f"{row.name} {gauge.cells(row)[0]} {gauge.unit}" for row in products)


def _plan_notes(problem: Problem) -> list[str]:
    small = problem.small_workspace()
    return [
        f"plan: {problem.plan()}; in {small} MiB: {problem.plan(small * MIB)}",
        f"the gradients are {problem.gradient_bytes / 1e6:.0f} MB",
    ]


def _targets(problem: Problem, rows: dict[str, Row], products: list[Row]) -> list[Target]:
    ours = rows[OURS]
    rivals = [
        speed_target(f"P2: against {name}", rows.get(name), ours, RIVAL_TARGET)
        for name in (TRL_HEAD, LIGER_CHUNKED, LIGER_SCALED)
    ]
    if problem.hidden.device.type == "cuda":
        return [
            *(_at_most(f"P6: fusedpg / {row.name}", ours, row, GPU_PRODUCTS_TARGET) for row in products),
            *(speed_target(f"P6: against {name}", rows[name], ours, 1.0) for name in rows if _is_rival(rows[name])),
        ]
    halves, whole = (rows[name] for name in bench_hidden.FLAT)
    return [
        *(_at_most(f"P2: fusedpg / {row.name}", ours, row, PRODUCTS_TARGET) for row in products),
        *rivals,
        _at_most(f"P3: {INACTIVE} / dense", rows[f"{OURS}, {INACTIVE}"], ours, INACTIVE_TARGET),
        _backward(rows),
        _at_most("small workspace, time of N / N/2", whole, halves, DOUBLE_TARGET),
        *_memory_targets(problem, halves, whole),
    ]


def _is_rival(row: Row) -> bool:
    return not row.ours and row.work == 1 and row.name not in (GEMMS, GEMMS_FP32)


def _at_most(what: str, row: Row, base: Row, bound: float) -> Target:
    if not row.samples or not base.samples:
        return Target(what, None, bound, at_least=False)
    return Target(what, row.median / base.median, bound, at_least=False, also=f"of minima {row.best / base.best:.3g}x")


def _backward(rows: dict[str, Row]) -> Target:
    """Rows without advantage are scored; what they leave out is the backward: the time beyond the log-probs.

    Of minima: a difference of two medians of a few runs is mostly their noise.
    """
    what = f"P3: backward {IDLE} / dense backward"
    idle, dense, score = rows[f"{OURS}, {IDLE}"], rows[OURS], rows[SCORE]
    if not (idle.samples and dense.samples and score.samples) or dense.best <= score.best:
        return Target(what, None, INACTIVE_TARGET, at_least=False)
    value = (idle.best - score.best) / (dense.best - score.best)
    medians = (idle.median - score.median) / max(dense.median - score.median, 1e-12)
    return Target(what, value, INACTIVE_TARGET, at_least=False, also=f"of minima; of medians {medians:.3g}x")


def _memory_targets(problem: Problem, halves: Row, whole: Row) -> list[Target]:
    """Extra memory beyond the gradients that are returned, of N rows: of N/2 rows, and of the planned workspace."""
    flat, planned = "small workspace, memory of N / N/2", "small workspace, memory / planned"
    if halves.peak_bytes is None or whole.peak_bytes is None:
        return [Target(what, None, FLAT_TARGET, at_least=False) for what in (flat, planned)]
    plan = problem.plan(problem.small_workspace() * MIB)
    half_hidden = problem.hidden.numel() * problem.hidden.element_size() // 2
    one, two = halves.peak_bytes - problem.gradient_bytes + half_hidden, whole.peak_bytes - problem.gradient_bytes
    also = f"{one / 1e6:.1f} and {two / 1e6:.1f} MB beyond the gradients"
    most = plan.workspace + plan.accumulator
    return [
        Target(flat, two / one if one > 0 else None, FLAT_TARGET, at_least=False, also=also),
        Target(planned, two / most, FLAT_TARGET, at_least=False, also=f"{most / 1e6:.1f} MB planned"),
    ]
