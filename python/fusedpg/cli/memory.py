"""Peak memory of one call, as the operating system (or the CUDA allocator) saw it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fusedpg.workspace import release_workspace

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")

HOW = {
    "cpu": "rise of the process's peak resident memory (VmHWM, reset before the call), all native scratch included",
    "cuda": "torch.cuda.max_memory_allocated above what was allocated before the call",
}


def peak_extra_bytes(call: Callable[[], Any], device: torch.device) -> int | None:
    """How far memory rose above its level before `call`; None where the system offers no such count."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        torch.cuda.synchronize(device)
        del result
        return int(torch.cuda.max_memory_allocated(device)) - before
    release_workspace()  # what earlier calls have kept counts for this one
    try:
        _trim()
        _RESET.write_text("5")
        before = _kib("VmRSS:")
        result = call()
        peak = _kib("VmHWM:")
    except OSError:
        return None
    del result
    return max(0, peak - before) * 1024


def _trim() -> None:
    """Hand free heap pages back, so that the call cannot reuse them uncounted."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _kib(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    raise OSError(f"{_STATUS} has no {field}")
