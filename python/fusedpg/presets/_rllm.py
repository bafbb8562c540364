"""rLLM's losses (`algorithm.loss_fn`) under the names of its algorithm config and of `loss_params`.

Source: rLLM's guide to custom loss functions, and the bodies of `rllm/trainer/algorithms/loss.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import Options, TrainerSpec, known_loss, trainer_spec

TRAINER, VERSION = "rllm", "contract"

#: algorithm.loss_fn -> catalogue entry
ENTRY_OF = {
    "ppo_clip": "ppo_clip",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
    "cispo": "cispo",
    "gspo": "gspo_token",
    "icepop": "icepop",
    "reinforce": "reinforce",
    "echo": "echo",
    "reinforce_kl": "reinforce_kl",
}
#: rLLM's aggregation modes; its default is the first
AGG_MODES = ("seq-mean-token-mean", "token-mean", "seq-mean-token-sum")
_CLIP = {"eps_clip": 0.2, "eps_clip_high": None}
#: what each loss reads besides loss_agg_mode
_DEFAULTS: dict[str, dict[str, Any]] = {
    "ppo_clip": _CLIP,
    "dppo_tv": {"eps_clip": 0.2, "delta": None, "delta_low": None, "delta_high": None},
    "dppo_kl": {"eps_clip": 0.2, "delta": None},
    "cispo": _CLIP,
    "gspo": _CLIP,
    "icepop": {"icepop_alpha": 0.5, "icepop_beta": 5.0},
    "reinforce": {},
    "echo": {**_CLIP, "env_loss_coef": 0.05},
    "reinforce_kl": {
        "bwd_kl_coef": 0.0,
        "fwd_kl_coef": 0.0,
        "kl_approx": False,
        "ratio_clamp_min": None,
        "ratio_clamp_max": None,
    },
}
_METRICS = {
    "ppo_clip": {"ppo/clip_frac": "out_of_band_frac"},
    "echo": {"ppo/clip_frac": "out_of_band_frac"},
    "cispo": {"cispo/clip_frac": "out_of_band_frac"},
    "gspo": {"gspo/clip_frac": "clip_frac"},
    "icepop": {f"icepop/{name}": name for name in ("ratio_mean", "ratio_min", "ratio_max")},
    "reinforce_kl": {
        **{f"reinforce_kl/{name}": name for name in ("ratio_mean", "ratio_min", "ratio_max")},
        "reinforce_kl/clamp_frac": "out_of_band_frac",
    },
}
_NOTES = {
    "icepop": "the ratio is exp(logp - logp_rollout), not of logp_old; pass logp_rollout",
    "reinforce_kl": "the ratio and both KL terms are against the sampler; pass logp_rollout (logp_old is not "
    "read); beyond 20 nats the KL terms' log-ratio is clamped as the ratio is, where rLLM clamps the ratio alone",
    "echo": "the observation term is divided by the action tokens' count under token-mean",
}


def rllm(loss: str = "ppo_clip", **options: Any) -> TrainerSpec:
    """One of rLLM's built-in losses.

    Options: `loss_agg_mode`, the algorithm config's `eps_clip`, `eps_clip_high` (None is symmetric) and `kl_beta`, and
    the loss's own `loss_params`, as a dict or directly: `delta`, `delta_low`, `delta_high` (dppo_tv), `delta`
    (dppo_kl), `icepop_alpha`, `icepop_beta`, `env_loss_coef` (echo), `bwd_kl_coef`, `fwd_kl_coef`, `kl_approx`,
    `ratio_clamp_min`, `ratio_clamp_max` (reinforce_kl).

    `spec.normalizer(tokens=..., sequences=...)` takes the counts of the whole optimizer step.

    Raises:
        ValueError: a loss that the trainer does not have, an option that the loss never reads or cannot express.
    """
    known_loss(TRAINER, loss, tuple(ENTRY_OF))
    given = {**options, **(options.pop("loss_params", None) or {})}
    given.pop("loss_params", None)
    where = f"presets.rllm({loss!r})"
    read = Options(where, given, {**_DEFAULTS[loss], "kl_beta": 0.0, "loss_agg_mode": None})
    if read["kl_beta"] != 0.0:
        raise ValueError(
            f"kl_beta: no built-in loss of rLLM reads it; got {read['kl_beta']!r}; use "
            f"fusedpg.loss_spec({ENTRY_OF[loss]!r}, kl='k3', kl_coef=...), or verl's preset for a native kernel"
        )
    knobs = _KNOBS_OF.get(loss, _clip_knobs)(read) | {"reduction": _reduction(loss, read)}
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


def denominator(spec: TrainerSpec, *, tokens: float | None = None, sequences: float | None = None) -> float | None:
    """Tokens under token-mean, else sequences, at least 1; None when the count is not given."""
    count = tokens if spec.reduction == "token-mean" else sequences
    return None if count is None else max(float(count), 1.0)


def _reduction(loss: str, read: Options) -> str:
    pinned = AGG_MODES[0]
    mode = pinned if read["loss_agg_mode"] is None else read.choice("loss_agg_mode", AGG_MODES)
    if loss == "gspo" and mode != pinned:
        raise ValueError(
            f"loss_agg_mode: rLLM's gspo pins {pinned!r} and ignores the config; got {mode!r}; drop the option"
        )
    return str(mode)


def _clip_knobs(read: Options) -> dict[str, Any]:
    return {"epsilon_low": read["eps_clip"], "epsilon_high": read["eps_clip_high"]}


def _dppo_knobs(read: Options) -> dict[str, Any]:
    delta = read["eps_clip"] if read["delta"] is None else read["delta"]
    return {"delta": delta}


def _dppo_tv_knobs(read: Options) -> dict[str, Any]:
    delta = read["eps_clip"] if read["delta"] is None else read["delta"]
    low, high = (delta if read[key] is None else read[key] for key in ("delta_low", "delta_high"))
    return {"keep_low": -low, "keep_high": high}


def _icepop_knobs(read: Options) -> dict[str, Any]:
    return {"alpha": read["icepop_alpha"], "beta": read["icepop_beta"]}


def _reinforce_knobs(read: Options) -> dict[str, Any]:
    return {}


def _echo_knobs(read: Options) -> dict[str, Any]:
    return {**_clip_knobs(read), "obs_coef": read["env_loss_coef"]}


def _reinforce_kl_knobs(read: Options) -> dict[str, Any]:
    """Both KL terms of samples of the sampler; its ratio is clamped on both sides or not at all."""
    return {
        "clip_low": read["ratio_clamp_min"],
        "clip_high": read["ratio_clamp_max"],
        "bwd_kl_coef": read["bwd_kl_coef"],
        "fwd_kl_coef": read["fwd_kl_coef"],
        "kl_approx": read["kl_approx"],
    }


_KNOBS_OF: Mapping[str, Any] = {
    "dppo_tv": _dppo_tv_knobs,
    "dppo_kl": _dppo_knobs,
    "icepop": _icepop_knobs,
    "reinforce": _reinforce_knobs,
    "echo": _echo_knobs,
    "reinforce_kl": _reinforce_kl_knobs,
}
