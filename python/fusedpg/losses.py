"""The catalogue: every loss by name, its knobs with defaults, its formula and its source.

A loss made of existing terms is one `_entry(...)` call; tests, benchmarks, documentation and the command line
iterate over `CATALOGUE`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from .spec import INF, KL, REDUCTION_ALIASES, Anchor, KLRatio, KLTarget, Level, LossSpec, Surrogate

_ENTROPY_KNOBS = frozenset({"entropy_coef"})
_KL_OPTIONS = frozenset({"kl_target", "kl_ratio", "kl_clamp", "kl_log_ratio_clamp"})
_KL_KNOBS = _KL_OPTIONS | {"kl", "kl_coef"}
_REDUCTION_KNOBS = frozenset({"reduction", "max_tokens"})
_COMMON = _ENTROPY_KNOBS | _KL_KNOBS | _REDUCTION_KNOBS
_RATIO = _COMMON | {"anchor", "log_ratio_clamp"}
_BAND = _RATIO | {"epsilon_low", "epsilon_high", "clip_low", "clip_high"}
_CLIP = _BAND | {"dual_clip", "delta"}


@dataclass(frozen=True)
class LossEntry:
    """What the catalogue knows of one loss: the default spec, the formula per token, the source, the knobs."""

    spec: LossSpec
    formula: str
    source: str
    knobs: frozenset[str]


ENTRIES: dict[str, LossEntry] = {}


def _entry(name: str, *, formula: str, source: str, knobs: frozenset[str], **fields: Any) -> None:
    ENTRIES[name] = LossEntry(LossSpec(name, **fields), formula, source, knobs)


_TOKEN_CLAMP = (-20.0, 20.0)  # keeps exp finite in fp32; unchanged bits inside; verl and rLLM run the same
_PPO = "max(-A*r, -A*clip(r, 1-epsilon_low, 1+epsilon_high)), r = exp(logp - logp_old)"
_ppo: dict[str, Any] = {"surrogate": Surrogate.CLIPPED_RATIO, "log_ratio_clamp": _TOKEN_CLAMP}

_entry(
    "reinforce",
    formula="-A*logp",
    source="Williams, Simple Statistical Gradient-Following Algorithms (1992); GPG, arXiv:2504.02546",
    knobs=_COMMON,
    surrogate=Surrogate.REINFORCE,
    log_ratio_clamp=_TOKEN_CLAMP,
)
_entry(
    "importance_sampling",
    formula="-A*r, r = exp(logp - logp_old)",
    source="Schulman et al., Trust Region Policy Optimization, arXiv:1502.05477, eq. 14",
    knobs=_RATIO,
    surrogate=Surrogate.IMPORTANCE_RATIO,
    log_ratio_clamp=_TOKEN_CLAMP,
)
_entry(
    "ppo_clip",
    formula=_PPO,
    source="Schulman et al., Proximal Policy Optimization Algorithms, arXiv:1707.06347, eq. 7",
    knobs=_CLIP,
    clip_low=0.8,
    clip_high=1.2,
    **_ppo,
)
_entry(
    "ppo_dual_clip",
    formula=f"{_PPO}; for A < 0 min(that, -A*dual_clip)",
    source="Ye et al., Mastering Complex Control in MOBA Games with Deep RL, arXiv:1912.09729, eq. 5",
    knobs=_CLIP,
    clip_low=0.8,
    clip_high=1.2,
    dual_clip=3.0,
    **_ppo,
)
_entry(
    "grpo",
    formula=f"{_PPO} + kl_coef*k3(logp, logp_ref)",
    source="Shao et al., DeepSeekMath, arXiv:2402.03300, eq. 3-4",
    knobs=_CLIP,
    clip_low=0.8,
    clip_high=1.2,
    kl=KL.K3,
    kl_coef=0.04,
    kl_log_ratio_clamp=_TOKEN_CLAMP,
    reduction="seq-mean-token-mean",
    **_ppo,
)
_entry(
    "dapo",
    formula=_PPO,
    source="Yu et al., DAPO, arXiv:2503.14476, eq. 8 and 10",
    knobs=_CLIP,
    clip_low=0.8,
    clip_high=1.28,
    **_ppo,
)
_entry(
    "dr_grpo",
    formula=f"{_PPO}; summed over a sequence and divided by a fixed max_tokens",
    source="Liu et al., Understanding R1-Zero-Like Training, arXiv:2503.20783, section 3.2",
    knobs=_CLIP,
    clip_low=0.8,
    clip_high=1.2,
    reduction="seq-mean-token-sum-norm",
    max_tokens=1024,
    **_ppo,
)
_entry(
    "bnpo",
    formula=_PPO,
    source="TRL's loss_type='bnpo': token mean over the local batch; Xiao et al., BNPO, arXiv:2506.02864",
    knobs=_CLIP,
    clip_low=0.8,
    clip_high=1.2,
    **_ppo,
)
_GSPO: dict[str, Any] = {
    "surrogate": Surrogate.CLIPPED_RATIO,
    "clip_low": 1 - 3e-4,
    "clip_high": 1 + 4e-4,
    "log_ratio_clamp": (-INF, 10.0),
    "reduction": "seq-mean-token-mean",
}
_entry(
    "gspo",
    formula="max(-A*s, -A*clip(s)), s = exp(mean over the sequence of (logp - logp_old))",
    source="Zheng et al., Group Sequence Policy Optimization, arXiv:2507.18071, eq. 5 and 7",
    knobs=_CLIP - {"dual_clip", "delta"},
    level=Level.SEQUENCE,
    **_GSPO,
)
_entry(
    "gspo_token",
    formula="max(-A*s, -A*clip(s)), s = sg[exp(mean of (logp - logp_old))]*exp(logp - sg[logp])",
    source="Zheng et al., Group Sequence Policy Optimization, arXiv:2507.18071, eq. 13-14",
    knobs=_CLIP,
    level=Level.SEQUENCE_TOKEN,
    **_GSPO,
)
_entry(
    "cispo",
    formula="-sg[clip(r)]*A*logp",
    source="MiniMax-M1, arXiv:2506.13585, eq. 4-5",
    knobs=_BAND,
    surrogate=Surrogate.CISPO,
    clip_high=1.2,
    log_ratio_clamp=_TOKEN_CLAMP,
)

#: name -> default `LossSpec`, in the order of the documentation
CATALOGUE: Mapping[str, LossSpec] = MappingProxyType({name: entry.spec for name, entry in ENTRIES.items()})


def loss_spec(name: str, **knobs: Any) -> LossSpec:
    """The `LossSpec` of a catalogue entry with some knobs changed.

    Knobs: `epsilon_low`, `epsilon_high` (distances from 1) or `clip_low`, `clip_high` (absolute); `dual_clip`; `delta`;
    `log_ratio_clamp` (a number or (low, high)); `anchor` (old, self, rollout); `kl` (k1, k2, k3, abs, a trailing `+`
    for the straight-through form), `kl_coef`, `kl_target` (ref, rollout), `kl_ratio` (none, detached, live),
    `kl_clamp`, `kl_log_ratio_clamp`; `entropy_coef`; `reduction`, `max_tokens`. None switches a bound off.

    Raises:
        ValueError: an unknown loss, a knob that the loss never reads, or a value out of range.
    """
    entry = ENTRIES.get(name)
    if entry is None:
        raise ValueError(f"name: expected one of {', '.join(ENTRIES)}; got {name!r}")
    unread = sorted(set(knobs) - entry.knobs)
    if unread:
        raise ValueError(
            f"{unread[0]}: the loss {name!r} never reads it; it reads {', '.join(sorted(entry.knobs))}; remove the knob"
        )
    changes = _band(knobs)
    for key, value in knobs.items():
        parser = _PARSERS.get(key)
        if parser is not None:
            changes.update(parser(key, value))
    if entry.spec.kl == KL.NONE and changes.get("kl", KL.NONE) != KL.NONE:
        changes.setdefault("kl_log_ratio_clamp", _TOKEN_CLAMP)
    if changes.get("kl") == KL.NONE:
        changes["kl_coef"] = 0.0
    if "reduction" in changes and changes["reduction"] != entry.spec.reduction:
        changes.setdefault("max_tokens", None)
    spec = entry.spec.replace(**changes)
    if spec.kl != KL.NONE and spec.kl_coef == 0.0 and "kl_coef" not in knobs:
        warnings.warn(f"kl: {knobs['kl']!r} is inert because kl_coef is 0; pass kl_coef", UserWarning, stacklevel=2)
    for key in sorted(_KL_OPTIONS & set(knobs)) if spec.kl == KL.NONE else ():
        warnings.warn(
            f"{key}: {knobs[key]!r} is inert because the loss has no KL term; pass kl", UserWarning, stacklevel=2
        )
    return spec


def _band(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """`epsilon_low/high` or `clip_low/high` to absolute bounds.

    A bound not named keeps the entry's default; `epsilon_high=None` beside an `epsilon_low` is symmetric;
    None elsewhere, inf, and an `epsilon_low` of 1 or more (no ratio is negative) mean no bound.
    """
    eps = {k: knobs[k] for k in ("epsilon_low", "epsilon_high") if k in knobs}
    clip = {k: knobs[k] for k in ("clip_low", "clip_high") if k in knobs}
    if eps and clip:
        raise ValueError(
            f"{next(iter(eps))}: expected either epsilon_low/epsilon_high or clip_low/clip_high; got both; "
            "remove one pair"
        )
    bounds: dict[str, Any] = {}
    if "clip_low" in clip:
        bounds["clip_low"] = -INF if clip["clip_low"] is None else _number("clip_low", clip["clip_low"])
    if "clip_high" in clip:
        bounds["clip_high"] = INF if clip["clip_high"] is None else _number("clip_high", clip["clip_high"])
    for key, value in eps.items():
        if value is not None and _number(key, value) < 0:
            raise ValueError(f"{key}: expected a distance >= 0 from ratio 1; got {value}")
    low, high = eps.get("epsilon_low"), eps.get("epsilon_high")
    if "epsilon_low" in eps:
        bounds["clip_low"] = -INF if low is None else 1.0 - float(low)
    if "epsilon_high" in eps:
        high = low if high is None else high
        bounds["clip_high"] = INF if high is None else 1.0 + float(high)
    return bounds


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise ValueError(f"{key}: expected a number; got {value!r}")
    return float(value)


def _parse_number(key: str, value: Any) -> dict[str, Any]:
    return {key: _number(key, value)}


def _parse_upper(key: str, value: Any) -> dict[str, Any]:
    return {key: INF if value is None else _number(key, value)}


def _parse_clamp(key: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {key: (-INF, INF)}
    if isinstance(value, (tuple, list)):
        if len(value) != 2:
            raise ValueError(f"{key}: expected a number or (low, high); got {value!r}")
        low, high = value
        return {key: (-INF if low is None else _number(key, low), INF if high is None else _number(key, high))}
    bound = _number(key, value)
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
    return {"kl": KL[name.upper()], "kl_straight_through": plus}


def _parse_reduction(key: str, value: Any) -> dict[str, Any]:
    return {key: REDUCTION_ALIASES.get(value, value)}


def _parse_enum(enum: Any) -> Any:
    def parse(key: str, value: Any) -> dict[str, Any]:
        if isinstance(value, enum):
            return {key: value}
        names = [member.lower() for member in enum.__members__]
        if value not in names:
            raise ValueError(f"{key}: expected one of {', '.join(names)}; got {value!r}")
        return {key: enum[value.upper()]}

    return parse


_PARSERS: dict[str, Any] = {
    "dual_clip": _parse_upper,
    "delta": _parse_upper,
    "log_ratio_clamp": _parse_clamp,
    "anchor": _parse_enum(Anchor),
    "kl": _parse_kl,
    "kl_coef": _parse_number,
    "kl_target": _parse_enum(KLTarget),
    "kl_ratio": _parse_enum(KLRatio),
    "kl_clamp": _parse_clamp,
    "kl_log_ratio_clamp": _parse_clamp,
    "entropy_coef": _parse_number,
    "reduction": _parse_reduction,
    "max_tokens": lambda key, value: {key: value},
}
