"""Bytes that the distillation kernels move, counted in the interpreter."""

import os

import pytest
import torch

from fusedpg import gpu
from fusedpg.axes import Divergence
from fusedpg.evidence.global_traffic import GlobalTraffic
from fusedpg.kernels import launch

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="counts in Triton's interpreter")

N, V = 4, 1003  # odd: every row has another alignment
MASKED = 2


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(launch, "PAIRS", launch.Shape(block=256, threads=64, chunk=512))


def traffic_of(kind, grad, dtypes=(torch.bfloat16, torch.bfloat16), scale=0.5):
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2, N // 2, V, generator=g).to(dtype) for dtype in dtypes)
    w, scale = torch.ones(N), torch.tensor(scale)
    w[MASKED] = 0.0
    out = torch.full_like(x, torch.nan) if grad else None
    named = {"student": x, "teacher": y, "w": w, "scale": scale} | ({"out": out} if grad else {})
    with GlobalTraffic(**named).naming(lambda size: "rows") as traffic:
        gpu.distill(x, y, w, scale, int(kind), 0.3, 0.7, 1.3, out)
    assert traffic.outside == []
    assert not traffic.touched("student", x.view(N, V)[MASKED])
    assert not traffic.touched("teacher", y.view(N, V)[MASKED])
    return traffic, out


def sweeps(amount, element):
    """Reads of the whole logits of the rows that are wanted."""
    return amount / ((N - 1) * V * element)


@pytest.mark.parametrize("grad", [False, True], ids=["value", "gradient"])
@pytest.mark.parametrize("kind", list(Divergence), ids=lambda k: k.name.lower())
def test_each_sweep_reads_both_once(kind, grad):
    """A KL needs one sweep, jsd two, and the gradient one more; each logit comes from memory once, edges never twice."""
    traffic, out = traffic_of(kind, grad)
    count = 1 + (kind == Divergence.JSD) + grad
    for name in ("student", "teacher"):
        assert count - 0.06 < sweeps(traffic.read(name), 2) <= count
        assert sweeps(traffic.unique("load", name), 2) == pytest.approx(1.0, abs=0.06)  # neighbours share sectors
    if grad:
        assert traffic.written("out") == N * V * 2
        assert out.isfinite().all()
        assert (out.view(N, V)[MASKED] == 0).all()


def test_mixed_dtypes_read_what_they_hold():
    traffic, _ = traffic_of(Divergence.FORWARD_KL, True, (torch.bfloat16, torch.float32))
    assert sweeps(traffic.read("student"), 2) == pytest.approx(2.0, abs=0.06)
    assert sweeps(traffic.read("teacher"), 4) == pytest.approx(2.0, abs=0.06)


def test_an_upstream_gradient_of_zero_reads_the_rows_once():
    traffic, out = traffic_of(Divergence.REVERSE_KL, True, scale=0.0)
    assert sweeps(traffic.read("student"), 2) == pytest.approx(1.0)
    assert (out == 0).all()
