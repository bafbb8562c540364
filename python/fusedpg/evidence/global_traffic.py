"""Count the global memory traffic of Triton kernels in the interpreter, by tensor.

`GlobalTraffic` hooks the interpreter's only ways to memory (masked loads, masked stores, atomics) and books the bytes
of active lanes to the named tensors. That is the DRAM traffic of a kernel whose re-reads all miss; the count of touched
32-byte sectors is the traffic when they all hit. An access outside every named tensor is kept in `outside`.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable
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
        self._launch: dict[tuple[str, str], set[int]] = defaultdict(set)  # of the running launch
        self._finished: Counter[tuple[str, str]] = Counter()  # sectors of all launches that ended
        self.outside: list[tuple[str, list[int]]] = []
        self._naming: Callable[[int], str] | None = None
        self._kept: list[Any] = []  # storages named on the way: no address is given to a second one

    def naming(self, name: Callable[[int], str]) -> GlobalTraffic:
        """Name every other memory that a launch gets, too, by its bytes."""
        self._naming = name
        return self

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

    def at_best(self, operation: str, name: str) -> int:
        """Bytes when every re-read of a launch hits a cache and nothing stays cached for the next launch."""
        return (self._finished[operation, name] + len(self._launch[operation, name])) * SECTOR

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
                touched = np.unique(address[inside] // np.uint64(SECTOR)).tolist()
                self.sectors[operation, name].update(touched)
                self._launch[operation, name].update(touched)
                address = address[~inside]
        if address.size:
            self.outside.append((operation, address.tolist()))

    def __enter__(self) -> GlobalTraffic:
        self._stack = contextlib.ExitStack()
        builder = type(interpreter.interpreter_builder)
        # plain loads and stores end in the masked ones
        self._hook(builder, "create_masked_load", lambda a: self._note("load", a[0], a[1]))
        self._hook(builder, "create_masked_store", lambda a: self._note("store", a[0], a[2]))
        self._hook(builder, "create_atomic_rmw", lambda a: self._note("atomic", a[1], a[3]))
        self._hook(builder, "create_atomic_cas", lambda a: self._note("atomic", a[0], None))
        self._hook(interpreter.GridExecutor, "__call__", self._begin_launch)
        return self

    def _hook(self, owner: type, method: str, note: Callable[[tuple[Any, ...]], None]) -> None:
        original = getattr(owner, method)

        def noted(this: Any, *args: Any, **kwargs: Any) -> Any:
            note((*args, *kwargs.values()))
            return original(this, *args, **kwargs)

        setattr(owner, method, noted)
        self._stack.callback(setattr, owner, method, original)

    def _begin_launch(self, arguments: tuple[Any, ...]) -> None:
        for key, sectors in self._launch.items():
            self._finished[key] += len(sectors)
        self._launch.clear()
        for tensor in arguments if self._naming else ():
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                low, high = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
                if not any(low < end and start < high for _, start, end in self.ranges):
                    self._kept.append(storage)
                    self.ranges.append((self._naming(high - low), low, high))  # type: ignore[misc]

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
