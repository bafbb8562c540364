"""The benchmark's suites, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from . import (
    accuracy,
    bench_distill,
    bench_loss,
    bench_scaling,
    bench_static,
    bench_trl,
    hidden_section,
    logits_section,
    scoring_section,
)
from .bench_options import DTYPES, Options
from .report import Job, Section
from .timing import Tick

__all__ = ["DTYPES", "SUITES", "Options", "Suite", "chosen", "run", "total_ticks"]


@dataclass(frozen=True)
class Suite:
    """What a suite measures, in words, and its tables."""

    about: str
    jobs: Callable[[Options], Iterable[Job]]


#: a new suite is one entry; its targets reach the summary through their promise (`P5: ...`)
SUITES: Mapping[str, Suite] = MappingProxyType(
    {
        "logits": Suite("P1, loss and gradient from logits", logits_section.jobs),
        "scoring": Suite("log-probs and entropy without gradient", scoring_section.jobs),
        "hidden": Suite("P2 and P3, loss and gradients from hidden states", hidden_section.jobs),
        "loss": Suite("P4, the loss alone", bench_loss.jobs),
        "distill": Suite("distillation from logits", bench_distill.jobs),
        "trl": Suite("a micro-batch in TRL", bench_trl.jobs),
        "scaling": Suite("time and memory against N, V and D", bench_scaling.jobs),
        "static": Suite("P5, the Triton kernels as traced and compiled, without a GPU", bench_static.jobs),
        "accuracy": Suite("P7, errors against fp64", accuracy.jobs),
    }
)


def chosen(options: Options) -> list[str]:
    """The names of the suites that run, in the table's order."""
    return [name for name in SUITES if name in (options.suites or SUITES)]


def total_ticks(options: Options) -> int:
    """How often `run` calls its `tick`."""
    return sum(job.ticks for name in chosen(options) for job in SUITES[name].jobs(options))


def run(options: Options, tick: Tick = lambda what: None) -> Iterator[Section]:
    """The sections of every chosen suite, each as soon as it is measured."""
    for name in chosen(options):
        for job in SUITES[name].jobs(options):
            yield from job.sections(tick)
