"""Paths of the core that only big or special input takes: whole huge pages in stage B, the integer maximum of bf16."""

import pytest
import torch

import fusedpg


def test_a_million_tokens_in_whole_huge_pages():
    """Outputs above 2 MB begin at a page boundary inside a larger allocation; a bool mask is read as it is."""
    n = (1 << 20) + 13
    logp_old, advantages = -torch.rand(n), torch.randn(n)
    mask = torch.rand(n) > 0.3
    results = []
    for backend in ("cpu", "reference"):
        logp = (logp_old + 0.1 * advantages).requires_grad_()
        out = fusedpg.policy_loss(
            fusedpg.loss_spec("ppo_clip"), logp, logp_old=logp_old, advantages=advantages, mask=mask, backend=backend
        )
        out.loss.backward()
        results.append((out.loss.detach(), out.per_token, logp.grad))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shift", [0.0, -1000.0, 1000.0])
def test_bf16_rows_of_every_sign(shift: float):
    """All negative, all positive, mixed, zeros of both signs, infinities: equal to fp64 of the stored logits."""
    vocab = 9001
    rows = (2 * torch.randn(4, vocab) + shift).to(torch.bfloat16)
    rows[2] = -rows[2].abs()
    rows[2, 5] = -0.0
    rows[3, 4100:] = -torch.inf
    targets = torch.tensor([0, 4097, 5, 17])
    got = fusedpg.token_logprobs(rows, targets, backend="cpu").logp
    want = torch.log_softmax(rows.double(), -1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", [0x7FC0, -0x0040])  # +NaN and -NaN
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_bf16_nan_of_either_sign_stays(bits: int, sign: float):
    rows = (sign * (1 + torch.rand(1, 9001))).to(torch.bfloat16)
    rows.view(torch.int16)[0, 5000] = bits
    assert rows[0, 5000].isnan()
    assert fusedpg.token_logprobs(rows, torch.tensor([3]), backend="cpu").logp.isnan().all()
