"""The trainers' pages: what each must say, and its measured differences, which are measured again."""

import re
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fusedpg import integrations
from fusedpg.certify import against_adapters, rows_of
from fusedpg.certify.adapters import tinker
from fusedpg.certify.against_adapters import TRAINERS
from fusedpg.certify.rows import GRADIENT_LIMIT, VALUE_LIMIT
from fusedpg.cli.app import app

PAGES = Path(__file__).parents[2] / "docs" / "trainers"
#: a figure may differ by this much on another processor, and below a unit in the last place of fp32 at will
FACTOR, FLOOR = 10.0, 2.0**-23


def table_of(trainer):
    """{loss: (steps, value, gradient)} of a page's table under the command."""
    text = (PAGES / f"{trainer}.md").read_text()
    assert "`python -m fusedpg parity adapters`" in text
    table = text[text.index("`python -m fusedpg parity adapters`") :]
    head = "| loss | steps | loss value | gradient |\n|---|--:|--:|--:|\n"
    lines = table[table.index(head) + len(head) :].split("\n\n")[0].strip().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {loss: (int(steps), float(value), float(gradient)) for loss, steps, value, gradient in cells}


def test_every_integration_has_a_page_and_rows():
    modules = {p.stem for p in Path(integrations.__file__).parent.glob("*.py") if not p.stem.startswith("_")}
    assert modules == set(TRAINERS)
    assert {page.stem for page in PAGES.glob("*.md")} - {"index"} == modules


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_page_says_what_it_must(trainer):
    """Install, the one line, what changes, what is refused, the measured difference and its bound."""
    text = (PAGES / f"{trainer}.md").read_text()
    for wanted in (
        r"pip install",
        rf"fusedpg\.integrations\.{trainer}|fusedpg_vanilla|fusedpg_cispo",
        r"What changes",
        r"[Rr]efused",
        r"Measured",
        r"within 1e-6 and 2e-6",
        r"transcribed in fp64|'s own",
    ):
        assert re.search(wanted, text), wanted
    assert (VALUE_LIMIT, GRADIENT_LIMIT) == (1e-6, 2e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_figures_of_a_page(trainer):
    """The same losses over as many steps; within the bound, and of the page's order."""
    rows = list(import_module(f"fusedpg.certify.adapters.{trainer}").rows())
    if rows[0].verdict == "not installed":
        pytest.skip(f"{trainer}: {rows[0].note}")
    page = table_of(trainer)
    assert {row.loss: row.cases for row in rows} == {loss: steps for loss, (steps, _, _) in page.items()}
    for row in rows:
        _, value, gradient = page[row.loss]
        assert row.verdict == "equal", row
        assert row.value <= max(FACTOR * value, FLOOR), row
        assert row.gradient <= max(FACTOR * gradient, FLOOR), row
        assert value <= VALUE_LIMIT
        assert gradient <= GRADIENT_LIMIT


def test_the_command_prints_the_rows_and_fails_on_a_difference(monkeypatch):
    monkeypatch.setattr(against_adapters, "TRAINERS", ("tinker",))
    result = CliRunner().invoke(app, ["parity", "adapters", "--markdown"])
    assert result.exit_code == 0, result.output
    assert [row.loss for row in rows_of("adapters")] == re.findall(r"\| tinker \| [\d.]+ \| (\w+) \|", result.output)
    step = tinker.step
    monkeypatch.setattr(tinker, "step", lambda *a: step(*a)._replace(grad=step(*a).grad * 1.001))
    result = CliRunner().invoke(app, ["parity", "adapters", "--markdown"])
    assert result.exit_code == 1
    assert "| differs |" in result.output
