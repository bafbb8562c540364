"""Tensors made inside a test lie where its backend runs."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def backend_tensors(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make CUDA the default device of Triton tests on a machine that has one."""
    name = request.node.callspec.params.get("backend") if hasattr(request.node, "callspec") else None
    on_gpu = torch.cuda.is_available() and (name == "triton" or "gpu" in request.keywords)
    if not on_gpu:
        yield
        return
    with torch.device("cuda"):
        yield
