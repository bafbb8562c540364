"""The pages' Python runs as written and prints what they say; the commands that they name exist."""

import ast
import importlib.util
import re
import shlex

import pytest
import typer

from fusedpg.cli.app import app
from fusedpg.losses import _SPECS, ENTRIES
from pages import ROOT, blocks, run

PAGES = ["tour", "choosing-an-op", "reductions", "writing-a-loss", "numerics", "troubleshooting", "trainers/index"]

#: every page with commands, the trainers' too
WITH_COMMANDS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture
def catalogue():
    """A page may add entries; they leave with it."""
    before = list(ENTRIES)
    yield
    for name in set(ENTRIES) - set(before):
        del ENTRIES[name], _SPECS[name]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_runs(name, catalogue, recwarn, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # as for a reader, whose kernels are not interpreted
    without_trl = importlib.util.find_spec("trl") is None
    run(ROOT / "docs" / f"{name}.md", skip=lambda code: without_trl and "integrations.trl" in code)


def commands() -> list[tuple[str, str]]:
    """(page, command line) of the shell blocks and of inline code."""
    found = []
    for page in WITH_COMMANDS:
        shell = [line for _, code, _ in blocks(page, "bash", "sh", "console") for line in code.splitlines()]
        inline = re.findall(r"`((?:python -m fusedpg|make) [^`\n]+)`", page.read_text())
        lines = [line.split(" #")[0].strip() for line in (*shell, *inline)]
        found += [(page.name, line) for line in lines if line.startswith(("python -m fusedpg ", "make "))]
    return found


@pytest.mark.parametrize(("page", "line"), sorted(set(commands())), ids=lambda value: value[:60])
def test_a_command_exists(page, line):
    words = shlex.split(line.split(" > ")[0])
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert words[1] in targets
        return
    declared = typer.main.get_command(app).commands[words[3]]
    options = {option for parameter in declared.params for option in (*parameter.opts, *parameter.secondary_opts)}
    used = {word.split("=")[0] for word in words[4:] if word.startswith("--")} - {"--help"}
    assert not used - options


def strings() -> str:
    """Every string of the package, f-strings with their values cut out."""
    found = []
    for path in (ROOT / "python" / "fusedpg").rglob("*.py"):
        found += [node.value for node in ast.walk(ast.parse(path.read_text())) if _is_string(node)]
    return "\n".join(found)


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_messages_are_those_of_the_code():
    """Messages that a test machine cannot raise, quoted with … for what varies."""
    known = strings()
    quoted = [code for _, code, _ in blocks(ROOT / "docs" / "troubleshooting.md", "text")]
    assert quoted
    for piece in (piece.strip() for code in quoted for piece in code.split("…")):
        assert piece in known, piece
