"""Stages A and C of the Triton kernels against fp64, launched through `fusedpg.gpu` with blocks small enough to cross."""

import itertools

import pytest
import torch

from fusedpg import gpu
from fusedpg.kernels import launch
from triton_tools.inputs import BLOCK, CHUNK, DEVICE, DTYPES, close, make_logits, make_targets, truth, use_small_blocks

#: one row, inside a vector, and one less, equal and more than a block and two chunks
WIDTHS = [1, 3, 17, 100, BLOCK - 1, BLOCK, BLOCK + 1, 2 * CHUNK + 1]
INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    use_small_blocks(monkeypatch)


def check_logprob(logits, targets, active=None, temperature=0.7, softcap=0.0, logit_scale=1.3, entropy=True, out=None):
    """A and C against fp64; returns the gradient's tensor."""
    row_temperature = temperature if isinstance(temperature, torch.Tensor) else None
    scalar = 1.0 if row_temperature is not None else temperature
    knobs = (row_temperature, scalar, softcap, logit_scale)
    leaf, want_logp, want_entropy = truth(logits, targets, active, temperature, softcap, logit_scale)
    logp, h, row_max, log_sum = gpu.logprob_forward(logits, targets, active, *knobs, entropy)
    close(logp, want_logp.detach())
    assert h.numel() == (targets.numel() if entropy else 0)
    n = targets.numel()
    c, e = make_logits((n,), torch.float32, 1.0, 5), make_logits((n,), torch.float32, 1.0, 6)
    if active is not None:
        c, e = torch.where(active, c, 0.0), torch.where(active, e, 0.0)
    score = (want_logp * c).sum()
    if entropy:
        close(h, want_entropy.detach())
        score = score + (want_entropy * e).sum()
    (want,) = torch.autograd.grad(score, leaf)
    if out is None:
        out = torch.full(logits.shape, NAN, dtype=logits.dtype, device=DEVICE)
    extra = (h, c, e) if entropy else (None, c, None)
    gpu.logprob_backward(logits, targets, row_max, log_sum, *extra, *knobs, out)
    close(out.reshape(want.shape), want, logits.dtype)
    return out


# ---------------------------------------------------------------- stages A and C


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("entropy", [False, True], ids=["logp", "entropy"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logprob_matches_fp64(dtype, entropy, softcap, split, monkeypatch):
    monkeypatch.setattr(launch, "SPLIT_BELOW", 100 if split else 0)
    for v in WIDTHS:
        check_logprob(make_logits((1, 3, v), dtype), make_targets(3, v), entropy=entropy, softcap=softcap)


def test_row_temperature():
    temperature = torch.tensor([0.5, 1.0, 2.0, 7.0], device=DEVICE)
    check_logprob(make_logits((1, 4, 70), torch.float32), make_targets(4, 70), temperature=temperature)


def strided(kind, dtype):
    """(logits view, its storage) of 2 x 3 rows of 141 logits."""
    if kind == "shifted":  # the hidden shift of language models: [:, :-1]
        whole = make_logits((2, 4, 141), dtype)
        return whole[:, :-1], whole
    if kind == "padded":
        whole = make_logits((2, 3, 160), dtype)
        return whole[..., 3:144], whole
    if kind == "unaligned":
        whole = make_logits((2 * 3 * 141 + 5,), dtype)
        return whole[5:].view(2, 3, 141), whole
    whole = make_logits((3, 2, 141), dtype)
    return whole.transpose(0, 1), whole


KINDS = ["shifted", "padded", "unaligned", "transposed"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides(kind, dtype):
    logits, _ = strided(kind, dtype)
    check_logprob(logits, make_targets(6, 141))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_place_writes_the_view_and_nothing_else(kind, dtype):
    logits, whole = strided(kind, dtype)
    expected = whole.clone()
    separate = check_logprob(logits, make_targets(6, 141))
    check_logprob(logits, make_targets(6, 141), out=logits)
    assert torch.equal(logits, separate)
    expected.as_strided(logits.shape, logits.stride(), logits.storage_offset()).copy_(separate)
    assert torch.equal(whole, expected)


def test_expanded_rows():
    check_logprob(make_logits((1, 1, 99), torch.float32).expand(2, 3, 99), make_targets(6, 99))


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_masked_rows_are_not_read(split, monkeypatch):
    monkeypatch.setattr(launch, "SPLIT_BELOW", 100 if split else 0)
    logits, targets = make_logits((1, 4, 300), torch.float32), make_targets(4, 300)
    active = torch.tensor([True, False, True, False], device=DEVICE)
    clean = logits.clone()
    logits[0, 1], logits[0, 3] = NAN, INF
    targets[1] = 1 << 40
    result = gpu.logprob_forward(logits, targets, active, None, 1.0, 0.0, 1.0, True)
    wanted = gpu.logprob_forward(clean, targets, active, None, 1.0, 0.0, 1.0, True)
    for got, want in zip(result, wanted, strict=True):
        assert torch.equal(got, want)
        assert (got[~active] == 0).all()


def test_target_outside_the_vocabulary_is_nan():
    logits = make_logits((1, 3, 50), torch.float32)
    targets = torch.tensor([-1, 50, 7], device=DEVICE)
    logp = gpu.logprob_forward(logits, targets, None, None, 1.0, 0.0, 1.0, False)[0]
    assert logp.isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_broken_rows_are_nan_like_log_softmax(dtype, split, monkeypatch):
    monkeypatch.setattr(launch, "SPLIT_BELOW", 100 if split else 0)
    v = 2 * CHUNK + 3
    columns = [0, 1, 9, BLOCK, CHUNK + 9, v - 1]
    cases = list(itertools.product([NAN, INF], columns))
    # a broken row between two sound ones, and last a row that is -inf throughout
    logits, targets = make_logits((1, 2 * len(cases) + 3, v), dtype), make_targets(2 * len(cases) + 3, v)
    for i, (value, column) in enumerate(cases):
        logits[0, 2 * i + 1, column] = value
    logits[0, -2] = -INF
    logp, entropy, _, _ = gpu.logprob_forward(logits, targets, None, None, 1.0, 0.0, 1.0, True)
    broken = [i % 2 == 1 for i in range(len(logp))]
    assert logp.isnan().tolist() == entropy.isnan().tolist() == broken


def test_minus_inf_columns_have_no_probability():
    v = 2 * CHUNK + 3
    logits, targets = make_logits((1, 4, v), torch.float32), torch.tensor([5, 0, v - 1, 140], device=DEVICE)
    logits[0, 0, 10:] = -INF  # whole blocks and chunks
    logits[0, 1, 1:-1] = -INF
    logits[0, 2, : v - 4] = -INF
    logits[0, 3, ::2] = -INF  # its target too
    leaf, want, want_entropy = truth(logits, targets, None, 1.0, 0.0, 1.0)
    logp, entropy, row_max, log_sum = gpu.logprob_forward(logits, targets, None, None, 1.0, 0.0, 1.0, True)
    close(logp, want.detach())
    close(entropy, want_entropy.detach())
    out = torch.full_like(logits, NAN)
    c = e = torch.ones(4, device=DEVICE)
    gpu.logprob_backward(logits, targets, row_max, log_sum, entropy, c, e, None, 1.0, 0.0, 1.0, out)
    assert out.isfinite().all()
    assert (out[0, 1, 1:-1] == 0).all()
    assert (out[0, 0, 10:] == 0).all()
    assert leaf.shape == out[0].shape


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e9, 1e9])
def test_a_common_offset_costs_nothing(offset):
    steps = torch.arange(0, 300, device=DEVICE).remainder(7).float() * 64.0
    logits = (offset + steps).view(1, 1, 300)
    targets = torch.tensor([5], device=DEVICE)
    logp = gpu.logprob_forward(logits, targets, None, None, 8.0, 0.0, 1.0, False)[0]
    want = (logits[0, 0].double() / 8.0).log_softmax(-1)[5]
    assert abs(logp.double().item() - want.item()) <= 1e-6 * abs(want.item())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_split_or_whole(dtype, monkeypatch):
    for v in (CHUNK + 1, 2 * CHUNK + 8, 3 * CHUNK + 5):
        logits, targets = make_logits((1, 5, v), dtype), make_targets(5, v)
        results = []
        for below in (0, 100):
            monkeypatch.setattr(launch, "SPLIT_BELOW", below)
            results.append(gpu.logprob_forward(logits, targets, None, None, 0.9, 0.0, 1.1, True))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_fp64_is_refused():
    with pytest.raises(TypeError, match="float64"):
        gpu.logprob_forward(
            torch.zeros(1, 1, 4, dtype=torch.float64, device=DEVICE),
            make_targets(1, 4),
            None,
            None,
            1.0,
            0.0,
            1.0,
            False,
        )
