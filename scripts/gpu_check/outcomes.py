"""What a step left behind: the tally of its tests, the benchmark's tables."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

#: lines of a failing test's traceback that the report keeps: its last ones
LINES = 12


@dataclass(frozen=True)
class Counts:
    """Tests by what became of them."""

    passed: int
    failed: int
    skipped: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.passed + self.failed + self.skipped

    @property
    def line(self) -> str:
        """`12 passed, 0 failed, 3 skipped`."""
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


@dataclass(frozen=True)
class Failure:
    """A failing test's name and the end of its traceback."""

    test: str
    text: str


def pytest_outcome(path: Path) -> tuple[Counts | None, list[Failure]]:
    """Counts and failures; None where no test began. A test that never ended was running when its step did."""
    try:
        events = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError):
        return None, []
    outcomes: dict[str, str] = {}
    failures = []
    for event in events:
        test, outcome = event["test"], event["outcome"]
        if outcomes.get(test) != "failed":  # a teardown says nothing of a body that failed
            outcomes[test] = outcome
        if outcome == "failed":
            failures.append(Failure(test, _end(event["text"])))
    failures += [Failure(test, "was running when the step ended") for test, o in outcomes.items() if o == "started"]
    found = list(outcomes.values())
    failed = found.count("failed") + found.count("started")
    return Counts(found.count("passed"), failed, found.count("skipped")) if found else None, failures


def _end(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-LINES:])


def bench_outcome(path: Path) -> tuple[list[str], list[str]]:
    """(tables in Markdown, lines of targets); empty where nothing was measured."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return [], []
    targets = [f"{section['title']}: {line}" for section in record for line in section["targets"]]
    return [section["markdown"] for section in record], targets
