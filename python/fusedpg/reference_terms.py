"""The terms of every loss as plain PyTorch, derivatives by autograd: one function per enum member of `fusedpg.spec`.

Clarity first: nothing here is shared with the kernels. Inputs are selected tokens' values, 0 where a token is masked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .spec import (
    KL,
    Correction,
    CorrectionLevel,
    Keep,
    KLGradient,
    KLSampled,
    LossSpec,
    Reject,
    Selection,
    Surrogate,
)

#: binary probabilities stay this far from 0 and 1 in the KL keep mask
PROBABILITY_FLOOR = 1e-6
#: bounds of a correction weight inside VESPO's product, in log space
LOG_WEIGHT_BOUNDS = (-18.420680743952367, 20.0)


def clamp(d: Tensor, bounds: tuple[float, float]) -> Tensor:
    """`d.clamp(lo, hi)`, NaN kept; the gradient is 0 outside the bounds and passes at them."""
    low, high = bounds
    return torch.where(d < low, low, torch.where(d > high, high, d))


def by_sign(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """`torch.where(condition, yes, no)` in the dtype of `like`: between two numbers torch would choose fp32."""
    return torch.where(condition, torch.full_like(like, yes), no)


# ---------------------------------------------------------------- the policy term


def reinforce(logp: Tensor, adv: Tensor) -> Tensor:
    """-A*logp."""
    return -adv * logp


def importance_ratio(d: Tensor, adv: Tensor) -> Tensor:
    """-A*r with r = exp(d)."""
    return -adv * d.exp()


def clipped_ratio(d: Tensor, adv: Tensor, spec: LossSpec) -> tuple[Tensor, Tensor]:
    """max(-A*min(r, delta), -A*clip(r)), bounded by -A*dual_clip where A < 0; and where that bound binds.

    The branch is chosen on detached values, so a ratio that overflows in a branch not taken leaves no NaN behind.
    """
    r = d.detach().exp()
    unclipped = -adv * torch.where(r > spec.delta, spec.delta, r)
    clipped = -adv * clamp(r, (spec.clip_low, spec.clip_high))
    inside = ~((r < spec.clip_low) | (r > spec.clip_high))
    taken = ~(unclipped < clipped)  # ties, NaN included, stay on the branch that carries the gradient
    cap = torch.where(adv < 0, -adv * spec.dual_clip, torch.inf)
    dual = torch.where(taken, unclipped, clipped) > cap
    live = torch.where(taken, ~(r > spec.delta), inside) & ~dual
    value = torch.where(dual, cap, torch.where(taken, unclipped, clipped))
    ratio = torch.where(live, d, 0.0).exp()
    return torch.where(live, -adv * ratio, value), dual


def cispo(logp: Tensor, d: Tensor, adv: Tensor, spec: LossSpec) -> Tensor:
    """-sg[clip(r)]*A*logp."""
    return -clamp(d.detach().exp(), (spec.clip_low, spec.clip_high)) * adv * logp


def sapo(d: Tensor, adv: Tensor, spec: LossSpec) -> Tensor:
    """-A*(4/tau)*sigmoid(tau*(r - 1)), tau = tau_pos if A > 0 else tau_neg."""
    tau = by_sign(adv > 0, spec.tau_pos, spec.tau_neg, d)
    flat = d.exp().isinf()  # the gate is 1 there and its derivative 0, not 0*inf
    # through the log: sigmoid's own derivative s*(1 - s) loses every digit where the gate nears 1
    gate = torch.nn.functional.logsigmoid(tau * (torch.where(flat, d.detach(), d).exp() - 1)).exp()
    return -adv * (4.0 / tau) * torch.where(flat, gate.detach(), gate)


def topr(logp: Tensor, d: Tensor, adv: Tensor, spec: LossSpec) -> Tensor:
    """-A*logp where A > 0, -sg[clip(r)]*A*logp elsewhere."""
    taper = clamp(d.detach().exp(), (spec.clip_low, spec.clip_high))
    return -torch.where(adv > 0, 1.0, taper) * adv * logp


def vespo(logp: Tensor, log_w: Tensor, adv: Tensor, spec: LossSpec) -> Tensor:
    """-sg[phi]*A*logp, log phi = lambda + k*log W - lambda*W."""
    k = by_sign(adv >= 0, spec.k_pos, spec.k_neg, log_w)
    rate = by_sign(adv >= 0, spec.lambda_pos, spec.lambda_neg, log_w)
    phi = (rate + k * log_w - rate * log_w.exp()).exp()
    return -phi.detach() * adv * logp


def surrogate(logp: Tensor, d: Tensor, adv: Tensor, log_w: Tensor | None, spec: LossSpec) -> tuple[Tensor, Tensor]:
    """The policy term per token, and where the dual clip binds. A = 0 gives exactly 0, also when r overflows."""
    zero = adv == 0
    broken = (logp != logp) | (d != d)  # an unmasked NaN stays visible
    d_live, logp_live = torch.where(zero, 0.0, d), torch.where(zero, 0.0, logp)
    dual = torch.zeros_like(zero)
    if spec.surrogate == Surrogate.REINFORCE:
        x = reinforce(logp_live, adv)
    elif spec.surrogate == Surrogate.IMPORTANCE_RATIO:
        x = importance_ratio(d_live, adv)
    elif spec.surrogate == Surrogate.CLIPPED_RATIO:
        x, dual = clipped_ratio(d_live, adv, spec)
    elif spec.surrogate == Surrogate.CISPO:
        x = cispo(logp_live, d_live, adv, spec)
    elif spec.surrogate == Surrogate.SAPO:
        x = sapo(d_live, adv, spec)
    elif spec.surrogate == Surrogate.TOPR:
        x = topr(logp_live, d_live, adv, spec)
    elif spec.surrogate == Surrogate.VESPO:
        assert log_w is not None
        x = vespo(logp_live, log_w, adv, spec)
    else:
        raise ValueError(f"surrogate: the reference has no term for {spec.surrogate!r}")
    return torch.where(zero, torch.where(broken, torch.nan, 0.0).to(x.dtype), x), dual & ~zero


def clip_tokens(t: Tensor, adv: Tensor, bounds: tuple[float, float]) -> Tensor:
    """The log-ratio, clipped only on the side that its advantage pushes it to: above for A > 0, below for A < 0."""
    low, high = bounds
    return torch.where((adv > 0) & (t > high), high, torch.where((adv < 0) & (t < low), low, t))


# ---------------------------------------------------------------- masks and weights, all detached


def binary_kl(logp: Tensor, anchor: Tensor) -> Tensor:
    """D(p'||p) of the two-outcome distributions (token, everything else), p = e^logp, p' = e^anchor."""
    inside = (PROBABILITY_FLOOR, 1 - PROBABILITY_FLOOR)
    a, b = clamp(anchor.exp(), inside), clamp(logp.exp(), inside)
    return a * (a / b).log() + (1 - a) * ((1 - a) / (1 - b)).log()


def dropped(logp: Tensor, anchor: Tensor, d: Tensor, adv: Tensor, selected: Tensor | None, spec: LossSpec) -> Tensor:
    """Where the keep mask, or the batch's selection, takes the policy term away."""
    logp, d = logp.detach(), d.detach()
    drop = torch.zeros_like(adv, dtype=torch.bool)
    if spec.keep != Keep.NONE:
        moved = logp.exp() - anchor.exp()
        if spec.keep == Keep.RATIO:
            v = d.exp()
        elif spec.keep == Keep.TV:
            v = moved
        else:
            v = binary_kl(logp, anchor) * moved.sign()
        below, above = v < spec.keep_low, v > spec.keep_high
        drop = torch.where(adv > 0, above, below) if spec.keep_directional else below | above
    if spec.selection == Selection.CLIP_COV:
        assert selected is not None
        drop = drop | (selected != 0)
    return drop


def bound_weight(log_rho: Tensor, spec: LossSpec) -> Tensor:
    """A correction weight from its log: clipped to [is_low, is_high], or 0 outside; 1 without a correction."""
    rho = log_rho.exp()
    if spec.is_correction == Correction.TRUNCATE:
        return clamp(rho, (spec.is_low, spec.is_high))
    if spec.is_correction == Correction.MASK:
        return torch.where((rho < spec.is_low) | (rho > spec.is_high), 0.0, rho)
    return torch.where(log_rho == log_rho, torch.ones_like(rho), rho)


def rejected(log_rho: Tensor, spec: LossSpec) -> Tensor:
    """Where a rollout ratio lies outside [is_reject_low, is_reject_high]."""
    rho = log_rho.exp()
    return (rho < spec.is_reject_low) | (rho > spec.is_reject_high)


def correction_weight(log_rho: Tensor, product: Tensor, mean: Tensor, missing: Tensor, spec: LossSpec) -> Tensor:
    """The weight of every token from its own log-ratio, its sequence's sum and its sequence's mean of them."""
    token = torch.where(missing, 0.0, log_rho)
    by_level = {CorrectionLevel.TOKEN: token, CorrectionLevel.SEQUENCE: product, CorrectionLevel.GEOMETRIC: mean}
    weight = bound_weight(by_level[spec.is_level], spec)
    if spec.is_level == CorrectionLevel.TOKEN:
        weight = torch.where(missing, 1.0, weight)
    if spec.is_reject == Reject.TOKEN:
        weight = torch.where(rejected(token, spec) & ~missing, 0.0, weight)
    elif spec.is_reject == Reject.SEQUENCE:
        weight = torch.where(rejected(product, spec), 0.0, weight)
    elif spec.is_reject == Reject.GEOMETRIC:
        weight = torch.where(rejected(mean, spec), 0.0, weight)
    return weight


# ---------------------------------------------------------------- KL terms


def kl_k1(d: Tensor) -> Tensor:
    """Log pi/pi_ref: unbiased, signed."""
    return d


def kl_k2(d: Tensor) -> Tensor:
    """d^2/2: its gradient is that of the reverse KL."""
    return d * d / 2


def kl_k3(d: Tensor) -> Tensor:
    """exp(-d) + d - 1: unbiased, never negative."""
    return (-d).exp() + d - 1


def kl_abs(d: Tensor) -> Tensor:
    """|d|."""
    return d.abs()


ESTIMATORS = {KL.K1: kl_k1, KL.K2: kl_k2, KL.K3: kl_k3, KL.ABS: kl_abs}


def step(d: Tensor) -> Tensor:
    """Exactly 0, with the gradient of d; a value to which it is added keeps its bits."""
    infinite = d.isinf()
    return torch.where(infinite, 0.0, d - d.detach())


def kl_term(logp: Tensor, anchor: Tensor, spec: LossSpec) -> Tensor:
    """The KL estimate per token with its clamps and the spec's gradient: 0 where one binds, unless straight-through."""
    d = logp - anchor
    low, high = spec.kl_log_ratio_clamp
    value = ESTIMATORS[spec.kl](clamp(d.detach(), spec.kl_log_ratio_clamp))
    bound = (value < spec.kl_clamp[0]) | (value > spec.kl_clamp[1]) | (d < low) | (d > high)
    live = torch.where(bound, d.detach(), d)  # a bound value may overflow, and 0*inf would be its gradient
    value = clamp(ESTIMATORS[spec.kl](clamp(live, spec.kl_log_ratio_clamp)), spec.kl_clamp)
    if spec.kl_gradient == KLGradient.STRAIGHT_THROUGH:
        value = value.detach() + step(d) * torch.where(d.isinf(), 0.0, d.detach())
    elif spec.kl_gradient == KLGradient.SCORE:
        value = value + step(live) * torch.where(live.isinf(), 0.0, value.detach())
    return value


def kl_backward_score(logp: Tensor) -> Tensor:
    """-logp: the cross entropy of the sampler's own token."""
    return -logp


def kl_backward_k3(t: Tensor) -> Tensor:
    """exp(t) - 1 - t, t = logp - logp_target: never negative."""
    return t.exp() - 1 - t


def kl_forward_score(logp: Tensor, t: Tensor) -> Tensor:
    """sg[exp(t)*t]*logp."""
    return (t.exp() * t).detach() * logp


def kl_forward_k3(t: Tensor) -> Tensor:
    """exp(t)*t - exp(t) + 1: never negative."""
    return t.exp() * t - t.exp() + 1


def kl_backward(logp: Tensor, target: Tensor, spec: LossSpec) -> Tensor:
    """KL(target||policy) on a sample of the target."""
    if spec.kl_backward == KLSampled.SCORE:
        return kl_backward_score(logp)
    return kl_backward_k3(clamp(logp - target, spec.kl_log_ratio_clamp))


def kl_forward(logp: Tensor, target: Tensor, spec: LossSpec) -> Tensor:
    """KL(policy||target) on a sample of the target."""
    t = clamp(logp - target, spec.kl_log_ratio_clamp)
    return kl_forward_score(logp, t) if spec.kl_forward == KLSampled.SCORE else kl_forward_k3(t)
