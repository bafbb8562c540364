"""SkyRL 0.3.0, transcribed: a masked sum of losses whose advantages carry the reduction; off-policy correction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..presets import _skyrl
from .cases import PolicyBatch
from .rows import Row
from .transcription import ALL_KINDS, Case, Fields, rows_of_cases

#: a policy loss of SkyRL: (fields, advantages, options) -> per token
_Loss = Callable[[Fields, Tensor, dict[str, Any]], Tensor]


def rows(backend: str = "auto") -> Iterator[Row]:
    """Every policy loss, reduction and correction."""
    yield from rows_of_cases(_skyrl.skyrl, CASES, backend)


def _safe_ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-20, 20).exp()


def _row_mean(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def _clipped(ratio: Tensor, adv: Tensor, o: dict[str, Any]) -> Tensor:
    low, high = 1 - o.get("eps_clip_low", 0.2), 1 + o.get("eps_clip_high", 0.2)
    return -torch.min(ratio * adv, ratio.clamp(low, high) * adv)


def _regular(f: Fields, adv: Tensor, o: dict[str, Any]) -> Tensor:
    return _clipped(_safe_ratio(f.logp - f.logp_old), adv, o)


def _dual_clip(f: Fields, adv: Tensor, o: dict[str, Any]) -> Tensor:
    loss = _regular(f, adv, o)
    return torch.where(adv < 0, torch.min(loss, -adv * o.get("clip_ratio_c", 3.0)), loss)


def _gspo(f: Fields, adv: Tensor, o: dict[str, Any]) -> Tensor:
    mean = _row_mean(f.logp - f.logp_old, f.mask).detach()
    return _clipped((f.logp - f.logp.detach() + mean).clamp(max=10).exp(), adv, o)


def _cispo(f: Fields, adv: Tensor, o: dict[str, Any]) -> Tensor:
    low, high = 1 - o.get("cispo_eps_clip_low", 0.0), 1 + o.get("cispo_eps_clip_high", 5.0)
    return -adv * _safe_ratio(f.logp - f.logp_old).clamp(low, high).detach() * f.logp


def _sapo(f: Fields, adv: Tensor, o: dict[str, Any]) -> Tensor:
    pos, neg = (adv.new_tensor(o.get(name, default)) for name, default in (("tau_pos", 1.0), ("tau_neg", 1.05)))
    tau = torch.where(adv > 0, pos, neg)
    return -torch.sigmoid(tau * (_safe_ratio(f.logp - f.logp_old) - 1)) * 4 / tau * adv


def _rollout_is(f: Fields, adv: Tensor, o: dict[str, Any]) -> Tensor:
    ratio = _safe_ratio(f.logp - f.logp_rollout).detach()
    inside = (ratio > 1 - o.get("eps_clip_low", 0.2)) & (ratio < 1 + o.get("eps_clip_high", 0.2))
    return -torch.where(inside, ratio, 0.0) * adv * f.logp


def _dppo(f: Fields, adv: Tensor, o: dict[str, Any]) -> Tensor:
    p, q = f.logp.detach().exp(), f.logp_rollout.exp()
    low, high = o.get("delta_low", 0.2), o.get("delta_high", 0.2)
    if o.get("dppo_type") == "binary_kl":
        # a few log-probs of the batches lie above 0 and are no probabilities: SkyRL's KL of those is NaN
        q = q.clamp(max=1 - 1e-6)
        kl = q * (f.logp_rollout - f.logp.detach()) + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()
        drop = ((adv > 0) & (p > q) & (kl > high)) | ((adv < 0) & (p < q) & (kl > low))
    else:
        drop = ((adv > 0) & (p - q > high)) | ((adv < 0) & (q - p > low))
    return -_safe_ratio(f.logp - f.logp_rollout) * adv * (~drop)


def _covariance(f: Fields, adv: Tensor) -> Tensor:
    count = f.mask.sum()
    logp = f.logp.detach()
    return (adv - (adv * f.mask).sum() / count) * (logp - (logp * f.mask).sum() / count)


def _clip_cov(f: Fields, adv: Tensor, o: dict[str, Any]) -> Tensor:
    """With clip_ratio 1 every candidate is taken, so that no draw decides."""
    ratio = (f.logp - f.logp_old).exp()
    plain, clipped = -adv * ratio, -adv * ratio.clamp(0.8, 1.2)
    cov = _covariance(f, adv)
    taken = (cov > o["clip_cov_lb"]) & (cov < o["clip_cov_ub"]) & ~(clipped > plain)
    return torch.maximum(plain, clipped) * (~taken)


def _kl_cov(f: Fields, adv: Tensor, o: dict[str, Any]) -> Tensor:
    t = f.logp - f.logp_old
    cov = torch.where(f.mask > 0, _covariance(f, adv), -torch.inf).reshape(-1)
    count = max(1, int(float(f.mask.sum()) * o.get("kl_cov_frac", 0.2)))
    chosen = torch.zeros_like(cov).index_fill_(0, cov.topk(count).indices, 1.0).view_as(t)
    return -adv * t.exp() + chosen * o.get("ppo_kl_coef", 1.0) * t.abs()


def _importance_sampling(f: Fields, adv: Tensor, o: dict[str, Any]) -> Tensor:
    return -(f.logp - f.logp_old).exp() * adv


_LOSSES: dict[str, _Loss] = {
    "regular": _regular,
    "dual_clip": _dual_clip,
    "gspo": _gspo,
    "cispo": _cispo,
    "sapo": _sapo,
    "rollout_is": _rollout_is,
    "dppo": _dppo,
    "clip_cov": _clip_cov,
    "kl_cov": _kl_cov,
    "importance_sampling": _importance_sampling,
}


def _scaled(f: Fields, o: dict[str, Any], batch_size: float) -> Tensor:
    """The advantages with SkyRL's reduction folded in."""
    name = o.get("loss_reduction")
    if name == "token_mean":
        return f.advantages / f.mask.sum().clamp(min=1)
    if name == "sequence_mean":
        return f.advantages / (batch_size * f.mask.sum(-1, keepdim=True).clamp(min=1))
    if name == "seq_mean_token_sum_norm":
        return f.advantages / (batch_size * o["max_seq_len"])
    return f.advantages


def _corrected(f: Fields, o: dict[str, Any]) -> Tensor:
    """Weight times mask of the off-policy correction."""
    t = f.logp_old - f.logp_rollout
    mask = f.mask
    low, high = o.get("token_mask_is_threshold_low"), o.get("token_mask_is_threshold_high")
    if low is not None and high is not None:
        mask = mask * ((_safe_ratio(t) >= low) & (_safe_ratio(t) <= high))
    weight = torch.ones_like(t)
    total = (t * mask).sum(-1, keepdim=True)
    if o.get("tis_ratio_type") == "token":
        weight = _safe_ratio(t).clamp(max=o.get("token_tis_ratio_clip_high", 2.0))
    elif o.get("tis_ratio_type") == "sequence":
        weight = _safe_ratio(total).clamp(max=o.get("sequence_tis_ratio_clip_high", 5.0))
    if o.get("sequence_mask_metric") == "geometric":
        ratio = _safe_ratio(total / mask.sum(-1, keepdim=True).clamp(min=1))
        mask = mask * ((ratio <= o.get("geo_mask_high", 1.01)) & (ratio >= o.get("geo_mask_low", 0.99)))
    elif o.get("sequence_mask_metric") == "product":
        ratio = _safe_ratio(total)
        mask = mask * ((ratio <= o.get("product_mask_high", 2.0)) & (ratio >= o.get("product_mask_low", 0.5)))
    return weight * mask


def _kl(f: Fields, o: dict[str, Any]) -> Tensor:
    d = f.logp - f.logp_ref
    kind = o.get("kl_estimator_type", "k3")
    if kind == "k3":
        neg = (-d).clamp(-20, 20)
        return (neg.exp() - neg - 1).clamp(-10, 10)
    return {"k1": d, "abs": d.abs(), "k2": 0.5 * d.square()}[kind]


def _formula(loss: str, o: dict[str, Any]) -> Callable[..., Tensor]:
    def formula(f: Fields, *, batch_size: float, tokens: float) -> Tensor:
        x = _LOSSES[loss](f, _scaled(f, o, batch_size), o)
        total = (x * _corrected(f, o)).sum()
        if o.get("use_kl_loss"):
            total = total + o.get("kl_loss_coef", 0.001) * _row_mean(_kl(f, o), f.mask).mean()
        return total

    return formula


def _counts(batch: PolicyBatch) -> dict[str, float]:
    return {"batch_size": batch.mask.shape[0], "tokens": float(batch.mask.sum())}


def _case(loss: str, option: str = "", *, kinds: tuple[str, ...] = ALL_KINDS, **options: Any) -> Case:
    return Case(
        loss,
        options,
        _formula(loss, options),
        option,
        counts=_counts,
        kinds=kinds,
        token_advantages=True,
    )


#: kinds whose ratio without a clamp stays in fp32
_SHORT = tuple(kind for kind in ALL_KINDS if "-30" not in kind and kind != "ratio-200")
#: kinds in which no two covariances are equal, so that no order decides which token is taken
_DISTINCT = tuple(kind for kind in _SHORT if kind != "ties")

CASES = (
    *(_case(loss) for loss in ("regular", "dual_clip", "gspo", "cispo", "sapo", "rollout_is", "dppo")),
    _case("importance_sampling", kinds=_SHORT),
    _case("kl_cov", kinds=_DISTINCT),
    _case("kl_cov", "kl_cov_frac 0.5, coef 2", kl_cov_frac=0.5, ppo_kl_coef=2.0, kinds=_DISTINCT),
    _case("clip_cov", "clip_ratio 1, 0.1 to 5", clip_ratio=1.0, clip_cov_lb=0.1, clip_cov_ub=5.0, kinds=_DISTINCT),
    _case("regular", "token_mean", loss_reduction="token_mean"),
    _case("regular", "sequence_mean", loss_reduction="sequence_mean"),
    _case("regular", "max_seq_len 16", loss_reduction="seq_mean_token_sum_norm", max_seq_len=16),
    _case(
        "gspo", "sequence_mean, eps 3e-4, 4e-4", loss_reduction="sequence_mean", eps_clip_low=3e-4, eps_clip_high=4e-4
    ),
    _case("sapo", "sequence_mean, tau 0.5, 2", loss_reduction="sequence_mean", tau_pos=0.5, tau_neg=2.0),
    _case("dual_clip", "eps 0.1, 0.3, clip_ratio_c 1.25", eps_clip_low=0.1, eps_clip_high=0.3, clip_ratio_c=1.25),
    _case("cispo", "low 0.2, high 0.2", cispo_eps_clip_low=0.2, cispo_eps_clip_high=0.2),
    _case("dppo", "binary_tv 0.05, 0.1", delta_low=0.05, delta_high=0.1),
    _case("dppo", "binary_kl 0.05", dppo_type="binary_kl", delta_low=0.05, delta_high=0.05),
    _case("rollout_is", "eps 0.1, 0.3, token_mean", loss_reduction="token_mean", eps_clip_low=0.1, eps_clip_high=0.3),
    _case("regular", "token TIS 1.2", tis_ratio_type="token", token_tis_ratio_clip_high=1.2),
    _case("regular", "sequence TIS", tis_ratio_type="sequence"),
    _case(
        "cispo",
        "token TIS, geometric mask",
        tis_ratio_type="token",
        sequence_mask_metric="geometric",
        geo_mask_low=0.95,
        geo_mask_high=1.05,
    ),
    _case("sapo", "sequence TIS, product mask", tis_ratio_type="sequence", sequence_mask_metric="product"),
    _case("gspo", "product mask", sequence_mask_metric="product"),
    _case(
        "dual_clip",
        "token TIS, token mask",
        tis_ratio_type="token",
        token_mask_is_threshold_low=0.8,
        token_mask_is_threshold_high=1.1,
    ),
    *(
        _case(
            "regular",
            f"sequence_mean, kl {kind}",
            loss_reduction="sequence_mean",
            use_kl_loss=True,
            kl_loss_coef=0.1,
            kl_estimator_type=kind,
        )
        for kind in ("k1", "k2", "k3", "abs")
    ),
)
