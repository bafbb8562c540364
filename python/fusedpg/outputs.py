"""What the public ops return."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .batch import Batch
from .metrics import Metrics
from .spec import LossSpec


@dataclass(frozen=True)
class LogprobOutput:
    """Per-token results in the shape of `targets`, fp32 (fp64 for fp64 logits), differentiable."""

    logp: Tensor
    entropy: Tensor | None
    backend: str


def make_logprobs(
    logp: Tensor, entropy: Tensor | None, targets: Tensor, return_entropy: bool, backend: str
) -> LogprobOutput:
    """Flat results of a backend in the shape of the targets; an entropy that was not asked for is dropped."""
    shape = targets.shape
    kept = entropy.view(shape) if return_entropy and entropy is not None else None
    return LogprobOutput(logp.view(shape), kept, backend)


@dataclass(frozen=True)
class LossOutput:
    """One policy loss; see `policy_loss_from_logits` for the fields."""

    loss: Tensor
    numerator: Tensor
    weight: Tensor
    logp: Tensor
    entropy: Tensor | None
    per_token: Tensor
    metrics: Metrics
    backend: str


def make_output(
    spec: LossSpec,
    batch: Batch,
    backend: str,
    loss: Tensor,
    logp: Tensor,
    entropy: Tensor | None,
    per_token: Tensor,
    sums: Tensor,
    metrics: str,
    return_entropy: bool,
) -> LossOutput:
    """Flat results of a backend in the shape of the call."""
    shape = batch.shape
    vector = Metrics.empty()
    if metrics == "full":
        vector = Metrics.from_sums(
            sums,
            batch.weights.weight,
            batch.weights.sequences,
            has_kl=spec.has_kl,
            has_entropy=entropy is not None,
        )
    return LossOutput(
        loss=loss,
        numerator=sums[0].detach(),
        weight=batch.weights.weight,
        logp=logp.detach().view(shape),
        entropy=entropy.detach().view(shape) if entropy is not None and return_entropy else None,
        per_token=per_token.detach().view(shape),
        metrics=vector,
        backend=backend,
    )


def check_metrics(metrics: str) -> None:
    """`metrics` is one of the two values that `make_output` knows."""
    if metrics not in ("full", "none"):
        raise ValueError(f"metrics: expected 'full' or 'none'; got {metrics!r}")
