"""The per-token constants of stage B, read through the tuple of pointers that the kernels call `streams`.

A tensor that was not given is not read. Rows that are not `on` give values that nothing uses.
"""

import triton
import triton.language as tl

from . import codes
from .launch import HAS_LOGP_OLD, HAS_LOGP_REF, HAS_LOGP_ROLLOUT, HAS_OBS_WEIGHTS, HAS_SELECTED
from .terms import param, zeros_as

HAS_LOGP_OLD = tl.constexpr(HAS_LOGP_OLD)
HAS_LOGP_REF = tl.constexpr(HAS_LOGP_REF)
HAS_LOGP_ROLLOUT = tl.constexpr(HAS_LOGP_ROLLOUT)
HAS_OBS_WEIGHTS = tl.constexpr(HAS_OBS_WEIGHTS)
HAS_SELECTED = tl.constexpr(HAS_SELECTED)


@triton.jit
def optional(ptr, rows, on, flag: tl.constexpr, given, absent):
    """A stream's values, or `absent`."""
    values = absent
    if (given & flag) != 0:
        values = tl.load(ptr + rows, mask=on, other=0.0)
    return values


@triton.jit
def log_ratio(rows, on, logp, streams, spec, given):
    """(anchor, logp - anchor) of every token; exactly 0 where the anchor is the policy itself or was not given."""
    anchor = logp
    t = tl.where(logp == logp, 0.0, logp)
    kind = param(spec, codes.ANCHOR)
    if kind == codes.ANCHOR_ROLLOUT:
        if (given & HAS_LOGP_ROLLOUT) != 0:
            anchor = tl.load(streams[codes.LOGP_ROLLOUT] + rows, mask=on, other=0.0)
            t = logp - anchor
    elif kind != codes.ANCHOR_SELF:
        if (given & HAS_LOGP_OLD) != 0:
            anchor = tl.load(streams[codes.LOGP_OLD] + rows, mask=on, other=0.0)
            t = logp - anchor
    return anchor, t


@triton.jit
def token_constants(rows, on, logp, streams, spec, given):
    """(advantage, logp of the KL terms' other policy, the batch's selection)."""
    adv = tl.load(streams[codes.ADVANTAGES] + rows, mask=on, other=0.0)
    none = zeros_as(logp)
    if param(spec, codes.KL_TARGET) == codes.TARGET_ROLLOUT:
        logp_kl = optional(streams[codes.LOGP_ROLLOUT], rows, on, HAS_LOGP_ROLLOUT, given, none)
    else:
        logp_kl = optional(streams[codes.LOGP_REF], rows, on, HAS_LOGP_REF, given, none)
    picked = optional(streams[codes.SELECTED], rows, on, HAS_SELECTED, given, none)
    return adv, logp_kl, picked


@triton.jit
def coefficient(on, w, dl, dr, observed, spec):
    """c = dL/dlogp of the policy's term and of the observation's, whose weight is 0 elsewhere."""
    return tl.where(on, w * (dl + dr), 0.0) - param(spec, codes.OBS_COEF) * observed
