"""cosmos-rl's GRPO loss under the names of its `train.train_policy` config.

Source: cosmos_rl 0.4.7, `policy/trainer/llm_trainer/grpo_trainer.py` (compute_loss) and `policy/config`.
"""

from __future__ import annotations

import math
from typing import Any

from .base import Options, TrainerSpec, known_loss, trainer_spec

TRAINER, VERSION = "cosmos_rl", "0.4.7"

#: train_policy.variant -> catalogue entry; gspo's ratio passes its gradient through the mean
ENTRY_OF = {"grpo": "ppo_dual_clip", "dapo": "ppo_dual_clip", "gspo": "gspo"}
LOSS_TYPES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "token-sum")
_DEFAULTS: dict[str, Any] = {
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "lower_bound_ratio": 3.0,
    "aipo_rho": None,
    "loss_type": "token-mean",
    "unbiased_loss_max_tokens": None,
    "balance_dp_token": False,
    "kl_beta": 0.0,
    "unbiased_kl_estimate": False,
    "use_decoupled_loss": False,
    "behav_imp_weight_cap": None,
    "use_rollout_logprobs_for_loss": False,
    "off_policy_masking_delta": None,
    "entropy_coeff": 0.0,
    "positive_nll_coef": None,
}
_REFUSED = {"temperature": "apply it where the log-probs are computed: token_logprobs(..., temperature=...)"}
_CAPPED = (
    "unbiased_kl_estimate: cosmos-rl caps r*k3 at 10 where this caps k3 at 10 before r multiplies it: the same number "
    "while neither binds"
)


def cosmos_rl(loss: str = "grpo", **options: Any) -> TrainerSpec:
    """The loss of one `variant` (grpo, dapo or gspo).

    Options: `epsilon_low`, `epsilon_high` (negative: no bound), `lower_bound_ratio` (always on, except for gspo),
    `aipo_rho`, `loss_type`, `unbiased_loss_max_tokens`, `balance_dp_token`, `kl_beta`, `unbiased_kl_estimate`,
    `use_decoupled_loss` with `behav_imp_weight_cap` (pass logp_rollout), `use_rollout_logprobs_for_loss` (the ratio is
    anchored on logp_rollout), `off_policy_masking_delta` (gspo) and `entropy_coeff` (token-mean).

    `spec.normalizer(tokens=..., dp_workers=...)` or `spec.normalizer(sequences=...)`: `sequences` counts the rows of
    the micro-batch, empty ones too, as cosmos-rl does.

    Raises:
        ValueError: a loss that the trainer does not have, an option that the loss never reads or cannot express.
    """
    known_loss(TRAINER, loss, tuple(ENTRY_OF))
    where = f"presets.cosmos_rl({loss!r})"
    read = Options(where, options, _DEFAULTS, _REFUSED)
    _refuse(read, loss, where)
    knobs = _surrogate(read, loss, where) | _reduction(read) | _kl(read)
    if read["use_rollout_logprobs_for_loss"]:
        knobs["anchor"] = "rollout"
    if read["use_decoupled_loss"]:
        knobs |= {"is_correction": "mask", "is_high": read["behav_imp_weight_cap"]}
    if read["entropy_coeff"]:
        knobs["entropy_coef"] = read["entropy_coeff"]
    if read["off_policy_masking_delta"] is not None:
        floor = math.exp(-read["off_policy_masking_delta"])
        knobs |= {"keep": "ratio", "keep_low": floor, "keep_directional": True}
    entry = "ppo_clip" if read["aipo_rho"] is not None and loss != "gspo" else ENTRY_OF[loss]
    note = _CAPPED if read["unbiased_kl_estimate"] and read["kl_beta"] else ""
    return trainer_spec(entry, knobs, trainer=TRAINER, version=VERSION, trainer_loss=loss, rule=denominator, note=note)


def options_of(loss: str = "grpo") -> dict[str, Any]:
    """The options that the loss reads, with cosmos-rl's defaults."""
    return dict(_DEFAULTS)


def denominator(
    spec: TrainerSpec, *, tokens: float | None = None, sequences: float | None = None, dp_workers: int = 1
) -> float | None:
    """Tokens over data-parallel workers, or rows; None (the call's own weight) when the count is not given."""
    if spec.reduction == "token-sum":
        return None
    if spec.reduction == "token-mean":
        return None if tokens is None else (float(tokens) + 1e-8) / dp_workers
    return None if sequences is None else max(float(sequences), 1.0)


def _refuse(read: Options, loss: str, where: str) -> None:
    """What no LossSpec has, and what contradicts itself in cosmos-rl."""
    if read["positive_nll_coef"]:
        raise ValueError(
            f"positive_nll_coef: {where} does not support it; got {read['positive_nll_coef']!r}; it is a mean over the "
            "tokens of positive samples alone: add coef * -logp[positive].mean() to the loss"
        )
    if read["off_policy_masking_delta"] is not None and (loss != "gspo" or read["use_decoupled_loss"]):
        raise ValueError(
            f"off_policy_masking_delta: {where} does not support it; got {read['off_policy_masking_delta']!r}; it "
            "drops whole sequences by their mean log-ratio: pass advantages of 0 on them (the KL term and the "
            "denominator stay, as in cosmos-rl)"
        )
    if read["entropy_coeff"] and (read["loss_type"] != "token-mean" or read["balance_dp_token"]):
        raise ValueError(
            f"entropy_coeff: {where} does not support it here; got {read['entropy_coeff']!r} with loss_type="
            f"{read['loss_type']!r}; cosmos-rl's bonus is a mean over the micro-batch's tokens whatever divides the "
            "policy loss: use loss_type='token-mean' without balance_dp_token, or add it to the loss"
        )
    if read["use_rollout_logprobs_for_loss"] and read["use_decoupled_loss"]:
        raise ValueError("use_rollout_logprobs_for_loss: cosmos-rl refuses it together with use_decoupled_loss")
    if read["behav_imp_weight_cap"] is not None and not read["use_decoupled_loss"]:
        raise ValueError(
            f"behav_imp_weight_cap: only use_decoupled_loss=True reads it; got {read['behav_imp_weight_cap']!r}"
        )
    if read["unbiased_kl_estimate"] and read["kl_beta"] and loss == "gspo":
        raise ValueError(
            f"unbiased_kl_estimate: {where} does not support it; got True; cosmos-rl weighs the KL term by a token's "
            "ratio while the policy term has its sequence's: use variant 'grpo', or unbiased_kl_estimate=False"
        )
    if read["balance_dp_token"] and read["loss_type"] != "token-mean":
        raise ValueError(f"balance_dp_token: loss_type={read['loss_type']!r} never reads it; use 'token-mean'")


def _surrogate(read: Options, loss: str, where: str) -> dict[str, Any]:
    """The clip band, the dual clip and AIPO's one-sided clip."""
    rho = read["aipo_rho"]
    if rho is not None:
        if not rho > 1:
            raise ValueError(f"aipo_rho: {where} expects a number > 1; got {rho!r}; cosmos-rl suggests 2 to 10")
        if loss == "gspo":
            return {"clip_low": None, "clip_high": None, "log_ratio_clamp": (None, min(10.0, math.log(rho)))}
        return {"clip_low": None, "clip_high": rho, "delta": rho}
    low, high = read["epsilon_low"], read["epsilon_high"]
    knobs = {"clip_low": None if low < 0 else 1.0 - low, "clip_high": None if high < 0 else 1.0 + high}
    if loss == "gspo":
        return knobs
    bound = read["lower_bound_ratio"]
    if not bound > 1:
        raise ValueError(
            f"lower_bound_ratio: {where} expects a number > 1; got {bound!r}; cosmos-rl cannot switch the dual clip "
            "off: pass a large number"
        )
    return {**knobs, "dual_clip": bound}


def _reduction(read: Options) -> dict[str, Any]:
    loss_type, length = read.choice("loss_type", LOSS_TYPES), read["unbiased_loss_max_tokens"]
    if length is not None and length > 0:
        if loss_type != "seq-mean-token-mean":
            raise ValueError(
                f"unbiased_loss_max_tokens: loss_type={loss_type!r} never reads it; got {length!r}; use "
                "loss_type='seq-mean-token-mean'"
            )
        return {"reduction": "seq-mean-token-sum-norm", "max_tokens": length}
    return {"reduction": loss_type}


def _kl(read: Options) -> dict[str, Any]:
    if not read["kl_beta"]:
        return {}
    knobs = {"kl": "k3", "kl_coef": read["kl_beta"], "kl_log_ratio_clamp": 20.0, "kl_clamp": 10.0}
    return {**knobs, "kl_ratio": "live"} if read["unbiased_kl_estimate"] else knobs
