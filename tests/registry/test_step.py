"""Global normalisation: the parts of an optimizer step add up to the whole, on both paths."""

import batches
import my_losses  # noqa: F401
import pytest
import torch

import fusedpg
from fusedpg.context import AGG_MODES

NAMES = ("my_icepop", "my_echo", "my_gspo", "icepop", "echo", "gspo", "ppo_clip", "reinforce_kl")


def parts_of(data, how):
    """The padded batch as micro-batches of rows, an empty one included, or as one datum a row."""
    rows = [slice(0, 1), slice(1, 1), slice(1, 4)] if how == "micro-batches" else range(4)
    for part in rows:
        pick = {k: None if v is None else v[part] for k, v in data.kwargs.items()}
        yield part, batches.Data(data.logits[part], data.targets[part], pick)


@pytest.mark.parametrize("seed", [2, 4])  # 4 and 3 action tokens; a sequence with observations only
@pytest.mark.parametrize("how", ["micro-batches", "data"])
@pytest.mark.parametrize("mode", AGG_MODES)
def test_split_equals_whole(mode, how, seed):
    data = batches.make(seed=seed)
    action = data.kwargs["mask"]
    counts = {"step_tokens": int(action.sum()), "step_sequences": (action.sum(1) > 0).sum()}
    for name in NAMES:
        loss = fusedpg.resolve_loss(name, loss_agg_mode=mode)
        whole, grad = batches.from_logits(loss, data)
        total, grads = 0.0, torch.zeros_like(grad)
        for part, micro in parts_of(data, how):
            result, grads[part] = batches.from_logits(loss, micro, **counts)
            total = total + result.loss.detach()
        assert whole.loss != 0
        batches.agree(total, whole.loss)
        batches.agree(grads, grad)


def test_local_counts_are_not_global_ones():
    """What the counts are for: without them uneven parts weigh wrongly."""
    data = batches.make(seed=2)
    loss = fusedpg.resolve_loss("my_icepop", loss_agg_mode="token-mean")
    whole, _ = batches.from_logits(loss, data)
    local = [batches.from_logits(loss, micro)[0].loss.item() for _, micro in parts_of(data, "micro-batches")]
    assert abs(sum(local) / 2 - whole.loss.item()) > 0.01


@pytest.mark.parametrize("mode", AGG_MODES)
def test_padded_equals_packed(mode):
    padded = batches.make()
    keep = torch.arange(4) < torch.tensor(batches.LENGTHS)[:, None]
    pick = {k: None if v is None else v[keep] for k, v in padded.kwargs.items()}
    pick["cu_seqlens"] = torch.tensor([0, *batches.LENGTHS]).cumsum(0)
    packed = batches.Data(padded.logits[keep], padded.targets[keep], pick)
    for name in NAMES:
        loss = fusedpg.resolve_loss(name, loss_agg_mode=mode)
        (want, want_grad), (got, grad) = batches.from_logits(loss, padded), batches.from_logits(loss, packed)
        batches.agree(got.loss, want.loss)
        batches.agree(grad, want_grad[keep])


@pytest.mark.parametrize("name", ["my_echo", "echo"])
def test_nothing_to_train_on(name):
    """An all-masked micro-batch and N = 0: loss 0, gradient 0, the graph connected."""
    data = batches.make()
    none = torch.zeros_like(data.kwargs["mask"])
    counts = {"step_tokens": 7, "step_sequences": 2}
    for more in ({}, counts):
        result, grad = batches.from_logits(
            fusedpg.resolve_loss(name, params={"env_loss_coef": 0.1}), data, mask=none, obs_mask=none, **more
        )
        assert result.loss.item() == 0
        assert (grad == 0).all()
    empty = torch.zeros(0, requires_grad=True)
    stream = torch.zeros(0)
    loss = fusedpg.resolve_loss(name, params={"env_loss_coef": 0.1})
    out = loss.from_logp(empty, logp_old=stream, advantages=stream, mask=stream, obs_mask=stream)
    out.loss.backward()
    assert out.loss.item() == 0
    assert empty.grad.shape == (0,)


# ------------------------------------------------------------------ autograd around the body


def test_upstream_gradients_and_a_retained_graph(backend):
    data = batches.on(batches.make("packed", torch.float32), backend)
    loss = fusedpg.resolve_loss("my_icepop", backend=backend)
    logits = data.logits.clone().requires_grad_()
    out = loss.from_logits(logits, data.targets, **data.kwargs).loss
    (first,) = torch.autograd.grad(out, logits, retain_graph=True)
    (again,) = torch.autograd.grad(out, logits, retain_graph=True)
    (scaled,) = torch.autograd.grad(out * 3, logits, retain_graph=True)
    (zero,) = torch.autograd.grad(out * 0, logits)
    assert torch.equal(first, again)
    batches.agree(scaled, 3 * first)
    assert (zero == 0).all()


def test_forward_only():
    """Under no_grad, and for log-probs that need no gradient, the body runs without one."""
    data = batches.make("datum")
    loss = fusedpg.resolve_loss("my_icepop")
    with torch.no_grad():
        frozen = loss.from_logits(data.logits.clone().requires_grad_(), data.targets, **data.kwargs)
    trained, _ = batches.from_logits(loss, data)
    assert not frozen.loss.requires_grad
    assert not loss.from_logp(data.logp, **data.kwargs).loss.requires_grad
    assert torch.equal(frozen.loss, trained.loss.detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_log_probs_are_computed_in_fp32(dtype):
    logp = torch.tensor([-1.0, -2.5], dtype=dtype, requires_grad=True)
    result = fusedpg.resolve_loss("my_loss").from_logp(logp, logp_old=logp.detach() - 0.1, advantages=1.0)
    result.loss.backward()
    assert result.loss.dtype == torch.float32
    assert logp.grad.dtype == dtype
