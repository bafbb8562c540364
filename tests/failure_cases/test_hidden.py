"""Cases of the path from hidden states and an output head: gradients, views, dtypes, sharded heads."""

import pytest
import torch
from cases import assert_bits, eager_head, head, leaves, random, random_ids, tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fusedpg

BF16, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("name", ["ppo_clip", "gspo"])
def test_case_019_no_row_is_projected(backend, name):
    """huggingface/trl#7077: projecting only the unmasked rows lost the connection to the model."""
    *stored, targets = head(4)
    mine = leaves(*stored)
    out = fusedpg.policy_loss_from_hidden(
        fusedpg.loss_spec(name, anchor="self"),
        *mine[:2],
        targets,
        bias=mine[2],
        sequence_advantages=tensor([1.0]),
        cu_seqlens=tensor([0, 4], torch.int64),
        mask=torch.zeros(4),
        backend=backend,
    )
    assert out.loss == 0
    out.loss.backward()
    for leaf in mine:
        assert leaf.grad.shape == leaf.shape
        assert (leaf.grad == 0).all()


def test_case_036_a_slice_of_hidden_states(backend):
    """unslothai/unsloth-zoo#591: keeping the last logits made hidden states non-contiguous."""
    whole, weight = leaves(random(2, 6, 16), random(9, 16, seed=1))
    targets = random_ids(9, 2, 3)
    part = whole[:, 2:5, :]
    assert not part.is_contiguous()
    out = fusedpg.linear_token_logprobs(part, weight, targets, backend=backend)
    want = fusedpg.linear_token_logprobs(part.detach().contiguous(), weight, targets, backend=backend)
    assert_bits(out.logp.detach(), want.logp.detach())
    out.logp.sum().backward()
    assert (whole.grad[:, :2] == 0).all()
    assert (whole.grad[:, 5:] == 0).all()
    assert (whole.grad[:, 2:5] != 0).any(-1).all()


@pytest.mark.parametrize("frozen", [None, 0, 1])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_case_044_backward_twice(backend, dtype, frozen):
    """Dao-AILab/quack#209: saved gradient buffers were scaled in place by the upstream gradient."""
    hidden, weight, _, targets = head(dtype=dtype)
    both = leaves(hidden, weight)
    if frozen is not None:
        both[frozen].requires_grad_(False)
    mine = [t for t in both if t.requires_grad]
    out = fusedpg.policy_loss_from_hidden(
        fusedpg.loss_spec("reinforce"), *both, targets, advantages=random(6, seed=5), backend=backend
    )
    first = torch.autograd.grad(out.loss, mine, tensor(1.0), retain_graph=True)
    copies = [g.clone() for g in first]
    second = torch.autograd.grad(out.loss, mine, tensor(3.0))
    eps = 2 * torch.finfo(dtype).eps
    for a, copy, b in zip(first, copies, second, strict=True):
        assert_bits(a, copy)
        torch.testing.assert_close(b, 3 * a, rtol=eps, atol=eps * float(a.abs().max()))


def test_case_045_the_caller_weighs_tokens(backend):
    """linkedin/Liger-Kernel#1298, #968, #678: one upstream element was used for all tokens."""
    *stored, targets = head(3)
    w = tensor([0.0, 2.0, 0.5], torch.float64)
    grads = []
    for native in (True, False):
        mine = leaves(*(stored if native else (t.double() for t in stored)))
        if native:
            ids = torch.cat([tensor([-100], torch.int64), targets[1:]])  # the first token is ignored
            mask = tensor([False, True, True], torch.bool)
            logp = fusedpg.linear_token_logprobs(*mine[:2], ids, bias=mine[2], mask=mask, backend=backend).logp
        else:
            logp, _ = eager_head(*mine, targets)
        (-logp * w.to(logp)).sum().backward()
        grads.append([leaf.grad.double() for leaf in mine])
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)
    assert (grads[0][0][0] == 0).all()


def test_case_046_the_entropy_bonus_trains(backend):
    """huggingface/trl#6625: backward received the entropy's gradient and never used it."""
    hidden, weight, bias, targets = head(2, 8, 5)
    kwargs = {"temperature": 0.7, "softcap": 2.0}
    grads = []
    for native in (True, False):
        mine = leaves(*((t if native else t.double()) for t in (hidden, weight, bias)))
        if native:
            kwargs |= {"return_entropy": True, "backend": backend}
            entropy = fusedpg.linear_token_logprobs(*mine[:2], targets, bias=mine[2], **kwargs).entropy
        else:
            entropy = eager_head(*mine, targets, 0.7, 2.0)[1]
        (-entropy.sum()).backward()
        grads.append([leaf.grad.double() for leaf in mine])
    assert all((g != 0).any() for g in grads[0])
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


class OperatorOutputs(TorchDispatchMode):
    """Sizes of what fusedpg's operators return."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "fusedpg" in str(func):
            self.sizes += [t.numel() for t in (out if isinstance(out, (tuple, list)) else (out,))]
        return out


def test_case_048_gradients_nobody_asked_for(native_backend):
    """fla-org/flash-linear-attention#1253: a frozen head paid for its gradient, evaluation for all of them."""
    *stored, targets = head()
    spec = fusedpg.loss_spec("reinforce", entropy_coef=0.1)

    def gradients(*wanted):
        mine = [t.clone().requires_grad_(want) for t, want in zip(stored, wanted, strict=True)]
        with OperatorOutputs() as outputs:
            out = fusedpg.policy_loss_from_hidden(
                spec, *mine[:2], targets, bias=mine[2], advantages=1.0, backend=native_backend
            )
        assert (stored[0].numel() in outputs.sizes) == wanted[0]
        assert (stored[1].numel() in outputs.sizes) == wanted[1]
        if out.loss.requires_grad:
            out.loss.backward()
        return [leaf.grad for leaf in mine]

    whole = gradients(True, True, True)
    for wanted in ((True, False, False), (False, True, False), (False, False, True), (False, False, False)):
        for got, full, want in zip(gradients(*wanted), whole, wanted, strict=True):
            assert (got is not None) == want
            if want:
                assert_bits(got, full)


def test_case_107_one_long_sequence_takes_no_more_than_many_short_ones():
    """linkedin/Liger-Kernel#439: chunks followed the batch axis, not the tokens."""
    from fusedpg import linear_ops

    plans, plan = [], linear_ops.plan_linear
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_ops, "plan_linear", lambda *a, **k: plans.append(plan(*a, **k)) or plans[-1])
        results = []
        for shape in ((1, 2048), (8, 256)):
            hidden, weight = random(2048, 16).view(*shape, 16).requires_grad_(), random(3200, 16, seed=1)
            targets = random_ids(3200, 2048).view(shape)
            out = fusedpg.policy_loss_from_hidden(
                fusedpg.loss_spec("reinforce"), hidden, weight, targets, advantages=1.0, workspace_mib=8, backend="cpu"
            )
            out.loss.backward()
            results.append((out.logp.flatten(), hidden.grad.flatten()))
    assert plans[0] == plans[1]
    assert plans[0].workspace <= 8 << 20
    for a, b in zip(*results, strict=True):
        assert_bits(a, b)


@pytest.mark.parametrize("hidden_dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("weight_dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("inside", [False, True])
def test_case_118_mixed_dtypes_under_autocast(backend, hidden_dtype, weight_dtype, inside):
    """linkedin/Liger-Kernel#305: the projection raised for bf16 hidden states and an fp32 weight."""
    hidden, weight, bias, targets = head()
    mine = leaves(hidden.to(hidden_dtype), weight.to(weight_dtype), bias)
    exact = leaves(*(leaf.detach().double() for leaf in mine))
    with torch.autocast(hidden.device.type, BF16, enabled=inside):
        logp = fusedpg.linear_token_logprobs(*mine[:2], targets, bias=mine[2], backend=backend).logp
    logp.sum().backward()
    want, _ = eager_head(*exact, targets)
    want.sum().backward()
    assert logp.dtype == F32
    torch.testing.assert_close(logp.double(), want, rtol=1e-5, atol=1e-5)
    for a, b in zip(mine, exact, strict=True):
        assert a.grad.dtype == a.dtype
        eps = max(1e-5, torch.finfo(a.dtype).eps)
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=eps, atol=eps * float(b.grad.abs().max()))


@pytest.fixture
def mesh(tmp_path):
    """A group of one process."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_case_119_sharded_heads(mesh):
    """apple/ml-cross-entropy#31, linkedin/Liger-Kernel#332, huggingface/trl#6065: a shard was used as the whole."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    hidden, weight, _, targets = head()
    spread = {kind: distribute_tensor(weight.clone(), mesh, [kind]) for kind in (Replicate(), Shard(0))}
    whole, sharded = (t.requires_grad_() for t in spread.values())
    plain = weight.clone().requires_grad_()
    for head_weight in (whole, plain):
        fusedpg.linear_token_logprobs(hidden, head_weight, targets, backend="cpu").logp.sum().backward()
    assert_bits(whole.grad.to_local(), plain.grad)
    with pytest.raises(
        ValueError,
        match=r"^weight: expected a whole tensor; got a DTensor with placements .*Shard.*; pass weight\.full_tensor\(\)$",
    ):
        fusedpg.linear_token_logprobs(hidden, sharded, targets, backend="cpu")
    gathered = fusedpg.linear_token_logprobs(hidden, sharded.full_tensor(), targets, backend="cpu").logp
    assert_bits(gathered.detach(), fusedpg.linear_token_logprobs(hidden, weight, targets, backend="cpu").logp)
    for shard in (weight.flatten(), weight.flatten()[:40], weight.new_empty(0)):
        with pytest.raises(ValueError, match=r"weight: expected shape \(V, 8\).*flattened shard is not the matrix"):
            fusedpg.linear_token_logprobs(hidden, shard, targets)


def test_case_120_a_weight_that_is_elsewhere():
    """huggingface/trl#3368, #6372: read by attribute, a ZeRO-3 weight is empty."""
    hidden, weight, _, targets = head()
    empty = torch.nn.Parameter(torch.empty(0))
    empty.ds_shape = weight.shape
    with pytest.raises(
        ValueError, match=r"call inside deepspeed\.zero\.GatheredParameters\(\[weight\]\), loss and backward"
    ):
        fusedpg.policy_loss_from_hidden(fusedpg.loss_spec("reinforce"), hidden, empty, targets, advantages=1.0)
    empty.data = weight.clone()  # what gathering does
    fusedpg.linear_token_logprobs(hidden, empty, targets).logp.sum().backward()
    assert empty.grad.shape == weight.shape
