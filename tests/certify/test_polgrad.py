"""polgrad 0.2.1: every entry of its registry from log-probs, from logits and packed, and mutants that must not pass."""

from __future__ import annotations

import pytest

pytest.importorskip("polgrad", reason="needs polgrad==0.2.1 (the `dev` extra)")

from polgrad import ALGORITHMS
from polgrad.testing import assert_conforms

from fusedpg.certify import against_polgrad as oracle
from fusedpg.certify.rows import Row
from fusedpg.spec import KL, Anchor, Correction

BACKENDS = ("reference", "cpu")


@pytest.fixture(scope="module", params=BACKENDS)
def table(request: pytest.FixtureRequest) -> list[Row]:
    return list(oracle.rows(request.param))


def test_every_entry_of_the_registry_is_compared_in_every_form(table: list[Row]) -> None:
    compared = {(row.loss, row.option.split(",")[0]) for row in table}
    assert compared == {(name, form) for name in ALGORITHMS for form in oracle.FORMS}


def test_every_row_is_equal(table: list[Row]) -> None:
    assert [row for row in table if row.verdict != "equal"] == []
    assert min(row.cases for row in table) >= 15


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [name for name in oracle.ENTRIES if name != "grpo_tis"])
def test_conforms_in_fp64(name: str, backend: str) -> None:
    """polgrad's own gate: 64 batches, 1e-9 on the loss and on the gradient; its KL term is left out there."""
    spec = oracle.ENTRIES[name].spec().replace(kl=KL.NONE, kl_coef=0.0)
    assert_conforms(oracle.callable_of(spec, backend), oracle.reference(name))


MUTANTS = {
    "ppo": {"clip_high": 1.21},
    "dapo": {"clip_high": 1.2},
    "dr_grpo": {"max_tokens": oracle.NORM_LEN + 1},
    "grpo": {"kl_coef": 0.041},
    "gspo": {"clip_low": 0.9},
    "gspo_token": {"reduction": "token-mean"},
    "cispo": {"clip_low": 0.8},
    "reinforce_pp": {"reduction": "token-mean"},
    "rloo": {"reduction": "seq-mean-token-mean"},
    "grpo_tis": {"is_high": 1.5},
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_differs(name: str) -> None:
    spec = oracle.ENTRIES[name].spec().replace(**MUTANTS[name])
    assert not oracle.difference(spec, oracle.reference(name), "logp", "reference").within


@pytest.mark.parametrize(
    "change",
    [
        {"anchor": Anchor.SELF},
        {"kl": KL.K2},
        {"is_correction": Correction.MASK},
        {"log_ratio_clamp": (-0.5, 0.5)},
        {"dual_clip": 2.0},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_mutant_axis_differs(change: dict[str, object]) -> None:
    spec = oracle.ENTRIES["grpo_tis"].spec().replace(**change)
    if "is_correction" in change:
        spec = spec.replace(is_high=2.0)
    assert not oracle.difference(spec, oracle.reference("grpo_tis"), "logp", "reference").within
