"""SkyRL 0.3.0's policy losses under the names of its `AlgorithmConfig` and of the configs nested in it.

Source: `skyrl.backends.skyrl_train.utils.ppo_utils`, `off_policy_correction_utils`, `skyrl.train.config.config`.
"""

from __future__ import annotations

import math
from typing import Any

from .base import Options, TrainerSpec, known_loss, trainer_spec

TRAINER, VERSION = "skyrl", "0.3.0"

#: policy_loss_type -> catalogue entry
ENTRY_OF = {
    "regular": "ppo_clip",
    "dual_clip": "ppo_dual_clip",
    "gspo": "gspo_token",
    "cispo": "cispo",
    "sapo": "sapo",
    "rollout_is": "icepop",
    "dppo": "ipo",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "importance_sampling": "importance_sampling",
}
REDUCTIONS = {
    None: "token-sum",
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "seq_mean_token_sum_norm": "seq-mean-token-sum-norm",
}
_CLIP = {"eps_clip_low": 0.2, "eps_clip_high": 0.2}
_SHARED = {
    "loss_reduction": None,
    "max_seq_len": None,
    "use_kl_loss": False,
    "kl_loss_coef": 0.001,
    "kl_estimator_type": "k3",
}
_CORRECTION = {
    "tis_ratio_type": None,
    "token_tis_ratio_clip_high": 2.0,
    "sequence_tis_ratio_clip_high": 5.0,
    "sequence_mask_metric": None,
    "geo_mask_high": 1.01,
    "geo_mask_low": 0.99,
    "product_mask_high": 2.0,
    "product_mask_low": 0.5,
    "token_mask_is_threshold_low": None,
    "token_mask_is_threshold_high": None,
}
_OWN: dict[str, dict[str, Any]] = {
    "regular": {**_CLIP, **_CORRECTION},
    "dual_clip": {**_CLIP, "clip_ratio_c": 3.0, **_CORRECTION},
    "gspo": {**_CLIP, **_CORRECTION},
    "cispo": {"cispo_eps_clip_low": 0.0, "cispo_eps_clip_high": 5.0, **_CORRECTION},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05, **_CORRECTION},
    "rollout_is": dict(_CLIP),
    "dppo": {"dppo_type": "binary_tv", "delta_low": 0.2, "delta_high": 0.2},
    "clip_cov": {**_CLIP, "clip_ratio": 0.0002, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0},
    "kl_cov": {"kl_cov_frac": 0.2, "ppo_kl_coef": 1.0},
    "importance_sampling": {},
}
_WEIGHTS = "form the weights yourself and pass is_weights (0 drops a token)"
_REFUSED = {
    "outlier_token_is_threshold_low": f"it drops a sequence for one token; {_WEIGHTS}",
    "outlier_token_is_threshold_high": f"it drops a sequence for one token; {_WEIGHTS}",
    "use_tis": "SkyRL has deprecated it; pass tis_ratio_type='token' and token_tis_ratio_clip_high",
    "tis_imp_ratio_cap": "SkyRL has deprecated it; pass tis_ratio_type='token' and token_tis_ratio_clip_high",
    "use_entropy_loss": "SkyRL averages the entropy over a micro-batch's tokens, apart from the policy loss; add "
    "-coef*token_logprobs(..., return_entropy=True).entropy over the tokens yourself",
    "use_kl_in_reward": "fold the penalty into the advantages; no loss changes",
}
_METRICS = {
    "regular": {"clip_ratio": "clip_frac"},
    "dual_clip": {"clip_ratio": "clip_frac"},
    "gspo": {"clip_ratio": "clip_frac"},
    "cispo": {"clip_ratio": "out_of_band_frac"},
    "importance_sampling": {"importance_ratio": "ratio_mean"},
}
_NOTES = {
    "rollout_is": "SkyRL drops a ratio exactly on a bound too",
    "dppo": "the binary KL keeps probabilities in [1e-6, 1 - 1e-6]; SkyRL adds 1e-8 inside the logarithm",
    "clip_cov": "SkyRL's covariances are of the advantages as they come, scaled by its reduction",
    "kl_cov": "SkyRL scales the advantages by its reduction and sums the KL penalty unscaled",
}


def skyrl(loss: str = "regular", **options: Any) -> TrainerSpec:
    """One of SkyRL's policy losses, by its `policy_loss_type`.

    SkyRL folds its `loss_reduction` into the advantages and sums the losses. That is the default here
    (`loss_reduction=None`: pass those advantages); with `loss_reduction="token_mean"`, `"sequence_mean"` or
    `"seq_mean_token_sum_norm"` (and `max_seq_len`) pass the raw ones. Options of nested configs go by their own name:
    `tau_pos`, `cispo_eps_clip_high`, `dppo_type`, `clip_cov_lb`, `kl_cov_frac`, `tis_ratio_type`, ... The KL loss
    (`use_kl_loss=True`) is a mean of row means whatever the reduction: it needs `loss_reduction="sequence_mean"`.

    `spec.normalizer(batch_size=..., tokens=...)` is the denominator of the mini-batch.

    Raises:
        ValueError: a loss that the trainer does not have, an option that the loss never reads or cannot express.
    """
    known_loss(TRAINER, loss, tuple(ENTRY_OF))
    where = f"presets.skyrl({loss!r})"
    refused = dict(_REFUSED)
    if loss in ("rollout_is", "dppo"):
        refused |= dict.fromkeys(
            _CORRECTION, f"the ratio is anchored on logp_rollout, the weight on logp_old; {_WEIGHTS}"
        )
    read = Options(where, options, {**_SHARED, **_OWN[loss]}, refused)
    knobs = _reduction(read, loss) | _kl(read) | _surrogate(read, loss)
    if "tis_ratio_type" in _OWN[loss]:
        knobs |= _correction(read)
    return trainer_spec(
        ENTRY_OF[loss],
        knobs,
        trainer=TRAINER,
        version=VERSION,
        trainer_loss=loss,
        metric_names=_METRICS.get(loss),
        rule=denominator,
        note=_NOTES.get(loss, ""),
    )


def options_of(loss: str) -> dict[str, Any]:
    """The options that a loss reads, with SkyRL's defaults."""
    return {**_SHARED, **_OWN[loss]}


def denominator(spec: TrainerSpec, *, batch_size: int | None = None, tokens: float | None = None) -> float | None:
    """All rows of the mini-batch, or its tokens (at least 1); 1 where the advantages carry the reduction."""
    if spec.reduction == "token-sum":
        return 1.0
    if spec.reduction == "token-mean":
        return None if tokens is None else max(float(tokens), 1.0)
    return None if batch_size is None else float(batch_size)


def _reduction(read: Options, loss: str) -> dict[str, Any]:
    name = read["loss_reduction"]
    if name in ("prompt_mean", "token_mean_legacy"):
        raise ValueError(
            f"loss_reduction: {read.where} does not support {name!r}; scale the advantages as "
            "apply_loss_reduction_to_advantages_minibatch does and pass loss_reduction=None"
        )
    read.choice("loss_reduction", tuple(REDUCTIONS))
    if name is not None and loss in ("clip_cov", "kl_cov"):
        raise ValueError(
            f"loss_reduction: {read.where} expects None, since its selection reads advantages that carry the "
            f"reduction; got {name!r}"
        )
    given = {} if read["max_seq_len"] is None else {"max_tokens": read["max_seq_len"]}
    return {"reduction": REDUCTIONS[name], **given}


def _kl(read: Options) -> dict[str, Any]:
    if not read["use_kl_loss"]:
        return {}
    if read["loss_reduction"] != "sequence_mean":
        raise ValueError(
            f"use_kl_loss: SkyRL adds the mean of the rows' means; {read.where} has that only with "
            f"loss_reduction='sequence_mean'; got {read['loss_reduction']!r}; or add the KL as a second loss: "
            "loss_spec('reinforce', kl=..., kl_coef=..., reduction='seq-mean-token-mean') with advantages=0.0"
        )
    kind = read.choice("kl_estimator_type", ("k1", "k2", "k3", "abs"))
    inside, outside = (20.0, 10.0) if kind == "k3" else (None, None)
    return {
        "kl": kind,
        "kl_coef": read["kl_loss_coef"],
        "kl_log_ratio_clamp": inside,
        "kl_clamp": outside,
    }


def _surrogate(read: Options, loss: str) -> dict[str, Any]:
    if loss in ("regular", "dual_clip", "gspo"):
        knobs = {"epsilon_low": read["eps_clip_low"], "epsilon_high": read["eps_clip_high"]}
        return knobs | ({"dual_clip": read["clip_ratio_c"]} if loss == "dual_clip" else {})
    if loss == "cispo":
        return {"epsilon_low": read["cispo_eps_clip_low"], "epsilon_high": read["cispo_eps_clip_high"]}
    if loss == "sapo":
        return {"tau_pos": read["tau_pos"], "tau_neg": read["tau_neg"]}
    if loss == "rollout_is":
        bounds = {"alpha": 1 - read["eps_clip_low"], "beta": 1 + read["eps_clip_high"]}
        return {**bounds, "log_ratio_clamp": 20.0}
    if loss == "dppo":
        kind = read.choice("dppo_type", ("binary_tv", "binary_kl"))
        return {
            "keep": kind.removeprefix("binary_"),
            "keep_low": -read["delta_low"],
            "keep_high": read["delta_high"],
            "kl_tau": 0.0,
        }
    if loss == "clip_cov":
        return {
            "epsilon_low": read["eps_clip_low"],
            "epsilon_high": read["eps_clip_high"],
            "clip_cov_ratio": read["clip_ratio"],
            "clip_cov_lb": read["clip_cov_lb"],
            "clip_cov_ub": read["clip_cov_ub"],
            "log_ratio_clamp": None,
        }
    if loss == "kl_cov":
        return {
            "kl_cov_ratio": read["kl_cov_frac"],
            "ppo_kl_coef": read["ppo_kl_coef"],
            "log_ratio_clamp": None,
        }
    return {"log_ratio_clamp": None}


def _correction(read: Options) -> dict[str, Any]:
    """TIS weights and masks from exp(logp_old - logp_rollout), every log clamped to +-20."""
    level = read.choice("tis_ratio_type", (None, "token", "sequence"))
    metric = read.choice("sequence_mask_metric", (None, "geometric", "product"))
    low, high = read["token_mask_is_threshold_low"], read["token_mask_is_threshold_high"]
    by_token = low is not None and high is not None  # SkyRL switches it on only with both
    if by_token and (metric is not None or level == "sequence"):
        raise ValueError(
            f"token_mask_is_threshold_low: SkyRL forms a sequence's weight or mask from the tokens that this mask "
            f"leaves; {read.where} does not; {_WEIGHTS}"
        )
    knobs: dict[str, Any] = {}
    if level is not None:
        knobs |= {
            "is_correction": "truncate",
            "is_level": level,
            "is_low": math.exp(-20.0),
            "is_high": read[f"{level}_tis_ratio_clip_high"],
        }
    if metric is not None:
        name = "geo" if metric == "geometric" else "product"
        knobs |= {
            "is_reject": "geometric" if metric == "geometric" else "sequence",
            "is_reject_low": read[f"{name}_mask_low"],
            "is_reject_high": read[f"{name}_mask_high"],
        }
    elif by_token:
        knobs |= {"is_reject": "token", "is_reject_low": low, "is_reject_high": high}
    return knobs
