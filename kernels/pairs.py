"""Online statistics of two distributions over one row: maxima, sums, entropies and the cross term of a KL divergence.

A state is (ms, ss, hs, mt, st, ht, c). Of the student `ms` is the largest logit, `ss` = sum of e and `hs` = sum of e*t,
where t = (x - ms)*ks and e = 2^t; `mt`, `st`, `ht` are the teacher's. `c` is the sum, over columns, of the first
distribution's e times (its t less the second's): first is the teacher for forward KL, the student for reverse KL.
A NaN may get lost in a maximum but never in a sum.
"""

import triton
import triton.language as tl

from fusedpg.spec import Divergence

from .vocabulary import FLOOR, exponent, finite_or_zero

FORWARD = tl.constexpr(int(Divergence.FORWARD_KL))
JSD = tl.constexpr(int(Divergence.JSD))
INF = tl.constexpr(float("inf"))


@triton.jit
def cross_term(ts, es, tt, et, KIND: tl.constexpr):
    """A column's part of c: 0 where the first distribution excludes it, inf where the second alone does."""
    if KIND == JSD:
        return es * 0.0
    elif KIND == FORWARD:
        return tl.where(tt == -INF, 0.0, tl.where(ts == -INF, INF, et * (tt - ts)))
    else:
        return tl.where(ts == -INF, 0.0, tl.where(tt == -INF, INF, es * (ts - tt)))


@triton.jit
def rebase(state, tops, topt, ks, kt, KIND: tl.constexpr):
    """The sums of a state relative to other maxima, which may be subtracted: (ss, hs, st, ht, c)."""
    ms, ss, hs, mt, st, ht, c = state
    ds = exponent(ms, tops, ks)
    dt = exponent(mt, topt, kt)
    rs = tl.exp2(ds)
    rt = tl.exp2(dt)
    if KIND != JSD:
        # of an empty side the base is 0, and with it either the first sum or the cross term is settled: 0 or inf
        shift = (finite_or_zero(mt) - topt) * kt - (finite_or_zero(ms) - tops) * ks
        if KIND == FORWARD:
            c = tl.where(c == INF, INF, tl.fma(st, shift, c) * rt)
        else:
            c = tl.where(c == INF, INF, tl.fma(ss, -shift, c) * rs)
    return ss * rs, tl.fma(ss, ds, hs) * rs, st * rt, tl.fma(st, dt, ht) * rt, c


@triton.jit
def absorb_pair(state, x, y, ks, kt, KIND: tl.constexpr):
    """Take a vector of logits a group, x and y (groups, VEC), into states (groups,)."""
    tops = tl.maximum(state[0], tl.max(x, 1))
    topt = tl.maximum(state[3], tl.max(y, 1))
    bases = finite_or_zero(tops)
    baset = finite_or_zero(topt)
    ss, hs, st, ht, c = rebase(state, bases, baset, ks, kt, KIND)
    ts = (x - bases[:, None]) * ks
    tt = (y - baset[:, None]) * kt
    es = tl.exp2(ts)
    et = tl.exp2(tt)
    ss += tl.sum(es, 1)
    st += tl.sum(et, 1)
    hs += tl.sum(tl.maximum(ts, FLOOR) * es, 1)
    ht += tl.sum(tl.maximum(tt, FLOOR) * et, 1)
    if KIND != JSD:
        c += tl.sum(cross_term(ts, es, tt, et, KIND), 1)
    return tops, ss, hs, topt, st, ht, c


@triton.jit
def empty_pair(GROUPS: tl.constexpr):
    """The state of no column."""
    none = tl.full((GROUPS,), -INF, tl.float32)
    zero = tl.zeros((GROUPS,), tl.float32)
    return none, zero, zero, none, zero, zero, zero


@triton.jit
def collapse_pair(state, ks, kt, KIND: tl.constexpr):
    """States of groups -> one."""
    tops = tl.max(state[0], 0)
    topt = tl.max(state[3], 0)
    ss, hs, st, ht, c = rebase(state, finite_or_zero(tops), finite_or_zero(topt), ks, kt, KIND)
    return tops, tl.sum(ss, 0), tl.sum(hs, 0), topt, tl.sum(st, 0), tl.sum(ht, 0), tl.sum(c, 0)


@triton.jit
def merge_pair(a, b, ks, kt, KIND: tl.constexpr):
    """Two scalar states -> one."""
    tops = tl.maximum(a[0], b[0])
    topt = tl.maximum(a[3], b[3])
    ss1, hs1, st1, ht1, c1 = rebase(a, finite_or_zero(tops), finite_or_zero(topt), ks, kt, KIND)
    ss2, hs2, st2, ht2, c2 = rebase(b, finite_or_zero(tops), finite_or_zero(topt), ks, kt, KIND)
    return tops, ss1 + ss2, hs1 + hs2, topt, st1 + st2, ht1 + ht2, c1 + c2
