"""A loss made of existing terms is one catalogue entry: tests, command line and documentation page then know it."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

import fusedpg
from fusedpg import losses
from fusedpg.cli import catalogue
from fusedpg.cli.app import app
from fusedpg.spec import Anchor, Keep, Surrogate
from test_parity import check, matrix

ROOT = Path(__file__).parents[1]


@pytest.fixture
def tapered():
    """CISPO against the rollout policy with a ratio mask: a combination that the catalogue does not hold."""
    losses.add_entry(
        "tapered",
        formula="-sg[clip(rho)]*A*logp*K, rho = exp(logp - logp_rollout)",
        gradient="-clip(rho)*A*K",
        source="this test (2026)",
        knobs=losses.ENTRIES["cispo"].knobs,
        surrogate=Surrogate.CISPO,
        anchor=Anchor.ROLLOUT,
        clip_high=1.1,
        keep=Keep.RATIO,
        keep_low=0.85,
        keep_high=1.5,
    )
    yield "tapered"
    del losses.ENTRIES["tapered"], losses._SPECS["tapered"]


def test_it_is_in_the_catalogue(tapered):
    assert list(fusedpg.CATALOGUE)[-1] == tapered
    assert fusedpg.loss_spec(tapered, clip_high=2.0).clip_high == 2.0


def test_it_is_in_the_table_and_the_page(tapered):
    table = CliRunner().invoke(app, ["losses"]).output
    assert tapered in table
    one = CliRunner().invoke(app, ["losses", tapered]).output
    assert "logp_rollout" in one
    assert "-clip(rho)*A*K" in one
    page = catalogue.markdown()
    assert f"## {tapered}" in page
    assert f"[`{tapered}`](#{tapered})" in page


def test_it_is_in_the_parity_matrix(tapered, native_backend):
    cases = [case for case in matrix() if case[0] == tapered]
    assert len(cases) > 200
    for case in cases[::41]:
        check(case, native_backend, seed=5)


def test_the_page_is_fresh():
    """docs/catalogue.md is what the code says: python -m fusedpg losses --markdown > docs/catalogue.md."""
    assert (ROOT / "docs" / "catalogue.md").read_text() == catalogue.markdown()
