"""Stage B of the C++ core against the reference's autograd in fp64, for every build."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from token_cases import LENGTHS, assert_same, batch, native, truth
from token_specs import GROUPS, SPECS
from torch import Tensor

from fusedpg import cpu

ISAS = cpu.available_isas()


CU = torch.tensor([0, *LENGTHS]).cumsum(0)
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5}


@functools.cache
def case(name: str, dtype: torch.dtype, with_is: bool) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
    """A batch and the truth of a spec over it: the same for every build."""
    b = batch(int(CU[-1]), dtype)
    return b, truth(SPECS[name], b, CU, with_is)


@pytest.mark.parametrize("group", sorted(GROUPS))
def test_matches_the_reference(isa: str, group: str) -> None:
    names = [name for name in SPECS if name.startswith(group + "-")]
    for name, dtype, with_is in itertools.product(names, TOLERANCES, (False, True)):
        if with_is and SPECS[name].has_correction:
            continue  # the two exclude one another
        b, want = case(name, dtype, with_is)
        got = native(SPECS[name], b, CU, with_is)
        assert_same(got, want, TOLERANCES[dtype], f"{name} with_is={with_is} {dtype}")


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 127, 4096, 4097, 20_000])
def test_sizes_and_thread_counts(isa: str, n: int) -> None:
    spec = SPECS["CLIPPED_RATIO-TOKEN-K3-NONE"]
    b = batch(n, torch.float32)
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(native(spec, b, None, True))
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, o) for a, o in zip(results[0], other, strict=True))
    want = truth(spec, b, torch.tensor([0, n]), True)
    torch.testing.assert_close(results[0][3].double(), want[3], rtol=1e-5, atol=1e-5)


SHAPES = {
    "one huge": [30_000],
    "many tiny": [1] * 9000,
    "empty ones": [0, 0, 5, 0, 9000, 0],
    "around a piece": [4095, 4096, 4097, 8192, 8193],
}
#: one for each kind of sum over a sequence
IN_SEQUENCES = (
    "CLIPPED_RATIO-SEQUENCE-plain",
    "CLIPPED_RATIO-SEQUENCE_TOKEN-plain",
    "IMPORTANCE_RATIO-SEQUENCE-token-clip",
    "CLIPPED_RATIO-TOKEN-missing-SEQUENCE",
    "CLIPPED_RATIO-TOKEN-reject-GEOMETRIC-alone",
    "VESPO-TOKEN-plain",
)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", IN_SEQUENCES)
def test_sequences(isa: str, name: str, shape: str) -> None:
    spec = SPECS[name]
    cu = torch.tensor([0, *SHAPES[shape]]).cumsum(0)
    b = batch(int(cu[-1]), torch.float64)
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(native(spec, b, cu, False))
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, o) for a, o in zip(results[0], other, strict=True))
    for g, t in zip(results[0], truth(spec, b, cu, False), strict=True):
        torch.testing.assert_close(g, t.to(g.dtype), rtol=1e-10, atol=1e-10)


def test_avx2_and_avx512_agree_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = [one for one in ISAS if one in ("v3", "v4", "v4bf16")]
    if len(fused) < 2:
        pytest.skip("needs a machine with AVX-512")
    b = batch(int(CU[-1]), torch.float32)
    for name, spec in SPECS.items():
        results = []
        for one in fused:
            monkeypatch.setenv("FUSEDPG_CPU_ISA", one)
            results.append([t.nan_to_num(7) for t in native(spec, b, CU, True)])
        for other in results[1:]:
            assert all(torch.equal(a, o) for a, o in zip(results[0], other, strict=True)), name


def test_unmasked_nan_stays_visible(isa: str) -> None:
    """The token's weight is not 0 and no selection drops it: those take a NaN away like any other value."""
    for name, spec in SPECS.items():
        b = batch(40, torch.float32, masked=False)
        b["logp_rollout"] = b["logp_old"].clone()
        b["logp_rollout"][3] -= 0.05
        b["logp"][3] = torch.nan
        b["advantages"][3] = b["selected"][3] = 0.0
        per_token, _, _, sums = native(spec, b, torch.tensor([0, 20, 40]), False)
        assert per_token[3].isnan(), name
        assert sums[0].isnan(), name
