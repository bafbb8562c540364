"""Every catalogue entry x reduction x dtype x layout x terms on every native backend, against the fp64 reference."""

import itertools
from collections.abc import Iterable, Iterator

import pytest
import torch

import fusedpg
from fusedpg.spec import REDUCTIONS
from support import TERMS, applies, assert_agrees, make_case, rounding, run, spec_for, truth

KL_AND_ENTROPY = list(TERMS)[: list(TERMS).index("k3-entropy") + 1]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def matrix() -> list[tuple]:
    """Every combination of the axes that means something, over the catalogue as it is now."""
    axes = itertools.product(fusedpg.CATALOGUE, REDUCTIONS, DTYPES, (False, True), TERMS)
    return [case for case in axes if applies(case[0], case[-1])]


FULL = matrix()
SEED = {case: i for i, case in enumerate(FULL)}
#: what the interpreter has time for: every plain, KL and entropy variant of every loss, and a quarter of the others
INTERPRETED = [case for i, case in enumerate(FULL) if case[-1] in KL_AND_ENTROPY or i % 4 == 0]
#: a small share of the matrix in which every value of each axis occurs, for `make test`
QUICK = FULL[::37]


def ident(case: tuple) -> str:
    name, reduction, dtype, packed, terms = case
    return f"{name}-{reduction}-{str(dtype)[6:]}-{'packed' if packed else 'padded'}-{terms}"


def check(
    case: tuple, backend: str, each: Iterable[object] = (None,), seed: int | None = None, **extra: object
) -> None:
    """One case against the truth, `backend` being run once for each step of `each`."""
    name, reduction, dtype, packed, terms = case
    spec = spec_for(name, reduction, terms)
    batch = make_case(spec, dtype=dtype, packed=packed, seed=SEED[case] if seed is None else seed)
    want = truth(spec, batch, **extra)
    fp32 = rounding(spec, batch, want, **extra)
    for step in each:
        assert_agrees(run(spec, batch, backend, **extra), want, fp32, dtype, f"{ident(case)} {step or backend}")


def every_isa(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Force each build of the compiled core that this processor runs, one after the other."""
    from fusedpg import cpu

    for isa in cpu.available_isas():
        monkeypatch.setenv("FUSEDPG_CPU_ISA", isa)
        assert cpu.isa() == isa
        yield isa


def test_quick_subset_covers_every_axis():
    for axis, values in enumerate((fusedpg.CATALOGUE, REDUCTIONS, DTYPES, (False, True), TERMS)):
        assert {case[axis] for case in QUICK} == set(values)


@pytest.mark.parametrize("name", fusedpg.CATALOGUE)
def test_cpu_parity_on_every_isa(name: str, monkeypatch: pytest.MonkeyPatch):
    for case in FULL[::9]:
        if case[0] == name:
            check(case, "cpu", every_isa(monkeypatch))


@pytest.mark.sweep
@pytest.mark.parametrize("name", fusedpg.CATALOGUE)
def test_cpu_parity_on_every_isa_swept(name: str, monkeypatch: pytest.MonkeyPatch):
    for case in FULL[4::45]:
        if case[0] == name:
            check(case, "cpu", every_isa(monkeypatch))


@pytest.mark.wide
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", fusedpg.CATALOGUE)
def test_cpu_parity_on_every_isa_full(name: str, reduction: str, monkeypatch: pytest.MonkeyPatch):
    for case in set(FULL) - set(FULL[::9]):
        if case[:2] == (name, reduction):
            check(case, "cpu", every_isa(monkeypatch))


@pytest.mark.parametrize("case", QUICK, ids=ident)
def test_triton_parity(case: tuple):
    check(case, "triton")


@pytest.mark.sweep
@pytest.mark.parametrize("case", FULL[18::74], ids=ident)
def test_triton_parity_swept(case: tuple):
    check(case, "triton")


@pytest.mark.wide
@pytest.mark.parametrize("case", [c for c in INTERPRETED if c not in set(QUICK)], ids=ident)
def test_triton_parity_full(case: tuple):
    check(case, "triton")


@pytest.mark.parametrize("terms", ["plain", "k3-entropy"])
@pytest.mark.parametrize("name", fusedpg.CATALOGUE)
@pytest.mark.parametrize(
    "extra",
    [
        {"temperature": 0.7, "return_entropy": True},
        {"softcap": 3.0, "logit_scale": 0.5, "temperature": 1.3, "return_entropy": True},
        {"normalizer": 11.0},
    ],
    ids=["temperature", "softcap", "normalizer"],
)
def test_options(name: str, terms: str, extra: dict, native_backend: str):
    case = (name, "token-mean", torch.float32, True, terms)
    check(case, native_backend, **extra)


def test_row_temperature_fractional_mask_and_is_weights(native_backend: str):
    for name in fusedpg.CATALOGUE:
        spec = spec_for(name, "seq-mean-token-mean", "k3-entropy")
        torch.manual_seed(11)
        batch = make_case(spec, dtype=torch.float32, packed=False, seed=5)
        mask = batch.kwargs["mask"].float() * (0.25 + 0.75 * torch.rand(batch.targets.shape))
        extra = {
            "mask": mask,
            "temperature": 0.5 + torch.rand(batch.targets.shape),
            "is_weights": torch.rand(batch.targets.shape) * (torch.rand(batch.targets.shape) > 0.3),
        }
        want = truth(spec, batch, **extra)
        fp32 = rounding(spec, batch, want, **extra)
        assert_agrees(run(spec, batch, native_backend, **extra), want, fp32, torch.float32, name)


def test_a_wrong_term_is_caught(monkeypatch: pytest.MonkeyPatch):
    """The harness can fail: a reference with one sign flipped in the KL gradient disagrees with the kernel."""
    from fusedpg import reference_terms
    from fusedpg.spec import KL

    monkeypatch.setitem(reference_terms.ESTIMATORS, KL.K3, lambda d: d.exp() - d - 1)
    with pytest.raises(AssertionError, match="over budget"):
        check(("grpo", "token-mean", torch.float32, True, "k3"), "cpu")


def test_cpu_fp64_equals_the_reference():
    """fp64 logits are computed in fp64 by the compiled core."""
    for name, terms, packed in itertools.product(fusedpg.CATALOGUE, TERMS, (False, True)):
        if not applies(name, terms):
            continue
        spec = spec_for(name, "seq-mean-token-mean", terms)
        batch = make_case(spec, dtype=torch.float64, packed=packed, seed=3)
        got, want = run(spec, batch, "cpu"), truth(spec, batch)
        for key, value in want.values.items():
            torch.testing.assert_close(got.values[key], value, rtol=1e-12, atol=1e-12, msg=f"{name} {terms} {key}")
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-11, atol=1e-13, msg=f"{name} {terms} gradient")
