"""Who else computes the same, under which name the tables list them, and why one of them cannot run here."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import metadata
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

from ..certify.verl_oracle import import_environment

TORCH_CE = "F.linear_cross_entropy"
TRL_HEAD, TRL_SELECTIVE = "TRL fused head", "TRL selective_log_softmax"
LIGER_CHUNKED, LIGER_SCALED = "Liger chunked GRPO", "Liger scaled CE and PPO"
LIGER_CE, LIGER_GRPO = "Liger fused linear CE", "Liger triton_grpo_loss"
LIGER_SELECTIVE, LIGER_JSD = "Liger fused_selective_log_softmax", "LigerJSD"
LIGER_SCORE = "Liger scaled CE"
VERL_HEAD, VERL_LOGITS, VERL_KERNEL = "verl FusedLinearForPPO", "verl logprobs_from_logits", "verl linear_cross_entropy"
QUACK_CE, QUACK_LINEAR = "QuACK cross_entropy", "QuACK chunked_linear_cross_entropy"
CUT_CE = "cut-cross-entropy"


@dataclass(frozen=True)
class Rival:
    """The package that pip installs, the module that holds the function, and whether its kernels need a GPU."""

    package: str
    module: str
    gpu: bool = False


_TRL_UTILS, _LIGER_GRPO = "trl.trainer.utils", "liger_kernel.transformers.grpo_loss"
RIVALS: Mapping[str, Rival] = MappingProxyType(
    {
        TRL_HEAD: Rival("trl", "trl.kernels"),
        TRL_SELECTIVE: Rival("trl", _TRL_UTILS),
        LIGER_CHUNKED: Rival("liger-kernel", "liger_kernel.chunked_loss"),
        LIGER_SCALED: Rival("liger-kernel", "liger_kernel.ops.fused_linear_scaled_cross_entropy"),
        LIGER_SCORE: Rival("liger-kernel", "liger_kernel.ops.fused_linear_scaled_cross_entropy"),
        LIGER_CE: Rival("liger-kernel", "liger_kernel.transformers", gpu=True),
        LIGER_GRPO: Rival("liger-kernel", _LIGER_GRPO, gpu=True),
        LIGER_SELECTIVE: Rival("liger-kernel", _LIGER_GRPO, gpu=True),
        LIGER_JSD: Rival("liger-kernel", "liger_kernel.transformers", gpu=True),
        VERL_HEAD: Rival("verl", "verl.utils.experimental.torch_functional"),
        VERL_LOGITS: Rival("verl", "verl.utils.torch_functional"),
        VERL_KERNEL: Rival("verl", "verl.utils.kernel.linear_cross_entropy", gpu=True),
        QUACK_CE: Rival("quack-kernels", "quack.cross_entropy", gpu=True),
        QUACK_LINEAR: Rival("quack-kernels", "quack.linear_cross_entropy", gpu=True),
        CUT_CE: Rival("cut-cross-entropy", "cut_cross_entropy", gpu=True),
    }
)


def why_not(name: str, device: torch.device) -> str | None:
    """Why a rival is not among the rows; None when it is. Who is not listed in `RIVALS` comes with torch."""
    if name == TORCH_CE and not hasattr(F, "linear_cross_entropy"):
        return f"{name}: not run, PyTorch {torch.__version__} has none"
    rival = RIVALS.get(name)
    if rival is None:
        return None
    installed = version(rival.package)
    if installed is None:
        gpu = " and needs a GPU" if rival.gpu and device.type != "cuda" else ""
        return f"{name}: not run, {rival.package} is not installed{gpu}"
    if rival.gpu and device.type != "cuda":
        return (
            f"{name}: not run, the kernels of {rival.package} {installed} need a GPU; the tensors are on {device.type}"
        )
    try:
        load(name)
    except Exception as error:  # whatever their modules raise where something that they need is missing
        return f"{name}: not run, {rival.package} {installed} cannot be imported: {type(error).__name__}: {error}"
    return None


def runs(name: str, device: torch.device) -> bool:
    """Whether a rival is among the rows."""
    return why_not(name, device) is None


def absent(names: Iterable[str], device: torch.device) -> list[str]:
    """A line for each rival that is not among the rows."""
    return [reason for name in names if (reason := why_not(name, device)) is not None]


def load(name: str) -> Any:
    """A rival's module."""
    return import_quietly(RIVALS[name].module)


def import_quietly(module: str) -> Any:
    """A module of someone else's package; they and what they import warn about optional packages.

    verl's are imported as `parity` imports them: without plugins, and with Ray stubbed where it is not installed.
    """
    surroundings = import_environment() if module.startswith("verl.") else nullcontext()
    with surroundings, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(module)


def version(package: str) -> str | None:
    """Of an installed distribution; None where there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """The installed version of every package of a rival; None where it is not installed."""
    return {package: version(package) for package in sorted({rival.package for rival in RIVALS.values()})}
