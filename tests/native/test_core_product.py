"""The core's matrix product of bf16 operands with sums in fp32, against fp64 of the same stored values."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fusedpg import cpu, linear_walk
from support import F32

BF16 = torch.bfloat16
needs_product = pytest.mark.skipif(
    "v4bf16" not in cpu.available_isas(), reason="needs a CPU with AVX512-BF16: no other build multiplies bf16"
)
#: around the panels of 12 rows and 32 columns, the blocks of 408 rows, 512 columns and 512 of k, and far from them
ROWS, COLUMNS, DEPTHS = (1, 7, 12, 13, 200, 409), (1, 16, 33, 500, 2049), (1, 2, 31, 33, 512, 1025)
SHAPES = [s for s in itertools.product(ROWS, COLUMNS, DEPTHS) if math.prod(s) < 2e7]


@pytest.fixture(autouse=True)
def best_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FUSEDPG_CPU_ISA", raising=False)


def matrix(rows: int, columns: int, transposed: bool, dtype: torch.dtype, seed: int) -> Tensor:
    """Random, one value off the start of its memory, its rows or its columns contiguous with NaN between them."""
    g = torch.Generator().manual_seed(seed)
    outer, inner = (columns, rows) if transposed else (rows, columns)
    memory = torch.randn(outer * (inner + 3) + 1, generator=g).to(dtype)
    padded = memory[1:].view(outer, inner + 3)
    padded[:, inner:] = torch.nan
    view = padded[:, :inner]
    return view.t() if transposed else view


def operands(shape: tuple[int, int, int]) -> Iterator[tuple[Tensor, Tensor]]:
    """(a, b) in each layout, and a in fp32."""
    m, n, k = shape
    for i, (a_across, b_across, dtype) in enumerate(
        itertools.product((False, True), (False, True), (BF16, torch.float32))
    ):
        yield matrix(m, k, a_across, dtype, 2 * i), matrix(k, n, b_across, BF16, 2 * i + 1)


def fenced(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """(memory of NaN, a view of it with a border of 5 on each side)."""
    memory = torch.full((rows + 10, columns + 10), torch.nan, dtype=dtype)
    return memory, memory[5 : 5 + rows, 5 : 5 + columns]


def exact(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(a @ b of the operands rounded to bf16, what fp32 sums may be off by)."""
    left, right = a.to(BF16).double(), b.double()
    return left @ right, F32 * (4 + math.sqrt(a.shape[1])) * (left.abs() @ right.abs())


@needs_product
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_against_fp64(shape: tuple[int, int, int]) -> None:
    for a, b in operands(shape):
        memory, out = fenced(shape[0], shape[1])
        cpu.product(a, b, out)
        want, budget = exact(a, b)
        assert ((out.double() - want).abs() <= budget).all()
        before = out.clone()
        cpu.product(a, b, out, add=True)
        assert ((out.double() - before.double() - want).abs() <= budget + F32 * (before.abs() + out.abs())).all()
        memory16, out16 = fenced(shape[0], shape[1], BF16)
        cpu.product(a, b, out16)
        assert torch.equal(out16, before.to(BF16)), "not the sum rounded once"
        for fence, view in ((memory, out), (memory16, out16)):
            view.fill_(torch.nan)
            assert fence.isnan().all(), "written beside the result"


@needs_product
@pytest.mark.parametrize("shape", SHAPES[::3], ids=lambda s: "x".join(map(str, s)))
def test_some_rows(shape: tuple[int, int, int]) -> None:
    """`keep` names rows of memory, in any order and more than once; the others, NaN here, are not read."""
    g = torch.Generator().manual_seed(0)
    for a, b in operands(shape):
        rows = a if a.stride(1) == 1 else a.t()
        count = len(rows)
        keep = torch.randint(2 * count, (count,), generator=g)
        memory = torch.full((2 * count, rows.stride(0)), torch.nan, dtype=a.dtype)
        some = memory[:, : rows.shape[1]]
        some[keep] = rows
        for dtype in (torch.float32, BF16):
            want, got = (torch.full(shape[:2], torch.nan, dtype=dtype) for _ in range(2))
            if rows is a:
                cpu.product(some[keep], b, want)
                cpu.product(some, b, got, keep=keep)
            else:
                cpu.product(some[keep].t(), b, want)
                cpu.product(some.t(), b, got, keep=keep)
            assert not want.isnan().any()
            assert torch.equal(got, want)


@needs_product
def test_a_row_has_the_same_bits_alone_and_on_any_number_of_threads() -> None:
    threads = torch.get_num_threads()
    for a, b in operands((420, 70, 1100)):
        many, one, single = torch.empty(420, 70), torch.empty(1, 70), torch.empty(420, 70)
        cpu.product(a, b, many)
        for row in (0, 11, 12, 407, 408, 419):
            cpu.product(a[row : row + 1], b, one)
            assert torch.equal(one[0], many[row])
        for other in (1, 2, 3, 4, 6, 64):
            single.fill_(torch.nan)
            try:
                torch.set_num_threads(other)
                cpu.product(a, b, single)
            finally:
                torch.set_num_threads(threads)
            assert torch.equal(single, many)


@needs_product
def test_a_column_has_the_same_bits_alone() -> None:
    for a, b in operands((30, 2100, 600)):
        many, one = torch.empty(30, 2100), torch.empty(30, 1)
        cpu.product(a, b, many)
        for column in (0, 31, 32, 511, 512, 2099):
            cpu.product(a, b[:, column : column + 1], one)
            assert torch.equal(one[:, 0], many[:, column])


@needs_product
def test_fp32_is_rounded_to_nearest_even_as_torch_does() -> None:
    g = torch.Generator().manual_seed(0)
    values = torch.cat(
        [torch.randn(1000, generator=g), torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, -3.4e38, 1e-30])]
    )
    out = torch.empty(values.numel(), 1)
    for a in (values[:, None], values[None].contiguous().t()):
        cpu.product(a, torch.ones(1, 1, dtype=BF16), out)
        assert torch.equal(out, values.to(BF16).float()[:, None])


@needs_product
def test_values_that_are_not_finite_reach_their_row_and_no_other() -> None:
    a, b = torch.ones(40, 64, dtype=BF16), torch.ones(64, 40, dtype=BF16)
    a[3, 5], a[20, 63], b[7, 33] = torch.inf, torch.nan, -torch.inf
    out = torch.empty(40, 40)
    cpu.product(a, b, out)
    want = torch.full((40, 40), 64.0)
    want[:, 33] = -torch.inf
    want[3], want[3, 33], want[20] = torch.inf, torch.nan, torch.nan
    torch.testing.assert_close(out, want, equal_nan=True, rtol=0, atol=0)


BEHIND = """
import ctypes, itertools, mmap
import torch
from fusedpg import cpu

page, libc = mmap.PAGESIZE, ctypes.CDLL(None, use_errno=True)

def at_the_end(values):
    # the last of its values is the last before memory that nobody may read
    memory = mmap.mmap(-1, 33 * page)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mprotect(ctypes.c_void_p(begin + 32 * page), page, 0) == 0
    tensor = torch.frombuffer(memory, dtype=values.dtype, count=32 * page // values.itemsize)
    tensor = tensor[-values.numel() :].view(values.shape)
    tensor.copy_(values)
    return tensor

for (m, n, k), dtype in itertools.product(((5, 17, 7), (12, 32, 32), (13, 33, 65)), (torch.bfloat16, torch.float32)):
    for a_across, b_across in itertools.product((False, True), (False, True)):
        a = at_the_end(torch.ones((k, m) if a_across else (m, k), dtype=dtype))
        b = at_the_end(torch.ones((k, n) if b_across else (n, k), dtype=torch.bfloat16))
        left, right = a.t() if a_across else a, b if b_across else b.t()
        for stored in (torch.float32, torch.bfloat16):
            out = at_the_end(torch.zeros(m, n, dtype=stored))
            cpu.product(left, right, out)
            assert (out == k).all()
            last = torch.full((k if a_across else m,), len(a) - 1)
            cpu.product(left, right, out.fill_(0), keep=last)
            assert (out == k).all()
"""


@needs_product
@pytest.mark.skipif(sys.platform != "linux", reason="protects memory by mprotect")
def test_nothing_is_read_or_written_behind_a_matrix() -> None:
    done = subprocess.run([sys.executable, "-c", BEHIND], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@needs_product
@pytest.mark.parametrize("shape", [(0, 5, 7), (5, 0, 7), (5, 6, 0)])
def test_empty(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    out = torch.full((m, n), 3.0)
    cpu.product(torch.empty(m, k, dtype=BF16), torch.empty(k, n, dtype=BF16), out, add=True)
    assert (out == 3).all()
    cpu.product(torch.empty(m, k, dtype=BF16), torch.empty(k, n, dtype=BF16), out)
    assert (out == 0).all()


@needs_product
def test_operands_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="product: expected operands of one depth, got 4 and 5"):
        cpu.product(torch.zeros(3, 4, dtype=BF16), torch.zeros(5, 3, dtype=BF16), torch.zeros(3, 3))


def test_other_builds_refuse_and_cast(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDPG_CPU_ISA", isa)
    head = linear_walk.Head(torch.zeros(1, 2, 4, dtype=BF16), torch.zeros(8, 4, dtype=BF16), None)
    assert cpu.has_product() == (isa == "v4bf16")
    assert head.operands == (BF16 if isa == "v4bf16" else torch.float32)
    assert head.shape(gradient=True, weight_gradient=True).cast == (isa != "v4bf16")
    assert head.shape(gradient=True, weight_gradient=True).packs == (isa == "v4bf16")
    if isa != "v4bf16":
        with pytest.raises(ValueError, match=f"product: the build '{isa}' has no products of bf16"):
            cpu.product(*(torch.zeros(2, 2, dtype=BF16) for _ in range(2)), torch.zeros(2, 2))
