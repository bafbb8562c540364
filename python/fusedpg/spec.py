"""A policy loss as data: `LossSpec`, its axes and their fixed integer codes.

Standard library only. The codes and the order of `LossSpec.encode` are mirrored by `csrc/spec.h` and
`kernels/terms.py`; a test compares the three.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any

INF = math.inf


class Surrogate(IntEnum):
    """The policy term of the loss; `fusedpg.reference` holds one function of the same name for each."""

    REINFORCE = 0
    IMPORTANCE_RATIO = 1
    CLIPPED_RATIO = 2
    CISPO = 3


class Level(IntEnum):
    """Where the importance ratio lives: a token, a sequence, or a sequence's value with token gradients."""

    TOKEN = 0
    SEQUENCE = 1
    SEQUENCE_TOKEN = 2


class Anchor(IntEnum):
    """The denominator of the ratio: `logp_old`, the policy itself (ratio exactly 1), or `logp_rollout`."""

    OLD = 0
    SELF = 1
    ROLLOUT = 2


class KL(IntEnum):
    """The per-token KL estimator of `logp - logp_ref` (Schulman, "Approximating KL Divergence", 2020)."""

    NONE = 0
    K1 = 1
    K2 = 2
    K3 = 3
    ABS = 4


class KLTarget(IntEnum):
    """Which policy the KL term compares with."""

    REF = 0
    ROLLOUT = 1


class KLRatio(IntEnum):
    """How the importance ratio multiplies the KL term."""

    NONE = 0
    DETACHED = 1
    LIVE = 2


#: reduction names, aliases resolved; `fusedpg.weights` holds the one definition of each
REDUCTIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
)
REDUCTION_ALIASES = {"seq-mean-token-sum-fixed": "seq-mean-token-sum-norm"}

#: length of `LossSpec.encode()`; the tail is reserved for later axes
NPARAMS = 24
#: positions in `LossSpec.encode()` that decide what a call allocates
LEVEL, ENTROPY_COEF = 1, 18


@dataclass(frozen=True)
class LossSpec:
    """One policy loss, complete and immutable; build it with `fusedpg.loss_spec(name, **knobs)`.

    Bounds are absolute values of the ratio; an absent bound is an infinity, so that every backend runs the
    same comparison. Every field is a plain Python value: a spec hashes, compares and pickles.
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
    kl: KL = KL.NONE
    kl_straight_through: bool = False
    kl_coef: float = 0.0
    kl_target: KLTarget = KLTarget.REF
    kl_ratio: KLRatio = KLRatio.NONE
    kl_clamp: tuple[float, float] = (-INF, INF)
    kl_log_ratio_clamp: tuple[float, float] = (-INF, INF)
    entropy_coef: float = 0.0
    reduction: str = "token-mean"
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        _check(self)

    @property
    def has_kl(self) -> bool:
        """Whether the KL term is part of the loss (a zero coefficient switches it off)."""
        return self.kl != KL.NONE and self.kl_coef != 0.0

    @property
    def needs_logp_ref(self) -> bool:
        """Whether `logp_ref` is read."""
        return self.has_kl and self.kl_target == KLTarget.REF

    @property
    def needs_logp_rollout(self) -> bool:
        """Whether `logp_rollout` is read."""
        return self.anchor == Anchor.ROLLOUT or (self.has_kl and self.kl_target == KLTarget.ROLLOUT)

    @property
    def needs_sequences(self) -> bool:
        """Whether the loss needs to know where sequences begin and end."""
        return self.level != Level.TOKEN or self.reduction.startswith("seq-")

    def replace(self, **changes: Any) -> LossSpec:
        """A copy with some fields changed, checked like any other spec."""
        return replace(self, **changes)

    def encode(self) -> list[float]:
        """The numbers a kernel reads, in the order of `csrc/spec.h`."""
        kl = self.kl if self.has_kl else KL.NONE
        numbers = [
            float(self.surrogate.value),
            float(self.level.value),
            float(self.anchor.value),
            self.clip_low,
            self.clip_high,
            self.dual_clip,
            self.delta,
            *self.log_ratio_clamp,
            float(kl.value),
            self.kl_coef,
            float(self.kl_target.value),
            float(self.kl_ratio.value),
            float(self.kl_straight_through),
            *self.kl_clamp,
            *self.kl_log_ratio_clamp,
            self.entropy_coef,
        ]
        return numbers + [0.0] * (NPARAMS - len(numbers))


def _check(spec: LossSpec) -> None:
    """Refuse contradictory or meaningless combinations of fields."""
    _check_bounds(spec)
    if spec.reduction not in REDUCTIONS:
        valid = ", ".join((*REDUCTIONS, *REDUCTION_ALIASES))
        raise ValueError(f"reduction: expected one of {valid}; got {spec.reduction!r}")
    if spec.reduction == "seq-mean-token-sum-norm":
        if isinstance(spec.max_tokens, bool) or not isinstance(spec.max_tokens, int) or spec.max_tokens <= 0:
            raise ValueError(
                "max_tokens: reduction 'seq-mean-token-sum-norm' divides by it and expects a positive int; "
                f"got {spec.max_tokens!r}; pass the fixed response budget, e.g. max_tokens=4096"
            )
    elif spec.max_tokens is not None:
        raise ValueError(
            f"max_tokens: reduction {spec.reduction!r} never reads it; got {spec.max_tokens!r}; "
            "remove it or use reduction='seq-mean-token-sum-norm'"
        )
    if spec.level != Level.TOKEN and spec.surrogate == Surrogate.REINFORCE:
        raise ValueError(
            f"level: surrogate {spec.surrogate.name.lower()!r} has no ratio, so it has no sequence level; "
            "use level='token'"
        )
    if spec.kl_coef < 0 or not math.isfinite(spec.kl_coef):
        raise ValueError(f"kl_coef: expected a finite number >= 0; got {spec.kl_coef}")
    if spec.kl_coef != 0.0 and spec.kl == KL.NONE:
        raise ValueError(f"kl_coef: {spec.kl_coef} needs an estimator; pass kl='k3' (or k1, k2, abs) as well")
    if not math.isfinite(spec.entropy_coef):
        raise ValueError(f"entropy_coef: expected a finite number; got {spec.entropy_coef}")


def _check_bounds(spec: LossSpec) -> None:
    for f in fields(spec):
        value = getattr(spec, f.name)
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"{f.name}: expected a number; got nan")
        if isinstance(value, tuple):
            lo, hi = value
            if math.isnan(lo) or math.isnan(hi) or lo > hi:
                raise ValueError(f"{f.name}: expected (low, high) with low <= high; got {value}")
    if spec.clip_low > spec.clip_high:
        raise ValueError(
            f"clip_low: expected clip_low <= clip_high; got clip_low={spec.clip_low}, clip_high={spec.clip_high}"
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
