"""Cases of the path from hidden states and an output head: precision and equal bits."""

import math

import pytest
import torch
from cases import assert_bits, eager_head, head, leaves, random, random_ids, tensor

import fusedpg
from fusedpg import linear_plan, linear_walk

BF16, F32 = torch.bfloat16, torch.float32


def small_chunks(monkeypatch, rows=4, least=4):
    """Chunks of a few rows instead of thousands."""
    for module in (linear_plan, linear_walk):
        monkeypatch.setattr(module, "GRANULE", rows)
    monkeypatch.setattr(linear_plan, "LEAST_ROWS", least)
    monkeypatch.setattr(linear_plan, "MOST_ROWS", rows)


def test_case_097_an_fp16_projection_beyond_its_range(backend):
    """unslothai/unsloth-zoo#599: logits above 65504 overflowed in fp16."""
    hidden, weight = torch.full((1, 64), 64.0, dtype=torch.float16), torch.full((8, 64), 32.0, dtype=torch.float16)
    out = fusedpg.linear_token_logprobs(hidden, weight, tensor([3], torch.int64), return_entropy=True, backend=backend)
    torch.testing.assert_close(out.logp, tensor([-math.log(8)]), rtol=1e-6, atol=0)
    torch.testing.assert_close(out.entropy, tensor([math.log(8)]), rtol=1e-6, atol=0)


def test_case_099_hidden_and_logits_paths_agree(backend):
    """huggingface/trl#7084: cached and fresh log-probs disagreed."""
    hidden, weight, bias, targets = head(6, 16, 50, BF16)
    logits = torch.nn.functional.linear(hidden.float(), weight.float(), bias.float())
    kwargs = {"bias": bias, "backend": backend}
    fresh = fusedpg.linear_token_logprobs(*leaves(hidden, weight), targets, **kwargs).logp.detach()
    with torch.no_grad():
        cached = fusedpg.linear_token_logprobs(hidden, weight, targets, **kwargs).logp
    spec = fusedpg.loss_spec("ppo_clip")
    mine = leaves(hidden, weight)
    out = fusedpg.policy_loss_from_hidden(spec, *mine, targets, logp_old=cached, advantages=1.0, **kwargs)
    assert_bits(cached, fresh)
    assert_bits(cached, out.logp)
    assert out.metrics["ratio_max"] == out.metrics["ratio_min"] == 1
    of_logits = fusedpg.token_logprobs(logits, targets, backend=backend).logp
    torch.testing.assert_close(cached, of_logits, rtol=1e-6, atol=1e-6)


def test_case_100_no_copy_of_the_weight_outlives_a_call(backend):
    """allenai/open-instruct#1387, PrimeIntellect-ai/prime-rl#2438: a cached fp32 head went stale, a tied one was cast."""
    tied = random(8, 16, dtype=BF16).requires_grad_()
    targets, storage = random_ids(8, 5), tied.data_ptr()
    hidden = torch.nn.functional.embedding(targets, tied).detach()
    before = fusedpg.linear_token_logprobs(hidden, tied, targets, backend=backend).logp.detach()
    with torch.no_grad():
        tied.mul_(2)
    after = fusedpg.linear_token_logprobs(hidden, tied, targets, backend=backend).logp.detach()
    assert (tied.dtype, tied.data_ptr()) == (BF16, storage)
    torch.testing.assert_close(
        after.double(), eager_head(hidden, tied, None, targets)[0].detach(), rtol=1e-5, atol=1e-5
    )
    assert (after != before).any()


@pytest.mark.parametrize("chunk", [4, 64, 1024, 4096])
def test_case_101_weight_gradient_of_many_chunks(chunk, monkeypatch):
    """apple/ml-cross-entropy#14, linkedin/Liger-Kernel#1391, axolotl-ai-cloud/axolotl#1601: dW summed in bf16."""
    hidden, weight, _, targets = head(4096, 64, 32, BF16)
    weight = weight / 8
    advantages = random(4096, seed=9)
    small_chunks(monkeypatch, chunk, chunk)
    grads = []
    for backend, dtype in (("cpu", BF16), ("reference", torch.float64)):
        mine = leaves(hidden.to(dtype), weight.to(dtype))
        fusedpg.policy_loss_from_hidden(
            fusedpg.loss_spec("reinforce"), *mine, targets, advantages=advantages, backend=backend
        ).loss.backward()
        grads.append([leaf.grad for leaf in mine])
    for got, want in zip(*grads, strict=True):
        assert got.dtype == BF16
        once = (want.to(BF16).double() - want).norm()
        assert (got.double() - want).norm() <= 2 * once


def test_case_103_gradients_of_the_head_repeat():
    """pytorch/pytorch#17350: the order of float adds changed from run to run."""
    hidden, weight, bias, targets = head(4096, 16, 50)
    results = []
    for _ in range(50):
        mine = leaves(hidden, weight, bias)
        out = fusedpg.policy_loss_from_hidden(
            fusedpg.loss_spec("reinforce"),
            *mine[:2],
            targets,
            bias=mine[2],
            advantages=random(4096, seed=3),
            backend="cpu",
        )
        out.loss.backward()
        results.append([out.loss.detach(), *(leaf.grad for leaf in mine)])
    for other in results[1:]:
        for a, b in zip(other, results[0], strict=True):
            assert_bits(a, b)


def test_case_105_fp32_products_are_fp32(backend):
    """evintunador/triton_docs_tutorials#6: matrix products silently used TF32, 1e-3 of error; fp32 makes 1e-6."""
    hidden, weight, _, targets = head(40, 64, 70)
    mine, exact = leaves(hidden, weight / 8), leaves(hidden.double(), weight.double() / 8)
    fusedpg.linear_token_logprobs(*mine, targets, backend=backend).logp.sum().backward()
    eager_head(*exact, None, targets)[0].sum().backward()
    for a, b in zip(mine, exact, strict=True):
        assert (a.grad.double() - b.grad).abs().max() <= 3e-6 * b.grad.abs().max()
