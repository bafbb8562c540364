"""What a sequence's tokens share: the log-ratio z, its adjoint D, VESPO's log W, and the correction's factor.

    z = sum w*u / sum w (u the tokens' log-ratio, clipped where the spec says so),  D = sum w*dr / sum w
    log W = the sum of log-ratios and log weights;  factor: see `correction.sequence_weight`

All are spread to the sequence's tokens, where `token_block_kernel` reads them; log W stands in z's place. Sums are
fp64, in an order fixed by the sequence alone. `sequence_means` serves the kernel here and the last row to arrive in
`one_pass.sequence_forward_kernel`.
"""

import triton
import triton.language as tl

from . import codes
from .correction import correction_weight, has_factor, rollout_log_ratio, sequence_weight
from .launch import RUNTIME
from .streams import log_ratio, token_constants
from .terms import clamp, clip_tokens, param, token_terms, zeros_as

#: a correction weight's bounds in VESPO's product, in log space: log 1e-8 and 20
LOG_WEIGHT_LO = tl.constexpr(-18.420680743952367)
LOG_WEIGHT_HI = tl.constexpr(20.0)


@triton.jit
def sequence_bounds(cu_ptr, s, N):
    """[lo, hi) of sequence s; whatever cu holds, inside [0, N]."""
    lo = tl.load(cu_ptr + s)
    hi = tl.load(cu_ptr + s + 1)
    zero = lo * 0
    return tl.maximum(tl.minimum(lo, N), zero), tl.maximum(tl.minimum(hi, N), zero)


@triton.jit
def load_block(i, hi, w_ptr, logp_ptr, TOKENS: tl.constexpr):
    """(rows, w, w != 0, logp) from row i on; past the L1 cache, as programs of this launch may have written logp."""
    rows = i + tl.arange(0, TOKENS)
    w = tl.load(w_ptr + rows, mask=rows < hi, other=0.0)
    on = w != 0.0
    return rows, w, on, tl.load(logp_ptr + rows, mask=on, other=0.0, cache_modifier=".cg")


@triton.jit
def add(total, values, among):
    """total + values in fp64, where `among`."""
    return total + tl.where(among, values.to(tl.float64), 0.0)


@triton.jit
def quotient(total, weight):
    """total/weight of two block sums, 0 for no weight."""
    units = tl.sum(weight, 0)
    return (tl.sum(total, 0) / tl.where(units > 0.0, units, 1.0)).to(tl.float32)


@triton.jit
def correction_factor(lo, hi, spec, logp_ptr, w_ptr, streams, given, TOKENS: tl.constexpr):
    """The factor on the weights of the sequence's tokens."""
    product = tl.zeros((TOKENS,), tl.float64)
    mean = tl.zeros((TOKENS,), tl.float64)
    weight = tl.zeros((TOKENS,), tl.float64)
    for i in range(lo, hi, TOKENS):
        rows, w, on, logp = load_block(i, hi, w_ptr, logp_ptr, TOKENS)
        anchor, _t = log_ratio(rows, on, logp, streams, spec, given)
        log_rho, known = rollout_log_ratio(rows, on, logp, anchor, streams, spec)
        among = on & (known != 0.0)
        product = add(product, log_rho, among)
        mean = add(mean, w.to(tl.float64) * log_rho.to(tl.float64), among)
        weight = add(weight, w, among)
    return sequence_weight(tl.sum(product, 0).to(tl.float32), quotient(mean, weight), spec)


@triton.jit
def log_product(lo, hi, factor, spec, logp_ptr, w_ptr, streams, given, TOKENS: tl.constexpr):
    """VESPO's log W: of the product of ratios and correction weights, each clamped, then clamped itself."""
    total = tl.zeros((TOKENS,), tl.float64)
    for i in range(lo, hi, TOKENS):
        rows, _w, on, logp = load_block(i, hi, w_ptr, logp_ptr, TOKENS)
        anchor, t = log_ratio(rows, on, logp, streams, spec, given)
        weight, _counted = correction_weight(rows, on, logp, anchor, factor, streams, spec, given)
        t = clamp(t, param(spec, codes.TOKEN_CLIP_LO), param(spec, codes.TOKEN_CLIP_HI))
        log_weight = clamp(tl.log(weight), LOG_WEIGHT_LO, LOG_WEIGHT_HI)
        total = add(total, t.to(tl.float64) + log_weight.to(tl.float64), on)
    return clamp(tl.sum(total, 0).to(tl.float32), param(spec, codes.LOG_W_LO), param(spec, codes.LOG_W_HI))


@triton.jit
def mean_log_ratio(lo, hi, spec, logp_ptr, w_ptr, streams, given, TOKENS: tl.constexpr):
    """z."""
    total = tl.zeros((TOKENS,), tl.float64)
    weight = tl.zeros((TOKENS,), tl.float64)
    for i in range(lo, hi, TOKENS):
        rows, w, on, logp = load_block(i, hi, w_ptr, logp_ptr, TOKENS)
        _anchor, t = log_ratio(rows, on, logp, streams, spec, given)
        if param(spec, codes.LEVEL) == codes.LEVEL_SEQUENCE:
            adv = tl.load(streams[codes.ADVANTAGES] + rows, mask=on, other=0.0)
            t, _pass = clip_tokens(t, adv, spec)
        total = add(total, w.to(tl.float64) * t.to(tl.float64), on)
        weight = add(weight, w, on)
    return quotient(total, weight)


@triton.jit
def mean_adjoint(lo, hi, z, factor, spec, logp_ptr, w_ptr, streams, given, TOKENS: tl.constexpr):
    """D, the derivative of the sequence's loss through z, shared by its tokens."""
    total = tl.zeros((TOKENS,), tl.float64)
    weight = tl.zeros((TOKENS,), tl.float64)
    for i in range(lo, hi, TOKENS):
        rows, w, on, logp = load_block(i, hi, w_ptr, logp_ptr, TOKENS)
        anchor, t = log_ratio(rows, on, logp, streams, spec, given)
        adv, logp_kl, picked = token_constants(rows, on, logp, streams, spec, given)
        om, _counted = correction_weight(rows, on, logp, anchor, factor, streams, spec, given)
        none = zeros_as(logp)
        _x, dr, _dl, _d, _r, _kl, _dual, _drop = token_terms(
            logp, anchor, t, none + z, adv, logp_kl, om, picked, none, spec
        )
        total = add(total, w.to(tl.float64) * dr.to(tl.float64), on)
        weight = add(weight, w, on)
    return quotient(total, weight)


@triton.jit
def sequence_means(
    lo, hi, spec, logp_ptr, w_ptr, streams, z_ptr, adjoint_ptr, factor_ptr, given, TOKENS: tl.constexpr
):  # fmt: skip
    """Write z (or log W), D and the correction's factor of the sequence [lo, hi) to each of its tokens."""
    z = tl.zeros((), tl.float32)
    adjoint = tl.zeros((), tl.float32)
    factor = tl.zeros((), tl.float32) + 1.0
    if has_factor(spec, given):
        factor = correction_factor(lo, hi, spec, logp_ptr, w_ptr, streams, given, TOKENS)
    if param(spec, codes.SURROGATE) == codes.VESPO:
        z = log_product(lo, hi, factor, spec, logp_ptr, w_ptr, streams, given, TOKENS)
    elif param(spec, codes.LEVEL) != codes.LEVEL_TOKEN:
        z = mean_log_ratio(lo, hi, spec, logp_ptr, w_ptr, streams, given, TOKENS)
    if param(spec, codes.LEVEL) == codes.LEVEL_SEQUENCE:
        adjoint = mean_adjoint(lo, hi, z, factor, spec, logp_ptr, w_ptr, streams, given, TOKENS)
    for i in range(lo, hi, TOKENS):
        rows = i + tl.arange(0, TOKENS)
        spread = tl.zeros((TOKENS,), tl.float32)
        tl.store(z_ptr + rows, spread + z, mask=rows < hi)
        tl.store(adjoint_ptr + rows, spread + adjoint, mask=rows < hi)
        tl.store(factor_ptr + rows, spread + factor, mask=rows < hi)


@triton.jit(do_not_specialize=RUNTIME)
def segments_kernel(
    spec_ptr, cu_ptr, logp_ptr, w_ptr, adv_ptr, logp_old_ptr, logp_ref_ptr, logp_rollout_ptr, is_weights_ptr,
    obs_weights_ptr, selected_ptr, z_ptr, adjoint_ptr, factor_ptr, N: tl.int32, given: tl.int32, TOKENS: tl.constexpr,
):  # fmt: skip
    """One program a sequence."""
    lo, hi = sequence_bounds(cu_ptr, tl.program_id(0).to(tl.int64), N)
    streams = (
        adv_ptr, logp_old_ptr, logp_ref_ptr, logp_rollout_ptr, is_weights_ptr, obs_weights_ptr, selected_ptr
    )  # fmt: skip
    sequence_means(lo, hi, spec_ptr, logp_ptr, w_ptr, streams, z_ptr, adjoint_ptr, factor_ptr, given, TOKENS)
