"""verl's policy losses on the fused ops: verl's config to a spec, its micro-batch to its scalar and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..functional import policy_loss
from ..outputs import LossOutput
from ..presets import verl as verl_preset
from ..presets._verl import ENTRY_OF, options_of
from ..presets.base import TrainerSpec
from ..spec import Level
from ._verl_batch import MicroBatch
from ._verl_metrics import policy_metrics

PREFIX = "fusedpg_"
LOSSES = tuple(ENTRY_OF)
_BYPASS = {"ppo_clip": "vanilla", "reinforce": "gpg"}
_PINNED = ("sapo", "geo_mean")
#: options that verl keeps in `policy_loss`
_NESTED = ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta")
_CORRECTION: Mapping[str, Any] = {
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_is_batch_normalize": False,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
}


@dataclass(frozen=True)
class PolicyLoss:
    """One of verl's policy losses under verl's signature; a plain value, so it pickles to Ray's workers.

    Every number is verl's: its options from `config`, its normalisation from `config.global_batch_info`, its metrics.
    bypass_mode forms weights, rejections and their metrics with verl's own `rollout_corr_helper`.

    Args:
        loss: verl's name of it.
        backend: "auto", "cpu", "triton" or "reference".
    """

    loss: str
    backend: str = "auto"

    @property
    def __name__(self) -> str:  # what the registry's users print
        return PREFIX + self.loss

    def __call__(
        self,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """(loss, metrics) of a micro-batch of (B, T) tensors.

        Raises:
            ValueError: an option that the loss refuses, by name.
        """
        if config is None:
            raise ValueError(f"config: {self.__name__} reads its options and normalisation from it; got None")
        batch = MicroBatch(log_prob, old_log_prob, advantages, response_mask.bool(), rollout_is_weights)
        counts = dict(config.get("global_batch_info") or {})
        out, metrics = policy_term(self.loss, config, loss_agg_mode, batch, counts, self.backend)
        return out.loss, metrics


def policy_term(
    loss: str,
    config: Any,
    mode: str,
    batch: MicroBatch,
    counts: Mapping[str, Any],
    backend: str,
    terms: Mapping[str, Any] | None = None,
) -> tuple[LossOutput, dict[str, float]]:
    """The loss, with the KL and entropy terms of `terms`, and the metrics of its policy term."""
    extra: dict[str, float] = {}
    bypassed = loss == "bypass_mode"
    if bypassed:
        batch, extra = _corrected(config, batch)
    loss = resolved(loss, config)
    scale = counts.get("loss_scale_factor") or batch.shape[1]
    spec = spec_of(loss, config, mode, scale, terms)
    rows = {"rows": batch.shape[0]} if loss == "geo_mean" else {}
    normalizer = spec.normalizer(**{**counts, "loss_scale_factor": None, **rows})
    weights = batch.is_weights
    given: dict[str, Any] = {"advantages": batch.advantages}
    if spec.level == Level.SEQUENCE:
        given = {"sequence_advantages": _one_each(loss, batch)}
        weights = None if weights is None else _geometric_mean(weights, batch)
    out = policy_loss(
        spec,
        batch.logp,
        entropy=batch.entropy if spec.entropy_coef else None,
        logp_old=batch.logp_old,
        mask=batch.mask,
        logp_ref=batch.logp_ref,
        is_weights=weights,
        cu_seqlens=batch.cu_seqlens,
        normalizer=normalizer or None,  # of a global batch without tokens, where verl divides 0 by 0
        backend=backend,
        **given,
    )
    named = "reinforce" if bypassed and loss == "gpg" else loss
    return out, {**policy_metrics(named, spec, out, batch), **extra}


# ------------------------------------------------------------------ the spec of a config


def resolved(loss: str, config: Any) -> str:
    """The loss that verl computes under a name; bypass_mode has two."""
    if loss != "bypass_mode":
        return loss
    kind = correction_of(config).get("loss_type", "ppo_clip")
    if kind not in _BYPASS:
        raise ValueError(f"loss_type: bypass_mode expects one of {', '.join(map(repr, _BYPASS))}; got {kind!r}")
    return _BYPASS[kind]


def spec_of(
    loss: str, config: Any, mode: str, scale: int | None = None, terms: Mapping[str, Any] | None = None
) -> TrainerSpec:
    """The preset of a config; `scale` is the divisor of seq-mean-token-sum-norm, `terms` the KL and entropy options."""
    policy = config.get("policy_loss") or {}
    own = {key: (policy if key in _NESTED else config).get(key, value) for key, value in options_of(loss).items()}
    own |= terms or {}
    if loss not in _PINNED or terms:
        own["loss_agg_mode"] = mode
        if mode == "seq-mean-token-sum-norm":
            own["loss_scale_factor"] = scale
    return _built(loss, tuple(sorted(own.items())))


@lru_cache(maxsize=512)
def _built(loss: str, options: tuple[tuple[str, Any], ...]) -> TrainerSpec:
    return verl_preset(loss, **dict(options))


# ------------------------------------------------------------------ what verl forms before its loss


def correction_of(config: Any) -> Any:
    """`policy_loss.rollout_correction`, which bypass_mode cannot do without."""
    found = (config.get("policy_loss") or {}).get("rollout_correction")
    if found is None:
        raise ValueError(
            "rollout_correction: bypass_mode reads policy_loss.rollout_correction; got None; set "
            "algorithm.rollout_correction.bypass_mode=True, which passes it on"
        )
    return found


@torch.no_grad()
def _corrected(config: Any, batch: MicroBatch) -> tuple[MicroBatch, dict[str, float]]:
    """verl's rollout correction: its weights (for "reinforce"), its mask after rejection, its metrics."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    options = correction_of(config)
    logp, old, mask = (batch.padded(t) for t in (batch.logp.detach(), batch.logp_old, batch.mask))
    empty = not bool(mask.any())
    if empty:  # verl raises; the metrics of an on-policy batch keep every rank's list as long as the others'
        logp, old, mask = torch.zeros_like(logp), torch.zeros_like(old), torch.ones_like(mask)
    proto: Any
    proto, kept, metrics = compute_rollout_correction_and_rejection_mask(
        old_log_prob=logp,
        rollout_log_prob=old,
        response_mask=mask,
        **{key: options.get(key, value) for key, value in _CORRECTION.items()},
    )
    applied = proto is not None and resolved("bypass_mode", config) == "gpg"
    weights = batch.like(proto.batch["rollout_is_weights"]) if applied else None
    if empty:
        return batch.replace(is_weights=weights), metrics
    return batch.replace(mask=batch.like(kept.bool()), is_weights=weights), metrics


def _one_each(loss: str, batch: MicroBatch) -> Tensor:
    """The advantage of each sequence, (B,)."""
    mask, values = batch.padded(batch.mask), batch.padded(batch.advantages)
    low = torch.where(mask, values, torch.inf).amin(1)
    high = torch.where(mask, values, -torch.inf).amax(1)
    if bool((low < high).any()):
        raise ValueError(
            f"advantages: {loss!r} has one ratio a sequence and expects one advantage a sequence, as GRPO's; got "
            "tokens of one sequence with different ones; use 'gspo'"
        )
    return torch.where(mask.any(1), low, 0.0)


def _geometric_mean(weights: Tensor, batch: MicroBatch) -> Tensor:
    """What verl's geo_mean multiplies by: exp of the mean of log(weight + 1e-10), at each token of a sequence."""
    counts = batch.sequence_sum(torch.ones_like(weights)) + 1e-8
    return batch.spread((batch.sequence_sum((weights + 1e-10).log()) / counts).exp())
