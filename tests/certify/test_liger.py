"""liger-kernel 0.8.5: its chunked loss from hidden states, its known errors, and mutants that must not pass."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("liger_kernel", reason="needs liger-kernel==0.8.5 (the `dev` extra)")

from fusedpg.certify import against_liger as oracle
from fusedpg.certify.rows import Row
from fusedpg.spec import KLRatio

BACKENDS = ("reference", "cpu")


@pytest.fixture(scope="module", params=BACKENDS)
def table(request: pytest.FixtureRequest) -> list[Row]:
    return list(oracle.rows(request.param))


def test_every_loss_type_is_compared(table: list[Row]) -> None:
    assert {row.loss for row in table if row.verdict == "equal"} == set(oracle.LOSSES)


def test_every_row_is_equal_or_states_an_error(table: list[Row]) -> None:
    assert [row for row in table if row.verdict not in ("equal", "trainer errs", "not run")] == []
    assert all(row.note for row in table if row.verdict != "equal")


def test_what_liger_computes_wrongly_is_measured(table: list[Row]) -> None:
    errors = {(row.loss, row.option): row for row in table if row.verdict == "trainer errs"}
    assert errors.keys() == {
        ("dapo", "-inf in a masked old log-prob"),
        ("luspo", "chunked, token level"),
        ("dapo", "advantages (B, T)"),
        ("vespo", "correction at masked places"),
        ("luspo", "triton, token level"),
    }
    assert math.isinf(errors["dapo", "-inf in a masked old log-prob"].value)
    for key in (
        ("luspo", "chunked, token level"),
        ("dapo", "advantages (B, T)"),
        ("vespo", "correction at masked places"),
    ):
        assert errors[key].value > 1e-2
    # offset 3 + 8 of a (4, 1) gradient: stated from the shapes, never read
    assert "offset 11 of a gradient that holds 4 numbers" in errors["luspo", "triton, token level"].note


def _case(liger: str, option: str) -> oracle.Case:
    (case,) = (c for c in oracle.CASES if (c.liger, c.option) == (liger, option))
    return case


MUTANTS = [
    ("grpo", "", {"reduction": "token-mean"}),
    ("bnpo", "", {"clip_low": 0.7}),
    ("dr_grpo", "", {"max_tokens": 17}),
    ("dapo", "delta 1.5", {"delta": 1.4}),
    ("cispo", "epsilon_high 5", {"clip_high": 1.2}),
    ("sapo", "", {"tau_neg": 1.0}),
    ("luspo", "sequence level", {"reduction": "seq-mean-token-mean"}),
    ("vespo", "", {"k_pos": 2.1}),
    ("grpo", "sequence level", {"clip_high": 1.1}),
    ("grpo", "beta 0.04", {"kl_coef": 0.05}),
    ("dapo", "beta 0.04, bias correction", {"kl_ratio": KLRatio.NONE}),
]


@pytest.mark.parametrize(("liger", "option", "change"), MUTANTS, ids=[f"{m[0]}-{m[1]}" for m in MUTANTS])
def test_a_mutant_differs(liger: str, option: str, change: dict[str, object]) -> None:
    case = _case(liger, option)
    assert not oracle.difference(case, case.spec.replace(**change), "reference").within
