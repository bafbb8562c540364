"""The cases of `python -m fusedpg bench` under pytest-benchmark, at a size for everyday use.

    pytest benchmarks                             # FUSEDPG_BENCH_TOKENS, _VOCAB and _WIDTH set the size
    pytest benchmarks -k scoring                  # one suite
    pytest benchmarks --benchmark-compare         # against a run kept with --benchmark-autosave

`make bench` (the command) measures the targets: interleaved, with ratios. Here each case has its own run, for
comparing one revision with another. The suite `accuracy` takes no time and has no case.
"""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch

from fusedpg.cli import (
    bench,
    bench_distill,
    bench_hidden,
    bench_logits,
    bench_loss,
    bench_scaling,
    bench_scoring,
    bench_trl,
)
from fusedpg.cli.timing import Contender

ROUNDS = 10
CPU = torch.device("cpu")
DTYPES = ("fp32", "bf16")


@dataclass(frozen=True)
class Sizes:
    """Of a case; `loss_tokens` those of the loss alone."""

    tokens: int = int(os.environ.get("FUSEDPG_BENCH_TOKENS", "64"))
    vocab: int = int(os.environ.get("FUSEDPG_BENCH_VOCAB", "32000"))
    width: int = int(os.environ.get("FUSEDPG_BENCH_WIDTH", "256"))
    loss_tokens: int = int(os.environ.get("FUSEDPG_BENCH_LOSS_TOKENS", "65536"))


SIZES = Sizes()
#: enough to learn the names of the contenders
TINY = replace(SIZES, tokens=4, width=8, loss_tokens=2)
#: contenders, and what restores their inputs
Case = tuple[list[Contender], Callable[[], None]]


def nothing():
    """For contenders that leave their inputs alone."""


def suite(make, contenders):
    """The contenders of the problem that `make` makes of sizes and a dtype."""

    @cache
    def case(sizes, dtype) -> Case:
        problem = make(sizes, bench.DTYPES[dtype])
        return contenders(problem), getattr(problem, "prepare", nothing)

    return case


def from_logits(make, *more):
    """What makes a problem from logits."""
    return lambda sizes, dtype: make(sizes.tokens, sizes.vocab, dtype, CPU, *more)


def from_hidden(make):
    """What makes a problem from hidden states."""
    return lambda sizes, dtype: make(sizes.tokens, sizes.vocab, sizes.width, dtype, CPU)


def scaling(source, axis, factor):
    """A point of the sweep with one size `factor` times as large."""

    @cache
    def case(sizes, dtype) -> Case:
        grown = replace(sizes, **{axis: factor * getattr(sizes, axis)})
        point = source((grown.tokens, grown.vocab, grown.width), bench.Options(dtypes=(dtype,)))
        return point.contenders, point.prepare

    return case


SUITES = {
    "logits (P1)": (suite(from_logits(bench_logits.make_problem), bench_logits.contenders), DTYPES),
    "hidden (P2, P3)": (suite(from_hidden(bench_hidden.make_problem), bench_hidden.contenders), DTYPES),
    "scoring from logits": (suite(from_logits(bench_scoring.make_logits), bench_scoring.logits_contenders), DTYPES),
    "scoring from hidden states": (
        suite(from_hidden(bench_scoring.make_hidden), bench_scoring.hidden_contenders),
        DTYPES,
    ),
    "loss (P4)": (
        suite(lambda sizes, dtype: bench_loss.make_tokens(sizes.loss_tokens, CPU), bench_loss.contenders),
        ("fp32",),
    ),
    **{
        f"distill {name}": (suite(from_logits(bench_distill.make_problem, name), bench_distill.contenders), DTYPES)
        for name in bench_distill.DIVERGENCES
    },
    "scaling, N x 4, logits": (scaling(bench_scaling.from_logits, "tokens", 4), ("fp32",)),
    **{
        f"scaling, {axis} x 2": (scaling(bench_scaling.from_hidden, axis, 2), ("fp32",))
        for axis in ("tokens", "vocab", "width")
    },
}
CASES = [
    pytest.param(
        case,
        dtype,
        contender.name,
        id=f"{suite}-{dtype}-{contender.name}",
        marks=pytest.mark.benchmark(group=f"{suite}, {dtype}"),
    )
    for suite, (case, dtypes) in SUITES.items()
    for dtype in dtypes
    for contender in case(TINY, dtype)[0]
]


def time_right(benchmark, contender, prepare):
    """Time a contender whose result is right; a wrong one fails."""
    prepare()
    verdict = contender.check(contender.run())
    assert verdict.wrong is None, verdict.wrong
    benchmark.extra_info["errors_vs_fp64"] = verdict.errors
    benchmark.pedantic(contender.run, setup=prepare, rounds=ROUNDS)


@pytest.mark.parametrize(("case", "dtype", "name"), CASES)
def test_case(benchmark, case, dtype, name):
    contenders, prepare = case(SIZES, dtype)
    time_right(benchmark, next(c for c in contenders if c.name == name), prepare)


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    if (reason := bench_trl.refusal()) is not None:
        pytest.skip(reason)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bench_trl.contenders(bench_trl.make_runs(Path(tmp_path_factory.mktemp("trl")), SIZES.vocab))


@pytest.mark.benchmark(group="trl, fp32")
@pytest.mark.parametrize("name", [bench_trl.OURS, bench_trl.STOCK])
@pytest.mark.filterwarnings("ignore")
def test_trl(benchmark, trainers, name):
    time_right(benchmark, next(c for c in trainers if c.name == name), nothing)
