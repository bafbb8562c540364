"""cosmos-rl: its GRPO loss on this library's kernels, over 1-D selected tokens with int32 boundaries.

fusedpg.integrations.cosmos_rl.register("fusedpg_grpo")     # then train.train_policy.trainer_type = "fusedpg_grpo"
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..functional import policy_loss
from ..presets import cosmos_rl as cosmos_rl_preset
from ..presets._cosmos_rl import options_of
from ..presets.base import TrainerSpec
from ._shared import advantages_of

_TRAINER = "cosmos_rl.policy.trainer.llm_trainer.grpo_trainer"
_REGISTRY = "cosmos_rl.policy.trainer.base"
#: terms that the trainer adds after the loss
_ELSEWHERE = ("entropy_coeff", "positive_nll_coef")


def compute_loss(
    current_token_logps: Tensor,
    old_per_token_logps: Tensor,
    ref_per_token_logps: Tensor | None,
    current_advantages: Tensor,
    cu_seqlens: Tensor,
    config: Any,
    logprob_masks: Tensor,
    dp_group: Any = None,
    ddp_comm: Any = None,
    rollout_per_token_logps: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """cosmos-rl's `compute_loss`: (loss, its policy part, its KL part), the latter two detached, for the log.

    Args:
        current_token_logps, old_per_token_logps, ref_per_token_logps: (N,), the tokens that `logprob_masks` selects.
        current_advantages: (B, T), or (N,).
        cu_seqlens: (S+1,) int32.
        config: cosmos-rl's; `config.train.train_policy` is read.
        logprob_masks: (B, T) bool.
        dp_group, ddp_comm: ranks whose tokens count under `balance_dp_token`.
        rollout_per_token_logps: (N,) or a list a sequence; given, the decoupled weights multiply the policy term.
        kwargs: `normalization_counts` of the whole minibatch.

    Raises:
        ValueError: an option that cannot be honoured, by name.
    """
    decoupled = rollout_per_token_logps is not None
    spec = policy_spec(config.train.train_policy, decoupled)
    if current_advantages.shape == logprob_masks.shape:
        current_advantages = torch.masked_select(current_advantages, logprob_masks)
    mask = torch.ones_like(current_token_logps, dtype=torch.bool)
    fields: dict[str, Any] = {
        "logp_old": old_per_token_logps,
        "logp_rollout": _flat(rollout_per_token_logps, current_token_logps) if decoupled else None,
        "cu_seqlens": cu_seqlens,
        "normalizer": _normalizer(spec, config.train.train_policy, cu_seqlens, dp_group, ddp_comm, kwargs),
        **advantages_of(spec, current_advantages, mask, cu_seqlens),
    }
    out = policy_loss(spec, current_token_logps, logp_ref=ref_per_token_logps, metrics="none", **fields)
    if not spec.has_kl:
        return out.loss, out.loss.detach(), torch.zeros_like(out.loss.detach())
    with torch.no_grad():
        plain = policy_spec(config.train.train_policy, decoupled, kl_beta=0.0)
        policy = policy_loss(plain, current_token_logps.detach(), metrics="none", **fields).loss
    return out.loss, policy, (out.loss.detach() - policy) / spec.kl_coef


def policy_spec(train_policy: Any, decoupled: bool = False, **changes: Any) -> TrainerSpec:
    """The loss of a `train_policy` section.

    Raises:
        ValueError: an option that cannot be honoured, by name.
    """
    reads = options_of()
    given = {key: getattr(train_policy, key) for key in reads if hasattr(train_policy, key)}
    given |= {"use_decoupled_loss": decoupled or bool(given.get("use_decoupled_loss"))} | changes
    said = {key: value for key, value in given.items() if key not in _ELSEWHERE and value != reads[key]}
    if said.get("behav_imp_weight_cap") is not None and not given["use_decoupled_loss"]:
        del said["behav_imp_weight_cap"]  # cosmos-rl does not read it then
    return cosmos_rl_preset(getattr(train_policy, "variant", "grpo"), **said)


def register(name: str = "fusedpg_grpo", train_policy: Any = None) -> type:
    """A `GRPOTrainer` with this loss in cosmos-rl's registry; the class.

    Raises:
        ImportError: cosmos-rl is not installed.
        ValueError: an option of `train_policy` that cannot be honoured, by name.
    """
    if train_policy is not None:
        policy_spec(train_policy)
    base: Any = import_module(_TRAINER).GRPOTrainer
    registry: Any = import_module(_REGISTRY).TrainerRegistry

    class FusedGRPOTrainer(base):
        """cosmos-rl's GRPO trainer; only the loss differs."""

        loss_fn = staticmethod(compute_loss)

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            policy_spec(config.train.train_policy)
            super().__init__(config, *args, **kwargs)

    registered: type = registry.register(name)(FusedGRPOTrainer)
    return registered


def _normalizer(
    spec: TrainerSpec, train_policy: Any, cu_seqlens: Tensor, dp_group: Any, ddp_comm: Any, more: dict[str, Any]
) -> Any:
    """cosmos-rl's denominator: rows, or tokens, of the micro-batch, of the minibatch, or of all workers."""
    counts = more.get("normalization_counts")
    if spec.reduction != "token-mean":
        return spec.normalizer(sequences=cu_seqlens.numel() - 1 if counts is None else float(counts["sequences"]))
    if counts is not None:
        return (torch.as_tensor(counts["tokens"]).float() + 1e-8) / counts["dp_workers"]
    tokens, workers = (cu_seqlens[-1] - cu_seqlens[0]).float(), 1
    if getattr(train_policy, "balance_dp_token", False):
        if dp_group is not None:
            workers *= torch.distributed.get_world_size(group=dp_group)
            torch.distributed.all_reduce(tokens, group=dp_group)
        if ddp_comm is not None:
            workers *= ddp_comm.world_size()
            ddp_comm.allreduce(tokens, tokens, op=torch.distributed.ReduceOp.SUM)
    return (tokens + 1e-8) / workers


def _flat(values: Any, like: Tensor) -> Tensor:
    """A tensor, or lists a sequence, as (N,)."""
    if not isinstance(values, Tensor):
        values = torch.tensor([value for row in values for value in row])
    return values.detach().to(like.device, like.dtype)
