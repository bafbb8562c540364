"""The in-place rescaling of a gradient: exact, inside its tensor, and free for factor 1."""

import pytest
import torch

from fusedpg import gpu
from fusedpg.evidence.global_traffic import GlobalTraffic
from support import backend_device


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 5, 64, 1001])
def test_rescale(dtype: torch.dtype, vocab: int):
    device = backend_device("triton")
    base = torch.randn(2, 4, vocab + 3, device=device).to(dtype)
    before = base.clone()
    gpu.rescale_(base[:, :-1, :vocab], torch.tensor(-0.5, device=device))  # a power of two: exact in every dtype
    want = before.clone()
    want[:, :-1, :vocab] *= -0.5
    assert torch.equal(base, want)


def test_factor_one_moves_nothing():
    if backend_device("triton").type != "cpu":
        pytest.skip("traffic is counted in the interpreter")
    grad, factor = torch.randn(1, 3, 77), torch.ones(())
    with GlobalTraffic(grad=grad, factor=factor) as traffic:
        gpu.rescale_(grad, factor)
    assert traffic.read("factor") > 0
    assert traffic.read("grad") == traffic.written("grad") == 0
    assert not traffic.outside
