"""One check for each invariant of the arguments: the error names the argument, what was expected, what came, the fix.

Checks that read values would stall a GPU queue or break a traced graph, so `reads_values` decides where they run:
always for CPU tensors, on other devices only with `FUSEDPG_DEBUG=1`, never while compiling or on fake tensors.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def reads_values(tensor: Tensor) -> bool:
    """Whether a check may look at the values of `tensor`."""
    if torch.compiler.is_compiling() or isinstance(tensor, FakeTensor):
        return False
    return tensor.device.type == "cpu" or os.environ.get("FUSEDPG_DEBUG") == "1"


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def check_targets(targets: Tensor) -> None:
    """`targets` is an integer tensor (N,) or (B, T)."""
    if not isinstance(targets, Tensor):
        raise TypeError(f"targets: expected an integer tensor; got {type(targets).__name__}")
    if targets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"targets: expected int32 or int64 token ids; got {targets.dtype}; cast with .long()")
    if targets.ndim not in (1, 2):
        raise ValueError(f"targets: expected shape (N,) packed or (B, T) padded; got {_shape(targets)}")


def check_logits(logits: Tensor, targets: Tensor) -> None:
    """`logits` is floating, has the shape of `targets` plus V >= 1, on the same device."""
    if not isinstance(logits, Tensor) or logits.dtype not in FLOATS:
        got = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
        raise TypeError(f"logits: expected a tensor of float32, bfloat16, float16 or float64; got {got}")
    if logits.ndim != targets.ndim + 1 or logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"logits: expected shape {(*_shape(targets), 'V')} (targets' shape plus the vocabulary); "
            f"got {_shape(logits)}; logits[i] scores targets[i], so slice or shift both before the call"
        )
    if logits.shape[-1] < 1:
        raise ValueError(f"logits: expected a vocabulary of at least 1; got {_shape(logits)}")
    check_device("targets", targets, "logits", logits)


def check_device(name: str, tensor: Tensor, other: str, base: Tensor) -> None:
    """`tensor` lies on the device of `base`."""
    if tensor.device != base.device:
        raise ValueError(
            f"{name}: expected device {base.device} (that of {other}); got {tensor.device}; move it with .to()"
        )


def check_per_token(name: str, tensor: Any, base_name: str, base: Tensor, shape: tuple[int, ...]) -> None:
    """`tensor` has exactly the per-token shape: nothing is broadcast."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor of shape {shape}; got {type(tensor).__name__}")
    if _shape(tensor) != shape:
        raise ValueError(
            f"{name}: expected shape {shape} (one value a token, like {base_name}); got {_shape(tensor)}; nothing is "
            "broadcast: expand it explicitly, or pass per-sequence values through sequence_advantages"
        )
    if tensor.is_complex():
        raise TypeError(f"{name}: expected real numbers; got {tensor.dtype}")
    check_device(name, tensor, base_name, base)


def check_mask_values(name: str, mask: Tensor) -> None:
    """A float mask holds weights in [0, 1]; anything else is most likely another argument in the wrong place."""
    if mask.dtype == torch.bool or mask.numel() == 0 or not reads_values(mask):
        return
    low, high = (v.item() for v in torch.aminmax(mask.float()))
    if not (low >= 0 and high <= 1):
        raise ValueError(
            f"{name}: expected weights in [0, 1] (bool, or float with 0 = masked); got values from {low:g} to "
            f"{high:g}; check that advantages or another tensor was not passed in its place"
        )


def check_target_range(targets: Tensor, selected: Tensor | None, vocab: int) -> None:
    """Every unmasked target is an id of the vocabulary; masked ones may hold anything (-100)."""
    if targets.numel() == 0 or not reads_values(targets):
        return
    low, high = torch.aminmax(targets)
    if low >= 0 and high < vocab:
        return
    bad = (targets < 0) | (targets >= vocab)
    if selected is not None:
        bad &= selected
    if bad.any():
        where = bad.nonzero()[0].tolist()
        raise ValueError(
            f"targets: expected ids in [0, {vocab}) at unmasked places; got {int(targets[tuple(where)])} at index "
            f"{where}; mask ignored tokens out with `mask`"
        )


def check_cu_seqlens(cu_seqlens: Tensor, targets: Tensor, base_name: str) -> None:
    """`cu_seqlens` is (S+1,) int32/int64, starts at 0, never falls, ends at N; only packed input takes it."""
    if targets.ndim != 1:
        raise ValueError(
            f"cu_seqlens: expected None for padded input {_shape(targets)} (each row is a sequence); got a tensor; "
            "flatten the batch to (N,) to pass packed sequences"
        )
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens: expected int32 or int64 of shape (S+1,); got {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.ndim != 1 or cu_seqlens.numel() < 1:
        raise ValueError(
            f"cu_seqlens: expected int32 or int64 of shape (S+1,); got {cu_seqlens.dtype} {_shape(cu_seqlens)}"
        )
    check_device("cu_seqlens", cu_seqlens, base_name, targets)
    if not reads_values(cu_seqlens):
        return
    n = targets.numel()
    if cu_seqlens[0] != 0 or cu_seqlens[-1] != n or bool((cu_seqlens.diff() < 0).any()):
        raise ValueError(
            f"cu_seqlens: expected 0 = cu[0] <= cu[1] <= ... <= cu[-1] = {n}; got {cu_seqlens.tolist()[:8]}"
            f"{'...' if cu_seqlens.numel() > 8 else ''}; build it as cumsum of the sequence lengths with a leading 0"
        )


def check_sequence_values(name: str, values: Tensor, sequences: int, base: Tensor) -> None:
    """One value a sequence, (S,)."""
    if not isinstance(values, Tensor) or _shape(values) != (sequences,):
        got = _shape(values) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"{name}: expected shape ({sequences},), one value a sequence; got {got}")
    check_device(name, values, "the batch", base)


def check_positive(name: str, value: float, *, zero_ok: bool = False) -> float:
    """A finite number > 0 (or >= 0)."""
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and -math.inf < value < math.inf
    if not ok or value < 0 or (value == 0 and not zero_ok):
        fix = (
            "; greedy rollouts have no tempered distribution: use the temperature of the policy"
            if name == "temperature"
            else ""
        )
        raise ValueError(f"{name}: expected a finite number {'>=' if zero_ok else '>'} 0; got {value!r}{fix}")
    return float(value)


def check_temperature(temperature: Any, base: Tensor) -> None:
    """A finite number > 0, or a tensor of such numbers with one value a token."""
    if not isinstance(temperature, Tensor):
        check_positive("temperature", temperature)
        return
    check_per_token("temperature", temperature, "targets", base, _shape(base))
    if temperature.numel() and reads_values(temperature):
        low, high = (v.item() for v in torch.aminmax(temperature.float()))
        if not (low > 0 and math.isfinite(high)):
            raise ValueError(f"temperature: expected finite numbers > 0; got values from {low:g} to {high:g}")


def check_inplace(logits: Tensor) -> None:
    """In-place gradients need a non-leaf whose elements are its own."""
    if torch.compiler.is_compiling():
        raise ValueError(
            "inplace: expected False under torch.compile, which plans memory itself; got True; drop the option"
        )
    if logits.requires_grad and logits.is_leaf:
        raise ValueError(
            "inplace: expected logits computed by an operation; got a leaf that requires grad, whose values the "
            "gradient would overwrite; pass inplace=False"
        )
    sizes = [(stride, size) for stride, size in zip(logits.stride(), logits.shape, strict=True) if size > 1]
    sizes.sort()
    reach = 1
    for stride, size in sizes:
        if stride < reach:
            raise ValueError(
                f"inplace: expected logits whose elements do not share memory; got strides {logits.stride()} for shape "
                f"{_shape(logits)}; pass inplace=False or a contiguous copy"
            )
        reach = stride * (size - 1) + reach
    if logits.shape[-1] > 1 and logits.stride(-1) != 1:
        raise ValueError(
            f"inplace: expected unit stride along the vocabulary; got strides {logits.stride()}; pass inplace=False"
        )
