"""The ratio's level as the guide states it: the token path keeps its bits, on-policy both agree, GSPO is the paper's."""

import itertools
import math

import pytest
import torch
from toy import CONTEXT, Policy, assert_same, gradients, make_batch, split, whole_gradients

import fusedpg
from fusedpg.accumulate import StepAccumulator
from fusedpg.builders import build_grpo_objective
from fusedpg.config import LOSS_TYPES, GRPOConfig
from support import F32, backend_device

SEQUENCE = {"importance_sampling_level": "sequence", "lower_bound_ratio": 0}


def spec_of(**knobs):
    return build_grpo_objective(GRPOConfig(**knobs), CONTEXT).fn.keywords["spec"]


def surrogate(logp, old, a, mask, loss_type):
    """The clipped surrogate as it is without a level: (loss, per token), a row a sequence."""
    r = torch.where(mask, logp - old, 0.0).clamp(-20, 20).exp()
    x = torch.max(-a * r, -a * r.clamp(0.8, 1.2))
    x = torch.where(a < 0, torch.min(x, -3 * a), x)
    w = mask.to(logp.dtype)
    if loss_type == "seq-mean-token-mean":
        w = w / mask.sum(1, keepdim=True).clamp(min=1)
    elif loss_type == "seq-mean-token-sum-fixed":
        w = w / CONTEXT.max_response_length
    units = mask.sum() if loss_type == "token-mean" else mask.any(1).sum()
    return (torch.where(mask, x, 0.0) * w).sum() * (1 / units.to(logp.dtype)), x.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("knob", [{}, {"importance_sampling_level": "token"}], ids=["absent", "token"])
def test_the_token_level_has_the_bits_of_the_surrogate_without_one(knob, loss_type, dtype):
    """ "byte-identical to the surrogate before the knob existed": value, per token and gradient, in the reference."""
    batch = make_batch()
    logits = Policy()(batch).detach()
    logp = fusedpg.token_logprobs(logits, batch["targets"], backend="reference").logp.to(dtype)
    old, a = batch["logp_old"].to(dtype), batch["sequence_advantages"].to(dtype)
    mine, theirs = logp.clone().requires_grad_(), logp.clone().requires_grad_()
    streams = {"logp_old": old, "sequence_advantages": a, "mask": batch["mask"], "backend": "reference"}
    out = fusedpg.policy_loss(spec_of(loss_type=loss_type, **knob), mine, **streams)
    out.loss.backward()
    want, per_token = surrogate(theirs, old, a[:, None], batch["mask"], loss_type)
    want.backward()
    assert out.metrics["clip_frac"] > 0
    assert torch.equal(out.loss, want)
    assert torch.equal(out.per_token[batch["mask"]], per_token[batch["mask"]])
    assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_on_policy_the_levels_agree(loss_type, packed, backend):
    """ "on-policy the two levels agree exactly in value and gradient under every loss_type", on every backend."""
    batch = make_batch(packed=packed)
    device = backend_device(backend)
    logits = Policy()(batch).detach().to(device, torch.float32)
    targets, mask = batch["targets"].to(device), batch["mask"].to(device)
    streams = {"mask": mask, "sequence_advantages": batch["sequence_advantages"].float().to(device)}
    streams["cu_seqlens"] = batch["cu_seqlens"].to(device) if packed else None
    old = fusedpg.token_logprobs(logits, targets, mask=mask, backend=backend).logp
    results = []
    for knobs in ({"lower_bound_ratio": 0}, SEQUENCE):
        spec = spec_of(loss_type=loss_type, epsilon_low=0.01, epsilon_high=0.01, **knobs)
        leaf, logp = logits.clone().requires_grad_(), old.clone().requires_grad_()
        out = fusedpg.policy_loss_from_logits(spec, leaf, targets, logp_old=old, backend=backend, **streams)
        out.loss.backward()
        fusedpg.policy_loss(spec, logp, logp_old=old, backend=backend, **streams).loss.backward()
        results.append((leaf.grad, out.loss, out.per_token, logp.grad))
    (token_grad, *token), (sequence_grad, *sequence) = results
    assert token_grad.any()
    assert all(torch.equal(t, s) for t, s in zip(token, sequence, strict=True))
    # the core's one-pass kernel keeps the exponentials that its two-pass kernel forms again relative to the row's sum
    roundings = 2 if backend == "cpu" else 0
    torch.testing.assert_close(token_grad, sequence_grad, rtol=0, atol=roundings * F32 * float(token_grad.abs().max()))


def test_gspo_is_the_papers_objective():
    """ "For the one scalar advantage per response … equals the paper's objective in value, clip decision, and gradient".

    The paper's s_i carries its gradient through the mean over the response.
    """
    batch = make_batch()
    rl = GRPOConfig(**SEQUENCE, epsilon_low=0.009, epsilon_high=0.01, loss_type="seq-mean-token-mean")
    loss, got, metrics = whole_gradients(build_grpo_objective(rl, CONTEXT), batch)
    model = Policy()
    logp = torch.log_softmax(model(batch), -1).gather(-1, batch["targets"][..., None])[..., 0]
    m = batch["mask"].double()
    z = ((logp - batch["logp_old"]) * m).sum(1) / m.sum(1).clamp(min=1)
    s, a = z.exp(), batch["sequence_advantages"]
    real = m.any(1)
    want = -torch.min(s * a, s.clamp(0.991, 1.01) * a)[real].mean()
    want.backward()
    torch.testing.assert_close(loss, want.detach())
    assert_same(got, gradients(model))
    dropped = ((s > 1.01) & (a > 0)) | ((s < 0.991) & (a < 0))
    assert 0 < dropped[real].sum() < real.sum()
    assert metrics["grpo/clip_frac"] == m.sum(1)[dropped].sum() / m.sum()


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "expected", "trains"),
    [
        (12.0, -1.0, math.exp(10.0), False),  # -A*e^10: the cap is the only bound, and no gradient passes it
        (9.0, -1.0, math.exp(9.0), True),
        (12.0, 1.0, -1.0004, False),  # the epsilon clip's bound 1 + 4e-4
        (-30.0, 1.0, -math.exp(-30.0), True),  # not capped from below
        (-30.0, -1.0, 0.9997, False),
    ],
)
def test_the_log_ratio_is_capped_at_10_from_above_alone(log_ratio, advantage, expected, trains, backend):
    """ "clamped from above at 10 and not from below: … with no dual clip this cap is the only bound on a negative one" """
    spec = spec_of(**SEQUENCE, epsilon_low=3e-4, epsilon_high=4e-4)
    logp = torch.full((1, 2), -1.0, device=backend_device(backend)).requires_grad_()
    out = fusedpg.policy_loss(
        spec,
        logp,
        logp_old=logp.detach() - log_ratio,
        sequence_advantages=logp.new_tensor([advantage]),
        backend=backend,
    )
    out.loss.backward()
    assert out.loss.item() == pytest.approx(expected, rel=1e-4)
    assert bool(logp.grad.any()) == trains


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_two_response_level_diagnostics(packed):
    """ "the two response-level diagnostics": each response once, whatever its length; the same over chunks."""
    batch = make_batch(packed=packed)
    rl = GRPOConfig(**SEQUENCE, epsilon_low=0.009, epsilon_high=0.01, loss_type="seq-mean-token-mean")
    objective = build_grpo_objective(rl, CONTEXT)
    metrics = whole_gradients(objective, batch)[2]
    logp = fusedpg.token_logprobs(Policy()(batch), batch["targets"], backend="reference").logp.detach()
    rows = zip(*(by_sequence(batch, x) for x in (logp - batch["logp_old"], batch["mask"])), strict=True)
    z = torch.stack([d[m].mean() for d, m in rows])
    a, s = batch["sequence_advantages"], z.exp()
    dropped = ((s > 1.01) & (a > 0)) | ((s < 0.991) & (a < 0))
    real = ~z.isnan()  # a response without a token has no mean
    assert 0 < real.sum() < len(z)
    torch.testing.assert_close(metrics["grpo/response_ratio_mean"], s[real].mean())
    assert metrics["grpo/response_clip_frac"] == dropped[real].float().mean()
    assert metrics["grpo/response_clip_frac"] != metrics["grpo/clip_frac"]
    step = StepAccumulator(objective, Policy()).step(split(batch, [1, 2, 4]))
    for name in ("response_ratio_mean", "response_clip_frac"):
        torch.testing.assert_close(step.metrics[f"train/{name}"].double(), metrics[f"grpo/{name}"].double())
    at_token_level = whole_gradients(build_grpo_objective(GRPOConfig(), CONTEXT), batch)[2]
    assert not any("response" in name for name in at_token_level)


def by_sequence(batch, values):
    """A tensor a sequence."""
    if "cu_seqlens" not in batch:
        return list(values)
    return [values[a:b] for a, b in itertools.pairwise(batch["cu_seqlens"].tolist())]


def test_response_diagnostics_of_a_chunk_without_a_token():
    batch = make_batch()
    batch["mask"] = torch.zeros_like(batch["mask"])
    rl = GRPOConfig(**SEQUENCE, epsilon_low=3e-4, epsilon_high=4e-4)
    metrics = whole_gradients(build_grpo_objective(rl, CONTEXT), batch)[2]
    assert metrics["grpo/response_ratio_mean"] == metrics["grpo/response_clip_frac"] == 0
