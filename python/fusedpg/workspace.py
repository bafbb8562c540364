"""Memory of the path from hidden states: how much a call may take, and the tile of logits that CPU calls hand on.

A GPU's allocator keeps what is freed. A CPU's gives it back, and taking it anew costs a fault a page: for a tile of
151,936 columns half the time of a matrix product. So the tile of one call is kept for the next.
"""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from . import dispatch
from .linear_plan import MIB, LinearShape, whole_rows_workspace

#: at most one buffer; a list, because its methods are atomic: no two calls are ever handed the same one
_kept: list[Tensor] = []


def default_workspace(device: torch.device, shape: LinearShape) -> int:
    """Bytes: an eighth of the free memory, down to a power of two, within 64 MiB and 512 MiB (2 GiB on a GPU).

    At least what whole rows take, so that a row's bits do not follow the free memory.
    """
    most = 512 * MIB if device.type == "cpu" else 2048 * MIB
    share = max(64 * MIB, min(most, 1 << max(0, (free_memory(device) // 8).bit_length() - 1)))
    return max(share, whole_rows_workspace(shape))


def free_memory(device: torch.device) -> int:
    """Bytes that the system (or the GPU's driver) would still hand out, and what is kept here."""
    if device.type != "cpu":
        return int(torch.get_device_module(device.type).mem_get_info(device)[0])
    kept = sum(buffer.nbytes for buffer in _kept)
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024 + kept
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def lent(owner: object, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory for as long as `owner` lives; on a CPU what an earlier call has left, where it is enough."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    buffer = _taken()
    if buffer is None or buffer.nbytes < size:
        del buffer  # before its successor is allocated
        with torch.inference_mode(False):  # a later call may be outside of it
            buffer = dispatch.native("cpu").want_huge_pages(torch.empty(size, dtype=torch.uint8))
    weakref.finalize(owner, _keep, buffer).atexit = False
    return buffer[:size].view(dtype).view(*shape)


def release_workspace() -> int:
    """Give the tile of logits that CPU calls keep for the next one back to the system.

    From hidden states, a call on a CPU leaves its tile, at most `workspace_mib`, to the next call, as GPU allocators
    do; like `torch.cuda.empty_cache()`, this frees it. Call it before a phase without any loss that needs the memory.

    Returns:
        Bytes given back, 0 where nothing was kept.
    """
    buffer = _taken()
    return 0 if buffer is None else buffer.nbytes


def _taken() -> Tensor | None:
    with contextlib.suppress(IndexError):
        return _kept.pop()
    return None


def _keep(buffer: Tensor) -> None:
    """The larger of this and what another call has left."""
    other = _taken()
    _kept.append(buffer if other is None or other.nbytes < buffer.nbytes else other)
    while len(_kept) > 1:  # calls of several threads have ended at once
        _taken()
