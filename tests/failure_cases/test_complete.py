"""Every case of the document is tested by its number or waits with a reason."""

import re
from pathlib import Path

from cases import NUMBER_OF_CASES, PARTLY, WAITING


def numbered_tests() -> dict[int, list[str]]:
    """Case number -> names of its tests, from the source text."""
    found: dict[int, list[str]] = {}
    for path in Path(__file__).parent.glob("test_*.py"):
        for name, number in re.findall(r"^def (test_case_(\d{3})\w*)", path.read_text(), re.MULTILINE):
            found.setdefault(int(number), []).append(name)
    return found


def test_every_case_is_tested_or_waits():
    tested = set(numbered_tests())
    every = set(range(1, NUMBER_OF_CASES + 1))
    assert tested | set(WAITING) == every
    assert not tested & set(WAITING), "a case that has a test waits no longer"
    assert set(PARTLY) <= tested


def test_every_case_names_its_issue():
    for path in Path(__file__).parent.glob("test_*.py"):
        for name, doc in re.findall(r'^def (test_case_\w+)\(.*\n    """(.*)"""', path.read_text(), re.MULTILINE):
            assert re.search(r"[\w.-]+/[\w.-]+#\d+", doc), f"{name}: name the issue in its docstring"


def test_waiting_cases_have_reasons():
    assert all(reason.strip() for reason in {**WAITING, **PARTLY}.values())
