"""TRL's own `GRPOTrainer._compute_loss`, called on a stand-in for the trainer: no model, no run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .cases import PolicyBatch


@dataclass(frozen=True)
class Counts:
    """What TRL's denominators are formed from, besides the micro-batch; `elsewhere` are tokens of other micro-batches.

    The local mask's tokens and `elsewhere` together are `num_items_in_batch`.
    """

    gradient_accumulation_steps: int = 1
    steps_per_generation: int = 1
    num_processes: int = 1
    train: bool = True
    elsewhere: int = 0

    def of(self, mask: Tensor) -> dict[str, Any]:
        """The arguments of `TrainerSpec.normalizer` for one micro-batch."""
        return {
            "rows": mask.shape[0],
            "tokens": int(mask.sum()),
            "num_items_in_batch": int(mask.sum()) + self.elsewhere,
            "num_processes": self.num_processes,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "steps_per_generation": self.steps_per_generation,
            "train": self.train,
        }


@cache
def load() -> tuple[Any, dict[str, Any]] | None:
    """(GRPOTrainer, the defaults of GRPOConfig); None where TRL cannot be imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL and what it imports warn about optional packages
        try:
            from trl.trainer.grpo_config import GRPOConfig
            from trl.trainer.grpo_trainer import GRPOTrainer
        except ImportError:
            return None
    return GRPOTrainer, {f.name: f.default for f in fields(GRPOConfig)}


def installed_version() -> str:
    """The version of the installed TRL, "" without one."""
    try:
        return version("trl")
    except PackageNotFoundError:
        return ""


class Accelerator(SimpleNamespace):
    """The collective operations of one process; `num_processes` only scales the denominators."""

    sync_gradients = True

    def gather(self, value: Tensor) -> Tensor:
        """Nothing to gather."""
        return value

    def reduce(self, value: Tensor, reduction: str) -> Tensor:
        """Nothing to reduce."""
        return value

    def pad_across_processes(self, value: Tensor, dim: int, pad_index: float) -> Tensor:
        """Nothing to pad."""
        return value


class Metrics(dict[str, list[float]]):
    """TRL appends a number to a list that it expects to be there."""

    def __missing__(self, key: str) -> list[float]:
        return self.setdefault(key, [])


def stand_in(loss_type: str, options: Mapping[str, Any], counts: Counts, logp: Tensor, entropy: Tensor) -> Any:
    """The attributes of a GRPOTrainer that its `_compute_loss` reads, as its `__init__` sets them."""
    loaded = load()
    assert loaded is not None
    trainer, defaults = loaded
    unknown = [key for key in options if key not in defaults]
    assert not unknown, f"GRPOConfig has no option {unknown}"
    args = SimpleNamespace(**{**defaults, **options, "loss_type": loss_type})
    args.steps_per_generation = counts.steps_per_generation
    fake = SimpleNamespace(**vars(args))
    fake.args = args
    fake.epsilon_low = args.epsilon
    fake.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    fake.current_gradient_accumulation_steps = counts.gradient_accumulation_steps
    fake.accelerator = Accelerator(num_processes=counts.num_processes)
    fake.model = SimpleNamespace(training=counts.train)
    fake.aux_loss_enabled = False
    fake._entropy_bonus_enabled = args.entropy_coef != 0.0 or args.use_adaptive_entropy
    fake._metrics = {"train": Metrics(), "eval": Metrics()}
    fake._get_per_token_logps_and_entropies = lambda *_, **__: (logp, entropy, None)
    fake.get_off_policy_mask = trainer.get_off_policy_mask
    fake.get_gamma_weights = trainer.get_gamma_weights
    fake.get_high_entropy_mask = partial(trainer.get_high_entropy_mask, fake)
    return fake


def correction_ratio(batch: PolicyBatch, args: Any) -> Tensor:
    """The weights that TRL forms while it generates: (B, T) in the token modes, (B, 1) in the sequence modes.

    A sampling log-prob that is NaN counts as equal to the policy's.
    """
    level, how = args.vllm_importance_sampling_mode.split("_")
    known = batch.mask & ~batch.logp_rollout.isnan()
    log_ratio = torch.where(known, batch.logp_old - batch.logp_rollout, 0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True)
    low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    low, high = -torch.inf if low is None else low, torch.inf if high is None else high
    ratio = log_ratio.exp()
    bounded = ratio.clamp(low, high)
    return bounded if how == "truncate" else torch.where(ratio == bounded, ratio, 0.0)


def trl_loss(
    loss_type: str,
    options: Mapping[str, Any],
    batch: PolicyBatch,
    logp: Tensor,
    *,
    counts: Counts = Counts(),
    token_advantages: bool = False,
    on_policy: bool = False,
    entropy_of: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """(TRL's loss of `logp`, the metrics that it logs).

    Args:
        loss_type: TRL's name of the loss.
        options: of `GRPOConfig`.
        batch: finite at masked places, which TRL multiplies by 0.
        logp: the policy's log-probs, the leaf of the gradient.
        counts: of the run.
        token_advantages: advantages (B, T) instead of (B,).
        on_policy: without `old_per_token_logps`.
        entropy_of: (logp, mask) -> the entropies; zeros without it.
    """
    mask = batch.mask.long()
    entropy = torch.zeros_like(logp) if entropy_of is None else entropy_of(logp, batch.mask)
    fake = stand_in(loss_type, options, counts, logp, entropy)
    inputs = {
        "prompt_ids": mask[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": batch.token_advantages if token_advantages else batch.advantages,
        "num_items_in_batch": torch.tensor(counts.of(mask)["num_items_in_batch"]),
        "ref_per_token_logps": batch.logp_ref,
    }
    if not on_policy:
        inputs["old_per_token_logps"] = batch.logp_old
    if fake.use_vllm:
        inputs["sampling_per_token_logps"] = batch.logp_rollout
        if fake.vllm_importance_sampling_correction:
            inputs["importance_sampling_ratio"] = correction_ratio(batch, fake)
    loaded = load()
    assert loaded is not None
    loss = loaded[0]._compute_loss(fake, fake.model, inputs)
    logged = fake._metrics["train" if counts.train else "eval"]
    return loss, {name: values[-1] for name, values in logged.items()}
