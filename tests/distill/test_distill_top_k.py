"""A teacher by its top-k log-probs: forward KL over the listed tokens and one bucket for the rest."""

import math

import pytest
import torch
from teachers import INF, NAN, make_pair

import fusedpg
from support import backend_device

CASES = [(shape, k) for shape in ((5, 37), (2, 3, 90)) for k in (1, 4)]


def top_k(teacher, k):
    logps, ids = torch.log_softmax(teacher.double(), -1).topk(k)
    return fusedpg.TopK(ids, logps.float())


def run(student, teacher, backend, mask=None, upstream=1.0, **knobs):
    """(output, gradient in fp64)."""
    device = backend_device(backend)
    leaf = student.detach().to(device).clone().requires_grad_()
    teacher = fusedpg.TopK(teacher.ids.to(device), teacher.logps.to(device))
    mask = None if mask is None else mask.to(device)
    out = fusedpg.distillation_loss(leaf, teacher, divergence="forward_kl", mask=mask, backend=backend, **knobs)
    (out.loss * upstream).backward()
    return out, leaf.grad.double().cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("shape", "k"), CASES)
def test_against_fp64(shape, k, dtype, native_backend):
    pair = make_pair(shape, dtype, masked=True)
    teacher = top_k(torch.where(pair.mask[..., None], pair.teacher, 0.0), k)
    teacher.ids[~pair.mask], teacher.logps[~pair.mask] = -1, NAN
    for upstream in (1.0, -3.0):
        got, grad = run(pair.student, teacher, native_backend, pair.mask, upstream, temperature=0.7)
        want, want_grad = run(pair.student.double(), teacher, "reference", pair.mask, upstream, temperature=0.7)
        torch.testing.assert_close(got.per_token.double().cpu(), want.per_token, rtol=3e-6, atol=3e-6)
        unit = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-6
        torch.testing.assert_close(grad, want_grad, rtol=2 * unit, atol=4e-7 + unit * want_grad.abs().max().item() / 8)
        assert (grad[~pair.mask] == 0).all()
        for name, value in want.metrics.items():
            torch.testing.assert_close(got.metrics[name].double().cpu(), value, rtol=3e-6, atol=3e-6, msg=name)


def test_two_of_three_tokens(backend):
    """p = (1/3, 1/3, 1/3), q = (1/2, 1/4) and 1/4 in the bucket: (1/2) log(3/2) + (1/4) log(3/4) + (1/4) log(3/4).

    With one column in the bucket this is the full KL, and its gradient p - q.
    """
    teacher = fusedpg.TopK(torch.tensor([[0, 2]]), torch.tensor([[0.5, 0.25]]).log())
    out, grad = run(torch.zeros(1, 3), teacher, backend)
    assert out.loss.item() == pytest.approx(0.5 * math.log(1.5) + 0.5 * math.log(0.75), abs=3e-7)
    assert grad[0].tolist() == pytest.approx([-1 / 6, 1 / 12, 1 / 12], abs=3e-7)


def test_two_columns_share_the_bucket(backend):
    """p uniform over 4, q = 1/2 and 1/2 in the bucket of three columns: (1/2) log 2 + (1/2) log(2/3).

    The listed column's gradient is p - q = -1/4, the others share +1/4 in proportion to p.
    """
    teacher = fusedpg.TopK(torch.tensor([[1]]), torch.tensor([[0.5]]).log())
    out, grad = run(torch.zeros(1, 4), teacher, backend)
    assert out.loss.item() == pytest.approx(0.5 * math.log(4 / 3), abs=3e-7)
    assert grad[0].tolist() == pytest.approx([1 / 12, -1 / 4, 1 / 12, 1 / 12], abs=3e-7)


def test_all_tokens_listed_is_the_full_divergence(backend):
    pair = make_pair((4, 9))
    out, grad = run(pair.student, top_k(pair.teacher, 9), backend)
    device = backend_device(backend)
    leaf = pair.student.to(device).requires_grad_()
    full = fusedpg.distillation_loss(leaf, pair.teacher.to(device), divergence="forward_kl", backend=backend)
    full.loss.backward()
    torch.testing.assert_close(out.loss, full.loss, rtol=1e-5, atol=3e-6)
    torch.testing.assert_close(grad, leaf.grad.double().cpu(), rtol=1e-5, atol=1e-6)


def test_fewer_than_k_tokens_and_excluded_ones(backend):
    """-inf in the teacher's list adds nothing; a listed token that the student excludes is inf, in its row alone."""
    ids = torch.tensor([[0, 1], [0, 1]])
    logps = torch.tensor([[0.5, 0.0], [0.5, 0.25]]).log()
    student = torch.zeros(2, 4)
    one, _ = run(student[:1], fusedpg.TopK(ids[:1, :1], logps[:1, :1]), backend)
    two, grad = run(student, fusedpg.TopK(ids, logps), backend)
    torch.testing.assert_close(two.per_token[0], one.per_token[0])
    assert grad.isfinite().all()
    student[1, 1] = -INF
    broken, _ = run(student, fusedpg.TopK(ids, logps), backend)
    assert broken.per_token.isinf().tolist() == [False, True]


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_gradcheck(name):
    pair = make_pair((3, 8), torch.float64, torch.float64)
    teacher = top_k(pair.teacher, 3)

    def loss(x):
        knobs = {"divergence": "forward_kl", "temperature": 0.7, "backend": name}
        return fusedpg.distillation_loss(x, teacher, **knobs).loss

    assert torch.autograd.gradcheck(loss, (pair.student.requires_grad_(),))


def test_no_tokens(backend):
    for shape in ((0,), (0, 3), (3, 0)):
        teacher = fusedpg.TopK(torch.zeros(*shape, 2, dtype=torch.int64), torch.zeros(*shape, 2))
        out, grad = run(torch.zeros(*shape, 5), teacher, backend)
        assert out.loss == 0
        assert grad.shape == (*shape, 5)
