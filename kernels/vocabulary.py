"""Device functions over one row of logits: online softmax statistics and the gradient.

Every vocabulary kernel is made of them.

A row is read as an unaligned head (less than 16 bytes), a body of whole 16-byte vectors, and a tail, so that the loop
keeps 128-bit loads for every V and stride. The body is cut into chunks of CHUNK columns counted from its first vector.
Inside a chunk a thread keeps (max, sum, weighted sum) per vector: no shuffle and no barrier in the loop. Chunk states
are merged in order, then the edges: the same steps whether one program walks the row or several split it, so a row's
bits depend on the row and its address modulo 16 bytes alone.

State: `m` the largest mapped logit y, `s` = sum exp((y - m)*k), `h` = sum exp((y - m)*k) * (y - m)*k2, k2 = k*log2(e).
The maximum is subtracted before the multiplication: a common offset of 1e9 stays exact. A NaN may get lost in a
maximum (hardware max drops it) but never in `s`: exp(NaN - m) is added to it.
"""

import triton
import triton.language as tl

from .launch import HAS_ROW_TEMPERATURE

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
#: exponents below this give exactly 0; keeps 0 * (-inf) out of the weighted sums
FLOOR = tl.constexpr(-1000.0)
HAS_ROW_TEMPERATURE = tl.constexpr(HAS_ROW_TEMPERATURE)


@triton.jit
def row_offset(row, T, stride_b, stride_t, shift):
    """Element offset of a row, int64; `shift` leads from the aligned base to the first logit."""
    batch = row // T
    return shift + batch * stride_b + (row - batch * T) * stride_t


@triton.jit
def aligned(offset, VEC: tl.constexpr):
    """The first whole vector at or after `offset`."""
    return (offset + (VEC - 1)) // VEC * VEC


@triton.jit
def parts(offset, V, VEC: tl.constexpr):
    """(columns before the first whole vector, columns in whole vectors)."""
    head = tl.minimum(aligned(offset, VEC) - offset, V).to(tl.int32)
    return head, (V - head) // VEC * VEC


@triton.jit
def row_scales(row_temperature_ptr, row, temperature, softcap, logit_scale, given, SOFTCAP: tl.constexpr):
    """(k, k*log2(e), the soft cap's inner factor, dz/dx without the soft cap's slope)."""
    has = (given & HAS_ROW_TEMPERATURE) != 0
    t = tl.load(row_temperature_ptr + row, mask=has, other=temperature)
    slope = tl.div_rn(logit_scale, t)
    if SOFTCAP:
        k = tl.div_rn(1.0, t)
        inner = tl.div_rn(logit_scale, softcap)
    else:
        k = slope
        inner = slope
    return k, k * LOG2E, inner, slope


@triton.jit
def tanh_and_slope(a):
    """(tanh a, 1 - tanh^2 a), each accurate to a few ulp: near 0 the quotient would cancel, so a polynomial."""
    t = tl.exp2(tl.abs(a) * (-2.0 * LOG2E))
    q = 1.0 / (1.0 + t)
    large = (1.0 - t) * q
    a2 = a * a
    series = tl.fma(a2, tl.fma(a2, 62.0 / 2835.0, -17.0 / 315.0), 2.0 / 15.0)
    series = tl.fma(a2, tl.fma(a2, series, -1.0 / 3.0), 1.0)
    value = tl.where(tl.abs(a) < 0.25, a * series, tl.where(a < 0.0, -large, large))
    return value, 4.0 * t * q * q


@triton.jit
def logit_map(x, softcap, inner, SOFTCAP: tl.constexpr):
    """y of a stored logit, fp32."""
    y = x.to(tl.float32)
    if SOFTCAP:
        y = softcap * tanh_and_slope(y * inner)[0]
    return y


@triton.jit
def finite_or_zero(m):
    """A maximum that may be subtracted: -inf - -inf would be NaN for an empty or masked group."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def exponent(y, m, k2):
    """(y - m)*k2, bounded below (by comparison, so that NaN stays)."""
    u = (y - m) * k2
    return tl.where(u < FLOOR, FLOOR, u)


@triton.jit
def absorb(m, s, h, y, k2, ENTROPY: tl.constexpr):
    """Take a vector of logits a group, y (groups, VEC), into the states m, s, h (groups,)."""
    m_new = tl.maximum(m, tl.max(y, 1))
    safe = finite_or_zero(m_new)
    u = (y - safe[:, None]) * k2
    p = tl.exp2(u)
    d = exponent(m, safe, k2)
    r = tl.exp2(d)
    if ENTROPY:
        # maximum may drop a NaN here; p keeps it
        h = tl.fma(tl.fma(s, d, h), r, tl.sum(tl.maximum(u, FLOOR) * p, 1))
    s = tl.fma(s, r, tl.sum(p, 1))
    return m_new, s, h


@triton.jit
def collapse(m, s, h, k2, ENTROPY: tl.constexpr):
    """States of a block -> one state."""
    top = tl.max(m, 0)
    d = exponent(m, finite_or_zero(top), k2)
    r = tl.exp2(d)
    total = tl.sum(s * r, 0)
    weighted = total
    if ENTROPY:
        weighted = tl.sum(tl.fma(s, d, h) * r, 0)
    return top, total, weighted


@triton.jit
def merge(m1, s1, h1, m2, s2, h2, k2, ENTROPY: tl.constexpr):
    """Two scalar states -> one. Fused multiply-adds are explicit: the bits are those of this text in every kernel."""
    top = tl.maximum(m1, m2)
    safe = finite_or_zero(top)
    d1 = exponent(m1, safe, k2)
    d2 = exponent(m2, safe, k2)
    r1 = tl.exp2(d1)
    r2 = tl.exp2(d2)
    total = tl.fma(s1, r1, s2 * r2)
    weighted = total
    if ENTROPY:
        weighted = tl.fma(tl.fma(s1, d1, h1), r1, tl.fma(s2, d2, h2) * r2)
    return top, total, weighted


@triton.jit
def chunk_state(
    x_ptr, lo, hi, body, k2, softcap, inner,
    BLOCK: tl.constexpr, VEC: tl.constexpr, ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """State of columns [lo, hi) of the body; x_ptr is its first vector."""
    GROUPS: tl.constexpr = BLOCK // VEC
    m = tl.full((GROUPS,), float("-inf"), tl.float32)
    s = tl.zeros((GROUPS,), tl.float32)
    h = tl.zeros((GROUPS,), tl.float32)
    for i in range(lo, hi, BLOCK):
        cols = i + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < body, other=float("-inf"), eviction_policy=EVICT)
        y = logit_map(x, softcap, inner, SOFTCAP)
        if SOFTCAP:
            y = tl.where(cols < body, y, float("-inf"))
        m, s, h = absorb(m, s, h, tl.reshape(y, (GROUPS, VEC)), k2, ENTROPY)
    return collapse(m, s, h, k2, ENTROPY)


@triton.jit
def body_state(
    x_ptr, body, k2, softcap, inner,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, VEC: tl.constexpr,
    ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """State of the whole body, chunk after chunk."""
    m = tl.full((), float("-inf"), tl.float32)
    s = tl.zeros((), tl.float32)
    h = tl.zeros((), tl.float32)
    for lo in range(0, body, CHUNK):
        hi = tl.minimum(lo + CHUNK, body)
        m2, s2, h2 = chunk_state(x_ptr, lo, hi, body, k2, softcap, inner, BLOCK, VEC, ENTROPY, SOFTCAP, EVICT)
        m, s, h = merge(m, s, h, m2, s2, h2, k2, ENTROPY)
    return m, s, h


@triton.jit
def edge_columns(head, body, V, VEC: tl.constexpr):
    """Columns of head and tail in 2*VEC lanes, and the bound below which a lane's column is one."""
    lane = tl.arange(0, 2 * VEC)
    return tl.where(lane < VEC, lane, head + body + lane - VEC), tl.where(lane < VEC, head, V)


@triton.jit
def load_edges(row_ptr, head, body, V, wanted, VEC: tl.constexpr):
    """The logits of head and tail, -inf elsewhere and where they are not wanted."""
    cols, bound = edge_columns(head, body, V, VEC)
    return tl.load(row_ptr + cols, mask=cols < tl.where(wanted, bound, 0), other=float("-inf"))


@triton.jit
def load_target(row_ptr, target, V):
    """The target's logit; NaN, and no load, for an id outside [0, V)."""
    return tl.load(row_ptr + target, mask=(target >= 0) & (target < V), other=float("nan")).to(tl.float32)


@triton.jit
def finish_row(
    m, s, h, x_edge, x_target, head, body, V, k, k2, softcap, inner,
    VEC: tl.constexpr, ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Body state, edges and target -> (logp, entropy, row_max, log_sum)."""
    cols, bound = edge_columns(head, body, V, VEC)
    y = tl.where(cols < bound, logit_map(x_edge, softcap, inner, SOFTCAP), float("-inf"))
    one = tl.where(y == float("-inf"), 0.0, 1.0)
    m2, s2, h2 = collapse(y, one, one * 0.0, k2, ENTROPY)
    m, s, h = merge(m, s, h, m2, s2, h2, k2, ENTROPY)
    log_sum = tl.log(s)
    logp = (logit_map(x_target, softcap, inner, SOFTCAP) - m) * k - log_sum
    entropy = log_sum
    if ENTROPY:
        entropy = log_sum - tl.div_rn(h, s) * LN2
    return logp, entropy, m, log_sum


@triton.jit
def gradient(
    x, is_target, row_max, log_sum2, k2, c, e, entropy, slope, softcap, inner,
    ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """[c*(1[target] - p) - e*p*(log p + H)] * dz/dx of a block of logits; log_sum2 = log_sum*log2(e)."""
    y = x.to(tl.float32)
    if SOFTCAP:
        bent, bend = tanh_and_slope(y * inner)
        y = softcap * bent
        slope = slope * bend
    log2_p = tl.fma(y - row_max, k2, -log_sum2)
    p = tl.exp2(log2_p)
    a = c
    if ENTROPY:
        # p = 0 where the maximum acts, and 0 * finite is 0; a NaN stays in p
        a = tl.fma(e, tl.fma(tl.maximum(log2_p, FLOOR), LN2, entropy), c)
    return tl.fma(-p, a, tl.where(is_target, c, 0.0)) * slope


@triton.jit
def gradient_span(
    x_ptr, out_ptr, lo, hi, body, live, target, row_max, log_sum2, k2, c, e, entropy, slope, softcap, inner,
    BLOCK: tl.constexpr, ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Write the gradient of body columns [lo, hi), last block first: the lines just read are the likeliest in cache.

    A row that is not live gets zeros, and its logits are not read.
    """
    steps = tl.cdiv(hi - lo, BLOCK)
    if live:
        for j in range(steps):
            cols = lo + (steps - 1 - j) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + cols, mask=cols < body, other=float("-inf"), eviction_policy="evict_first")
            g = gradient(
                x, cols == target, row_max, log_sum2, k2, c, e, entropy, slope, softcap, inner, ENTROPY, SOFTCAP
            )
            tl.store(out_ptr + cols, g.to(out_ptr.dtype.element_ty), mask=cols < body)
    else:
        for j in range(steps):
            cols = lo + j * BLOCK + tl.arange(0, BLOCK)
            tl.store(out_ptr + cols, tl.zeros((BLOCK,), out_ptr.dtype.element_ty), mask=cols < body)


@triton.jit
def write_gradient(
    x_ptr, out_ptr, offset, out_offset, lo, hi, edges, x_edge, V, live, target,
    row_max, log_sum, k2, c, e, entropy, slope, softcap, inner,
    BLOCK: tl.constexpr, VEC: tl.constexpr, ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Body columns [lo, hi) of a row's gradient and, where `edges`, its head and tail from the logits x_edge."""
    head, body = parts(offset, V, VEC)
    body_ptr = x_ptr + aligned(offset, VEC)
    log_sum2 = log_sum * LOG2E
    # 32 bits are cheaper to compare; an id outside [0, V) is no column
    target = tl.where((target >= 0) & (target < V), target, -1).to(tl.int32)
    if (out_offset - offset) % VEC == 0:
        # the same misalignment: the stores are whole vectors too
        gradient_span(
            body_ptr, out_ptr + aligned(out_offset, VEC), lo, hi, body, live, target - head,
            row_max, log_sum2, k2, c, e, entropy, slope, softcap, inner, BLOCK, ENTROPY, SOFTCAP,
        )  # fmt: skip
    else:
        gradient_span(
            body_ptr, out_ptr + (out_offset + head), lo, hi, body, live, target - head,
            row_max, log_sum2, k2, c, e, entropy, slope, softcap, inner, BLOCK, ENTROPY, SOFTCAP,
        )  # fmt: skip
    if edges:
        cols, bound = edge_columns(head, body, V, VEC)
        g = gradient(
            x_edge, cols == target, row_max, log_sum2, k2, c, e, entropy, slope, softcap, inner, ENTROPY, SOFTCAP
        )
        g = tl.where(live, g, 0.0)
        tl.store(out_ptr + out_offset + cols, g.to(out_ptr.dtype.element_ty), mask=cols < bound)
