"""The commands `losses` and `parity`."""

import pytest
from typer.testing import CliRunner

import fusedpg
from fusedpg import certify
from fusedpg.certify import Row
from fusedpg.cli import parity
from fusedpg.cli.app import app, make_console
from fusedpg.presets import TRAINERS, losses_of, trainers_of


def run(*arguments, code=0):
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result.output


def test_losses_lists_every_entry():
    table = run("losses")
    for name in fusedpg.CATALOGUE:
        assert name in table


@pytest.mark.parametrize("name", fusedpg.CATALOGUE)
def test_one_loss_in_full(name):
    text = run("losses", name)
    for word in ("x per token", "gradient to logp", "defaults", "knobs", "source", "trainers"):
        assert word in text
    for trainer, _ in trainers_of(name):
        assert trainer in text


def test_an_alias_and_an_unknown_name():
    assert "dppo_kimi" in run("losses", "dppo_kimi")
    result = CliRunner().invoke(app, ["losses", "nope"])
    assert result.exit_code == 2
    assert "NAME: expected one of reinforce," in result.output


def test_every_trainer_has_losses_of_the_catalogue():
    for trainer in TRAINERS:
        assert losses_of(trainer)
    ran = {name for name in fusedpg.CATALOGUE if trainers_of(name)}
    assert {"ppo_dual_clip", "gspo_token", "dapo", "vespo", "icepop", "kl_cov", "ipo", "echo"} <= ran


ROWS = [
    Row("verl", "0.9.1", "vanilla", "token-mean", "local", 7, 1e-7, 2e-7, "equal"),
    Row("liger", "0.8.5", "luspo", "", "token", 1, 0.5, 0.5, "trainer errs", "reads past the end"),
]


@pytest.fixture
def few_rows(monkeypatch):
    rows = list(ROWS)
    monkeypatch.setattr(certify, "rows_of", lambda oracle, backend="auto": iter(rows if oracle == "verl" else ()))
    return rows


def test_parity_prints_rows_and_notes(few_rows):
    text = run("parity")
    assert "vanilla" in text
    assert "2.0e-07" in text
    assert "[1] reads past the end" in text
    assert "1 equal, 1 trainer errs" in text


def test_parity_fails_when_a_row_differs(few_rows):
    few_rows.append(Row("verl", "0.9.1", "gpg", "token-mean", "", 1, 1.0, 1.0, "differs"))
    assert "differs" in run("parity", "verl", code=1)


def test_parity_as_markdown(few_rows):
    text = run("parity", "verl", "--markdown")
    assert "| verl | 0.9.1 | vanilla | token-mean | local | 7 | 1.0e-07 | 2.0e-07 | equal |  |" in text


def test_parity_refuses_an_unknown_oracle():
    result = CliRunner().invoke(app, ["parity", "nope"])
    assert result.exit_code == 2
    assert "expected some of verl, trl, polgrad, liger, transcribed, adapters, trl_runs; got 'nope'" in result.output


def test_no_rows_are_said(capsys):
    parity.show(make_console(), [])
    assert "no rows" in capsys.readouterr().out
