"""What a resolved loss is called with and what it returns, whichever path runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from .hidden_states import Scores


@dataclass(frozen=True)
class LossInputs:
    """The constants of one call, as `ResolvedLoss.from_logits` documents them."""

    logp_old: Tensor | None = None
    advantages: Tensor | float | None = None
    sequence_advantages: Tensor | None = None
    mask: Tensor | None = None
    obs_mask: Tensor | None = None
    logp_ref: Tensor | None = None
    logp_rollout: Tensor | None = None
    cu_seqlens: Tensor | None = None
    step_tokens: float | Tensor | None = None
    step_sequences: float | Tensor | None = None


@dataclass(frozen=True)
class LogitMap:
    """How logits become log-probs, as in `token_logprobs`."""

    temperature: float | Tensor = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0

    def keywords(self) -> dict[str, Any]:
        """The same as keyword arguments of an op."""
        return {"temperature": self.temperature, "softcap": self.softcap, "logit_scale": self.logit_scale}


@dataclass(frozen=True)
class LossResult:
    """One loss: a differentiable 0-d `loss`, its metrics under rLLM's names, and what ran.

    `path` is "native" (the loss's own kernel) or "custom" (its Python body); `backend` names what did the
    vocabulary-sized work ("cpu", "triton", "reference"), and is "torch" for a body that was handed log-probs.
    `metrics` holds numbers or 0-d tensors; a native loss reads nothing back to the host for them. `logp` (detached) has
    the shape of the tokens.
    """

    loss: Tensor
    metrics: Mapping[str, Any]
    path: str
    backend: str
    logp: Tensor = field(repr=False)


class LossPath(Protocol):
    """One way to run a loss."""

    @property
    def path(self) -> str:
        """ "native" or "custom"."""

    def from_logits(
        self, scores: Scores, targets: Tensor, inputs: LossInputs, logit_map: LogitMap, backend: str
    ) -> LossResult:
        """The loss from logits (N, V) or (B, T, V), or from hidden states."""

    def from_logp(self, logp: Tensor, inputs: LossInputs, backend: str) -> LossResult:
        """The loss from log-probs (N,) or (B, T)."""
