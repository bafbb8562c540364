"""Sequence means: z_s = sum w*d / sum w over a sequence's tokens, and D_s = sum w*dr / sum w, the adjoint of z_s.

Both are spread to the sequence's tokens, where `token_block_kernel` reads them. Sums are fp64, in an order fixed by the
sequence alone. `sequence_means` serves the kernel here and the last row to arrive in
`one_pass.sequence_forward_kernel`.
"""

import triton
import triton.language as tl

from .launch import RUNTIME
from .terms import LEVEL, LEVEL_SEQUENCE, load_spec, token_terms, zeros_as
from .token_loss import log_ratio, token_constants


@triton.jit
def sequence_bounds(cu_ptr, s, N):
    """[lo, hi) of sequence s; whatever cu holds, inside [0, N]."""
    lo = tl.load(cu_ptr + s)
    hi = tl.load(cu_ptr + s + 1)
    zero = lo * 0
    return tl.maximum(tl.minimum(lo, N), zero), tl.maximum(tl.minimum(hi, N), zero)


@triton.jit
def load_selected(rows, hi, w_ptr, logp_ptr):
    """(w, w != 0, logp); past the L1 cache, because other programs of this launch may have written logp."""
    w = tl.load(w_ptr + rows, mask=rows < hi, other=0.0)
    selected = w != 0.0
    return w, selected, tl.load(logp_ptr + rows, mask=selected, other=0.0, cache_modifier=".cg")


@triton.jit
def sequence_means(
    lo, hi, spec, logp_ptr, w_ptr, adv_ptr, logp_old_ptr, logp_ref_ptr, logp_rollout_ptr, is_weights_ptr,
    z_ptr, adjoint_ptr, given, TOKENS: tl.constexpr,
):  # fmt: skip
    """Write z and D of the sequence [lo, hi) to each of its tokens."""
    total = tl.zeros((TOKENS,), tl.float64)
    weight = tl.zeros((TOKENS,), tl.float64)
    for i in range(lo, hi, TOKENS):
        rows = i + tl.arange(0, TOKENS)
        w, selected, logp = load_selected(rows, hi, w_ptr, logp_ptr)
        d = log_ratio(rows, selected, logp, logp_old_ptr, logp_rollout_ptr, spec, given)
        total += tl.where(selected, w.to(tl.float64) * d.to(tl.float64), 0.0)
        weight += w.to(tl.float64)
    units = tl.sum(weight, 0)
    units = tl.where(units > 0.0, units, 1.0)
    z = (tl.sum(total, 0) / units).to(tl.float32)

    adjoint = tl.zeros((TOKENS,), tl.float64)
    if spec[LEVEL] == LEVEL_SEQUENCE:
        for i in range(lo, hi, TOKENS):
            rows = i + tl.arange(0, TOKENS)
            w, selected, logp = load_selected(rows, hi, w_ptr, logp_ptr)
            adv, logp_kl, is_weight = token_constants(
                rows, selected, logp, adv_ptr, logp_ref_ptr, logp_rollout_ptr, is_weights_ptr, spec, given
            )
            none = zeros_as(logp)
            _x, dr, _dl, _d, _r, _kl, _dual = token_terms(logp, none + z, adv, logp_kl, is_weight, none, spec)
            adjoint += tl.where(selected, w.to(tl.float64) * dr.to(tl.float64), 0.0)
    mean_adjoint = (tl.sum(adjoint, 0) / units).to(tl.float32)

    for i in range(lo, hi, TOKENS):
        rows = i + tl.arange(0, TOKENS)
        spread = tl.zeros((TOKENS,), tl.float32)
        tl.store(z_ptr + rows, spread + z, mask=rows < hi)
        tl.store(adjoint_ptr + rows, spread + mean_adjoint, mask=rows < hi)


@triton.jit(do_not_specialize=RUNTIME)
def segments_kernel(
    spec_ptr, cu_ptr, logp_ptr, w_ptr, adv_ptr, logp_old_ptr, logp_ref_ptr, logp_rollout_ptr, is_weights_ptr,
    z_ptr, adjoint_ptr, N: tl.int32, given: tl.int32, TOKENS: tl.constexpr,
):  # fmt: skip
    """One program a sequence."""
    lo, hi = sequence_bounds(cu_ptr, tl.program_id(0).to(tl.int64), N)
    sequence_means(
        lo, hi, load_spec(spec_ptr), logp_ptr, w_ptr, adv_ptr, logp_old_ptr, logp_ref_ptr, logp_rollout_ptr,
        is_weights_ptr, z_ptr, adjoint_ptr, given, TOKENS,
    )  # fmt: skip
