"""NeMo-RL's ClippedPGLossFn under the names of its `loss_fn` config.

Source: `nemo_rl/algorithms/loss/loss_functions.py` and `calculate_kl` of the repository's main branch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .base import Options, TrainerSpec, known_loss, trainer_spec

TRAINER, VERSION = "nemo_rl", "main"

#: the flag that selects the surrogate -> catalogue entry; `clipped_pg` is none of them
ENTRY_OF = {
    "clipped_pg": "ppo_clip",
    "sequence_level_importance_ratios": "gspo",
    "disable_ppo_ratio": "reinforce",
    "force_on_policy_ratio": "importance_sampling",
    "use_cispo": "cispo",
}
_FLAGS = tuple(ENTRY_OF)[1:]
TIS_TYPES = (None, "tis", "icepop", "seq-mask-tis")
_TIS = "truncated_importance_sampling"
_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(_FLAGS, False),
    "token_level_loss": True,
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.2,
    "ratio_clip_c": None,
    "reference_policy_kl_penalty": 0.01,
    "reference_policy_kl_type": "k3",
    "kl_input_clamp_value": 20.0,
    "kl_output_clamp_value": 10.0,
    "use_kl_in_reward": False,
    "use_importance_sampling_correction": False,
    f"{_TIS}_type": None,
    f"{_TIS}_ratio": None,
    f"{_TIS}_ratio_min": None,
    "use_on_policy_kl_approximation": False,
    "positive_example_nll_weight": 0.0,
}
_METRICS = {"probs_ratio_min": "ratio_min", "probs_ratio_max": "ratio_max"}
_WEIGHT_NOTE = "a weight that is NaN or inf stays visible; NeMo-RL sets it to 0"


def nemo_rl(loss: str = "clipped_pg", **options: Any) -> TrainerSpec:
    """The clipped policy-gradient loss; `loss` is `clipped_pg` or the flag that selects another surrogate.

    `nemo_rl("use_cispo")` is `nemo_rl(use_cispo=True)`. Options are those of ClippedPGLossConfig: `token_level_loss`,
    `ratio_clip_min`, `ratio_clip_max`, `ratio_clip_c`, `reference_policy_kl_penalty` (default 0.01: pass logp_ref),
    `reference_policy_kl_type`, `kl_input_clamp_value`, `kl_output_clamp_value`, `use_kl_in_reward`,
    `use_importance_sampling_correction` (pass logp_rollout) with `truncated_importance_sampling_type`, `..._ratio`,
    `..._ratio_min`.

    `spec.normalizer(global_valid_toks=..., global_valid_seqs=...)` is the denominator of all ranks and micro-batches.

    Raises:
        ValueError: a loss that the trainer does not have, an option that the loss never reads or cannot express.
    """
    known_loss(TRAINER, loss, tuple(ENTRY_OF))
    where = f"presets.nemo_rl({loss!r})"
    if loss != "clipped_pg":
        options = {**options, loss: True}
    read = Options(where, options, _DEFAULTS)
    on = [flag for flag in _FLAGS if read[flag]]
    _refuse(read, options, on, where)
    name = _selected(on)
    by_sequence = read["sequence_level_importance_ratios"]
    token_level = read["token_level_loss"] and not (by_sequence and "token_level_loss" not in options)
    knobs = _surrogate(read, name) | _kl(read) | _correction(read, by_sequence, where)
    knobs["reduction"] = "token-mean" if token_level else "seq-mean-token-mean"
    notes = [_WEIGHT_NOTE] * read["use_importance_sampling_correction"]
    spec = trainer_spec(
        ENTRY_OF[name],
        knobs,
        trainer=TRAINER,
        version=VERSION,
        trainer_loss=name,
        metric_names=None if name == "disable_ppo_ratio" else _METRICS,
        rule=denominator,
        note="; ".join(notes),
    )
    bound = read["ratio_clip_c"]
    return spec if bound is None else replace(spec, dual_clip=float(bound))


def options_of(loss: str = "clipped_pg") -> dict[str, Any]:
    """The options that the loss reads, with NeMo-RL's defaults."""
    return dict(_DEFAULTS)


def denominator(
    spec: TrainerSpec, *, global_valid_toks: float | None = None, global_valid_seqs: float | None = None
) -> float | None:
    """The global count that the loss's level divides by; None (the call's own weight) when it is not given."""
    count = global_valid_toks if spec.reduction == "token-mean" else global_valid_seqs
    return None if count is None else float(count) + 1e-8


def _selected(on: list[str]) -> str:
    """The flag that wins, in NeMo-RL's order."""
    for flag in ("force_on_policy_ratio", "use_cispo", "disable_ppo_ratio", "sequence_level_importance_ratios"):
        if flag in on:
            return flag
    return "clipped_pg"


def _refuse(read: Options, given: dict[str, Any], on: list[str], where: str) -> None:
    """What NeMo-RL asserts, what it never reads, and what no LossSpec has."""
    if read["use_cispo"] and len(on) > 1:
        raise ValueError(f"use_cispo: NeMo-RL refuses it together with {', '.join(f for f in on if f != 'use_cispo')}")
    if read["sequence_level_importance_ratios"] and given.get("token_level_loss"):
        raise ValueError("token_level_loss: NeMo-RL refuses True with sequence_level_importance_ratios; pass False")
    if read["use_cispo"] and not read["token_level_loss"]:
        raise ValueError("token_level_loss: NeMo-RL's use_cispo requires True; got False")
    bound = read["ratio_clip_c"]
    if bound is not None:
        if not bound > 1:
            raise ValueError(f"ratio_clip_c: {where} expects a number > 1, or None (off); got {bound!r}")
        if on and on != ["sequence_level_importance_ratios"]:
            raise ValueError(f"ratio_clip_c: it has no effect (or is refused) with {on[0]}; got {bound!r}; drop it")
    if read["use_on_policy_kl_approximation"]:
        raise ValueError(
            f"use_on_policy_kl_approximation: {where} does not support it; it weighs the KL term by exp(logp - "
            "logp_rollout) while the policy term has logp_old's ratio: add that KL term to the loss yourself"
        )
    if read["positive_example_nll_weight"]:
        raise ValueError(
            f"positive_example_nll_weight: {where} does not support it; got {read['positive_example_nll_weight']!r}; "
            "it is a mean over the tokens of correct samples alone: add weight * -logp[correct].mean() to the loss"
        )
    for key in ("ratio_clip_min", "ratio_clip_max"):
        if key in given and (read["disable_ppo_ratio"] or read["force_on_policy_ratio"]):
            raise ValueError(f"{key}: {on[0]} leaves no ratio to clip; got {given[key]!r}; drop it")


def _surrogate(read: Options, name: str) -> dict[str, Any]:
    if name == "disable_ppo_ratio":
        return {}
    if name == "force_on_policy_ratio":
        return {"anchor": "self", "log_ratio_clamp": None}
    return {
        "epsilon_low": read["ratio_clip_min"],
        "epsilon_high": read["ratio_clip_max"],
        "log_ratio_clamp": None,
    }


def _kl(read: Options) -> dict[str, Any]:
    """The reference KL with the score term: its samples come from the policy that is optimised."""
    kind = read.choice("reference_policy_kl_type", ("k1", "k2", "k3"))
    coef = 0.0 if read["use_kl_in_reward"] else read["reference_policy_kl_penalty"]
    if not coef:
        return {}
    return {
        "kl": kind,
        "kl_coef": coef,
        "kl_gradient": "score",
        "kl_log_ratio_clamp": read["kl_input_clamp_value"],
        "kl_clamp": read["kl_output_clamp_value"],
    }


def _correction(read: Options, by_sequence: bool, where: str) -> dict[str, Any]:
    """Weights exp(logp_old - logp_rollout), a token's or the product over a sequence."""
    kind = read.choice(f"{_TIS}_type", TIS_TYPES)
    high, low = read[f"{_TIS}_ratio"], read[f"{_TIS}_ratio_min"]
    if not read["use_importance_sampling_correction"]:
        if kind is not None:
            raise ValueError(
                f"{_TIS}_type: NeMo-RL refuses it without use_importance_sampling_correction; got {kind!r}"
            )
        return {}
    level = {"is_level": "sequence" if by_sequence else "token"}
    if kind is None:
        return {"is_correction": "mask", **level}
    if high is None or not high > 0:
        raise ValueError(f"{_TIS}_ratio: {where} expects a number > 0 for {kind!r}; got {high!r}")
    if kind == "tis":
        return {"is_correction": "truncate", "is_low": 0.0 if low is None else low, "is_high": high, **level}
    if low is None:
        raise ValueError(f"{_TIS}_ratio_min: {where} expects a number for {kind!r}; got None")
    if kind == "icepop":
        return {"is_correction": "mask", "is_low": low, "is_high": high, **level}
    if by_sequence:
        raise ValueError(f"{_TIS}_type: NeMo-RL refuses 'seq-mask-tis' with sequence_level_importance_ratios")
    reject = {"is_reject": "geometric", "is_reject_low": low, "is_reject_high": high}
    return {"is_correction": "mask", **level, **reject}
