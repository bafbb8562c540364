"""torchforge: a loss for `TitanTrainer(loss=...)`, straight from logits.

TitanTrainer(loss=fusedpg.integrations.torchforge.logits_loss("cispo", epsilon_high=4.0), ...)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..functional import policy_loss_from_logits
from ..spec import Level, LossSpec
from ._shared import refuse_terms, spec_of

#: names of torchforge's recipes -> ours
_TARGETS = {
    "ref_logprobs": "logp_ref",
    "old_logprobs": "logp_old",
    "generator_logprobs": "logp_rollout",
}


def logits_loss(
    loss: str | LossSpec = "grpo", *, temperature: float = 1.0, backend: str = "auto", **knobs: Any
) -> Callable[..., Tensor]:
    """`f(logits, **targets) -> scalar`, which the trainer compiles.

    Targets: `response` (B, R) token ids, scored by the rows of `logits` (B, P+R, V) before each; `advantages` (B,),
    (B, 1) or (B, R); `padding_mask` or `loss_mask` (B, R); `old_logprobs`, `ref_logprobs`, `generator_logprobs` (B, R)
    where the loss reads them. Without `old_logprobs` the loss runs on-policy.

    Args:
        loss: a name of `fusedpg.CATALOGUE`, or a spec.
        temperature: of the log-probs.
        backend: as in `policy_loss_from_logits`.
        knobs: as in `loss_spec`.

    Raises:
        ValueError: an unknown loss or knob, or a term that the targets have no data for, by name.
    """
    spec = spec_of(loss, knobs)
    refuse_terms(
        spec,
        "torchforge's loss",
        observations="the targets carry no observation mask",
        whole_batch="a rank holds a part of the batch",
    )

    def loss_fn(logits: Tensor, **targets: Tensor) -> Tensor:
        if hasattr(logits, "placements"):
            raise ValueError("logits: expected the whole vocabulary; got a DTensor; run with tensor parallelism 1")
        ids, advantages = targets.pop("response"), targets.pop("advantages")
        mask = targets.pop("padding_mask", None)
        mask = targets.pop("loss_mask", None) if mask is None else mask
        unknown = sorted(set(targets) - set(_TARGETS))
        if unknown:
            raise ValueError(f"targets: expected {', '.join(_TARGETS)}; got {unknown[0]!r}; leave it out")
        fields = {_TARGETS[name]: value for name, value in targets.items()}
        run = spec if "logp_old" in fields or spec.anchor.name != "OLD" else spec.replace(anchor=type(spec.anchor).SELF)
        whole = advantages.ndim == 1 or advantages.shape[1] == 1
        if not whole and spec.level == Level.SEQUENCE:
            raise ValueError(
                "advantages: the loss has one ratio a sequence; got one value a token; pass (B,) or (B, 1)"
            )
        fields["sequence_advantages" if whole else "advantages"] = advantages.reshape(-1) if whole else advantages
        out = policy_loss_from_logits(
            run,
            logits[:, -ids.shape[1] - 1 : -1],
            ids,
            mask=None if mask is None else mask != 0,
            temperature=temperature,
            metrics="none",
            backend=backend,
            **fields,  # type: ignore[arg-type]
        )
        return out.loss

    return loss_fn
