"""Reductions: literals, exact counts, packed = padded, and (numerator, weight) of any split = whole."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fusedpg
from fusedpg.spec import REDUCTION_ALIASES, REDUCTIONS
from fusedpg.weights import Layout, inverse_denominator, token_weights

CPU = torch.device("cpu")
PACKED = Layout(1, 6, False, torch.tensor([0, 1, 1, 3, 6]))  # lengths 1, 0, 2, 3
PADDED = Layout(2, 3, True, None)


def weigh(mask, layout, reduction, max_tokens=None, dtype=torch.float64):
    if isinstance(mask, list):
        mask = torch.tensor(mask)
    return token_weights(mask, layout, reduction, max_tokens, dtype=dtype, device=CPU)


# ------------------------------------------------------------------ literals

#: rows [1, 1/2, 0] and [0, 0, 0]
FRACTIONAL = [1.0, 0.5, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("reduction", "max_tokens", "w", "weight"),
    [
        ("token-mean", None, [1.0, 0.5, 0, 0, 0, 0], 1.5),
        ("token-sum", None, [1.0, 0.5, 0, 0, 0, 0], 1.0),
        ("seq-mean-token-mean", None, [2 / 3, 1 / 3, 0, 0, 0, 0], 1.0),  # 1/1.5, 0.5/1.5; one sequence has a token
        ("seq-mean-token-sum", None, [1.0, 0.5, 0, 0, 0, 0], 1.0),
        ("seq-mean-token-sum-norm", 4, [0.25, 0.125, 0, 0, 0, 0], 1.0),
    ],
)
def test_fractional_mask(reduction, max_tokens, w, weight):
    got = weigh(FRACTIONAL, PADDED, reduction, max_tokens)
    assert got.w.tolist() == pytest.approx(w, abs=1e-15)
    assert got.weight.item() == weight
    assert got.sequences.item() == 1


@pytest.mark.parametrize(
    ("reduction", "max_tokens", "w", "weight"),
    [
        ("token-mean", None, [1.0] * 6, 6.0),
        ("token-sum", None, [1.0] * 6, 1.0),
        ("seq-mean-token-mean", None, [1, 1 / 2, 1 / 2, 1 / 3, 1 / 3, 1 / 3], 3.0),
        ("seq-mean-token-sum", None, [1.0] * 6, 3.0),
        ("seq-mean-token-sum-norm", 5, [0.2] * 6, 3.0),
    ],
)
def test_no_mask_and_a_zero_length_sequence(reduction, max_tokens, w, weight):
    """The sequence of length 0 counts nowhere."""
    got = weigh(None, PACKED, reduction, max_tokens)
    assert got.w.tolist() == pytest.approx(w, abs=1e-15)
    assert (got.weight.item(), got.sequences.item()) == (weight, 3)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    ("layout", "tokens"),
    [
        (Layout(1, 0, False, torch.tensor([0])), 0),
        (Layout(1, 0, False, torch.tensor([0, 0, 0])), 0),
        (Layout(0, 3, True, None), 0),
        (Layout(3, 0, True, None), 0),
        (Layout(2, 2, True, None), 4),
    ],
    ids=["no_sequence", "empty_sequences", "no_rows", "no_columns", "all_masked"],
)
def test_nothing_selected(reduction, layout, tokens):
    got = weigh(torch.zeros(tokens), layout, reduction, 4)
    assert got.w.tolist() == [0.0] * tokens
    assert got.weight.item() == (1 if reduction == "token-sum" else 0)
    assert got.sequences.item() == 0


def test_unknown_reduction():
    with pytest.raises(ValueError, match="reduction: no weights are defined for 'mean'"):
        weigh(None, PADDED, "mean")


@pytest.mark.parametrize("max_tokens", [None, True, False, 0, -3, 2.0, 2.5, "8"])
def test_max_tokens_refusals(max_tokens):
    expected = f"expects a positive int; got {max_tokens!r}; pass the fixed response budget, e.g. max_tokens=4096"
    with pytest.raises(ValueError, match=re.escape(expected)):
        fusedpg.loss_spec("reinforce", reduction="seq-mean-token-sum-norm", max_tokens=max_tokens)


def test_alias():
    assert REDUCTION_ALIASES == {"seq-mean-token-sum-fixed": "seq-mean-token-sum-norm"}
    by_alias = fusedpg.loss_spec("reinforce", reduction="seq-mean-token-sum-fixed", max_tokens=8)
    assert by_alias == fusedpg.loss_spec("reinforce", reduction="seq-mean-token-sum-norm", max_tokens=8)


# ------------------------------------------------------------------ exact counts whatever the mask's dtype


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int8, torch.int64, torch.bfloat16, torch.float16, torch.float32, torch.float64],
    ids=str,
)
@pytest.mark.parametrize("length", [257, 4099])
def test_counts_are_exact(dtype, length):
    """16-bit floats stop counting at 256 and 2048."""
    mask = torch.ones(2 * length, dtype=dtype)
    mask[-1] = 0
    layout = Layout(2, length, True, None)
    assert weigh(mask, layout, "token-mean", dtype=torch.float32).weight.item() == 2 * length - 1
    w = weigh(mask, layout, "seq-mean-token-mean", dtype=torch.float32).w
    assert w[0].item() == pytest.approx(1 / length, rel=1e-7)
    assert w[length].item() == pytest.approx(1 / (length - 1), rel=1e-7)
    assert w[-1].item() == 0
    packed = Layout(1, 2 * length, False, torch.tensor([0, length, 2 * length]))
    assert torch.equal(weigh(mask, packed, "seq-mean-token-mean", dtype=torch.float32).w, w)


def test_count_past_2_24():
    """A running fp32 sum stops at 16,777,216."""
    n = 2**24 + 2
    got = weigh(torch.ones(n, dtype=torch.bool), Layout(1, n, False, None), "token-mean", dtype=torch.float32)
    assert got.weight.item() == n


# ------------------------------------------------------------------ layouts


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_packed_equals_padded(reduction):
    lengths = [3, 1, 4, 0]
    mask = torch.rand(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inside = torch.arange(4) < torch.tensor(lengths)[:, None]
    mask = mask * inside
    padded = weigh(mask.reshape(-1), Layout(4, 4, True, None), reduction, 8)
    cu = torch.tensor([0, 3, 4, 8, 8])
    packed = weigh(mask[inside], Layout(1, 8, False, cu), reduction, 8)
    torch.testing.assert_close(packed.w, padded.w[inside.reshape(-1)], rtol=1e-14, atol=0)
    torch.testing.assert_close(packed.weight, padded.weight, rtol=1e-14, atol=0)
    assert packed.sequences == padded.sequences


def test_layout_boundaries_and_spread():
    assert PADDED.boundaries(CPU).tolist() == [0, 3, 6]
    assert PADDED.spread(torch.tensor([1.0, 2.0])).tolist() == [1, 1, 1, 2, 2, 2]
    assert PACKED.spread(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [1, 3, 3, 4, 4, 4]
    assert PACKED.segment_sum(torch.arange(6.0, dtype=torch.float64)).tolist() == [0, 0, 3, 12]
    assert Layout(1, 0, False, torch.tensor([0])).spread(torch.zeros(0)).tolist() == []
    one = Layout(1, 3, True, None).spread(torch.tensor([2.0]))
    assert one.stride() == (1,), "kernels read contiguous rows"


def test_boundaries_out_of_range_do_not_read_outside():
    """On a GPU the values are not checked: they are clamped."""
    wild = Layout(1, 3, False, torch.tensor([0, 9, 3]))
    assert torch.isfinite(weigh(None, wild, "seq-mean-token-mean").w).all()


def test_inverse_denominator():
    weight = torch.tensor(4.0)
    assert inverse_denominator(weight, None) == 0.25
    assert inverse_denominator(weight, 8) == 0.125
    assert inverse_denominator(weight, torch.tensor([16], dtype=torch.int64)) == 0.0625
    assert inverse_denominator(torch.tensor(0.0), None) == 0
    assert inverse_denominator(weight, torch.tensor(0.0)) == 0
    assert (
        inverse_denominator(weight, torch.tensor(8.0, dtype=torch.float64, requires_grad=True)).requires_grad is False
    )


# ------------------------------------------------------------------ split = whole


def sums(reduction, logp, mask, backend, grad_scale=None):
    """(numerator, weight, gradient of the numerator over grad_scale) of padded rows."""
    knobs = {"max_tokens": 16} if reduction == "seq-mean-token-sum-norm" else {}
    leaf = logp.clone().requires_grad_()
    out = fusedpg.policy_loss(
        fusedpg.loss_spec("reinforce", reduction=reduction, **knobs),
        leaf,
        advantages=1.0,
        mask=mask,
        normalizer=grad_scale or 1.0,
        backend=backend,
    )
    out.loss.backward()
    return out.numerator.item(), out.weight.item(), leaf.grad


@st.composite
def splits(draw):
    """A batch of masked rows and the sizes of its micro-batches."""
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    weights = st.sampled_from([0.0, 0.0, 0.25, 0.5, 1.0])
    mask = draw(st.lists(st.lists(weights, min_size=columns, max_size=columns), min_size=rows, max_size=rows))
    seed = draw(st.integers(0, 2**16))
    cuts = sorted(draw(st.sets(st.integers(1, rows), max_size=rows)) | {rows})
    return torch.tensor(mask), seed, cuts


@pytest.mark.parametrize("reduction", REDUCTIONS)
@settings(max_examples=25, deadline=None)
@given(batch=splits())
def test_any_split_equals_the_whole(reduction, batch):
    """Sums of numerators, weights and gradients over whole sequences give the unsplit call."""
    mask, seed, cuts = batch
    logp = -torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    numerator, weight, grad = sums(reduction, logp, mask, "reference")
    parts = [sums(reduction, logp[a:b], mask[a:b], "reference") for a, b in zip([0, *cuts[:-1]], cuts, strict=True)]
    assert sum(n for n, _, _ in parts) == pytest.approx(numerator, rel=1e-12, abs=1e-12)
    torch.testing.assert_close(torch.cat([g for _, _, g in parts]), grad, rtol=0, atol=0)
    if reduction == "token-sum":
        assert {w for _, w, _ in parts} == {weight} == {1.0}  # a sum has no unit count
    else:
        assert sum(w for _, w, _ in parts) == pytest.approx(weight, rel=1e-14)


@pytest.mark.parametrize("reduction", ["token-mean", "token-sum"])
@settings(max_examples=15, deadline=None)
@given(batch=splits())
def test_token_reductions_split_anywhere(reduction, batch):
    """Token reductions need no sequences: even single tokens may be apart."""
    mask, seed, _ = batch
    logp = -torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    numerator, weight, grad = sums(reduction, logp, mask, "reference")
    flat = [
        sums(reduction, x[None], m[None], "reference") for x, m in zip(logp.reshape(-1), mask.reshape(-1), strict=True)
    ]
    assert sum(n for n, _, _ in flat) == pytest.approx(numerator, rel=1e-12, abs=1e-12)
    torch.testing.assert_close(torch.cat([g for _, _, g in flat]).reshape(grad.shape), grad, rtol=0, atol=0)
    if reduction == "token-mean":
        assert sum(w for _, w, _ in flat) == pytest.approx(weight, rel=1e-14)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_split_on_every_backend(backend, reduction):
    logp = -torch.rand(5, 4, generator=torch.Generator().manual_seed(3))
    mask = torch.tensor([[1.0, 1.0, 0.5, 0.0]] * 2 + [[0.0] * 4] + [[1.0] * 4] * 2)
    numerator, weight, grad = sums(reduction, logp, mask, backend, 3.0)
    parts = [sums(reduction, logp[a:b], mask[a:b], backend, 3.0) for a, b in ((0, 2), (2, 3), (3, 5))]
    assert sum(n for n, _, _ in parts) == pytest.approx(numerator, rel=1e-6)
    assert torch.equal(torch.cat([g for _, _, g in parts]), grad)
    if reduction != "token-sum":
        assert sum(w for _, w, _ in parts) == weight
