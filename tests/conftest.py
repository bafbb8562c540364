"""Backends under test. Without a GPU the Triton kernels run in the interpreter, which must be chosen before import."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # one worker a core already; spinning OpenMP threads would only get in their way

import pytest

from fusedpg import dispatch


def _speed_up_interpreter() -> None:
    """Patch `triton.language` once a launch instead of once for every call of a device function.

    The repeated patching is more than half of the interpreter's time; the patches themselves stay the same.
    """
    import types

    import triton.language as tl
    from triton.runtime import interpreter

    whole_language = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    patch = interpreter._patch_lang
    interpreter._patch_lang = lambda fn: patch(whole_language)
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)


if os.environ.get("TRITON_INTERPRET") == "1":
    _speed_up_interpreter()

#: native backends that run on this machine, on the device that `backend_device` names
NATIVE = ("cpu", "triton")


@pytest.fixture(params=["reference", *NATIVE])
def backend(request: pytest.FixtureRequest) -> str:
    """Every backend, the reference included."""
    return _available(request.param)


@pytest.fixture(params=NATIVE)
def native_backend(request: pytest.FixtureRequest) -> str:
    """The compiled core and the Triton kernels."""
    return _available(request.param)


def _available(name: str) -> str:
    if name != "reference":
        reason = dispatch.unavailable(name)
        assert reason is None, f"the {name} backend must run on a test machine: {reason}"
    return name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped, in the open, on a machine without one."""
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA or ROCm device")
        for item in items:
            if item.get_closest_marker("gpu"):  # not its keywords, in which a folder of that name counts
                item.add_marker(skip)
