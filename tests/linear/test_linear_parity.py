"""Every catalogue entry from hidden states, on every walk of the logits, against the fp64 reference."""

import itertools

import pytest
import torch
from heads import WALKS, check_head_case, make_head_case, run_head, smallest_workspace, use_walk

import fusedpg
from fusedpg import cpu, linear_ops, linear_walk
from fusedpg.linear_plan import Mode
from fusedpg.spec import REDUCTIONS
from support import TERMS, applies, spec_for

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
#: of hidden, and of weight and bias
DTYPES = ((F32, F32), (BF16, BF16), (F16, F16), (BF16, F32), (F32, BF16), (F16, BF16))
OPTIONS = ("none", "temperature", "row-temperature", "softcap", "fractional", "normalizer", "no-bias")


def matrix() -> list[tuple]:
    """Every loss with every variant of its terms on every walk; the other axes take their values in turn."""
    pairs = [(name, terms) for name in fusedpg.CATALOGUE for terms in TERMS if applies(name, terms)]
    return [
        (name, terms, walk, REDUCTIONS[i % 5], DTYPES[i % 6], i % 4 < 2, OPTIONS[i % 7])
        for i, (walk, (name, terms)) in enumerate(itertools.product(WALKS, pairs))
    ]


FULL = matrix()
#: for `make test`: of each loss every seventh case, so that every walk occurs for it
QUICK = [case for i, case in enumerate(sorted(FULL, key=lambda c: list(fusedpg.CATALOGUE).index(c[0]))) if i % 7 == 0]


def options(kind: str, case) -> dict:
    g = torch.Generator().manual_seed(3)
    rand = torch.rand(case.targets.shape, generator=g)
    if kind == "temperature":
        return {"temperature": 0.7, "return_entropy": True}
    if kind == "row-temperature":
        return {"temperature": 0.5 + rand}
    if kind == "softcap":
        return {"softcap": 3.0, "logit_scale": 0.5, "temperature": 1.3, "return_entropy": True}
    if kind == "fractional":
        return {"mask": case.kwargs["mask"].float() * (0.25 + 0.75 * rand), "return_entropy": True}
    return {"normalizer": 11.0} if kind == "normalizer" else {}


def check(case: tuple, backend: str, monkeypatch, **shape) -> None:
    name, terms, walk, reduction, dtypes, packed, kind = case
    use_walk(monkeypatch, walk)
    spec = spec_for(name, reduction, terms)
    seed = FULL.index(case)
    batch = make_head_case(spec, dtypes=dtypes, packed=packed, bias=kind != "no-bias", seed=seed, **shape)
    extra = options(kind, batch)
    if walk == "blocks":
        extra["workspace_mib"] = smallest_workspace(batch.hidden, batch.weight)
    check_head_case(spec, batch, backend, f"{case}", **extra)


def test_quick_subset_covers_every_axis():
    axes = (fusedpg.CATALOGUE, TERMS, WALKS, REDUCTIONS, DTYPES, (False, True), OPTIONS)
    for axis, values in enumerate(axes):
        assert {case[axis] for case in QUICK} == set(values)
    for name in fusedpg.CATALOGUE:
        assert {case[2] for case in QUICK if case[0] == name} == set(WALKS)


def test_the_walks_are_what_they_say(monkeypatch):
    plans, plan = [], linear_ops.plan_linear
    monkeypatch.setattr(linear_ops, "plan_linear", lambda *a, **k: plans.append(plan(*a, **k)) or plans[-1])
    for walk in WALKS:
        use_walk(monkeypatch, walk)
        for name in ("dapo", "gspo"):
            case = make_head_case(spec_for(name, "token-mean", "plain"))
            extra = {"workspace_mib": smallest_workspace(case.hidden, case.weight)} if walk == "blocks" else {}
            run_head(spec_for(name, "token-mean", "plain"), case, "cpu", **extra)
    assert [(p.mode, p.rows, p.columns) for p in plans] == [
        (Mode.TOKENS, 4, 37),
        (Mode.SEQUENCES, 4, 37),
        (Mode.TOKENS, 2, 37),
        (Mode.TWO_PASSES, 2, 37),
        *2 * [(Mode.TWO_PASSES, 1024, 37)],
        *2 * [(Mode.TWO_PASSES, 4, 16)],
    ]


@pytest.mark.parametrize("name", fusedpg.CATALOGUE)
def test_cpu_parity(name: str, monkeypatch):
    for case in QUICK:
        if case[0] == name:
            check(case, "cpu", monkeypatch)


@pytest.mark.sweep
@pytest.mark.parametrize("name", fusedpg.CATALOGUE)
def test_cpu_parity_swept(name: str, monkeypatch):
    for case in FULL:
        if case[0] == name:
            check(case, "cpu", monkeypatch)


@pytest.mark.parametrize("case", QUICK[::9], ids=lambda c: "-".join(map(str, c[:3])))
def test_triton_parity(case: tuple, monkeypatch):
    check(case, "triton", monkeypatch)


@pytest.mark.sweep
@pytest.mark.parametrize("case", FULL[::7], ids=lambda c: "-".join(map(str, c[:3])))
def test_triton_parity_swept(case: tuple, monkeypatch):
    check(case, "triton", monkeypatch)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_operands_of_16_bits(dtype: torch.dtype, monkeypatch):
    """As on an accelerator: the logits' gradient is rounded for products of 16-bit operands with fp32 sums."""
    product = linear_walk.product

    def widened(a, b, out, *, add=False, keep=None):
        # on a CPU the product rounds a gradient as it reads it, and d weight as it writes it
        assert a.dtype in (b.dtype, torch.float32)
        assert out.dtype in (b.dtype, torch.float32)
        if keep is not None:
            a = a[keep] if a.stride(1) == 1 else a[:, keep]
        wide = out.float()
        product((a.to(b.dtype) if b.dtype == dtype else a).float(), b.float(), wide, add=add)
        out.copy_(wide)

    narrow = property(lambda head: dtype if head.hidden.dtype == head.weight.dtype == dtype else head.compute)
    monkeypatch.setattr(linear_walk.Head, "operands", narrow)
    monkeypatch.setattr(linear_walk, "product", widened)
    cases = [case for case in FULL if case[4] == (dtype, dtype)][::20]
    assert {case[2] for case in cases} == set(WALKS)
    for case in cases:
        check(case, "cpu", monkeypatch)


@pytest.mark.parametrize("walk", WALKS)
def test_fp64_equals_the_reference(walk: str, monkeypatch):
    """A head or hidden states in fp64 are computed in fp64."""
    use_walk(monkeypatch, walk)
    for i, name in enumerate(fusedpg.CATALOGUE):
        dtypes = ((torch.float64, torch.float64), (F32, torch.float64), (torch.float64, BF16))[i % 3]
        spec = spec_for(name, REDUCTIONS[i % 5], "k3-entropy")
        case = make_head_case(spec, dtypes=dtypes, packed=i % 2 == 0, seed=i)
        extra = {"workspace_mib": smallest_workspace(case.hidden, case.weight)} if walk == "blocks" else {}
        got, want = run_head(spec, case, "cpu", **extra), run_head(spec, case, "reference", double=True)
        for key, value in want.values.items():
            stored = getattr(case, key.removeprefix("grad:")).dtype if key.startswith("grad:") else torch.float64
            error = max(1e-12, 2 * torch.finfo(stored).eps)
            torch.testing.assert_close(got.values[key], value, rtol=error, atol=1e-12, msg=f"{name} {key}")


@pytest.mark.parametrize("workspace", [None, 1.5, 0.12])
@pytest.mark.parametrize("name", ["dapo", "gspo", "echo"])
def test_real_chunks(name: str, workspace: float | None):
    """Hundreds of rows, several chunks and blocks of the sizes that run in earnest, an odd vocabulary and width."""
    spec = spec_for(name, "seq-mean-token-mean", "k3-entropy")
    shape = {"vocab": 1201, "width": 33, "lengths": (100, 3, 0, 250, 41, 77)}
    case = make_head_case(spec, dtypes=(BF16, BF16), seed=4, **shape)
    check_head_case(spec, case, "cpu", name, workspace_mib=workspace)


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("walk", ["chunks", "blocks"])
def test_logprobs_and_their_gradients(walk: str, dtypes: tuple, native_backend: str, monkeypatch):
    """`linear_token_logprobs` with any upstream gradient of both results."""
    from support import backend_device

    if native_backend == "triton" and dtypes[0] != dtypes[1]:
        return  # what differs by the pair of dtypes is not the kernel's
    use_walk(monkeypatch, walk)
    case = make_head_case(spec_for("dapo", "token-mean", "plain"), dtypes=dtypes, packed=False, seed=2)
    mask = case.kwargs["mask"]
    weights = [torch.randn(mask.shape, generator=torch.Generator().manual_seed(s)) for s in (1, 2)]
    results = []
    for backend, dtype in ((native_backend, None), ("reference", torch.float64)):
        device = backend_device(backend)
        leaves = [
            t.to(device, dtype or t.dtype, copy=True).requires_grad_() for t in (case.hidden, case.weight, case.bias)
        ]
        extra = {"workspace_mib": smallest_workspace(*leaves[:2])} if walk == "blocks" and dtype is None else {}
        kwargs = {
            "mask": mask.to(device),
            "temperature": 0.8,
            "softcap": 4.0,
            "return_entropy": True,
            "backend": backend,
        }
        out = fusedpg.linear_token_logprobs(*leaves[:2], case.targets.to(device), bias=leaves[2], **kwargs, **extra)
        sum((v * w.to(v)).sum() for v, w in zip((out.logp, out.entropy), weights, strict=True)).backward()
        assert [leaf.grad.dtype for leaf in leaves] == [leaf.dtype for leaf in leaves]
        results.append([t.detach().double().cpu() for t in (out.logp, out.entropy, *(leaf.grad for leaf in leaves))])
    stored = (F32, F32, dtypes[0], dtypes[1], dtypes[1])
    for got, want, dtype in zip(*results, stored, strict=True):
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(got, want, rtol=max(eps, 1e-5), atol=max(eps, 1e-5) * float(want.abs().max()))


@pytest.mark.parametrize("workspace", [None, 0.12])
@pytest.mark.parametrize("isa", ["v4bf16", "generic"])
def test_builds_with_and_without_16_bit_products(isa: str, workspace: float | None, monkeypatch):
    if isa not in cpu.available_isas():
        pytest.skip(f"this CPU cannot run the build {isa}")
    monkeypatch.setenv("FUSEDPG_CPU_ISA", isa)
    for i, name in enumerate(("dapo", "gspo")):
        shape = {"vocab": 1201, "width": 33, "lengths": (100, 3, 0, 77)}
        case = make_head_case(spec_for(name, "token-mean", "k3-entropy"), dtypes=(BF16, BF16), seed=i, **shape)
        assert linear_walk.Head(case.hidden, case.weight, None).operands == (BF16 if isa == "v4bf16" else F32)
        check_head_case(spec_for(name, "token-mean", "k3-entropy"), case, "cpu", name, workspace_mib=workspace)
