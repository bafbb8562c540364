"""The table of P2 and P3 for one dtype and vocabulary, with its targets."""

from __future__ import annotations

import torch

from fusedpg import dispatch
from fusedpg.linear_plan import MIB

from . import bench_hidden, hidden_rivals, memory
from .bench_hidden import GEMMS, GEMMS_FP32, IDLE, INACTIVE, OURS, SCORE, Problem
from .report import Section, Target, broken, refusals, row_cells, speed_target
from .timing import Row, Tick, measure, ticks

PRODUCTS_TARGET, RIVAL_TARGET, INACTIVE_TARGET = 1.10, 1.3, 0.6
#: memory and time of N rows against N/2 and against the plan
FLAT_TARGET, DOUBLE_TARGET = 1.1, 2.1


def count(dtype: torch.dtype, device: torch.device, rounds: int) -> int:
    """How often `section` calls its `tick`."""
    problem = bench_hidden.make_problem(4, 64, 8, dtype, device)
    return ticks(len(bench_hidden.contenders(problem)), rounds)


def section(
    tokens: int, vocab: int, width: int, dtype: torch.dtype, name: str, rounds: int, device: torch.device, tick: Tick
) -> Section:
    """Measure all rows and judge them."""
    problem = bench_hidden.make_problem(tokens, vocab, width, dtype, device)
    rows = measure(bench_hidden.contenders(problem), lambda: None, rounds, device, tick)
    by_name = {row.name: row for row in rows}
    ours = by_name[OURS]
    products = sorted((by_name[name] for name in (GEMMS, GEMMS_FP32) if name in by_name), key=lambda row: row.median)
    small = problem.small_workspace()
    return Section(
        title=f"P2, P3: policy loss and gradients from hidden states, {name}, N = {tokens}, V = {vocab}, D = {width}",
        columns=["what", "median ms", "min ms", "time / fusedpg", "extra MB", "error loss / d hidden / d weight"],
        cells=[row_cells(row, ours) for row in rows],
        targets=_targets(problem, by_name, products),
        notes=[
            f"{rounds} rounds interleaved in one process; all tokens active where a row says nothing else",
            f"bare products, into buffers that are there, no cast in their time: {_rates(problem, products)}",
            f"plan: {problem.plan()}; in {small} MiB: {problem.plan(small * MIB)}",
            f"the gradients are {problem.gradient_bytes / 1e6:.0f} MB; extra memory: {memory.HOW[device.type]}",
            *bench_hidden.refusals(device),
            *refusals(rows),
        ],
        record={
            "suite": "P2",
            "tokens": tokens,
            "vocab": vocab,
            "width": width,
            "dtype": name,
            "backend": dispatch.resolve("auto", device, dtype),
            "flops": problem.flops,
            "gradient_bytes": problem.gradient_bytes,
            "rows": [row.to_json() for row in rows],
        },
        broken=broken(rows),
    )


def _rates(problem: Problem, products: list[Row]) -> str:
    return "; ".join(f"{row.name} {problem.flops / row.median / 1e9:.0f} GFLOP/s" for row in products)


def _targets(problem: Problem, rows: dict[str, Row], products: list[Row]) -> list[Target]:
    ours = rows[OURS]
    rivals = [
        speed_target(f"P2: against {name}", rows.get(name), ours, RIVAL_TARGET)
        for name in (hidden_rivals.TRL, hidden_rivals.LIGER, hidden_rivals.LIGER_SCALED)
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


def _at_most(what: str, row: Row, base: Row, bound: float) -> Target:
    if not row.samples or not base.samples:
        return Target(what, None, bound, at_least=False)
    return Target(what, row.median / base.median, bound, at_least=False, also=f"of minima {row.best / base.best:.3g}x")


def _backward(rows: dict[str, Row]) -> Target:
    """Rows without advantage are scored; what they leave out is the backward: the time beyond the log-probs."""
    what = f"P3: backward {IDLE} / dense backward"
    idle, dense, score = rows[f"{OURS}, {IDLE}"], rows[OURS], rows[SCORE]
    if not (idle.samples and dense.samples and score.samples) or dense.median <= score.median:
        return Target(what, None, INACTIVE_TARGET, at_least=False)
    value = (idle.median - score.median) / (dense.median - score.median)
    return Target(what, value, INACTIVE_TARGET, at_least=False)


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
