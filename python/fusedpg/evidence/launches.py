"""Kernel launches of any library, recorded instead of run: what the JIT would compile for them, and how often."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import triton
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from .. import dispatch, gpu
from .aot import TARGETS


@dataclass(frozen=True)
class Launch:
    """A kernel with the arguments of one launch."""

    kernel: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        """Of the kernel."""
        return str(self.kernel.__name__)

    def _bound(self, backend: Any) -> tuple[dict[str, Any], list[Any], dict[str, Any]]:
        bind = create_function_from_signature(self.kernel.signature, self.kernel.params, backend)
        return bind(*self.args, debug=False, **self.kwargs)

    def key(self, target: str) -> str:
        """What the JIT looks up before it compiles: two launches of one kernel with one key share a compilation."""
        _, specialization, options = self._bound(make_backend(TARGETS[target]))
        return f"{specialization} {options}"

    def compile(self, target: str) -> Any:
        """What the JIT would compile on that device for these arguments."""
        backend = make_backend(TARGETS[target])
        bound, specialization, options = self._bound(backend)
        packed = self.kernel._pack_args(backend, options, bound, specialization, options)
        parsed, signature, constexprs, attrs = packed
        source = ASTSource(self.kernel, signature, constexprs, attrs)
        return triton.compile(source, target=TARGETS[target], options=parsed.__dict__)


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """The launches inside, none of which runs: outputs stay uninitialised, and CPU tensors pass for a GPU's."""
    found: list[Launch] = []

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        found.append(Launch(kernel, args, kwargs))

    with (
        mock.patch.object(JITFunction, "run", note),
        mock.patch.object(dispatch, "_refuse_unfit"),
        mock.patch.object(dispatch, "unavailable", return_value=None),
        mock.patch.object(gpu, "_check_device"),
    ):
        yield found
