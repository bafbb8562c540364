"""Every backend against fp64: dtypes, layouts, sizes, temperatures and betas, in value, metrics and gradient."""

import os

import pytest
import torch
from teachers import DIVERGENCES, INF, Pair, check, dtypes_of, make_pair, run, truth

from fusedpg import cpu, dispatch
from triton_tools.inputs import BLOCK

KNOBS = {"beta": 0.3, "temperature": 0.7, "teacher_temperature": 1.3}


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_dtypes(divergence, native_backend):
    """Student and teacher in every pair of dtypes, with excluded columns and masked rows of NaN."""
    for i, (student, teacher) in enumerate(dtypes_of(native_backend)):
        pair = make_pair((2, 2, 77), student, teacher, seed=i, holes=True, masked=True)
        got = check(pair, native_backend, f"{student} {teacher}", divergence=divergence, **KNOBS)
        assert (got.grad[~pair.mask] == 0).all()
        assert got.output.backend == native_backend


def own_divergence(student, teacher, divergence):
    """PyTorch's kl_div in fp64, a token; nothing of the library."""
    log_p, log_q = (x.double().log_softmax(-1) for x in (student / 0.7, teacher / 1.3))
    kl = lambda to, of: torch.nn.functional.kl_div(to, of, reduction="none", log_target=True).sum(-1)  # noqa: E731
    if divergence == "jsd":
        log_m = (0.3 * log_q.exp() + 0.7 * log_p.exp()).log()
        return 0.3 * kl(log_m, log_q) + 0.7 * kl(log_m, log_p)
    return kl(log_q, log_p) if divergence == "reverse_kl" else kl(log_p, log_q)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_torch_s_own_divergence(divergence, backend):
    """Value and gradient of PyTorch's functional form in fp64, reduced by hand."""
    pair = make_pair((3, 4, 301), torch.float32, torch.float32)
    pair.mask = torch.rand(3, 4, generator=torch.Generator().manual_seed(1)) > 0.3
    got = run(pair, backend, divergence=divergence, reduction="seq-mean-token-mean", **KNOBS)
    student = pair.student.double().requires_grad_()
    per_token = own_divergence(student, pair.teacher.double(), divergence)
    loss = ((per_token * pair.mask).sum(1) / pair.mask.sum(1)).mean()
    loss.backward()
    torch.testing.assert_close(got.values["per_token"][pair.mask], per_token[pair.mask].detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.values["loss"], loss.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(got.grad, student.grad, rtol=1e-4, atol=1e-7)


def layout(kind: str, x: torch.Tensor) -> torch.Tensor:
    """The same values (B, T, V) with other strides."""
    b, t, v = x.shape
    if kind == "shifted":  # [:, :-1] of a model's logits
        return torch.cat([x, x[:, :1]], 1)[:, :-1]
    if kind == "padded":
        return torch.nn.functional.pad(x, (3, 5))[..., 3 : 3 + v]
    if kind == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if kind == "unaligned":
        return torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(b, t, v)
    return x.transpose(1, 2).contiguous().transpose(1, 2)  # vocabulary stride of T


@pytest.mark.parametrize("kind", ["shifted", "padded", "transposed", "unaligned", "columns"])
@pytest.mark.parametrize("side", ["student", "teacher", "both"])
def test_layouts(kind, side, native_backend):
    pair = make_pair((2, 2, 141), torch.bfloat16, torch.bfloat16)
    want = run(pair, native_backend, divergence="jsd")
    if side != "teacher":
        pair.student = layout(kind, pair.student)
    if side != "student":
        pair.teacher = layout(kind, pair.teacher)
    got = check(pair, native_backend, divergence="jsd")
    torch.testing.assert_close(got.grad, want.grad, rtol=2**-7, atol=1e-7)


@pytest.mark.parametrize("vocab", [1, 3, 17, BLOCK, BLOCK + 1, 301])
def test_vocabularies(vocab, native_backend):
    for divergence in DIVERGENCES:
        for dtype in (torch.float32, torch.bfloat16):
            got = check(make_pair((2, vocab), dtype, dtype), native_backend, divergence=divergence)
            if vocab == 1:
                assert got.values["loss"] == 0
                assert (got.grad == 0).all()


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_cpu_blocks(divergence, dtype):
    """Rows of more than two of the core's blocks, one of them wholly excluded, and logits far apart."""
    pair = make_pair((3, 9001), dtype, dtype)
    pair.student[0] *= 20
    pair.teacher[1] *= 20
    pair.student[2, :4096] = pair.teacher[2, :4096] = -INF
    check(pair, "cpu", divergence=divergence)


@pytest.mark.parametrize("knobs", [{"beta": 0.01}, {"beta": 0.99}, {"temperature": 0.1}, {"teacher_temperature": 5.0}])
def test_knobs(knobs, native_backend):
    pair = make_pair((3, 90))
    for divergence in DIVERGENCES:
        check(pair, native_backend, divergence=divergence, **knobs)


def test_teacher_temperature_is_the_student_s_by_default(backend):
    pair = make_pair((4, 20))
    one = run(pair, backend, temperature=0.6)
    two = run(pair, backend, temperature=0.6, teacher_temperature=0.6)
    assert one.values["loss"] == two.values["loss"]


def test_a_common_offset_costs_nothing(native_backend):
    pair = make_pair((4, 50))
    pair.student, pair.teacher = (x.mul(1024).round() / 1024 for x in (pair.student, pair.teacher))  # exact sums
    moved = Pair(pair.student + 4096, pair.teacher - 4096)
    for divergence in DIVERGENCES:
        a, b = run(pair, native_backend, divergence=divergence), run(moved, native_backend, divergence=divergence)
        assert a.values["loss"] == b.values["loss"]
        assert torch.equal(a.grad, b.grad)


def test_equal_distributions(native_backend):
    """No divergence, and no more gradient than rounding makes."""
    pair = make_pair((4, 90), torch.bfloat16)
    pair.teacher = pair.student.float()
    for divergence in DIVERGENCES:
        got = run(pair, native_backend, divergence=divergence)
        assert got.values["per_token"].abs().max() < 2e-6
        assert got.grad.abs().max() < 2e-7


# ------------------------------------------------------------------ bits


def outcomes(pair, **knobs):
    result = run(pair, "cpu", **knobs)
    return torch.cat([result.grad.flatten(), *(v.flatten() for v in result.values.values())])


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_bits_depend_on_neither_threads_nor_vector_width(divergence, monkeypatch):
    pair = make_pair((7, 9001), torch.bfloat16, torch.float32, holes=True)
    isas = [isa for isa in cpu.available_isas() if isa.startswith(("v3", "v4"))]
    threads, seen = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            seen.append(outcomes(pair, divergence=divergence))
    finally:
        torch.set_num_threads(threads)
    for isa in isas:
        monkeypatch.setitem(os.environ, "FUSEDPG_CPU_ISA", isa)
        seen.append(outcomes(pair, divergence=divergence))
    assert len(seen) >= 3
    assert all(torch.equal(seen[0], other) for other in seen[1:])


@pytest.mark.parametrize("isa", cpu.available_isas() if dispatch.unavailable("cpu") is None else ["missing"])
def test_every_isa_against_fp64(isa, monkeypatch):
    monkeypatch.setitem(os.environ, "FUSEDPG_CPU_ISA", isa)
    for divergence in DIVERGENCES:
        check(make_pair((3, 301), torch.float16, torch.bfloat16, holes=True), "cpu", isa, divergence=divergence)


def test_a_row_is_its_own(native_backend):
    """The same bits whatever the rows around it."""
    pair = make_pair((6, 100))
    whole = run(pair, native_backend, reduction="token-sum")
    alone = run(Pair(pair.student[4:5], pair.teacher[4:5]), native_backend, reduction="token-sum")
    assert torch.equal(whole.grad[4:5], alone.grad)
    assert whole.values["per_token"][4] == alone.values["per_token"][0]


def test_no_tokens(backend):
    for shape in ((0, 9), (0, 4, 9), (3, 0, 9)):
        got = run(make_pair(shape), backend, divergence="jsd")
        assert got.values["loss"] == 0
        assert got.values["weight"] == 0
        assert got.grad.shape == shape
        assert got.output.per_token.shape == shape[:-1]
        assert all(v == 0 for v in got.output.metrics.to_dict().values())
    assert truth(make_pair((0, 9))).values["loss"] == 0
