"""Stages A and C: log-probability (and entropy) of a target per row of logits, and the gradient of both.

    logp = log_softmax(z)[target],  H = entropy(softmax(z)),  z = softcap*tanh(logit_scale*x/softcap)/T
           or, without a soft cap, logit_scale*x/T
    dL/dx = [c*(1[target] - p) - e*p*(log p + H)] * dz/dx,  c = dL/dlogp, e = dL/dH

Forward reads the logits once. Few rows are split: `logprob_split_kernel` leaves one state a chunk and
`logprob_combine_kernel` merges them as `logprob_forward_kernel` does, to the same bits.
"""

import triton
import triton.language as tl

from .launch import HAS_ENTROPY, HAS_OBS_WEIGHTS, HAS_SCALE, HAS_W, RUNTIME
from .vocabulary import (
    aligned,
    body_state,
    chunk_state,
    finish_row,
    load_edges,
    load_target,
    merge,
    parts,
    row_offset,
    row_scales,
    write_gradient,
)

HAS_ENTROPY = tl.constexpr(HAS_ENTROPY)
HAS_OBS_WEIGHTS = tl.constexpr(HAS_OBS_WEIGHTS)
HAS_SCALE = tl.constexpr(HAS_SCALE)
HAS_W = tl.constexpr(HAS_W)


@triton.jit
def row_weights(w_ptr, obs_weights_ptr, row, given):
    """(weight of the policy term, 1 where none are given; of the observation term, 0 where none are given)."""
    w = tl.load(w_ptr + row, mask=(given & HAS_W) != 0, other=1.0)
    return w, tl.load(obs_weights_ptr + row, mask=(given & HAS_OBS_WEIGHTS) != 0, other=0.0)


@triton.jit
def row_wanted(w_ptr, obs_weights_ptr, row, given):
    """Whether a term needs the row's logp; if none does, nothing of the row is touched."""
    w, observed = row_weights(w_ptr, obs_weights_ptr, row, given)
    return (w != 0.0) | (observed != 0.0)


@triton.jit
def store_row(logp_ptr, entropy_ptr, row_max_ptr, log_sum_ptr, row, logp, entropy, row_max, log_sum, given):
    """The four numbers of a row; the entropy's place exists only where it is wanted."""
    tl.store(logp_ptr + row, logp)
    tl.store(row_max_ptr + row, row_max)
    tl.store(log_sum_ptr + row, log_sum)
    tl.store(entropy_ptr + row, entropy, mask=(given & HAS_ENTROPY) != 0)


@triton.jit
def row_statistics(
    row_ptr, x_ptr, offset, target, V, k, k2, softcap, inner,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, VEC: tl.constexpr,
    ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """One program reads one row -> (logp, entropy, row_max, log_sum, edge logits)."""
    head, body = parts(offset, V, VEC)
    # asked for before the loop, used after it: their latency hides behind the row
    x_target = load_target(row_ptr, target, V)
    x_edge = load_edges(row_ptr, head, body, V, True, VEC)
    body_ptr = x_ptr + aligned(offset, VEC)
    m, s, h = body_state(body_ptr, body, k2, softcap, inner, BLOCK, CHUNK, VEC, ENTROPY, SOFTCAP, EVICT)
    logp, entropy, row_max, log_sum = finish_row(
        m, s, h, x_edge, x_target, head, body, V, k, k2, softcap, inner, VEC, ENTROPY, SOFTCAP
    )
    return logp, entropy, row_max, log_sum, x_edge


@triton.jit(do_not_specialize=RUNTIME)
def logprob_forward_kernel(
    x_ptr, target_ptr, w_ptr, obs_weights_ptr, row_temperature_ptr, logp_ptr, entropy_ptr, row_max_ptr, log_sum_ptr,
    T: tl.int32, V: tl.int32, stride_b: tl.int64, stride_t: tl.int64, shift: tl.int32,
    temperature: tl.float32, softcap: tl.float32, logit_scale: tl.float32, given: tl.int32,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Stage A, one program a row: logits read once; rows that no term wants read nothing and give 0."""
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


@triton.jit(do_not_specialize=RUNTIME)
def logprob_split_kernel(
    x_ptr, w_ptr, obs_weights_ptr, row_temperature_ptr, part_max_ptr, part_sum_ptr, part_entropy_ptr,
    T: tl.int32, V: tl.int32, chunks: tl.int32, stride_b: tl.int64, stride_t: tl.int64, shift: tl.int32,
    temperature: tl.float32, softcap: tl.float32, logit_scale: tl.float32, given: tl.int32,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Stage A for few rows, first launch: one program a (row, chunk) leaves the chunk's state."""
    VEC: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    part = tl.program_id(0).to(tl.int64)
    row = part // chunks
    if row_wanted(w_ptr, obs_weights_ptr, row, given):
        _k, k2, inner, _slope = row_scales(row_temperature_ptr, row, temperature, softcap, logit_scale, given, SOFTCAP)
        offset = row_offset(row, T, stride_b, stride_t, shift)
        _head, body = parts(offset, V, VEC)
        lo = (part - row * chunks).to(tl.int32) * CHUNK
        hi = tl.minimum(lo + CHUNK, body)
        body_ptr = x_ptr + aligned(offset, VEC)
        m, s, h = chunk_state(body_ptr, lo, hi, body, k2, softcap, inner, BLOCK, VEC, ENTROPY, SOFTCAP, "evict_first")
        tl.store(part_max_ptr + part, m)
        tl.store(part_sum_ptr + part, s)
        if ENTROPY:
            tl.store(part_entropy_ptr + part, h)


@triton.jit(do_not_specialize=RUNTIME)
def logprob_combine_kernel(
    x_ptr, target_ptr, w_ptr, obs_weights_ptr, row_temperature_ptr, part_max_ptr, part_sum_ptr, part_entropy_ptr,
    logp_ptr, entropy_ptr, row_max_ptr, log_sum_ptr,
    T: tl.int32, V: tl.int32, chunks: tl.int32, stride_b: tl.int64, stride_t: tl.int64, shift: tl.int32,
    temperature: tl.float32, softcap: tl.float32, logit_scale: tl.float32, given: tl.int32,
    ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Stage A for few rows, second launch: merge a row's chunk states in order, then its edges."""
    VEC: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    row = tl.program_id(0).to(tl.int64)
    logp = tl.zeros((), tl.float32)
    entropy = tl.zeros((), tl.float32)
    row_max = tl.zeros((), tl.float32)
    log_sum = tl.zeros((), tl.float32)
    if row_wanted(w_ptr, obs_weights_ptr, row, given):
        k, k2, inner, _slope = row_scales(row_temperature_ptr, row, temperature, softcap, logit_scale, given, SOFTCAP)
        offset = row_offset(row, T, stride_b, stride_t, shift)
        head, body = parts(offset, V, VEC)
        x_target = load_target(x_ptr + offset, tl.load(target_ptr + row), V)
        x_edge = load_edges(x_ptr + offset, head, body, V, True, VEC)
        m = tl.full((), float("-inf"), tl.float32)
        s = tl.zeros((), tl.float32)
        h = tl.zeros((), tl.float32)
        for part in range(0, chunks):
            at = row * chunks + part
            m2 = tl.load(part_max_ptr + at)
            s2 = tl.load(part_sum_ptr + at)
            h2 = s2
            if ENTROPY:
                h2 = tl.load(part_entropy_ptr + at)
            m, s, h = merge(m, s, h, m2, s2, h2, k2, ENTROPY)
        logp, entropy, row_max, log_sum = finish_row(
            m, s, h, x_edge, x_target, head, body, V, k, k2, softcap, inner, VEC, ENTROPY, SOFTCAP
        )
    store_row(logp_ptr, entropy_ptr, row_max_ptr, log_sum_ptr, row, logp, entropy, row_max, log_sum, given)


@triton.jit(do_not_specialize=RUNTIME)
def logprob_backward_kernel(
    x_ptr, out_ptr, target_ptr, row_temperature_ptr, row_max_ptr, log_sum_ptr, entropy_ptr, c_ptr, e_ptr, scale_ptr,
    T: tl.int32, V: tl.int32, chunks: tl.int32, stride_b: tl.int64, stride_t: tl.int64, shift: tl.int32,
    out_stride_b: tl.int64, out_stride_t: tl.int64, out_shift: tl.int32,
    temperature: tl.float32, softcap: tl.float32, logit_scale: tl.float32, given: tl.int32,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Stage C, one program a (row, chunk): read and write once; rows with c = e = 0 are zeroed unread."""
    VEC: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    part = tl.program_id(0).to(tl.int64)
    row = part // chunks
    lo = (part - row * chunks).to(tl.int32) * CHUNK
    c = tl.load(c_ptr + row)
    e = tl.zeros((), tl.float32)
    entropy = tl.zeros((), tl.float32)
    if ENTROPY:
        e = tl.load(e_ptr + row)
        entropy = tl.load(entropy_ptr + row)
    live = (c != 0.0) | (e != 0.0)
    scale = tl.load(scale_ptr, mask=(given & HAS_SCALE) != 0, other=1.0)
    _k, k2, inner, slope = row_scales(row_temperature_ptr, row, temperature, softcap, logit_scale, given, SOFTCAP)
    offset = row_offset(row, T, stride_b, stride_t, shift)
    out_offset = row_offset(row, T, out_stride_b, out_stride_t, out_shift)
    head, body = parts(offset, V, VEC)
    edges = lo == 0
    x_edge = load_edges(x_ptr + offset, head, body, V, edges & live, VEC)
    write_gradient(
        x_ptr, out_ptr, offset, out_offset, lo, tl.minimum(lo + CHUNK, body), edges, x_edge, V, live,
        tl.load(target_ptr + row), tl.load(row_max_ptr + row), tl.load(log_sum_ptr + row), k2,
        c * scale, e * scale, entropy, slope, softcap, inner, BLOCK, VEC, ENTROPY, SOFTCAP,
    )  # fmt: skip
