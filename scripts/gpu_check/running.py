"""Steps with time limits, run one after the other within one budget; each step's output is captured."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from .outcomes import Counts, Failure, bench_outcome, pytest_outcome

PASSED, FAILED, TIMED_OUT, SKIPPED, NOT_RUN = "passed", "failed", "timed out", "skipped", "not run"
#: statuses that make the whole check fail
BAD = (FAILED, TIMED_OUT, NOT_RUN)
#: exit status of a step that finds nothing to do here
NOTHING_TO_DO = 75
#: seconds that an interrupted step has to write down what it got
GRACE = 8.0
#: characters of a step's output that are kept
KEPT = 60_000


@dataclass(frozen=True)
class Step:
    """One command, and the files in which it leaves results for the report."""

    name: str
    command: Sequence[str]
    limit: float
    #: Python modules without which it cannot run
    needs: tuple[str, ...] = ()
    #: whether it fails the check when a module is missing or all its tests are skipped
    optional: bool = False
    #: the tally of its tests, or the benchmark's JSON
    tally: Path | None = None
    sections: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Result:
    """What became of a step."""

    name: str
    status: str
    seconds: float = 0.0
    why: str = ""
    counts: Counts | None = None
    failures: list[Failure] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    command: str = ""
    output: str = ""

    @property
    def line(self) -> str:
        """For the terminal."""
        counts = f": {self.counts.line}" if self.counts else ""
        why = f" ({self.why})" if self.why else ""
        return f"{self.status:<9} {self.seconds:5.0f} s  {self.name}{counts}{why}"


def run_all(
    steps: Sequence[Step], budget: float, root: Path, tell: Callable[[str], None], start: float | None = None
) -> list[Result]:
    """Every step within what is left of `budget` seconds; those that there is no time for are named."""
    _heed_interrupts()
    start = time.monotonic() if start is None else start
    results = []
    for number, step in enumerate(steps, 1):
        left = budget - (time.monotonic() - start)
        tell(f"[{number}/{len(steps)}] {step.name} (at most {min(step.limit, max(left, 0)):.0f} s, {left:.0f} s left)")
        results.append(run_step(step, left, root))
        tell("      " + results[-1].line)
    return results


def run_step(step: Step, left: float, root: Path) -> Result:
    """One step, for at most its limit and `left` seconds."""
    missing = [name for name in step.needs if find_spec(name) is None]
    if missing:
        return Result(step.name, SKIPPED if step.optional else NOT_RUN, why=f"{', '.join(missing)} not installed")
    if left < 1:
        return Result(step.name, NOT_RUN, why="no time left")
    for path in (step.tally, step.sections):
        if path is not None:
            path.unlink(missing_ok=True)
    begin = time.monotonic()
    status, output = execute(step.command, min(step.limit, left), root, {**os.environ, **step.environment})
    result = Result(step.name, PASSED, time.monotonic() - begin, command=" ".join(step.command), output=output[-KEPT:])
    if step.tally is not None:
        result.counts, result.failures = pytest_outcome(step.tally)
    if step.sections is not None:
        result.tables, result.targets = bench_outcome(step.sections)
    return judged(result, step, status)


def judged(result: Result, step: Step, status: int | None) -> Result:
    """The verdict from an exit status, None for a step that was stopped."""
    if status is None:
        result.status, result.why = TIMED_OUT, f"stopped after {result.seconds:.0f} s; what it had done by then counts"
    elif status == NOTHING_TO_DO:
        result.status, result.why = SKIPPED, (result.output.strip().splitlines() or ["nothing to do"])[-1]
    elif status != 0:
        result.status, result.why = FAILED, f"exit status {status}"
    elif step.tally is not None and (result.counts is None or result.counts.passed == 0):
        result.status, result.why = SKIPPED if step.optional else FAILED, "no test passed"
    return result


def execute(command: Sequence[str], limit: float, root: Path, environment: Mapping[str, str]) -> tuple[int | None, str]:
    """(exit status or None where it was stopped, stdout and stderr together)."""
    process = subprocess.Popen(
        list(command),
        cwd=root,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        pass
    # an interrupt first: pytest then prints what it got
    output = ""
    for number in (signal.SIGINT, signal.SIGKILL):
        _signal(process, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            output, _ = process.communicate(timeout=GRACE)
            break
    _signal(process, signal.SIGKILL)  # whatever it left behind
    return None, output


def _signal(process: subprocess.Popen[str], number: int) -> None:
    """To the step and everything that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _heed_interrupts() -> None:
    """A shell starts background jobs with interrupts ignored, and steps would inherit that."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
