"""Stages A, B and C in one pass over the logits against the three of them apart, to the bit, for every build."""

from __future__ import annotations

import pytest
import torch
from token_cases import batch, given
from token_specs import SPECS

from fusedpg import cpu
from fusedpg.spec import STREAMS

NAMES = (
    "CLIPPED_RATIO-TOKEN-K3-LIVE",
    "CISPO-TOKEN-entropy",
    "CLIPPED_RATIO-SEQUENCE-plain",
    "SAPO-TOKEN-missing-TOKEN",
    "TOPR-TOKEN-keep-KL-True",
    "IMPORTANCE_RATIO-TOKEN-kl-cov",
    "REINFORCE-TOKEN-penalty",
    "CLIPPED_RATIO-TOKEN-observed",
    "IMPORTANCE_RATIO-SEQUENCE-token-clip",
    "VESPO-TOKEN-observed",
    "SAPO-TOKEN-everything",
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_one_pass_is_the_three_stages_to_the_bit(isa: str, name: str, dtype: torch.dtype) -> None:
    spec, vocab, n = SPECS[name], 5003, 24
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    g = torch.Generator().manual_seed(0)
    logits = (2 * torch.randn(2, 12, vocab, generator=g, dtype=torch.float64)).to(dtype)
    targets = torch.randint(0, vocab, (n,), generator=g)
    b = batch(n, compute)
    observed = b["obs_weights"] != 0 if spec.obs_coef else torch.zeros(n, dtype=torch.bool)
    read = (b["w"] != 0) | observed
    logits.view(n, vocab)[~read] = torch.nan
    base = torch.log_softmax(logits.view(n, vocab).double(), -1).gather(1, targets[:, None])[:, 0]
    for i, s in enumerate(("logp_old", "logp_ref", "logp_rollout")):
        b[s] = (base + 0.1 * (i + 1) * torch.randn(n, generator=g)).to(compute)
    streams = [given(spec, b, True)[s] for s in STREAMS]
    cu, scale = torch.tensor([0, 12, 24]), torch.tensor(0.25, dtype=compute)
    args = (targets, b["w"], scale, streams, cu, None, 0.8, 0.0, 1.0, False)
    grad = torch.full_like(logits, torch.nan)
    got = cpu.loss_forward(spec.encode(), logits, *args, grad)

    want_entropy = spec.entropy_coef != 0
    rows = cpu.logprob_forward(logits, targets, read, None, 0.8, 0.0, 1.0, want_entropy)
    tokens = cpu.token_loss(spec.encode(), rows[0], rows[1], b["w"], streams, cu)
    want = torch.full_like(logits, torch.nan)
    e = tokens[2] * scale if want_entropy else None
    h = rows[1] if want_entropy else None
    cpu.logprob_backward(logits, targets, rows[2], rows[3], h, tokens[1] * scale, e, None, 0.8, 0.0, 1.0, want)
    assert all(torch.equal(a, w) for a, w in zip(got, (*rows, *tokens), strict=True))
    assert torch.equal(grad, want)
    assert grad.isfinite().all()
    assert (grad.view(n, vocab)[~read] == 0).all()
    assert (grad != 0).any()
    assert not spec.obs_coef or (grad.view(n, vocab)[(b["w"] == 0) & observed] != 0).any(), "observation rows are read"
    assert all(
        torch.equal(a, w) for a, w in zip(cpu.loss_forward(spec.encode(), logits, *args, None), got, strict=True)
    )
    cpu.loss_forward(spec.encode(), logits, *args, logits)
    assert torch.equal(logits, want)
