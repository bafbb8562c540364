"""More than 2^31 logits: the last rows are what they are alone, in value and in gradient."""

import pytest
import torch
from torch import Tensor
from workloads import Size, assert_same_bits

import fusedpg

GIB = 1 << 30
#: 16 x 944 x 151,936 = 2.29e9 logits: the whole last sequence lies past element 2^31
SIZES = {"cuda": Size(16, 944, 151_936, 64), "cpu": Size(3, 2, 264)}


@pytest.fixture
def size(device: torch.device) -> Size:
    if device.type == "cuda":
        many = SIZES["cuda"]
        assert (many.rows - many.length) * many.vocab > 2**31
        free = torch.cuda.mem_get_info(device)[0]
        if free < 24 * GIB:
            pytest.skip(f"needs 24 GiB of free GPU memory, there are {free / GIB:.0f}")
    return SIZES[device.type]


def random_logits(size: Size, device: torch.device, seed: int) -> Tensor:
    logits = torch.empty(size.sequences, size.length, size.vocab, dtype=torch.bfloat16, device=device)
    return logits.normal_(0, 2, generator=torch.Generator(device).manual_seed(seed))


def batch_of(size: Size, device: torch.device) -> dict[str, Tensor]:
    """Per-token inputs; a masked row among the last ones."""
    g = torch.Generator(device).manual_seed(5)
    shape = (size.sequences, size.length)
    targets = torch.randint(0, size.vocab, shape, generator=g, device=device)
    targets[-1, -1] = size.vocab - 1
    mask = torch.ones(shape, device=device)
    mask[-1, 0] = 0
    return {
        "targets": targets,
        "logp_old": torch.full(shape, -12.0, device=device),
        "sequence_advantages": torch.linspace(0.5, 1.5, size.sequences, device=device),
        "mask": mask,
    }


def last(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The last sequence alone."""
    return {key: value[-1:] for key, value in batch.items()}


def policy(name: str, logits: Tensor, batch: dict[str, Tensor], **options: bool) -> tuple[Tensor, Tensor]:
    """(logp, d logits)."""
    spec = fusedpg.loss_spec(name, entropy_coef=0.01, reduction="token-sum")
    leaf = logits.detach().requires_grad_()
    out = fusedpg.policy_loss_from_logits(spec, leaf.view_as(leaf), backend="triton", **batch, **options)
    return out.logp, *torch.autograd.grad(out.loss, leaf)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo"])
@pytest.mark.parametrize("inplace", [False, True], ids=["new memory", "in place"])
def test_policy_loss(name: str, inplace: bool, device: torch.device, size: Size):
    logits, batch = random_logits(size, device, 0), batch_of(size, device)
    alone = logits[-1:].clone()
    logp, grad = policy(name, logits, batch, inplace=inplace)
    want_logp, want_grad = policy(name, alone, last(batch))
    assert (grad.data_ptr() == logits.data_ptr()) == inplace
    assert_same_bits([logp[-1:]], [want_logp])
    torch.testing.assert_close(grad[-1:], want_grad, rtol=2**-7, atol=1e-9)
    assert (grad[-1, 0] == 0).all()
    assert (grad[-1, 1:].abs().amax(-1) > 0).all()


def test_logprobs_of_columns_and_rows(device: torch.device, size: Size):
    """Both gradients of the log-prob operator, and a view whose rows are far apart."""
    logits, batch = random_logits(size, device, 1), batch_of(size, device)

    def call(values: Tensor, targets: Tensor) -> list[Tensor]:
        leaf = values.detach().requires_grad_()
        out = fusedpg.token_logprobs(leaf, targets, return_entropy=True, backend="triton")
        return [out.logp.detach(), out.entropy.detach(), *torch.autograd.grad((out.logp + out.entropy).sum(), leaf)]

    got = call(logits, batch["targets"])
    want = call(logits[-1:].clone(), batch["targets"][-1:])
    assert_same_bits([value[-1:] for value in got], want)
    del got
    every = size.length // 2
    spread = call(logits[:, ::every], batch["targets"][:, ::every])
    close = call(logits[-1:, ::every].clone(), batch["targets"][-1:, ::every])
    assert_same_bits([value[-1:] for value in spread], close)


@pytest.mark.parametrize("divergence", ["reverse_kl", "jsd"])
def test_distillation(divergence: str, device: torch.device, size: Size):
    student, teacher = (random_logits(size, device, seed) for seed in (2, 3))

    def call(x: Tensor, y: Tensor) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        out = fusedpg.distillation_loss(leaf, y, divergence=divergence, reduction="token-sum", backend="triton")
        return [out.per_token, *torch.autograd.grad(out.loss, leaf)]

    got, want = call(student, teacher), call(student[-1:].clone(), teacher[-1:].clone())
    assert_same_bits([value[-1:] for value in got], want)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo"])
def test_hidden_states(name: str, device: torch.device, size: Size):
    """N times V beyond 2^31, no tile of which is; the head's gradient sums over all chunks."""
    g = torch.Generator(device).manual_seed(4)
    hidden = torch.randn(size.sequences, size.length, size.width, generator=g, device=device).bfloat16()
    weight = torch.randn(size.vocab, size.width, generator=g, device=device).div_(size.width**0.5 / 2).bfloat16()
    batch = batch_of(size, device)
    spec = fusedpg.loss_spec(name, reduction="token-sum")

    def call(x: Tensor, streams: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        leaves = [t.detach().requires_grad_() for t in (x, weight)]
        options = {"backend": "triton", "workspace_mib": 1024 if device.type == "cuda" else None}
        out = fusedpg.policy_loss_from_hidden(spec, *leaves, **streams, **options)
        return out.logp, *torch.autograd.grad(out.loss, leaves)

    logp, d_hidden, d_weight = call(hidden, batch)
    want_logp, want_hidden, _ = call(hidden[-1:], last(batch))
    assert_same_bits([logp[-1:]], [want_logp])
    torch.testing.assert_close(d_hidden[-1:], want_hidden, rtol=2**-7, atol=float(want_hidden.abs().max()) * 2**-8)
    parts = [call(hidden[i : i + 1], {k: v[i : i + 1] for k, v in batch.items()})[2] for i in range(size.sequences)]
    total = torch.stack([part.float() for part in parts]).sum(0)
    torch.testing.assert_close(d_weight.float(), total, rtol=0, atol=float(total.abs().max()) * 2**-6)
