"""Tensors made inside a test lie where its backend runs."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def backend_tensors(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make CUDA the default device of Triton tests on a machine that has one."""
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    named = {params.get("backend"), params.get("native_backend")}
    on_gpu = torch.cuda.is_available() and ("triton" in named or "gpu" in request.keywords)
    if not on_gpu:
        yield
        return
    with torch.device("cuda"):
        yield
