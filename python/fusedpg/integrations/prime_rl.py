"""prime-rl: a custom loss over one sequence.

[trainer.loss]
type = "custom"
import_path = "fusedpg.integrations.prime_rl.fused_loss"
kwargs = { loss = "cispo", epsilon_high = 4.0 }
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Any

import torch

from ..functional import policy_loss
from ..losses import loss_spec
from ..presets import losses_of
from ..presets import prime_rl as prime_rl_preset
from ..spec import LossSpec
from ._shared import advantages_of, per_token_loss, refuse_terms

_MODULE = "prime_rl.trainer.rl.loss"
#: fields of LossInputs whose term no loss here has
_REFUSED = ("trainer_mask_logprobs", "student_topk_logprobs", "rollout_is_weights")


def fused_loss(inputs: Any, loss: str = "default", backend: str = "auto", **options: Any) -> Any:
    """A loss of one sequence: the sum over its tokens, which prime-rl divides by its global count.

    Args:
        inputs: prime-rl's LossInputs. The sampler's log-probs are also the ratio's denominator.
        loss: `default` or `ipo` under prime-rl's option names, or a name of `fusedpg.CATALOGUE` under its knobs.
        backend: as in `policy_loss`.
        options: of the loss.

    Returns:
        prime-rl's `LossOutputs`.

    Raises:
        ValueError: an option or a term that cannot be honoured, by name.
    """
    spec = loss_of(loss, **options)
    for name in _REFUSED:
        if getattr(inputs, name, None) is not None:
            raise ValueError(f"{name}: the fused loss has no term that reads it; got a tensor; switch it off")
    mask, weights = inputs.loss_mask, getattr(inputs, "loss_weights", None)
    reference = getattr(inputs, "ref_logprobs", None)
    if reference is None:
        reference = getattr(inputs, "teacher_logprobs", None)
    cu_seqlens = torch.arange(2, device=mask.device) * mask.shape[0] if spec.needs_sequences else None
    fields: dict[str, Any] = {
        "logp_old": inputs.inference_logprobs,
        "logp_rollout": inputs.inference_logprobs,
        "logp_ref": reference if spec.needs_logp_ref else None,
        "cu_seqlens": cu_seqlens,
        "backend": backend,
        **advantages_of(spec, inputs.advantages, mask, cu_seqlens),
    }
    if weights is None:
        out = policy_loss(spec, inputs.trainer_logprobs, mask=mask, normalizer=1.0, **fields)
        total = out.loss
    else:
        x, out = per_token_loss(spec, inputs.trainer_logprobs, mask=mask, **fields)
        total = torch.where(mask, x * weights, 0.0).sum()
    return import_module(_MODULE).LossOutputs(loss=total, metrics=dict(out.metrics))


def loss_of(loss: str = "default", **options: Any) -> LossSpec:
    """The spec of `[trainer.loss.kwargs]`: check a config before a run.

    Raises:
        ValueError: an option or a term that cannot be honoured, by name.
    """
    try:
        return _cached(loss, tuple(sorted(options.items())))
    except TypeError:  # an option that cannot be hashed
        return _build(loss, options)


@lru_cache(64)
def _cached(loss: str, options: tuple[tuple[str, Any], ...]) -> LossSpec:
    return _build(loss, dict(options))


def _build(loss: str, options: dict[str, Any]) -> LossSpec:
    if loss in losses_of("prime_rl"):
        return prime_rl_preset(loss, **options)
    for key in ("reduction", "max_tokens"):
        if key in options:
            raise ValueError(f"{key}: prime-rl sums over tokens and divides by its global count; drop the option")
    spec = loss_spec(loss, **options)
    if spec.reduction == "seq-mean-token-sum-norm":
        raise ValueError(f"loss: {loss!r} divides by sequences, which prime-rl does not count; use 'ppo_clip'")
    spec = spec.replace(reduction="token-sum")
    refuse_terms(
        spec,
        "prime-rl's LossInputs",
        entropy="it carries no entropy",
        observations="it carries no observation mask",
        whole_batch="it holds one sequence",
    )
    return spec
