"""torch.compile(fullgraph=True) with dynamic shapes, the operators' fakes, and autocast around the head."""

import itertools

import pytest
import torch
from heads import make_head_case, run_head

import fusedpg
from fusedpg import linear_ops
from support import CountedCompiler, backend_device, spec_for


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("native_backend", "name"),
    [
        ("cpu", "dapo"),
        ("cpu", "gspo_token"),
        pytest.param("cpu", "clip_cov", marks=pytest.mark.sweep),
        pytest.param("triton", "dapo", marks=pytest.mark.sweep),
    ],
)
def test_fullgraph_dynamic_shapes(native_backend: str, name: str):
    """N = 5, 6, 17, 9 with one compilation, equal to eager in value and gradients."""
    spec = spec_for(name, "token-mean", "entropy")

    def step(hidden, weight, bias, targets, logp_old, advantages, cu):
        out = fusedpg.policy_loss_from_hidden(
            spec,
            hidden,
            weight,
            targets,
            bias=bias,
            logp_old=logp_old,
            advantages=advantages,
            cu_seqlens=cu,
            backend=native_backend,
        )
        return out.loss, out.metrics["clip_frac"], out.logp

    compiler = CountedCompiler()
    fast = torch.compile(step, fullgraph=True, dynamic=True, backend=compiler)
    device = backend_device(native_backend)
    for n in (5, 6, 17, 9):
        head = [torch.randn(*shape, device=device) for shape in ((n, 4), (13, 4), (13,))]
        args = (
            torch.randint(0, 13, (n,), device=device),
            torch.randn(n, device=device) - 2,
            torch.randn(n, device=device),
            torch.tensor([0, 2, n], device=device),
        )
        results = []
        for f in (step, fast):
            leaves = [t.clone().requires_grad_() for t in head]
            torch.manual_seed(0)
            loss, clip, logp = f(*leaves, *args)
            (-2 * loss).backward()
            results.append((loss.detach(), clip, logp, *(leaf.grad for leaf in leaves)))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert compiler.compilations == 1


@pytest.mark.parametrize("frozen", ["nothing", "hidden", "weight"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_dtypes_and_frozen_inputs_in_fullgraph(dtype, frozen):
    spec = spec_for("gspo", "seq-mean-token-mean", "k3-entropy")
    case = make_head_case(spec, dtypes=(dtype, dtype), packed=False)

    def step(hidden, weight):
        return fusedpg.policy_loss_from_hidden(
            spec, hidden, weight, case.targets, bias=case.bias, backend="cpu", **case.kwargs
        ).loss

    results = []
    for f in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        hidden = case.hidden.clone().requires_grad_(frozen != "hidden")
        weight = case.weight.clone().requires_grad_(frozen != "weight")
        loss = f(hidden, weight)
        loss.backward()
        results.append([loss.detach(), *(t.grad for t in (hidden, weight) if t.requires_grad)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_logprobs_in_fullgraph():
    hidden, weight, targets = torch.randn(3, 4, 5), torch.randn(11, 5), torch.randint(0, 11, (3, 4))
    kwargs = {"logp_old": torch.randn(3, 4), "logp_ref": torch.randn(3, 4), "sequence_advantages": torch.randn(3)}
    spec = spec_for("grpo", "seq-mean-token-mean", "k3")

    def step(h, w):
        lp = fusedpg.linear_token_logprobs(h, w, targets, return_entropy=True, backend="cpu")
        return fusedpg.policy_loss(spec, lp.logp, entropy=lp.entropy, backend="cpu", **kwargs).loss

    results = []
    for f in (step, torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
        f(*leaves).backward()
        results.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(*results)


def test_operators_obey_the_library_contract():
    """Schema, fakes, autograd registration and dynamic AOT dispatch, as torch.library itself checks them."""
    n, d, v = 4, 3, 7
    rows = lambda: torch.rand(n)  # noqa: E731
    leaves = [torch.randn(*shape, requires_grad=True) for shape in ((1, n, d), (v, d), (v,))]
    plain = [t.detach() for t in leaves]
    targets = torch.randint(0, v, (n,))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    options = (None, 1.0, 0.0, 1.0)
    args = (*leaves, targets, None, *options, True, 0, "cpu")
    torch.library.opcheck(linear_ops.logprob, args, test_utils=checks)
    for wanted in itertools.product((False, True), repeat=3):
        saved = [rows() for _ in range(5)]
        args = (*plain, targets, *saved, *options, *wanted, 0, "cpu")
        torch.library.opcheck(linear_ops.logprob_grad, args, test_utils=checks)
    for name in ("ppo_clip", "gspo"):
        spec = fusedpg.loss_spec(name, entropy_coef=0.1).encode()
        streams = [rows(), rows(), None, None, None, None, None]
        batch = (targets, rows(), torch.tensor(0.25), streams, torch.tensor([0, 1, n]))
        args = (spec, *plain, *batch, *options, False, False, False, False, 0, "cpu")
        torch.library.opcheck(linear_ops.loss, args, test_utils=checks)
        # backward hands out, scaled in place, the gradients that are outputs here: no comparison after it holds
        args = (spec, *leaves, *batch, *options, True, True, True, True, 0, "cpu")
        torch.library.opcheck(linear_ops.loss, args, test_utils=checks[:3])


@pytest.mark.parametrize("walk_mib", [None, 0.02])
@pytest.mark.parametrize("name", ["dapo", "gspo", "kl_cov"])
def test_autocast_changes_nothing(name: str, walk_mib: float | None, backend: str):
    """The same bits inside and outside, whatever the pair of dtypes; each gradient in its own parameter's dtype."""
    f32, bf16 = torch.float32, torch.bfloat16
    for dtypes in ((f32, f32), (bf16, bf16), (bf16, f32), (f32, bf16)):
        if backend == "triton" and (dtypes != (bf16, f32) or name != "dapo"):
            continue  # the products around the kernels are the same code
        spec = spec_for(name, "token-mean", "k3-entropy")
        case = make_head_case(spec, dtypes=dtypes)
        want = run_head(spec, case, backend, workspace_mib=walk_mib)
        with torch.autocast(backend_device(backend).type, torch.bfloat16):
            got = run_head(spec, case, backend, workspace_mib=walk_mib)
        for key, value in want.values.items():
            if backend == "reference" and key.startswith("grad:"):
                continue  # autograd's own products follow the region that backward is called in
            assert torch.equal(got.values[key], value), f"{dtypes} {key}"
