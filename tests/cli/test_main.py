"""The entry point: help for every command, and one clear line when the extra is missing."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from fusedpg.cli import main
from fusedpg.cli.app import app


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["bench", "--help"]])
def test_help(arguments):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "Usage:" in result.output


def test_python_m_runs_the_command_line():
    done = subprocess.run([sys.executable, "-m", "fusedpg", "--help"], capture_output=True, text=True, check=True)
    assert "demo" in done.stdout
    assert "bench" in done.stdout


@pytest.mark.parametrize("absent", ["typer", "rich", "matplotlib"])
def test_missing_extra_is_one_line(monkeypatch, absent):
    monkeypatch.setattr("fusedpg.cli.find_spec", lambda name: None if name == absent else object())
    with pytest.raises(SystemExit) as stop:
        main()
    assert str(stop.value) == f"the fusedpg command line needs {absent}: pip install 'fusedpg[cli]'"
