"""What `doctor` finds on the machine: versions, environment, processor and threads, memory, accelerator."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

import fusedpg
from fusedpg import dispatch
from fusedpg.linear_plan import MIB, plan_linear
from fusedpg.linear_walk import Head
from fusedpg.workspace import default_workspace, free_memory

from .availability import version
from .machine import cpu_model

TRAINERS = ("trl", "verl", "liger-kernel", "transformers", "peft")
COMMAND_LINE = ("typer", "rich", "matplotlib")
#: read at run time; FUSEDPG_NO_NATIVE is read by the build
VARIABLES = (
    "FUSEDPG_BACKEND",
    "FUSEDPG_CPU_ISA",
    "FUSEDPG_DEBUG",
    "FUSEDPG_VERL_REPLACE",
    "FUSEDPG_NO_NATIVE",
    "TRITON_INTERPRET",
    "OMP_NUM_THREADS",
)
#: the head that the default workspace is quoted for
VOCAB, WIDTH = 151_936, 4096


def collect(core: bool) -> dict[str, dict[str, Any]]:
    """Every fact by part; `core` says whether the compiled core works."""
    return {
        "versions": _versions(),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "cpu": _processor(core),
        "memory": _memory(),
        "gpu": _gpu(),
    }


def triton_version() -> str | None:
    """None where Triton is not installed, or cannot be imported."""
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


def accelerator() -> str:
    """The device whose tensors the compiled Triton kernels take."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "none" if found is None else found.type


def _versions() -> dict[str, str | None]:
    return {
        "fusedpg": fusedpg.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version(),
        "numpy": version("numpy"),
        **{name: version(name) for name in (*COMMAND_LINE, *TRAINERS)},
    }


def _processor(core: bool) -> dict[str, Any]:
    native = dispatch.native("cpu") if dispatch.unavailable("cpu") is None else None
    return {
        "model": cpu_model(),
        "available builds": None if native is None else native.available_isas(),
        "chosen build": native.isa() if native is not None and core else None,
        "compiler of the core": _compiler(),
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch threads": torch.get_num_threads(),
        "OpenMP": "yes" if torch.backends.openmp.is_available() else "no",
    }


def _compiler() -> str | None:
    """What the compiled core was built with, as its compiler noted it in the file; None without a core or a note."""
    for path in Path(fusedpg.__file__).parent.glob("_core*.so"):
        note = re.search(rb"GCC: \([^)]*\) [\d.]+|clang version [\d.]+", path.read_bytes())
        if note:
            return note.group().decode().replace(":", "")
    return None


def _memory() -> dict[str, Any]:
    """Free memory and what the op from hidden states takes of it by default."""
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    facts: dict[str, Any] = {}
    for device in devices:
        try:
            facts[f"{device.type} free"] = f"{free_memory(device) / 2**30:.1f} GiB"
            facts[f"{device.type} workspace, hidden states"] = _workspace(device)
        except RuntimeError as error:  # a GPU that is full, or that this torch has no code for
            facts[f"{device.type} cannot be used"] = str(error)
    return facts


def _workspace(device: torch.device) -> str:
    """The default, and the chunks that it buys at a large head."""
    one = torch.empty((), dtype=torch.bfloat16, device=device)
    shape = Head(one.expand(1, 1, WIDTH), one.expand(VOCAB, WIDTH), None).shape(True, True)
    workspace = default_workspace(device, shape)
    rows = plan_linear(shape, workspace).rows
    return f"{workspace // MIB} MiB: chunks of {rows} rows at V = {VOCAB}, D = {WIDTH}, bf16"


def _gpu() -> dict[str, Any]:
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        return {"none": "torch sees no GPU" if built else "this torch is built without CUDA and ROCm"}
    facts: dict[str, Any] = {"driver": _driver(), "runtime": f"CUDA {torch.version.cuda}"}
    if torch.version.hip:
        facts["runtime"] = f"ROCm {torch.version.hip}"
    for index in range(torch.cuda.device_count()):
        one = torch.cuda.get_device_properties(index)
        facts[f"cuda:{index}"] = (
            f"{one.name}, capability {one.major}.{one.minor}, {one.multi_processor_count} multiprocessors, "
            f"{one.total_memory / 2**30:.0f} GiB"
        )
    return facts


def _driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return found.group() if found else None
