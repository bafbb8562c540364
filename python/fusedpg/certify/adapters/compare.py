"""One row a loss of a drop-in: the largest differences over its options, its batches and a step of micro-batches."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import Tensor

from ..cases import PolicyBatch
from ..rows import Difference, Row
from ..transcription import Case
from .batches import KINDS, Outcome, step_batch

Step = Callable[[Case, PolicyBatch, str], Outcome]
Truth = Callable[[Case, PolicyBatch], Outcome]

TRANSCRIBED = "its formulas in fp64"
OWN_CODE = "its own code"


class Largest(Difference):
    """The largest differences: of the loss relative to the larger of 1 and itself, of the gradient to its largest."""

    def note(self, ours: Outcome, theirs: Outcome) -> None:
        """Take in one step."""
        self.note_each(ours.loss, theirs.loss, [ours.grad], [theirs.grad])

    def note_each(self, loss: Tensor, want: Tensor, grads: Iterable[Tensor], wants: Iterable[Tensor]) -> None:
        """Take in one step of several leaves, each relative to its own largest."""
        size = max(1.0, abs(float(want)))
        far = [_relative(g, w) for g, w in zip(grads, wants, strict=True)]
        self._note(abs(float(loss) - float(want)) / size, max(far))

    def take(self, cases: Iterable[Case], step: Step, want: Truth, backend: str = "auto") -> None:
        """A whole step of every case on every kind of batch."""
        for case in cases:
            for kind in KINDS:
                b = step_batch(kind, case.token_advantages)
                self.note(step(case, b, backend), want(case, b))


def _relative(got: Tensor, want: Tensor) -> float:
    if want.numel() == 0:
        return 0.0
    return float((got.double() - want.double()).abs().max()) / max(float(want.abs().max()), 1e-30)


def rows_of_steps(
    trainer: str,
    version: str,
    cases: Iterable[Case],
    step: Step,
    want: Truth,
    backend: str = "auto",
    beside: str = TRANSCRIBED,
) -> Iterator[Row]:
    """One row a loss."""
    by_loss: dict[str, list[Case]] = {}
    for case in cases:
        by_loss.setdefault(case.loss, []).append(case)
    for loss, own in by_loss.items():
        largest = Largest()
        largest.take(own, step, want, backend)
        yield largest.row(trainer, version, loss, "", beside)


@contextmanager
def stand_in(path: str, **members: Any) -> Iterator[ModuleType]:
    """The trainer's module `path`; where it is not installed, one with these members for as long as the block."""
    try:
        yield importlib.import_module(path)
        return
    except ImportError:
        pass
    parts = path.split(".")
    names = [".".join(parts[: i + 1]) for i in range(len(parts))]
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = []
    vars(sys.modules[path]).update(members)
    try:
        yield sys.modules[path]
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
