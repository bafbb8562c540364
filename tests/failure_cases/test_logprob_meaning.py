"""Cases 87-96: temperature, scale, soft cap, truncated vocabularies, shifts and shapes."""

import math

import pytest
import torch
from cases import assert_bits, close, from_logits, random, random_ids, tensor

import fusedpg

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("per_row", [False, True])
def test_case_087_sampling_temperature(backend, per_row):
    """huggingface/trl#3029, OpenRLHF/OpenRLHF#853, NVIDIA-NeMo/RL#935: logits not divided by T in one path."""
    temperature = tensor([0.5]) if per_row else 0.5
    logits, target = tensor([[2.0, 0.0, -1.0]]).requires_grad_(), tensor([0], torch.int64)
    out = fusedpg.token_logprobs(logits, target, temperature=temperature, return_entropy=True, backend=backend)
    close(out.logp, [-0.020581])  # not -0.169846
    close(fusedpg.token_logprobs(logits, target, backend=backend).logp, [-0.169846])
    p = torch.softmax(tensor([4.0, 0.0, -2.0], torch.float64), -1)
    close(out.entropy, [-(p * p.log()).sum().item()])
    (grad,) = torch.autograd.grad(out.logp.sum(), logits)
    close(grad, [[2 * (1 - p[0]), -2 * p[1], -2 * p[2]]])  # the factor 1/T
    loss, loss_grad = from_logits(
        fusedpg.loss_spec("reinforce"), logits, target, advantages=1.0, temperature=temperature, backend=backend
    )
    close(loss.loss, 0.020581)
    torch.testing.assert_close(loss_grad, -grad)


@pytest.mark.parametrize("temperature", [0.0, -1.0, INF, NAN, 0])
def test_case_088_temperature_that_is_no_temperature(backend, temperature):
    """THUDM/slime#2197: greedy rollouts pass T = 0."""
    logits, target = tensor([[2.0, 0.0, -1.0]] * 2), tensor([0, 0], torch.int64)
    with pytest.raises(ValueError, match=r"temperature: expected a finite number > 0; got .*greedy rollouts"):
        fusedpg.token_logprobs(logits, target, temperature=temperature, backend=backend)
    if logits.device.type == "cpu":
        with pytest.raises(ValueError, match="temperature: expected finite numbers > 0; got values from"):
            fusedpg.token_logprobs(logits, target, temperature=tensor([1.0, float(temperature)]), backend=backend)


def test_case_088_tiny_temperature(backend):
    """THUDM/slime#2197: legal, and greedy in effect."""
    logits = tensor([[2.0, 0.0, -1.0]] * 2).requires_grad_()
    out = fusedpg.token_logprobs(
        logits, tensor([0, 1], torch.int64), temperature=1e-8, return_entropy=True, backend=backend
    )
    close(out.logp, [0.0, -2e8])
    close(out.entropy, [0.0, 0.0])
    out.logp.sum().backward()
    close(logits.grad, [[0.0] * 3, [-1e8, 1e8, 0.0]])


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_case_089_logit_scale_in_both_passes(backend, scale):
    """ServiceNow/Fast-LLM#228: applied in one pass and not in the other."""
    values, targets = random(3, 5), random_ids(5, 3)
    logits = values.clone().requires_grad_()
    out = fusedpg.token_logprobs(logits, targets, logit_scale=scale, return_entropy=True, backend=backend)

    def truth(x):
        z = torch.log_softmax(x * scale, -1)
        return z.gather(-1, targets[:, None])[:, 0], -(z.exp() * z).sum(-1)

    logp, entropy = truth(values.double())
    close(out.logp, logp.cpu())
    close(out.entropy, entropy.cpu())
    (out.logp.sum() + 0.5 * out.entropy.sum()).backward()
    step, differences = 1e-6, torch.zeros(3, 5, dtype=torch.float64)
    for i in range(3):
        for j in range(5):
            moved = []
            for sign in (1, -1):
                x = values.double().clone()
                x[i, j] += sign * step
                logp, entropy = truth(x)
                moved.append(logp.sum() + 0.5 * entropy.sum())
            differences[i, j] = (moved[0] - moved[1]) / (2 * step)
    torch.testing.assert_close(logits.grad.double(), differences, rtol=0, atol=1e-6)


def test_case_090_soft_cap_literal(backend):
    """unslothai/unsloth-zoo#593, apple/ml-cross-entropy#48, huggingface/trl#5575: the cap did nothing."""
    out = fusedpg.token_logprobs(tensor([[40.0, 0.0]]), tensor([1], torch.int64), softcap=25.0, backend=backend)
    close(out.logp, [-23.0417])  # 25*tanh(40/25) = 23.0417; without the cap -40


@pytest.mark.parametrize("per_row", [False, True])
def test_case_090_order_is_scale_cap_temperature(backend, per_row):
    """unslothai/unsloth-zoo#593, apple/ml-cross-entropy#48: the same order in every path, derivative included."""
    values, targets = random(4, 6, scale=20), random_ids(6, 4)
    scale, cap = 0.8, 25.0
    t = tensor([0.7, 1.0, 1.5, 2.0]) if per_row else 0.7
    eager = values.double().requires_grad_()
    z = torch.log_softmax(cap * torch.tanh(scale * eager / cap) / (t[:, None].double() if per_row else t), -1)
    logp, entropy = z.gather(-1, targets[:, None])[:, 0], -(z.exp() * z).sum(-1)
    (logp.sum() + 0.3 * entropy.sum()).backward()
    kwargs = {"temperature": t, "softcap": cap, "logit_scale": scale, "backend": backend}
    logits = values.clone().requires_grad_()
    out = fusedpg.token_logprobs(logits, targets, return_entropy=True, **kwargs)
    (out.logp.sum() + 0.3 * out.entropy.sum()).backward()
    close(out.logp, logp.detach().cpu(), atol=1e-5)
    close(out.entropy, entropy.detach().cpu(), atol=1e-5)
    torch.testing.assert_close(logits.grad.double(), eager.grad, rtol=1e-5, atol=2e-6)
    spec = fusedpg.loss_spec("reinforce", reduction="token-sum", entropy_coef=-0.3)  # x = logp*1 + 0.3*H
    loss, grad = from_logits(spec, values.clone().requires_grad_(), targets, advantages=-1.0, **kwargs)
    assert_bits(loss.logp, out.logp.detach())
    torch.testing.assert_close(grad, logits.grad, rtol=1e-5, atol=2e-6)


def test_case_091_truncated_vocabulary(backend):
    """vllm-project/vllm#42259, huggingface/trl#6789: without a keep set the result is full-vocabulary."""
    full = tensor([[2.0, 0.0, -1.0]])
    target = tensor([0], torch.int64)
    s = (math.exp(2) + 1) / (math.exp(2) + 1 + math.exp(-1))  # mass of the keep set {0, 1}: 0.958
    assert s == pytest.approx(0.958, abs=5e-4)
    whole = fusedpg.token_logprobs(full, target, backend=backend)
    kept = full.clone()
    kept[0, 2] = -INF
    logits = kept.requires_grad_()
    part = fusedpg.token_logprobs(logits, target, backend=backend)
    close(whole.logp, [-0.169846])
    close(part.logp, [-0.169846 - math.log(s)])
    part.logp.sum().backward()
    assert logits.grad[0, 2] == 0
    outside = fusedpg.token_logprobs(kept.detach(), tensor([2], torch.int64), backend=backend)
    assert outside.logp == -INF
    masked = fusedpg.token_logprobs(kept.detach(), tensor([2], torch.int64), mask=tensor([0.0]), backend=backend)
    assert masked.logp == 0


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "gspo_token"])
def test_case_092_nothing_crosses_a_packed_boundary(backend, name):
    """verl-project/verl#6475, #6564, meta-pytorch/torchtune#2613: scored against the next sequence's first token."""
    ids = tensor([5, 6, 7, 8, 9, 10], torch.int64)
    cu = tensor([0, 2, 3, 6], torch.int64)
    targets = torch.where(tensor([1, 0, 0, 1, 1, 0]).bool(), ids.roll(-1), -100)  # the last of each segment is ignored
    assert targets.tolist() == [6, -100, -100, 9, 10, -100]
    mask = targets != -100
    values = random(6, 11)
    old = random(6, seed=1) * 0.1 - 2.4

    def run(change):
        logits = values.clone()
        logits[change] += 5.0
        spec = fusedpg.loss_spec(name, reduction="token-sum")
        return from_logits(
            spec,
            logits.requires_grad_(),
            targets,
            logp_old=old,
            sequence_advantages=tensor([1.0, -1.0, 0.5]),
            cu_seqlens=cu,
            mask=mask,
            backend=backend,
        )

    base, base_grad = run(slice(0, 0))
    moved, moved_grad = run(slice(3, 6))  # the third segment
    assert_bits(base.logp[:3], moved.logp[:3])
    assert_bits(base.per_token[:3], moved.per_token[:3])
    assert_bits(base_grad[:3], moved_grad[:3])
    ignored, ignored_grad = run(tensor([1, 2, 5], torch.int64))  # rows that score nothing
    assert_bits(ignored.loss, base.loss)
    assert_bits(ignored_grad, base_grad)


def test_case_093_one_convention_and_exact_shapes(backend):
    """PrimeIntellect-ai/prime-rl#1525, #605, #606: trainer and rollout log-probs one position apart."""
    logp, shifted = tensor([-1.0, -2.0, -3.0]), tensor([-2.0, -3.0, 0.0])
    spec = fusedpg.loss_spec("importance_sampling")
    aligned = fusedpg.policy_loss(spec, logp, logp_old=logp, advantages=1.0, backend=backend)
    assert aligned.metrics["ratio_mean"] == 1
    wrong = fusedpg.policy_loss(spec, logp, logp_old=shifted, advantages=1.0, backend=backend)
    close(wrong.metrics["ratio_mean"], (math.e + math.e + math.exp(-3)) / 3)  # unmistakable
    with pytest.raises(ValueError, match=r"logp_old: expected shape \(2, 3\) .*got \(2, 2\)"):
        fusedpg.policy_loss(spec, torch.zeros(2, 3), logp_old=torch.zeros(2, 2), advantages=1.0, backend=backend)
    # logits[i] scores targets[i]
    logits, targets = random(3, 5), random_ids(5, 3)
    out = fusedpg.token_logprobs(logits, targets, backend=backend)
    close(out.logp, torch.log_softmax(logits.double(), -1).gather(-1, targets[:, None])[:, 0].cpu())


def test_case_094_logits_longer_than_targets(backend):
    """huggingface/trl#3681: cut on the wrong side."""
    with pytest.raises(ValueError, match=r"logits: expected shape \(2, 3, 'V'\).*got \(2, 7, 4\).*slice or shift both"):
        fusedpg.token_logprobs(torch.zeros(2, 7, 4), torch.zeros(2, 3, dtype=torch.int64), backend=backend)


@pytest.mark.parametrize("lengths", [[1], [4], [1, 4]], ids=str)
def test_case_095_one_token_answers_keep_their_axis(backend, lengths):
    """radixark/miles#3186: squeeze removed the token axis."""
    n = sum(lengths)
    cu = tensor([0, *torch.tensor(lengths, device="cpu").cumsum(0).tolist()], torch.int64)
    spec = fusedpg.loss_spec("gspo", anchor="self")
    out = fusedpg.policy_loss_from_logits(
        spec,
        random(n, 2),
        random_ids(2, n),
        sequence_advantages=torch.ones(len(lengths)),
        cu_seqlens=cu,
        return_entropy=True,
        backend=backend,
    )
    assert out.logp.shape == out.entropy.shape == out.per_token.shape == (n,)
    assert out.loss.shape == out.numerator.shape == out.weight.shape == ()


def test_case_095_one_row_one_token(backend):
    """radixark/miles#3186: B = 1, T = 1, V = 2."""
    out = fusedpg.token_logprobs(
        tensor([[[0.0, 0.0]]]), tensor([[1]], torch.int64), return_entropy=True, backend=backend
    )
    assert out.logp.shape == out.entropy.shape == (1, 1)
    close(out.logp, [[-math.log(2)]])


@pytest.mark.parametrize("shape", [(2, 4), (2, 1), (8,), (1, 8), (2, 8, 1)], ids=str)
def test_case_096_masks_are_not_broadcast(backend, shape):
    """unslothai/unsloth#4081: the mask was a few tokens shorter than the loss."""
    spec = fusedpg.loss_spec("reinforce")
    import re

    message = re.escape(f"mask: expected shape (2, 8) (one value a token, like logp); got {shape}")
    with pytest.raises(ValueError, match=message):
        fusedpg.policy_loss(spec, torch.zeros(2, 8), advantages=1.0, mask=torch.ones(shape), backend=backend)
    with pytest.raises(ValueError, match=message.replace("logp", "targets")):
        fusedpg.token_logprobs(
            torch.zeros(2, 8, 3), torch.zeros(2, 8, dtype=torch.int64), mask=torch.ones(shape), backend=backend
        )
