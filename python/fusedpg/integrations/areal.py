"""AReaL: its actor loss on this library's kernels, over packed micro-batches.

engine.train_batch(batch, loss_fn=actor_loss("ppo", eps_clip=0.2, use_decoupled_loss=True), loss_weight_fn=weight)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..functional import policy_loss
from ..objective import sequence_sums
from ..presets import areal as areal_preset
from ..presets._areal import options_of
from ..presets.base import TrainerSpec
from ..spec import Level
from ._shared import floats, options_from

_TRACKER = "areal.utils.stats_tracker"
#: fields of a micro-batch that AReaL's loss adds a term for
_REFUSED = ("teacher_logp",)


def actor_loss(loss: str = "ppo", *, backend: str = "auto", **options: Any) -> Callable[..., Tensor]:
    """`loss_fn(logprobs, entropy, input_data, **kw)`: a mean over the micro-batch's tokens, which the engine weighs.

    Args:
        loss: `ppo` or `sapo`.
        backend: as in `policy_loss`.
        options: of `PPOActorConfig`.

    Raises:
        ValueError: an option that cannot be honoured, by name.
    """
    decoupled = bool(options.get("use_decoupled_loss"))
    return partial(_loss, spec=areal_preset(loss, **options), decoupled=decoupled, backend=backend)


def actor_loss_of(config: Any, backend: str = "auto") -> Callable[..., Tensor]:
    """The same from a whole `PPOActorConfig`; options at AReaL's own default say nothing."""
    given = options_from(config)
    loss = "sapo" if given.get("use_sapo_loss") else "ppo"
    reads = options_of(loss)
    said = {key: value for key, value in given.items() if key in reads and value != reads[key]}
    if said.get("rejection_sampling") is not None:
        said["rejection_sampling"] = options_from(said["rejection_sampling"])
    if given.get("m2_threshold") is not None:
        said["m2_threshold"] = given["m2_threshold"]
    if given.get("use_decoupled_loss") and given.get("prox_logp_method") == "loglinear":
        raise ValueError(
            "prox_logp_method: the fused loss reads the proximal log-probs; got 'loglinear', which approximates them "
            "inside AReaL's loss; use 'recompute'"
        )
    return actor_loss(loss, backend=backend, **said)


def loss_weight(input_data: Mapping[str, Any]) -> Tensor:
    """`loss_weight_fn`: the tokens that the loss is a mean of."""
    weight: Tensor = input_data["loss_mask"].count_nonzero()
    return weight


def _loss(
    logprobs: Tensor,
    entropy: Tensor | None,
    input_data: Mapping[str, Any],
    *,
    spec: TrainerSpec,
    decoupled: bool,
    backend: str,
    **kwargs: Any,
) -> Tensor:
    """One packed micro-batch; labels are rolled by -1, so position i holds the log-prob of token i + 1.

    `input_data` holds `logprobs` (the sampler's), `advantages` and `loss_mask`, rolled likewise, `cu_seqlens` where the
    loss works on sequences, and the proximal `prox_logp` of the decoupled loss. Further keywords are the engine's.
    """
    for name in _REFUSED:
        if input_data.get(name) is not None:
            raise ValueError(f"{name}: the fused loss has no distillation term; got a tensor; leave it out")
    mask, cu_seqlens = input_data["loss_mask"].bool(), input_data.get("cu_seqlens")
    if spec.level == Level.SEQUENCE and mask.ndim == 1 and cu_seqlens is None:
        raise ValueError("cu_seqlens: importance_sampling_level='sequence' works on sequences; got none; pass it")
    sampled, proximal = input_data["logprobs"], input_data.get("prox_logp")
    if proximal is None and decoupled:
        raise ValueError("prox_logp: the decoupled loss reads it; got none; use prox_logp_method='recompute'")
    out = policy_loss(
        spec,
        logprobs,
        logp_old=sampled if proximal is None else proximal,
        logp_rollout=sampled,
        mask=mask,
        cu_seqlens=cu_seqlens,
        normalizer=spec.normalizer(),
        backend=backend,
        **_advantages(spec, input_data["advantages"], mask, cu_seqlens),
    )
    tracker = sys.modules.get(_TRACKER)
    if tracker is not None:
        tracker.scalar(**floats(out.metrics, "fusedpg/"))
    return out.loss


def _advantages(spec: TrainerSpec, values: Tensor, mask: Tensor, cu_seqlens: Tensor | None) -> dict[str, Any]:
    """A sequence's is the mean of its tokens'."""
    if spec.level != Level.SEQUENCE:
        return {"advantages": values}
    terms = (torch.where(mask, values, 0.0), mask.to(values.dtype))
    total, count = (sequence_sums(t, None if values.ndim == 2 else cu_seqlens) for t in terms)
    return {"sequence_advantages": total / count.clamp(min=1)}
