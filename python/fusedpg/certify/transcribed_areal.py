"""AReaL 1.0.4, transcribed: the decoupled actor loss with its rejection sampling, and SAPO."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..presets import _areal
from .cases import PolicyBatch
from .rows import Row
from .transcription import ALL_KINDS, Case, Fields, rows_of_cases


def rows(backend: str = "auto") -> Iterator[Row]:
    """Both losses, both levels, every rejection that a LossSpec has."""
    yield from rows_of_cases(_areal.areal, CASES, backend)


def _per_row(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def _rejection(f: Fields, rs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(mask, weight) of the behaviour policy; the proximal one is logp_old here."""
    log_ratio = f.logp_old - f.logp_rollout
    by_ratio = rs.get("metric", "ratio") == "ratio"
    lower, upper = rs.get("lower"), rs.get("upper", 5.0)
    weight = log_ratio.exp()
    value = weight if by_ratio else log_ratio
    if rs.get("level") == "sequence":
        total = (log_ratio * f.mask).sum(-1, keepdim=True)
        mean = _per_row(log_ratio, f.mask)
        statistic = total if rs.get("agg") == "sum" else mean
        value = (statistic.exp() if by_ratio else statistic).expand_as(log_ratio)
        weight = mean.exp().expand_as(log_ratio) if by_ratio else weight
    inside = value <= upper if lower is None else (value >= lower) & (value <= upper)
    clamped = weight.clamp(min=0.0 if lower is None else lower, max=upper)
    if rs.get("action") == "clamp":
        return f.mask, clamped if rs.get("level") != "sequence" else torch.where(inside, weight, clamped)
    return f.mask * inside, weight


def _ppo(f: Fields, o: dict[str, Any]) -> Tensor:
    mask, weight = f.mask, torch.ones_like(f.mask)
    if o.get("rejection_sampling") is not None:
        mask, weight = _rejection(f, o["rejection_sampling"])
    ratio, adv = _ratio(f, mask, o)
    eps = o.get("eps_clip", 0.2)
    loss = torch.max(-adv * ratio, -adv * ratio.clamp(1 - eps, 1 + o.get("eps_clip_higher", eps)))
    if o.get("c_clip") is not None:
        loss = torch.min(loss, adv.sign() * o["c_clip"] * adv)
    return loss * weight * mask


def _ratio(f: Fields, mask: Tensor, o: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The ratio to the proximal policy, and the advantages of its level."""
    log_ratio = f.logp - f.logp_old
    if o.get("importance_sampling_level") != "sequence":
        return log_ratio.exp(), f.advantages
    adv = _per_row(f.advantages, mask).expand_as(log_ratio)
    return _per_row(log_ratio, mask).exp().expand_as(log_ratio), adv


def _sapo(f: Fields, o: dict[str, Any]) -> Tensor:
    ratio, adv = _ratio(f, f.mask, o)
    pos, neg = o.get("sapo_tau_pos", 1.0), o.get("sapo_tau_neg", 1.05)
    gate = torch.where(
        adv > 0,
        torch.sigmoid(pos * (ratio - 1)) * 4 / pos,
        torch.sigmoid(neg * (ratio - 1)) * 4 / neg,
    )
    return -gate * adv * f.mask


def _formula(loss: str, o: dict[str, Any]) -> Callable[..., Tensor]:
    def formula(f: Fields, *, tokens: float) -> Tensor:
        x = _sapo(f, o) if loss == "sapo" else _ppo(f, o)
        return x.sum() / max(tokens, 1.0)

    return formula


def _counts(batch: PolicyBatch) -> dict[str, float]:
    return {"tokens": float(batch.mask.sum())}


def _case(loss: str, option: str = "", *, kinds: tuple[str, ...] = ALL_KINDS, **options: Any) -> Case:
    return Case(
        loss,
        options,
        _formula(loss, options),
        option,
        counts=_counts,
        kinds=kinds,
        token_advantages=options.get("importance_sampling_level") != "sequence",
    )


def _rejects(option: str, *, more: dict[str, Any] | None = None, **config: Any) -> Case:
    return _case("ppo", option, use_decoupled_loss=True, rejection_sampling=config, **(more or {}))


_SEQUENCE: dict[str, Any] = {"importance_sampling_level": "sequence"}
#: kinds whose ratio without a clamp stays in fp32
_SHORT = tuple(kind for kind in ALL_KINDS if kind != "ratio-200")
CASES = (
    _case("ppo"),
    _case("ppo", "eps 0.1, 0.3", eps_clip=0.1, eps_clip_higher=0.3),
    _case("ppo", "c_clip 1.25", c_clip=1.25),
    _case("ppo", "decoupled, no rejection", use_decoupled_loss=True),
    _case("ppo", "sequence level", **_SEQUENCE),
    _case("ppo", "sequence level, c_clip 3", c_clip=3.0, **_SEQUENCE),
    _rejects("mask tokens above 5"),
    _rejects("mask tokens outside 0.8, 1.1", lower=0.8, upper=1.1),
    _rejects("clamp tokens to 1.1", action="clamp", upper=1.1),
    _rejects("clamp tokens to 0.9, 1.1", action="clamp", lower=0.9, upper=1.1),
    _rejects("mask tokens by k1", metric="kl_k1", lower=-0.1, upper=0.1),
    _rejects("mask sequences by mean", level="sequence", lower=0.95, upper=1.05),
    _rejects("mask sequences by sum", level="sequence", agg="sum", lower=0.5, upper=1.5),
    _rejects("mask sequences by k1 mean", level="sequence", metric="kl_k1", upper=0.05),
    _rejects("mask sequences by k1 sum", level="sequence", metric="kl_k1", agg="sum", lower=-0.4, upper=0.4),
    _rejects("clamp sequences by mean", level="sequence", action="clamp", lower=0.98, upper=1.02),
    _rejects("mask sequences, sequence level", level="sequence", lower=0.95, upper=1.05, more=_SEQUENCE),
    _rejects("clamp tokens, c_clip 2", action="clamp", upper=1.2, more={"c_clip": 2.0}),
    _case("sapo", kinds=_SHORT),
    _case("sapo", "tau 0.5, 2", sapo_tau_pos=0.5, sapo_tau_neg=2.0, kinds=_SHORT),
    _case("sapo", "sequence level", **_SEQUENCE),
)
