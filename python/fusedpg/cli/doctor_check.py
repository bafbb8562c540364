"""The self-test of `doctor`: losses of the catalogue against fp64, within the tests' own budgets, in limited time."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fusedpg import LossSpec, loss_spec, selftest

#: one loss for each path through the kernels, with the terms that it is tested with
LOSSES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("ppo_clip", {"kl": "k3", "kl_coef": 0.1, "entropy_coef": 0.05}),
    ("gspo", {"entropy_coef": 0.05}),
    ("cispo", {}),
    ("gspo_token", {"kl": "k2", "kl_coef": 0.1, "reduction": "seq-mean-token-mean"}),
    ("dapo", {"is_correction": "truncate", "is_high": 1.1}),
    ("echo", {"obs_coef": 0.3}),
    ("kl_cov", {"kl_cov_ratio": 0.4, "ppo_kl_coef": 0.5}),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """One call of the self-test."""

    loss: str
    knobs: dict[str, Any]
    dtype: torch.dtype
    packed: bool

    @property
    def label(self) -> str:
        """`gspo bfloat16 packed`."""
        return f"{self.loss} {str(self.dtype).removeprefix('torch.')} {'packed' if self.packed else 'padded'}"


@dataclass
class Checks:
    """What was compared, and what differed."""

    #: backend -> cases compared, and how many there are
    done: dict[str, int] = field(default_factory=dict)
    total: int = 0
    seconds: float = 0.0
    #: (backend, what is wrong)
    problems: list[tuple[str, str]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """All fields, a problem with its backend's name."""
        problems = [{"backend": backend, "problem": problem} for backend, problem in self.problems]
        return {**vars(self), "problems": problems}

    def lines(self) -> list[str]:
        """A line for each backend, then one for each problem."""
        wrong = [backend for backend, _ in self.problems]
        lines = []
        for backend, count in self.done.items():
            rest = "" if count == self.total else f"; {self.total - count} left out to stay within the time"
            lines.append(f"self-test: {backend}: {count} cases, {wrong.count(backend)} wrong{rest}")
        return lines + [f"FAILED: {backend}: {problem}" for backend, problem in self.problems]


def cases() -> list[Case]:
    """Every loss once, in dtypes and layouts that take turns, then the rest of the product."""
    product = [
        (turn, Case(loss, knobs, dtype, packed))
        for number, (loss, knobs) in enumerate(LOSSES)
        for i, dtype in enumerate(DTYPES)
        for j, packed in enumerate((True, False))
        for turn in [(i - number) % 3 + 3 * ((j - number) % 2)]
    ]
    return [case for _, case in sorted(product, key=lambda pair: pair[0])]


def run(backends: Sequence[str], seconds: float) -> Checks:
    """Each backend against fp64 for its share of the time; its first case runs in any case."""
    todo, expected = cases(), Expected()
    checks, start = Checks(total=len(todo)), time.perf_counter()
    for backend in backends:
        checks.done[backend] = 0
        stop = time.perf_counter() + seconds / len(backends)
        for case in todo:
            compare(case, backend, checks, expected)
            if time.perf_counter() > stop:
                break
    checks.seconds = round(time.perf_counter() - start, 2)
    return checks


class Expected:
    """Batch, truth and budget of each case, made once for all backends."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[LossSpec, selftest.Case, selftest.Result, selftest.Rounding]] = {}

    def of(self, case: Case) -> tuple[LossSpec, selftest.Case, selftest.Result, selftest.Rounding]:
        """(spec, batch, what fp64 gives, how far fp32 is from it)."""
        if case.label not in self._made:
            spec = loss_spec(case.loss, **case.knobs)
            batch = selftest.make_case(spec, dtype=case.dtype, packed=case.packed)
            want = selftest.truth(spec, batch)
            self._made[case.label] = (spec, batch, want, selftest.rounding(spec, batch, want))
        return self._made[case.label]


def compare(case: Case, backend: str, checks: Checks, expected: Expected) -> None:
    """One case on one backend; an exception is a problem like any other."""
    checks.done[backend] += 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Triton's interpreter reports the NaN of masked rows
        spec, batch, want, fp32 = expected.of(case)
        try:
            got = selftest.run(spec, batch, backend)
        except Exception as error:
            checks.problems.append((backend, f"{case.label}: {type(error).__name__}: {error}"))
            return
    problem = selftest.disagreement(got, want, fp32, case.dtype, case.label)
    if problem is not None:
        checks.problems.append((backend, problem))
