"""Stage B: per-token loss, its coefficients c = dL/dlogp and e = dL/dH, and the sums behind loss and metrics.

`token_block_kernel` does a block of tokens and leaves its partial sums in fp64; `token_finish_kernel` adds the partials
in order. Tokens that no term wants are touched by neither: their x, c and e are 0.
"""

import triton
import triton.language as tl

from . import codes
from .correction import correction_weight
from .launch import HAS_ENTROPY, HAS_OBS_WEIGHTS, HAS_SEGMENTS, RUNTIME
from .streams import coefficient, log_ratio, optional, token_constants
from .terms import clip_tokens, param, token_terms, zeros_as

HAS_ENTROPY = tl.constexpr(HAS_ENTROPY)
HAS_OBS_WEIGHTS = tl.constexpr(HAS_OBS_WEIGHTS)
HAS_SEGMENTS = tl.constexpr(HAS_SEGMENTS)

#: positions in `sums`; the last three are extrema
NSUMS = 19
RATIO_SUM, IS_SUM, RATIO_MIN, RATIO_MAX, IS_MAX = (tl.constexpr(i) for i in (2, 11, 16, 17, 18))
#: columns of the partial sums, a power of two
WIDTH = 32
_NSUMS = tl.constexpr(NSUMS)
_WIDTH = tl.constexpr(WIDTH)


@triton.jit
def put_sum(partial_ptr, index: tl.constexpr, values, among):
    """One partial sum, added in fp64."""
    tl.store(partial_ptr + index, tl.sum(tl.where(among, values, 0.0).to(tl.float64), 0))


@triton.jit
def put_band(partial_ptr, on, t, r, adv, drop, spec):
    """Where the ratio, or a clipped token's own log-ratio, leaves the clip band, among the tokens that are kept."""
    low = r < param(spec, codes.CLIP_LOW)
    high = r > param(spec, codes.CLIP_HIGH)
    if param(spec, codes.LEVEL) == codes.LEVEL_SEQUENCE:
        low = low | (t < param(spec, codes.TOKEN_CLIP_LO))
        high = high | (t > param(spec, codes.TOKEN_CLIP_HI))
    # TOPR's band acts on A <= 0 alone
    banded = tl.where(param(spec, codes.SURROGATE) == codes.TOPR, adv, 0.0) <= 0.0
    among = on & banded & (drop == 0.0)
    put_sum(partial_ptr, 3, tl.where(low & (adv < 0.0), 1.0, 0.0), among)
    put_sum(partial_ptr, 4, tl.where(high & (adv > 0.0), 1.0, 0.0), among)
    put_sum(partial_ptr, 6, tl.where(low | high, 1.0, 0.0), among)


@triton.jit
def put_weights(partial_ptr, on, weight, counted):
    """Sums of the correction weights over the tokens that have one of their own."""
    among = on & (counted != 0.0)
    put_sum(partial_ptr, 11, weight, among)
    put_sum(partial_ptr, 12, tl.where(weight == 0.0, 1.0, 0.0), among)
    put_sum(partial_ptr, 15, counted, among)
    tl.store(partial_ptr + IS_MAX, tl.max(tl.where(among, weight, float("-inf")), 0).to(tl.float64))


@triton.jit
def put_ratios(partial_ptr, on, d, r):
    """Sums and extrema of the ratio."""
    put_sum(partial_ptr, 2, r, on)
    put_sum(partial_ptr, 7, -d, on)
    put_sum(partial_ptr, 8, r - 1.0 - d, on)
    tl.store(partial_ptr + RATIO_MIN, tl.min(tl.where(on, r, float("inf")), 0).to(tl.float64))
    tl.store(partial_ptr + RATIO_MAX, tl.max(tl.where(on, r, float("-inf")), 0).to(tl.float64))


@triton.jit(do_not_specialize=RUNTIME)
def token_block_kernel(
    spec_ptr, logp_ptr, entropy_ptr, w_ptr, adv_ptr, logp_old_ptr, logp_ref_ptr, logp_rollout_ptr, is_weights_ptr,
    obs_weights_ptr, selected_ptr, z_ptr, adjoint_ptr, factor_ptr, per_token_ptr, c_ptr, e_ptr, partial_ptr,
    N: tl.int32, given: tl.int32, BLOCK: tl.constexpr,
):  # fmt: skip
    """x, c, e of a block of tokens; z, adjoint and factor come from `segments` and are unread where it has not run."""
    block = tl.program_id(0).to(tl.int64)
    rows = block * BLOCK + tl.arange(0, BLOCK)
    partial_ptr += block * _WIDTH
    streams = (
        adv_ptr, logp_old_ptr, logp_ref_ptr, logp_rollout_ptr, is_weights_ptr, obs_weights_ptr, selected_ptr
    )  # fmt: skip
    w = tl.load(w_ptr + rows, mask=rows < N, other=0.0)
    on = w != 0.0
    observed = optional(obs_weights_ptr, rows, rows < N, HAS_OBS_WEIGHTS, given, zeros_as(w))
    logp = tl.load(logp_ptr + rows, mask=on | (observed != 0.0), other=0.0)
    none = zeros_as(logp)
    entropy = optional(entropy_ptr, rows, on, HAS_ENTROPY, given, none)
    z = none
    factor = none + 1.0
    if (given & HAS_SEGMENTS) != 0:
        z = tl.load(z_ptr + rows, mask=on, other=0.0)
        factor = tl.load(factor_ptr + rows, mask=on, other=1.0)
    anchor, t = log_ratio(rows, on, logp, streams, spec_ptr, given)
    adv, logp_kl, picked = token_constants(rows, on, logp, streams, spec_ptr, given)
    weight, counted = correction_weight(rows, on, logp, anchor, factor, streams, spec_ptr, given)
    x, dr, dl, d, r, kl, dual, drop = token_terms(logp, anchor, t, z, adv, logp_kl, weight, picked, entropy, spec_ptr)
    if param(spec_ptr, codes.LEVEL) == codes.LEVEL_SEQUENCE:
        _u, passes = clip_tokens(t, adv, spec_ptr)
        dr = tl.where(passes != 0.0, tl.load(adjoint_ptr + rows, mask=on, other=0.0), 0.0)
    x = tl.where(on, x, 0.0)
    seen = tl.where(observed != 0.0, -param(spec_ptr, codes.OBS_COEF) * logp, 0.0)
    c = coefficient(on, w, dl, dr, observed, spec_ptr)
    tl.store(per_token_ptr + rows, x + seen, mask=rows < N)
    tl.store(c_ptr + rows, c, mask=rows < N)
    coef = param(spec_ptr, codes.ENTROPY_COEF)
    tl.store(e_ptr + rows, tl.where(on, -coef * w, 0.0), mask=rows < tl.where(coef != 0.0, N, 0))

    every = rows < N
    loss = w.to(tl.float64) * x.to(tl.float64) + observed.to(tl.float64) * seen.to(tl.float64)
    put_sum(partial_ptr, 0, loss, every)
    put_sum(partial_ptr, 1, none + 1.0, on)
    put_ratios(partial_ptr, on, d, r)
    put_band(partial_ptr, on, t, r, adv, drop, spec_ptr)
    put_sum(partial_ptr, 5, dual, on)
    put_sum(partial_ptr, 9, kl, on)
    put_sum(partial_ptr, 10, entropy, on)
    put_weights(partial_ptr, on, weight, counted)
    put_sum(partial_ptr, 13, 1.0 - drop, on)
    put_sum(partial_ptr, 14, tl.where(c != 0.0, 1.0, 0.0), every)


@triton.jit(do_not_specialize=RUNTIME)
def token_finish_kernel(partial_ptr, sums_ptr, blocks: tl.int32, BLOCK: tl.constexpr):
    """Add the partials of every block, in order; extrema of a sum that is NaN are NaN."""
    lane = tl.arange(0, _WIDTH)
    total = tl.zeros((BLOCK, _WIDTH), tl.float64)
    least = tl.full((BLOCK, _WIDTH), float("inf"), tl.float64)
    most = tl.full((BLOCK, _WIDTH), float("-inf"), tl.float64)
    for start in range(0, blocks, BLOCK):
        block = start + tl.arange(0, BLOCK)
        at = block[:, None] * _WIDTH + lane[None, :]
        # a bound per element: the interpreter takes no mask made of a block and a row
        inside = at < tl.where(lane < _NSUMS, blocks * _WIDTH, 0)[None, :]
        total += tl.load(partial_ptr + at, mask=inside, other=0.0)
        least = tl.minimum(least, tl.load(partial_ptr + at, mask=inside, other=float("inf")))
        most = tl.maximum(most, tl.load(partial_ptr + at, mask=inside, other=float("-inf")))
    sums = tl.sum(total, 0)
    ratio = tl.sum(tl.where(lane == RATIO_SUM, sums, 0.0), 0)
    weight = tl.sum(tl.where(lane == IS_SUM, sums, 0.0), 0)
    extremum = tl.where(lane == RATIO_MIN, tl.min(least, 0), tl.max(most, 0))
    witness = tl.where(lane == IS_MAX, weight, ratio)
    extremum = tl.where(witness == witness, extremum, witness)
    tl.store(sums_ptr + lane, tl.where(lane < RATIO_MIN, sums, extremum).to(tl.float32), mask=lane < _NSUMS)
