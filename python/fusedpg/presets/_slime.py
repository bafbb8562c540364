"""slime's policy loss under the names of its command line.

Source: `policy_loss_function` in `slime/backends/megatron_utils/loss.py`, `slime/utils/ppo_utils.py` and
`slime/utils/arguments.py` of the repository's main branch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .base import Options, TrainerSpec, known_loss, trainer_spec

TRAINER, VERSION = "slime", "main"

#: the objective (pg_loss_type, or advantage_estimator gspo and cispo) -> catalogue entry
ENTRY_OF = {"ppo": "ppo_clip", "gspo": "gspo", "cispo": "cispo", "reinforce": "reinforce"}
_CLIP = {"eps_clip": 0.2, "eps_clip_high": None}
_SHARED: dict[str, Any] = {
    "calculate_per_token_loss": False,
    "use_tis": False,
    "tis_clip": 2.0,
    "tis_clip_low": 0.0,
    "custom_tis_function_path": None,
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "kl_loss_type": "k1",
    "use_unbiased_kl": False,
    "use_rollout_logprobs": False,
    "entropy_coef": 0.0,
}
_OWN: dict[str, dict[str, Any]] = {
    "ppo": {**_CLIP, "eps_clip_c": None},
    "gspo": {**_CLIP, "eps_clip_c": None},
    "cispo": dict(_CLIP),
    "reinforce": {},
}
_REFUSED = {
    "use_opsm": "it drops the sequences with a negative advantage that have drifted: pass is_weights=0 there and 1 "
    "elsewhere (times the weight of use_tis, which then stays off)",
    "opsm_delta": "it belongs to use_opsm: pass is_weights=0 where that drops a sequence",
    "use_score_centering": "its correction sums over the vocabulary's head; no LossSpec has it",
    "use_opd": "it changes the advantages alone: pass those",
    "custom_loss_function_path": "it replaces the loss altogether",
    "custom_pg_loss_reducer_function_path": "pass the mask and the normalizer that it amounts to",
}
_ICEPOP, _VANILLA = "icepop_function", "vanilla_tis_function"


def slime(loss: str = "ppo", **options: Any) -> TrainerSpec:
    """slime's policy loss by its objective: `ppo` (dual clip with `eps_clip_c`), `gspo`, `cispo` or `reinforce`.

    No log-ratio is clamped. `use_tis=True` (pass logp_rollout) clips exp(logp_old - logp_rollout) to
    [`tis_clip_low`, `tis_clip`]; with `custom_tis_function_path` ending in `icepop_function` it is 0 outside.
    `kl_loss_type` k1, k2, k3 or low_var_kl (k3 clamped to +-10), times the live ratio with `use_unbiased_kl`.
    `use_rollout_logprobs` anchors the ratio on logp_rollout. One sample a rollout is assumed: slime divides samples
    that share a rollout by the tokens of all of them.

    `spec.normalizer(global_batch_size=...)`, or `num_tokens=` with `calculate_per_token_loss`, is the denominator.

    Raises:
        ValueError: a loss that the trainer does not have, an option that the loss never reads or cannot express.
    """
    known_loss(TRAINER, loss, tuple(ENTRY_OF))
    where = f"presets.slime({loss!r})"
    read = Options(where, options, {**_SHARED, **_OWN[loss]}, _REFUSED)
    per_token = read["calculate_per_token_loss"]
    knobs: dict[str, Any] = {"reduction": "token-mean" if per_token else "seq-mean-token-mean"}
    knobs |= _surrogate(read, loss) | _correction(read, loss) | _kl(read, loss)
    if read["entropy_coef"] != 0.0:
        knobs["entropy_coef"] = read["entropy_coef"]
    spec = trainer_spec(
        ENTRY_OF[loss],
        knobs,
        trainer=TRAINER,
        version=VERSION,
        trainer_loss=loss,
        metric_names=_metrics(read, loss) if per_token else None,
        rule=denominator,
    )
    bound = read["eps_clip_c"] if "eps_clip_c" in _OWN[loss] else None
    return spec if bound is None else replace(spec, dual_clip=float(bound))


def options_of(loss: str) -> dict[str, Any]:
    """The options that a loss reads, with slime's defaults."""
    return {**_SHARED, **_OWN[loss]}


def denominator(
    spec: TrainerSpec, *, global_batch_size: float | None = None, num_tokens: float | None = None
) -> float | None:
    """Samples of the step, those without a token too; or its tokens."""
    count = num_tokens if spec.reduction == "token-mean" else global_batch_size
    return None if count is None else float(count)


def _metrics(read: Options, loss: str) -> dict[str, str]:
    """Means over tokens; a mean of samples' means is another number."""
    if loss == "reinforce":
        return {}
    clipped = "out_of_band_frac" if loss == "cispo" else "clip_frac"
    names = {"pg_clipfrac": clipped, "ppo_kl": "approx_kl"}
    if read["use_tis"]:
        names["ois"] = "ratio_mean"
    if read["use_kl_loss"] and not read["use_unbiased_kl"]:
        names["kl_loss"] = "kl"
    return names


def _surrogate(read: Options, loss: str) -> dict[str, Any]:
    from_rollout = read["use_rollout_logprobs"]
    if loss == "reinforce":
        return {"anchor": "self"} if read["use_tis"] else {}
    high = read["eps_clip"] if read["eps_clip_high"] is None else read["eps_clip_high"]
    return {
        "epsilon_low": read["eps_clip"],
        "epsilon_high": high,
        "log_ratio_clamp": None,
        "anchor": "rollout" if from_rollout else "old",
    }


def _correction(read: Options, loss: str) -> dict[str, Any]:
    """exp(logp_old - logp_rollout), for reinforce exp(logp - logp_rollout), clipped or 0 outside the bounds."""
    path = read["custom_tis_function_path"]
    name = _VANILLA if path is None else str(path).rpartition(".")[2]
    if name not in (_VANILLA, _ICEPOP):
        raise ValueError(
            f"custom_tis_function_path: {read.where} knows {_VANILLA} and {_ICEPOP}; got {path!r}; form the weights "
            "yourself and pass is_weights"
        )
    if not read["use_tis"]:
        return {}
    if read["use_rollout_logprobs"] and loss != "reinforce":
        raise ValueError(
            "use_tis: with use_rollout_logprobs the ratio is already anchored on logp_rollout; got both; form the "
            "weights yourself and pass is_weights"
        )
    return {
        "is_correction": "mask" if name == _ICEPOP else "truncate",
        "is_low": read["tis_clip_low"],
        "is_high": read["tis_clip"],
    }


def _kl(read: Options, loss: str) -> dict[str, Any]:
    kind = read.choice("kl_loss_type", ("k1", "k2", "k3", "low_var_kl"))
    if not read["use_kl_loss"] or read["kl_loss_coef"] == 0.0:
        return {}
    knobs: dict[str, Any] = {
        "kl": "k3" if kind == "low_var_kl" else kind,
        "kl_coef": read["kl_loss_coef"],
        # beyond +-20 the estimate lies outside +-10 anyway
        "kl_log_ratio_clamp": 20.0 if kind == "low_var_kl" else None,
        "kl_clamp": 10.0 if kind == "low_var_kl" else None,
    }
    if not read["use_unbiased_kl"]:
        return knobs
    if kind == "low_var_kl":
        raise ValueError(
            f"use_unbiased_kl: slime clamps low_var_kl after the ratio has multiplied it, {read.where} before; pass "
            "kl_loss_type='k3', which neither clamps"
        )
    if loss in ("gspo", "reinforce"):
        raise ValueError(
            f"use_unbiased_kl: it weighs the KL by a token's exp(logp - logp_old), which {read.where} does not form; "
            "add the KL as a second loss: loss_spec('importance_sampling', kl=..., kl_ratio='live') with advantages=0.0"
        )
    return {**knobs, "kl_ratio": "live"}
