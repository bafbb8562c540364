"""Where these tests run: on the GPU, marked `gpu`, and in Triton's interpreter where that is cheap."""

import os

import pytest
import torch

# one workspace a stream: without it cuBLAS may choose another algorithm when several streams are busy
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

GPU = pytest.param("gpu", marks=pytest.mark.gpu)


@pytest.fixture(params=[GPU, "interpreted"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The GPU, or the CPU under Triton's interpreter."""
    if request.param == "gpu":
        return torch.device("cuda", torch.cuda.current_device())
    if torch.cuda.is_available():
        pytest.skip("the kernels are compiled for the GPU here, not interpreted")
    return torch.device("cpu")


@pytest.fixture
def gpu() -> torch.device:
    """The GPU, for tests of what an interpreter does not have; they are marked `gpu`."""
    return torch.device("cuda", torch.cuda.current_device())
