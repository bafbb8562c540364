"""What the custom path costs beyond the native one: one more read of the logits, and nothing of their size to store."""

import os

import batches
import my_losses  # noqa: F401
import pytest
import torch

import fusedpg
from fusedpg.cli import memory
from fusedpg.evidence.global_traffic import GlobalTraffic
from support import saved_storages

ROWS, VOCAB = 256, 1 << 15
counts_loads = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="counts in Triton's interpreter")


def big():
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, VOCAB, generator=g)
    targets = torch.randint(0, VOCAB, (ROWS,), generator=g)
    logp = fusedpg.token_logprobs(logits, targets).logp
    return logits.requires_grad_(), targets, {"logp_old": logp - 0.1, "logp_rollout": logp - 0.1, "advantages": 1.0}


def test_custom_path_makes_nothing_of_the_vocabulary_s_size_but_the_gradient():
    """Rise of the resident memory on the CPU backend, native scratch included: 32 MiB of logits."""
    logits, targets, kwargs = big()
    matrix = ROWS * VOCAB * 4
    loss = fusedpg.resolve_loss("my_icepop", backend="cpu")
    small = {k: v[:2] if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    loss.from_logits(logits[:2], targets[:2], **small).loss.backward()  # thread pools and lazy imports
    logits.grad = None

    forward = memory.peak_extra_bytes(lambda: loss.from_logits(logits, targets, **kwargs).loss, torch.device("cpu"))
    whole = memory.peak_extra_bytes(
        lambda: torch.autograd.grad(loss.from_logits(logits, targets, **kwargs).loss, logits), torch.device("cpu")
    )
    if forward is None or whole is None:
        pytest.skip("this system does not report the peak of the resident memory")
    assert forward < matrix / 8
    assert 0.9 * matrix < whole < 1.125 * matrix


def test_graph_keeps_the_logits_and_a_few_numbers_a_row():
    """The body's own graph is gone when the call returns."""
    logits, targets, kwargs = big()
    loss = fusedpg.resolve_loss("my_icepop", backend="cpu")
    kept, _ = saved_storages(lambda: loss.from_logits(logits, targets, **kwargs))
    del kept[logits.untyped_storage().data_ptr()]
    assert sum(kept.values()) < 256 * ROWS


@counts_loads
def test_logits_are_read_twice_at_most():
    """Bytes loaded in the interpreter, every load counted: A, then C, plus a target's logit a row.

    A native token-level kernel's second load of a row finds it in the cache (tests/triton/test_bytes.py), so the custom
    path costs one read of the logits more at most.
    """
    rows, vocab = 6, 700
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocab, generator=g)
    targets = torch.randint(0, vocab, (rows,), generator=g)
    logp = torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]
    mask = torch.tensor([1, 1, 1, 0, 1, 1]).bool()
    kwargs = {"logp_old": logp, "logp_rollout": logp - 0.1, "advantages": 1.0, "mask": mask}
    loss = fusedpg.resolve_loss("my_icepop", backend="triton")
    logits.requires_grad_()
    with GlobalTraffic(logits=logits) as traffic:
        result = loss.from_logits(logits, targets, **kwargs)
        result.loss.backward()
    assert result.path == "custom"
    assert 5 * 2 * vocab * 4 <= traffic.read("logits") <= 5 * (2 * vocab * 4 + 4)
    assert not traffic.touched("logits", logits[3])
    assert (logits.grad[3] == 0).all()
    assert (logits.grad[0] != 0).all()


@counts_loads
def test_rows_without_a_gradient_are_read_once():
    """A token that the body masks does no backward work."""
    data = batches.make("datum", torch.float32)
    logits = torch.randn(10, 700, generator=torch.Generator().manual_seed(1), requires_grad=True)
    loss = fusedpg.resolve_loss("my_icepop", params={"alpha": 1e3, "beta": 1e4}, backend="triton")
    kwargs = {**data.kwargs, "mask": torch.ones(10), "logp_rollout": torch.zeros(10), "logp_old": torch.zeros(10)}
    kwargs["advantages"] = torch.ones(10)
    with GlobalTraffic(logits=logits) as traffic:
        loss.from_logits(logits, data.targets.clamp(min=0), **kwargs).loss.backward()
    assert traffic.read("logits") <= 10 * (700 * 4 + 4)
    assert (logits.grad == 0).all()
