"""Statements of the guide to custom losses that the other tests leave out; the docstring says which."""

import pickle
import subprocess
import sys
from pathlib import Path

import batches
import my_losses  # noqa: F401
import pytest
import torch

import fusedpg
from fusedpg.context import AGG_MODES
from fusedpg.native_losses import RLLM_LOSSES

NAMES = (*RLLM_LOSSES, "my_loss", "my_icepop", "my_echo", "my_gspo")


def test_the_same_function_runs_on_every_backend(backend):
    """ "The same function runs on every backend": the first printed loss."""
    data = batches.make(dtype=torch.float32)
    want, want_grad = batches.from_logits(fusedpg.resolve_loss("my_loss", "reference"), data)
    got, grad = batches.from_logits(fusedpg.resolve_loss("my_loss", backend), batches.on(data, backend))
    assert (got.path, got.backend) == ("custom", backend)
    batches.agree(got.loss, want.loss)
    batches.agree(grad, want_grad)
    assert got.metrics.keys() == want.metrics.keys() == {"ratio_mean"}


@pytest.mark.parametrize("path", ["native", "custom"])
def test_reinforce_is_clip_free(path):
    """ "Clip-free REINFORCE-style policy gradient": -A*logp, whatever the ratio."""
    logp = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    loss = fusedpg.resolve_loss("reinforce", path=path, loss_agg_mode="token-mean")
    out = loss.from_logp(logp, logp_old=torch.tensor([[-9.0, 3.0]]), advantages=torch.tensor([[2.0, -4.0]]))
    out.loss.backward()
    assert out.loss.item() == pytest.approx((2.0 - 8.0) / 2)  # (-2*-1 + 4*-2)/2
    assert logp.grad.tolist() == [[-1.0, 2.0]]


@pytest.mark.parametrize("path", ["native", "custom"])
def test_ppo_clip_is_the_clipped_surrogate(path):
    """ "Standard PPO/GRPO clipped surrogate" with the default eps_clip 0.2."""
    ratio = torch.tensor([[1.5, 1.5, 0.5, 0.5]])
    logp = torch.full((1, 4), -1.0, requires_grad=True)
    loss = fusedpg.resolve_loss("ppo_clip", path=path, loss_agg_mode="token-mean")
    out = loss.from_logp(logp, logp_old=-1.0 - ratio.log(), advantages=torch.tensor([[1.0, -1.0, 1.0, -1.0]]))
    out.loss.backward()
    assert out.loss.item() == pytest.approx((-1.2 + 1.5 - 0.5 + 0.8) / 4)
    assert logp.grad.tolist()[0] == pytest.approx([0.0, 1.5 / 4, -0.5 / 4, 0.0])


@pytest.mark.parametrize("name", NAMES)
def test_the_surrogate_of_the_managed_backends(name):
    """ "reproduce dL/dθ from your loss with a forward_backward_custom surrogate": sum(sg[dL/dlogp] * logp)."""
    data = batches.make()
    loss = fusedpg.resolve_loss(name)
    _, direct = batches.from_logits(loss, data)
    _, c = batches.from_logp(loss, data)
    observed = data.kwargs["mask"] | data.kwargs["obs_mask"]
    logits = torch.where(observed[..., None], data.logits, 0.0).requires_grad_()
    logp = torch.log_softmax(logits, -1).gather(-1, data.targets.clamp(min=0)[..., None])[..., 0]
    (torch.where(observed, c, 0.0) * logp).sum().backward()
    assert direct.any()
    batches.agree(logits.grad, direct)


@pytest.mark.parametrize("mode", AGG_MODES)
@pytest.mark.parametrize("name", NAMES)
def test_a_raw_sum_is_normalised_later(name, mode):
    """ "the client returns a raw sum and optim_step normalizes": counts of 1, then one division by the step's."""
    data = batches.make()
    mode = "seq-mean-token-mean" if "gspo" in name else mode  # pinned
    loss = fusedpg.resolve_loss(name, loss_agg_mode=mode)
    whole, grad = batches.from_logits(loss, data)
    raw, raw_grad = batches.from_logits(loss, data, step_tokens=1, step_sequences=1)
    action = data.kwargs["mask"]
    count = action.sum() if mode == "token-mean" else action.any(1).sum()
    assert count > 1
    batches.agree(raw.loss / count, whole.loss)
    batches.agree(raw_grad / count, grad)


@pytest.mark.parametrize("name", NAMES)
def test_everything_else_is_a_constant(name):
    """ "Only logp_curr carries gradient": streams that require one get none, and change nothing."""
    data = batches.make()
    loss = fusedpg.resolve_loss(name)
    want, grad = batches.from_logits(loss, data)
    fields = ("logp_old", "logp_ref", "logp_rollout", "advantages")
    live = {field: data.kwargs[field].clone().requires_grad_() for field in fields}
    got, live_grad = batches.from_logits(loss, data, **live)
    assert torch.equal(got.loss, want.loss)
    assert torch.equal(live_grad, grad)
    assert all(stream.grad is None for stream in live.values())


def test_a_plugin_registers_on_every_worker():
    """ "imports it at startup (which runs the @register_loss decorator on every worker)": a fresh interpreter."""
    code = (
        "import fusedpg; fusedpg.load_loss_plugins(['my_losses']); "
        "print(fusedpg.resolve_loss('my_icepop', params={'alpha': 0.5, 'beta': 5.0}).path)"
    )
    here = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["custom"]


@pytest.mark.parametrize("name", ["icepop", "my_icepop"])
def test_a_resolved_loss_reaches_a_worker(name):
    data = batches.make()
    loss = fusedpg.resolve_loss(name, loss_agg_mode="token-mean")
    want, grad = batches.from_logits(loss, data)
    got, again = batches.from_logits(pickle.loads(pickle.dumps(loss)), data)
    assert torch.equal(got.loss, want.loss)
    assert torch.equal(again, grad)
