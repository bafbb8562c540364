"""Backends under test. Without a GPU the Triton kernels run in the interpreter, which must be chosen before import."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # one worker a core already; spinning OpenMP threads would only get in their way

import pytest

from fusedpg import dispatch
from fusedpg.evidence import fast_interpreter

if os.environ.get("TRITON_INTERPRET") == "1":
    fast_interpreter.speed_up()

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
