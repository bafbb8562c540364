"""Values worked by hand, and the mutants that they tell apart."""

import math

import pytest
import torch
from teachers import INF, NAN, Pair, make_pair, run

LN2, LN3 = math.log(2), math.log(3)
#: p = (1/2, 1/2), q = (3/4, 1/4)
HALVES = Pair(torch.tensor([[0.0, 0.0]]), torch.tensor([[LN3, 0.0]]))
REVERSE = 0.5 * math.log(2 / 3) + 0.5 * LN2  # 0.1438
FORWARD = 0.75 * math.log(3 / 2) - 0.25 * LN2  # 0.1308


def jsd(beta):
    """beta KL(q||m) + (1-beta) KL(p||m) with m = beta q + (1-beta) p."""
    m = [beta * q + (1 - beta) / 2 for q in (0.75, 0.25)]
    teacher = 0.75 * math.log(0.75 / m[0]) + 0.25 * math.log(0.25 / m[1])
    student = 0.5 * math.log(0.5 / m[0]) + 0.5 * math.log(0.5 / m[1])
    return beta * teacher + (1 - beta) * student, (1 - beta) * 0.5 * (math.log(0.5 / m[0]) - student)


#: divergence, knobs, value, gradient at the first column (the second's is its negative)
CASES = [
    # p (log p - log q - KL): (log 2/3 - (log 4/3)/2)/2 = -(log 3)/4
    ("reverse_kl", {}, REVERSE, -LN3 / 4),
    ("forward_kl", {}, FORWARD, -0.25),  # p - q = 1/2 - 3/4
    # m = 1/4 q + 3/4 p = (9/16, 7/16)
    ("jsd", {"beta": 0.25}, *jsd(0.25)),
    ("jsd", {"beta": 0.75}, *jsd(0.75)),
]


@pytest.mark.parametrize(("divergence", "knobs", "value", "slope"), CASES)
def test_two_columns(divergence, knobs, value, slope, backend):
    got = run(HALVES, backend, divergence=divergence, **knobs)
    assert got.values["loss"].item() == pytest.approx(value, abs=3e-7)
    assert got.grad[0].tolist() == pytest.approx([slope, -slope], abs=3e-7)
    assert got.values["metric:student_entropy"].item() == pytest.approx(LN2, abs=1e-6)
    assert got.values["metric:teacher_entropy"].item() == pytest.approx(2 * LN2 - 0.75 * LN3, abs=1e-6)


def test_temperature_divides_both_and_the_gradient(backend):
    """Logits scaled by their temperatures are the case above; the gradient has one factor 1/T, the value none of T^2."""
    pair = Pair(HALVES.student * 2, HALVES.teacher * 4)
    for divergence, knobs, value, slope in CASES:
        got = run(pair, backend, divergence=divergence, temperature=2.0, teacher_temperature=4.0, **knobs)
        assert got.values["loss"].item() == pytest.approx(value, abs=3e-7)
        assert got.grad[0].tolist() == pytest.approx([slope / 2, -slope / 2], abs=3e-7)


def test_the_cases_tell_mutants_apart():
    """Directions swapped, beta the student's share, m unweighted, T^2: each moves a literal by far more than 3e-7."""
    values = [REVERSE, FORWARD, jsd(0.25)[0], jsd(0.75)[0], jsd(0.5)[0], 4 * REVERSE]
    assert min(abs(a - b) for i, a in enumerate(values) for b in values[:i]) > 1e-3
    slopes = [-LN3 / 4, -0.25, jsd(0.25)[1], jsd(0.75)[1], jsd(0.25)[1] / 0.75, -LN3 / 8, -0.125]
    assert min(abs(a - b) for i, a in enumerate(slopes) for b in slopes[:i]) > 1e-3


# ------------------------------------------------------------------ columns without probability


def test_a_column_that_both_exclude_adds_nothing(backend):
    wide = Pair(*(torch.cat([x, torch.full((1, 3), -INF)], 1) for x in (HALVES.student, HALVES.teacher)))
    for divergence, knobs, value, slope in CASES:
        got = run(wide, backend, divergence=divergence, **knobs)
        assert got.values["loss"].item() == pytest.approx(value, abs=3e-7)
        assert got.grad[0].tolist() == pytest.approx([slope, -slope, 0, 0, 0], abs=3e-7)


#: three columns; one of the two excludes the last
ONLY = [
    # q > 0 where p = 0: forward KL is inf; KL(p||q) = log(3/2), its gradient 0 by symmetry
    ([0.0, 0.0, -INF], [0.0, 0.0, 0.0], "forward_kl", INF),
    ([0.0, 0.0, -INF], [0.0, 0.0, 0.0], "reverse_kl", math.log(3 / 2)),
    ([0.0, 0.0, 0.0], [0.0, 0.0, -INF], "reverse_kl", INF),
    ([0.0, 0.0, 0.0], [0.0, 0.0, -INF], "forward_kl", math.log(3 / 2)),
    # also where the probability that meets none underflows
    ([0.0, 0.0, -INF], [0.0, 0.0, -500.0], "forward_kl", INF),
    # m = (5/12, 5/12, 1/6): (1/2)(2/3 log 4/5 + 1/3 log 2 + log 6/5)
    ([0.0, 0.0, -INF], [0.0, 0.0, 0.0], "jsd", 0.5 * (2 / 3 * math.log(0.8) + LN2 / 3 + math.log(1.2))),
    ([0.0, 0.0, 0.0], [0.0, 0.0, -INF], "jsd", 0.5 * (2 / 3 * math.log(0.8) + LN2 / 3 + math.log(1.2))),
]


@pytest.mark.parametrize(("student", "teacher", "divergence", "value"), ONLY)
def test_a_column_that_one_excludes(student, teacher, divergence, value, backend):
    """The infinite row is visible in the loss and leaves the other's gradient alone."""
    pair = Pair(torch.tensor([student, [1.0, 0.0, 0.0]]), torch.tensor([teacher, [0.0, 0.0, 0.0]]))
    got = run(pair, backend, divergence=divergence, reduction="token-sum")
    assert got.values["per_token"][0].item() == pytest.approx(value, abs=3e-7)
    other = run(Pair(pair.student[1:], pair.teacher[1:]), backend, divergence=divergence, reduction="token-sum")
    torch.testing.assert_close(got.grad[1:], other.grad, rtol=1e-5, atol=1e-7)
    assert got.values["loss"].isinf() == (value == INF)
    if value < INF:
        assert got.grad.isfinite().all()


@pytest.mark.parametrize("bad", [NAN, INF, "empty"])
@pytest.mark.parametrize("side", ["student", "teacher"])
@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "jsd"])
def test_a_broken_row_is_visible(bad, side, divergence, backend):
    """NaN, +inf or no finite logit: NaN in that token's value and gradient, and in the loss; other rows are intact."""
    pair = make_pair((3, 70))
    clean = run(Pair(pair.student[::2], pair.teacher[::2]), backend, divergence=divergence, reduction="token-sum")
    row = getattr(pair, side)[1]
    if bad == "empty":
        row[:] = -INF
    else:
        row[5] = bad
    got = run(pair, backend, divergence=divergence, reduction="token-sum")
    assert got.values["per_token"].isnan().tolist() == [False, True, False]
    assert got.values["loss"].isnan()
    assert got.grad[1].isnan().any()
    torch.testing.assert_close(got.grad[::2], clean.grad, rtol=1e-5, atol=1e-7)
    pair.mask = torch.tensor([True, False, True])
    masked = run(pair, backend, divergence=divergence, reduction="token-sum")
    assert torch.equal(masked.grad[::2], got.grad[::2])
    assert (masked.grad[1] == 0).all()
    assert masked.values["loss"].isfinite()
