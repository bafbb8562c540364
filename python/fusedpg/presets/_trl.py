"""TRL 1.16.0: the losses of `GRPOTrainer._compute_loss` under `GRPOConfig`'s own option names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..spec import Level
from .base import Options, TrainerSpec, known_loss, trainer_spec

VERSION = "1.16.0"

#: TRL's loss_type -> catalogue entry
ENTRY_OF: dict[str, str] = {
    "dapo": "dapo",
    "grpo": "grpo",
    "bnpo": "bnpo",
    "dr_grpo": "dr_grpo",
    "luspo": "luspo",
    "cispo": "cispo",
    "sapo": "sapo",
    "vespo": "vespo",
}

_CLIPPED = ("dapo", "grpo", "bnpo", "dr_grpo", "luspo")
_REDUCTION = {
    "dapo": "token-mean",
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "luspo": "seq-mean-token-sum",
    "cispo": "token-mean",
    "sapo": "seq-mean-token-mean",
    "vespo": "token-mean",
}
#: losses divided by the token count of the generation batch, and by the rows of the micro-batch
_BY_ITEMS = ("dapo", "cispo", "vespo")
_BY_ROWS = ("grpo", "sapo", "dr_grpo", "luspo")

_EVERY: dict[str, Any] = {
    "beta": 0.0,
    "use_bias_correction_kl": True,
    "importance_sampling_level": "token",
    "use_vllm": False,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
}
_BAND: dict[str, Any] = {"epsilon": 0.2, "epsilon_high": None}
_OWN: dict[str, dict[str, Any]] = {
    **{loss: {**_BAND, "delta": None} for loss in _CLIPPED},
    "cispo": _BAND,
    "sapo": {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
    "vespo": {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0},
}
_OWN["dr_grpo"]["max_completion_length"] = 512
_OWN["bnpo"]["entropy_coef"] = 0.0

_TO_NORMALIZER = "it is a count of the run: pass it to normalizer(...)"
#: option -> (the value with which TRL's loss ignores it, what to pass instead)
REFUSED: dict[str, tuple[Any, str]] = {
    "entropy_coef": (
        0.0,
        "TRL's bonus is a mean over the micro-batch's tokens whatever divides the policy loss, so its coefficient "
        "depends on the batch; pass the spec of each micro-batch from "
        "fusedpg.presets._trl.with_entropy(spec, coef, tokens=..., ...)",
    ),
    "use_adaptive_entropy": (
        False,
        "the coefficient changes every step; pass the current one to fusedpg.presets._trl.with_entropy",
    ),
    "off_policy_mask_threshold": (
        None,
        "it drops whole sequences from the policy term; pass advantages of 0 on them (the KL term and the denominator "
        "stay, as in TRL)",
    ),
    "top_entropy_quantile": (
        1.0,
        "it drops tokens from the policy term by their entropy; pass advantages of 0 on them, at the sequence level "
        "is_weights of 0 (the KL term and the denominator stay, as in TRL)",
    ),
    "mask_truncated_completions": (False, "it is part of the mask: clear the truncated completions in mask="),
    "temperature": (1.0, "it belongs to the log-probs: pass temperature= to the op"),
    "use_liger_kernel": (False, "it is another loss than _compute_loss; leave it off"),
    "router_aux_loss_coef": (None, "it is a loss of the model's router: add it to the result, divided as TRL does"),
    "vllm_importance_sampling_cap": (None, "it is deprecated; pass vllm_importance_sampling_clip_max"),
    "gradient_accumulation_steps": (1, _TO_NORMALIZER),
    "steps_per_generation": (None, _TO_NORMALIZER),
}
_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
#: TRL bounds VESPO's lambda away from 0
_LAMBDA_FLOOR = 1e-4


def options_of(loss_type: str) -> dict[str, Any]:
    """The options of `GRPOConfig` that a loss reads, with TRL's defaults."""
    known_loss("trl", loss_type, tuple(ENTRY_OF))
    return {**_EVERY, **_OWN[loss_type]}


def trl(loss_type: str = "dapo", **options: Any) -> TrainerSpec:
    """The loss of `GRPOConfig(loss_type=loss_type, **options)`.

    Options and defaults are `GRPOConfig`'s, as far as the loss reads them (`options_of`). One that TRL's loss has and a
    `LossSpec` cannot express is refused by name, unless its value switches it off.

    Raises:
        ValueError: an unknown loss, an option that it never reads or that is refused, a value out of range.
    """
    defaults = options_of(loss_type)
    refused = {key: why for key, (_, why) in REFUSED.items() if key not in defaults}
    given = {key: v for key, v in options.items() if key not in refused or v != REFUSED[key][0]}
    o = Options(f"presets.trl({loss_type!r})", given, defaults, refused)
    level = o.choice("importance_sampling_level", ("token", "sequence"))
    knobs = {**_own_knobs(loss_type, o), **_kl_knobs(o), **_correction_knobs(loss_type, o)}
    spec = trainer_spec(
        ENTRY_OF[loss_type],
        {**knobs, "reduction": _REDUCTION[loss_type], "log_ratio_clamp": None},
        trainer="trl",
        version=VERSION,
        trainer_loss=loss_type,
        metric_names=_metric_names(loss_type, o),
        rule=rule,
        note=_NOTES.get(loss_type, ""),
    )
    if loss_type == "vespo":
        if level == "sequence" and spec.has_kl and o["use_bias_correction_kl"]:
            raise ValueError(
                "importance_sampling_level: 'vespo' has a sequence's product of its own, and a KL term times the mean "
                "ratio has no place in its spec; got 'sequence'; use 'token', or use_bias_correction_kl=False"
            )
        return spec
    spec = replace(spec, level=Level.SEQUENCE if level == "sequence" else Level.TOKEN)
    if loss_type in _CLIPPED and o["delta"] is not None:
        return _with_delta(spec, o["delta"])
    return spec


_NOTES = {
    "cispo": "the ratio is clamped at epsilon_high itself, not at 1 + epsilon_high",
    "dapo": "the denominator is the generation batch's token count, scaled to one accumulation window",
    "vespo": "TRL adds masked tokens' clipped weights to the product where clip_min > 1 or clip_max < 1",
}


def _with_delta(spec: TrainerSpec, delta: float) -> TrainerSpec:
    """TRL's min(min(r, delta)*A, clip(r)*A): A > 0 meets the smaller of the two upper bounds first, A < 0 the larger.

    So a delta inside the clip band changes places with its upper bound; value and gradient stay TRL's.
    """
    if delta <= 1.0:
        raise ValueError(
            f"delta: expected a number > 1 (an upper clamp of the ratio); got {delta}; None switches it off"
        )
    return replace(spec, clip_high=min(spec.clip_high, delta), delta=max(spec.clip_high, delta))


def _own_knobs(loss_type: str, o: Options) -> dict[str, Any]:
    """Knobs of one loss alone."""
    if loss_type == "sapo":
        return {"tau_pos": o["sapo_temperature_pos"], "tau_neg": o["sapo_temperature_neg"]}
    if loss_type == "vespo":
        return {
            "k_pos": o["vespo_k_pos"],
            "k_neg": o["vespo_k_neg"],
            "lambda_pos": max(o["vespo_lambda_pos"], _LAMBDA_FLOOR),
            "lambda_neg": max(o["vespo_lambda_neg"], _LAMBDA_FLOOR),
        }
    low, high = _epsilons(o)
    if loss_type == "cispo":
        return {"clip_high": high}
    knobs: dict[str, Any] = {"epsilon_low": low, "epsilon_high": high}
    if loss_type == "dr_grpo":
        knobs["max_tokens"] = o["max_completion_length"]
    if loss_type == "bnpo":
        knobs["entropy_coef"] = o["entropy_coef"]
    return knobs


def _epsilons(o: Options) -> tuple[float, float]:
    return o["epsilon"], o["epsilon"] if o["epsilon_high"] is None else o["epsilon_high"]


def _kl_knobs(o: Options) -> dict[str, Any]:
    if o["beta"] == 0.0:
        return {"kl": None}
    ratio = "live" if o["use_bias_correction_kl"] else "none"
    return {"kl": "k3", "kl_coef": o["beta"], "kl_ratio": ratio, "kl_log_ratio_clamp": None}


def _correction_knobs(loss_type: str, o: Options) -> dict[str, Any]:
    if not (o["use_vllm"] and o["vllm_importance_sampling_correction"]):
        return {}
    mode = o.choice("vllm_importance_sampling_mode", _MODES)
    level, how = mode.split("_")
    if loss_type == "vespo" and level == "sequence":
        raise ValueError(
            f"vllm_importance_sampling_mode: 'vespo' multiplies the weights into its product and TRL expects a weight "
            f"a token; got {mode!r}; use 'token_truncate' or 'token_mask'"
        )
    low, high = o["vllm_importance_sampling_clip_min"], o["vllm_importance_sampling_clip_max"]
    if low is None and high is None and how == "truncate":
        raise ValueError(
            f"vllm_importance_sampling_clip_max: mode {mode!r} expects a bound; got None for clip_min and clip_max"
        )
    if low is not None and high is not None and low >= high:
        raise ValueError(
            f"vllm_importance_sampling_clip_min: expected less than vllm_importance_sampling_clip_max; got {low} and "
            f"{high}"
        )
    return {"is_correction": how, "is_level": level, "is_low": low, "is_high": high, "is_missing": "one"}


def _metric_names(loss_type: str, o: Options) -> Mapping[str, str]:
    """TRL's metrics that are the same number as one of ours.

    TRL's `kl` carries the bias correction, its clip ratios average over sequences at the sequence level, and a `delta`
    inside the clip band hides the upper side from them.
    """
    names = {"entropy": "entropy"}
    if o["beta"] != 0.0 and not o["use_bias_correction_kl"]:
        names["kl"] = "kl"
    if o["importance_sampling_level"] != "token":
        return names
    if loss_type == "cispo":
        names["cispo_clip_ratio"] = "clip_frac_high"
    if loss_type in _CLIPPED:
        names["clip_ratio/low_mean"] = "clip_frac_low"
        if o["delta"] is None or o["delta"] > 1.0 + _epsilons(o)[1]:
            names |= {"clip_ratio/high_mean": "clip_frac_high", "clip_ratio/region_mean": "clip_frac"}
    return names


def rule(
    spec: TrainerSpec,
    *,
    rows: int | None = None,
    tokens: float | None = None,
    num_items_in_batch: Any = None,
    num_processes: int = 1,
    gradient_accumulation_steps: int = 1,
    steps_per_generation: int | None = None,
    train: bool = True,
) -> float:
    """The denominator of TRL's loss.

    Args:
        spec: from `trl(...)`.
        rows: rows of the micro-batch, fully masked ones included (grpo, sapo, dr_grpo, luspo).
        tokens: sum of the micro-batch's mask (bnpo).
        num_items_in_batch: TRL's count of the generation batch's tokens over all processes (dapo, cispo, vespo).
        num_processes: `accelerator.num_processes`.
        gradient_accumulation_steps: the trainer's `current_gradient_accumulation_steps`.
        steps_per_generation: None is TRL's default, `gradient_accumulation_steps`.
        train: False in evaluation, which neither splits nor accumulates.
    """
    loss = spec.trainer_loss
    accumulated = gradient_accumulation_steps if train else 1
    if loss in _BY_ITEMS:
        count = max(float(_count(loss, "num_items_in_batch", num_items_in_batch)), 1.0) / num_processes
        if not train:
            return count
        return count * accumulated / (steps_per_generation or gradient_accumulation_steps)
    if loss in _BY_ROWS:
        return float(_count(loss, "rows", rows)) * accumulated
    return max(float(_count(loss, "tokens", tokens)), 1.0) * accumulated


def _count(loss: str, name: str, value: Any) -> Any:
    if value is None:
        raise ValueError(f"{name}: the denominator of TRL's {loss!r} is formed from it; got None; pass {name}=...")
    return value


def with_entropy(spec: TrainerSpec, coef: float, *, tokens: float, **counts: Any) -> TrainerSpec:
    """The spec of one micro-batch with TRL's entropy bonus, `-coef * (mean entropy of its tokens) / accumulation`.

    The bonus has its own denominator, so the coefficient inside the loss depends on the micro-batch: `tokens` is the
    sum of its mask, `counts` are those of `normalizer(...)`.
    """
    loss = spec.trainer_loss
    if _REDUCTION[loss] == "seq-mean-token-mean":
        raise ValueError(
            f"entropy_coef: TRL's bonus weighs all tokens alike, and {loss!r} weighs a token by its sequence's length; "
            "subtract coef * entropy mean / accumulation yourself, with the entropy of token_logprobs(..., "
            "return_entropy=True)"
        )
    accumulated = counts.get("gradient_accumulation_steps", 1) if counts.get("train", True) else 1
    share = rule(spec, tokens=tokens, **counts) / (max(float(tokens), 1.0) * accumulated)
    return replace(spec, entropy_coef=coef * share * (spec.max_tokens or 1))
