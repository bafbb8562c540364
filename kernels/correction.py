"""The correction weight: a given factor, or formed from the policy's own log-prob less the sampling engine's.

Token-level weights are local. Sequence and geometric levels are one `factor` a sequence, which `segments` computes.
"""

import triton
import triton.language as tl

from . import codes
from .launch import HAS_IS_WEIGHTS, HAS_LOGP_ROLLOUT
from .terms import clamp, param, zeros_as

HAS_IS_WEIGHTS = tl.constexpr(HAS_IS_WEIGHTS)
HAS_LOGP_ROLLOUT = tl.constexpr(HAS_LOGP_ROLLOUT)


@triton.jit
def forms_weights(spec, given):
    """Whether weights are formed from logp_rollout; a given weight goes first."""
    asked = (param(spec, codes.CORRECTION) != codes.CORRECTION_NONE) | (param(spec, codes.REJECT) != codes.REJECT_NONE)
    return asked & ((given & HAS_LOGP_ROLLOUT) != 0) & ((given & HAS_IS_WEIGHTS) == 0)


@triton.jit
def has_factor(spec, given):
    """Whether the sequence has a say in its tokens' weights."""
    level = param(spec, codes.CORRECTION_LEVEL) != codes.CORRECTION_TOKEN
    corrects = (param(spec, codes.CORRECTION) != codes.CORRECTION_NONE) & level
    return (corrects | (param(spec, codes.REJECT) > codes.REJECT_TOKEN)) & forms_weights(spec, given)


@triton.jit
def without_missing(value, absent, spec):
    """(value or, where it is NaN and the spec takes that for missing, `absent`; 0.0 where it is missing, else 1.0)."""
    missing = (value != value) & (zeros_as(value) != param(spec, codes.MISSING_ONE))
    return tl.where(missing, absent, value), tl.where(missing, 0.0, 1.0)


@triton.jit
def rollout_log_ratio(rows, on, logp, anchor, streams, spec):
    """(log of the token's rollout ratio, 0.0 where it is missing, else 1.0); a missing one counts as ratio 1."""
    base = tl.where(param(spec, codes.ANCHOR) == codes.ANCHOR_ROLLOUT, logp, anchor)
    rollout = tl.load(streams[codes.LOGP_ROLLOUT] + rows, mask=on, other=0.0)
    rollout, known = without_missing(rollout, 0.0, spec)
    return tl.where(known != 0.0, base - rollout, 0.0), known


@triton.jit
def bound_weight(log_rho, spec):
    """A weight from its log: clipped to its bounds, or 0 outside them; 1 without a correction. A NaN stays."""
    kind = param(spec, codes.CORRECTION)
    lo = param(spec, codes.CORRECTION_LOW)
    hi = param(spec, codes.CORRECTION_HIGH)
    rho = tl.exp(log_rho)
    weight = tl.where(rho == rho, 1.0, rho)
    if kind == codes.CORRECTION_TRUNCATE:
        weight = clamp(rho, lo, hi)
    elif kind == codes.CORRECTION_MASK:
        weight = tl.where((rho < lo) | (rho > hi), 0.0, rho)
    return weight


@triton.jit
def rejected(log_rho, spec):
    """Where a rollout ratio lies outside its bounds."""
    rho = tl.exp(log_rho)
    return (rho < param(spec, codes.REJECT_LOW)) | (rho > param(spec, codes.REJECT_HIGH))


@triton.jit
def sequence_weight(product, mean, spec):
    """The factor that a sequence gives its tokens, from the sum and the mean of their log rollout ratios."""
    factor = zeros_as(product) + 1.0
    level = param(spec, codes.CORRECTION_LEVEL)
    if level != codes.CORRECTION_TOKEN:
        factor = bound_weight(tl.where(level == codes.CORRECTION_SEQUENCE, product, mean), spec)
    reject = param(spec, codes.REJECT)
    if reject > codes.REJECT_TOKEN:
        log_rho = tl.where(reject == codes.REJECT_SEQUENCE, product, mean)
        factor = tl.where(rejected(log_rho, spec), 0.0, factor)
    return factor


@triton.jit
def correction_weight(rows, on, logp, anchor, factor, streams, spec, given):
    """(weight of the policy term, 1.0 where its metrics count the token)."""
    weight = zeros_as(logp) + 1.0
    counted = zeros_as(logp)
    if (given & HAS_IS_WEIGHTS) != 0:
        weight = tl.load(streams[codes.IS_WEIGHTS] + rows, mask=on, other=1.0)
        weight, counted = without_missing(weight, 1.0, spec)
    elif forms_weights(spec, given):
        log_rho, counted = rollout_log_ratio(rows, on, logp, anchor, streams, spec)
        known = counted != 0.0
        own = param(spec, codes.CORRECTION_LEVEL) == codes.CORRECTION_TOKEN
        if own | (param(spec, codes.CORRECTION) == codes.CORRECTION_NONE):
            weight = tl.where(known, bound_weight(log_rho, spec), 1.0)
        weight = tl.where(factor == 0.0, 0.0, weight * factor)
        if param(spec, codes.REJECT) == codes.REJECT_TOKEN:
            weight = tl.where(known & rejected(log_rho, spec), 0.0, weight)
    return weight, counted
