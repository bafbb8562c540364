"""The tables of the scoring suite: from logits and from hidden states, for each dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from fusedpg import dispatch

from . import availability, bench_scoring, memory
from .bench_options import DTYPES, Options
from .bench_scoring import COPY, EAGER, OURS, OURS_LOGP, PRODUCT, PRODUCT_FP32
from .report import (
    Gauge,
    Job,
    Section,
    Target,
    broken,
    bytes_gauge,
    columns,
    flops_gauge,
    refusals,
    rounds_note,
    row_cells,
    speed_target,
)
from .timing import Row, Tick, measure, ticks

#: factor that eager must take of ours from logits
EAGER_TARGET = 3.0
#: on a GPU, percent of a copy's rate
GPU_TARGET = 90.0


def jobs(options: Options) -> Iterator[Job]:
    """Two tables for each dtype."""
    device = options.place
    for name in options.dtypes:
        tiny = bench_scoring.make_logits(1, 2, DTYPES[name], device)
        count = len(bench_scoring.logits_contenders(tiny, options.compiled))
        yield Job(ticks(count, options.rounds), partial(from_logits, options, name))
        tiny_head = bench_scoring.make_hidden(1, 2, 2, DTYPES[name], device)
        count = len(bench_scoring.hidden_contenders(tiny_head))
        yield Job(ticks(count, options.hidden_rounds), partial(from_hidden, options, name))


def from_logits(options: Options, dtype: str, tick: Tick) -> Section:
    """One read of the logits is all that is needed."""
    device, tokens = options.place, options.scored_tokens
    problem = bench_scoring.make_logits(tokens, options.vocab, DTYPES[dtype], device)
    contenders = bench_scoring.logits_contenders(problem, options.compiled)
    rows = measure(contenders, lambda: None, options.rounds, device, tick)
    by_name = {row.name: row for row in rows}
    ours = by_name[OURS]
    gauge = bytes_gauge("GB/s (1R)", problem.bytes, by_name[COPY])
    if device.type == "cuda":
        share = gauge.share(by_name[OURS_LOGP])
        targets = [Target("P6: log-probs, share of a copy's rate", share, GPU_TARGET, at_least=True, unit="%")]
    else:
        targets = [speed_target(f"against {EAGER}", by_name[EAGER], ours, EAGER_TARGET)]
    return _table(
        f"Scoring: log-probs and entropy from logits, {dtype}, N = {tokens}, V = {options.vocab}",
        rows,
        gauge,
        targets,
        notes=[
            f"{rounds_note(rows, options.rounds)}; no gradient",
            f"the logits are {problem.bytes / 1e6:.0f} MB; GB/s counts one read of them; a copy reads and writes, and "
            f"counts twice; {gauge.note()}",
        ],
        absent=availability.absent(bench_scoring.LOGITS_OTHERS, device),
        device=device,
        record={"source": "logits", "tokens": tokens, "vocab": options.vocab, "dtype": dtype, "bytes": problem.bytes},
    )


def from_hidden(options: Options, dtype: str, tick: Tick) -> Section:
    """One product is all that is needed."""
    device, rounds, tokens = options.place, options.hidden_rounds, options.scored_tokens
    problem = bench_scoring.make_hidden(tokens, options.vocab, options.width, DTYPES[dtype], device)
    rows = measure(bench_scoring.hidden_contenders(problem), lambda: None, rounds, device, tick)
    products = [row for row in rows if row.name in (PRODUCT, PRODUCT_FP32)]
    gauge = flops_gauge(problem.flops, *products)
    sizes = f"N = {tokens}, V = {options.vocab}, D = {options.width}"
    return _table(
        f"Scoring: log-probs and entropy from hidden states, {dtype}, {sizes}",
        rows,
        gauge,
        targets=[],
        notes=[f"{rounds_note(rows, rounds)}; no gradient; TFLOP/s counts one product (2NDV); {gauge.note()}"],
        absent=availability.absent(bench_scoring.HIDDEN_OTHERS, device),
        device=device,
        record={
            "source": "hidden",
            "tokens": tokens,
            "vocab": options.vocab,
            "width": options.width,
            "dtype": dtype,
            "model": options.model,
            "flops": problem.flops,
        },
    )


def _table(
    title: str,
    rows: Sequence[Row],
    gauge: Gauge,
    targets: list[Target],
    notes: list[str],
    absent: list[str],
    device: torch.device,
    record: dict[str, Any],
) -> Section:
    ours = next(row for row in rows if row.name == OURS)
    return Section(
        title=title,
        columns=columns("fusedpg", "logp / entropy", gauge),
        cells=[row_cells(row, ours, gauge) for row in rows],
        targets=targets,
        notes=[*notes, f"extra memory: {memory.HOW[device.type]}", *absent, *refusals(list(rows))],
        record={
            "suite": "scoring",
            **record,
            "backend": dispatch.resolve("auto", device, DTYPES[record["dtype"]]),
            "gauge": gauge.to_json(),
            "rows": [row.to_json() for row in rows],
        },
        broken=broken(list(rows)),
    )
