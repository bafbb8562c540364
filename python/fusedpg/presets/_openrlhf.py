"""OpenRLHF 0.11.2's PolicyLoss and KL loss under the names of its command line, without the groups' prefixes.

Source: `openrlhf.models.loss.PolicyLoss`, `openrlhf.models.utils.compute_approx_kl`, `openrlhf.cli.train_ppo_ray`,
`openrlhf.trainer.ray.ppo_actor`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .base import Options, TrainerSpec, known_loss, trainer_spec

TRAINER, VERSION = "openrlhf", "0.11.2"

#: actor.policy_loss_type -> catalogue entry
ENTRY_OF = {"ppo": "ppo_clip", "gspo": "gspo"}
_DEFAULTS: dict[str, Any] = {
    "eps_clip": 0.2,
    "eps_clip_low_high": None,
    "dual_clip": None,
    "loss_agg_mode": "token-mean",
    "entropy_coef": None,
    "is_correction_level": "off",
    "is_correction_mode": "mask",
    "is_correction_gating": "ratio",
    "is_correction_threshold": (0.5, 5.0),
    "use_loss": False,
    "init_coef": 0.01,
    "estimator": "k1",
}
_REFUSED = {
    "unbiased_gradient": "its gradient carries the ratio capped at 10 and its value does not; use loss_spec with "
    "kl='k2', kl_ratio='detached' for the same expectation",
    "enable_vllm_is_correction": "OpenRLHF has removed it; pass is_correction_level",
    "vllm_is_correction_type": "OpenRLHF has removed it; pass is_correction_mode and is_correction_level",
    "aux_loss_coef": "the router's loss does not depend on log-probs; add it yourself",
}


def openrlhf(loss: str = "ppo", **options: Any) -> TrainerSpec:
    """PolicyLoss by its `policy_loss_type`: `ppo` (log-ratio clamped to +-20) or `gspo` (no clamp).

    Options: `eps_clip` or `eps_clip_low_high`, `dual_clip`, `loss_agg_mode`, `entropy_coef`; `is_correction_level`
    (off, token, seq), `is_correction_mode` (mask, clip), `is_correction_threshold` (HIGH or (LOW, HIGH)), which need
    logp_rollout; the KL loss of `algo.kl`: `use_loss`, `init_coef`, `estimator`. `gspo` with a correction anchors its
    ratio on logp_rollout and has no weight. KL and entropy are token means whatever `loss_agg_mode` is, so they need
    `token-mean`.

    `spec.normalizer(batch_num_tokens=..., global_batch_size=..., dp_size=...)` is the denominator of all ranks.

    Raises:
        ValueError: a loss that the trainer does not have, an option that the loss never reads or cannot express.
    """
    known_loss(TRAINER, loss, tuple(ENTRY_OF))
    where = f"presets.openrlhf({loss!r})"
    read = Options(where, options, _DEFAULTS, _REFUSED)
    mode = read.choice("loss_agg_mode", ("token-mean", "seq-mean-token-mean"))
    reduction = "seq-mean-token-mean" if loss == "gspo" else mode
    eps = read["eps_clip_low_high"]
    low, high = (read["eps_clip"], read["eps_clip"]) if eps is None else eps
    knobs: dict[str, Any] = {"epsilon_low": low, "epsilon_high": high, "reduction": reduction}
    knobs |= _gspo(read) if loss == "gspo" else _correction(read)
    knobs |= _added_terms(read, reduction)
    spec = trainer_spec(
        ENTRY_OF[loss],
        knobs,
        trainer=TRAINER,
        version=VERSION,
        trainer_loss=loss,
        metric_names={"ppo_clip_ratio": "clip_frac"},
        rule=denominator,
    )
    bound = read["dual_clip"]
    return spec if bound is None else replace(spec, dual_clip=float(bound))


def denominator(
    spec: TrainerSpec,
    *,
    batch_num_tokens: float | None = None,
    global_batch_size: float | None = None,
    dp_size: int = 1,
) -> float | None:
    """Global tokens, or global sequences with a token, over the number of data-parallel ranks."""
    count = batch_num_tokens if spec.reduction == "token-mean" else global_batch_size
    return None if count is None else float(count) / dp_size


def _gspo(read: Options) -> dict[str, Any]:
    anchor = "old" if read.choice("is_correction_level", ("off", "token", "seq")) == "off" else "rollout"
    return {"log_ratio_clamp": None, "anchor": anchor}


def _correction(read: Options) -> dict[str, Any]:
    """TIS (token, clip), IcePop (token, mask) and seq-mask-TIS (seq, mask) of exp(logp_old - logp_rollout)."""
    level = read.choice("is_correction_level", ("off", "token", "seq"))
    mode = read.choice("is_correction_mode", ("mask", "clip"))
    gating = read.choice("is_correction_gating", ("ratio", "binary_kl", "tv"))
    if level == "off":
        return {}
    if gating != "ratio":
        raise ValueError(
            f"is_correction_gating: {read.where} masks by the ratio only; got {gating!r}; form the mask yourself and "
            "pass is_weights = exp(logp_old - logp_rollout), 0 where it drops"
        )
    low, high = _threshold(read["is_correction_threshold"])
    if mode == "clip" and level == "seq":
        raise ValueError(f"is_correction_mode: {read.where} expects 'mask' with is_correction_level='seq'; got 'clip'")
    if level == "token":
        return {"is_correction": "truncate" if mode == "clip" else "mask", "is_low": low, "is_high": high}
    weight = {"is_correction": "truncate", "is_low": None, "is_high": None}
    return {**weight, "is_reject": "geometric", "is_reject_low": low, "is_reject_high": high}


def _threshold(value: Any) -> tuple[float, float]:
    bounds = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if len(bounds) == 1:
        return 0.0, float(bounds[0])
    if len(bounds) == 2:
        return float(bounds[0]), float(bounds[1])
    raise ValueError(f"is_correction_threshold: expected HIGH or (LOW, HIGH); got {value!r}")


def _added_terms(read: Options, reduction: str) -> dict[str, Any]:
    """KL loss and entropy bonus: token means in OpenRLHF, whatever the policy loss is."""
    knobs: dict[str, Any] = {}
    for switch, on in (("use_loss", read["use_loss"]), ("entropy_coef", bool(read["entropy_coef"]))):
        if on and reduction != "token-mean":
            raise ValueError(
                f"{switch}: OpenRLHF adds it as a token mean; {read.where} has that only with "
                f"loss_agg_mode='token-mean'; got {reduction!r}; add it as a second loss: loss_spec('reinforce', ...) "
                "with advantages=0.0"
            )
    if read["entropy_coef"]:
        knobs["entropy_coef"] = read["entropy_coef"]
    if read["use_loss"]:
        kind = read.choice("estimator", ("k1", "k2", "k3"))
        knobs |= {"kl": kind, "kl_coef": read["init_coef"], "kl_clamp": 10.0}
        knobs["kl_log_ratio_clamp"] = (-10.0, None) if kind == "k3" else None
    return knobs
