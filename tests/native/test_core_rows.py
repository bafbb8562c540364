"""The C++ vocabulary pass against fp64 torch, for every build: accuracy, bits, memory bounds, broken rows."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fusedpg import cpu

ISAS = cpu.available_isas()
#: half the distance between 1 and the next number
UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float64: 2.0**-53}
#: gradient budget in units of the storage's roundoff times the row's largest entry; fp64 uses libm sums of many terms
BUDGET = {torch.float32: 2.0, torch.bfloat16: 2.0, torch.float16: 4.0, torch.float64: 64.0}
DTYPES = list(UNIT_ROUNDOFF)
VOCABS = (1, 2, 3, 17, 64, 4095, 4097, 50257)
PLAIN = (None, 1.0, 0.0, 1.0)
MAPS = {
    "plain": PLAIN,
    "temperature": (None, 0.7, 0.0, 1.0),
    "scale": (None, 1.3, 0.0, 0.25),
    "softcap": (None, 0.9, 30.0, 1.5),
}


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FUSEDPG_CPU_ISA", request.param)
    assert cpu.isa() == request.param
    return str(request.param)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def rows(n: int, vocab: int, dtype: torch.dtype, std: float = 3.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(1, n, vocab, generator=g, dtype=torch.float64) * std).to(dtype)
    return logits, torch.randint(0, vocab, (n,), generator=g)


def coefficients(n: int, dtype: torch.dtype, seed: int = 1) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    c, e = torch.randn(2, n, generator=g, dtype=torch.float64)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    return c.to(compute), e.to(compute)


def truth(logits: Tensor, targets: Tensor, c: Tensor, e: Tensor, logit_map: tuple) -> tuple[Tensor, Tensor, Tensor]:
    """(logp, entropy, gradient of sum(c*logp + e*entropy)) in fp64 from the stored inputs."""
    row_temperature, temperature, softcap, scale = logit_map
    x = logits.detach().double().flatten(0, 1).requires_grad_()
    y = softcap * torch.tanh(x * scale / softcap) if softcap else x * scale
    t = temperature if row_temperature is None else row_temperature.double()[:, None]
    logp_all = torch.log_softmax(y / t, -1)
    logp = logp_all.gather(1, targets[:, None])[:, 0]
    entropy = -(logp_all.exp() * torch.where(logp_all > -torch.inf, logp_all, 0.0)).sum(-1)
    (c.double() * logp + e.double() * entropy).sum().backward()
    assert x.grad is not None
    return logp.detach(), entropy.detach(), x.grad.view(logits.shape)


def both_stages(logits: Tensor, targets: Tensor, c: Tensor, e: Tensor | None, logit_map: tuple = PLAIN) -> tuple:
    """A, then C into a poisoned buffer."""
    logp, entropy, row_max, log_sum = cpu.logprob_forward(logits, targets, None, *logit_map, e is not None)
    out = torch.full(logits.shape, torch.nan, dtype=logits.dtype)
    h = None if e is None else entropy
    cpu.logprob_backward(logits, targets, row_max, log_sum, h, c, e, *logit_map, out)
    return logp, entropy, out


def assert_gradient(got: Tensor, want: Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    largest = want.abs().amax(-1)
    if dtype == torch.float64:  # the truth has cancelled in 1 - p_target itself
        largest = largest.clamp(min=1.0)
    bound = factor * BUDGET[dtype] * UNIT_ROUNDOFF[dtype] * largest
    error = (got.double() - want).abs().amax(-1)
    smallest = (
        torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    )  # half a denormal step, fp16 gradients reach it
    assert (error <= bound + smallest).all(), (error / bound).max()


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_match_fp64(isa: str, dtype: torch.dtype, vocab: int) -> None:
    logits, targets = rows(5, vocab, dtype)
    c, e = coefficients(5, dtype)
    logp, _, grad = both_stages(logits, targets, c, None)
    want_logp, want_entropy, want_grad = truth(logits, targets, c, 0 * e, PLAIN)
    tolerance = 1e-14 if dtype == torch.float64 else 1e-6
    assert ((logp - want_logp).abs() <= tolerance * want_logp.abs().clamp(min=1)).all()
    if vocab > 1:  # p = 1 exactly: the fp64 truth is its own rounding
        assert_gradient(grad, want_grad, dtype)
    logp_e, entropy, grad_e = both_stages(logits, targets, c, e)
    assert torch.equal(logp_e, logp)
    assert ((entropy - want_entropy).abs() <= tolerance * want_entropy.abs().clamp(min=1)).all()
    if vocab > 3:
        assert_gradient(grad_e, truth(logits, targets, c, e, PLAIN)[2], dtype, factor=2.0)


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logit_maps(isa: str, dtype: torch.dtype, name: str) -> None:
    logits, targets = rows(4, 5003, dtype)
    c, e = coefficients(4, dtype)
    logp, entropy, grad = both_stages(logits, targets, c, e, MAPS[name])
    want_logp, want_entropy, want_grad = truth(logits, targets, c, e, MAPS[name])
    # with a cap, y is rounded at |y| ~ 10, which logp inherits
    tolerance = 1e-13 if dtype == torch.float64 else 3e-6 if name == "softcap" else 1e-6
    assert ((logp - want_logp).abs() <= tolerance * want_logp.abs().clamp(min=1)).all()
    assert ((entropy - want_entropy).abs() <= tolerance * want_entropy.abs().clamp(min=1)).all()
    assert_gradient(grad, want_grad, dtype, factor=40.0 if name == "softcap" and dtype == torch.float32 else 4.0)


def test_row_temperature(isa: str) -> None:
    logits, targets = rows(4, 5003, torch.float32)
    c, e = coefficients(4, torch.float32)
    temperature = torch.tensor([0.5, 1.0, 1.5, 2.0])
    logit_map = (temperature, 9.0, 0.0, 1.0)
    logp, _, grad = both_stages(logits, targets, c, None, logit_map)
    want_logp, _, want_grad = truth(logits, targets, c, 0 * e, logit_map)
    assert (logp - want_logp).abs().max() < 2e-5
    assert ((logp - want_logp).abs() <= 1e-6 * want_logp.abs().clamp(min=1)).all()
    assert_gradient(grad, want_grad, torch.float32, factor=2.0)


@pytest.mark.parametrize("offset", [1e9, -1e9, 1e4])
def test_common_offset_costs_nothing(isa: str, offset: float) -> None:
    logits, targets = rows(3, 4097, torch.float32, std=200.0)
    logits = (logits.double() + offset).float()
    logp, *_ = cpu.logprob_forward(logits, targets, None, None, 0.7, 0.0, 1.0, False)
    want, *_ = truth(logits, targets, torch.zeros(3), torch.zeros(3), (None, 0.7, 0.0, 1.0))
    assert ((logp - want).abs() <= 1e-6 * want.abs().clamp(min=1)).all()


def test_confident_row_keeps_its_gradient(isa: str) -> None:
    """1 - p_target is 2e-7 here: less than three fp32 steps below 1."""
    logits = torch.zeros(1, 1, 4096)
    logits[0, 0, 17] = 24.0
    targets, c = torch.tensor([17]), torch.ones(1)
    logp, _, grad = both_stages(logits, targets, c, None)
    want_logp, _, want_grad = truth(logits, targets, c, torch.zeros(1), PLAIN)
    torch.testing.assert_close(logp.double(), want_logp, rtol=1e-6, atol=0)
    assert_gradient(grad, want_grad, torch.float32)


@pytest.mark.parametrize("lift", [-torch.inf, -1e9, -300.0, -60.0, -8.0, 5.0, 20.0, 80.0, 300.0, 1e4, 1e9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_far_from_the_first(isa: str, dtype: torch.dtype, lift: float) -> None:
    """Later blocks are measured from near the first one's maximum: above it or far below it, they lose nothing."""
    logits, targets = rows(4, 3 * 4096 + 70, dtype)
    targets[:2] = torch.tensor([5, 2 * 4096 + 9])
    if lift == -torch.inf:
        logits[..., :4096] = lift
        targets = targets.clamp(min=4096)
    else:
        logits[..., 4096 : 2 * 4096] += lift
        logits[..., 2 * 4096 + 9 :] += lift / 2
    c, e = coefficients(4, dtype)
    logp, entropy, grad = both_stages(logits, targets, c, e)
    want_logp, want_entropy, want_grad = truth(logits, targets, c, e, PLAIN)
    assert ((logp - want_logp).abs() <= 1e-6 * want_logp.abs().clamp(min=1)).all()
    assert ((entropy - want_entropy).abs() <= 1e-6 * want_entropy.abs().clamp(min=1)).all()
    assert_gradient(grad, want_grad, dtype, factor=2.0)


def views(vocab: int) -> dict[str, Tensor]:
    """The same kinds of (B, T, V) views that trainers pass."""
    g = torch.Generator().manual_seed(3)
    wide = torch.randn(2, 4, vocab + 5, generator=g)
    return {
        "row stride > V": wide[..., :vocab],
        "offset by one": wide[..., 1 : vocab + 1],
        "shifted slice": torch.randn(2, 5, vocab, generator=g)[:, :-1],
        "expanded rows": torch.randn(2, 1, vocab, generator=g).expand(2, 4, vocab),
        "transposed": torch.randn(4, 2, vocab, generator=g).transpose(0, 1),
    }


@pytest.mark.parametrize("name", views(3))
@pytest.mark.parametrize("vocab", [3, 4100])
def test_strides(isa: str, vocab: int, name: str) -> None:
    logits = views(vocab)[name]
    targets = torch.arange(8) % vocab
    c, e = coefficients(8, torch.float32)
    got = both_stages(logits, targets, c, e)
    want = both_stages(logits.contiguous(), targets, c, e)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("vocab", [3, 4100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place_writes_its_view_only(isa: str, dtype: torch.dtype, vocab: int) -> None:
    buffer = torch.full((3, 5, vocab + 7), 77.0, dtype=dtype)
    logits, targets = rows(8, vocab, dtype)
    view = buffer[:2, :4, 3 : vocab + 3]
    view.copy_(logits.view(2, 4, vocab))
    c, e = coefficients(8, dtype)
    *_, want = both_stages(logits.view(2, 4, vocab), targets, c, e)
    _, entropy, row_max, log_sum = cpu.logprob_forward(view, targets, None, *PLAIN, True)
    cpu.logprob_backward(view, targets, row_max, log_sum, entropy, c, e, *PLAIN, view)
    assert torch.equal(view, want)
    view.fill_(77.0)
    assert (buffer == 77.0).all()


def test_broken_rows_are_nan_and_alone(isa: str) -> None:
    for vocab in (5, 4097, 9000):
        logits, targets = rows(6, vocab, torch.float32)
        logits[0, 0, vocab - 1] = torch.nan
        logits[0, 1, vocab // 2] = torch.inf
        logits[0, 2] = -torch.inf
        logits[0, 3, 0] = -torch.nan
        targets[:4] = 1
        c, e = coefficients(6, torch.float32)
        logp, entropy, grad = both_stages(logits, targets, c, e)
        assert logp[:4].isnan().all()
        assert entropy[:4].isnan().all()
        assert grad[0, :4].isnan().all()
        _, _, want = both_stages(logits[:, 4:], targets[4:], c[4:], e[4:])
        assert torch.equal(grad[:, 4:], want)
        assert not logp[4:].isnan().any()


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000])
def test_every_nan_payload_survives(isa: str, bits: int) -> None:
    for column in (0, 63, 4100, 9000):
        logits, targets = rows(1, 9001, torch.float32)
        logits.view(torch.int32)[0, 0, column] = bits
        assert cpu.logprob_forward(logits, targets, None, *PLAIN, False)[0].isnan().all()


def test_minus_inf_columns(isa: str) -> None:
    logits, targets = rows(3, 9000, torch.float32)
    logits[0, :, 4096:] = -torch.inf  # a whole block and a part of one
    logits[0, 2, 5] = -torch.inf
    targets = torch.tensor([7, 5000, 5])
    c, e = coefficients(3, torch.float32)
    logp, entropy, grad = both_stages(logits, targets, c, e)
    want = torch.log_softmax(logits[0].double(), -1)
    assert logp[1] == -torch.inf
    assert logp[2] == -torch.inf
    assert abs(logp[0] - want[0, 7]) < 1e-6
    assert entropy.isfinite().all()
    assert (grad[0, 0, 4096:] == 0).all()
    assert grad.isfinite().all()


def test_infinities_of_both_signs_and_huge_values(isa: str) -> None:
    logits = torch.tensor([[[3e38, -3e38, 3e38, -torch.inf] * 40, [-3e38] * 159 + [-torch.inf]]])
    logp, *_ = cpu.logprob_forward(logits, torch.tensor([0, 0]), None, *PLAIN, False)
    want = torch.log_softmax(logits[0].double(), -1)[:, 0]
    torch.testing.assert_close(logp.double(), want, rtol=1e-6, atol=0)


def test_bad_target_is_nan_without_a_read(isa: str) -> None:
    logits, _ = rows(3, 100, torch.float32)
    logp, entropy, row_max, log_sum = cpu.logprob_forward(logits, torch.tensor([-100, 100, 2**62]), None, *PLAIN, True)
    assert logp.isnan().all()
    assert entropy.isfinite().all()
    assert row_max.isfinite().all()
    assert log_sum.isfinite().all()


def test_inactive_rows_are_not_read(isa: str) -> None:
    logits, targets = rows(4, 4099, torch.bfloat16)
    active = torch.tensor([True, False, True, False])
    logits[:, ~active] = torch.nan
    targets[~active] = 2**62
    out = cpu.logprob_forward(logits, targets, active, *PLAIN, True)
    assert all((t[~active] == 0).all() and t[active].isfinite().all() for t in out)
    grad = torch.full_like(logits, torch.nan)
    c = torch.tensor([1.0, 0.0, 1.0, 0.0])
    cpu.logprob_backward(logits, targets, out[2], out[3], None, c, None, *PLAIN, grad)
    assert (grad[:, ~active] == 0).all()
    assert grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [1, 3])
def test_bits_do_not_depend_on_threads_batch_or_path(isa: str, dtype: torch.dtype, n: int) -> None:
    logits, targets = rows(n, 50257, dtype)
    c, e = coefficients(n, dtype)
    results = []
    for count in (1, 2, 5):  # 5 > n: the blocks of a row are split over threads
        torch.set_num_threads(count)
        results.append(both_stages(logits, targets, c, e))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    alone = both_stages(logits[:, -1:].clone(), targets[-1:], c[-1:], e[-1:])
    assert torch.equal(alone[0], results[0][0][-1:])
    assert torch.equal(alone[2], results[0][2][:, -1:])


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_avx2_and_avx512_agree_to_the_bit(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, name: str) -> None:
    fused = [one for one in ISAS if one in ("v3", "v4", "v4bf16")]
    if len(fused) < 2:
        pytest.skip("needs a machine with AVX-512")
    logits, targets = rows(4, 9001, dtype)
    c, e = coefficients(4, dtype)
    results = []
    for one in fused:
        monkeypatch.setenv("FUSEDPG_CPU_ISA", one)
        results.append(both_stages(logits, targets, c, e, MAPS[name]))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_streamed_stores_write_the_same(isa: str) -> None:
    """A gradient above 16 MB is streamed past the cache; an odd vocabulary misaligns every row but the first."""
    for dtype, vocab in ((torch.float32, 150_001), (torch.bfloat16, 300_001)):
        logits, targets = rows(32, vocab, dtype)
        c, _ = coefficients(32, dtype)
        *_, row_max, log_sum = cpu.logprob_forward(logits, targets, None, *PLAIN, False)
        out = torch.full_like(logits, torch.nan)
        cpu.logprob_backward(logits, targets, row_max, log_sum, None, c, None, *PLAIN, out)
        cpu.logprob_backward(logits, targets, row_max, log_sum, None, c, None, *PLAIN, logits)
        assert torch.equal(out, logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_storage_rounding_is_that_of_torch(isa: str, dtype: torch.dtype) -> None:
    """c*1[v==t] - c*p with p = 0: the target's gradient is c itself, rounded once."""
    c = torch.cat([torch.randn(500), torch.randn(500) * 1e-6, torch.randn(200) * 1e-38, torch.randn(100) * 1e5])
    c = torch.cat([c, torch.tensor([65504.0, 65519.9, 65520.0, 3e38, 1.00390625, 1.01171875, 6e-8, 2.9e-8, torch.inf])])
    logits = torch.zeros(1, c.numel(), 2, dtype=dtype)
    logits[:, :, 0] = -torch.inf
    targets = torch.zeros(c.numel(), dtype=torch.int64)
    *_, grad = both_stages(logits, targets, c, None)
    want = c.to(dtype)
    small = c.abs() < torch.finfo(torch.float32).smallest_normal  # denormals may be flushed
    assert torch.equal(grad[0, ~small, 0], want[~small])


def test_all_half_values_load_exactly(isa: str) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
        x = x[x.isfinite()]
        logits = torch.stack([x, torch.full_like(x, -torch.inf)], -1)[None]
        row_max = cpu.logprob_forward(logits, torch.zeros(x.numel(), dtype=torch.int64), None, *PLAIN, False)[2]
        normal = x.float().abs() >= torch.finfo(torch.float32).smallest_normal
        assert torch.equal(row_max[normal], x.float()[normal])


def test_two_python_threads_at_once(isa: str) -> None:
    inputs = [rows(8, 20_011, torch.float32, seed=s) for s in range(2)]
    c, e = coefficients(8, torch.float32)
    want = [both_stages(*i, c, e) for i in inputs]
    failures: list[int] = []

    def work(i: int) -> None:
        for _ in range(10):
            got = both_stages(*inputs[i], c, e)
            if not all(torch.equal(a, b) for a, b in zip(got, want[i], strict=True)):
                failures.append(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


def test_empty(isa: str) -> None:
    logits = torch.empty(1, 0, 7)
    targets = torch.empty(0, dtype=torch.int64)
    out = cpu.logprob_forward(logits, targets, None, *PLAIN, True)
    assert all(t.numel() == 0 for t in out)
    cpu.logprob_backward(logits, targets, out[2], out[3], None, out[0], None, *PLAIN, torch.empty_like(logits))
