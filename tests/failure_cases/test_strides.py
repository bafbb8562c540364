"""Cases 34-38: strided, sliced, transposed and expanded arguments."""

from functools import partial

import pytest
import torch
from cases import assert_bits, from_logits, random, random_ids, tensor

import fusedpg

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_case_034_every_argument_strided(backend, dtype):
    """unslothai/unsloth#10713: flattened by view, read with unit stride."""
    base = random(6, 14, dtype=dtype)
    logits = base[:, ::2]
    targets = random_ids(7, 6, 2)[:, 0]
    mask = (random(6, 3, seed=1) > -0.5)[:, 1]
    old, ref = (random(6, 2, seed=2) - 2)[:, 1], (random(12, seed=3) - 2)[::2]
    advantages = tensor(1.5).expand(6)
    for t in (logits, targets, mask, old, ref):
        assert not t.is_contiguous()
    spec = fusedpg.loss_spec("grpo", reduction="token-mean", entropy_coef=0.1)
    leaf = base.clone().requires_grad_()
    strided, g_base = from_logits_of(
        leaf, leaf[:, ::2], spec, targets, logp_old=old, logp_ref=ref, mask=mask, advantages=advantages, backend=backend
    )
    copy = logits.contiguous().requires_grad_()
    plain, g_plain = from_logits(
        spec,
        copy,
        targets.contiguous(),
        logp_old=old.contiguous(),
        logp_ref=ref.contiguous(),
        mask=mask.contiguous(),
        advantages=advantages.contiguous(),
        backend=backend,
    )
    assert_bits(strided.loss, plain.loss)
    assert_bits(g_base[:, ::2], g_plain)
    assert (g_base[:, 1::2] == 0).all()


def from_logits_of(leaf, logits, spec, targets, **kwargs):
    """The loss of a view and the gradient of its leaf."""
    out = fusedpg.policy_loss_from_logits(spec, logits, targets, normalizer=1.0, **kwargs)
    (grad,) = torch.autograd.grad(out.loss, leaf)
    return out, grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_case_034_padded_batch_transposed(backend, dtype):
    """unslothai/unsloth#10713: a (T, B, V) batch seen as (B, T, V)."""
    base = random(4, 3, 5, dtype=dtype)
    targets = random_ids(5, 4, 3).t()
    leaf = base.clone().requires_grad_()
    spec = fusedpg.loss_spec("gspo_token")
    kwargs = {"logp_old": (random(4, 3) - 2).t(), "advantages": random(4, 3, seed=5).t(), "backend": backend}
    out, grad = from_logits_of(leaf, leaf.transpose(0, 1), spec, targets, **kwargs)
    copy = base.transpose(0, 1).contiguous().requires_grad_()
    plain, plain_grad = from_logits(
        spec, copy, targets.contiguous(), **{k: v.contiguous() if torch.is_tensor(v) else v for k, v in kwargs.items()}
    )
    assert_bits(out.loss, plain.loss)
    torch.testing.assert_close(grad.transpose(0, 1), plain_grad, rtol=1e-6, atol=1e-7)
    assert out.logp.shape == (3, 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_case_035_dropped_vocabulary_columns(backend, dtype):
    """vllm-project/vllm#42684, #42739: row pointer = row*V instead of row*stride."""
    base = random(4, 10, dtype=dtype)
    base[:, 8:] = 1e4
    targets = random_ids(8, 4)
    spec = fusedpg.loss_spec("reinforce", entropy_coef=0.1)
    leaf = base.clone().requires_grad_()
    out, grad = from_logits_of(leaf, leaf[:, :8], spec, targets, advantages=1.0, backend=backend)
    plain, plain_grad = from_logits(
        spec, base[:, :8].clone().requires_grad_(), targets, advantages=1.0, backend=backend
    )
    # on Triton the bits of a row follow its alignment, which dropped columns change
    same = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-7) if backend == "triton" else assert_bits
    same(out.loss, plain.loss)
    same(grad[:, :8], plain_grad)
    assert (grad[:, 8:] == 0).all()
    if backend != "reference":
        copy = leaf.clone()
        loss = fusedpg.policy_loss_from_logits(
            spec, copy[:, :8], targets, advantages=1.0, inplace=True, backend=backend
        ).loss
        (grad,) = torch.autograd.grad(loss, leaf)
        assert_bits(copy.detach()[:, 8:], base[:, 8:])
        assert (grad[:, 8:] == 0).all()


def test_case_036_last_logits_of_each_row(backend):
    """unslothai/unsloth-zoo#591: view where reshape is needed."""
    base = random(2, 6, 16)
    targets = random_ids(16, 2, 3)
    sliced = fusedpg.token_logprobs(base[:, 2:5, :], targets, return_entropy=True, backend=backend)
    plain = fusedpg.token_logprobs(base[:, 2:5, :].contiguous(), targets, return_entropy=True, backend=backend)
    assert_bits(sliced.logp, plain.logp)
    assert_bits(sliced.entropy, plain.entropy)


def test_case_037_inplace_refuses_what_it_cannot_alias(backend):
    """ROCm/aiter#5165: the gradient went into a temporary copy."""
    leaf = random(5, 4).requires_grad_()
    logits = (leaf * 1.0).transpose(0, 1)
    with pytest.raises(ValueError, match=r"inplace: expected unit stride along the vocabulary; got strides \(1, 4\)"):
        fusedpg.policy_loss_from_logits(
            fusedpg.loss_spec("reinforce"), logits, random_ids(5, 4), advantages=1.0, inplace=True, backend=backend
        )


def test_case_038_expanded_rows(backend):
    """NVIDIA-NeMo/Automodel#3854: rows share memory; a strided float mask was read at wrong offsets."""
    row = random(1, 8).requires_grad_()
    targets = random_ids(8, 4)
    mask = random(4, 12, seed=1).abs().clamp(max=1)[:, ::3].t()[0]
    spec = fusedpg.loss_spec("reinforce", reduction="token-sum")
    out, grad = from_logits_of(row, row.expand(4, 8), spec, targets, advantages=1.0, mask=mask, backend=backend)
    copy = row.detach().repeat(4, 1).requires_grad_()
    plain, plain_grad = from_logits(spec, copy, targets, advantages=1.0, mask=mask.contiguous(), backend=backend)
    assert_bits(out.loss, plain.loss)
    torch.testing.assert_close(grad, plain_grad.sum(0, keepdim=True))
    with pytest.raises(ValueError, match="inplace: expected logits whose elements do not share memory"):
        fusedpg.policy_loss_from_logits(
            spec, row.expand(4, 8), targets, advantages=1.0, mask=mask, inplace=True, backend=backend
        )
