"""What the public ops return."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .batch import Batch
from .metrics import Metrics
from .spec import LossSpec


@dataclass(frozen=True)
class LogprobOutput:
    """Per-token results in the shape of `targets`, fp32 (fp64 for fp64 logits), differentiable.

    Attributes:
        logp: log-probabilities in nats; 0 at masked places.
        entropy: of the same tempered distribution, in nats; None unless it was asked for.
        backend: what ran: "cpu", "triton" or "reference".
    """

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
    """One policy loss, as the ops return it; per-token tensors have the shape of `targets`, fp32 (fp64 for fp64 input).

    Attributes:
        loss: 0-d, differentiable; numerator / (normalizer or weight), exactly 0 and connected when that is 0.
        numerator: 0-d, detached: sum of the tokens' losses times their weights.
        weight: 0-d, detached: the units of the reduction (tokens, or sequences); sums of numerator and weight over
            micro-batches and ranks, divided once, are the unsplit loss.
        logp: log-probs in nats, detached: what another update takes as `logp_old`.
        entropy: in nats, detached; None unless it was asked for.
        per_token: each token's loss without its weight, detached.
        metrics: `Metrics`, read lazily; empty with `metrics="none"`.
        backend: what ran: "cpu", "triton" or "reference".
    """

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
