"""Every surrogate, level and axis of a `LossSpec` in one table: what the tests of stage B run over."""

from __future__ import annotations

import itertools
from typing import Any

from fusedpg.spec import (
    KL,
    Anchor,
    Correction,
    CorrectionLevel,
    Keep,
    KLGradient,
    KLRatio,
    KLSampled,
    KLTarget,
    Level,
    LossSpec,
    Reject,
    Selection,
    Surrogate,
)

CLIP = {"clip_low": 0.8, "clip_high": 1.28}
KEPT: dict[Keep, dict[str, Any]] = {
    Keep.RATIO: {"keep_low": 0.8, "keep_high": 1.2},
    Keep.TV: {"keep_low": -0.05, "keep_high": 0.05},
    Keep.KL: {"keep_low": -0.01, "keep_high": 0.01},
}
REJECTING: dict[str, dict[str, Any]] = {
    "alone": {},
    "geometric": {"is_correction": Correction.TRUNCATE, "is_level": CorrectionLevel.GEOMETRIC, "is_high": 1.05},
}
#: what a level or a surrogate refuses (see spec_checks.py)
ONLY_TOKEN_LEVEL = ("keep-TV", "keep-KL", "penalty", "clip-cov", "kl-cov")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clamped": {"log_ratio_clamp": (-0.2, 0.3)},
    "dual": {"dual_clip": 1.4, "delta": 1.6},
    **{
        f"{kl.name}-{rho.name}": {"kl": kl, "kl_coef": 0.3, "kl_ratio": rho}
        for kl, rho in itertools.product((KL.K1, KL.K2, KL.K3, KL.ABS), KLRatio)
    },
    "kl-clamps": {"kl": KL.K3, "kl_coef": 0.3, "kl_clamp": (0.0, 0.05), "kl_log_ratio_clamp": (-0.4, 0.4)},
    **{
        f"kl-{g.name}": {"kl": KL.K3, "kl_coef": 0.3, "kl_gradient": g, "kl_target": KLTarget.ROLLOUT}
        for g in (KLGradient.STRAIGHT_THROUGH, KLGradient.SCORE)
    },
    "kl-score-clamps": {"kl": KL.K2, "kl_coef": 0.3, "kl_gradient": KLGradient.SCORE, "kl_clamp": (0.01, 0.05)},
    **{
        f"{term}-{f.name}": {term: f, f"{term}_coef": 0.3, "kl_log_ratio_clamp": (-0.4, 0.4)}
        for term in ("kl_backward", "kl_forward")
        for f in (KLSampled.SCORE, KLSampled.K3)
    },
    **{
        f"keep-{keep.name}-{directional}": {**KEPT[keep], "keep": keep, "keep_directional": directional}
        for keep, directional in itertools.product(KEPT, (False, True))
    },
    **{
        f"is-{c.name}-{at.name}": {"is_correction": c, "is_level": at, "is_low": 0.9, "is_high": 1.1}
        for c, at in itertools.product((Correction.TRUNCATE, Correction.MASK), CorrectionLevel)
    },
    **{
        f"reject-{r.name}-{name}": {**more, "is_reject": r, "is_reject_low": 0.9, "is_reject_high": 1.1}
        for r in (Reject.TOKEN, Reject.SEQUENCE, Reject.GEOMETRIC)
        for name, more in REJECTING.items()
    },
    "missing": {"is_missing_one": True},
    **{
        f"missing-{at.name}": {
            "is_missing_one": True,
            "is_correction": Correction.MASK,
            "is_level": at,
            "is_low": 1.0,
            "is_high": 2.0,
            "is_reject": Reject.TOKEN,
            "is_reject_low": 1.01,
        }
        for at in CorrectionLevel
    },
    "penalty": {"penalty_coef": 0.3},
    "clip-cov": {"selection": Selection.CLIP_COV, "select_ratio": 0.1},
    "kl-cov": {"selection": Selection.KL_COV, "select_ratio": 0.1, "select_coef": 0.7},
    "token-clip": {"token_clip": (-0.2, 0.1)},
    "observed": {"obs_coef": 0.4},
    "everything": {
        "obs_coef": 0.4,
        "entropy_coef": 0.05,
        "kl": KL.K3,
        "kl_coef": 0.3,
        "kl_ratio": KLRatio.LIVE,
        "kl_gradient": KLGradient.SCORE,
        "kl_forward": KLSampled.K3,
        "kl_forward_coef": 0.2,
        "is_correction": Correction.TRUNCATE,
        "is_high": 1.1,
        "is_missing_one": True,
        "keep": Keep.RATIO,
        "keep_high": 1.2,
        "is_reject": Reject.GEOMETRIC,
        "is_reject_low": 0.95,
    },
    "entropy": {"entropy_coef": 0.05},
    "self": {"anchor": Anchor.SELF},
    "rollout": {"anchor": Anchor.ROLLOUT},
}


BANDS: dict[Surrogate, dict[str, Any]] = {
    Surrogate.CLIPPED_RATIO: CLIP,
    Surrogate.CISPO: CLIP,
    Surrogate.TOPR: CLIP,
    Surrogate.SAPO: {"tau_pos": 1.5, "tau_neg": 0.8},
    Surrogate.VESPO: {
        "k_pos": 1.2,
        "k_neg": 0.7,
        "lambda_pos": 0.4,
        "lambda_neg": 0.6,
        "token_clip": (-0.4, 0.3),
        "log_w_clamp": (-1.5, 1.2),
    },
}


def make_spec(surrogate: Surrogate, level: Level, variant: str) -> LossSpec:
    return LossSpec("test", surrogate, level, **{**BANDS.get(surrogate, {}), **VARIANTS[variant]})


def weighs_sequences(fields: dict[str, Any]) -> bool:
    return fields.get("is_level", CorrectionLevel.TOKEN) > 0 or fields.get("is_reject", Reject.NONE) > Reject.TOKEN


def means_something(surrogate: Surrogate, level: Level, variant: str) -> bool:
    if surrogate == Surrogate.VESPO and weighs_sequences(VARIANTS[variant]):
        return False
    if level == Level.TOKEN:
        return variant != "token-clip" or surrogate == Surrogate.VESPO
    if surrogate in (Surrogate.REINFORCE, Surrogate.VESPO) or variant.startswith(ONLY_TOKEN_LEVEL):
        return False
    return variant != "token-clip" or level == Level.SEQUENCE


SPECS = {
    f"{s.name}-{level.name}-{v}": make_spec(s, level, v)
    for s, level, v in itertools.product(Surrogate, Level, VARIANTS)
    if means_something(s, level, v)
}
GROUPS = {name.rsplit("-", 1)[0] for name in SPECS if name.endswith("-plain")}
