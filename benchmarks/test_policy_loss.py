"""The cases of `python -m fusedpg bench` under pytest-benchmark, at a size for everyday use.

    pytest benchmarks                             # FUSEDPG_BENCH_TOKENS, _VOCAB and _WIDTH set the size
    pytest benchmarks --benchmark-compare         # against a run kept with --benchmark-autosave

`make bench` (the command) measures the targets: interleaved, with ratios. Here each case has its own run, for
comparing one revision with another.
"""

import os
from functools import cache

import pytest
import torch

from fusedpg.cli import bench, bench_hidden, bench_logits, bench_loss

TOKENS = int(os.environ.get("FUSEDPG_BENCH_TOKENS", "64"))
VOCAB = int(os.environ.get("FUSEDPG_BENCH_VOCAB", "32000"))
WIDTH = int(os.environ.get("FUSEDPG_BENCH_WIDTH", "256"))
LOSS_TOKENS = int(os.environ.get("FUSEDPG_BENCH_LOSS_TOKENS", "65536"))
ROUNDS = 10
CPU = torch.device("cpu")


@cache
def logits_problem(dtype):
    return bench_logits.make_problem(TOKENS, VOCAB, bench.DTYPES[dtype], CPU)


@cache
def hidden_problem(dtype):
    return bench_hidden.make_problem(TOKENS, VOCAB, WIDTH, bench.DTYPES[dtype], CPU)


@cache
def loss_tokens():
    return bench_loss.make_tokens(LOSS_TOKENS, CPU)


def names(contenders):
    return [contender.name for contender in contenders]


LOGITS = names(bench_logits.contenders(bench_logits.make_problem(1, 2, torch.float32, CPU)))
HIDDEN = [
    (dtype, name)
    for dtype in ("fp32", "bf16")
    for name in names(bench_hidden.contenders(bench_hidden.make_problem(4, 64, 8, bench.DTYPES[dtype], CPU)))
]
LOSS = names(bench_loss.contenders(bench_loss.make_tokens(2, CPU)))


def time_right(benchmark, contender, prepare):
    """Time a contender whose result is right; a wrong one fails."""
    prepare()
    verdict = contender.check(contender.run())
    assert verdict.wrong is None, verdict.wrong
    benchmark.extra_info["errors_vs_fp64"] = verdict.errors
    benchmark.pedantic(contender.run, setup=prepare, rounds=ROUNDS)


@pytest.mark.benchmark(group="policy loss and gradient from logits (P1)")
@pytest.mark.parametrize("name", LOGITS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_logits(benchmark, dtype, name):
    problem = logits_problem(dtype)
    contender = next(c for c in bench_logits.contenders(problem) if c.name == name)
    benchmark.extra_info["bytes_1r1w"] = problem.bytes
    time_right(benchmark, contender, problem.prepare)


@pytest.mark.benchmark(group="policy loss and gradients from hidden states (P2, P3)")
@pytest.mark.parametrize(("dtype", "name"), HIDDEN)
def test_hidden(benchmark, dtype, name):
    problem = hidden_problem(dtype)
    contender = next(c for c in bench_hidden.contenders(problem) if c.name == name)
    benchmark.extra_info["flops"] = problem.flops
    time_right(benchmark, contender, lambda: None)


@pytest.mark.benchmark(group="policy loss and gradient from log-probs (P4)")
@pytest.mark.parametrize("name", LOSS)
def test_loss(benchmark, name):
    contender = next(c for c in bench_loss.contenders(loss_tokens()) if c.name == name)
    time_right(benchmark, contender, lambda: None)
