"""Which backend runs a call: `triton`, `cpu` or `reference`. A backend named explicitly runs or raises."""

from __future__ import annotations

import importlib
import os
import warnings
from functools import cache
from types import ModuleType

import torch

BACKENDS = ("auto", "cpu", "triton", "reference")
_MODULES = {"cpu": "fusedpg.cpu", "triton": "fusedpg.gpu"}
_GPU_TYPES = ("cuda", "xpu")


def unavailable(backend: str) -> str | None:
    """Why a native backend cannot run in this environment, with the fix; None when it can."""
    return _unavailable(backend)


# what torch.compiler.assume_constant_result sets; the decorator itself imports torch._dynamo, and with it Triton
unavailable._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _unavailable(backend: str) -> str | None:
    try:
        module = importlib.import_module(_MODULES[backend])
        module.ensure_available()
    except ImportError as error:
        return str(error)
    return None


def native(backend: str) -> ModuleType:
    """The module with the four functions of a native backend."""
    return importlib.import_module(_MODULES[backend])


def resolve(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """The backend for tensors on `device` of `dtype`.

    `auto` (or the environment variable `FUSEDPG_BACKEND`) picks triton for CUDA, ROCm and XPU tensors, cpu for CPU
    tensors, and the reference elsewhere or, with one warning, where the native kernel is not available.
    """
    name, origin = backend, "backend"
    if backend == "auto" and os.environ.get("FUSEDPG_BACKEND"):
        name, origin = os.environ["FUSEDPG_BACKEND"], "FUSEDPG_BACKEND"
    if name not in BACKENDS:
        raise ValueError(f"{origin}: expected one of {', '.join(BACKENDS)}; got {name!r}")
    if name == "reference":
        return name
    if name == "auto":
        return _automatic(device, dtype)
    _refuse_unfit(name, origin, device, dtype)
    reason = unavailable(name)
    if reason is not None:
        raise RuntimeError(f"{origin}: {name!r} cannot run here: {reason}")
    return name


def _automatic(device: torch.device, dtype: torch.dtype) -> str:
    name = "triton" if device.type in _GPU_TYPES else "cpu" if device.type == "cpu" else "reference"
    if name == "triton" and dtype == torch.float64:
        return "reference"
    if name != "reference" and unavailable(name) is not None:
        _warn_once(name)
        return "reference"
    return name


@cache
def _warn_once(name: str) -> None:
    warnings.warn(
        f"fusedpg: the {name} backend cannot run here, so the PyTorch reference runs instead (slower, more memory): "
        f"{unavailable(name)}",
        RuntimeWarning,
        stacklevel=4,
    )


def _refuse_unfit(name: str, origin: str, device: torch.device, dtype: torch.dtype) -> None:
    if name == "cpu" and device.type != "cpu":
        raise ValueError(f"{origin}: 'cpu' expects CPU tensors; got {device}; use 'auto' or move the tensors")
    if name == "triton":
        if dtype == torch.float64:
            raise ValueError(f"{origin}: 'triton' computes in float32; got {dtype}; use 'reference' or cast the input")
        if device.type not in _GPU_TYPES and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(
                f"{origin}: 'triton' expects tensors on a GPU; got {device}; use 'auto', or set TRITON_INTERPRET=1 "
                "before the first import to run the kernels in the interpreter"
            )
