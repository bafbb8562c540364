"""Cases 98-106: precision, equal bits, exact counts and dtypes."""

import math

import pytest
import torch
from cases import assert_bits, from_logits, from_logp, random, random_ids, tensor

import fusedpg


def test_case_098_bf16_logits_over_a_large_vocabulary(backend):
    """linkedin/Liger-Kernel#672, genlm/genlm-backend#66: log-softmax kept in bf16."""
    logits = random(2, 151936, scale=4, dtype=torch.bfloat16)
    targets = tensor([0, 151935], torch.int64)
    out = fusedpg.token_logprobs(logits, targets, return_entropy=True, backend=backend)
    truth = torch.log_softmax(logits.double(), -1)
    assert out.logp.dtype == out.entropy.dtype == torch.float32
    assert (out.logp.double() - truth.gather(-1, targets[:, None])[:, 0]).abs().max() <= 1e-5
    assert (out.entropy.double() + (truth.exp() * truth).sum(-1)).abs().max() <= 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_case_099_one_logp_whichever_path(backend, dtype):
    """huggingface/trl#7084: cached and fresh log-probs disagreed."""
    logits, targets = random(6, 50, dtype=dtype), random_ids(50, 6)
    with_grad = logits.clone().requires_grad_()
    paths = [fusedpg.token_logprobs(with_grad, targets, return_entropy=True, backend=backend)]
    with torch.no_grad():
        paths.append(fusedpg.token_logprobs(with_grad, targets, return_entropy=True, backend=backend))
    paths.append(fusedpg.token_logprobs(logits, targets, return_entropy=True, backend=backend))
    kwargs = {"advantages": 1.0, "return_entropy": True, "backend": backend}
    cu = tensor([0, 2, 6], torch.int64)
    for spec in (fusedpg.loss_spec("reinforce"), fusedpg.loss_spec("gspo_token", anchor="self")):
        for z in (with_grad, logits):
            paths.append(fusedpg.policy_loss_from_logits(spec, z, targets, cu_seqlens=cu, **kwargs))
    for other in paths[1:]:
        assert_bits(other.logp.detach(), paths[0].logp.detach())
        assert_bits(other.entropy.detach(), paths[0].entropy.detach())
    without_entropy = fusedpg.token_logprobs(logits, targets, backend=backend)
    assert_bits(without_entropy.logp, paths[0].logp.detach())
    eager = fusedpg.token_logprobs(logits, targets, backend="reference")
    torch.testing.assert_close(without_entropy.logp, eager.logp, rtol=1e-6, atol=1e-6)


def test_case_102_a_row_does_not_depend_on_its_batch(backend):
    """verl-project/verl#6280, RLinf/RLinf#1534: the on-policy ratio was not 1."""
    logits, targets = random(64, 37, dtype=torch.bfloat16), random_ids(37, 64)
    whole = fusedpg.token_logprobs(logits, targets, backend=backend).logp
    for start, size in ((0, 1), (63, 1), (5, 7), (0, 8), (40, 8)):
        rows = slice(start, start + size)
        part = logits[rows].clone().requires_grad_()
        assert_bits(fusedpg.token_logprobs(part, targets[rows], backend=backend).logp.detach(), whole[rows])
    out, _ = from_logits(
        fusedpg.loss_spec("ppo_clip"),
        logits[5:12].clone().requires_grad_(),
        targets[5:12],
        logp_old=whole[5:12],
        advantages=1.0,
        backend=backend,
    )
    m = out.metrics
    assert m["ratio_min"] == m["ratio_max"] == m["ratio_mean"] == 1
    assert m["clip_frac"] == m["approx_kl"] == m["approx_kl_k3"] == 0


def test_case_103_the_scalar_loss_repeats(backend):
    """pytorch/pytorch#17350: the order of float adds changed from run to run."""
    logp, old, adv = random(4096) - 2, random(4096, seed=1) * 0.2 - 2, random(4096, seed=2)
    spec = fusedpg.loss_spec("ppo_clip", log_ratio_clamp=5.0)
    runs = [
        from_logp(spec, logp.clone().requires_grad_(), logp_old=old, advantages=adv, backend=backend)
        for _ in range(50 if backend != "triton" or logp.is_cuda else 5)
    ]
    for out, grad in runs[1:]:
        assert_bits(out.loss, runs[0][0].loss)
        assert_bits(grad, runs[0][1])


def test_case_103_gradient_of_the_logits_repeats(backend):
    """pytorch/pytorch#17350: no float atomics."""
    logits, targets = random(8, 70), random_ids(70, 8)
    spec = fusedpg.loss_spec("gspo", anchor="self", reduction="token-mean", entropy_coef=0.1)
    kwargs = {
        "sequence_advantages": tensor([1.0, -2.0]),
        "cu_seqlens": tensor([0, 3, 8], torch.int64),
        "backend": backend,
    }
    runs = [from_logits(spec, logits.clone().requires_grad_(), targets, **kwargs) for _ in range(3)]
    for out, grad in runs[1:]:
        assert_bits(out.loss, runs[0][0].loss)
        assert_bits(grad, runs[0][1])


@pytest.mark.parametrize(
    ("dtype", "count"),
    [
        (torch.bfloat16, 1000),
        (torch.float16, 4096),
        (torch.uint8, 1000),
        (torch.bool, 1000),
        (torch.int64, 1000),
        (torch.float32, 1000),
    ],
    ids=str,
)
def test_case_104_counts_are_exact(backend, dtype, count):
    """pytorch/executorch#20090, huggingface/candle#3727: 16-bit counting stops at 256 or 2048."""
    logp = torch.full((count,), -1.0, dtype=torch.bfloat16)
    spec = fusedpg.loss_spec("reinforce")
    out = fusedpg.policy_loss(spec, logp, advantages=1.0, mask=torch.ones(count, dtype=dtype), backend=backend)
    assert out.weight == count
    assert out.numerator == count
    assert out.metrics["tokens"] == count
    assert out.weight.dtype == out.numerator.dtype == out.loss.dtype == out.per_token.dtype == torch.float32


ADVANTAGES = [
    tensor([1.0, -2.0, 0.0], torch.float64),
    tensor([1, -2, 0], torch.int64),
    tensor([1.0, -2.0, 0.0], torch.bfloat16),
    tensor([1, 1, 0], torch.bool),
    1.5,
    2,
]


@pytest.mark.parametrize("advantages", ADVANTAGES, ids=lambda a: str(a.dtype) if torch.is_tensor(a) else repr(a))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_case_106_no_promotion(backend, dtype, advantages):
    """nikhilbarhate99/PPO-PyTorch#33: float64 rewards promoted the loss."""
    logits, targets = random(3, 5, dtype=dtype).requires_grad_(), random_ids(5, 3)
    if torch.is_tensor(advantages):
        advantages = advantages.to(logits.device)
    old = random(3, seed=1, dtype=torch.float64) * 0.1 - 1.6
    spec = fusedpg.loss_spec("ppo_clip")
    out, grad = from_logits(spec, logits, targets, logp_old=old, advantages=advantages, backend=backend)
    assert grad.dtype == dtype
    for value in (
        out.loss,
        out.numerator,
        out.weight,
        out.logp,
        out.per_token,
        *(out.metrics[name] for name in out.metrics),
    ):
        assert value.dtype == torch.float32
    numbers = advantages.float() if torch.is_tensor(advantages) else torch.full((3,), float(advantages))
    same, same_grad = from_logits(spec, logits, targets, logp_old=old.float(), advantages=numbers, backend=backend)
    assert_bits(out.loss, same.loss)
    assert_bits(grad, same_grad)
    assert math.isfinite(out.loss.item())
