"""The autograd contract: upstream gradients, retained graphs, no-grad, in place, gradcheck, aliasing."""

import functools

import pytest
import torch

import fusedpg
from support import TERMS, applies, backend_device, make_case, run, spec_for


def loss_of(spec, case, backend: str, logits: torch.Tensor, **extra):
    device = backend_device(backend)
    kwargs = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in {**case.kwargs, **extra}.items()}
    return fusedpg.policy_loss_from_logits(spec, logits, case.targets.to(device), backend=backend, **kwargs)


def leaf_of(case, backend: str) -> torch.Tensor:
    return case.logits.to(backend_device(backend)).clone().requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "gspo_token"])
@pytest.mark.parametrize("terms", ["plain", "k3-entropy"])
def test_retained_graph_twice(name: str, terms: str, dtype: torch.dtype, backend: str):
    """A second backward with upstream 3 gives three times the first; the first gradient is left alone."""
    spec = spec_for(name, "token-mean", terms)
    case = make_case(spec, dtype=dtype, packed=True)
    logits = leaf_of(case, backend)
    out = loss_of(spec, case, backend, logits)
    (first,) = torch.autograd.grad(out.loss, logits, retain_graph=True)
    kept = first.clone()
    (again,) = torch.autograd.grad(out.loss, logits, retain_graph=True)
    (third,) = torch.autograd.grad(out.loss, logits, torch.tensor(3.0, device=logits.device))
    rounding = 2 * torch.finfo(dtype).eps
    assert torch.equal(first, kept)
    torch.testing.assert_close(again, first, rtol=rounding, atol=1e-7)
    torch.testing.assert_close(third, 3 * first, rtol=2 * rounding, atol=1e-7)


@pytest.mark.parametrize("upstream", [0.0, -1.0, 0.125, 65536.0])
@pytest.mark.parametrize("name", ["ppo_clip", "gspo"])
def test_upstream_gradient_of_the_loss(name: str, upstream: float, backend: str):
    spec = spec_for(name, "token-mean", "k3-entropy")
    case = make_case(spec, dtype=torch.float32, packed=True)
    want = run(spec, case, "reference", double=True, upstream=upstream)
    got = run(spec, case, backend, upstream=upstream)
    torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-6 * max(1.0, abs(upstream)))
    if upstream == 0.0:
        assert (got.grad == 0).all()


def test_upstream_gradients_of_logprobs(backend: str):
    """Per-token, expanded and missing upstream gradients of logp and entropy."""
    device = backend_device(backend)
    logits = torch.randn(2, 3, 17, dtype=torch.float32)
    targets = torch.randint(0, 17, (2, 3))
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]], dtype=torch.bool)

    def grads(name: str, x: torch.Tensor, weigh):
        x = x.detach().requires_grad_()
        out = fusedpg.token_logprobs(x, targets.to(x.device), mask=mask.to(x.device), return_entropy=True, backend=name)
        weigh(out).backward()
        return x.grad.double().cpu()

    w = torch.randn(2, 3)
    for weigh in (
        lambda o: (o.logp * w.to(o.logp)).sum(),
        lambda o: o.logp.sum(),  # an expanded gradient
        lambda o: -o.entropy.sum(),
        lambda o: (o.logp * w.to(o.logp) + 0.01 * o.entropy).sum(),
        lambda o: 0.0 * o.logp.sum(),
    ):
        got, want = grads(backend, logits.to(device), weigh), grads("reference", logits.double(), weigh)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
        assert (got[~mask] == 0).all()


def has_stop_gradient(spec: fusedpg.LossSpec) -> bool:
    """Whether some part of the loss is a constant of the current log-probs by definition."""
    return (
        spec.kl_gradient.name != "OWN"
        or spec.kl_ratio.name == "DETACHED"
        or (spec.has_kl_forward and spec.kl_forward.name == "SCORE")
        or spec.level.name == "SEQUENCE_TOKEN"
        or spec.surrogate.name in ("CISPO", "TOPR", "VESPO")
        or (spec.has_correction and spec.anchor.name != "OLD")
        or spec.batch_global
    )


def also_reads(spec: fusedpg.LossSpec, like: torch.Tensor) -> dict[str, torch.Tensor]:
    """The optional inputs that a loss insists on."""
    extra = {}
    if spec.needs_logp_rollout:
        extra["logp_rollout"] = like
    if spec.obs_coef:
        extra["obs_mask"] = torch.zeros_like(like, dtype=torch.bool)
    return extra


@pytest.mark.parametrize("name", fusedpg.CATALOGUE)
@pytest.mark.parametrize("backend_name", ["reference", "cpu"])
def test_gradcheck_from_logits(name: str, backend_name: str):
    checked = 0
    for terms in TERMS:
        if not applies(name, terms):
            continue
        spec = spec_for(name, "seq-mean-token-mean", terms)
        case = make_case(spec, dtype=torch.float64, packed=True, vocab=5, lengths=(3, 1, 2), seed=11)
        if has_stop_gradient(spec):
            continue  # the derivative differs from that of the value, on purpose
        checked += 1
        case.logits = torch.nan_to_num(case.logits)  # finite differences would read the masked NaN
        leaf = case.logits.requires_grad_()
        loss = functools.partial(loss_of, spec, case, backend_name)
        assert torch.autograd.gradcheck(lambda x, loss=loss: loss(x).loss, (leaf,))
    assert checked > 1 or has_stop_gradient(fusedpg.CATALOGUE[name])


@pytest.mark.parametrize("backend_name", ["reference", "cpu"])
def test_gradcheck_of_logprobs_and_entropy(backend_name: str):
    logits = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 5, 2])

    def f(x):
        out = fusedpg.token_logprobs(
            x, targets, temperature=0.7, softcap=2.0, logit_scale=1.5, return_entropy=True, backend=backend_name
        )
        return out.logp, out.entropy

    assert torch.autograd.gradcheck(f, (logits,))


def test_policy_loss_gradients_of_logp_and_entropy(backend: str):
    """Stage B alone, with an entropy bonus, against fp64."""
    device = backend_device(backend)
    for name in fusedpg.CATALOGUE:
        spec = spec_for(name, "seq-mean-token-mean", "k3-entropy")
        case = make_case(spec, dtype=torch.float32, packed=True)
        logp = torch.where(case.kwargs["mask"], case.kwargs["logp_old"] + 0.1, 0.0)
        torch.manual_seed(2)
        entropy = torch.rand(logp.shape)
        results = []
        for which, dtype, where in ((backend, torch.float32, device), ("reference", torch.float64, "cpu")):
            x = logp.detach().to(where, dtype, copy=True).requires_grad_()
            h = entropy.detach().to(where, dtype, copy=True).requires_grad_()
            kwargs = {k: v.to(where) if isinstance(v, torch.Tensor) else v for k, v in case.kwargs.items()}
            torch.manual_seed(3)  # a random selection repeats
            out = fusedpg.policy_loss(spec, x, entropy=h, backend=which, **kwargs)
            (2.0 * out.loss).backward()
            results.append((out.loss.double().cpu(), x.grad.double().cpu(), h.grad.double().cpu()))
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo"])
def test_no_grad_and_frozen_logits(name: str, backend: str):
    """The same loss without gradients; nothing is connected."""
    spec = spec_for(name, "token-mean", "k3-entropy")
    case = make_case(spec, dtype=torch.float32, packed=True)
    device = backend_device(backend)
    with_grad = loss_of(spec, case, backend, leaf_of(case, backend))
    frozen = loss_of(spec, case, backend, case.logits.to(device))
    with torch.no_grad():
        silent = loss_of(spec, case, backend, leaf_of(case, backend))
    assert with_grad.loss.requires_grad
    assert not frozen.loss.requires_grad
    assert not silent.loss.requires_grad
    assert with_grad.loss == frozen.loss == silent.loss
    assert torch.equal(with_grad.logp, silent.logp)
    for field in ("numerator", "weight", "logp", "per_token"):
        assert not getattr(with_grad, field).requires_grad


# ------------------------------------------------------------------ in place


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["ppo_clip", "gspo"])
@pytest.mark.parametrize("padded_view", [False, True])
def test_inplace_equals_out_of_place(name: str, dtype: torch.dtype, padded_view: bool, native_backend: str):
    """The gradient lands in the caller's memory and nowhere else."""
    spec = spec_for(name, "token-mean", "k3-entropy")
    case = make_case(spec, dtype=dtype, packed=False)
    device = backend_device(native_backend)
    want = run(spec, case, native_backend)
    b, t, v = case.logits.shape
    base = torch.full((b, t + 1, v + 3) if padded_view else (b, t, v), 7.0, dtype=dtype, device=device)
    view = base[:, :t, :v]
    view.copy_(case.logits)
    source = torch.ones((), dtype=dtype, device=device, requires_grad=True)
    connected = _Touch.apply(source, base)
    if padded_view:
        connected = connected[:, :t, :v]
    out = loss_of(spec, case, native_backend, connected, inplace=True)
    out.loss.backward()
    assert connected._version > 0
    assert source.grad is not None
    grad = view.detach()
    torch.testing.assert_close(grad.double().cpu(), want.grad, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert out.loss.double().cpu() == want.values["loss"]
    if padded_view:
        assert (base[:, -1] == 7).all()
        assert (base[..., v:] == 7).all()


class _Touch(torch.autograd.Function):
    """Hands out a tensor's own memory as a non-leaf, like the output of a model's head."""

    @staticmethod
    def forward(ctx, source, memory):
        ctx.mark_dirty(memory)
        return memory

    @staticmethod
    def backward(ctx, grad):
        return grad.sum(), None


def test_inplace_refuses_a_second_backward(native_backend: str):
    spec = spec_for("ppo_clip", "token-mean", "plain")
    case = make_case(spec, dtype=torch.float32, packed=True)
    logits = leaf_of(case, native_backend) * 1.0
    out = loss_of(spec, case, native_backend, logits, inplace=True)
    torch.autograd.grad(out.loss, logits, retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace: expected one backward; got a second one"):
        torch.autograd.grad(out.loss, logits)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo"])
def test_inplace_is_seen_by_autograd(name: str, native_backend: str):
    """An upstream operation that needs the overwritten values raises instead of computing nonsense."""
    spec = spec_for(name, "token-mean", "plain")
    case = make_case(spec, dtype=torch.float32, packed=True)
    x = torch.nan_to_num(leaf_of(case, native_backend).detach()).requires_grad_()
    logits = torch.softmax(x, -1)  # saves its output
    out = loss_of(spec, case, native_backend, logits, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.loss.backward()


def test_inplace_without_gradient_writes_nothing(native_backend: str):
    spec = spec_for("ppo_clip", "token-mean", "plain")
    case = make_case(spec, dtype=torch.float32, packed=True)
    logits = case.logits.to(backend_device(native_backend))
    before = logits.clone()
    loss_of(spec, case, native_backend, logits, inplace=True)
    assert torch.equal(torch.nan_to_num(logits, 9.0), torch.nan_to_num(before, 9.0))


# ------------------------------------------------------------------ empty and tiny


@pytest.mark.parametrize("name", fusedpg.CATALOGUE)
@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)])
def test_no_tokens(name: str, shape: tuple[int, ...], backend: str):
    device = backend_device(backend)
    spec = fusedpg.CATALOGUE[name].replace(kl=0, kl_coef=0.0)
    logits = torch.empty(*shape, 9, device=device, requires_grad=True)
    zeros = torch.empty(shape, device=device)
    sequences = shape[0] if len(shape) == 2 else 2
    out = fusedpg.policy_loss_from_logits(
        spec,
        logits,
        torch.empty(shape, dtype=torch.long, device=device),
        logp_old=zeros,
        sequence_advantages=torch.ones(sequences, device=device),
        cu_seqlens=None if len(shape) == 2 else torch.zeros(3, dtype=torch.long, device=device),
        backend=backend,
        **also_reads(spec, zeros),
    )
    out.loss.backward()
    assert out.loss == 0
    assert out.numerator == 0
    assert out.weight == (1 if spec.reduction == "token-sum" else 0)
    assert logits.grad.shape == logits.shape
    assert all(torch.isfinite(v) for v in out.metrics.values())


@pytest.mark.parametrize("name", fusedpg.CATALOGUE)
def test_a_vocabulary_of_one(name: str, backend: str):
    """V = 1: log-probability 0, entropy 0, gradient 0."""
    device = backend_device(backend)
    spec = fusedpg.CATALOGUE[name].replace(kl=0, kl_coef=0.0, entropy_coef=0.01)
    logits = torch.randn(2, 3, 1, device=device, requires_grad=True)
    out = fusedpg.policy_loss_from_logits(
        spec,
        logits,
        torch.zeros(2, 3, dtype=torch.long, device=device),
        logp_old=torch.zeros(2, 3, device=device),
        sequence_advantages=torch.ones(2, device=device),
        return_entropy=True,
        backend=backend,
        **also_reads(spec, torch.zeros(2, 3, device=device)),
    )
    out.loss.backward()
    assert (out.logp == 0).all()
    assert (out.entropy == 0).all()
    assert (logits.grad == 0).all()


@pytest.mark.parametrize("name", fusedpg.CATALOGUE)
def test_a_fully_masked_batch(name: str, backend: str):
    """numerator 0, weight 0, finite metrics, zero gradients through a connected graph, nothing read."""
    device = backend_device(backend)
    spec = fusedpg.CATALOGUE[name].replace(entropy_coef=0.01)
    logits = torch.full((2, 3, 9), torch.nan, device=device, requires_grad=True)
    nan = torch.full((2, 3), torch.nan, device=device)
    out = fusedpg.policy_loss_from_logits(
        spec,
        logits,
        torch.full((2, 3), -100, device=device),
        logp_old=nan,
        logp_ref=nan,
        sequence_advantages=torch.ones(2, device=device),
        mask=torch.zeros(2, 3, dtype=torch.bool, device=device),
        backend=backend,
        **also_reads(spec, nan),
    )
    assert out.loss.requires_grad
    out.loss.backward()
    assert out.loss == 0
    assert out.numerator == 0
    assert (logits.grad == 0).all()
    assert all(torch.isfinite(v) for v in out.metrics.values())
