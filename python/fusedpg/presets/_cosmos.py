"""cosmos-framework's GRPO objective under the names of its `rl` config.

Source: its guide to customising an objective. Where the guide is silent (the token path's clamp, the KL estimator and
its clamps, the defaults of the clip knobs) this follows cosmos-rl, from which the surrogate descends.
"""

from __future__ import annotations

import warnings
from typing import Any

from .base import Options, TrainerSpec, known_loss, trainer_spec

TRAINER, VERSION = "cosmos", "contract"

#: rl.grpo_surrogate, and the two recipes that the guide selects by config -> catalogue entry
ENTRY_OF = {
    "clipped": "ppo_dual_clip",
    "legacy_pg": "reinforce",
    "gspo": "gspo_token",
    "dr_grpo": "dr_grpo",
}
#: rl.loss_type -> reduction
LOSS_TYPES = {
    "token-mean": "token-mean",
    "seq-mean-token-mean": "seq-mean-token-mean",
    "seq-mean-token-sum": "seq-mean-token-sum",
    "seq-mean-token-sum-fixed": "seq-mean-token-sum-norm",
}
_DEFAULTS: dict[str, Any] = {
    "importance_sampling_level": "token",
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "lower_bound_ratio": 3.0,
    "kl_beta": 0.0,
    "loss_type": "token-mean",
    "max_response_length": None,
}
#: what the guide's recipes set besides their name
RECIPES: dict[str, dict[str, Any]] = {
    "clipped": {},
    "gspo": {
        "importance_sampling_level": "sequence",
        "epsilon_low": 3e-4,
        "epsilon_high": 4e-4,
        "lower_bound_ratio": 0,
        "loss_type": "seq-mean-token-mean",
    },
    "dr_grpo": {"loss_type": "seq-mean-token-sum-fixed"},
}
_TEMPERATURE = "apply it where the log-probs are computed: token_logprobs(..., temperature=...)"
#: an epsilon of this size belongs to a token's ratio, not to a sequence's mean
TOKEN_SCALE = 0.02


def cosmos(loss: str = "clipped", **options: Any) -> TrainerSpec:
    """The GRPO objective: `clipped` or `legacy_pg`, or one of the recipes `gspo` and `dr_grpo` of `clipped`.

    Options of `clipped`: `importance_sampling_level` (token, sequence), `epsilon_low`, `epsilon_high`,
    `lower_bound_ratio` (the dual clip; 0 is off), `kl_beta`, `loss_type` and, for its seq-mean-token-sum-fixed,
    `max_response_length` (the guide's rollout.max_tokens).

    Pass `sequence_advantages`: the sequence level takes one advantage a response.
    `spec.normalizer(objective_weight_sum=...)` takes the sum of OBJECTIVE_WEIGHT_SUM over ranks and micro-batches.

    Raises:
        ValueError: a loss that the trainer does not have, an option that the loss never reads or cannot express.
    """
    known_loss(TRAINER, loss, tuple(ENTRY_OF))
    where = f"presets.cosmos({loss!r})"
    if loss == "legacy_pg":
        why = "legacy_pg is the plain policy gradient and never reads it; use 'clipped'"
        refused = {key: why for key in _DEFAULTS} | {"temperature": "legacy_pg requires rollout.temperature=1.0"}
        Options(where, options, {}, refused)
        note = "the guide does not say how legacy_pg reduces: token-mean here"
        return _spec(loss, "reinforce", {"reduction": "token-mean"}, note)
    read = Options(where, options, {**_DEFAULTS, **RECIPES[loss]}, {"temperature": _TEMPERATURE})
    level = read.choice("importance_sampling_level", ("token", "sequence"))
    knobs = {"epsilon_low": read["epsilon_low"], "epsilon_high": read["epsilon_high"]} | _reduction(read, where)
    if read["kl_beta"]:
        knobs |= {"kl": "k3", "kl_coef": read["kl_beta"], "kl_log_ratio_clamp": 20.0, "kl_clamp": 10.0}
    bound = _dual_clip(read, where)
    if level == "token":
        return _spec(loss, "dr_grpo" if loss == "dr_grpo" else "ppo_dual_clip", {**knobs, "dual_clip": bound})
    if bound is not None:
        raise ValueError(
            f"lower_bound_ratio: importance_sampling_level='sequence' never reads the dual clip; got {bound}; "
            "pass lower_bound_ratio=0"
        )
    if max(read["epsilon_low"], read["epsilon_high"]) > TOKEN_SCALE:
        warnings.warn(
            f"epsilon_low, epsilon_high: {read['epsilon_low']}, {read['epsilon_high']} have a token's scale and clip "
            "next to nothing at importance_sampling_level='sequence'; the paper's are 3e-4, 4e-4",
            UserWarning,
            stacklevel=2,
        )
    return _spec(loss, "gspo_token", knobs, "one advantage a response: pass sequence_advantages")


def objective_weight(spec: TrainerSpec, *, objective_weight_sum: float | None = None) -> float | None:
    """The sum of OBJECTIVE_WEIGHT_SUM, at least 1; None when it is not given."""
    return None if objective_weight_sum is None else max(float(objective_weight_sum), 1.0)


def _spec(loss: str, entry: str, knobs: dict[str, Any], note: str = "") -> TrainerSpec:
    return trainer_spec(
        entry, knobs, trainer=TRAINER, version=VERSION, trainer_loss=loss, rule=objective_weight, note=note
    )


def _dual_clip(read: Options, where: str) -> float | None:
    """`lower_bound_ratio` as a bound; 0 is off."""
    bound = read["lower_bound_ratio"]
    if bound == 0:
        return None
    if isinstance(bound, bool) or not isinstance(bound, (int, float)) or not bound > 1:
        raise ValueError(f"lower_bound_ratio: {where} expects a number > 1, or 0 (off); got {bound!r}")
    return float(bound)


def _reduction(read: Options, where: str) -> dict[str, Any]:
    """`loss_type` and its fixed divisor."""
    loss_type, length = read.choice("loss_type", tuple(LOSS_TYPES)), read["max_response_length"]
    if loss_type != "seq-mean-token-sum-fixed":
        if length is not None:
            raise ValueError(
                f"max_response_length: loss_type={loss_type!r} never reads it; got {length!r}; drop it or use "
                "loss_type='seq-mean-token-sum-fixed'"
            )
        return {"reduction": LOSS_TYPES[loss_type]}
    if isinstance(length, bool) or not isinstance(length, int) or length <= 0:
        raise ValueError(
            f"max_response_length: {where} divides by it under loss_type={loss_type!r} and expects a positive int; "
            f"got {length!r}; pass rollout.max_tokens"
        )
    return {"reduction": LOSS_TYPES[loss_type], "max_tokens": length}
