"""Hidden states with the head that scores them: what a model hands over instead of logits, and the ops on either."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .functional import policy_loss_from_logits, token_logprobs
from .linear import linear_token_logprobs, policy_loss_from_hidden
from .outputs import LogprobOutput, LossOutput
from .spec import LossSpec


@dataclass(frozen=True)
class HiddenStates:
    """Equal to the logits `softcap*tanh(logit_scale*(hidden @ weight.T + bias)/softcap)`, never allocated.

    Attributes:
        hidden: (N, D) or (B, T, D), the last hidden states of the places that score the targets.
        weight: the output head (V, D), tied or not.
        bias: (V,) or None.
        softcap, logit_scale: as in `token_logprobs`.
        workspace_mib: as in `linear_token_logprobs`.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    logit_scale: float = 1.0
    workspace_mib: float | None = None

    def keywords(self, call: dict[str, Any]) -> dict[str, Any]:
        """The keywords of a call with those that are its own; a soft cap or scale comes from one of the two."""
        own = {"softcap": (self.softcap, None), "logit_scale": (self.logit_scale, 1.0)}
        keywords = {"bias": self.bias, "workspace_mib": self.workspace_mib, **call}
        for name, (value, neutral) in own.items():
            if keywords.get(name, neutral) == neutral:
                keywords[name] = value
            elif value != neutral:
                raise ValueError(
                    f"{name}: HiddenStates brings its own, {value!r}; got {keywords[name]!r} as well; pass one"
                )
        return keywords


#: logits, or what stands for them
Scores = Tensor | HiddenStates


def scored_logprobs(scores: Scores, targets: Tensor, **keywords: Any) -> LogprobOutput:
    """`token_logprobs` or `linear_token_logprobs`, by what the model returned."""
    if isinstance(scores, HiddenStates):
        return linear_token_logprobs(scores.hidden, scores.weight, targets, **scores.keywords(keywords))
    return token_logprobs(scores, targets, **keywords)


def scored_loss(spec: LossSpec, scores: Scores, targets: Tensor, **keywords: Any) -> LossOutput:
    """`policy_loss_from_logits` or `policy_loss_from_hidden`, by what the model returned."""
    if isinstance(scores, HiddenStates):
        return policy_loss_from_hidden(spec, scores.hidden, scores.weight, targets, **scores.keywords(keywords))
    return policy_loss_from_logits(spec, scores, targets, **keywords)
