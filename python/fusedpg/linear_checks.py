"""Checks of hidden states and of the output head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import validate
from .linear_plan import MIB


def check_head(hidden: Any, weight: Any, bias: Any, targets: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """(hidden, weight, bias) as plain tensors of fitting shapes on one device."""
    validate.check_targets(targets)
    hidden = _plain("hidden", hidden)
    shape = tuple(targets.shape)
    if hidden.ndim != targets.ndim + 1 or tuple(hidden.shape[:-1]) != shape or hidden.shape[-1] < 1:
        raise ValueError(
            f"hidden: expected shape {(*shape, 'D')} (targets' shape plus the hidden size); got "
            f"{tuple(hidden.shape)}; hidden[i] scores targets[i], so slice or shift both before the call"
        )
    validate.check_device("targets", targets, "hidden", hidden)
    weight = check_weight(weight, hidden)
    return hidden, weight, _check_bias(bias, weight)


def check_rows_of_hidden(hidden: Any, weight: Any, bias: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same where no targets say the shape: hidden states (N, D) or (B, T, D)."""
    hidden = _plain("hidden", hidden)
    if hidden.ndim not in (2, 3) or hidden.shape[-1] < 1:
        raise ValueError(f"hidden: expected shape (N, D) packed or (B, T, D) padded; got {tuple(hidden.shape)}")
    weight = check_weight(weight, hidden)
    return hidden, weight, _check_bias(bias, weight)


def _check_bias(bias: Any, weight: Tensor) -> Tensor | None:
    if bias is None:
        return None
    bias = _plain("bias", bias)
    if tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(
            f"bias: expected shape ({weight.shape[0]},), one value a row of weight; got {tuple(bias.shape)}"
        )
    validate.check_device("bias", bias, "weight", weight)
    return bias


def check_weight(weight: Any, hidden: Tensor) -> Tensor:
    """The output head's whole matrix (V, D)."""
    weight = _plain("weight", weight)
    if weight.numel() == 0 and getattr(weight, "ds_shape", None) is not None:
        raise ValueError(
            f"weight: expected the whole matrix; got an empty one whose parameter says {tuple(weight.ds_shape)}: "
            "ZeRO-3 keeps it elsewhere; call inside deepspeed.zero.GatheredParameters([weight]), loss and backward"
        )
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1] or weight.shape[0] < 1:
        fix = (
            "a flattened shard is not the matrix: call inside FSDP's summon_full_params, or from the model's forward"
            if weight.ndim == 1
            else "pass lm_head.weight as it is, not transposed"
        )
        raise ValueError(
            f"weight: expected shape (V, {hidden.shape[-1]}), the vocabulary by hidden's size; got "
            f"{tuple(weight.shape)}; {fix}"
        )
    validate.check_device("weight", weight, "hidden", hidden)
    return weight


def check_workspace(workspace_mib: float | None) -> int:
    """Bytes; 0 for the default."""
    if workspace_mib is None:
        return 0
    return max(1, int(validate.check_positive("workspace_mib", workspace_mib) * MIB))


def _plain(name: str, value: Any) -> Tensor:
    """A float tensor; a replicated DTensor becomes its local tensor, differentiably."""
    if isinstance(value, torch.nn.Module):
        raise TypeError(f"{name}: expected a tensor; got {type(value).__name__}; {_module_fix(value)}")
    if not isinstance(value, Tensor) or value.dtype not in validate.FLOATS:
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name}: expected a tensor of float32, bfloat16, float16 or float64; got {got}")
    placements = getattr(value, "placements", None)
    if placements is None:
        return value
    if not all(placement.is_replicate() for placement in placements):
        raise ValueError(
            f"{name}: expected a whole tensor; got a DTensor with placements {tuple(placements)}; "
            f"pass {name}.full_tensor()"
        )
    local: Tensor = value.to_local()  # type: ignore[attr-defined]
    return local


def _module_fix(module: torch.nn.Module) -> str:
    if any("lora_" in key for key, _ in module.named_parameters()):
        return (
            "it carries LoRA adapters, whose low-rank term no single matrix holds: merge them (merge_and_unload), or "
            "leave the head out of target_modules"
        )
    return "pass its .weight, and its .bias as bias"
