"""What a call computes and allocates: matrix products counted in units of NDV, and no matrix that nobody asked for."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from heads import use_walk
from torch.utils._python_dispatch import TorchDispatchMode

import fusedpg
from fusedpg import cpu, linear_ops, linear_stages, linear_walk
from fusedpg.linear_plan import Mode

ROWS, WIDTH, VOCAB = 256, 32, 1024
UNIT = ROWS * WIDTH * VOCAB


@pytest.fixture
def work(monkeypatch):
    """Multiply-adds of every product, as they come; and the plans that were made."""
    done = type("Work", (), {"products": [], "plans": []})()

    def product(a, b, out, *, add=False, keep=None, inner=linear_walk.product):
        rows = a.shape[0] if keep is None or a.stride(1) != 1 else keep.numel()
        done.products.append(rows * b.shape[0] * b.shape[1])
        inner(a, b, out, add=add, keep=keep)

    def plan(*args, inner=linear_ops.plan_linear, **kwargs):
        done.plans.append(inner(*args, **kwargs))
        return done.plans[-1]

    monkeypatch.setattr(linear_walk, "product", product)
    monkeypatch.setattr(linear_ops, "plan_linear", plan)
    return done


def head(dtype=torch.float32, rows=ROWS):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, WIDTH, generator=g).to(dtype)
    weight = (torch.randn(VOCAB, WIDTH, generator=g) / 4).to(dtype)
    return hidden, weight, torch.randint(0, VOCAB, (rows,), generator=g)


def step(spec, hidden, weight, targets, frozen=(), **kwargs):
    leaves = [t.clone().requires_grad_(i not in frozen) for i, t in enumerate((hidden, weight))]
    out = fusedpg.policy_loss_from_hidden(spec, *leaves, targets, backend="cpu", **kwargs)
    if out.loss.requires_grad:
        out.loss.backward()
    return out


TOKEN = fusedpg.loss_spec("reinforce")
SEQUENCE = fusedpg.loss_spec("gspo", anchor="self")
ON_SEQUENCES = {"sequence_advantages": torch.ones(4), "cu_seqlens": torch.tensor([0, 50, 100, 200, ROWS])}


@pytest.mark.parametrize(
    ("spec", "kwargs"), [(TOKEN, {"advantages": 1.0}), (SEQUENCE, ON_SEQUENCES)], ids=["token", "sequence"]
)
def test_three_products(spec, kwargs, work):
    step(spec, *head(), **kwargs)
    assert sum(work.products) == 3 * UNIT
    assert [plan.products for plan in work.plans] == [3]


def test_two_passes_are_four(work, monkeypatch):
    use_walk(monkeypatch, "short")  # sequences of 50 tokens, chunks of 2
    step(SEQUENCE, *head(), **ON_SEQUENCES)
    assert [(plan.mode, plan.products) for plan in work.plans] == [(Mode.TWO_PASSES, 4)]
    assert sum(work.products) == 4 * UNIT


@pytest.mark.parametrize("workspace", [0.3, 0.15])
def test_vocabulary_blocks_are_four(workspace, work):
    step(TOKEN, *head(), advantages=1.0, workspace_mib=workspace)
    (plan,) = work.plans
    assert plan.mode == Mode.TWO_PASSES
    assert plan.columns < VOCAB
    assert sum(work.products) == 4 * UNIT


@pytest.mark.parametrize("workspace", [None, 0.3])
def test_a_frozen_input_s_product_is_skipped(workspace, work):
    forward = 1 if workspace is None else 2
    for frozen, count in (((), forward + 2), ((0,), forward + 1), ((1,), forward + 1), ((0, 1), 1)):
        work.products.clear()
        step(TOKEN, *head(), frozen, advantages=1.0, workspace_mib=workspace)
        assert sum(work.products) == count * UNIT, frozen


@pytest.mark.parametrize("workspace", [None, 0.3])
def test_scoring_is_one_product(workspace, work):
    hidden, weight, targets = head()
    leaves = [t.requires_grad_() for t in (hidden, weight)]
    with torch.no_grad():
        fusedpg.linear_token_logprobs(*leaves, targets, return_entropy=True, workspace_mib=workspace, backend="cpu")
        fusedpg.policy_loss_from_hidden(TOKEN, *leaves, targets, advantages=1.0, workspace_mib=workspace, backend="cpu")
    assert sum(work.products) == 2 * UNIT
    assert [plan.products for plan in work.plans] == [1, 1]


def test_gradients_of_logprobs_are_three_more(work):
    hidden, weight, targets = head()
    out = fusedpg.linear_token_logprobs(hidden.requires_grad_(), weight.requires_grad_(), targets, backend="cpu")
    assert sum(work.products) == UNIT
    out.logp.sum().backward()
    assert sum(work.products) == 4 * UNIT


@pytest.mark.parametrize("workspace", [None, 0.3])
def test_masked_rows_enter_no_product(workspace, work):
    mask = torch.arange(ROWS) % 4 == 0
    step(TOKEN, *head(), advantages=1.0, mask=mask, workspace_mib=workspace)
    assert sum(work.products) == (3 if workspace is None else 4) * UNIT / 4


@pytest.mark.parametrize("workspace", [None, 0.3])
def test_rows_without_a_coefficient_leave_the_gradient_s_products(workspace, work):
    advantages = (torch.arange(ROWS) % 2).float()
    out = step(TOKEN, *head(), advantages=advantages, workspace_mib=workspace)
    assert out.metrics["active_tokens"] == ROWS / 2
    assert sum(work.products) == UNIT + (2 if workspace is None else 3) * UNIT / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunks", [1, 4])
def test_rows_without_an_advantage_come_last(chunks, dtype, work, monkeypatch):
    """So the others lie together: nothing is gathered, and a chunk of idle rows enters the forward product alone."""
    given = []
    monkeypatch.setattr(torch, "index_select", lambda *a, **k: pytest.fail("gathered"))
    inner = linear_walk.product
    monkeypatch.setattr(
        linear_walk, "product", lambda *a, keep=None, **k: given.append(keep) or inner(*a, keep=keep, **k)
    )
    plan = linear_ops.plan_linear
    monkeypatch.setattr(linear_ops, "plan_linear", lambda *a, **k: replace(plan(*a, **k), rows=ROWS // chunks))
    advantages = (torch.arange(ROWS) % 2).float()
    step(TOKEN, *head(dtype), advantages=advantages)
    assert given == [None] * (chunks + 2 * max(1, chunks // 2))
    assert sum(work.products) == 2 * UNIT


@pytest.mark.skipif(not cpu.has_product(), reason="needs a CPU with AVX512-BF16: elsewhere d weight is rounded aside")
def test_the_core_s_product_writes_d_weight_rounded(monkeypatch):
    """No fp32 copy of the head's size beside it."""
    stored, inner = [], linear_walk.product
    monkeypatch.setattr(
        linear_walk, "product", lambda a, b, out, **k: stored.append(out.dtype) or inner(a, b, out, **k)
    )
    step(TOKEN, *head(torch.bfloat16), advantages=1.0)
    assert stored == [torch.float32, torch.float32, torch.bfloat16]  # logits, d hidden, d weight


def test_rows_of_sequences_stay_in_their_order_and_are_gathered(work):
    sequences = {**ON_SEQUENCES, "sequence_advantages": torch.tensor([1.0, 0.0, 1.0, 0.0])}
    step(SEQUENCE, *head(), **sequences)
    assert sum(work.products) == UNIT + 2 * UNIT * 150 / ROWS


def test_what_is_worth_keeping():
    def kept(has):
        count, keep = linear_stages.worth_keeping(torch.tensor(has, dtype=torch.float32), torch.empty(0))
        return count, keep if keep is None else keep.tolist()

    assert kept([0, 0]) == (0, [])
    assert kept([1, 1, 0, 0]) == (2, None)
    assert kept([0, 1, 0]) == (2, [1])
    assert kept([1] * 7 + [0, 1]) == (9, None)
    assert kept([1] * 6 + [0, 1]) == (8, [0, 1, 2, 3, 4, 5, 7])
    both = linear_stages.worth_keeping(torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 2.0, 0.0]))
    assert both[0] == 3
    assert both[1].tolist() == [1, 2]


def test_no_products_for_no_rows(work):
    step(TOKEN, *head(), advantages=1.0, mask=torch.zeros(ROWS))
    assert sum(work.products) == 0
    step(TOKEN, *head(), advantages=0.0)
    assert sum(work.products) == UNIT


def test_a_second_backward_over_a_retained_graph_is_three_more(work):
    hidden, weight, targets = head()
    leaves = [t.requires_grad_() for t in (hidden, weight)]
    loss = fusedpg.policy_loss_from_hidden(TOKEN, *leaves, targets, advantages=1.0, backend="cpu").loss
    loss.backward(retain_graph=True)
    assert sum(work.products) == 3 * UNIT
    loss.backward()
    assert sum(work.products) == 6 * UNIT


# ------------------------------------------------------------------ allocations


class Sizes(TorchDispatchMode):
    """Elements of every tensor that comes into being."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor):
                self.seen.append(t.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("frozen", [f for n in range(3) for f in itertools.combinations((0, 1), n)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_weight_sized_buffer_without_its_gradient(dtype, frozen, monkeypatch):
    """With chunks so small that only a gradient of the head can be as large as the head."""
    use_walk(monkeypatch, "short")
    monkeypatch.setattr("fusedpg.linear_plan.CAST_COLUMNS", 64)
    monkeypatch.setattr("fusedpg.linear_walk.CAST_COLUMNS", 64)
    fusedpg.release_workspace()
    hidden, weight, targets = head(dtype, rows=8)
    leaves = [t.requires_grad_(i not in frozen) for i, t in enumerate((hidden, weight))]
    sizes = Sizes()
    monkeypatch.setattr(linear_walk, "product", functools.partial(_watched, sizes, linear_walk.product))
    monkeypatch.setattr(torch, "empty", _recorded(sizes, torch.empty))
    with sizes:
        out = fusedpg.policy_loss_from_hidden(TOKEN, *leaves, targets, advantages=1.0, backend="cpu")
    made = max(sizes.seen)
    if 1 in frozen:
        assert made < VOCAB * WIDTH * 2
        assert out.loss.requires_grad == (0 not in frozen)
    else:
        assert made >= VOCAB * WIDTH * dtype.itemsize


def _watched(sizes, inner, a, b, out, **kwargs):
    inner(a, b, out, **kwargs)
    sizes.seen.append(out.untyped_storage().nbytes())


def _recorded(sizes, inner):
    def empty(*args, **kwargs):
        out = inner(*args, **kwargs)
        sizes.seen.append(out.untyped_storage().nbytes())
        return out

    return empty


def test_a_frozen_input_gets_none():
    hidden, weight, targets = head()
    hidden.requires_grad_()
    fusedpg.policy_loss_from_hidden(TOKEN, hidden, weight, targets, advantages=1.0, backend="cpu").loss.backward()
    assert weight.grad is None
    assert hidden.grad is not None
