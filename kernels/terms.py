"""Stage B, one token at a time: value and derivative of every term, with no pointer in sight.

Each function takes scalars or blocks and mirrors the function of the same name in `fusedpg.reference` and
`csrc/terms.h`. `spec` is the tuple of `load_spec`: a scalar per entry of `LossSpec.encode`, read at run time, so one
compilation serves every loss. Derivatives are pairs: `dr` through the log-ratio, `dl` straight to logp.
"""

import triton
import triton.language as tl

from fusedpg import spec as _spec

# positions in LossSpec.encode()
SURROGATE = tl.constexpr(0)
LEVEL = tl.constexpr(1)
ANCHOR = tl.constexpr(2)
CLIP_LOW = tl.constexpr(3)
CLIP_HIGH = tl.constexpr(4)
DUAL_CLIP = tl.constexpr(5)
DELTA = tl.constexpr(6)
LOG_RATIO_LO = tl.constexpr(7)
LOG_RATIO_HI = tl.constexpr(8)
KL = tl.constexpr(9)
KL_COEF = tl.constexpr(10)
KL_TARGET = tl.constexpr(11)
KL_RATIO = tl.constexpr(12)
KL_STRAIGHT_THROUGH = tl.constexpr(13)
KL_LO = tl.constexpr(14)
KL_HI = tl.constexpr(15)
KL_LOG_RATIO_LO = tl.constexpr(16)
KL_LOG_RATIO_HI = tl.constexpr(17)
ENTROPY_COEF = tl.constexpr(18)

REINFORCE = tl.constexpr(int(_spec.Surrogate.REINFORCE))
IMPORTANCE_RATIO = tl.constexpr(int(_spec.Surrogate.IMPORTANCE_RATIO))
CLIPPED_RATIO = tl.constexpr(int(_spec.Surrogate.CLIPPED_RATIO))
LEVEL_TOKEN = tl.constexpr(int(_spec.Level.TOKEN))
LEVEL_SEQUENCE = tl.constexpr(int(_spec.Level.SEQUENCE))
ANCHOR_SELF = tl.constexpr(int(_spec.Anchor.SELF))
ANCHOR_ROLLOUT = tl.constexpr(int(_spec.Anchor.ROLLOUT))
KL_NONE = tl.constexpr(int(_spec.KL.NONE))
KL_K1 = tl.constexpr(int(_spec.KL.K1))
KL_K2 = tl.constexpr(int(_spec.KL.K2))
KL_K3 = tl.constexpr(int(_spec.KL.K3))
TARGET_ROLLOUT = tl.constexpr(int(_spec.KLTarget.ROLLOUT))
RATIO_NONE = tl.constexpr(int(_spec.KLRatio.NONE))
RATIO_LIVE = tl.constexpr(int(_spec.KLRatio.LIVE))

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_spec(spec_ptr):
    """The tuple that every function below calls `spec`."""
    return (
        tl.load(spec_ptr + 0),
        tl.load(spec_ptr + 1),
        tl.load(spec_ptr + 2),
        tl.load(spec_ptr + 3),
        tl.load(spec_ptr + 4),
        tl.load(spec_ptr + 5),
        tl.load(spec_ptr + 6),
        tl.load(spec_ptr + 7),
        tl.load(spec_ptr + 8),
        tl.load(spec_ptr + 9),
        tl.load(spec_ptr + 10),
        tl.load(spec_ptr + 11),
        tl.load(spec_ptr + 12),
        tl.load(spec_ptr + 13),
        tl.load(spec_ptr + 14),
        tl.load(spec_ptr + 15),
        tl.load(spec_ptr + 16),
        tl.load(spec_ptr + 17),
        tl.load(spec_ptr + 18),
    )


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
    lo = spec[LOG_RATIO_LO]
    hi = spec[LOG_RATIO_HI]
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
    delta = spec[DELTA]
    over = r > delta
    unclipped = -adv * tl.where(over, delta, r)
    clipped = -adv * clamp(r, spec[CLIP_LOW], spec[CLIP_HIGH])
    replaced = unclipped < clipped
    x = tl.where(replaced, clipped, unclipped)
    dr = tl.where(replaced | over, 0.0, -adv * dr_dd)
    cap = tl.where(adv < 0.0, -adv * spec[DUAL_CLIP], float("inf"))
    dual = x > cap
    return tl.where(dual, cap, x), tl.where(dual, 0.0, dr), zeros_as(r), tl.where(dual, 1.0, 0.0)


@triton.jit
def cispo(logp, r, adv, spec):
    """-sg[clip(r)]*A*logp."""
    q = clamp(r, spec[CLIP_LOW], spec[CLIP_HIGH])
    return -q * adv * logp, zeros_as(logp), -q * adv


@triton.jit
def surrogate(logp, d, r, dr_dd, adv, spec):
    """The policy term -> (x, dr, dl, dual). A = 0 gives exactly 0 even when r overflows; a NaN stays visible."""
    dual = zeros_as(logp)
    code = spec[SURROGATE]
    if code == REINFORCE:
        x, dr, dl = reinforce(logp, adv)
    elif code == IMPORTANCE_RATIO:
        x, dr, dl = importance_ratio(r, dr_dd, adv)
    elif code == CLIPPED_RATIO:
        x, dr, dl, dual = clipped_ratio(r, dr_dd, adv, spec)
    else:
        x, dr, dl = cispo(logp, r, adv, spec)
    zero = adv == 0.0
    x = tl.where(zero, tl.where((logp == logp) & (d == d), 0.0, float("nan")), x)
    return x, tl.where(zero, 0.0, dr), tl.where(zero, 0.0, dl), tl.where(zero, 0.0, dual)


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
    """The KL estimate of logp - anchor with its clamps -> (value, d value/d logp)."""
    raw = logp - logp_anchor
    t = clamp(raw, spec[KL_LOG_RATIO_LO], spec[KL_LOG_RATIO_HI])
    code = spec[KL]
    if code == KL_K1:
        value, g = kl_k1(t)
    elif code == KL_K2:
        value, g = kl_k2(t)
    elif code == KL_K3:
        value, g = kl_k3(t)
    else:
        value, g = kl_abs(t)
    g = unless_clamped(g, raw, spec[KL_LOG_RATIO_LO], spec[KL_LOG_RATIO_HI])
    g = unless_clamped(g, value, spec[KL_LO], spec[KL_HI])
    g = tl.where(spec[KL_STRAIGHT_THROUGH] != 0.0, raw, g)
    return clamp(value, spec[KL_LO], spec[KL_HI]), g


@triton.jit
def token_terms(logp, d_raw, adv, logp_kl, is_weight, entropy, spec):
    """A token's loss -> (x, dr, dl, d, r, kl, dual); is_weight is 1 where none is given, entropy 0 where unused."""
    d, r, dr_dd = clamp_log_ratio(d_raw, spec)
    x, dr, dl, dual = surrogate(logp, d, r, dr_dd, adv, spec)
    dropped = is_weight == 0.0
    x = tl.where(dropped, 0.0, is_weight * x)
    dr = tl.where(dropped, 0.0, is_weight * dr)
    dl = tl.where(dropped, 0.0, is_weight * dl)
    kl = zeros_as(logp)
    if spec[KL] != KL_NONE:
        kl, g = kl_term(logp, logp_kl, spec)
        rho = tl.where(spec[KL_RATIO] == RATIO_NONE, 1.0, r)
        x += spec[KL_COEF] * rho * kl
        dl += spec[KL_COEF] * rho * g
        if spec[KL_RATIO] == RATIO_LIVE:
            dr += spec[KL_COEF] * dr_dd * kl
    if spec[ENTROPY_COEF] != 0.0:
        x -= spec[ENTROPY_COEF] * entropy
    return x, dr, dl, d, r, kl, dual
