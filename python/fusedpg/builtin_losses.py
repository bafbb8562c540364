"""rLLM's nine built-in losses as bodies over `LossContext`; the first choice for each is its native kernel.

They serve options that no kernel has, and as patterns for a custom loss. Source: rLLM's guide to custom loss functions;
defaults are those of its algorithm config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .context import LossContext

Metrics = dict[str, Any]

#: bounds of a log-ratio before its exponential; GSPO's has only an upper one
LOG_RATIO_BOUND, SEQUENCE_LOG_RATIO_BOUND = 20.0, 10.0
#: losses that aggregate one way whatever is configured
PINS = {"gspo": "seq-mean-token-mean"}


def ppo_clip(ctx: LossContext) -> tuple[Tensor, Metrics]:
    """max(-A*r, -A*clip(r)), r = exp(logp_curr - logp_old): arXiv:1707.06347, eq. 7.

    Params: eps_clip 0.2, eps_clip_high (default eps_clip).
    """
    ratio = _ratio(ctx.logp_curr, ctx.logp_old)
    clipped = _clip(ctx, ratio)
    x = torch.maximum(-ctx.advantages * ratio, -ctx.advantages * clipped)
    return ctx.aggregate(x, ctx.action_mask), {"ppo/clip_frac": _fraction(ctx, clipped != ratio)}


def dppo_tv(ctx: LossContext) -> tuple[Tensor, Metrics]:
    """-A*sg[r]*logp_curr where p - p_old stays inside the band on the advantage's side: arXiv:2602.04879, section 5.4.

    Params: delta (default eps_clip), delta_low, delta_high (default delta).
    """
    delta = _param(ctx, "delta", _param(ctx, "eps_clip", 0.2))
    moved = (ctx.logp_curr.exp() - ctx.logp_old.exp()).detach()
    above, below = moved > _param(ctx, "delta_high", delta), moved < -_param(ctx, "delta_low", delta)
    return _masked_score(ctx, "dppo_tv", torch.where(ctx.advantages > 0, above, below))


def dppo_kl(ctx: LossContext) -> tuple[Tensor, Metrics]:
    """-A*sg[r]*logp_curr, dropped where p moves away from p_old by a binary KL over delta: arXiv:2602.04879.

    Params: delta (default eps_clip).
    """
    delta = _param(ctx, "delta", _param(ctx, "eps_clip", 0.2))
    p, q = (logp.detach().exp().clamp(1e-6, 1 - 1e-6) for logp in (ctx.logp_curr, ctx.logp_old))
    divergence = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
    away = torch.where(ctx.advantages > 0, p > q, p < q)
    return _masked_score(ctx, "dppo_kl", away & (divergence > delta))


def cispo(ctx: LossContext) -> tuple[Tensor, Metrics]:
    """-sg[clip(r)]*A*logp_curr: arXiv:2506.13585, eq. 4-5. Params: eps_clip, eps_clip_high."""
    ratio = _ratio(ctx.logp_curr, ctx.logp_old).detach()
    clipped = _clip(ctx, ratio)
    x = -clipped * ctx.advantages * ctx.logp_curr
    return ctx.aggregate(x, ctx.action_mask), {"cispo/clip_frac": _fraction(ctx, clipped != ratio)}


def gspo(ctx: LossContext) -> tuple[Tensor, Metrics]:
    """max(-A*s, -A*clip(s)), s the sequence's mean ratio as a value, a token's own as a gradient: arXiv:2507.18071.

    Pins seq-mean-token-mean. Params: eps_clip, eps_clip_high.
    """
    mean = ctx.seq_reduce((ctx.logp_curr - ctx.logp_old).detach(), ctx.action_mask, "mean")
    log_s = mean + (ctx.logp_curr - ctx.logp_curr.detach())
    s = torch.exp(log_s.clamp(max=SEQUENCE_LOG_RATIO_BOUND))
    plain, clipped = -ctx.advantages * s, -ctx.advantages * _clip(ctx, s)
    loss = ctx.aggregate(torch.maximum(plain, clipped), ctx.action_mask, mode=PINS["gspo"])
    return loss, {"gspo/clip_frac": _fraction(ctx, clipped > plain)}


def icepop(ctx: LossContext) -> tuple[Tensor, Metrics]:
    """-A*rho*logp_curr where rho = sg[exp(logp_curr - logp_rollout)] lies in [icepop_alpha, icepop_beta], else 0.

    Source: arXiv:2510.18855. Params: icepop_alpha 0.5, icepop_beta 5.0.
    """
    rollout = _rollout(ctx, "icepop")
    rho = torch.exp(ctx.logp_curr.detach() - rollout)
    keep = (rho >= _param(ctx, "icepop_alpha", 0.5)) & (rho <= _param(ctx, "icepop_beta", 5.0))
    x = -ctx.advantages * torch.where(keep, rho, 0.0) * ctx.logp_curr
    metrics = {"icepop/mask_frac": _fraction(ctx, ~keep), **_ratio_metrics(ctx, "icepop", rho)}
    return ctx.aggregate(x, ctx.action_mask), metrics


def reinforce(ctx: LossContext) -> tuple[Tensor, Metrics]:
    """-A*logp_curr, the clip-free policy gradient (verl's gpg)."""
    return ctx.aggregate(-ctx.advantages * ctx.logp_curr, ctx.action_mask), {}


def reinforce_kl(ctx: LossContext) -> tuple[Tensor, Metrics]:
    """-sg[r]*A*logp_curr + bwd_kl_coef*KL(q||p) + fwd_kl_coef*KL(p||q), r = p/q of policy and sampler.

    KL(q||p) is -logp_curr, KL(p||q) is sg[r*log r]*logp_curr: exact gradients, values that are no divergence; with
    `kl_approx` they are r - 1 - log r and r*log r - r + 1. Params: bwd_kl_coef 0, fwd_kl_coef 0, kl_approx False, and
    ratio_clamp_min, ratio_clamp_max of the detached weight (None).
    """
    log_r = ctx.logp_curr - _rollout(ctx, "reinforce_kl")
    r = torch.exp(log_r.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    low, high = ctx.params.get("ratio_clamp_min"), ctx.params.get("ratio_clamp_max")
    weight = r.detach() if low is None and high is None else r.detach().clamp(low, high)
    backward, forward = r - 1 - log_r, r * log_r - r + 1
    metrics = {
        "reinforce_kl/kl_bwd": _mean(ctx, backward.detach()),
        "reinforce_kl/kl_fwd": _mean(ctx, forward.detach()),
        "reinforce_kl/clamp_frac": _fraction(ctx, weight != r.detach()),
        **_ratio_metrics(ctx, "reinforce_kl", r.detach()),
    }
    if not ctx.params.get("kl_approx"):
        backward, forward = -ctx.logp_curr, (r * log_r).detach() * ctx.logp_curr
    x = -weight * ctx.advantages * ctx.logp_curr
    for coef, term in ((_param(ctx, "bwd_kl_coef", 0.0), backward), (_param(ctx, "fwd_kl_coef", 0.0), forward)):
        if coef:
            x = x + coef * term
    return ctx.aggregate(x, ctx.action_mask), metrics


def echo(ctx: LossContext) -> tuple[Tensor, Metrics]:
    """ppo_clip, plus env_loss_coef (0.05) times the cross-entropy of the observation tokens: arXiv:2605.24517."""
    loss, metrics = ppo_clip(ctx)
    coef = _param(ctx, "env_loss_coef", 0.05)
    if coef:
        loss = loss + coef * ctx.aggregate(-ctx.logp_curr, ctx.obs_mask)
        metrics["echo/coef"] = coef
    return loss, metrics


BODIES: Mapping[str, Callable[[LossContext], tuple[Tensor, Metrics]]] = {
    body.__name__: body for body in (ppo_clip, dppo_tv, dppo_kl, cispo, gspo, icepop, reinforce, echo, reinforce_kl)
}


# ------------------------------------------------------------------ shared by the bodies


def _param(ctx: LossContext, name: str, default: float) -> float:
    """A number from the params; an absent one and None are the default."""
    value = ctx.params.get(name)
    return default if value is None else float(value)


def _ratio(logp: Tensor, anchor: Tensor) -> Tensor:
    return torch.exp((logp - anchor).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def _clip(ctx: LossContext, ratio: Tensor) -> Tensor:
    low = _param(ctx, "eps_clip", 0.2)
    return ratio.clamp(1.0 - low, 1.0 + _param(ctx, "eps_clip_high", low))


def _masked_score(ctx: LossContext, name: str, drop: Tensor) -> tuple[Tensor, Metrics]:
    """-A*sg[r]*logp_curr without the dropped tokens."""
    weight = torch.where(drop, 0.0, _ratio(ctx.logp_curr, ctx.logp_old).detach())
    x = -ctx.advantages * weight * ctx.logp_curr
    return ctx.aggregate(x, ctx.action_mask), {f"{name}/mask_frac": _fraction(ctx, drop)}


def _rollout(ctx: LossContext, name: str) -> Tensor:
    if ctx.logp_rollout is None:
        raise ValueError(
            f"logp_rollout: the loss {name!r} reads the sampler's log-probs; got None; pass them (logp_old, the "
            "proximal policy, is no substitute)"
        )
    return ctx.logp_rollout


def _mean(ctx: LossContext, values: Tensor) -> Tensor:
    """Mean over the action tokens, 0 when there are none."""
    active = ctx.action_mask != 0
    return torch.where(active, values, 0.0).sum() / active.sum().clamp(min=1)


def _fraction(ctx: LossContext, condition: Tensor) -> Tensor:
    return _mean(ctx, condition.to(ctx.logp_curr.dtype))


def _ratio_metrics(ctx: LossContext, name: str, ratio: Tensor) -> Metrics:
    """Mean and extrema over the action tokens, 0 when there are none."""
    active = ctx.action_mask != 0
    some = active.any()
    low, high = (torch.where(active, ratio, fill) for fill in (torch.inf, -torch.inf))
    extrema = {"min": low.amin(), "max": high.amax()} if ratio.numel() else {"min": ratio.sum(), "max": ratio.sum()}
    return {
        f"{name}/ratio_mean": _mean(ctx, ratio),
        **{f"{name}/ratio_{key}": torch.where(some, value, 0.0) for key, value in extrema.items()},
    }
