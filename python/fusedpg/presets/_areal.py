"""AReaL 1.0.4's actor losses under the names of `PPOActorConfig` and `RejectionSamplingConfig`.

Source: `areal.utils.functional.functional` (`ppo_actor_loss_fn`, `apply_rejection_sampling`, `sapo_loss_fn`),
`areal.trainer.ppo.actor.grpo_loss_fn`, `areal.api.cli_args`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..spec import Level
from .base import Options, TrainerSpec, known_loss, trainer_spec

TRAINER, VERSION = "areal", "1.0.4"

#: `ppo`, or `sapo` for use_sapo_loss -> catalogue entry
ENTRY_OF = {"ppo": "ppo_clip", "sapo": "sapo"}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "ppo": {
        "eps_clip": 0.2,
        "eps_clip_higher": None,
        "c_clip": None,
        "use_decoupled_loss": False,
        "rejection_sampling": None,
        "importance_sampling_level": "token",
    },
    "sapo": {"sapo_tau_pos": 1.0, "sapo_tau_neg": 1.05, "importance_sampling_level": "token"},
}
_REJECTION = {"level": "token", "action": "mask", "metric": "ratio", "agg": "mean", "upper": 5.0, "lower": None}
_WEIGHTS = "form the weights yourself and pass is_weights (0 drops a token)"
_REFUSED = {
    "m2_threshold": "M2PO chooses tokens over the whole batch; put its choice into `mask`",
    "behave_imp_weight_cap": "AReaL 1.0 has removed it; pass use_decoupled_loss=True and "
    "rejection_sampling={'upper': cap}, which drops the tokens above the cap",
    "behave_imp_weight_mode": "AReaL 1.0 has removed it; pass rejection_sampling with level, action and upper",
    "prox_logp_method": "the caller gives the proximal log-probs: pass them as logp_old",
    "kl_ctl": "it is a part of the rewards; no loss changes",
    "use_sapo_loss": "pass the loss 'sapo'",
}


def areal(loss: str = "ppo", **options: Any) -> TrainerSpec:
    """`ppo` (the decoupled loss with `use_decoupled_loss=True`) or `sapo`. No log-ratio is clamped.

    The anchor is the proximal policy: pass it as logp_old, the sampler's as logp_rollout. `rejection_sampling`, of the
    decoupled loss only, is a mapping of RejectionSamplingConfig: level, action, metric, agg, upper, lower. With
    `importance_sampling_level="sequence"` pass `sequence_advantages`, the means of the tokens' advantages.

    `spec.normalizer(tokens=...)` counts the tokens before the rejection, at least 1.

    Raises:
        ValueError: a loss that the trainer does not have, an option that the loss never reads or cannot express.
    """
    known_loss(TRAINER, loss, tuple(ENTRY_OF))
    where = f"presets.areal({loss!r})"
    read = Options(where, options, _DEFAULTS[loss], _REFUSED)
    by_sequence = read.choice("importance_sampling_level", ("token", "sequence")) == "sequence"
    knobs: dict[str, Any] = {"log_ratio_clamp": None, "reduction": "token-mean"}
    corrects: dict[str, Any] = {}
    if loss == "sapo":
        knobs |= {"tau_pos": read["sapo_tau_pos"], "tau_neg": read["sapo_tau_neg"]}
    else:
        higher = read["eps_clip_higher"]
        knobs |= {"epsilon_low": read["eps_clip"], "epsilon_high": read["eps_clip"] if higher is None else higher}
        corrects = _rejection(read, by_sequence)
    spec = trainer_spec(
        "gspo" if by_sequence and loss == "ppo" else ENTRY_OF[loss],
        knobs | corrects,
        trainer=TRAINER,
        version=VERSION,
        trainer_loss=loss,
        metric_names=_metrics(loss, corrects),
        rule=denominator,
    )
    changes: dict[str, Any] = {"level": Level.SEQUENCE} if by_sequence else {}
    if loss == "ppo" and read["c_clip"] is not None:
        changes["dual_clip"] = float(read["c_clip"])
    return replace(spec, **changes)


def options_of(loss: str) -> dict[str, Any]:
    """The options that a loss reads, with AReaL's defaults."""
    return dict(_DEFAULTS[loss])


def denominator(spec: TrainerSpec, *, tokens: float | None = None) -> float | None:
    """Selected tokens of all micro-batches, at least 1."""
    return None if tokens is None else max(float(tokens), 1.0)


def _metrics(loss: str, corrects: Mapping[str, Any]) -> dict[str, str]:
    """Means over the selected tokens; where a rejection takes tokens away first, they are other numbers."""
    names = {"n_valid_tokens": "tokens"}
    drops = corrects.get("is_correction") == "mask" or "is_reject" in corrects
    if not drops:
        names["importance_weight"] = "ratio_mean"
        if loss == "ppo":
            names |= {"clip_ratio": "clip_frac", "dual_clip_ratio": "dual_clip_frac"}
    return names


def _rejection(read: Options, by_sequence: bool) -> dict[str, Any]:
    """The behaviour weight exp(logp_old - logp_rollout) and what becomes of it outside the bounds."""
    given = read["rejection_sampling"]
    if given is None:
        return {}
    if not read["use_decoupled_loss"]:
        raise ValueError(
            f"rejection_sampling: AReaL ignores it without use_decoupled_loss=True; got {given!r}; pass both or neither"
        )
    rs = Options(f"{read.where} in rejection_sampling", given, _REJECTION)
    level = rs.choice("level", ("token", "sequence"))
    action = rs.choice("action", ("mask", "clamp"))
    metric = rs.choice("metric", ("ratio", "kl_k1", "kl_k2", "kl_k3"))
    agg = rs.choice("agg", ("sum", "mean", "max"))
    if level == "token" and action == "mask" and by_sequence:
        raise ValueError(
            "rejection_sampling: AReaL takes the sequence's mean ratio over the tokens that its mask leaves; "
            f"{rs.where} takes it over all; put the choice into `mask` and pass normalizer="
        )
    if metric in ("kl_k2", "kl_k3") and not (action == "clamp" and level == "token"):
        raise ValueError(f"metric: {rs.where} knows ratio and kl_k1; got {metric!r}; {_WEIGHTS}")
    if level == "sequence" and (agg == "max" or (action == "clamp" and (agg, metric) != ("mean", "ratio"))):
        raise ValueError(f"agg: {rs.where} does not support {agg!r} with action {action!r} and {metric!r}; {_WEIGHTS}")
    return _token(rs, metric) if level == "token" else _sequence(rs, metric)


def _bounds(rs: Options, metric: str) -> tuple[float | None, float]:
    """The bounds of a ratio; those of k1 are bounds of its logarithm."""
    low, high = rs["lower"], rs["upper"]
    if metric == "kl_k1":
        return None if low is None else math.exp(low), math.exp(high)
    return low, high


def _token(rs: Options, metric: str) -> dict[str, Any]:
    if rs["action"] == "clamp":  # it clamps the weight itself, whatever the metric is
        low = 0.0 if rs["lower"] is None else rs["lower"]
        return {"is_correction": "truncate", "is_low": low, "is_high": rs["upper"]}
    low, high = _bounds(rs, metric)
    return {"is_correction": "mask", "is_low": low, "is_high": high}


def _sequence(rs: Options, metric: str) -> dict[str, Any]:
    """Whole sequences; the weight is their geometric mean under the ratio, a token's own under k1."""
    weight_level = "geometric" if metric == "ratio" else "token"
    if rs["action"] == "clamp":
        low = 0.0 if rs["lower"] is None else rs["lower"]
        return {"is_correction": "truncate", "is_level": weight_level, "is_low": low, "is_high": rs["upper"]}
    low, high = _bounds(rs, metric)
    return {
        "is_correction": "truncate",
        "is_level": weight_level,
        "is_low": None,
        "is_high": None,
        "is_reject": "geometric" if rs["agg"] == "mean" else "sequence",
        "is_reject_low": low,
        "is_reject_high": high,
    }
