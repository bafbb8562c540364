"""Student or teacher as hidden states with a head: against the fp64 divergence of all logits."""

import pytest
import torch
from teachers import DIVERGENCES

import fusedpg
from fusedpg import HiddenStates, TopK, distillation_loss, linear_walk
from support import F32, backend_device, largest, operand_rounding

SHAPE, WIDTH, TEACHER_WIDTH, VOCAB = (3, 45), 12, 20, 83
KNOBS = {"beta": 0.3, "temperature": 0.7}
#: MiB: chunks of 128 rows, which is one chunk more than one; and enough for all
WORKSPACES = (0.45, None)


def make(dtype, seed=0):
    """(student, teacher, mask): hidden states of std 1 that are NaN where masked, heads that give logits of std 2."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(SHAPE, generator=g) > 0.3
    sides = []
    for width in (WIDTH, TEACHER_WIDTH):
        hidden = torch.randn(*SHAPE, width, generator=g, dtype=torch.float64)
        hidden[~mask] = torch.nan
        weight = 2 * torch.randn(VOCAB, width, generator=g, dtype=torch.float64) / width**0.5
        sides.append(HiddenStates(hidden.to(dtype), weight.to(dtype), torch.randn(VOCAB, generator=g).to(dtype)))
    return *sides, mask


def all_logits(side):
    hidden = torch.nan_to_num(side.hidden.double())
    return hidden @ side.weight.double().t() + side.bias.double()


def leaves_of(side, dtype=None):
    if isinstance(side, torch.Tensor):
        return [side.detach().to(dtype or side.dtype).clone().requires_grad_()]
    parts = (side.hidden, side.weight, side.bias)
    return [t.detach().to(dtype or t.dtype).clone().requires_grad_() for t in parts]


def run(student, teacher, mask, backend, dtype=None, upstream=1.0, **knobs):
    """(output, gradients) of the student's tensors, in fp64."""
    device = backend_device(backend)
    leaves = [t.detach().to(device).requires_grad_() for t in leaves_of(student, dtype)]
    mine = leaves[0] if len(leaves) == 1 else HiddenStates(*leaves)
    if isinstance(teacher, HiddenStates):
        parts = (teacher.hidden, teacher.weight, teacher.bias)
        teacher = HiddenStates(*(t.to(device, dtype or t.dtype) for t in parts))
    elif isinstance(teacher, TopK):
        teacher = TopK(teacher.ids.to(device), teacher.logps.to(device, dtype or teacher.logps.dtype))
    else:
        teacher = teacher.to(device, dtype or teacher.dtype)
    out = distillation_loss(mine, teacher, mask=mask.to(device), backend=backend, **knobs)
    (upstream * out.loss).backward()
    return out, [t.grad.double().cpu() for t in leaves]


def check(student, teacher, mask, backend, dtype, **knobs):
    """Twice the error of the reference's formulas in fp32, a rounding of the gradient, and a few units."""
    plain = {k: v for k, v in knobs.items() if k != "workspace_mib"}
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    unit = torch.finfo(torch.float64).eps if dtype == torch.float64 else F32
    want, grads = run(student, teacher, mask, "reference", torch.float64, **plain)
    fp32, rough = run(student, teacher, mask, "reference", wide, **plain)
    got, mine = run(student, teacher, mask, backend, **knobs)
    for name in ("loss", "numerator", "weight", "per_token"):
        expected = getattr(want, name).double().cpu()
        budget = 2 * largest(getattr(fp32, name).double().cpu() - expected) + 16 * unit * (1 + largest(expected))
        assert largest(getattr(got, name).double().cpu() - expected) <= budget, name
    for name, value in want.metrics.to_dict().items():
        assert got.metrics.to_dict()[name] == pytest.approx(value, rel=1e-5), name
    lost = lost_in_operands(student, teacher, mask, backend, **plain)
    for a, b, c, operands in zip(mine, grads, rough, lost, strict=True):
        stored = largest(b.to(dtype).double() - b)
        assert largest(a - b) <= 2 * (stored + largest(c - b) + operands) + 32 * unit * largest(b)
    assert got.backend == backend
    return got, mine


def lost_in_operands(student, teacher, mask, backend, **knobs):
    """What each gradient of the student's tensors loses where the products take the logits' gradient in 16 bits."""
    none = [torch.zeros(())] * (1 if isinstance(student, torch.Tensor) else 3)
    if isinstance(student, torch.Tensor):
        return none
    device = backend_device(backend)
    head = linear_walk.Head(student.hidden.to(device), student.weight.to(device), None)
    if head.operands == head.compute:
        return none
    _, (exact,) = run(all_logits(student), teacher, mask, "reference", torch.float64, **knobs)
    hidden = torch.nan_to_num(student.hidden.double())
    return [*operand_rounding(exact, hidden, student.weight.double(), head.operands), none[2]]


@pytest.mark.parametrize("workspace", WORKSPACES)
@pytest.mark.parametrize("sides", ["both", "student", "teacher"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_against_fp64(divergence, sides, workspace):
    for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16, torch.float64)):
        student, teacher, mask = make(dtype, i)
        if sides == "student":
            teacher = all_logits(teacher).to(dtype)
        if sides == "teacher":
            student = all_logits(student).to(dtype)
        scale = 2 if dtype == torch.float64 else 1
        knobs = {**KNOBS, "workspace_mib": workspace and scale * workspace, "divergence": divergence}
        _, grads = check(student, teacher, mask, "cpu", dtype, teacher_temperature=1.3, **knobs)
        assert (grads[0][~mask] == 0).all()


def test_on_triton(native_backend):
    """Chunked through either backend's kernels."""
    student, teacher, mask = make(torch.float32)
    check(student, teacher, mask, native_backend, torch.float32, divergence="jsd", **KNOBS)


@pytest.mark.parametrize("workspace", WORKSPACES)
def test_top_k_teacher(workspace):
    student, teacher, mask = make(torch.float32)
    logp = all_logits(teacher).log_softmax(-1)
    top = logp.topk(5)
    knobs = {"divergence": "forward_kl", "temperature": 0.7, "workspace_mib": workspace}
    check(student, TopK(top.indices, top.values.float()), mask, "cpu", torch.float32, **knobs)


def test_packed_equals_padded_and_scale_is_a_temperature():
    student, teacher, mask = make(torch.float64)
    want, grads = run(student, teacher, mask, "cpu", divergence="reverse_kl", temperature=0.5, teacher_temperature=0.7)
    flat = [HiddenStates(s.hidden.flatten(0, 1), s.weight, s.bias, logit_scale=2.0) for s in (student, teacher)]
    leaves = [t.detach().clone().requires_grad_() for t in (flat[0].hidden, flat[0].weight, flat[0].bias)]
    scaled = HiddenStates(*leaves, logit_scale=2.0)
    out = distillation_loss(
        scaled, flat[1], mask=mask.flatten(), divergence="reverse_kl", temperature=1.0, teacher_temperature=1.4
    )
    out.loss.backward()
    torch.testing.assert_close(out.loss, want.loss)
    for leaf, grad in zip(leaves, grads, strict=True):
        torch.testing.assert_close(leaf.grad.view(grad.shape), grad)


def test_second_backward_and_only_the_student_has_a_gradient():
    student, teacher, mask = make(torch.float32)
    leaves = leaves_of(student)
    theirs = leaves_of(teacher)
    out = distillation_loss(HiddenStates(*leaves), HiddenStates(*theirs), mask=mask)
    first = torch.autograd.grad(out.loss, leaves, retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(3 * out.loss, leaves + theirs, allow_unused=True)
    for a, b, c in zip(first, kept, second[:3], strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(c, 3 * b, rtol=1e-5, atol=1e-7)
    assert second[3:] == (None, None, None)


def test_frozen_head_and_scoring_skip_products(monkeypatch):
    """Forward products of both sides; a frozen head leaves out d weight, no gradient leaves out both."""
    calls = []
    real = linear_walk.product
    monkeypatch.setattr(linear_walk, "product", lambda *a, **k: (calls.append(a), real(*a, **k))[1])
    student, teacher, mask = make(torch.float32)
    for trainable, products in (((True, True), 4), ((True, False), 3), ((False, True), 3), ((False, False), 2)):
        calls.clear()
        hidden, weight = (
            t.clone().requires_grad_(on) for t, on in zip((student.hidden, student.weight), trainable, strict=True)
        )
        out = distillation_loss(HiddenStates(hidden, weight), teacher, mask=mask)
        assert len(calls) == products
        if any(trainable):
            out.loss.backward()
        assert (weight.grad is not None) == trainable[1]
    with torch.no_grad():
        calls.clear()
        distillation_loss(HiddenStates(student.hidden, student.weight.requires_grad_()), teacher, mask=mask)
        assert len(calls) == 2


def test_in_a_compiled_graph():
    """Value and gradients of `fullgraph=True`, under an upstream gradient."""
    student, teacher, mask = make(torch.float32)

    def loss(*leaves):
        return 3 * distillation_loss(HiddenStates(*leaves), teacher, mask=mask, divergence="jsd").loss

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = leaves_of(student)
        value = function(*leaves)
        value.backward()
        results.append((value.detach(), *(leaf.grad for leaf in leaves)))
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("rows", [0, 1, 130])
def test_nothing_selected(rows):
    hidden = torch.full((rows, 4), torch.nan, requires_grad=True)
    weight = torch.randn(7, 4, requires_grad=True)
    teacher = HiddenStates(torch.randn(rows, 3), torch.randn(7, 3))
    out = distillation_loss(HiddenStates(hidden, weight), teacher, mask=torch.zeros(rows, dtype=torch.bool))
    out.loss.backward()
    assert out.loss == out.weight == 0
    assert (hidden.grad == 0).all()
    assert hidden.grad.shape == hidden.shape
    assert (weight.grad == 0).all()


@pytest.mark.parametrize(
    ("student", "teacher", "knobs", "message"),
    [
        ({"softcap": 5.0}, {}, {}, r"^student_logits: a divergence has no soft cap; got HiddenStates\(softcap=5.0\)"),
        ({}, {"weight": torch.ones(6, 3)}, {}, r"^teacher: expected .* vocabulary of 7; got .* 6; .* slice off"),
        ({}, {"hidden": torch.ones(4, 3)}, {}, r"^teacher: expected .* tokens \(5,\) .* got \(4,\) and 7"),
        ({"weight": torch.ones(3, 7)}, {}, {}, r"^weight: expected shape \(V, 3\).*got \(3, 7\).*not transposed"),
        ({"bias": torch.ones(3)}, {}, {}, r"^bias: expected shape \(7,\).*got \(3,\)"),
        ({}, {}, {"workspace_mib": 0.001}, r"^workspace_mib: expected at least"),
        ({"hidden": torch.ones(3)}, {}, {}, r"^hidden: expected shape \(N, D\) packed or \(B, T, D\).*got \(3,\)"),
    ],
)
def test_errors(student, teacher, knobs, message):
    sides = [
        HiddenStates(**{"hidden": torch.ones(5, 3), "weight": torch.ones(7, 3), **side}) for side in (student, teacher)
    ]
    with pytest.raises(ValueError, match=message):
        distillation_loss(*sides, **knobs)


def test_exported():
    assert fusedpg.HiddenStates is HiddenStates
