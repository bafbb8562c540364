"""Recipes: resolved configs of named algorithms. Each is a choice among existing estimators, ratios and reductions.

`algorithm` and `job.name` differ from recipe to recipe, so that resolved configs, output paths and automatic resume do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from .config import DPOConfig, GRPOConfig, JobConfig, OPDConfig, RunConfig


def build_grpo_config() -> RunConfig:
    """GRPO (Shao et al., DeepSeekMath, arXiv:2402.03300): clipped token ratios, group-relative advantages."""
    return RunConfig(algorithm="grpo", job=JobConfig(name="grpo"), rl=GRPOConfig())


def build_dr_grpo_config() -> RunConfig:
    """Dr-GRPO (Liu et al., arXiv:2503.20783): mean-centred advantages, sums over a fixed `rollout.max_tokens`."""
    config = _named("dr_grpo")
    config.rl.grpo_surrogate = "clipped"
    config.rl.unbiased_advantage = True
    config.rl.loss_type = "seq-mean-token-sum-fixed"
    return config


def build_gspo_config(mini_batch_per_replica: int = 32) -> RunConfig:
    """GSPO (Zheng et al., arXiv:2507.18071): one ratio a response.

    Args:
        mini_batch_per_replica: samples of one update on one replica.

    Raises:
        ValueError: a number that is no positive int.
    """
    config = _named("gspo")
    apply_gspo_knobs(config.rl, mini_batch_per_replica=mini_batch_per_replica)
    return config


def build_dapo_config(mini_batch_per_replica: int = 32) -> RunConfig:
    """DAPO (Yu et al., arXiv:2503.14476): a higher upper clip, token mean, neither dual clip nor KL.

    Args:
        mini_batch_per_replica: samples of one update on one replica.

    Raises:
        ValueError: a number that is no positive int.
    """
    config = _named("dapo")
    config.rl.mini_batch_per_replica = mini_batch_per_replica
    config.rl.epsilon_high = 0.28
    config.rl.lower_bound_ratio = 0
    config.rl.loss_type = "token-mean"
    return config


def build_opd_config() -> RunConfig:
    """On-policy distillation: the teacher's signal a token, through the clipped surrogate."""
    return RunConfig(algorithm="opd", job=JobConfig(name="opd"), rl=OPDConfig())


def build_dpo_config() -> RunConfig:
    """Direct preference optimisation (Rafailov et al., arXiv:2305.18290)."""
    return RunConfig(algorithm="dpo", job=JobConfig(name="dpo"), rl=DPOConfig())


def apply_gspo_knobs(rl: GRPOConfig, *, mini_batch_per_replica: int) -> None:
    """Turn an `rl` section into GSPO's objective: the one place that knows the paper's values.

    Args:
        rl: changed in place.
        mini_batch_per_replica: samples of one update on one replica.

    Raises:
        ValueError: a number that is no positive int.
    """
    rl.grpo_surrogate = "clipped"
    rl.importance_sampling_level = "sequence"
    rl.lower_bound_ratio = 0
    rl.epsilon_low = 3e-4
    rl.epsilon_high = 4e-4
    rl.loss_type = "seq-mean-token-mean"
    rl.mini_batch_per_replica = mini_batch_per_replica
    rl.certified_deterministic_forward = True


def _named(algorithm: str) -> RunConfig:
    config = build_grpo_config()
    config.algorithm = algorithm
    config.job.name = algorithm
    return config


#: name -> recipe with its defaults
RECIPES: Mapping[str, Callable[[], RunConfig]] = MappingProxyType(
    {
        "grpo": build_grpo_config,
        "dr_grpo": build_dr_grpo_config,
        "gspo": build_gspo_config,
        "dapo": build_dapo_config,
        "opd": build_opd_config,
        "dpo": build_dpo_config,
    }
)
