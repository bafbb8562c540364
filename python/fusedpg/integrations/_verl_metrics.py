"""verl's metrics of each policy loss: the op's own where both are the same number, the others in a few lines."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..outputs import LossOutput
from ..presets.base import TrainerSpec
from ._verl_batch import MicroBatch

CLIP, KL, LOWER = "actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower"
_Extra = Callable[[TrainerSpec, LossOutput, MicroBatch], dict[str, Tensor]]


@torch.no_grad()
def policy_metrics(loss: str, spec: TrainerSpec, out: LossOutput, batch: MicroBatch) -> dict[str, float]:
    """What verl's function of the loss returns beside it; reads the device once."""
    extra = _EXTRA.get(loss)
    found = {**spec.named_metrics(out.metrics), **(extra(spec, out, batch) if extra else {})}
    names = [name for name in (CLIP, KL, LOWER) if name in found]
    if not names:
        return {}
    return dict(zip(names, torch.stack([found[name].double() for name in names]).tolist(), strict=True))


def _token_kl(spec: TrainerSpec, out: LossOutput, batch: MicroBatch) -> dict[str, Tensor]:
    return {KL: batch.mean(batch.logp_old - batch.logp)}


def _dropped(spec: TrainerSpec, out: LossOutput, batch: MicroBatch) -> dict[str, Tensor]:
    dropped = 1.0 - out.metrics["keep_frac"]
    return {CLIP: torch.where(out.metrics["tokens"] > 0, dropped, 0.0)}


def _selected(spec: TrainerSpec, out: LossOutput, batch: MicroBatch) -> dict[str, Tensor]:
    """The share of tokens that clip_cov takes out: as many as there are candidates, up to its ratio."""
    logp, advantages, mask = batch.logp, batch.advantages, batch.mask
    ratio = (logp - batch.logp_old).exp()
    clipped = -advantages * ratio.clamp(spec.clip_low, spec.clip_high) > -advantages * ratio
    covariance = (advantages - batch.mean(advantages)) * (logp - batch.mean(logp))
    candidates = mask & ~clipped & (covariance > spec.select_low) & (covariance < spec.select_high)
    tokens = mask.sum()
    wanted = (spec.select_ratio * tokens.double()).floor().clamp(min=1)
    return {CLIP: torch.minimum(wanted, candidates.sum().double()) / (tokens + 1e-8)}


def _absolute_kl(spec: TrainerSpec, out: LossOutput, batch: MicroBatch) -> dict[str, Tensor]:
    return {KL: batch.mean((batch.logp - batch.logp_old).abs())}


def _geometric(spec: TrainerSpec, out: LossOutput, batch: MicroBatch) -> dict[str, Tensor]:
    log_ratio = batch.logp - batch.logp_old
    outside = log_ratio != log_ratio.clamp(*spec.token_clip)
    clipped = {
        name: batch.mean((outside & side).float())
        for name, side in ((CLIP, batch.advantages > 0), (LOWER, batch.advantages < 0))
    }
    return {**clipped, **_token_kl(spec, out, batch)}


_EXTRA: dict[str, _Extra] = {
    "gspo": _token_kl,
    "reinforce": _token_kl,  # of bypass_mode; gpg itself has no metrics
    "dppo_tv": _dropped,
    "dppo_kl": _dropped,
    "clip_cov": _selected,
    "kl_cov": _absolute_kl,
    "geo_mean": _geometric,
}
