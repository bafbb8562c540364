"""Cases 39-52: what autograd is owed."""

import math

import pytest
import torch
from cases import assert_bits, close, from_logits, from_logp, leaf, random, random_ids, tensor
from torch.utils.checkpoint import checkpoint

import fusedpg

SPECS = ["ppo_clip", "gspo_token"]


def loss_of(logits, backend, name="ppo_clip", **kwargs):
    """A loss of (N, V) logits with fixed constants; sequences of 1 and N - 1 tokens."""
    n, vocab = logits.shape
    spec = fusedpg.loss_spec(name, entropy_coef=kwargs.pop("entropy_coef", 0.0))
    return fusedpg.policy_loss_from_logits(
        spec,
        logits,
        random_ids(vocab, n),
        logp_old=random(n, seed=1) * 0.1 - math.log(vocab),
        advantages=random(n, seed=2),
        cu_seqlens=tensor([0, 1, n], torch.int64),
        backend=backend,
        **kwargs,
    ).loss


def eager_loss(logits):
    """What loss_of(name="reinforce") computes, in plain torch."""
    n, vocab = logits.shape
    logp = torch.log_softmax(logits.float(), -1).gather(-1, random_ids(vocab, n)[:, None])[:, 0]
    return -(random(n, seed=2) * logp).mean()


@pytest.mark.parametrize("name", SPECS)
def test_case_039_saved_output_of_another_op(backend, name):
    """linkedin/Liger-Kernel#272, #1251, triton-lang/triton#4004: a raw store invisible to the version counter."""
    x = random(2, 4).requires_grad_()
    z = torch.softmax(x, -1)  # its output is saved for backward
    before = z.detach().clone()
    loss_of(z, backend, "reinforce").backward()
    assert_bits(z.detach(), before)
    y = x.detach().clone().requires_grad_()
    eager_loss(torch.softmax(y, -1)).backward()
    torch.testing.assert_close(x.grad, y.grad)
    if backend != "reference":
        unsafe = loss_of(torch.softmax(x, -1), backend, name, inplace=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            unsafe.backward()


@pytest.mark.parametrize("use_reentrant", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
def test_case_040_second_loss_on_the_same_logits(backend, use_reentrant):
    """unslothai/unsloth#5002: saved logits were overwritten in backward."""
    weight = random(3, 6, seed=4)

    def both(hidden, first):
        logits = hidden @ weight
        return first(logits) + logits.square().mean()

    def run(first):
        hidden = random(5, 3, seed=3).requires_grad_()
        if use_reentrant is None:
            loss = both(hidden, first)
        else:
            loss = checkpoint(both, hidden, first, use_reentrant=use_reentrant)
        loss.backward()
        return hidden.grad

    torch.testing.assert_close(run(lambda z: loss_of(z, backend, "reinforce")), run(eager_loss))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_case_041_retained_graph(backend, name, dtype):
    """modelscope/ms-swift#10129, #10130: the second gradient differed; a leaf was refused."""
    logits = random(5, 9, dtype=dtype).requires_grad_()
    loss = loss_of(logits, backend, name, entropy_coef=0.1)
    loss.backward(retain_graph=True)
    first, logits.grad = logits.grad, None
    kept = first.clone()
    loss.backward(retain_graph=True)
    second, logits.grad = logits.grad, None
    loss.backward()
    assert_bits(first, kept)
    assert_bits(logits.grad, second)
    # the first may have been formed in the forward pass: the last bit may differ
    rounding = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(second, first, rtol=rounding, atol=1e-8)


def test_case_042_entropy_and_logp_in_any_order(backend):
    """verl-project/verl#2484: the log-prob routine subtracted the max in place."""
    values, targets = random(4, 6), random_ids(6, 4)

    def together():
        logits = values.clone().requires_grad_()
        out = fusedpg.token_logprobs(logits, targets, return_entropy=True, backend=backend)
        return logits, out.logp, out.entropy

    def apart(order):
        logits = values.clone().requires_grad_()
        got = {}
        for entropy in order:
            out = fusedpg.token_logprobs(logits, targets, return_entropy=entropy, backend=backend)
            got[entropy] = out.entropy if entropy else out.logp
        return logits, got[False], got[True]

    results = []
    for logits, logp, entropy in (together(), apart([False, True]), apart([True, False])):
        (logp.sum() + 0.3 * entropy.sum()).backward()
        results.append((logp.detach(), entropy.detach(), logits.grad))
    for logp, entropy, grad in results[1:]:
        assert_bits(logp, results[0][0])
        assert_bits(entropy, results[0][1])
        torch.testing.assert_close(grad, results[0][2])


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_case_043_inputs_keep_their_bits(backend, name, dtype):
    """NVIDIA/Megatron-LM#1594: an upcast that is a no-op for fp32."""
    logits = random(2, 8, dtype=dtype).requires_grad_()
    before = logits.detach().clone()
    loss = loss_of(logits, backend, name, entropy_coef=0.1)
    assert_bits(logits.detach(), before)
    loss.backward()
    assert_bits(logits.detach(), before)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_case_044_second_backward_with_another_upstream(backend, name, dtype):
    """Dao-AILab/quack#209: saved gradients were scaled in place."""
    logits = random(4, 7, dtype=dtype).requires_grad_()
    loss = loss_of(logits, backend, name, entropy_coef=0.1)
    (first,) = torch.autograd.grad(loss, logits, torch.tensor(1.0), retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad(loss, logits, torch.tensor(3.0), retain_graph=True)
    assert_bits(first, kept)
    rounding = {"rtol": 1e-6, "atol": 1e-8} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-6}
    torch.testing.assert_close(second, 3 * first, **rounding)


def test_case_045_per_token_upstream(backend):
    """linkedin/Liger-Kernel#1298, #968, #678: only the first upstream element was used."""
    values, targets = random(3, 11), tensor([-100, 4, 9], torch.int64)
    mask, w = tensor([0.0, 1.0, 1.0]), tensor([0.0, 2.0, 0.5])
    logits = values.clone().requires_grad_()
    out = fusedpg.token_logprobs(logits, targets, mask=mask, return_entropy=True, backend=backend)
    ((out.logp + 0.1 * out.entropy) * w).sum().backward()
    eager = values.clone().double().requires_grad_()
    z = torch.log_softmax(eager, -1)
    logp = z.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
    ((logp - 0.1 * (z.exp() * z).sum(-1)) * w * mask).sum().backward()
    torch.testing.assert_close(logits.grad.double(), eager.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_case_046_entropy_bonus_has_an_effect(backend, softcap):
    """huggingface/trl#6625: backward received the entropy gradient and never used it."""
    values, targets = random(2, 5, scale=2), random_ids(5, 2)
    kwargs = {"temperature": 0.7, "softcap": softcap, "backend": backend}
    logits = values.clone().requires_grad_()
    (-fusedpg.token_logprobs(logits, targets, return_entropy=True, **kwargs).entropy.sum()).backward()
    eager = values.double().requires_grad_()
    z = torch.log_softmax((softcap * torch.tanh(eager / softcap) if softcap else eager) / 0.7, -1)
    (z.exp() * z).sum().backward()
    assert (logits.grad != 0).all()
    torch.testing.assert_close(logits.grad.double(), eager.grad, rtol=1e-5, atol=1e-6)
    # through the loss: x = -0 * logp - 1 * H
    spec = fusedpg.loss_spec("reinforce", reduction="token-sum", entropy_coef=1.0)
    again = values.clone().requires_grad_()
    _, grad = from_logits(spec, again, targets, advantages=0.0, **kwargs)
    torch.testing.assert_close(grad.double(), eager.grad, rtol=1e-5, atol=1e-6)


def test_case_047_entropy_in_the_loss(backend):
    """huggingface/trl#7125: an in-place multiply on a tensor saved by exp."""
    dtype = torch.float32 if backend == "triton" else torch.float64
    logits = random(3, 5, dtype=dtype).requires_grad_()
    targets = random_ids(5, 3)

    def loss(z):
        out = fusedpg.token_logprobs(z, targets, return_entropy=True, temperature=0.8, backend=backend)
        return (out.logp + 0.01 * out.entropy).sum()

    loss(logits).backward()
    assert torch.isfinite(logits.grad).all()
    if dtype == torch.float64:
        assert torch.autograd.gradcheck(loss, logits)


def test_case_048_no_gradient_is_asked_for(backend):
    """fla-org/flash-linear-attention#1253: evaluation computed gradients too."""
    logits = random(4, 6)
    with_grad = logits.clone().requires_grad_()
    trained = loss_of(with_grad, backend, entropy_coef=0.1)
    plain = loss_of(logits, backend, entropy_coef=0.1)
    with torch.no_grad():
        silent = loss_of(with_grad, backend, entropy_coef=0.1)
    assert not plain.requires_grad
    assert not silent.requires_grad
    assert_bits(plain, trained.detach())
    assert_bits(silent, trained.detach())


def test_case_048_no_vocabulary_sized_buffer_without_grad(native_backend):
    """fla-org/flash-linear-attention#1253: no buffer of the logits' size unless it is needed."""
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(t, torch.Tensor) and "fusedpg" in str(func):
                    sizes.append(t.numel())
            return out

    logits = random(3, 40)
    targets = torch.zeros(3, dtype=torch.int64)
    leaf = logits.clone().requires_grad_()
    spec = fusedpg.loss_spec("reinforce")
    with Sizes():
        fusedpg.policy_loss_from_logits(spec, logits, targets, advantages=1.0, backend=native_backend)
        with torch.no_grad():
            fusedpg.policy_loss_from_logits(spec, leaf, targets, advantages=1.0, backend=native_backend)
            fusedpg.token_logprobs(leaf, targets, return_entropy=True, backend=native_backend)
    assert sizes
    assert max(sizes) < logits.numel()


def test_case_049_correction_weight_is_constant(backend):
    """verl-project/verl#4105: gradients flowed through the correction weight."""
    logp = leaf([-1.0])
    weight = (logp - tensor([-1.5])).exp()  # attached
    out, grad = from_logp(fusedpg.loss_spec("reinforce"), logp, advantages=2.0, is_weights=weight, backend=backend)
    w = math.exp(0.5)
    close(out.loss, w * 2.0)  # w * (-A*logp)
    close(grad, [-w * 2.0])


def test_case_050_constants_are_detached(backend):
    """radixark/miles#1966: old log-probs that carry a graph."""
    logp = leaf([-1.0, -2.0])
    old = logp.clone()
    advantages, ref, weights, mask = leaf([1.0, 1.0]), leaf([-1.5, -2.5]), leaf([1.0, 1.0]), leaf([1.0, 1.0])
    spec = fusedpg.loss_spec("ppo_clip", reduction="token-sum", kl="k1", kl_coef=0.25)
    out = fusedpg.policy_loss(
        spec, logp, logp_old=old, advantages=advantages, logp_ref=ref, is_weights=weights, mask=mask, backend=backend
    )
    out.loss.backward()
    close(logp.grad, [-0.75, -0.75])  # -A*r + 0.25, r = 1: as if old were a constant
    for constant in (advantages, ref, weights, mask):
        assert constant.grad is None


@pytest.mark.parametrize("low", [None, 0.8])
def test_case_051_cispo_learns_from_clipped_tokens(backend, low):
    """areal-project/AReaL#1412, linkedin/Liger-Kernel#1054: a clipped ratio has no gradient, a clipped weight has."""
    old, logp = [-1.0 - math.log(2.0)], [-1.0]
    cispo = fusedpg.loss_spec("cispo", clip_low=low, clip_high=1.3)
    out, grad = from_logp(cispo, leaf(logp), logp_old=tensor(old), advantages=1.0, backend=backend)
    close(grad, [-1.3])
    close(out.loss, 1.3)  # -q*A*logp = -1.3*1*(-1)
    assert out.metrics["clip_frac_high"] == 1
    ppo = fusedpg.loss_spec("ppo_clip", clip_low=low, clip_high=1.3)
    clipped, no_grad = from_logp(ppo, leaf(logp), logp_old=tensor(old), advantages=1.0, backend=backend)
    close(clipped.loss, -1.3)
    assert no_grad == 0
    negative, _ = from_logp(cispo, leaf(logp), logp_old=tensor(old), advantages=-1.0, backend=backend)
    assert negative.metrics["clip_frac"] == 0  # ratio > upper counts for A > 0 only
    assert negative.metrics["out_of_band_frac"] == 1


@pytest.mark.parametrize("name", SPECS)
def test_case_052_compiled_loss_equals_eager(native_backend, name):
    """pytorch/pytorch#180642: a compiled autograd function returned wrong outputs."""

    spec = fusedpg.loss_spec(name)

    def loss(logits, targets, old):
        return fusedpg.policy_loss_from_logits(
            spec,
            logits,
            targets,
            logp_old=old,
            **({"advantages": 1.0} if name == "ppo_clip" else {"advantages": old + 3.0}),
            cu_seqlens=torch.arange(0, 2, device=logits.device) * targets.shape[0],
            backend=native_backend,
        ).loss

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (17, 100 if native_backend == "triton" and not torch.cuda.is_available() else 1000):
        grads = []
        for f in (loss, compiled):
            logits = random(rows, 6).requires_grad_()
            value = f(logits, random_ids(6, rows), random(rows, seed=1) * 0.1 - 2)
            value.backward()
            grads.append((value.detach(), logits.grad))
        assert_bits(grads[0][0], grads[1][0])
        torch.testing.assert_close(grads[0][1], grads[1][1], rtol=1e-6, atol=1e-8)
