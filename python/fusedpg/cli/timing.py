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
#: seconds that a row's timed runs may take together, and the fewest runs of a slow one
BUDGET, FEWEST = 3.0, 2
#: seconds from which the run that measures memory counts as one of them
SLOW = 1.0


@dataclass(frozen=True)
class Outcome:
    """What a contender computed; None where it computes no such thing (a copy)."""

    loss: Tensor | None = None
    grad: Tensor | None = None
    grad_weight: Tensor | None = None
    logp: Tensor | None = None
    entropy: Tensor | None = None


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
    """One row of a table: `run` is timed, `check` judges what it returned.

    `work` is what it has to do of the table's whole: bytes to move or operations, whatever it does beyond them.
    """

    name: str
    run: Callable[[], Outcome]
    check: Callable[[Outcome], Verdict] = lambda outcome: Verdict()
    ours: bool = False
    work: float = 1.0


@dataclass
class Row:
    """The measurements of one contender. `samples` stays empty for a wrong result: its time means nothing."""

    name: str
    ours: bool
    verdict: Verdict
    samples: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    work: float = 1.0

    @property
    def median(self) -> float:
        """Median seconds."""
        return statistics.median(self.samples)

    @property
    def best(self) -> float:
        """Least seconds."""
        return min(self.samples)

    @property
    def spread(self) -> float | None:
        """Distance of the quartiles over the median; None for a single sample."""
        if len(self.samples) < 2:
            return None
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return (high - low) / self.median

    def to_json(self) -> dict[str, Any]:
        """Everything that was measured."""
        timed = {"median_s": self.median, "min_s": self.best, "spread": self.spread} if self.samples else {}
        return {
            "name": self.name,
            "ours": self.ours,
            "work": self.work,
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

    `prepare` restores the inputs outside the timed region, before every run of every contender. A slow contender sits
    some rounds out, evenly over the whole (`plays`), and the run that measures its memory is timed too, unless it is
    ours: that run has lost the memory that calls keep for the next one, so ours also run once more before the rounds.
    `tick` is told of each finished run, or of its absence.
    """
    rows, turns = [], []
    for contender in contenders:
        prepare()
        verdict = contender.check(contender.run())
        row = Row(contender.name, contender.ours, verdict, work=contender.work)
        prepare()
        row.peak_bytes, seconds = _memory_and_seconds(contender.run, device)
        rows.append(row)
        if verdict.wrong is None:
            runs = runs_of(seconds, rounds)
            if seconds > SLOW and runs > 1 and not contender.ours:
                row.samples.append(seconds)
                runs -= 1
            turns.append((contender, row, runs))
        tick(f"checked {contender.name}")
    for contender, _, _ in turns:
        if contender.ours:
            prepare()
            contender.run()
    for number in range(rounds):
        shift = number % max(1, len(turns))
        for contender, row, runs in turns[shift:] + turns[:shift]:
            if plays(number, runs, rounds):
                prepare()
                row.samples.append(_seconds(contender.run, device))
            tick(contender.name)
    return rows


def runs_of(seconds: float, rounds: int) -> int:
    """In how many rounds a contender of `seconds` takes part: whatever its name, by its time alone."""
    return min(rounds, max(FEWEST, round(BUDGET / max(seconds, 1e-9))))


def plays(number: int, runs: int, rounds: int) -> bool:
    """Whether a contender with `runs` of all rounds takes part in this one; they lie evenly."""
    return (number + 1) * runs // rounds > number * runs // rounds


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


def _memory_and_seconds(run: Callable[[], Any], device: torch.device) -> tuple[int | None, float]:
    seconds = 0.0

    def timed() -> Any:
        nonlocal seconds
        start = time.perf_counter()
        result = run()
        _wait(device)
        seconds = time.perf_counter() - start
        return result

    return peak_extra_bytes(timed, device), seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
