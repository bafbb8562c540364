"""Stage B, one token at a time: value and derivative of every term.

Each function takes scalars or blocks and mirrors the function of the same name in `fusedpg.reference_terms` and
`csrc/terms.h`. `spec` points to `LossSpec.encode`: entries are read at run time, where they are used, so one
compilation serves every loss and none of them occupies a register across a vocabulary loop. Derivatives are pairs:
`dr` through the log-ratio, `dl` straight to logp. Masks that outlive a branch are 0.0 or 1.0.
"""

import triton
import triton.language as tl

from . import codes

#: binary probabilities stay this far from 0 and 1 in the KL keep mask
PROBABILITY_FLOOR = tl.constexpr(1e-6)


@triton.jit
def param(spec, index: tl.constexpr):
    """An entry of the encoded spec."""
    return tl.load(spec + index)


@triton.jit
def zeros_as(x):
    """Zeros of x's shape, for a scalar as for a block."""
    return tl.where(x == x, 0.0, 0.0)


@triton.jit
def clamp(d, lo, hi):
    """Comparisons, not min and max: a NaN stays NaN."""
    return tl.where(d < lo, lo, tl.where(d > hi, hi, d))


@triton.jit
def unless_clamped(g, d, lo, hi):
    """The gradient g where clamp(d, lo, hi) passes it, 0 where a bound binds."""
    return tl.where((d < lo) | (d > hi), 0.0, g)


@triton.jit
def clamp_log_ratio(d, spec):
    """(d clamped, r = exp(d clamped), r' = dr/dd)."""
    lo = param(spec, codes.LOG_RATIO_LO)
    hi = param(spec, codes.LOG_RATIO_HI)
    clamped = clamp(d, lo, hi)
    r = tl.exp(clamped)
    return clamped, r, unless_clamped(r, d, lo, hi)


@triton.jit
def reinforce(logp, adv):
    """-A*logp."""
    return -adv * logp, zeros_as(logp), -adv + zeros_as(logp)


@triton.jit
def importance_ratio(r, dr_dd, adv):
    """-A*r."""
    return -adv * r, -adv * dr_dd, zeros_as(r)


@triton.jit
def clipped_ratio(r, dr_dd, adv, spec):
    """max(-A*min(r, delta), -A*clip(r)), at most -A*dual_clip where A < 0; ties keep the gradient.

    -> (x, dr, dl, 1.0 where the dual clip binds).
    """
    delta = param(spec, codes.DELTA)
    over = r > delta
    unclipped = -adv * tl.where(over, delta, r)
    lo = param(spec, codes.CLIP_LOW)
    hi = param(spec, codes.CLIP_HIGH)
    clipped = -adv * clamp(r, lo, hi)
    replaced = unclipped < clipped
    x = tl.where(replaced, clipped, unclipped)
    # the clipped branch has a gradient inside its band, which it reaches where delta binds first
    flat = tl.where(replaced, (r < lo) | (r > hi), over)
    dr = tl.where(flat, 0.0, -adv * dr_dd)
    cap = tl.where(adv < 0.0, -adv * param(spec, codes.DUAL_CLIP), float("inf"))
    dual = x > cap
    return tl.where(dual, cap, x), tl.where(dual, 0.0, dr), zeros_as(r), tl.where(dual, 1.0, 0.0)


@triton.jit
def cispo(logp, r, adv, spec):
    """-sg[clip(r)]*A*logp."""
    q = clamp(r, param(spec, codes.CLIP_LOW), param(spec, codes.CLIP_HIGH))
    return -q * adv * logp, zeros_as(logp), -q * adv


@triton.jit
def sapo(r, dr_dd, adv, spec):
    """-A*(4/tau)*s, s = sigmoid(tau*(r - 1)), tau by the sign of A."""
    tau = tl.where(adv > 0.0, param(spec, codes.SHAPE_POS), param(spec, codes.SHAPE_NEG))
    u = tau * (r - 1.0)
    e = tl.exp(-tl.abs(u))
    whole = 1.0 + e
    gate = tl.div_rn(tl.where(u < 0.0, e, 1.0), whole)
    # s*(1 - s) without a difference of nearly equal numbers; 0 times an infinite ratio is no gradient
    slope = tl.where(e == 0.0, 0.0, tl.div_rn(e, whole * whole) * dr_dd)
    return -adv * tl.div_rn(4.0, tau) * gate, -adv * 4.0 * slope, zeros_as(r)


@triton.jit
def topr(logp, r, adv, spec):
    """-A*logp where A > 0, -sg[clip(r)]*A*logp elsewhere."""
    q = tl.where(adv > 0.0, 1.0, clamp(r, param(spec, codes.CLIP_LOW), param(spec, codes.CLIP_HIGH)))
    return -q * adv * logp, zeros_as(logp), -q * adv


@triton.jit
def vespo(logp, log_w, adv, spec):
    """-sg[phi]*A*logp, log phi = lambda + k*log W - lambda*W, (k, lambda) by the sign of A."""
    k = tl.where(adv >= 0.0, param(spec, codes.SHAPE_POS), param(spec, codes.SHAPE_NEG))
    rate = tl.where(adv >= 0.0, param(spec, codes.LAMBDA_POS), param(spec, codes.LAMBDA_NEG))
    # lambda*(1 - W): fewer roundings of large numbers than lambda - lambda*W
    phi = tl.exp(tl.fma(rate, 1.0 - tl.exp(log_w), k * log_w))
    return -phi * adv * logp, zeros_as(logp), -phi * adv


@triton.jit
def surrogate(logp, d, r, dr_dd, adv, log_w, spec):
    """The policy term -> (x, dr, dl, dual). A = 0 gives exactly 0 even when r overflows; a NaN stays visible."""
    dual = zeros_as(logp)
    code = param(spec, codes.SURROGATE)
    if code == codes.REINFORCE:
        x, dr, dl = reinforce(logp, adv)
    elif code == codes.IMPORTANCE_RATIO:
        x, dr, dl = importance_ratio(r, dr_dd, adv)
    elif code == codes.CLIPPED_RATIO:
        x, dr, dl, dual = clipped_ratio(r, dr_dd, adv, spec)
    elif code == codes.SAPO:
        x, dr, dl = sapo(r, dr_dd, adv, spec)
    elif code == codes.TOPR:
        x, dr, dl = topr(logp, r, adv, spec)
    elif code == codes.VESPO:
        x, dr, dl = vespo(logp, log_w, adv, spec)
    else:
        x, dr, dl = cispo(logp, r, adv, spec)
    zero = adv == 0.0
    x = tl.where(zero, tl.where((logp == logp) & (d == d), 0.0, float("nan")), x)
    return x, tl.where(zero, 0.0, dr), tl.where(zero, 0.0, dl), tl.where(zero, 0.0, dual)


@triton.jit
def clip_tokens(t, adv, spec):
    """t clipped only on the side that A pushes it to -> (t clipped, 1.0 where it passes the gradient)."""
    lo = param(spec, codes.TOKEN_CLIP_LO)
    hi = param(spec, codes.TOKEN_CLIP_HI)
    over = (adv > 0.0) & (t > hi)
    under = (adv < 0.0) & (t < lo)
    return tl.where(over, hi, tl.where(under, lo, t)), tl.where(over | under, 0.0, 1.0)


@triton.jit
def binary_kl(p, p_anchor):
    """D(p'||p) of the two-outcome distributions (token, everything else)."""
    a = clamp(p_anchor, PROBABILITY_FLOOR, 1.0 - PROBABILITY_FLOOR)
    b = clamp(p, PROBABILITY_FLOOR, 1.0 - PROBABILITY_FLOOR)
    return a * tl.log(tl.div_rn(a, b)) + (1.0 - a) * tl.log(tl.div_rn(1.0 - a, 1.0 - b))


@triton.jit
def dropped(logp, anchor, r, adv, picked, spec):
    """1.0 where the keep mask, or the batch's selection, takes the policy term away; a NaN measure keeps it."""
    drop = zeros_as(logp)
    kind = param(spec, codes.KEEP)
    if kind != codes.KEEP_NONE:
        v = r
        if kind != codes.KEEP_RATIO:
            p = tl.exp(logp)
            p_anchor = tl.exp(anchor)
            v = p - p_anchor
            if kind == codes.KEEP_KL:
                moved = binary_kl(p, p_anchor)
                v = tl.where(v > 0.0, moved, tl.where(v < 0.0, -moved, v))
        below = tl.where(v < param(spec, codes.KEEP_LOW), 1.0, 0.0)
        above = tl.where(v > param(spec, codes.KEEP_HIGH), 1.0, 0.0)
        away = tl.where(adv > 0.0, above, below)
        drop = tl.where(param(spec, codes.KEEP_DIRECTIONAL) != 0.0, away, below + above)
    if param(spec, codes.SELECTION) == codes.SELECTION_CLIP_COV:
        drop = tl.where(picked != 0.0, 1.0, drop)
    return drop


@triton.jit
def penalties(t, picked, spec):
    """The token's squared log-ratio and, where the batch's selection asks for it, |t| -> (value, slope)."""
    value = zeros_as(t)
    slope = zeros_as(t)
    coef = param(spec, codes.PENALTY_COEF)
    if coef != 0.0:
        value = coef * (t * t * 0.5)
        slope = coef * t
    if param(spec, codes.SELECTION) == codes.SELECTION_KL_COV:
        distance, sign = kl_abs(t)
        value += tl.where(picked != 0.0, param(spec, codes.SELECT_COEF) * distance, 0.0)
        slope += tl.where(picked != 0.0, param(spec, codes.SELECT_COEF) * sign, 0.0)
    return value, slope


@triton.jit
def kl_k1(t):
    """t."""
    return t, zeros_as(t) + 1.0


@triton.jit
def kl_k2(t):
    """t^2/2."""
    return t * t * 0.5, t


@triton.jit
def kl_k3(t):
    """exp(-t) + t - 1."""
    u = tl.exp(-t)
    return u + t - 1.0, 1.0 - u


@triton.jit
def kl_abs(t):
    """|t|."""
    return tl.abs(t), tl.where(t > 0.0, 1.0, tl.where(t < 0.0, -1.0, t))


@triton.jit
def kl_term(logp, logp_anchor, spec):
    """The KL estimate of logp - anchor with its clamps -> (value, its gradient as the spec asks for it)."""
    raw = logp - logp_anchor
    lo = param(spec, codes.KL_LOG_RATIO_LO)
    hi = param(spec, codes.KL_LOG_RATIO_HI)
    t = clamp(raw, lo, hi)
    code = param(spec, codes.KL)
    if code == codes.KL_K1:
        value, g = kl_k1(t)
    elif code == codes.KL_K2:
        value, g = kl_k2(t)
    elif code == codes.KL_K3:
        value, g = kl_k3(t)
    else:
        value, g = kl_abs(t)
    gradient = param(spec, codes.KL_GRADIENT)
    if gradient == codes.GRADIENT_SCORE:
        g += value
    g = unless_clamped(g, raw, lo, hi)
    g = unless_clamped(g, value, param(spec, codes.KL_LO), param(spec, codes.KL_HI))
    value = clamp(value, param(spec, codes.KL_LO), param(spec, codes.KL_HI))
    return value, tl.where(gradient == codes.GRADIENT_STRAIGHT_THROUGH, raw, g)


@triton.jit
def kl_backward_score(logp):
    """-logp."""
    return -logp, zeros_as(logp) - 1.0


@triton.jit
def kl_backward_k3(t):
    """exp(t) - 1 - t."""
    u = tl.exp(t)
    return u - 1.0 - t, u - 1.0


@triton.jit
def kl_forward_score(logp, t):
    """sg[exp(t)*t]*logp."""
    g = tl.exp(t) * t
    return g * logp, g


@triton.jit
def kl_forward_k3(t):
    """exp(t)*t - exp(t) + 1."""
    u = tl.exp(t)
    return u * t - u + 1.0, u * t


@triton.jit
def kl_backward(logp, logp_target, spec):
    """KL(target||policy) on a sample of the target -> (value, d value/d logp)."""
    raw = logp - logp_target
    lo = param(spec, codes.KL_LOG_RATIO_LO)
    hi = param(spec, codes.KL_LOG_RATIO_HI)
    if param(spec, codes.KL_BACKWARD) == codes.SAMPLED_SCORE:
        value, g = kl_backward_score(logp)
    else:
        value, g = kl_backward_k3(clamp(raw, lo, hi))
        g = unless_clamped(g, raw, lo, hi)
    return value, g


@triton.jit
def kl_forward(logp, logp_target, spec):
    """KL(policy||target) on a sample of the target -> (value, d value/d logp)."""
    raw = logp - logp_target
    lo = param(spec, codes.KL_LOG_RATIO_LO)
    hi = param(spec, codes.KL_LOG_RATIO_HI)
    if param(spec, codes.KL_FORWARD) == codes.SAMPLED_SCORE:
        value, g = kl_forward_score(logp, clamp(raw, lo, hi))
    else:
        value, g = kl_forward_k3(clamp(raw, lo, hi))
        g = unless_clamped(g, raw, lo, hi)
    return value, g


@triton.jit
def policy_term(logp, anchor, t, d, r, dr_dd, adv, log_w, weight, picked, spec):
    """Surrogate, keep mask, penalties and correction weight -> (x, dr, dl, dual, drop)."""
    x, dr, dl, dual = surrogate(logp, d, r, dr_dd, adv, log_w, spec)
    drop = dropped(logp, anchor, r, adv, picked, spec)
    off = drop != 0.0
    value, slope = penalties(t, picked, spec)
    x = tl.where(off, 0.0, x) + value
    dr = tl.where(off, 0.0, dr)
    dl = tl.where(off, 0.0, dl) + slope
    # there the weight is part of the product
    weight = tl.where(param(spec, codes.SURROGATE) == codes.VESPO, 1.0, weight)
    none = weight == 0.0
    x = tl.where(none, 0.0, weight * x)
    return x, tl.where(none, 0.0, weight * dr), tl.where(none, 0.0, weight * dl), tl.where(off, 0.0, dual), drop


@triton.jit
def token_terms(logp, anchor, t, z, adv, logp_kl, weight, picked, entropy, spec):
    """A token's loss -> (x, dr, dl, d, r, kl, dual, drop).

    z is its sequence's log-ratio, or VESPO's log W; unused at token level otherwise. Where there is no weight it is 1.
    """
    d_raw = tl.where(param(spec, codes.LEVEL) == codes.LEVEL_TOKEN, t, z)
    d, r, dr_dd = clamp_log_ratio(d_raw, spec)
    x, dr, dl, dual, drop = policy_term(logp, anchor, t, d, r, dr_dd, adv, z, weight, picked, spec)
    kl = zeros_as(logp)
    if param(spec, codes.KL) != codes.KL_NONE:
        kl, g = kl_term(logp, logp_kl, spec)
        ratio = param(spec, codes.KL_RATIO)
        coef = param(spec, codes.KL_COEF)
        rho = tl.where(ratio == codes.RATIO_NONE, 1.0, r)
        x += coef * rho * kl
        dl += coef * rho * g
        if ratio == codes.RATIO_LIVE:
            dr += coef * dr_dd * kl
    if param(spec, codes.KL_BACKWARD) != codes.SAMPLED_NONE:
        value, slope = kl_backward(logp, logp_kl, spec)
        x += param(spec, codes.KL_BACKWARD_COEF) * value
        dl += param(spec, codes.KL_BACKWARD_COEF) * slope
    if param(spec, codes.KL_FORWARD) != codes.SAMPLED_NONE:
        value, slope = kl_forward(logp, logp_kl, spec)
        x += param(spec, codes.KL_FORWARD_COEF) * value
        dl += param(spec, codes.KL_FORWARD_COEF) * slope
    if param(spec, codes.ENTROPY_COEF) != 0.0:
        x -= param(spec, codes.ENTROPY_COEF) * entropy
    return x, dr, dl, d, r, kl, dual, drop
