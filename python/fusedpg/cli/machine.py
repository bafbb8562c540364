"""What a measurement was taken on and with: printed under every table and kept in its JSON."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

import fusedpg
from fusedpg import dispatch

from . import availability


def describe(device: torch.device) -> dict[str, Any]:
    """Processor, instruction set of the compiled core, threads, versions."""
    return {
        "fusedpg": fusedpg.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": availability.version("triton"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_model(),
        "isa": _isa(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "backend": dispatch.resolve("auto", device, torch.float32),
        "packages": availability.versions(),
    }


def one_line(machine: dict[str, Any]) -> str:
    """The same for people."""
    device = machine["cpu"] if machine["device"] == "cpu" else machine["device"]
    return (
        f"{device}, {machine['threads']} threads, core built for {machine['isa']}, fusedpg {machine['fusedpg']} "
        f"(backend {machine['backend']}), torch {machine['torch']}, Python {machine['python']}"
    )


def _isa() -> str:
    reason = dispatch.unavailable("cpu")
    return "not built" if reason is not None else str(dispatch.native("cpu").isa())


def cpu_model() -> str:
    """The processor, as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    fields = dict(part for line in lines if len(part := [p.strip() for p in line.split(":", 1)]) == 2)
    name = fields.get("model name", platform.processor())
    if "model" in fields:
        name += f" (family {fields.get('cpu family')} model {fields['model']})"
    return str(name)
