"""A gradient that was formed in forward, times the upstream factor that only backward knows."""

import triton
import triton.language as tl

from .launch import RUNTIME
from .vocabulary import aligned, edge_columns, parts, row_offset


@triton.jit(do_not_specialize=RUNTIME)
def rescale_kernel(
    out_ptr, scale_ptr, T: tl.int32, V: tl.int32, chunks: tl.int32,
    out_stride_b: tl.int64, out_stride_t: tl.int64, out_shift: tl.int32,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """out *= scale, one program a (row, chunk); for the usual scale 1 no program touches the gradient."""
    VEC: tl.constexpr = 128 // out_ptr.dtype.element_ty.primitive_bitwidth
    scale = tl.load(scale_ptr)
    if scale != 1.0:
        part = tl.program_id(0).to(tl.int64)
        row = part // chunks
        lo = (part - row * chunks).to(tl.int32) * CHUNK
        offset = row_offset(row, T, out_stride_b, out_stride_t, out_shift)
        head, body = parts(offset, V, VEC)
        base = out_ptr + aligned(offset, VEC)
        for i in range(lo, tl.minimum(lo + CHUNK, body), BLOCK):
            cols = i + tl.arange(0, BLOCK)
            g = tl.load(base + cols, mask=cols < body, other=0.0).to(tl.float32)
            tl.store(base + cols, (g * scale).to(out_ptr.dtype.element_ty), mask=cols < body)
        if lo == 0:
            cols, bound = edge_columns(head, body, V, VEC)
            g = tl.load(out_ptr + offset + cols, mask=cols < bound, other=0.0).to(tl.float32)
            tl.store(out_ptr + offset + cols, (g * scale).to(out_ptr.dtype.element_ty), mask=cols < bound)
