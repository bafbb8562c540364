"""Peak memory of every operation stays within what it promises, as PyTorch's allocator counts it."""

import pytest
import torch
from workloads import NAMES, Size, make

import fusedpg
from fusedpg import linear_ops
from fusedpg.cli.memory import peak_extra_bytes
from fusedpg.linear_plan import MIB

pytestmark = pytest.mark.gpu

LARGE = Size(8, 256, 151_936)
#: bytes a row for statistics, streams, weights and sums over the batch
ROW = 1024
#: what the allocator rounds a large block up by, a few blocks
ROUNDING = 8 * MIB
#: an operation's own matrices of the logits' size: its gradient
GRADIENTS = {"scoring": 0, "from log-probs": 0}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("hidden")])
def test_no_more_than_the_gradient(name: str, dtype: torch.dtype, gpu: torch.device):
    """Of the logits' size there is one matrix, and none where no gradient is asked for."""
    work = make(name, gpu, LARGE, dtype)
    work.call()
    extra = peak_extra_bytes(work.call, gpu)
    logits = LARGE.rows * LARGE.vocab * dtype.itemsize
    # the in-place workload copies its logits first: that copy becomes the gradient
    promised = GRADIENTS.get(name, 1) * logits + ROW * LARGE.rows + ROUNDING
    assert extra <= promised, f"{extra / MIB:.1f} MiB, promised {promised / MIB:.1f} (logits {logits / MIB:.1f})"


def test_entropy_and_metrics_cost_rows_only(gpu: torch.device):
    work = make("scoring", gpu, LARGE)
    work.call()
    assert peak_extra_bytes(work.call, gpu) <= ROW * LARGE.rows


def test_in_place_takes_a_hundredth(gpu: torch.device):
    """The target of the benchmark's table, in the allocator's own count."""
    work = make("ppo_clip", gpu, LARGE)
    batch = {key: work.inputs[key] for key in ("targets", "logp_old", "mask")}
    spec = fusedpg.loss_spec("ppo_clip")

    def call() -> None:
        leaf = work.inputs["logits"].detach().requires_grad_()
        logits = leaf.view_as(leaf)
        out = fusedpg.policy_loss_from_logits(
            spec, logits, sequence_advantages=work.inputs["advantages"], inplace=True, **batch
        )
        (grad,) = torch.autograd.grad(out.loss, leaf)
        assert grad.data_ptr() == leaf.data_ptr()

    call()
    assert peak_extra_bytes(call, gpu) <= LARGE.rows * LARGE.vocab * 2 // 100


@pytest.mark.parametrize("name", ["hidden ppo_clip", "hidden gspo"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_hidden_states_take_the_planned_workspace(
    name: str, dtype: torch.dtype, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
):
    """Beside the gradients that are returned; and twice the tokens take no more."""
    plans, plan = [], linear_ops.plan_linear
    monkeypatch.setattr(linear_ops, "plan_linear", lambda *a, **k: plans.append(plan(*a, **k)) or plans[-1])
    monkeypatch.setattr("fusedpg.workspace.free_memory", lambda device: 2048 * MIB)  # a workspace of 256 MiB
    beyond = []
    for sequences in (8, 16, 32):
        size = Size(sequences, 256, 32_768, 1024)
        work = make(name, gpu, size, dtype)
        work.call()
        extra = peak_extra_bytes(work.call, gpu)
        gradients = (work.inputs["hidden"].numel() + work.inputs["weight"].numel()) * dtype.itemsize
        beyond.append(extra - gradients)
        promised = plans[-1].workspace + plans[-1].accumulator + ROW * size.rows + ROUNDING
        assert beyond[-1] <= promised, f"{beyond[-1] / MIB:.1f} MiB, planned {promised / MIB:.1f}: {plans[-1]}"
    assert beyond[2] <= beyond[1] + ROW * size.rows + ROUNDING
