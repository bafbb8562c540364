"""The tile of logits that a call on a CPU leaves to the next one."""

import gc
import threading

import pytest
import torch

import fusedpg
from fusedpg import workspace

CPU = torch.device("cpu")


class Owner:
    """What borrows: gone, it gives back."""


@pytest.fixture(autouse=True)
def nothing_kept():
    fusedpg.release_workspace()
    yield
    fusedpg.release_workspace()


def call(rows=64, vocab=4096):
    hidden, weight = torch.randn(rows, 16, requires_grad=True), torch.randn(vocab, 16, requires_grad=True)
    targets = torch.randint(0, vocab, (rows,))
    fusedpg.policy_loss_from_hidden(
        fusedpg.loss_spec("reinforce"), hidden, weight, targets, advantages=1.0, backend="cpu"
    ).loss.backward()


def test_a_call_leaves_its_tile_and_the_next_takes_it():
    call()
    (kept,) = workspace._kept
    first = kept.data_ptr()
    call()
    assert [buffer.data_ptr() for buffer in workspace._kept] == [first]
    assert fusedpg.release_workspace() == kept.nbytes
    assert fusedpg.release_workspace() == 0


def test_it_is_within_the_plan():
    plans = [fusedpg.plan_linear(fusedpg.LinearShape(4096, 16), mib << 20) for mib in (8, 1)]
    for plan, mib in zip(plans, (8, 1), strict=True):
        fusedpg.release_workspace()
        hidden, weight = torch.randn(64, 16), torch.randn(4096, 16)
        targets = torch.randint(0, 4096, (64,))
        fusedpg.linear_token_logprobs(hidden, weight, targets, workspace_mib=mib, backend="cpu")
        assert 0 < fusedpg.release_workspace() <= plan.workspace <= mib << 20


def test_two_owners_never_share():
    one, two = Owner(), Owner()
    tiles = [workspace.lent(owner, (4, 8), torch.float32, CPU) for owner in (one, two)]
    assert tiles[0].data_ptr() != tiles[1].data_ptr()
    del one, two
    gc.collect()
    assert len(workspace._kept) == 1


def test_the_larger_is_kept_and_a_smaller_call_takes_a_part():
    for rows in (4, 64, 8):
        owner = Owner()
        tile = workspace.lent(owner, (rows, 8), torch.float64, CPU)
        assert (tile.shape, tile.dtype, tile.is_contiguous()) == ((rows, 8), torch.float64, True)
        del owner
    assert fusedpg.release_workspace() == 64 * 8 * 8


@pytest.mark.parametrize("sizes", [(4, 64), (64, 4)])
def test_of_two_at_once_the_larger_is_kept(sizes):
    owners = [Owner() for _ in sizes]
    for owner, rows in zip(owners, sizes, strict=True):
        workspace.lent(owner, (rows, 8), torch.float32, CPU)
    del owner
    while owners:
        owners.pop()
    assert fusedpg.release_workspace() == 64 * 8 * 4


def test_what_threads_have_left_too_many_of_goes():
    workspace._kept.extend(torch.empty(128, dtype=torch.uint8) for _ in range(3))
    owner = Owner()
    workspace.lent(owner, (4, 8), torch.float32, CPU)
    del owner
    assert len(workspace._kept) == 1


def test_memory_of_inference_mode_serves_a_gradient():
    hidden, weight, targets = torch.randn(64, 16), torch.randn(4096, 16), torch.randint(0, 4096, (64,))
    with torch.inference_mode():
        fusedpg.linear_token_logprobs(hidden, weight, targets, backend="cpu")
    (kept,) = workspace._kept
    assert not kept.is_inference()  # such a tensor refuses to be written outside of that mode
    call()
    assert [buffer.data_ptr() for buffer in workspace._kept] == [kept.data_ptr()]


def test_an_error_gives_it_back():
    def fails():
        owner = Owner()
        workspace.lent(owner, (4, 8), torch.float32, CPU)
        raise RuntimeError(str(owner))

    with pytest.raises(RuntimeError):
        fails()
    gc.collect()
    assert fusedpg.release_workspace() == 4 * 8 * 4


def test_calls_of_several_threads():
    """Each has a tile of its own, and is right."""
    hidden, weight = torch.randn(64, 16), torch.randn(512, 16)
    targets = torch.randint(0, 512, (64,))
    want = fusedpg.linear_token_logprobs(hidden, weight, targets, backend="cpu").logp
    wrong = []

    def work():
        for _ in range(20):
            got = fusedpg.linear_token_logprobs(hidden, weight, targets, backend="cpu").logp
            if not torch.equal(got, want):
                wrong.append(got)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(workspace._kept) <= 1
