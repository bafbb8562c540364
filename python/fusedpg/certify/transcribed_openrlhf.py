"""OpenRLHF 0.11.2, transcribed: PolicyLoss, its rollout correction, the KL loss and the entropy bonus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..presets import _openrlhf
from .cases import PolicyBatch
from .rows import Row
from .transcription import ALL_KINDS, BOUNDED, Case, Fields, rows_of_cases


def rows(backend: str = "auto") -> Iterator[Row]:
    """Both loss types, both aggregations, every correction and KL estimator."""
    yield from rows_of_cases(_openrlhf.openrlhf, CASES, backend)


def _ratio(loss: str, f: Fields, o: dict[str, Any]) -> Tensor:
    if loss == "ppo":
        return (f.logp - f.logp_old).clamp(-20, 20).exp()
    anchor = f.logp_old if o.get("is_correction_level", "off") == "off" else f.logp_rollout
    mean = ((f.logp - anchor) * f.mask).sum(-1) / f.mask.sum(-1).clamp(min=1)
    return mean.exp()[:, None] * f.mask


def _policy(loss: str, f: Fields, o: dict[str, Any]) -> Tensor:
    eps = o.get("eps_clip", 0.2)
    low, high = o.get("eps_clip_low_high", (eps, eps))
    ratio = _ratio(loss, f, o)
    objective = torch.minimum(ratio * f.advantages, ratio.clamp(1 - low, 1 + high) * f.advantages)
    bound = o.get("dual_clip")
    if bound is not None:
        floored = torch.maximum(objective, bound * f.advantages)
        objective = torch.where(f.advantages < 0, floored, objective)
    return -objective


def _weight(loss: str, f: Fields, o: dict[str, Any]) -> Tensor:
    level = o.get("is_correction_level", "off")
    if level == "off" or loss == "gspo":
        return torch.ones_like(f.mask)
    threshold = o.get("is_correction_threshold", (0.5, 5.0))
    low, high = threshold if len(threshold) == 2 else (0.0, threshold[0])
    log_ratio = f.logp_old - f.logp_rollout
    token = log_ratio.exp()
    if o.get("is_correction_mode", "mask") == "clip":
        return token.clamp(low, high)
    mean = (log_ratio * f.mask).sum(-1, keepdim=True) / f.mask.sum(-1, keepdim=True)
    statistic = mean.exp() if level == "seq" else token
    return torch.where((statistic >= low) & (statistic <= high), token, 0.0)


def _kl(f: Fields, o: dict[str, Any]) -> Tensor:
    d = f.logp - f.logp_ref
    kind = o.get("estimator", "k1")
    if kind == "k3":
        bounded = d.clamp(min=-10)
        value = (-bounded).exp() - 1 + bounded
    else:
        value = d if kind == "k1" else d**2 / 2
    return value.clamp(-10, 10)


def _formula(loss: str, o: dict[str, Any]) -> Callable[..., Tensor]:
    def formula(f: Fields, *, batch_num_tokens: float, global_batch_size: float, dp_size: int) -> Tensor:
        def token_mean(x: Tensor) -> Tensor:
            return (x * f.mask).sum() / batch_num_tokens * dp_size

        x = _policy(loss, f, o) * _weight(loss, f, o)
        if loss == "gspo" or o.get("loss_agg_mode") == "seq-mean-token-mean":
            total = ((x * f.mask).sum(-1) / (f.mask.sum(-1) + 1e-8)).sum() / global_batch_size * dp_size
        else:
            total = token_mean(x)
        if o.get("use_loss"):
            total = total + o.get("init_coef", 0.01) * token_mean(_kl(f, o))
        return total - (o.get("entropy_coef") or 0.0) * token_mean(f.entropy)

    return formula


def _counts(batch: PolicyBatch) -> dict[str, float]:
    """Two ranks, the other with as much again."""
    filled = float((batch.mask.sum(-1) > 0).sum())
    return {"batch_num_tokens": 2.0 * float(batch.mask.sum()), "global_batch_size": 2.0 * filled, "dp_size": 2}


def _case(loss: str, option: str = "", *, kinds: tuple[str, ...] = ALL_KINDS, **options: Any) -> Case:
    return Case(
        loss,
        options,
        _formula(loss, options),
        option,
        counts=_counts,
        kinds=kinds,
        token_advantages=loss != "gspo",
    )


_SEQ = "seq-mean-token-mean"
CASES = (
    _case("ppo"),
    _case("gspo"),
    _case("ppo", _SEQ, loss_agg_mode=_SEQ),
    _case("ppo", "eps 0.1, 0.3", eps_clip_low_high=(0.1, 0.3)),
    _case("ppo", "dual_clip 1.25", dual_clip=1.25),
    _case("gspo", "eps 3e-4, dual_clip 3", eps_clip=3e-4, dual_clip=3.0),
    _case("gspo", "anchored on the sampler", is_correction_level="token", kinds=BOUNDED),
    _case("ppo", "TIS (token, clip)", is_correction_level="token", is_correction_mode="clip"),
    _case(
        "ppo",
        "TIS 0.9 to 1.1",
        is_correction_level="token",
        is_correction_mode="clip",
        is_correction_threshold=(0.9, 1.1),
    ),
    _case("ppo", "IcePop (token, mask) 0.8 to 1.2", is_correction_level="token", is_correction_threshold=(0.8, 1.2)),
    _case("ppo", "IcePop up to 1.1", is_correction_level="token", is_correction_threshold=(1.1,)),
    _case("ppo", "seq-mask-TIS 0.95 to 1.05", is_correction_level="seq", is_correction_threshold=(0.95, 1.05)),
    _case(
        "ppo",
        f"seq-mask-TIS, {_SEQ}",
        is_correction_level="seq",
        is_correction_threshold=(0.9, 1.05),
        loss_agg_mode=_SEQ,
    ),
    _case("ppo", "entropy 0.01", entropy_coef=0.01),
    *(_case("ppo", f"kl {kind}", use_loss=True, init_coef=0.1, estimator=kind) for kind in ("k1", "k2", "k3")),
    _case(
        "ppo",
        "TIS, dual_clip, kl k2, entropy",
        is_correction_level="token",
        is_correction_mode="clip",
        dual_clip=2.0,
        use_loss=True,
        estimator="k2",
        entropy_coef=0.001,
    ),
)
