"""verl's options of each loss as knobs of its catalogue entry, and verl's rollout correction."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

from ..knobs import number
from .base import Options

#: verl bounds the log-ratios of rollout correction and of the k3 estimator by this
SAFETY = 20.0
BAND = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2}

Knobs = dict[str, Any]


# ------------------------------------------------------------------ the losses


def _epsilons(options: Options) -> tuple[float, float]:
    """(clip_ratio_low, clip_ratio_high); clip_ratio stands in for None."""
    shared = number("clip_ratio", options["clip_ratio"])
    given = [options[key] for key in ("clip_ratio_low", "clip_ratio_high")]
    if shared != BAND["clip_ratio"] and None not in given:
        warnings.warn(
            f"clip_ratio: {shared} is inert because verl reads it only for a clip_ratio_low or clip_ratio_high of None "
            "(their default is 0.2); pass these",
            UserWarning,
            stacklevel=5,
        )
    low, high = (shared if value is None else number("clip_ratio_low, clip_ratio_high", value) for value in given)
    return low, high


def _band(options: Options) -> Knobs:
    low, high = _epsilons(options)
    return {"epsilon_low": low, "epsilon_high": high}


def _vanilla(options: Options) -> Knobs:
    return {**_band(options), "dual_clip": number("clip_ratio_c", options["clip_ratio_c"])}


def _dppo(options: Options) -> Knobs:
    low, high = _epsilons(options)
    return {"keep_low": -low, "keep_high": high, "clip_high": number("clip_ratio_c", options["clip_ratio_c"])}


def _sapo(options: Options) -> Knobs:
    return {key: options[key] for key in ("tau_pos", "tau_neg")}


def _gpg(options: Options) -> Knobs:
    return {}


#: what verl's functions take for None
_COV_NONE = {"clip_cov_ratio": 2e-4, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0, "kl_cov_ratio": 2e-4, "ppo_kl_coef": 1.0}


def _cov(options: Options, *keys: str) -> Knobs:
    values = {key: _COV_NONE[key] if options[key] is None else options[key] for key in keys}
    return {"log_ratio_clamp": None, **values}


def _clip_cov(options: Options) -> Knobs:
    return {**_band(options), **_cov(options, "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")}


def _kl_cov(options: Options) -> Knobs:
    return _cov(options, "kl_cov_ratio", "ppo_kl_coef")


def _geo_mean(options: Options) -> Knobs:
    options.choice("correct", (False, True))
    if options["rollout_is"] is not None:
        raise ValueError(
            "rollout_is: verl multiplies 'geo_mean' by the geometric mean of a sequence's weights; got "
            f"{options['rollout_is']!r}; pass that mean at each of its tokens as is_weights="
        )
    return _band(options)


def _dro(options: Options) -> Knobs:
    beta = options["dro_beta"]
    if beta is None or number("dro_beta", beta) <= 0:
        raise ValueError(f"dro_beta: {options.where} expects a number > 0; got {beta!r}; verl has no default for it")
    return {"beta": beta}


def _bypass(options: Options) -> Knobs:
    if options["loss_type"] == "reinforce":
        return rollout_weights(options)
    if options["rollout_is"] is not None:
        raise ValueError(
            f"rollout_is: {options.where} with loss_type='ppo_clip' forms these weights for metrics alone; got "
            f"{options['rollout_is']!r}; pass None, or loss_type='reinforce'"
        )
    return _vanilla(options)


def _weighted(make: Callable[[Options], Knobs]) -> Callable[[Options], Knobs]:
    """With the rollout weights of verl's decoupled mode."""
    return lambda options: {**make(options), **rollout_weights(options)}


KNOBS: dict[str, Callable[[Options], Knobs]] = {
    "vanilla": _weighted(_vanilla),
    "dppo_tv": _weighted(_dppo),
    "dppo_kl": _weighted(_dppo),
    "gspo": _weighted(_band),
    "sapo": _weighted(_sapo),
    "gpg": _weighted(_gpg),
    "clip_cov": _weighted(_clip_cov),
    "kl_cov": _weighted(_kl_cov),
    "geo_mean": _geo_mean,
    "dro": _weighted(_dro),
    "cispo": _weighted(_band),
    "bypass_mode": _bypass,
}


# ------------------------------------------------------------------ rollout correction


def rollout_weights(options: Options) -> Knobs:
    """verl's truncated weights, or with a "lower_upper" threshold its weights that are 0 outside that band."""
    if options["rollout_is_batch_normalize"] is not False:
        raise ValueError(
            f"rollout_is_batch_normalize: {options.where} forms a weight from its own sequence, not from the batch's "
            f"mean; got {options['rollout_is_batch_normalize']!r}; pass verl's weights as is_weights="
        )
    level = options.choice("rollout_is", (None, "token", "sequence"))
    if level is None:
        return {}
    low, high = _bounds("rollout_is_threshold", options["rollout_is_threshold"])
    if low is None:
        return {"is_correction": "truncate", "is_level": level, "is_low": math.exp(-SAFETY), "is_high": high}
    return {"is_correction": "mask", "is_level": level, "is_low": low, "is_high": high}


def _bounds(key: str, threshold: Any) -> tuple[float | None, float]:
    """(lower or None, upper) of verl's 2.0, "2.0" or "0.5_5.0", inside exp(-20) and exp(20)."""
    parts = threshold.split("_") if isinstance(threshold, str) else [threshold]
    try:
        values = [number(key, float(part) if isinstance(part, str) else part) for part in parts]
    except ValueError:
        values = []
    limit = math.exp(SAFETY)
    inside = all(1 / limit < value < limit for value in values)
    if len(values) not in (1, 2) or not inside or values != sorted(values):
        raise ValueError(
            f"{key}: expected an upper bound, or 'lower_upper', between exp(-20) and exp(20) where verl bounds the "
            f"ratio; got {threshold!r}"
        )
    return (None if len(values) == 1 else values[0]), values[-1]


#: verl's rejection modes of -log r -> ours of the ratio r
_LEVELS = {"token_k1": "token", "token_k2": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}


def rejection(options: Options, reduction: str) -> Knobs:
    """verl's rejection of tokens or sequences by their rollout ratio, where a `LossSpec` has a counterpart."""
    mode, threshold = options["rollout_rs"], options["rollout_rs_threshold"]
    if mode is None:
        if threshold is not None:
            raise ValueError(f"rollout_rs_threshold: it is read with rollout_rs; got {threshold!r}; pass rollout_rs")
        return {}
    if mode not in _LEVELS:
        raise ValueError(
            f"rollout_rs: {options.where} has a counterpart of {', '.join(_LEVELS)}; got {mode!r}; reject before the "
            "loss and pass the mask that is left as mask="
        )
    level = _LEVELS[mode]
    if level == "token" and reduction == "seq-mean-token-mean":
        raise ValueError(
            f"rollout_rs: {mode!r} shortens a sequence and so changes the weight of its other tokens under "
            f"{reduction!r}; reject before the loss and pass the mask that is left, or use another loss_agg_mode"
        )
    if threshold is None:
        raise ValueError(f"rollout_rs_threshold: rollout_rs={mode!r} has no default for it; got None; pass it")
    if mode == "token_k2":
        return {"is_reject": level, **_k2_band(threshold)}
    low, high = _bounds("rollout_rs_threshold", threshold)
    # verl's bounds hold for the inverse ratio; a single number bounds it by its own inverse from below
    return {"is_reject": level, "is_reject_low": 1 / high, "is_reject_high": high if low is None else 1 / low}


def _k2_band(threshold: Any) -> Knobs:
    """log(r)^2/2 <= threshold as bounds of r."""
    try:
        text = str(threshold)
        limit = 0.0 if "_" in text else number("rollout_rs_threshold", float(text))
    except ValueError:
        limit = 0.0
    if not 0 < limit < SAFETY**2 / 2:
        raise ValueError(
            f"rollout_rs_threshold: 'token_k2' expects a number between 0 and {SAFETY**2 / 2:g}, where verl bounds it; "
            f"got {threshold!r}"
        )
    edge = math.exp(math.sqrt(2 * limit))
    return {"is_reject_low": 1 / edge, "is_reject_high": edge}


def bypass_metrics(options: Options) -> dict[str, str]:
    """verl's metrics of bypass_mode that are ours; with a rejection verl's are of the tokens that are left."""
    if options["rollout_rs"] is not None:
        return {}
    names = {"actor/ppo_kl": "approx_kl"}
    if options["loss_type"] == "ppo_clip":
        return {"actor/pg_clipfrac": "clip_frac", "actor/pg_clipfrac_lower": "dual_clip_frac", **names}
    if options["rollout_is"] is not None:
        names["rollout_corr/rollout_is_mean"] = "is_weight_mean"
    if options["rollout_is"] == "token":
        names["rollout_corr/rollout_is_max"] = "is_weight_max"
    return names
