"""Checks of a whole config before anything is placed or built: no value that the selected loss never reads."""

from __future__ import annotations

import warnings
from typing import Any

from .config import DPOConfig, GRPOConfig, OPDConfig, PolicyGradientConfig, RunConfig, positive_int
from .presets import cosmos
from .presets.base import TrainerSpec

_UPDATES = frozenset({"mini_batch_per_replica", "batch_per_replica", "epochs"})
_CLIPPED = _UPDATES | {
    "epsilon_low",
    "epsilon_high",
    "lower_bound_ratio",
    "temperature",
    "kl_beta",
    "loss_type",
    "certified_deterministic_forward",
}
#: selected objective -> the keys that it reads, its selector aside
READS: dict[str, frozenset[str]] = {
    "grpo_surrogate='clipped'": _CLIPPED | {"importance_sampling_level", "unbiased_advantage"},
    "grpo_surrogate='legacy_pg'": _UPDATES | {"unbiased_advantage"},
    "distillation_mode='advantage'": _CLIPPED,
    "distillation_mode='direct'": _UPDATES | {"temperature", "loss_type", "divergence", "jsd_beta"},
}
#: knobs of the importance ratio, which is 1 when a collected batch serves one update
_RATIO_KNOBS = ("importance_sampling_level", "epsilon_low", "epsilon_high")


def selected(rl: PolicyGradientConfig) -> str:
    """The objective that a config selects, as `selector='value'`."""
    if isinstance(rl, GRPOConfig):
        return f"grpo_surrogate={rl.grpo_surrogate!r}"
    if isinstance(rl, OPDConfig):
        return f"distillation_mode={rl.distillation_mode!r}"
    raise TypeError(f"rl: expected a GRPOConfig or an OPDConfig; got {type(rl).__name__}")


def reads_ratio(rl: PolicyGradientConfig) -> bool:
    """Whether the selected objective is the clipped surrogate, which reads frozen π_old."""
    return selected(rl) in ("grpo_surrogate='clipped'", "distillation_mode='advantage'")


def check_knobs(rl: PolicyGradientConfig) -> None:
    """Refuse every non-default key that the selected objective never reads; the builders' backstop as well."""
    who = selected(rl)
    selector = who.partition("=")[0]
    for key in rl.non_default():
        if key != selector and key not in READS[who]:
            raise ValueError(
                f"rl.{key}: {who} never reads it; got {getattr(rl, key)!r}; leave it at its default, or select an "
                "objective that reads it"
            )
    if isinstance(rl, OPDConfig) and rl.divergence != "jsd" and "jsd_beta" in rl.non_default():
        raise ValueError(f"rl.jsd_beta: divergence={rl.divergence!r} never reads it; got {rl.jsd_beta}; remove it")
    if rl.importance_sampling_level == "sequence" and rl.lower_bound_ratio != 0:
        raise ValueError(
            "rl.lower_bound_ratio: importance_sampling_level='sequence' never reads the dual clip; got "
            f"{rl.lower_bound_ratio}; set it to 0"
        )
    mini, batch = rl.mini_batch_per_replica, rl.batch_per_replica
    if mini is not None and batch is not None and mini > batch:
        raise ValueError(
            f"rl.mini_batch_per_replica: expected at most batch_per_replica={batch}; got {mini}; None is one update"
        )
    if isinstance(rl, OPDConfig) and rl.distillation_mode == "direct":
        warnings.warn(
            "distillation_mode: 'direct' trains on the divergence from the teacher alone: task reward and group "
            "advantage are not training signals; reward configuration still controls reward-stage metrics, held-out "
            "evaluation and optional shared-prefix masking",
            UserWarning,
            stacklevel=3,
        )


def policy_spec(rl: PolicyGradientConfig, max_response_length: Any = None) -> TrainerSpec:
    """The loss of the selected policy-gradient objective; only the fixed reduction reads `max_response_length`."""
    if selected(rl) == "grpo_surrogate='legacy_pg'":
        return cosmos("legacy_pg")
    options: dict[str, Any] = {
        key: getattr(rl, key)
        for key in (
            "importance_sampling_level",
            "epsilon_low",
            "epsilon_high",
            "lower_bound_ratio",
            "kl_beta",
            "loss_type",
        )
    }
    if rl.loss_type == "seq-mean-token-sum-fixed":
        options["max_response_length"] = positive_int("max_response_length", max_response_length)
    return cosmos("clipped", **options)


def preflight(config: RunConfig) -> None:
    """Refuse a config that claims what its loss never reads; warn of what is honoured but inert.

    Args:
        config: a resolved recipe.

    Raises:
        TypeError, ValueError: by name of the key, with what was expected, what came and the fix.
    """
    rl = config.rl
    if isinstance(rl, DPOConfig):
        check_dpo(rl)
        return
    check_knobs(rl)
    sampling = config.rollout.temperature
    positive_int("rollout.max_tokens", config.rollout.max_tokens)
    if selected(rl) == "grpo_surrogate='legacy_pg'":
        if sampling != 1.0:
            raise ValueError(
                "rollout.temperature: grpo_surrogate='legacy_pg' scores at temperature 1 and expects 1.0; got "
                f"{sampling}; set it to 1.0, or use grpo_surrogate='clipped' with rl.temperature={sampling}"
            )
        return
    if not reads_ratio(rl):
        return
    if sampling != rl.temperature:
        raise ValueError(
            f"rollout.temperature: {selected(rl)} is on-policy only when the distribution that is sampled is the one "
            f"that the loss scores; expected rl.temperature={rl.temperature}; got {sampling}; make them equal"
        )
    policy_spec(rl, config.rollout.max_tokens)  # refuses and warns like the builder, before any placement
    _warn_of_inert(rl)


def _warn_of_inert(rl: PolicyGradientConfig) -> None:
    changed = [key for key in _RATIO_KNOBS if key in rl.non_default()]
    if rl.on_policy and changed:
        warnings.warn(
            f"rl.{changed[0]}: {getattr(rl, changed[0])!r} is inert because each collected batch serves one update "
            "(n_mini == 1), so every ratio is exactly 1; set mini_batch_per_replica below the batch, or epochs above 1",
            UserWarning,
            stacklevel=3,
        )


def check_dpo(rl: DPOConfig) -> None:
    """Refuse what the selected preference loss never reads."""
    if rl.loss == "ipo" and "label_smoothing" in rl.non_default():
        raise ValueError(f"rl.label_smoothing: loss='ipo' never reads it; got {rl.label_smoothing}; leave it at 0")
