"""Combinations of `LossSpec` fields that contradict each other, or would be silently ignored, refused by name."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from .axes import (
    KL,
    REDUCTION_ALIASES,
    REDUCTIONS,
    Correction,
    CorrectionLevel,
    Keep,
    KLSampled,
    Level,
    Reject,
    Selection,
    Surrogate,
)

INF = math.inf
#: fields that are (low, high)
_CLAMPS = ("log_ratio_clamp", "token_clip", "log_w_clamp", "kl_clamp", "kl_log_ratio_clamp")
#: surrogates without a ratio of their own
_NO_SEQUENCE_LEVEL = (Surrogate.REINFORCE, Surrogate.VESPO)


def check(spec: Any) -> None:
    """Raise ValueError, naming the field, for a spec that means nothing."""
    _check_numbers(spec)
    check_reduction(spec.reduction, spec.max_tokens)
    _check_policy(spec)
    _check_keep(spec)
    _check_correction(spec)
    _check_terms(spec)


def _check_numbers(spec: Any) -> None:
    for f in fields(spec):
        value = getattr(spec, f.name)
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"{f.name}: expected a number; got nan")
        if f.name.endswith("_coef") and not math.isfinite(value):
            raise ValueError(f"{f.name}: expected a finite number; got {value}")
    for name in _CLAMPS:
        lo, hi = getattr(spec, name)
        if math.isnan(lo) or math.isnan(hi) or lo > hi:
            raise ValueError(f"{name}: expected (low, high) with low <= high; got {(lo, hi)}")
    for low, high in (
        ("clip_low", "clip_high"),
        ("keep_low", "keep_high"),
        ("is_low", "is_high"),
        ("is_reject_low", "is_reject_high"),
        ("select_low", "select_high"),
    ):
        a, b = getattr(spec, low), getattr(spec, high)
        if a > b:
            raise ValueError(f"{low}: expected {low} <= {high}; got {low}={a}, {high}={b}")


def check_reduction(reduction: str, max_tokens: Any) -> None:
    """A known reduction, with `max_tokens` where it divides by it."""
    if reduction not in REDUCTIONS:
        valid = ", ".join((*REDUCTIONS, *REDUCTION_ALIASES))
        raise ValueError(f"reduction: expected one of {valid}; got {reduction!r}")
    if reduction == "seq-mean-token-sum-norm":
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens <= 0:
            raise ValueError(
                "max_tokens: reduction 'seq-mean-token-sum-norm' divides by it and expects a positive int; "
                f"got {max_tokens!r}; pass the fixed response budget, e.g. max_tokens=4096"
            )
    elif max_tokens is not None:
        raise ValueError(
            f"max_tokens: reduction {reduction!r} never reads it; got {max_tokens!r}; "
            "remove it or use reduction='seq-mean-token-sum-norm'"
        )


def _check_policy(spec: Any) -> None:
    name = spec.surrogate.name.lower()
    if spec.level != Level.TOKEN and spec.surrogate in _NO_SEQUENCE_LEVEL:
        raise ValueError(
            f"level: surrogate {name!r} has no ratio of its own, so it has no sequence level; use level='token'"
        )
    if spec.dual_clip <= 1.0:
        raise ValueError(
            f"dual_clip: expected a number > 1 (it caps the loss of negative advantages at -A*dual_clip); "
            f"got {spec.dual_clip}; use None to switch it off"
        )
    if spec.delta <= 1.0:
        raise ValueError(
            f"delta: expected a number > 1 (an upper clamp of the ratio); got {spec.delta}; use None to switch it off"
        )
    clips_tokens = spec.level == Level.SEQUENCE or spec.surrogate == Surrogate.VESPO
    if spec.token_clip != (-INF, INF) and not clips_tokens:
        raise ValueError(
            f"token_clip: it bounds a token's log-ratio before its sequence's mean or product, and the loss "
            f"{spec.name!r} forms neither; got {spec.token_clip}; use log_ratio_clamp"
        )
    if spec.surrogate == Surrogate.SAPO and not (0 < spec.tau_pos < INF and 0 < spec.tau_neg < INF):
        raise ValueError(f"tau_pos, tau_neg: expected numbers > 0; got {spec.tau_pos}, {spec.tau_neg}")
    if spec.level != Level.TOKEN and spec.penalty_coef != 0.0:
        raise ValueError(
            f"penalty_coef: the squared log-ratio is a token's; got level {spec.level.name.lower()!r}; "
            "use level='token', or kl='k2'"
        )
    if spec.penalty_coef < 0:
        raise ValueError(f"penalty_coef: expected a number >= 0; got {spec.penalty_coef}")


def _check_keep(spec: Any) -> None:
    bounds = (spec.keep_low, spec.keep_high)
    if spec.keep == Keep.NONE:
        if bounds != (-INF, INF):
            raise ValueError(f"keep_low, keep_high: got {bounds} without a mask; pass keep='ratio', 'tv' or 'kl'")
    elif bounds == (-INF, INF):
        raise ValueError(f"keep: {spec.keep.name.lower()!r} expects keep_low or keep_high; got neither")
    elif spec.keep != Keep.RATIO and spec.level != Level.TOKEN:
        raise ValueError(
            f"keep: {spec.keep.name.lower()!r} compares a token's probabilities; got level "
            f"{spec.level.name.lower()!r}; use keep='ratio'"
        )


def _check_correction(spec: Any) -> None:
    for switch, low, high in (("is_correction", "is_low", "is_high"), ("is_reject", "is_reject_low", "is_reject_high")):
        off = getattr(spec, switch) in (Correction.NONE, Reject.NONE)
        bounds = (getattr(spec, low), getattr(spec, high))
        if off and bounds != (-INF, INF):
            raise ValueError(f"{low}, {high}: got {bounds}, which nothing reads; pass {switch}")
        if not off and bounds[1] <= 0:
            raise ValueError(f"{high}: expected a bound > 0 of a weight; got {bounds[1]}")
    by_sequence = spec.is_level != CorrectionLevel.TOKEN or spec.is_reject > Reject.TOKEN
    if spec.surrogate == Surrogate.VESPO and by_sequence:
        raise ValueError(
            "is_level: the loss multiplies the weights of a sequence's tokens into its own product and expects them a "
            "token each; got a sequence's; use is_level='token'"
        )
    if spec.is_reject != Reject.NONE and (spec.is_reject_low, spec.is_reject_high) == (-INF, INF):
        raise ValueError("is_reject: expects is_reject_low or is_reject_high; got neither")


def _check_terms(spec: Any) -> None:
    if spec.kl_coef < 0:
        raise ValueError(f"kl_coef: expected a finite number >= 0; got {spec.kl_coef}")
    if spec.kl_coef != 0.0 and spec.kl == KL.NONE:
        raise ValueError(f"kl_coef: {spec.kl_coef} needs an estimator; pass kl='k3' (or k1, k2, abs) as well")
    for term in ("kl_backward", "kl_forward"):
        coef = getattr(spec, f"{term}_coef")
        if coef < 0:
            raise ValueError(f"{term}_coef: expected a number >= 0; got {coef}")
        if coef != 0.0 and getattr(spec, term) == KLSampled.NONE:
            raise ValueError(f"{term}_coef: {coef} needs an estimator; pass {term}='score' or 'k3'")
    if spec.selection != Selection.NONE:
        if not 0 < spec.select_ratio <= 1:
            raise ValueError(f"select_ratio: expected a share of the tokens in (0, 1]; got {spec.select_ratio}")
        if spec.level != Level.TOKEN:
            raise ValueError("selection: it picks tokens by their own log-ratio; use level='token'")
