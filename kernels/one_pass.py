"""Loss from logits in as few launches as its mathematics allows.

Where a token's loss is its row's own, `one_pass_kernel` reads the row, has its logp, its loss's c and e, and writes its
gradient while the row's last columns are still in cache (stages A, B, C). Else `sequence_forward_kernel` is stage A and
what a sequence's tokens share, computed by the last of its rows to arrive; stage C follows in a launch of its own.
"""

import triton
import triton.language as tl

from . import codes
from .correction import correction_weight
from .launch import HAS_SCALE, RUNTIME
from .logprob import row_statistics, row_wanted, row_weights, store_row
from .segments import sequence_bounds, sequence_means
from .streams import coefficient, log_ratio, token_constants
from .terms import param, token_terms, zeros_as
from .vocabulary import parts, row_offset, row_scales, write_gradient

HAS_SCALE = tl.constexpr(HAS_SCALE)


@triton.jit(do_not_specialize=RUNTIME)
def one_pass_kernel(
    x_ptr, out_ptr, target_ptr, w_ptr, scale_ptr, spec_ptr, adv_ptr, logp_old_ptr, logp_ref_ptr, logp_rollout_ptr,
    is_weights_ptr, obs_weights_ptr, selected_ptr, row_temperature_ptr,
    logp_ptr, entropy_ptr, row_max_ptr, log_sum_ptr,
    T: tl.int32, V: tl.int32, stride_b: tl.int64, stride_t: tl.int64, shift: tl.int32,
    out_stride_b: tl.int64, out_stride_t: tl.int64, out_shift: tl.int32,
    temperature: tl.float32, softcap: tl.float32, logit_scale: tl.float32, given: tl.int32,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Stages A, B and C of one row whose loss is its own; `out` may be the logits themselves."""
    VEC: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    row = tl.program_id(0).to(tl.int64)
    w, observed = row_weights(w_ptr, obs_weights_ptr, row, given)
    active = (w != 0.0) | (observed != 0.0)
    offset = row_offset(row, T, stride_b, stride_t, shift)
    _head, body = parts(offset, V, VEC)
    target = tl.load(target_ptr + row, mask=active, other=0)
    k, k2, inner, slope = row_scales(row_temperature_ptr, row, temperature, softcap, logit_scale, given, SOFTCAP)
    # a row that no term wants has no columns to read: its statistics are then replaced by zeros
    logp, entropy, row_max, log_sum, x_edge = row_statistics(
        x_ptr + offset, x_ptr, offset, target, tl.where(active, V, 0), k, k2, softcap, inner,
        BLOCK, CHUNK, VEC, ENTROPY, SOFTCAP, "evict_last",
    )  # fmt: skip
    logp = tl.where(active, logp, 0.0)
    entropy = tl.where(active, entropy, 0.0)
    row_max = tl.where(active, row_max, 0.0)
    log_sum = tl.where(active, log_sum, 0.0)
    store_row(logp_ptr, entropy_ptr, row_max_ptr, log_sum_ptr, row, logp, entropy, row_max, log_sum, given)

    on = w != 0.0
    streams = (
        adv_ptr, logp_old_ptr, logp_ref_ptr, logp_rollout_ptr, is_weights_ptr, obs_weights_ptr, selected_ptr
    )  # fmt: skip
    anchor, t = log_ratio(row, on, logp, streams, spec_ptr, given)
    adv, logp_kl, picked = token_constants(row, on, logp, streams, spec_ptr, given)
    none = zeros_as(logp)
    weight, _counted = correction_weight(row, on, logp, anchor, none + 1.0, streams, spec_ptr, given)
    _x, dr, dl, _d, _r, _kl, _dual, _drop = token_terms(
        logp, anchor, t, none, adv, logp_kl, weight, picked, entropy, spec_ptr
    )
    c = coefficient(on, w, dl, dr, observed, spec_ptr)
    e = tl.where(on, -param(spec_ptr, codes.ENTROPY_COEF) * w, 0.0)
    live = (c != 0.0) | (e != 0.0)
    scale = tl.load(scale_ptr, mask=(given & HAS_SCALE) != 0, other=1.0)
    # every thread has read what it needs of the row before any of them overwrites it in place
    tl.debug_barrier()
    write_gradient(
        x_ptr, out_ptr, offset, row_offset(row, T, out_stride_b, out_stride_t, out_shift), 0, body, True, x_edge, V,
        live, target, row_max, log_sum, k2, c * scale, e * scale, entropy, slope, softcap, inner,
        BLOCK, VEC, ENTROPY, SOFTCAP,
    )  # fmt: skip


@triton.jit
def sequence_of(cu_ptr, row, S):
    """The last sequence that begins at or before the row: empty sequences are passed over. Bisection."""
    lo = tl.zeros((), tl.int32)
    hi = S
    while hi - lo > 1:
        mid = (lo + hi) // 2
        before = tl.load(cu_ptr + mid) <= row
        lo = tl.where(before, mid, lo)
        hi = tl.where(before, hi, mid)
    return lo


@triton.jit(do_not_specialize=RUNTIME)
def sequence_forward_kernel(
    x_ptr, target_ptr, w_ptr, spec_ptr, adv_ptr, logp_old_ptr, logp_ref_ptr, logp_rollout_ptr, is_weights_ptr,
    obs_weights_ptr, selected_ptr, row_temperature_ptr, logp_ptr, entropy_ptr, row_max_ptr, log_sum_ptr,
    cu_ptr, counter_ptr, z_ptr, adjoint_ptr, factor_ptr,
    N: tl.int32, S: tl.int32, T: tl.int32, V: tl.int32, stride_b: tl.int64, stride_t: tl.int64, shift: tl.int32,
    temperature: tl.float32, softcap: tl.float32, logit_scale: tl.float32, given: tl.int32,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr, ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Stage A of one row; the row that completes its sequence computes what its tokens share."""
    VEC: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    row = tl.program_id(0).to(tl.int64)
    logp = tl.zeros((), tl.float32)
    entropy = tl.zeros((), tl.float32)
    row_max = tl.zeros((), tl.float32)
    log_sum = tl.zeros((), tl.float32)
    if row_wanted(w_ptr, obs_weights_ptr, row, given):
        k, k2, inner, _slope = row_scales(row_temperature_ptr, row, temperature, softcap, logit_scale, given, SOFTCAP)
        offset = row_offset(row, T, stride_b, stride_t, shift)
        target = tl.load(target_ptr + row)
        logp, entropy, row_max, log_sum, _edge = row_statistics(
            x_ptr + offset, x_ptr, offset, target, V, k, k2, softcap, inner,
            BLOCK, CHUNK, VEC, ENTROPY, SOFTCAP, "evict_first",
        )  # fmt: skip
    store_row(logp_ptr, entropy_ptr, row_max_ptr, log_sum_ptr, row, logp, entropy, row_max, log_sum, given)

    s = sequence_of(cu_ptr, row, S)
    lo, hi = sequence_bounds(cu_ptr, s, N)
    if (row >= lo) & (row < hi):
        # the barrier orders this program's stores before its arrival, acquire-release orders the programs
        tl.debug_barrier()
        arrived = tl.atomic_add(counter_ptr + s, 1, sem="acq_rel")
        if arrived == hi - lo - 1:
            streams = (
                adv_ptr, logp_old_ptr, logp_ref_ptr, logp_rollout_ptr, is_weights_ptr, obs_weights_ptr, selected_ptr
            )  # fmt: skip
            sequence_means(lo, hi, spec_ptr, logp_ptr, w_ptr, streams, z_ptr, adjoint_ptr, factor_ptr, given, TOKENS)
