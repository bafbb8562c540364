"""Typed algorithm configs: each value has one owner, one default and one check, which runs whenever it is set.

An unknown key fails, old names of a key included. What one value means for another is `preflight`'s.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

Check = Callable[[str, Any], Any]
S = TypeVar("S", bound="Section")

#: keys of earlier configs, only to name the fix in the error: none of them is read
_RENAMED = {
    "objective": "grpo_surrogate ('degenerate' is 'legacy_pg' now)",
    "objective_mode": "distillation_mode",
}
LOSS_TYPES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-fixed")


# ------------------------------------------------------------------ one value


def positive_int(name: str, value: Any) -> int:
    """An int > 0; refuses bools, fractions (1.0 too) and everything <= 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{name}: expected a positive int; got {value!r}")
    return value


def _optional_int(name: str, value: Any) -> int | None:
    return None if value is None else positive_int(name, value)


def _number(low: float, high: float, *, low_ok: bool) -> Check:
    sign = ">=" if low_ok else ">"
    text = f"a finite number {sign} {low:g}" + ("" if high == math.inf else f" and < {high:g}")

    def check(name: str, value: Any) -> float:
        ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not ok or value >= high or value < low or (value == low and not low_ok):
            raise ValueError(f"{name}: expected {text}; got {value!r}")
        return float(value)

    return check


def _dual_clip(name: str, value: Any) -> float:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or not (value == 0 or value > 1):
        raise ValueError(f"{name}: expected a number > 1 (the dual clip's bound), or 0 (off); got {value!r}")
    return float(value)


def _choice(*values: str) -> Check:
    def check(name: str, value: Any) -> str:
        if value not in values:
            raise ValueError(f"{name}: expected one of {', '.join(values)}; got {value!r}")
        return str(value)

    return check


def _bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected True or False; got {value!r}")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name}: expected a non-empty string; got {value!r}")
    return value


_POSITIVE, _NOT_NEGATIVE = _number(0, math.inf, low_ok=False), _number(0, math.inf, low_ok=True)


def _value(default: Any, check: Check) -> Any:
    return field(default=default, metadata={"check": check})


# ------------------------------------------------------------------ sections


@dataclass(kw_only=True)
class Section:
    """A part of a config: sets only the keys that it has, each through its check."""

    #: its name in front of a key
    label: ClassVar[str] = ""

    def __setattr__(self, key: str, value: Any) -> None:
        known = type(self).__dataclass_fields__
        if key not in known:
            raise AttributeError(self._unknown(key))
        check = known[key].metadata.get("check")
        object.__setattr__(self, key, value if check is None else check(self._name(key), value))

    @classmethod
    def from_mapping(cls: type[S], values: Mapping[str, Any]) -> S:
        """A section from plain values, as a config file holds them."""
        for key in values:
            if key not in cls.__dataclass_fields__:
                raise ValueError(cls._unknown(key))
        return cls(**values)

    def non_default(self) -> list[str]:
        """The keys whose value is not their default."""
        return [f.name for f in fields(self) if getattr(self, f.name) != f.default]

    @classmethod
    def _name(cls, key: str) -> str:
        return f"{cls.label}.{key}" if cls.label else key

    @classmethod
    def _unknown(cls, key: str) -> str:
        valid = ", ".join(cls.__dataclass_fields__)
        fix = f"; it is {cls._name(_RENAMED[key])} now" if key in _RENAMED and cls.label == "rl" else ""
        return f"{cls._name(key)}: unknown key of {cls.__name__}; expected one of {valid}{fix}"


@dataclass(kw_only=True)
class RolloutConfig(Section):
    """How completions are sampled; `max_tokens` owns the fixed response bound."""

    label: ClassVar[str] = "rollout"
    #: of the sampling distribution
    temperature: float = _value(1.0, _POSITIVE)
    max_tokens: int = _value(1024, positive_int)


@dataclass(kw_only=True)
class PolicyGradientConfig(Section):
    """What GRPO and OPD share: the clipped surrogate, its reduction, and how often a collected batch is used."""

    label: ClassVar[str] = "rl"
    #: "token", or "sequence": one ratio and one advantage a response
    importance_sampling_level: str = _value("token", _choice("token", "sequence"))
    #: the ratio is clipped below 1 - epsilon_low
    epsilon_low: float = _value(0.2, _NOT_NEGATIVE)
    #: the ratio is clipped above 1 + epsilon_high
    epsilon_high: float = _value(0.2, _NOT_NEGATIVE)
    #: the dual clip's bound; 0 is off
    lower_bound_ratio: float = _value(3.0, _dual_clip)
    #: of the distribution under which the loss scores tokens
    temperature: float = _value(1.0, _POSITIVE)
    #: coefficient of the k3 KL to a frozen reference; 0 is off
    kl_beta: float = _value(0.0, _NOT_NEGATIVE)
    #: the reduction; "seq-mean-token-sum-fixed" divides by `rollout.max_tokens`
    loss_type: str = _value("token-mean", _choice(*LOSS_TYPES))
    #: mean-centred advantages in place of group-relative ones
    unbiased_advantage: bool = _value(False, _bool)
    #: samples of one update on one replica; None is the whole collected batch
    mini_batch_per_replica: int | None = _value(None, _optional_int)
    #: samples that one replica receives of a collected batch; None is unknown before the run
    batch_per_replica: int | None = _value(None, _optional_int)
    #: passes over a collected batch
    epochs: int = _value(1, positive_int)
    #: the forward gives the same bits each time, so that frozen log-probs are those of the sampling policy
    certified_deterministic_forward: bool = _value(False, _bool)

    @property
    def n_mini(self) -> int | None:
        """Updates of one pass over a collected batch; None when the batch's size is unknown."""
        if self.mini_batch_per_replica is None:
            return 1
        if self.batch_per_replica is None:
            return None
        return -(-self.batch_per_replica // self.mini_batch_per_replica)

    @property
    def on_policy(self) -> bool:
        """Whether every collected batch is known to serve one update only."""
        return self.n_mini == 1 and self.epochs == 1


@dataclass(kw_only=True)
class GRPOConfig(PolicyGradientConfig):
    """GRPO and what its knobs make of it (Dr-GRPO, GSPO, DAPO).

    `clipped` owns frozen π_old, importance ratios, epsilon and dual clip, loss temperature and reduction; `legacy_pg`
    is the plain policy gradient for toys and parity.
    """

    #: "clipped" or "legacy_pg"
    grpo_surrogate: str = _value("clipped", _choice("clipped", "legacy_pg"))


@dataclass(kw_only=True)
class OPDConfig(PolicyGradientConfig):
    """On-policy distillation: a teacher's signal a token as the advantage, or a divergence over the vocabulary."""

    #: "advantage" (the clipped surrogate on teacher_logp - π_old) or "direct" (a divergence)
    distillation_mode: str = _value("advantage", _choice("advantage", "direct"))
    #: of the direct mode, as in `distillation_loss`
    divergence: str = _value("reverse_kl", _choice("reverse_kl", "forward_kl", "jsd"))
    #: the teacher's share in the mixture of divergence="jsd"
    jsd_beta: float = _value(0.5, _number(0, 1, low_ok=False))


@dataclass(kw_only=True)
class DPOConfig(Section):
    """Preference pairs against a frozen reference: the sigmoid loss or IPO's square."""

    label: ClassVar[str] = "rl"
    #: "sigmoid" or "ipo"
    loss: str = _value("sigmoid", _choice("sigmoid", "ipo"))
    #: strength of the reference: the margin is multiplied by it
    beta: float = _value(0.1, _POSITIVE)
    #: the share of labels taken to be flipped; IPO never reads it
    label_smoothing: float = _value(0.0, _number(0, 0.5, low_ok=True))
    #: of the distribution under which tokens are scored
    temperature: float = _value(1.0, _POSITIVE)


@dataclass(kw_only=True)
class JobConfig(Section):
    """Where a run's output belongs: part of its provenance, and of automatic resume."""

    label: ClassVar[str] = "job"
    name: str = _value("grpo", _text)


@dataclass(kw_only=True)
class RunConfig(Section):
    """A resolved recipe. `algorithm` and `job.name` are provenance: no code branches on them."""

    algorithm: str = _value("grpo", _text)
    #: where its output belongs
    job: JobConfig = field(default_factory=JobConfig)
    #: the algorithm's section: `GRPOConfig`, `OPDConfig` or `DPOConfig`
    rl: Any = field(default_factory=GRPOConfig)
    #: how completions are sampled
    rollout: RolloutConfig = field(default_factory=RolloutConfig)


def with_options(config: RunConfig, options: Iterable[str]) -> RunConfig:
    """Set `section.key=value` options, in order: a later one wins, so fixed choices of an entry are appended last.

    Values are Python literals; anything else is a string.

    Args:
        config: changed in place.
        options: such as `rl.epsilon_high=0.28`.

    Returns:
        `config`.

    Raises:
        AttributeError, ValueError: an option that is not `section.key=value`, an unknown key, a value out of range.
    """
    for option in options:
        path, equals, text = option.partition("=")
        *sections, key = path.strip().split(".")
        if not equals or not key:
            raise ValueError(f"options: expected section.key=value; got {option!r}")
        target: Any = config
        for name in sections:
            if name not in type(target).__dataclass_fields__:
                raise ValueError(target._unknown(name))
            target = getattr(target, name)
        if not isinstance(target, Section) or key not in type(target).__dataclass_fields__:
            raise ValueError(
                f"{path.strip()}: unknown key" if not isinstance(target, Section) else target._unknown(key)
            )
        try:
            value = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError):
            value = text.strip()
        setattr(target, key, value)
    return config
