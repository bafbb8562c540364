"""Knobs of `loss_spec`: which there are, and how each becomes fields of a `LossSpec`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .spec import (
    INF,
    KL,
    REDUCTION_ALIASES,
    Anchor,
    Correction,
    CorrectionLevel,
    Keep,
    KLGradient,
    KLRatio,
    KLSampled,
    KLTarget,
    LossSpec,
    Reject,
)

ENTROPY = frozenset({"entropy_coef"})
OBSERVATION = frozenset({"obs_coef"})
KL_OPTIONS = frozenset({"kl_target", "kl_ratio", "kl_gradient", "kl_clamp", "kl_log_ratio_clamp"})
KL_KNOBS = KL_OPTIONS | {"kl", "kl_coef", "kl_backward", "kl_backward_coef", "kl_forward", "kl_forward_coef"}
REDUCTION = frozenset({"reduction", "max_tokens"})
BAND = frozenset({"epsilon_low", "epsilon_high", "clip_low", "clip_high"})
KEEP = frozenset({"keep", "keep_low", "keep_high", "keep_directional"})
_REJECT = frozenset({"is_reject", "is_reject_low", "is_reject_high"})
CORRECTION = _REJECT | {"is_correction", "is_level", "is_low", "is_high", "is_missing"}

#: keeps exp finite in fp32; unchanged bits inside; verl and rLLM run the same
TOKEN_CLAMP = (-20.0, 20.0)


# ------------------------------------------------------------------ bounds of the ratio


def ratio_band(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """`epsilon_low/high` or `clip_low/high` to absolute bounds.

    A bound not named keeps the entry's default; `epsilon_high=None` beside an `epsilon_low` is symmetric;
    None elsewhere, inf, and an `epsilon_low` of 1 or more (no ratio is negative) mean no bound.
    """
    eps, clip = _one_pair(knobs)
    bounds: dict[str, Any] = {}
    if "clip_low" in clip:
        bounds["clip_low"] = -INF if clip["clip_low"] is None else number("clip_low", clip["clip_low"])
    if "clip_high" in clip:
        bounds["clip_high"] = INF if clip["clip_high"] is None else number("clip_high", clip["clip_high"])
    low, high = eps.get("epsilon_low"), eps.get("epsilon_high")
    if "epsilon_low" in eps:
        bounds["clip_low"] = -INF if low is None else 1.0 - float(low)
    if "epsilon_high" in eps:
        high = low if high is None else high
        bounds["clip_high"] = INF if high is None else 1.0 + float(high)
    return bounds


def log_band(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """`epsilon_low/high` to bounds of a token's log-ratio: (-epsilon_low, epsilon_high)."""
    eps, clip = _one_pair(knobs)
    if clip:
        key = next(iter(clip))
        raise ValueError(f"{key}: this loss clips the log-ratio, not the ratio; got {clip[key]}; pass epsilon_low/high")
    if not eps:
        return {}
    if set(eps) != {"epsilon_low", "epsilon_high"}:
        raise ValueError(f"{next(iter(eps))}: expected epsilon_low and epsilon_high together; got one of them")
    low, high = eps["epsilon_low"], eps["epsilon_high"]
    high = low if high is None else high
    return {"token_clip": (-INF if low is None else -float(low), INF if high is None else float(high))}


def _one_pair(knobs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    eps = {key: knobs[key] for key in ("epsilon_low", "epsilon_high") if key in knobs}
    clip = {key: knobs[key] for key in ("clip_low", "clip_high") if key in knobs}
    if eps and clip:
        raise ValueError(
            f"{next(iter(eps))}: expected either epsilon_low/epsilon_high or clip_low/clip_high; got both; "
            "remove one pair"
        )
    for key, value in eps.items():
        if value is not None and number(key, value) < 0:
            raise ValueError(f"{key}: expected a distance >= 0 from ratio 1; got {value}")
    return eps, clip


# ------------------------------------------------------------------ a loss and its knobs


@dataclass(frozen=True)
class LossEntry:
    """What the catalogue knows of one loss: default spec, formula and gradient per token, source, knobs."""

    spec: LossSpec
    formula: str
    #: d(formula)/d(logp), what every row hands to the vocabulary's backward pass before its weight
    gradient: str
    source: str
    knobs: frozenset[str]
    #: knobs of this loss alone, under the name that its paper or trainer gives them
    own: Mapping[str, Callable[[str, Any], dict[str, Any]]] = field(default_factory=dict)
    #: how epsilon_low/high and clip_low/high become bounds
    band: Callable[[Mapping[str, Any]], dict[str, Any]] = ratio_band
    #: knobs without a default
    required: frozenset[str] = frozenset()


def apply_knobs(name: str, entry: LossEntry, knobs: Mapping[str, Any]) -> LossSpec:
    """The entry's spec with `knobs` applied; refuses those that the loss never reads, warns of inert ones."""
    unread = sorted(set(knobs) - entry.knobs)
    if unread:
        raise ValueError(
            f"{unread[0]}: the loss {name!r} never reads it; it reads {', '.join(sorted(entry.knobs))}; remove the knob"
        )
    missing = sorted(entry.required - set(knobs))
    if missing:
        raise ValueError(f"{missing[0]}: the loss {name!r} has no default for it; got none; pass {missing[0]}=...")
    changes = entry.band(knobs)
    for key, value in knobs.items():
        parser = entry.own.get(key) or _PARSERS.get(key)
        if parser is not None:
            changes.update(parser(key, value))
    _complete(entry.spec, changes)
    spec = entry.spec.replace(**changes)
    _warn_of_inert(spec, knobs)
    return spec


def _complete(default: LossSpec, changes: dict[str, Any]) -> None:
    """Fields that follow from others."""
    wants_kl = any(changes.get(term, 0) != 0 for term in ("kl", "kl_backward", "kl_forward"))
    if default.kl == KL.NONE and wants_kl:
        changes.setdefault("kl_log_ratio_clamp", TOKEN_CLAMP)
    if changes.get("kl") == KL.NONE:
        changes["kl_coef"] = 0.0
    for term in ("kl_backward", "kl_forward"):
        if changes.get(term) == KLSampled.NONE:
            changes[f"{term}_coef"] = 0.0
    if changes.get("keep") == Keep.NONE:
        changes.update(keep_low=-INF, keep_high=INF, keep_directional=False)
    if "reduction" in changes and changes["reduction"] != default.reduction:
        changes.setdefault("max_tokens", None)


def _warn_of_inert(spec: LossSpec, knobs: Mapping[str, Any]) -> None:
    def inert(key: str, why: str) -> None:
        warnings.warn(f"{key}: {knobs[key]!r} is inert because {why}", UserWarning, stacklevel=4)

    if spec.kl != KL.NONE and spec.kl_coef == 0.0 and "kl_coef" not in knobs:
        inert("kl", "kl_coef is 0; pass kl_coef")
    for term in {"kl_backward", "kl_forward"} & set(knobs):
        if getattr(spec, term) != KLSampled.NONE and getattr(spec, f"{term}_coef") == 0.0:
            inert(term, f"{term}_coef is 0; pass {term}_coef")
    if spec.kl == KL.NONE and spec.kl_backward == KLSampled.NONE and spec.kl_forward == KLSampled.NONE:
        for key in sorted(KL_OPTIONS & set(knobs)):
            inert(key, "the loss has no KL term; pass kl")
    if "is_level" in knobs and spec.is_correction == Correction.NONE:
        inert("is_level", "the loss forms no correction weight; pass is_correction")
    if "keep_directional" in knobs and knobs["keep_directional"] and spec.keep == Keep.NONE:
        inert("keep_directional", "the loss has no keep mask; pass keep")
    if "anchor" in knobs and spec.surrogate.name == "REINFORCE" and spec.penalty_coef == 0 and not spec.has_correction:
        inert("anchor", f"the loss {spec.name!r} forms no ratio; pass is_correction")


# ------------------------------------------------------------------ one knob each


def number(key: str, value: Any) -> float:
    """The value as a float; refuses bools, NaN and everything that is no number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise ValueError(f"{key}: expected a number; got {value!r}")
    return float(value)


def parse_number(key: str, value: Any) -> dict[str, Any]:
    """A field of the same name."""
    return {key: number(key, value)}


def parse_as(field: str) -> Callable[[str, Any], dict[str, Any]]:
    """A field under another name; None is its default, no bound."""
    empty = INF if field.endswith("high") else -INF

    def parse(key: str, value: Any) -> dict[str, Any]:
        return {field: empty if value is None else number(key, value)}

    return parse


def parse_delta(key: str, value: Any) -> dict[str, Any]:
    """DPPO's threshold, the same on both sides."""
    if number(key, value) < 0:
        raise ValueError(f"{key}: expected a divergence >= 0; got {value}")
    return {"keep_low": -float(value), "keep_high": float(value)}


def parse_beta(key: str, value: Any) -> dict[str, Any]:
    """DRO's beta."""
    if number(key, value) <= 0:
        raise ValueError(f"{key}: expected a number > 0; got {value}; without a penalty use 'reinforce'")
    return {"penalty_coef": float(value)}


def parse_kl_tau(key: str, value: Any) -> dict[str, Any]:
    """The coefficient of the squared log-ratio."""
    return {"penalty_coef": 2.0 * number(key, value)}


def parse_kl_approx(key: str, value: Any) -> dict[str, Any]:
    """rLLM's switch between the score form and the k3 form of both sampled KL terms."""
    if not isinstance(value, bool):
        raise ValueError(f"{key}: expected True (k3) or False (score function); got {value!r}")
    form = KLSampled.K3 if value else KLSampled.SCORE
    return {"kl_backward": form, "kl_forward": form}


def _parse_upper(key: str, value: Any) -> dict[str, Any]:
    return {key: INF if value is None else number(key, value)}


def _parse_lower(key: str, value: Any) -> dict[str, Any]:
    return {key: -INF if value is None else number(key, value)}


def _parse_clamp(key: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {key: (-INF, INF)}
    if isinstance(value, (tuple, list)):
        if len(value) != 2:
            raise ValueError(f"{key}: expected a number or (low, high); got {value!r}")
        low, high = value
        return {key: (-INF if low is None else number(key, low), INF if high is None else number(key, high))}
    bound = number(key, value)
    if bound < 0:
        raise ValueError(f"{key}: a single number is a symmetric bound and must be >= 0; got {value}")
    return {key: (-bound, bound)}


def _parse_kl(key: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {"kl": KL.NONE}
    text = str(value)
    name, plus = text.removesuffix("+"), text.endswith("+")
    if name.upper() not in KL.__members__ or name.upper() == "NONE":
        raise ValueError(f"kl: expected None, k1, k2, k3 or abs, with an optional trailing '+'; got {value!r}")
    gradient = {"kl_gradient": KLGradient.STRAIGHT_THROUGH} if plus else {}
    return {"kl": KL[name.upper()], **gradient}


def _parse_bool(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, bool):
        raise ValueError(f"{key}: expected True or False; got {value!r}")
    return {key: value}


def _parse_missing(key: str, value: Any) -> dict[str, Any]:
    if value not in ("nan", "one"):
        raise ValueError(f"{key}: expected 'nan' (it stays visible) or 'one' (weight 1); got {value!r}")
    return {"is_missing_one": value == "one"}


def _parse_enum(enum: Any) -> Callable[[str, Any], dict[str, Any]]:
    def parse(key: str, value: Any) -> dict[str, Any]:
        if isinstance(value, enum):
            return {key: value}
        names = [member.lower() for member in enum.__members__]
        value = "none" if value is None and "none" in names else value
        if value not in names:
            raise ValueError(f"{key}: expected one of {', '.join(names)}; got {value!r}")
        return {key: enum[value.upper()]}

    return parse


_PARSERS: dict[str, Callable[[str, Any], dict[str, Any]]] = {
    "dual_clip": _parse_upper,
    "delta": _parse_upper,
    "log_ratio_clamp": _parse_clamp,
    "anchor": _parse_enum(Anchor),
    "keep": _parse_enum(Keep),
    "keep_low": _parse_lower,
    "keep_high": _parse_upper,
    "keep_directional": _parse_bool,
    "is_correction": _parse_enum(Correction),
    "is_level": _parse_enum(CorrectionLevel),
    "is_low": _parse_lower,
    "is_high": _parse_upper,
    "is_reject": _parse_enum(Reject),
    "is_reject_low": _parse_lower,
    "is_reject_high": _parse_upper,
    "is_missing": _parse_missing,
    "kl": _parse_kl,
    "kl_coef": parse_number,
    "kl_target": _parse_enum(KLTarget),
    "kl_ratio": _parse_enum(KLRatio),
    "kl_gradient": _parse_enum(KLGradient),
    "kl_clamp": _parse_clamp,
    "kl_log_ratio_clamp": _parse_clamp,
    "kl_backward": _parse_enum(KLSampled),
    "kl_backward_coef": parse_number,
    "kl_forward": _parse_enum(KLSampled),
    "kl_forward_coef": parse_number,
    "entropy_coef": parse_number,
    "obs_coef": parse_number,
    "reduction": lambda key, value: {key: REDUCTION_ALIASES.get(value, value)},
    "max_tokens": lambda key, value: {key: value},
}
