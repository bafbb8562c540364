"""cosmos-rl's GRPO loss, written down from compute_loss of 0.4.7."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..presets import cosmos_rl
from .cases import PolicyBatch
from .rows import Row
from .transcription import BOUNDED, EXTREME, MODERATE, Case, Fields, rows_of_cases

Config = Mapping[str, Any]


def importance_ratio(b: Fields, variant: str, anchor: Tensor) -> Tensor:
    """A token's ratio in e^+-20, or the sequence's with the gradient through its mean, at most e^10."""
    log_ratio = b.logp - anchor
    if variant != "gspo":
        return torch.exp(log_ratio.clamp(-20.0, 20.0))
    mean = (log_ratio * b.mask).sum(1, keepdim=True) / b.mask.sum(1, keepdim=True).clamp(min=1.0)
    return torch.exp(mean.clamp(max=10.0)).expand_as(log_ratio)


def policy_term(b: Fields, variant: str, cfg: Config) -> Tensor:
    """PPO with the dual clip (not for gspo) or AIPO's one-sided clip, then the decoupled weight and the mask."""
    anchor = b.logp_rollout if cfg.get("use_rollout_logprobs_for_loss") else b.logp_old
    r, adv = importance_ratio(b, variant, anchor), b.advantages
    if cfg.get("aipo_rho") is not None:
        x = -r.clamp(max=cfg["aipo_rho"]) * adv
    else:
        low, high = cfg.get("epsilon_low", 0.2), cfg.get("epsilon_high", 0.2)
        banded = r.clamp(1 - low if low >= 0 else -math.inf, 1 + high if high >= 0 else math.inf)
        x = -torch.min(r * adv, banded * adv)
        if variant != "gspo":
            x = torch.where(adv < 0, torch.min(-cfg.get("lower_bound_ratio", 3.0) * adv, x), x)
    if cfg.get("use_decoupled_loss"):
        weight = torch.exp(b.logp_old - b.logp_rollout)
        cap = cfg.get("behav_imp_weight_cap")
        x = x * (weight if cap is None else torch.where(weight <= cap, weight, 0.0))
    delta = cfg.get("off_policy_masking_delta")
    if delta is not None:
        behind = ((anchor - b.logp.detach()) * b.mask).sum(1, keepdim=True) / b.mask.sum(1, keepdim=True).clamp(min=1)
        x = x * ((adv >= 0) | (behind <= delta))
    return x


def kl_term(b: Fields, cfg: Config) -> Tensor:
    """k3 of a log-ratio in +-20, capped at 10; the unbiased form weighs it by the live ratio first."""
    log_ratio = (b.logp_ref - b.logp).clamp(-20.0, 20.0)
    estimate = torch.exp(log_ratio) - log_ratio - 1.0
    if cfg.get("unbiased_kl_estimate"):
        estimate = torch.exp(b.logp - b.logp_old) * estimate
    return estimate.clamp(-10.0, 10.0)


def reduce(x: Tensor, b: Fields, cfg: Config, counts: Mapping[str, float]) -> Tensor:
    """cosmos-rl's four loss types; sequences counts every row of the micro-batch."""
    loss_type = cfg.get("loss_type", "token-mean")
    per_sequence, lengths = (x * b.mask).sum(1), b.mask.sum(1)
    if loss_type == "token-sum":
        return per_sequence.sum()
    if loss_type == "token-mean":
        tokens = counts.get("tokens", float(lengths.sum()))
        return per_sequence.sum() / (tokens + 1e-8) * counts.get("dp_workers", 1)
    if loss_type == "seq-mean-token-mean":
        per_sequence = per_sequence / (cfg.get("unbiased_loss_max_tokens") or lengths.clamp(min=1.0))
    return per_sequence.sum() / counts["sequences"]


def _case(variant: str, cfg: dict[str, Any], **extra: Any) -> Case:
    by_rows = cfg.get("loss_type", "token-mean").startswith("seq")

    def formula(b: Fields, **counts: float) -> Tensor:
        loss = reduce(policy_term(b, variant, cfg), b, cfg, counts)
        if cfg.get("kl_beta"):
            loss = loss + cfg["kl_beta"] * reduce(kl_term(b, cfg), b, cfg, counts)
        if cfg.get("entropy_coeff"):
            loss = loss - cfg["entropy_coeff"] * (b.entropy * b.mask).sum() / b.mask.sum()
        return loss

    said = ", ".join(f"{k}={v}" for k, v in cfg.items() if k != "loss_type")
    counts = extra.pop("counts", rows_of_batch if by_rows else None)
    said = "; ".join(part for part in (said, "counts of all workers" if counts is of_all_workers else "") if part)
    if variant == "gspo":
        extra = {"kinds": BOUNDED, "kinds_fp64": EXTREME, **extra}
    return Case(variant, cfg, formula, said, counts, token_advantages=variant != "gspo", **extra)


def rows_of_batch(batch: PolicyBatch) -> dict[str, float]:
    """Rows of the micro-batch, empty ones too."""
    return {"sequences": float(batch.mask.shape[0])}


def of_all_workers(batch: PolicyBatch) -> dict[str, float]:
    """Tokens of three workers, as balance_dp_token sums them."""
    return {"tokens": 3.0 * float(batch.mask.sum()) + 2.0, "dp_workers": 3}


def cases() -> Iterator[Case]:
    """Variants x loss types, then the options."""
    every: list[dict[str, Any]] = [
        {},
        {"loss_type": "token-sum"},
        {"loss_type": "seq-mean-token-sum"},
        {"loss_type": "seq-mean-token-mean"},
        {"loss_type": "seq-mean-token-mean", "unbiased_loss_max_tokens": 13},
    ]
    for variant in ("grpo", "dapo", "gspo"):
        yield from (_case(variant, cfg) for cfg in every)
        yield _case(variant, {"kl_beta": 0.2})
        yield _case(variant, {"use_decoupled_loss": True})
        yield _case(variant, {"use_decoupled_loss": True, "behav_imp_weight_cap": 1.1})
        yield _case(variant, {"use_rollout_logprobs_for_loss": True})
        yield _case(variant, {"entropy_coeff": 0.1})
        yield _case(variant, {"aipo_rho": 2.0})
    yield _case("grpo", {"balance_dp_token": True, "kl_beta": 0.2}, counts=of_all_workers)
    yield _case("grpo", {"epsilon_low": 0.1, "epsilon_high": 0.28}, clip=0.1)
    yield _case("grpo", {"epsilon_low": -1.0, "epsilon_high": 0.2})
    yield _case("grpo", {"epsilon_low": 0.2, "epsilon_high": -1.0}, kinds=BOUNDED, kinds_fp64=EXTREME)
    yield _case("grpo", {"lower_bound_ratio": 1.1})
    yield _case("grpo", {"aipo_rho": 1.1, "kl_beta": 0.2})
    # neither cap binds there
    yield _case("grpo", {"kl_beta": 0.2, "unbiased_kl_estimate": True}, kinds=MODERATE)
    yield _case("gspo", {"epsilon_low": 3e-4, "epsilon_high": 4e-4, "loss_type": "seq-mean-token-mean"})
    yield _case("gspo", {"off_policy_masking_delta": 0.02, "kl_beta": 0.2})


def rows(backend: str = "auto") -> Iterator[Row]:
    """One row a variant, loss type and group of options."""
    yield from rows_of_cases(cosmos_rl, cases(), backend)
