"""Divergence of a student's distribution from a teacher's, row by row, and its gradient in the student's logits.

With p = softmax(student/temperature) and q = softmax(teacher/teacher_temperature):

    forward_kl  sum q (log q - log p), gradient * temperature p - q
    reverse_kl  sum p (log p - log q), gradient * temperature p (log p - log q - value)
    jsd         beta KL(q||m) + (1-beta) KL(p||m), m = beta q + (1-beta) p, its gradient * temperature
                (1-beta) p (log(p/m) - KL(p||m))

One program has one row. A first sweep takes the statistics of both distributions and the cross term of a KL; jsd takes
its value from a second; the gradient is the last. So a row is swept once (a KL without gradient), twice (a KL with it,
jsd without) or three times (jsd with), and all sweeps but the first find it in cache. Groups of 16 bytes keep their
state in a thread: no shuffle and no barrier in a loop. The teacher's row is read, and the gradient's written, in whole
vectors where they are misaligned like the student's: the usual case.
"""

import triton
import triton.language as tl

from fusedpg.spec import Divergence

from .launch import RUNTIME
from .pairs import absorb_pair, collapse_pair, empty_pair, merge_pair
from .vocabulary import LN2, LOG2E, aligned, edge_columns, finite_or_zero, load_edges, parts, row_offset

FORWARD = tl.constexpr(int(Divergence.FORWARD_KL))
REVERSE = tl.constexpr(int(Divergence.REVERSE_KL))
JSD = tl.constexpr(int(Divergence.JSD))
#: below this a probability adds nothing to a divergence, and its logarithm is not asked for
NO_PROBABILITY = tl.constexpr(1e-30)


@triton.jit
def load_pair(x_ptr, y_ptr, cols, body):
    """Both logits of body columns, fp32, -inf past its end."""
    x = tl.load(x_ptr + cols, mask=cols < body, other=float("-inf"), eviction_policy="evict_last")
    y = tl.load(y_ptr + cols, mask=cols < body, other=float("-inf"), eviction_policy="evict_last")
    return x.to(tl.float32), y.to(tl.float32)


@triton.jit
def pair_state(
    x_ptr, y_ptr, x_edge, y_edge, body, ks, kt, BLOCK: tl.constexpr, VEC: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """First sweep: the state of the whole row, its body at the pointers."""
    state = empty_pair(BLOCK // VEC)
    for i in range(0, body, BLOCK):
        x, y = load_pair(x_ptr, y_ptr, i + tl.arange(0, BLOCK), body)
        x = tl.reshape(x, (BLOCK // VEC, VEC))
        y = tl.reshape(y, (BLOCK // VEC, VEC))
        state = absorb_pair(state, x, y, ks, kt, KIND)
    edges = absorb_pair(empty_pair(2), tl.reshape(x_edge, (2, VEC)), tl.reshape(y_edge, (2, VEC)), ks, kt, KIND)
    return merge_pair(
        collapse_pair(state, ks, kt, KIND), collapse_pair(edges, ks, kt, KIND), ks, kt, KIND
    )  # fmt: skip


@triton.jit
def log2_probabilities(x, y, rows):
    """(log2 p, log2 q) of logits; rows: what is subtracted before and after the multiplication, of both sides."""
    bases, ks, log2_ss, baset, kt, log2_st = rows
    return (x - bases) * ks - log2_ss, (y - baset) * kt - log2_st


@triton.jit
def mixture(log2_p, log2_q, beta):
    """(p log2(p/m), q log2(q/m), p, log2(p/m)) with m = beta q + (1-beta) p; 0 where there is no probability."""
    p = tl.exp2(log2_p)
    q = tl.exp2(log2_q)
    log2_m = tl.log2(tl.fma(beta, q, (1.0 - beta) * p))
    ratio = tl.where(p < NO_PROBABILITY, 0.0, log2_p - log2_m)
    return p * ratio, q * tl.where(q < NO_PROBABILITY, 0.0, log2_q - log2_m), p, ratio


@triton.jit
def jsd_sums(x_ptr, y_ptr, x_edge, y_edge, body, rows, beta, BLOCK: tl.constexpr):
    """Second sweep of jsd: (KL(p||m), KL(q||m)) in nats."""
    student = tl.zeros((BLOCK,), tl.float32)
    teacher = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, body, BLOCK):
        x, y = load_pair(x_ptr, y_ptr, i + tl.arange(0, BLOCK), body)
        log2_p, log2_q = log2_probabilities(x, y, rows)
        a, b, _p, _ratio = mixture(log2_p, log2_q, beta)
        student += a
        teacher += b
    log2_p, log2_q = log2_probabilities(x_edge, y_edge, rows)
    a, b, _p, _ratio = mixture(log2_p, log2_q, beta)
    return (tl.sum(student, 0) + tl.sum(a, 0)) * LN2, (tl.sum(teacher, 0) + tl.sum(b, 0)) * LN2


@triton.jit
def pair_gradient(x, y, rows, c, mean, beta, KIND: tl.constexpr):
    """c times the gradient's formula above; mean is the KL that it subtracts."""
    log2_p, log2_q = log2_probabilities(x, y, rows)
    if KIND == JSD:
        _a, _b, p, ratio = mixture(log2_p, log2_q, beta)
        return p * ((1.0 - beta) * c * tl.fma(ratio, LN2, -mean))
    p = tl.exp2(log2_p)
    if KIND == FORWARD:
        return c * (p - tl.exp2(log2_q))
    else:
        return tl.where(p == 0.0, 0.0, p * (c * tl.fma(log2_p - log2_q, LN2, -mean)))


@triton.jit
def row_divergence(
    x_ptr, y_ptr, out_ptr, x_edge, y_edge, body, ks, kt, beta, c,
    BLOCK: tl.constexpr, VEC: tl.constexpr, KIND: tl.constexpr, GRAD: tl.constexpr,
):  # fmt: skip
    """Every sweep of a row whose body begins at the pointers -> (value, both entropies, the edges' gradient)."""
    ms, ss, hs, mt, st, ht, cross = pair_state(x_ptr, y_ptr, x_edge, y_edge, body, ks, kt, BLOCK, VEC, KIND)
    student_entropy = tl.log(ss) - tl.div_rn(hs, ss) * LN2
    teacher_entropy = tl.log(st) - tl.div_rn(ht, st) * LN2
    rows = (finite_or_zero(ms), ks, tl.log2(ss), finite_or_zero(mt), kt, tl.log2(st))
    if KIND == FORWARD:
        value = tl.div_rn(cross, st) * LN2 - (tl.log(st) - tl.log(ss))
        mean = value
    elif KIND == REVERSE:
        value = tl.div_rn(cross, ss) * LN2 - (tl.log(ss) - tl.log(st))
        mean = value
    else:
        mean, other = jsd_sums(x_ptr, y_ptr, x_edge, y_edge, body, rows, beta, BLOCK)
        value = tl.fma(beta, other, (1.0 - beta) * mean)
    edge = x_edge
    if GRAD:
        steps = tl.where(c != 0.0, tl.cdiv(body, BLOCK), 0)
        for j in range(steps):  # the last block first: the lines just read are the likeliest in cache
            cols = (steps - 1 - j) * BLOCK + tl.arange(0, BLOCK)
            x, y = load_pair(x_ptr, y_ptr, cols, body)
            g = pair_gradient(x, y, rows, c, mean, beta, KIND)
            tl.store(out_ptr + cols, g.to(out_ptr.dtype.element_ty), mask=cols < body)
        edge = pair_gradient(x_edge, y_edge, rows, c, mean, beta, KIND)
    return value, student_entropy, teacher_entropy, edge


@triton.jit
def zero_row(out_ptr, offset, V, BLOCK: tl.constexpr, VEC: tl.constexpr):
    """A gradient of zeros."""
    head, body = parts(offset, V, VEC)
    zero = tl.zeros((BLOCK,), out_ptr.dtype.element_ty)
    body_ptr = out_ptr + aligned(offset, VEC)
    for i in range(0, body, BLOCK):
        cols = i + tl.arange(0, BLOCK)
        tl.store(body_ptr + cols, zero, mask=cols < body)
    cols, bound = edge_columns(head, body, V, VEC)
    tl.store(out_ptr + offset + cols, tl.zeros((2 * VEC,), out_ptr.dtype.element_ty), mask=cols < bound)


@triton.jit(do_not_specialize=RUNTIME)
def distill_kernel(
    x_ptr, y_ptr, out_ptr, w_ptr, scale_ptr, value_ptr, student_entropy_ptr, teacher_entropy_ptr,
    T: tl.int32, V: tl.int32, stride_b: tl.int64, stride_t: tl.int64, shift: tl.int32,
    y_stride_b: tl.int64, y_stride_t: tl.int64, y_shift: tl.int32,
    out_stride_b: tl.int64, out_stride_t: tl.int64, out_shift: tl.int32,
    temperature: tl.float32, teacher_temperature: tl.float32, beta: tl.float32,
    BLOCK: tl.constexpr, KIND: tl.constexpr, GRAD: tl.constexpr,
):  # fmt: skip
    """One row; x is the student's logits, y the teacher's. Rows of weight 0 are not read, their gradient is zero."""
    VEC: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    row = tl.program_id(0).to(tl.int64)
    w = tl.load(w_ptr + row)
    inverse = tl.div_rn(1.0, temperature)
    c = w * tl.load(scale_ptr) * inverse
    offset = row_offset(row, T, stride_b, stride_t, shift)
    y_offset = row_offset(row, T, y_stride_b, y_stride_t, y_shift)
    out_offset = row_offset(row, T, out_stride_b, out_stride_t, out_shift)
    value = tl.zeros((), tl.float32)
    student_entropy = tl.zeros((), tl.float32)
    teacher_entropy = tl.zeros((), tl.float32)
    if w != 0.0:
        head, body = parts(offset, V, VEC)
        x_edge = load_edges(x_ptr + offset, head, body, V, True, VEC).to(tl.float32)
        y_edge = load_edges(y_ptr + y_offset, head, body, V, True, VEC).to(tl.float32)
        x_body = x_ptr + aligned(offset, VEC)
        ks = inverse * LOG2E
        kt = tl.div_rn(1.0, teacher_temperature) * LOG2E
        if ((y_offset - offset) % VEC == 0) & ((out_offset - offset) % VEC == 0):
            value, student_entropy, teacher_entropy, edge = row_divergence(
                x_body, y_ptr + aligned(y_offset, VEC), out_ptr + aligned(out_offset, VEC), x_edge, y_edge,
                body, ks, kt, beta, c, BLOCK, VEC, KIND, GRAD,
            )  # fmt: skip
        else:
            value, student_entropy, teacher_entropy, edge = row_divergence(
                x_body, y_ptr + (y_offset + head), out_ptr + (out_offset + head), x_edge, y_edge,
                body, ks, kt, beta, c, BLOCK, VEC, KIND, GRAD,
            )  # fmt: skip
        if GRAD:
            cols, bound = edge_columns(head, body, V, VEC)
            tl.store(
                out_ptr + out_offset + cols, edge.to(out_ptr.dtype.element_ty), mask=cols < tl.where(c != 0.0, bound, 0)
            )
    if GRAD:
        if c == 0.0:
            zero_row(out_ptr, out_offset, V, BLOCK, VEC)
    tl.store(value_ptr + row, value)
    tl.store(student_entropy_ptr + row, student_entropy)
    tl.store(teacher_entropy_ptr + row, teacher_entropy)
