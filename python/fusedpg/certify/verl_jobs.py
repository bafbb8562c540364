"""What is compared with verl: every loss, reduction and option, as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..presets._verl import ENTRY_OF, verl
from ..presets.base import TrainerSpec
from ..spec import REDUCTIONS

#: the global batch that a micro-batch belongs to, in verl's names
GLOBAL: Mapping[str, int] = {"dp_size": 2, "batch_num_tokens": 37, "global_batch_size": 11}
SCALE_FACTOR = 7
#: losses whose reduction is not read from loss_agg_mode
PINNED = ("sapo", "geo_mean")


@dataclass(frozen=True)
class Job:
    """One row: a loss of verl with some options, under local or global normalisation, with or without given weights."""

    loss: str
    options: Mapping[str, Any] = field(default_factory=dict)
    scope: str = "global"
    weights: bool = False

    @property
    def counts(self) -> Mapping[str, int]:
        """verl's `global_batch_info` of the row."""
        return GLOBAL if self.scope == "global" else {}

    @cached_property
    def spec(self) -> TrainerSpec:
        """The preset under test."""
        return verl(self.loss, **self.options)

    @property
    def label(self) -> str:
        """The options as a reader gives them."""
        hidden = ("loss_agg_mode", "loss_scale_factor", "use_kl_loss")
        shown = [f"{key}={value}" for key, value in self.options.items() if key not in hidden]
        return ", ".join([*shown, *(["is_weights given"] if self.weights else []), self.scope])


def reduction(mode: str) -> dict[str, Any]:
    """verl's options of one loss_agg_mode."""
    scale = {"loss_scale_factor": SCALE_FACTOR} if mode == "seq-mean-token-sum-norm" else {}
    return {"loss_agg_mode": mode, **scale}


#: options without which a loss is not complete
REQUIRED: dict[str, dict[str, Any]] = {"dro": {"dro_beta": 0.3}}

#: other options of each loss
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "vanilla": [
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5},
        {"clip_ratio_c": 1e12},  # leaves the bound of the log-ratio to be seen
        {"clip_ratio_low": 0.0, "clip_ratio_high": 0.0},  # a ratio of 1 lies on both bounds
        {"clip_ratio": 0.3, "clip_ratio_low": None, "clip_ratio_high": None},
        {"rollout_is": "token", "rollout_is_threshold": 1.2},
        {"rollout_is": "sequence", "rollout_is_threshold": 2.0},
        {"rollout_is": "token", "rollout_is_threshold": "0.5_2.0"},
    ],
    "dppo_tv": [{"clip_ratio_low": 0.05, "clip_ratio_high": 0.1, "clip_ratio_c": 1.2}],
    "dppo_kl": [{"clip_ratio_low": 0.01, "clip_ratio_high": 0.02, "clip_ratio_c": 1.2}],
    "gspo": [
        {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4},
        {"rollout_is": "token", "rollout_is_threshold": 1.2},
    ],
    "sapo": [{"tau_pos": 0.5, "tau_neg": 2.0}],
    "gpg": [{"rollout_is": "sequence", "rollout_is_threshold": "0.01_100"}],
    "clip_cov": [{"clip_cov_ratio": 0.3, "clip_cov_lb": 0.1, "clip_cov_ub": 2.0}],
    "kl_cov": [{"kl_cov_ratio": 0.3, "ppo_kl_coef": 0.7}],
    "geo_mean": [{"clip_ratio_low": 0.4, "clip_ratio_high": 0.3}],
    "dro": [{"dro_beta": 2.0}],
    "cispo": [{"clip_ratio_low": 0.5, "clip_ratio_high": 0.05}],
    "bypass_mode": [
        {"loss_type": "reinforce"},
        {"loss_type": "reinforce", "rollout_is": None},
        {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 1.2},
        {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": "0.5_2.0"},
        {"loss_type": "reinforce", "rollout_is": "sequence", "rollout_is_threshold": "0.01_100"},
    ],
}

#: rollout_rs of bypass_mode with its threshold
REJECTIONS: list[dict[str, Any]] = [
    {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.3"},
    {"rollout_rs": "token_k2", "rollout_rs_threshold": 0.1},
    {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": 3.0},
    {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.6_1.5"},
]

KL_TYPES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")


def jobs() -> Iterator[Job]:
    """Every comparison in which verl's number is right."""
    for loss in ENTRY_OF:
        base = REQUIRED.get(loss, {})
        modes: list[dict[str, Any]] = [{}] if loss in PINNED else [reduction(mode) for mode in REDUCTIONS]
        for mode in modes:
            for scope in ("local", "global"):
                yield Job(loss, {**base, **mode}, scope)
        for options in OPTIONS[loss]:
            yield Job(loss, {**base, **options})
        if loss != "bypass_mode":  # it ignores weights that are given
            yield Job(loss, base, weights=True)
    yield from _rejection_jobs()
    yield from _term_jobs()


def _rejection_jobs() -> Iterator[Job]:
    for options in REJECTIONS:
        token = options["rollout_rs"].startswith("token")
        for mode in REDUCTIONS:
            if not (token and mode == "seq-mean-token-mean"):
                yield Job("bypass_mode", {**options, **reduction(mode)})
        for kind in ("ppo_clip", "reinforce"):
            yield Job("bypass_mode", {**options, "loss_type": kind}, scope="local")


def _term_jobs() -> Iterator[Job]:
    for kind in KL_TYPES:
        for plus in ("", "+"):
            yield Job("vanilla", {"use_kl_loss": True, "kl_loss_type": kind + plus, "kl_loss_coef": 0.2})
    terms = {"use_kl_loss": True, "kl_loss_coef": 0.2, "entropy_coeff": 0.05}
    for mode in REDUCTIONS:
        yield Job("vanilla", {**terms, **reduction(mode)}, "local")
    yield Job("sapo", {**terms, **reduction("seq-mean-token-mean")})
    yield Job("bypass_mode", {**terms, **REJECTIONS[2]})
