"""Contenders measured side by side: checked first, then run round-robin, each round from the same state."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .memory import peak_extra_bytes

#: told of each finished run
Tick = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """What a contender computed; None where it computes no such thing (a copy)."""

    loss: Tensor | None = None
    grad: Tensor | None = None
    grad_weight: Tensor | None = None


@dataclass(frozen=True)
class Verdict:
    """Result of a correctness check: the errors against fp64, and what is wrong, if anything."""

    errors: dict[str, float] = field(default_factory=dict)
    wrong: str | None = None


def judged(errors: dict[str, float], limits: dict[str, float]) -> Verdict:
    """Errors against their limits; NaN is over any."""
    bad = [f"{k} error {errors[k]:.1e} > {limits[k]:.1e}" for k in errors if not errors[k] <= limits[k]]
    return Verdict(errors, "; ".join(bad) or None)


@dataclass(frozen=True)
class Contender:
    """One row of a table: `run` is timed, `check` judges what it returned."""

    name: str
    run: Callable[[], Outcome]
    check: Callable[[Outcome], Verdict] = lambda outcome: Verdict()
    ours: bool = False


@dataclass
class Row:
    """The measurements of one contender. `samples` stays empty for a wrong result: its time means nothing."""

    name: str
    ours: bool
    verdict: Verdict
    samples: list[float] = field(default_factory=list)
    peak_bytes: int | None = None

    @property
    def median(self) -> float:
        """Median seconds."""
        return statistics.median(self.samples)

    @property
    def best(self) -> float:
        """Least seconds."""
        return min(self.samples)

    def to_json(self) -> dict[str, Any]:
        """Everything that was measured."""
        timed = {"median_s": self.median, "min_s": self.best} if self.samples else {}
        return {
            "name": self.name,
            "errors_vs_fp64": self.verdict.errors,
            "wrong": self.verdict.wrong,
            **timed,
            "samples_s": self.samples,
            "peak_extra_bytes": self.peak_bytes,
        }


def measure(
    contenders: Sequence[Contender],
    prepare: Callable[[], None],
    rounds: int,
    device: torch.device,
    tick: Tick = lambda what: None,
) -> list[Row]:
    """Warm up and check every contender, take its peak memory, then time the right ones interleaved.

    `prepare` restores the inputs outside the timed region, before every run of every contender. `tick` is told of
    each finished run.
    """
    rows = []
    for contender in contenders:
        prepare()
        row = Row(contender.name, contender.ours, contender.check(contender.run()))
        prepare()
        row.peak_bytes = peak_extra_bytes(contender.run, device)
        rows.append(row)
        tick(f"checked {contender.name}")
    right = [(c, row) for c, row in zip(contenders, rows, strict=True) if row.verdict.wrong is None]
    for number in range(rounds):
        shift = number % max(1, len(right))
        for contender, row in right[shift:] + right[:shift]:
            prepare()
            row.samples.append(_seconds(contender.run, device))
            tick(contender.name)
    return rows


def ticks(contenders: int, rounds: int) -> int:
    """How often `measure` calls `tick` when all contenders are right."""
    return contenders * (rounds + 1)


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    result = run()
    _wait(device)
    elapsed = time.perf_counter() - start
    del result
    return elapsed


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
