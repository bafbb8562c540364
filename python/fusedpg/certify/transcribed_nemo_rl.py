"""NeMo-RL's ClippedPGLossFn, written down from `loss_functions.py` and `calculate_kl` of its main branch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..presets import nemo_rl
from .cases import PolicyBatch
from .rows import Row
from .transcription import BOUNDED, EXTREME, MODERATE, Case, Fields, rows_of_cases

Config = Mapping[str, Any]
#: nothing bounds a ratio here: what fp32 cannot hold is compared in fp64
_UNBOUNDED = {"kinds": BOUNDED, "kinds_fp64": EXTREME}


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None, total: float | None = None) -> Tensor:
    """A sum over selected places by a count, which NeMo-RL takes 1e-8 larger."""
    count = mask.sum(dim) if total is None else total
    return (values * mask).sum(dim) / (count + 1e-8)


def over_batch(values: Tensor, b: Fields, token_level: bool, counts: Mapping[str, float]) -> Tensor:
    """Token level: over all valid tokens. Sequence level: each sequence's mean, over all valid sequences."""
    if token_level:
        return masked_mean(values, b.mask, total=counts["global_valid_toks"])
    valid = (b.mask.sum(1) > 0).double()
    return masked_mean(masked_mean(values, b.mask, 1), valid, total=counts["global_valid_seqs"])


def clip_loss(b: Fields, cfg: Config) -> Tensor:
    """The surrogate, with ratios that nothing clamps."""
    adv, logp = b.advantages, b.logp
    low, high = 1.0 - cfg.get("ratio_clip_min", 0.2), 1.0 + cfg.get("ratio_clip_max", 0.2)
    if cfg.get("force_on_policy_ratio"):
        ratio = clamped = torch.exp(logp - logp.detach())
    elif cfg.get("disable_ppo_ratio"):
        ratio = clamped = logp
    else:
        log_ratio = logp - b.logp_old
        if cfg.get("sequence_level_importance_ratios"):
            log_ratio = masked_mean(log_ratio, b.mask, 1)[:, None].expand_as(log_ratio)
        ratio = torch.exp(log_ratio)
        clamped = ratio.clamp(low, high)
    if cfg.get("use_cispo"):
        return -adv * clamped.detach() * logp
    loss = torch.maximum(-adv * ratio, -adv * clamped)
    bound = cfg.get("ratio_clip_c")
    return loss if bound is None else torch.where(adv < 0, torch.minimum(loss, -adv * bound), loss)


def correction(b: Fields, cfg: Config) -> Tensor:
    """Weights of the actor against the sampler: a token's or a sequence's product, then their truncation."""
    previous = b.logp.detach() if cfg.get("force_on_policy_ratio") else b.logp_old
    log_weight = (previous - b.logp_rollout) * b.mask
    weight = torch.exp(log_weight)
    if cfg.get("sequence_level_importance_ratios"):
        weight = torch.exp(log_weight.sum(1, keepdim=True)).expand_as(weight)
    kind = cfg.get("truncated_importance_sampling_type")
    low: Any = cfg.get("truncated_importance_sampling_ratio_min")
    high: Any = cfg.get("truncated_importance_sampling_ratio")
    if kind == "tis":
        weight = weight.clamp(0.0 if low is None else low, high)
    elif kind == "icepop":
        weight = weight * ((weight >= low) & (weight <= high))
    elif kind == "seq-mask-tis":
        geometric = torch.exp(masked_mean(log_weight, b.mask, 1))[:, None]
        weight = weight * ((geometric >= low) & (geometric <= high))
    return weight


def reference_kl(b: Fields, cfg: Config) -> Tensor:
    """The estimator times exp(logp - sg[logp]), whose gradient is the score term; clamps end both gradients."""
    raw = b.logp_ref - b.logp
    bound, cap = cfg.get("kl_input_clamp_value", 20.0), cfg.get("kl_output_clamp_value", 10.0)
    log_ratio = raw if bound is None else raw.clamp(-bound, bound)
    score = torch.exp(b.logp - b.logp.detach())
    score = torch.where(raw == log_ratio, score, score.detach())
    kind = cfg.get("reference_policy_kl_type", "k3")
    if kind == "k1":
        kl = -log_ratio
    elif kind == "k2":
        kl = log_ratio**2 / 2
    else:
        kl = torch.exp(log_ratio) - 1 - log_ratio
    kl = score * kl
    return kl if cap is None else kl.clamp(-cap, cap)


def _case(cfg: dict[str, Any], name: str = "clipped_pg", whole_step: bool = False, **extra: Any) -> Case:
    """One configuration; `name` is how the preset is asked for it, in place of its flag."""
    coef = 0.0 if cfg.get("use_kl_in_reward") else cfg.get("reference_policy_kl_penalty", 0.01)
    flags = cfg if name == "clipped_pg" else {**cfg, name: True}
    token_level = cfg.get("token_level_loss", not flags.get("sequence_level_importance_ratios", False))

    def formula(b: Fields, **counts: float) -> Tensor:
        x = clip_loss(b, flags)
        if flags.get("use_importance_sampling_correction"):
            x = correction(b, flags) * x
        loss = over_batch(x, b, token_level, counts)
        return loss + coef * over_batch(reference_kl(b, flags), b, token_level, counts) if coef else loss

    said = ", ".join(f"{k}={v}" for k, v in cfg.items() if k not in ("token_level_loss",))
    said = "; ".join(part for part in (said, "counts of the step" if whole_step else "") if part)
    by_sequence = bool(flags.get("sequence_level_importance_ratios"))
    counts = counts_of_step if whole_step else counts_of_batch
    return Case(name, cfg, formula, said, counts, token_advantages=not by_sequence, **{**_UNBOUNDED, **extra})


def counts_of_batch(batch: PolicyBatch) -> dict[str, float]:
    """The batch is the step."""
    tokens = batch.mask.sum(1)
    return {"global_valid_toks": float(tokens.sum()), "global_valid_seqs": float((tokens > 0).sum())}


def counts_of_step(batch: PolicyBatch) -> dict[str, float]:
    """A step of more micro-batches than this one."""
    return {"global_valid_toks": 4.0 * float(batch.mask.sum()), "global_valid_seqs": 17.0}


def cases() -> Iterator[Case]:
    """Surrogates x levels x counts without KL; corrections; the KL term."""
    plain = {"reference_policy_kl_penalty": 0.0}
    at_sequence = {**plain, "token_level_loss": False}
    gspo = "sequence_level_importance_ratios"
    for cfg in (plain, at_sequence):
        for name in ("clipped_pg", "disable_ppo_ratio", "force_on_policy_ratio"):
            yield from (_case(cfg, name, whole_step) for whole_step in (False, True))
    yield from (_case(plain, "use_cispo", whole_step) for whole_step in (False, True))
    yield from (_case(plain, gspo, whole_step) for whole_step in (False, True))
    yield _case({**plain, "ratio_clip_max": 0.28, "ratio_clip_c": 3.0})
    yield _case({**plain, "ratio_clip_c": 1.1})
    yield _case({**plain, "ratio_clip_min": 3e-4, "ratio_clip_max": 4e-4}, gspo, clip=3e-4)
    yield _case({**plain, "ratio_clip_min": 0.01, "ratio_clip_max": 0.01, "ratio_clip_c": 1.02}, gspo, clip=0.01)
    yield _case({**plain, "ratio_clip_min": 0.1, "ratio_clip_max": 3.0}, "use_cispo", clip=0.1)
    yield from _corrected(plain, at_sequence, gspo)
    for kind in ("k1", "k2", "k3"):
        kl = {"reference_policy_kl_penalty": 0.3, "reference_policy_kl_type": kind}
        yield _case(kl)
        yield _case({**kl, "token_level_loss": False})
    free = {"kl_input_clamp_value": None, "kl_output_clamp_value": None, "reference_policy_kl_penalty": 0.3}
    yield _case(free, kinds=MODERATE, kinds_fp64=())
    yield _case({}, gspo, kinds=MODERATE, kinds_fp64=())
    yield _case({**plain, "use_kl_in_reward": True, "reference_policy_kl_penalty": 0.3})


def _corrected(plain: Config, at_sequence: Config, gspo: str) -> Iterator[Case]:
    """Every type of truncation, at a token and at a sequence."""
    tis = "truncated_importance_sampling"
    on = {"use_importance_sampling_correction": True}
    yield _case({**plain, **on})
    yield _case({**at_sequence, **on})
    for name in ("clipped_pg", gspo):
        yield _case({**plain, **on, f"{tis}_type": "tis", f"{tis}_ratio": 1.1}, name)
        yield _case({**plain, **on, f"{tis}_type": "tis", f"{tis}_ratio": 1.1, f"{tis}_ratio_min": 0.9}, name)
        yield _case({**plain, **on, f"{tis}_type": "icepop", f"{tis}_ratio": 1.2, f"{tis}_ratio_min": 0.8}, name)
    masked = {**on, f"{tis}_type": "seq-mask-tis", f"{tis}_ratio": 1.03, f"{tis}_ratio_min": 0.97}
    yield _case({**plain, **masked})
    yield _case({**at_sequence, **masked})
    yield _case({**plain, **on}, gspo)
    yield _case({**plain, **on, f"{tis}_type": "tis", f"{tis}_ratio": 1.1}, "force_on_policy_ratio")
    yield _case({**plain, **on, f"{tis}_type": "tis", f"{tis}_ratio": 1.1}, "disable_ppo_ratio")


def rows(backend: str = "auto") -> Iterator[Row]:
    """One row a surrogate, level, count and group of options."""
    yield from rows_of_cases(nemo_rl, cases(), backend)
