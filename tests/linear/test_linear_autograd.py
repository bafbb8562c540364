"""The autograd contract of hidden states and head: who gets a gradient, upstream values, retained graphs, aliasing."""

import itertools

import pytest
import torch
from heads import GRADIENTS, WALKS, make_head_case, run_head, smallest_workspace, use_walk

import fusedpg
from support import backend_device, spec_for

SUBSETS = [names for n in range(4) for names in itertools.combinations(GRADIENTS, n)]


def extra_for(walk: str, case) -> dict:
    return {"workspace_mib": smallest_workspace(case.hidden, case.weight)} if walk == "blocks" else {}


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize("name", ["dapo", "gspo"])
def test_every_combination_of_requires_grad(name: str, walk: str, monkeypatch):
    """Equal bits for whatever is asked, None for the rest, nothing connected when nothing is."""
    use_walk(monkeypatch, walk)
    spec = spec_for(name, "token-mean", "k3-entropy")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        case = make_head_case(spec, dtypes=(dtype, dtype))
        extra = extra_for(walk, case)
        whole = run_head(spec, case, "cpu", **extra)
        for frozen in SUBSETS[1:-1]:
            got = run_head(spec, case, "cpu", frozen=frozen, **extra)
            for key, value in whole.values.items():
                if key in [f"grad:{name}" for name in frozen]:
                    assert key not in got.values
                else:
                    assert torch.equal(got.values[key], value), f"{frozen} {key}"


def test_nothing_requires_a_gradient(backend: str):
    spec = spec_for("dapo", "token-mean", "k3-entropy")
    case = make_head_case(spec)
    device = backend_device(backend)
    head = [t.to(device) for t in (case.hidden, case.weight, case.bias)]
    kwargs = {k: v.to(device) if torch.is_tensor(v) else v for k, v in case.kwargs.items()}

    def call(h, w, b):
        return fusedpg.policy_loss_from_hidden(spec, h, w, case.targets.to(device), bias=b, backend=backend, **kwargs)

    want = call(*(t.clone().requires_grad_() for t in head))
    frozen = call(*head)
    with torch.no_grad():
        silent = call(*(t.clone().requires_grad_() for t in head))
    assert want.loss.requires_grad
    assert not frozen.loss.requires_grad
    assert not silent.loss.requires_grad
    assert want.loss == frozen.loss == silent.loss
    assert torch.equal(want.logp, silent.logp)
    for name in ("numerator", "weight", "logp", "per_token"):
        assert not getattr(want, name).requires_grad


TWICE = [("cpu", walk, dtype) for walk in WALKS for dtype in (torch.float32, torch.bfloat16, torch.float16)]
TWICE += [
    ("triton", "chunks", torch.float32),
    ("triton", "blocks", torch.bfloat16),
]  # the kernels' own are cheap to see


@pytest.mark.parametrize(("native_backend", "walk", "dtype"), TWICE)
def test_retained_graph_twice(native_backend: str, walk: str, dtype: torch.dtype, monkeypatch):
    """A second backward with upstream 3 gives three times the first; the first gradients are left alone."""
    use_walk(monkeypatch, walk)
    device = backend_device(native_backend)
    spec = spec_for("gspo", "token-mean", "k3-entropy")
    case = make_head_case(spec, dtypes=(dtype, dtype))
    kwargs = {k: v.to(device) if torch.is_tensor(v) else v for k, v in case.kwargs.items()}
    leaves = [t.to(device).clone().requires_grad_() for t in (case.hidden, case.weight, case.bias)]
    for asked in ([0, 1, 2], [0], [1, 2])[: 3 if native_backend == "cpu" else 1]:
        for leaf in leaves:
            leaf.requires_grad_(any(leaf is leaves[i] for i in asked))
        mine = [leaves[i] for i in asked]
        out = fusedpg.policy_loss_from_hidden(
            spec,
            *leaves[:2],
            case.targets.to(device),
            bias=leaves[2],
            backend=native_backend,
            **kwargs,
            **extra_for(walk, case),
        )
        first = torch.autograd.grad(out.loss, mine, retain_graph=True)
        kept = [g.clone() for g in first]
        third = torch.autograd.grad(out.loss, mine, torch.tensor(3.0, device=device), retain_graph=True)
        again = torch.autograd.grad(out.loss, mine)
        eps = 2 * torch.finfo(dtype).eps
        for a, b, c, d in zip(first, kept, third, again, strict=True):
            assert torch.equal(a, b)
            size = float(a.abs().max())
            torch.testing.assert_close(c, 3 * a, rtol=2 * eps, atol=eps * size)
            torch.testing.assert_close(d, a, rtol=eps, atol=eps * size)


@pytest.mark.parametrize("upstream", [0.0, -1.0, 0.125, 65536.0])
def test_upstream_gradient_of_the_loss(upstream: float, native_backend: str):
    for name, dtype in (("dapo", torch.float32), ("gspo", torch.float16)):
        spec = spec_for(name, "token-mean", "k3-entropy")
        case = make_head_case(spec, dtypes=(dtype, dtype))
        got = run_head(spec, case, native_backend, upstream=upstream)
        want = run_head(spec, case, "reference", double=True, upstream=upstream)
        eps = max(1e-5, torch.finfo(dtype).eps)
        torch.testing.assert_close(got.grad, want.grad, rtol=eps, atol=eps * float(want.grad.abs().max()))
        if upstream == 0.0:
            assert (got.grad == 0).all()


def test_a_loss_scale_rescues_small_fp16_gradients():
    """The scale arrives before the only rounding to fp16: what underflows without it survives with it."""
    spec = fusedpg.loss_spec("reinforce")
    case = make_head_case(spec, dtypes=(torch.float16, torch.float16))
    case.kwargs["advantages"] = torch.full(case.targets.shape, 1e-8)
    plain = run_head(spec, case, "cpu", upstream=1.0)
    scaled = run_head(spec, case, "cpu", upstream=65536.0)
    assert (plain.values["grad:hidden"] == 0).all()
    want = run_head(spec, case, "reference", double=True, upstream=65536.0)
    for key in ("grad:hidden", "grad:weight", "grad:bias"):
        size = float(want.values[key].abs().max())
        torch.testing.assert_close(scaled.values[key], want.values[key], rtol=2e-3, atol=2e-3 * size)


def test_inputs_are_never_written(native_backend: str):
    for name, walk_mib in (("dapo", None), ("gspo", 0.02)):
        spec = spec_for(name, "token-mean", "k3-entropy")
        case = make_head_case(spec, dtypes=(torch.bfloat16, torch.float32))
        tensors = [case.hidden, case.weight, case.bias, case.targets, *filter(torch.is_tensor, case.kwargs.values())]
        before = [t.clone() for t in tensors]
        versions = [t._version for t in tensors]
        leaves = [t.requires_grad_() for t in (case.hidden, case.weight, case.bias)]
        out = fusedpg.policy_loss_from_hidden(
            spec,
            *leaves[:2],
            case.targets,
            bias=leaves[2],
            workspace_mib=walk_mib,
            backend=native_backend,
            **case.kwargs,
        )
        out.loss.backward()
        for t, old, version in zip(tensors, before, versions, strict=True):
            assert torch.equal(t.nan_to_num(), old.nan_to_num())
            assert t._version == version


VIEWS = {
    "last tokens": lambda x: torch.cat([x.new_full((len(x), 2, x.shape[2]), 9.0), x], 1)[:, 2:],
    "shifted": lambda x: torch.cat([x, x[:, :1]], 1)[:, :-1],
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "columns": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "padded": lambda x: torch.nn.functional.pad(x, (3, 5))[..., 3:-5],
    "one row for all": lambda x: x[:1, :1].expand(x.shape),
}


@pytest.mark.parametrize("view", VIEWS)
def test_strided_hidden_states(view: str, native_backend: str):
    spec = spec_for("gspo", "seq-mean-token-mean", "k3-entropy")
    case = make_head_case(spec, packed=False)
    if view == "one row for all":
        case.hidden[:] = case.hidden[0, 0] = torch.randn(case.hidden.shape[-1])
    want = run_head(spec, case, native_backend)
    hidden = VIEWS[view](case.hidden).to(backend_device(native_backend)).requires_grad_()
    assert hidden.shape == case.hidden.shape
    kwargs = {k: v.to(hidden.device) if torch.is_tensor(v) else v for k, v in case.kwargs.items()}
    weight = case.weight.to(hidden.device).t().contiguous().t().requires_grad_()  # a transposed head as well
    out = fusedpg.policy_loss_from_hidden(
        spec,
        hidden,
        weight,
        case.targets.to(hidden.device),
        bias=case.bias.to(hidden.device),
        backend=native_backend,
        **kwargs,
    )
    out.loss.backward()
    for got, key in ((out.logp, "logp"), (hidden.grad, "grad:hidden"), (weight.grad, "grad:weight")):
        torch.testing.assert_close(got.detach().double().cpu(), want.values[key], rtol=1e-5, atol=1e-6)


def test_a_tied_weight_gets_the_sum_of_both_gradients():
    """The embedding that is also the head."""
    spec = fusedpg.loss_spec("reinforce")
    tied = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([1, 10, 3, 3])
    grads = []
    for backend in ("cpu", "reference"):
        tied.grad = None
        hidden = torch.tanh(tied[targets.roll(1)])
        fusedpg.policy_loss_from_hidden(spec, hidden, tied, targets, advantages=1.0, backend=backend).loss.backward()
        grads.append(tied.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize("name", ["reinforce", "gspo"])
def test_gradcheck(name: str, walk: str, monkeypatch):
    use_walk(monkeypatch, walk)
    spec = spec_for(name, "seq-mean-token-mean", "k3-entropy")
    case = make_head_case(spec, dtypes=(torch.float64, torch.float64), vocab=17, width=3, lengths=(3, 1, 2), seed=11)
    leaves = [t.nan_to_num().requires_grad_() for t in (case.hidden, case.weight, case.bias)]
    extra = extra_for(walk, case)

    def loss(hidden, weight, bias):
        return fusedpg.policy_loss_from_hidden(
            spec, hidden, weight, case.targets, bias=bias, backend="cpu", softcap=5.0, **case.kwargs, **extra
        ).loss

    def logprobs(hidden, weight, bias):
        out = fusedpg.linear_token_logprobs(
            hidden,
            weight,
            case.targets.clamp(min=0),
            bias=bias,
            temperature=0.7,
            return_entropy=True,
            backend="cpu",
            **extra,
        )
        return out.logp, out.entropy

    assert torch.autograd.gradcheck(loss, leaves, nondet_tol=1e-12)
    assert torch.autograd.gradcheck(logprobs, leaves)
