"""Count the global memory traffic of Triton kernels in the interpreter, by tensor.

`GlobalTraffic` hooks the interpreter's only ways to memory (masked loads, masked stores, atomics) and books the bytes
of active lanes to the named tensors. That is the DRAM traffic of a kernel whose re-reads all miss; the count of touched
32-byte sectors is the traffic when they all hit. An access outside every named tensor is kept in `outside`.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from typing import Any

import numpy as np
from torch import Tensor
from triton.runtime import interpreter

SECTOR = 32


class GlobalTraffic(contextlib.AbstractContextManager["GlobalTraffic"]):
    """`with GlobalTraffic(logits=x, out=g) as traffic: ...`, then `traffic.read("logits")`."""

    def __init__(self, **tensors: Tensor) -> None:
        self.ranges: list[tuple[str, int, int]] = []
        for name, tensor in tensors.items():
            self.name(name, tensor)
        self.bytes: Counter[tuple[str, str]] = Counter()  # (operation, tensor) -> active-lane bytes
        self.sectors: dict[tuple[str, str], set[int]] = defaultdict(set)
        self.outside: list[tuple[str, list[int]]] = []

    def name(self, name: str, tensor: Tensor) -> None:
        """Give a tensor's memory a name; a view's is the span from its first to its last element."""
        if tensor.numel():
            last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            self.ranges.append((name, start, start + (last + 1) * tensor.element_size()))

    def read(self, name: str) -> int:
        """Bytes loaded, every load counted."""
        return self.bytes["load", name]

    def written(self, name: str) -> int:
        """Bytes stored."""
        return self.bytes["store", name]

    def unique(self, operation: str, name: str) -> int:
        """Bytes of the distinct sectors touched by "load" or "store"."""
        return len(self.sectors[operation, name]) * SECTOR

    def touched(self, name: str, part: Tensor) -> bool:
        """Whether a sector that lies wholly inside `part` was loaded or stored."""
        low = -(-part.data_ptr() // SECTOR)
        high = (part.data_ptr() + part.numel() * part.element_size()) // SECTOR
        return any(low <= s < high for operation in ("load", "store") for s in self.sectors[operation, name])

    def _note(self, operation: str, pointers: Any, mask: Any) -> None:
        size = np.dtype(interpreter._get_np_dtype(pointers.get_element_ty())).itemsize
        address = np.asarray(pointers.data).astype(np.uint64).ravel()
        if mask is not None:
            address = address[np.broadcast_to(np.asarray(mask.data, bool), np.asarray(pointers.data).shape).ravel()]
        for name, low, high in self.ranges:
            inside = (address >= low) & (address + np.uint64(size) <= high)
            if inside.any():
                self.bytes[operation, name] += int(inside.sum()) * size
                self.sectors[operation, name].update(np.unique(address[inside] // np.uint64(SECTOR)).tolist())
                address = address[~inside]
        if address.size:
            self.outside.append((operation, address.tolist()))

    def __enter__(self) -> GlobalTraffic:
        builder = type(interpreter.interpreter_builder)
        self._stack = contextlib.ExitStack()

        def hook(method: str, operation: str, pointer: int, mask: int | None) -> None:
            original = getattr(builder, method)

            def noted(this: Any, *args: Any, **kwargs: Any) -> Any:
                self._note(operation, args[pointer], None if mask is None else args[mask])
                return original(this, *args, **kwargs)

            setattr(builder, method, noted)
            self._stack.callback(setattr, builder, method, original)

        # plain loads and stores end in the masked ones
        hook("create_masked_load", "load", 0, 1)
        hook("create_masked_store", "store", 0, 2)
        hook("create_atomic_rmw", "atomic", 1, 3)
        hook("create_atomic_cas", "atomic", 0, None)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
