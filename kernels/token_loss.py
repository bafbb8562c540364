"""Stage B: per-token loss, its coefficients c = dL/dlogp and e = dL/dH, and the sums behind loss and metrics.

`token_block_kernel` does a block of tokens and leaves its partial sums in fp64; `token_finish_kernel` adds the partials
in order. Tokens of weight 0 are touched by neither: their x, c and e are 0.
"""

import triton
import triton.language as tl

from .launch import HAS_ENTROPY, HAS_IS_WEIGHTS, HAS_LOGP_OLD, HAS_LOGP_REF, HAS_LOGP_ROLLOUT, RUNTIME
from .terms import (
    ANCHOR,
    ANCHOR_ROLLOUT,
    ANCHOR_SELF,
    CLIP_HIGH,
    CLIP_LOW,
    ENTROPY_COEF,
    KL_TARGET,
    LEVEL,
    LEVEL_SEQUENCE,
    LEVEL_TOKEN,
    TARGET_ROLLOUT,
    load_spec,
    token_terms,
    zeros_as,
)

HAS_ENTROPY = tl.constexpr(HAS_ENTROPY)
HAS_IS_WEIGHTS = tl.constexpr(HAS_IS_WEIGHTS)
HAS_LOGP_OLD = tl.constexpr(HAS_LOGP_OLD)
HAS_LOGP_REF = tl.constexpr(HAS_LOGP_REF)
HAS_LOGP_ROLLOUT = tl.constexpr(HAS_LOGP_ROLLOUT)

#: positions in `sums`; the last three are extrema
NSUMS = 18
RATIO_SUM, IS_SUM, RATIO_MIN, RATIO_MAX, IS_MAX = (tl.constexpr(i) for i in (2, 11, 15, 16, 17))
#: columns of the partial sums, a power of two
WIDTH = 32
_WIDTH = tl.constexpr(WIDTH)


@triton.jit
def log_ratio(rows, selected, logp, logp_old_ptr, logp_rollout_ptr, spec, given):
    """logp - anchor, token by token; exactly 0 where the anchor is the policy itself or was not given."""
    d = zeros_as(logp)
    if spec[ANCHOR] == ANCHOR_ROLLOUT:
        if (given & HAS_LOGP_ROLLOUT) != 0:
            d = logp - tl.load(logp_rollout_ptr + rows, mask=selected, other=0.0)
    elif spec[ANCHOR] != ANCHOR_SELF:
        if (given & HAS_LOGP_OLD) != 0:
            d = logp - tl.load(logp_old_ptr + rows, mask=selected, other=0.0)
    return d


@triton.jit
def token_constants(
    rows, selected, logp, adv_ptr, logp_ref_ptr, logp_rollout_ptr, is_weights_ptr, spec, given
):  # fmt: skip
    """(advantage, logp of the KL's other policy, importance weight or 1)."""
    adv = tl.load(adv_ptr + rows, mask=selected, other=0.0)
    logp_kl = zeros_as(logp)
    if spec[KL_TARGET] == TARGET_ROLLOUT:
        if (given & HAS_LOGP_ROLLOUT) != 0:
            logp_kl = tl.load(logp_rollout_ptr + rows, mask=selected, other=0.0)
    elif (given & HAS_LOGP_REF) != 0:
        logp_kl = tl.load(logp_ref_ptr + rows, mask=selected, other=0.0)
    is_weight = zeros_as(logp) + 1.0
    if (given & HAS_IS_WEIGHTS) != 0:
        is_weight = tl.load(is_weights_ptr + rows, mask=selected, other=1.0)
    return adv, logp_kl, is_weight


@triton.jit
def put_sum(partial_ptr, index: tl.constexpr, values, selected):
    """One partial sum, added in fp64."""
    tl.store(partial_ptr + index, tl.sum(tl.where(selected, values, 0.0).to(tl.float64), 0))


@triton.jit
def put_sums(partial_ptr, selected, w, x, c, d, r, kl, dual, adv, entropy, is_weight, spec, given):
    """A block's share of every entry of `sums`."""
    one = zeros_as(r) + 1.0
    low = r < spec[CLIP_LOW]
    high = r > spec[CLIP_HIGH]
    put_sum(partial_ptr, 0, w.to(tl.float64) * x.to(tl.float64), selected)
    put_sum(partial_ptr, 1, one, selected)
    put_sum(partial_ptr, 2, r, selected)
    put_sum(partial_ptr, 3, tl.where(low & (adv < 0.0), 1.0, 0.0), selected)
    put_sum(partial_ptr, 4, tl.where(high & (adv > 0.0), 1.0, 0.0), selected)
    put_sum(partial_ptr, 5, dual, selected)
    put_sum(partial_ptr, 6, tl.where(low | high, 1.0, 0.0), selected)
    put_sum(partial_ptr, 7, -d, selected)
    put_sum(partial_ptr, 8, r - 1.0 - d, selected)
    put_sum(partial_ptr, 9, kl, selected)
    put_sum(partial_ptr, 10, entropy, selected)
    given_weight = zeros_as(r) + tl.where((given & HAS_IS_WEIGHTS) != 0, 1.0, 0.0)
    put_sum(partial_ptr, 11, tl.where(given_weight != 0.0, is_weight, 0.0), selected)
    put_sum(partial_ptr, 12, tl.where(is_weight == 0.0, 1.0, 0.0), selected)
    put_sum(partial_ptr, 13, one, selected)
    put_sum(partial_ptr, 14, tl.where(c != 0.0, 1.0, 0.0), selected)
    tl.store(partial_ptr + RATIO_MIN, tl.min(tl.where(selected, r, float("inf")), 0).to(tl.float64))
    tl.store(partial_ptr + RATIO_MAX, tl.max(tl.where(selected, r, float("-inf")), 0).to(tl.float64))
    weights = tl.where(given_weight != 0.0, is_weight, float("-inf"))
    tl.store(partial_ptr + IS_MAX, tl.max(tl.where(selected, weights, float("-inf")), 0).to(tl.float64))


@triton.jit(do_not_specialize=RUNTIME)
def token_block_kernel(
    spec_ptr, logp_ptr, entropy_ptr, w_ptr, adv_ptr, logp_old_ptr, logp_ref_ptr, logp_rollout_ptr, is_weights_ptr,
    z_ptr, adjoint_ptr, per_token_ptr, c_ptr, e_ptr, partial_ptr, N: tl.int32, given: tl.int32, BLOCK: tl.constexpr,
):  # fmt: skip
    """x, c, e of a block of tokens; z and adjoint are the sequence means of `segments`, unread at token level."""
    block = tl.program_id(0).to(tl.int64)
    rows = block * BLOCK + tl.arange(0, BLOCK)
    spec = load_spec(spec_ptr)
    w = tl.load(w_ptr + rows, mask=rows < N, other=0.0)
    selected = w != 0.0
    logp = tl.load(logp_ptr + rows, mask=selected, other=0.0)
    entropy = zeros_as(logp)
    if (given & HAS_ENTROPY) != 0:
        entropy = tl.load(entropy_ptr + rows, mask=selected, other=0.0)
    adv, logp_kl, is_weight = token_constants(
        rows, selected, logp, adv_ptr, logp_ref_ptr, logp_rollout_ptr, is_weights_ptr, spec, given
    )
    if spec[LEVEL] == LEVEL_TOKEN:
        d_raw = log_ratio(rows, selected, logp, logp_old_ptr, logp_rollout_ptr, spec, given)
    else:
        d_raw = tl.load(z_ptr + rows, mask=selected, other=0.0)
    x, dr, dl, d, r, kl, dual = token_terms(logp, d_raw, adv, logp_kl, is_weight, entropy, spec)
    if spec[LEVEL] == LEVEL_SEQUENCE:
        dr = tl.load(adjoint_ptr + rows, mask=selected, other=0.0)
    x = tl.where(selected, x, 0.0)
    c = tl.where(selected, w * (dl + dr), 0.0)
    tl.store(per_token_ptr + rows, x, mask=rows < N)
    tl.store(c_ptr + rows, c, mask=rows < N)
    coef = spec[ENTROPY_COEF]
    e = tl.where(selected, -coef * w, 0.0)
    tl.store(e_ptr + rows, e, mask=rows < tl.where(coef != 0.0, N, 0))
    put_sums(partial_ptr + block * _WIDTH, selected, w, x, c, d, r, kl, dual, adv, entropy, is_weight, spec, given)


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
        inside = at < tl.where(lane < 18, blocks * _WIDTH, 0)[None, :]
        total += tl.load(partial_ptr + at, mask=inside, other=0.0)
        least = tl.minimum(least, tl.load(partial_ptr + at, mask=inside, other=float("inf")))
        most = tl.maximum(most, tl.load(partial_ptr + at, mask=inside, other=float("-inf")))
    sums = tl.sum(total, 0)
    ratio = tl.sum(tl.where(lane == RATIO_SUM, sums, 0.0), 0)
    weight = tl.sum(tl.where(lane == IS_SUM, sums, 0.0), 0)
    extremum = tl.where(lane == RATIO_MIN, tl.min(least, 0), tl.max(most, 0))
    witness = tl.where(lane == IS_MAX, weight, ratio)
    extremum = tl.where(witness == witness, extremum, witness)
    tl.store(sums_ptr + lane, tl.where(lane < RATIO_MIN, sums, extremum).to(tl.float32), mask=lane < 18)
