"""A policy loss as data: `LossSpec`, its axes and their fixed integer codes.

Standard library only. The codes and the order of `LossSpec.encode` are mirrored by `csrc/spec.h` and
`kernels/codes.py`; a test compares the three.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .axes import (
    KL,
    REDUCTION_ALIASES,
    REDUCTIONS,
    Anchor,
    Correction,
    CorrectionLevel,
    Divergence,
    Keep,
    KLGradient,
    KLRatio,
    KLSampled,
    KLTarget,
    Level,
    Reject,
    Selection,
    Surrogate,
)
from .spec_checks import check

__all__ = [
    "INF",
    "KL",
    "NPARAMS",
    "REDUCTIONS",
    "REDUCTION_ALIASES",
    "STREAMS",
    "Anchor",
    "Correction",
    "CorrectionLevel",
    "Divergence",
    "KLGradient",
    "KLRatio",
    "KLSampled",
    "KLTarget",
    "Keep",
    "Level",
    "LossSpec",
    "Reject",
    "Selection",
    "Surrogate",
    "segments_needed",
]

INF = math.inf


#: per-token constants of stage B, in the order in which every backend takes them
STREAMS = ("advantages", "logp_old", "logp_ref", "logp_rollout", "is_weights", "obs_weights", "selected")

#: length of `LossSpec.encode()`; the tail is reserved for later axes
NPARAMS = 48
#: positions in `LossSpec.encode()` that decide what a call allocates or how it runs
SURROGATE, LEVEL, ENTROPY_COEF, CORRECTION, CORRECTION_LEVEL, REJECT = 0, 1, 18, 23, 24, 27


@dataclass(frozen=True)
class LossSpec:
    """One policy loss, complete and immutable; build it with `fusedpg.loss_spec(name, **knobs)`.

    Bounds are absolute values of the ratio; an absent bound is an infinity, so that every backend runs the
    same comparison. Every field is a plain Python value: a spec hashes, compares and pickles.

    Attributes:
        name: the catalogue's.
        surrogate, level, anchor: the policy term; where its ratio lives; the ratio's denominator.
        clip_low, clip_high: band of the ratio, absolute: 0.8 and 1.2, not 0.2.
        dual_clip: a token with A < 0 costs at most -A*dual_clip.
        delta: upper bound of the unclipped branch's ratio.
        log_ratio_clamp: bounds of the log-ratio before its exponential; no gradient where one binds.
        token_clip: bounds of a token's log-ratio before its sequence's mean (one-sided, by the advantage's sign) or
            product.
        tau_pos, tau_neg: `sapo`'s temperatures, by the advantage's sign.
        k_pos, k_neg, lambda_pos, lambda_neg, log_w_clamp: `vespo`'s gate, by the advantage's sign; bounds of its log W.
        penalty_coef: x += penalty_coef/2 * (logp - anchor)^2, inside the correction weight and outside the keep mask.
        keep, keep_low, keep_high, keep_directional: which tokens the policy term keeps: what is measured, its bounds,
            and whether only the side that the advantage pushes to counts.
        is_correction, is_level, is_low, is_high: weights from `logp_old` - `logp_rollout`: what becomes of one outside
            its bounds, and whose ratio it is.
        is_reject, is_reject_low, is_reject_high: the mask that drops tokens or sequences by the same ratio.
        is_missing_one: a NaN in logp_rollout (or is_weights) means weight 1 and stays out of the correction metrics.
        kl, kl_gradient, kl_coef, kl_target, kl_ratio: the KL term: estimator, its gradient, its coefficient, the policy
            that it compares with, and how the ratio multiplies it.
        kl_clamp, kl_log_ratio_clamp: bounds of the estimate, and of the log-ratio that it is formed from.
        kl_backward, kl_backward_coef: KL(target||policy), estimated on the target's own samples.
        kl_forward, kl_forward_coef: KL(policy||target), likewise.
        entropy_coef: x -= entropy_coef * entropy, in nats.
        obs_coef: x += obs_coef * -logp on the tokens of `obs_mask`.
        selection, select_ratio, select_low, select_high, select_coef: tokens picked over the whole batch: how, what
            share of them, from which open interval of covariances, and the penalty's coefficient.
        reduction, max_tokens: how tokens are weighed; the fixed length of `seq-mean-token-sum-norm`.
    """

    name: str
    surrogate: Surrogate
    level: Level = Level.TOKEN
    anchor: Anchor = Anchor.OLD
    clip_low: float = -INF
    clip_high: float = INF
    dual_clip: float = INF
    delta: float = INF
    log_ratio_clamp: tuple[float, float] = (-INF, INF)
    token_clip: tuple[float, float] = (-INF, INF)
    tau_pos: float = 1.0
    tau_neg: float = 1.0
    k_pos: float = 0.0
    k_neg: float = 0.0
    lambda_pos: float = 0.0
    lambda_neg: float = 0.0
    log_w_clamp: tuple[float, float] = (-INF, INF)
    penalty_coef: float = 0.0
    keep: Keep = Keep.NONE
    keep_low: float = -INF
    keep_high: float = INF
    keep_directional: bool = False
    is_correction: Correction = Correction.NONE
    is_level: CorrectionLevel = CorrectionLevel.TOKEN
    is_low: float = -INF
    is_high: float = INF
    is_reject: Reject = Reject.NONE
    is_reject_low: float = -INF
    is_reject_high: float = INF
    is_missing_one: bool = False
    kl: KL = KL.NONE
    kl_gradient: KLGradient = KLGradient.OWN
    kl_coef: float = 0.0
    kl_target: KLTarget = KLTarget.REF
    kl_ratio: KLRatio = KLRatio.NONE
    kl_clamp: tuple[float, float] = (-INF, INF)
    kl_log_ratio_clamp: tuple[float, float] = (-INF, INF)
    kl_backward: KLSampled = KLSampled.NONE
    kl_backward_coef: float = 0.0
    kl_forward: KLSampled = KLSampled.NONE
    kl_forward_coef: float = 0.0
    entropy_coef: float = 0.0
    obs_coef: float = 0.0
    selection: Selection = Selection.NONE
    select_ratio: float = 0.0
    select_low: float = -INF
    select_high: float = INF
    select_coef: float = 0.0
    reduction: str = "token-mean"
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        check(self)

    @property
    def has_kl(self) -> bool:
        """Whether the KL term is part of the loss (a zero coefficient switches it off)."""
        return self.kl != KL.NONE and self.kl_coef != 0.0

    @property
    def has_kl_backward(self) -> bool:
        """Whether the backward KL term is part of the loss."""
        return self.kl_backward != KLSampled.NONE and self.kl_backward_coef != 0.0

    @property
    def has_kl_forward(self) -> bool:
        """Whether the forward KL term is part of the loss."""
        return self.kl_forward != KLSampled.NONE and self.kl_forward_coef != 0.0

    @property
    def has_kl_target(self) -> bool:
        """Whether any KL term compares with `kl_target`."""
        return self.has_kl or self.has_kl_backward or self.has_kl_forward

    @property
    def has_correction(self) -> bool:
        """Whether weights are formed from `logp_rollout`."""
        return self.is_correction != Correction.NONE or self.is_reject != Reject.NONE

    @property
    def needs_logp_ref(self) -> bool:
        """Whether `logp_ref` is read."""
        return self.has_kl_target and self.kl_target == KLTarget.REF

    @property
    def needs_logp_rollout(self) -> bool:
        """Whether `logp_rollout` is read."""
        as_target = self.has_kl_target and self.kl_target == KLTarget.ROLLOUT
        return self.anchor == Anchor.ROLLOUT or as_target or self.has_correction

    @property
    def needs_segments(self) -> bool:
        """Whether stage B forms sums over sequences: then it starts when every logp of a sequence is known."""
        return segments_needed(self.encode())

    @property
    def needs_sequences(self) -> bool:
        """Whether the loss needs to know where sequences begin and end."""
        return self.needs_segments or self.reduction.startswith("seq-")

    @property
    def batch_global(self) -> bool:
        """Whether a token's loss depends on the whole batch: such a loss is not a sum over micro-batches."""
        return self.selection != Selection.NONE

    def replace(self, **changes: Any) -> LossSpec:
        """A copy with some fields changed, checked like any other spec."""
        return replace(self, **changes)

    def encode(self) -> list[float]:
        """The numbers a kernel reads, in the order of `csrc/spec.h`."""
        sapo = self.surrogate == Surrogate.SAPO
        numbers = (
            self.surrogate.value,
            self.level.value,
            self.anchor.value,
            self.clip_low,
            self.clip_high,
            self.dual_clip,
            self.delta,
            *self.log_ratio_clamp,
            self.kl.value if self.has_kl else 0,
            self.kl_coef,
            self.kl_target.value,
            self.kl_ratio.value,
            self.kl_gradient.value,
            *self.kl_clamp,
            *self.kl_log_ratio_clamp,
            self.entropy_coef,
            self.keep.value,
            self.keep_directional,
            self.keep_low,
            self.keep_high,
            self.is_correction.value,
            self.is_level.value,
            self.is_low,
            self.is_high,
            self.is_reject.value,
            self.is_reject_low,
            self.is_reject_high,
            self.is_missing_one,
            *self.token_clip,
            self.penalty_coef,
            self.selection.value,
            self.select_coef,
            self.obs_coef,
            self.kl_forward.value if self.has_kl_forward else 0,
            self.kl_forward_coef,
            self.tau_pos if sapo else self.k_pos,
            self.tau_neg if sapo else self.k_neg,
            self.lambda_pos,
            self.lambda_neg,
            *self.log_w_clamp,
            self.kl_backward.value if self.has_kl_backward else 0,
            self.kl_backward_coef,
        )
        return [float(x) for x in numbers] + [0.0] * (NPARAMS - len(numbers))


def segments_needed(encoded: Sequence[float]) -> bool:
    """`LossSpec.needs_segments` of an encoded spec."""
    # compared with plain numbers: a compiler's tracer holds a float and an enum member to be different
    corrects = encoded[CORRECTION] != 0 and encoded[CORRECTION_LEVEL] != CorrectionLevel.TOKEN.value
    return (
        encoded[LEVEL] != Level.TOKEN.value
        or encoded[SURROGATE] == Surrogate.VESPO.value
        or corrects
        or encoded[REJECT] > Reject.TOKEN.value
    )
