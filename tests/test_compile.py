"""torch.compile(fullgraph=True) with dynamic shapes, and the operators' fakes."""

import pytest
import torch

import fusedpg
from fusedpg import ops
from support import CountedCompiler, backend_device, make_case, spec_for


def compiled_step(backend: str, spec):
    def step(logits, targets, logp_old, advantages, mask):
        out = fusedpg.policy_loss_from_logits(
            spec, logits, targets, logp_old=logp_old, advantages=advantages, mask=mask, backend=backend
        )
        return out.loss, out.metrics["clip_frac"], out.logp

    return step


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("terms", ["plain", "entropy"])
def test_fullgraph_dynamic_shapes(terms: str, native_backend: str):
    """N = 5, 6, 1, 17 with at most one recompilation, equal to eager in value and gradient."""
    spec = spec_for("ppo_clip", "token-mean", terms)
    step = compiled_step(native_backend, spec)
    compiler = CountedCompiler()
    fast = torch.compile(step, fullgraph=True, dynamic=True, backend=compiler)
    device = backend_device(native_backend)
    for n in (5, 6, 17, 9):
        args = (
            torch.randint(0, 13, (n,), device=device),
            torch.randn(n, device=device) - 2,
            torch.randn(n, device=device),
            torch.rand(n, device=device) > 0.2,
        )
        logits = torch.randn(n, 13, device=device)
        results = []
        for f in (step, fast):
            x = logits.clone().requires_grad_()
            loss, clip, logp = f(x, *args)
            loss.backward()
            results.append((loss.detach(), clip, logp, x.grad))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert compiler.compilations == 1


def test_inductor_end_to_end():
    """The default compiler on the compiled core: loss, gradient, and a model around them."""
    spec = spec_for("dapo", "token-mean", "entropy")
    head = torch.nn.Linear(8, 13)
    hidden, targets = torch.randn(6, 8), torch.randint(0, 13, (6,))
    kwargs = {"logp_old": torch.randn(6) - 2, "advantages": torch.randn(6)}

    def step(x):
        return fusedpg.policy_loss_from_logits(spec, head(x), targets, backend="cpu", **kwargs).loss

    want = step(hidden)
    want.backward()
    want_grad, head.weight.grad = head.weight.grad, None
    got = torch.compile(step, fullgraph=True)(hidden)
    got.backward()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(head.weight.grad, want_grad)


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_sequence_level_in_fullgraph(name: str):
    spec = spec_for(name, "seq-mean-token-mean", "k3")
    case = make_case(spec, dtype=torch.float32, packed=True)

    def step(x):
        return fusedpg.policy_loss_from_logits(spec, x, case.targets, backend="cpu", **case.kwargs).loss

    a, b = case.logits.clone().requires_grad_(), case.logits.clone().requires_grad_()
    step(a).backward()
    torch.compile(step, fullgraph=True, backend="aot_eager")(b).backward()
    torch.testing.assert_close(a.grad, b.grad)


def test_stage_b_and_logprobs_in_fullgraph():
    spec = spec_for("grpo", "seq-mean-token-mean", "k3")
    logits, targets = torch.randn(3, 4, 11), torch.randint(0, 11, (3, 4))
    kwargs = {"logp_old": torch.randn(3, 4), "logp_ref": torch.randn(3, 4), "sequence_advantages": torch.randn(3)}

    def step(x):
        lp = fusedpg.token_logprobs(x, targets, return_entropy=True, backend="cpu")
        return fusedpg.policy_loss(spec, lp.logp, entropy=lp.entropy, backend="cpu", **kwargs).loss

    a, b = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    step(a).backward()
    torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")(b).backward()
    torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("name", fusedpg.CATALOGUE)
def test_every_loss_traces_whole(name: str):
    """fullgraph=True over the whole catalogue with its corrections, equal to eager in value and gradient."""
    terms = "is-truncate" if name == "vespo" else "is-mask-geometric"
    spec = spec_for(name, "seq-mean-token-mean", terms)
    case = make_case(spec, dtype=torch.float32, packed=False, seed=2)

    def step(logits, targets, kwargs):
        return fusedpg.policy_loss_from_logits(spec, logits, targets, backend="cpu", **kwargs).loss

    results = []
    for f in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        x = case.logits.clone().requires_grad_()
        torch.manual_seed(0)
        loss = f(x, case.targets, case.kwargs)
        loss.backward()
        results.append((loss.detach(), x.grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_operators_obey_the_library_contract():
    """Schema, fakes, autograd registration and dynamic AOT dispatch, as torch.library itself checks them."""
    n, v = 4, 7
    rows = lambda: torch.rand(n)  # noqa: E731
    logits = torch.randn(1, n, v, requires_grad=True)
    targets = torch.randint(0, v, (n,))
    spec = fusedpg.loss_spec("ppo_clip", entropy_coef=0.1).encode()
    streams = ([rows(), rows(), None, None, None, None, None], None)  # and no sequence boundaries
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    scale = torch.tensor(0.25)
    torch.library.opcheck(ops.logprob, (logits, targets, None, None, 1.0, 0.0, 1.0, True, "cpu"), test_utils=checks)
    torch.library.opcheck(
        ops.token_loss,
        (spec, rows().requires_grad_(), rows().requires_grad_(), rows(), scale, *streams, "cpu"),
        test_utils=checks,
    )
    torch.library.opcheck(
        ops.logits_loss,
        (spec, logits, targets, rows(), scale, *streams, None, 1.0, 0.0, 1.0, False, False, "cpu"),
        test_utils=checks,
    )
    torch.library.opcheck(
        ops.logprob_grad,
        (logits.detach(), targets, rows(), rows(), rows(), rows(), rows(), None, 1.0, 0.0, 1.0, "cpu"),
        test_utils=checks,
    )
