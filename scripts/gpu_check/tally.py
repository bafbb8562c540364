"""A pytest plugin that writes a line as each test starts and ends: a run that is stopped or dies keeps its count.

`pytest -p gpu_check.tally --tally FILE`
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def pytest_addoption(parser: Any) -> None:
    """`--tally`."""
    parser.addoption("--tally", help="file that a line for each test is added to")


def pytest_configure(config: Any) -> None:
    """One writer: the workers of xdist tell their controller."""
    path = config.getoption("--tally")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Tally(Path(path)), "gpu-check-tally")


class Tally:
    """Adds a JSON line for each event."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, **event: str) -> None:
        """One line, on disk at once."""
        with self.path.open("a") as file:
            file.write(json.dumps(event) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self.write(test=nodeid, outcome="started")

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test's body is over, or its setup or teardown did not pass."""
        if report.when == "call" or report.outcome != "passed":
            self.write(test=report.nodeid, outcome=report.outcome, text=report.longreprtext)

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be imported counts as a failing test."""
        if report.outcome == "failed":
            self.write(test=report.nodeid, outcome="failed", text=report.longreprtext)
