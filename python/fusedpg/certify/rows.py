"""One row of the parity table: a trainer's own code against the same loss here, in value and in gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..outputs import LossOutput
from ..spec import LossSpec
from ..weights import Layout, token_weights
from .cases import PolicyBatch

#: largest differences of an fp32 result from the trainer's formula in fp64
VALUE_LIMIT, GRADIENT_LIMIT = 1e-6, 2e-6


@dataclass(frozen=True)
class Row:
    """What was compared, the largest differences over `cases` batches, and what they mean.

    `verdict` is "equal", "differs", "trainer errs" (a known error of the trainer, stated in `note`, that this library
    does not copy) or "not installed".
    """

    trainer: str
    version: str
    loss: str
    reduction: str
    option: str
    cases: int
    value: float
    gradient: float
    verdict: str
    note: str = ""


@dataclass
class Difference:
    """The largest differences over several batches: relative to the sum of the terms, and to the largest gradient."""

    value: float = 0.0
    gradient: float = 0.0
    cases: int = 0

    def add(
        self,
        spec: LossSpec,
        batch: PolicyBatch,
        ours: Callable[[Tensor], LossOutput],
        theirs: Callable[[Tensor], Tensor],
        theirs_batch: PolicyBatch,
        normalizer: float | None = None,
    ) -> None:
        """Compare d loss and d logp: `ours` on `batch.logp`, `theirs` on `theirs_batch.logp` (usually fp64)."""
        leaf = batch.logp.clone().requires_grad_()
        out = ours(leaf)
        (grad,) = torch.autograd.grad(out.loss, leaf, allow_unused=True)
        other = theirs_batch.logp.clone().requires_grad_()
        loss = theirs(other)
        want: Tensor | None = None
        if loss.requires_grad:
            (want,) = torch.autograd.grad(loss, other, allow_unused=True)
        got = torch.zeros_like(other) if grad is None else grad.double()
        expected = torch.zeros_like(got) if want is None else want.double()
        size = max(abs(float(loss.detach())), terms_size(spec, batch, out, normalizer), 1e-30)
        largest = max(float(expected.abs().max()), 1e-30)
        self._note(
            abs(float(out.loss.detach()) - float(loss.detach())) / size, float((got - expected).abs().max()) / largest
        )

    def _note(self, value: float, gradient: float) -> None:
        """A NaN counts as infinitely far."""
        self.value = max(self.value, value if value == value else float("inf"))
        self.gradient = max(self.gradient, gradient if gradient == gradient else float("inf"))
        self.cases += 1

    @property
    def within(self) -> bool:
        """Whether something was compared and both differences are inside the limits."""
        return self.cases > 0 and self.value <= VALUE_LIMIT and self.gradient <= GRADIENT_LIMIT

    def row(self, trainer: str, version: str, loss: str, reduction: str, option: str = "", note: str = "") -> Row:
        """The finished row."""
        verdict = "equal" if self.within else "differs"
        return Row(trainer, version, loss, reduction, option, self.cases, self.value, self.gradient, verdict, note)


def terms_size(spec: LossSpec, batch: PolicyBatch, out: LossOutput, normalizer: float | None) -> float:
    """Sum of |w*x| over the denominator: what the rounding of a sum is measured against when its terms cancel."""
    layout = Layout(batch.mask.shape[0], batch.mask.shape[1], True, None)
    mask = batch.mask.reshape(-1)
    weights = token_weights(
        mask, layout, spec.reduction, spec.max_tokens, dtype=torch.float64, device=batch.mask.device
    )
    x = torch.where(batch.mask, out.per_token.double(), 0.0).reshape(-1)
    denominator = float(weights.weight) if normalizer is None else normalizer
    return float((weights.w * x).abs().sum()) / denominator if denominator else 0.0


def not_installed(trainer: str, version: str, losses: Iterable[str], fix: str) -> list[Row]:
    """Rows that say openly that nothing was compared."""
    return [Row(trainer, version, loss, "", "", 0, 0.0, 0.0, "not installed", fix) for loss in losses]
