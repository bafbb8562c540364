"""slime, transcribed: a sum of the samples' means (or of tokens), TIS and IcePop weights, KL and entropy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..presets import _slime
from .cases import PolicyBatch
from .rows import Row
from .transcription import ALL_KINDS, MODERATE, Case, Fields, rows_of_cases


def rows(backend: str = "auto") -> Iterator[Row]:
    """Every objective, correction, KL estimator and both reductions."""
    yield from rows_of_cases(_slime.slime, CASES, backend)


def _policy(loss: str, f: Fields, o: dict[str, Any]) -> Tensor:
    """The policy loss per token from `ppo_kl` = old - new, slime's own variable."""
    old = f.logp_rollout if o.get("use_rollout_logprobs") else f.logp_old
    ppo_kl = old - f.logp
    if loss == "gspo":
        ppo_kl = ((ppo_kl * f.mask).sum(-1) / f.mask.sum(-1).clamp(min=1))[:, None].expand_as(f.logp)
    if loss == "reinforce":
        return -f.advantages * f.logp
    eps = o.get("eps_clip", 0.2)
    low, high = 1 - eps, 1 + o.get("eps_clip_high", eps)
    ratio = (-ppo_kl).exp()
    if loss == "cispo":
        return -ratio.clamp(low, high).detach() * f.advantages * f.logp
    worst = torch.maximum(-ratio * f.advantages, -ratio.clamp(low, high) * f.advantages)
    bound = o.get("eps_clip_c")
    if bound is None:
        return worst
    return torch.where(f.advantages < 0, torch.minimum(-bound * f.advantages, worst), worst)


def _weight(loss: str, f: Fields, o: dict[str, Any]) -> Tensor:
    if not o.get("use_tis"):
        return torch.ones_like(f.mask)
    old = f.logp.detach() if loss == "reinforce" else f.logp_old
    ratio = (old - f.logp_rollout).exp()
    low, high = o.get("tis_clip_low", 0.0), o.get("tis_clip", 2.0)
    if "icepop" in o.get("custom_tis_function_path", ""):
        return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)
    return ratio.clamp(low, high)


def _kl(f: Fields, o: dict[str, Any]) -> Tensor:
    d = f.logp - f.logp_ref
    kind = o.get("kl_loss_type", "k1")
    kl = {"k1": d, "k2": d**2 / 2}.get(kind, (-d).exp() - 1 + d)
    if o.get("use_unbiased_kl"):
        kl = (f.logp - f.logp_old).exp() * kl
    return kl.clamp(-10, 10) if kind == "low_var_kl" else kl


def _formula(loss: str, o: dict[str, Any]) -> Callable[..., Tensor]:
    def formula(f: Fields, *, global_batch_size: float, num_tokens: float) -> Tensor:
        per_token = o.get("calculate_per_token_loss", False)

        def reduced(x: Tensor) -> Tensor:
            rows = (x * f.mask).sum(-1)
            return rows.sum() if per_token else (rows / f.mask.sum(-1).clamp(min=1)).sum()

        total = reduced(_policy(loss, f, o) * _weight(loss, f, o))
        total = total - o.get("entropy_coef", 0.0) * reduced(f.entropy)
        if o.get("use_kl_loss"):
            total = total + o["kl_loss_coef"] * reduced(_kl(f, o))
        return total / (num_tokens if per_token else global_batch_size)

    return formula


def _counts(batch: PolicyBatch) -> dict[str, float]:
    return {"global_batch_size": float(batch.mask.shape[0]), "num_tokens": float(batch.mask.sum())}


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


_ICEPOP = "slime.backends.megatron_utils.loss.icepop_function"
CASES = (
    *(_case(loss) for loss in _slime.ENTRY_OF),
    *(_case(loss, "per token", calculate_per_token_loss=True) for loss in _slime.ENTRY_OF),
    *(_case(loss, "TIS", use_tis=True) for loss in ("ppo", "gspo", "cispo")),
    *(
        _case(loss, "IcePop 0.8, 1.2", use_tis=True, custom_tis_function_path=_ICEPOP, tis_clip_low=0.8, tis_clip=1.2)
        for loss in ("ppo", "gspo", "cispo")
    ),
    # the live ratio to the sampler is e^-199 or so: 0 in fp32
    _case("reinforce", "TIS", use_tis=True),
    _case("ppo", "TIS 0.9, 1.1", use_tis=True, tis_clip_low=0.9, tis_clip=1.1),
    _case("ppo", "eps 0.1, 0.28", eps_clip=0.1, eps_clip_high=0.28),
    _case("ppo", "eps_clip_c 1.25", eps_clip_c=1.25),
    _case("gspo", "eps 3e-4, 4e-4, eps_clip_c 3", eps_clip=3e-4, eps_clip_high=4e-4, eps_clip_c=3.0),
    _case("cispo", "eps 1, 4", eps_clip=1.0, eps_clip_high=4.0),
    _case("ppo", "rollout log-probs", use_rollout_logprobs=True),
    _case("ppo", "entropy 0.01", entropy_coef=0.01),
    *(
        _case(
            "ppo",
            f"kl {kind}",
            kinds=MODERATE if kind == "k3" else ALL_KINDS,
            use_kl_loss=True,
            kl_loss_coef=0.1,
            kl_loss_type=kind,
        )
        for kind in ("k1", "k2", "k3", "low_var_kl")
    ),
    *(
        _case(
            "cispo",
            f"unbiased kl {kind}",
            kinds=MODERATE,
            use_kl_loss=True,
            kl_loss_coef=0.1,
            kl_loss_type=kind,
            use_unbiased_kl=True,
        )
        for kind in ("k1", "k2", "k3")
    ),
    _case(
        "gspo",
        "TIS, kl k2, entropy, per token",
        use_tis=True,
        use_kl_loss=True,
        kl_loss_coef=0.01,
        kl_loss_type="k2",
        entropy_coef=0.001,
        calculate_per_token_loss=True,
    ),
    _case("reinforce", "kl low_var_kl", use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="low_var_kl"),
)
