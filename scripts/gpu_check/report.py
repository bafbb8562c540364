"""The report: machine, versions, each step's result with its failures, the benchmark's tables and targets."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .running import BAD, Result

#: characters of a failing step's output
TAIL = 4000


def write(path: Path, title: str, notes: list[str], facts: dict[str, Any], results: list[Result]) -> None:
    """Markdown at `path`, everything as JSON beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(markdown(title, notes, facts, results))
    record = {"title": title, "notes": notes, "facts": facts, "results": [asdict(result) for result in results]}
    path.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")


def verdict(results: list[Result]) -> str:
    """One line on the whole."""
    bad = [result.name for result in results if result.status in BAD]
    return f"FAILED: {'; '.join(bad)}" if bad else "all steps passed"


def markdown(title: str, notes: list[str], facts: dict[str, Any], results: list[Result]) -> str:
    """The whole report."""
    blocks = [f"# {title}", f"**{verdict(results)}**", "\n".join(f"- {note}" for note in notes)]
    blocks += [_facts(facts), _steps(results), *_failures(results), *_benchmarks(results), *_outputs(results)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _facts(facts: dict[str, Any]) -> str:
    lines = ["## Machine and versions", ""]
    for part, values in facts.items():
        if isinstance(values, dict) and values and part != "self_test":
            lines += [f"- {part}: " + ", ".join(f"{name} {value}" for name, value in values.items())]
    for backend in facts.get("backends", []):
        lines.append(f"- backend {backend['name']}: {'works' if backend['works'] else 'no'}: {backend['says']}")
    return "\n".join(lines)


def _steps(results: list[Result]) -> str:
    rows = [
        "## Steps",
        "",
        "| step | result | seconds | passed | failed | skipped | why |",
        "|:--|:--|--:|--:|--:|--:|:--|",
    ]
    for result in results:
        counts = result.counts
        numbers = (counts.passed, counts.failed, counts.skipped) if counts else ("", "", "")
        cells = (result.name, result.status, f"{result.seconds:.0f}", *numbers, result.why)
        rows.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    return "\n".join(rows)


def _failures(results: list[Result]) -> list[str]:
    blocks = []
    for result in results:
        for failure in result.failures:
            blocks.append(f"### {failure.test}\n\n```\n{failure.text}\n```")
    return ["## Failing tests", *blocks] if blocks else []


def _benchmarks(results: list[Result]) -> list[str]:
    targets = [line for result in results for line in result.targets]
    tables = [table for result in results for table in result.tables]
    judged = "## Targets\n\n" + "\n".join(f"- {line}" for line in targets) if targets else ""
    return [judged, "## Benchmarks", *tables] if tables else []


def _outputs(results: list[Result]) -> list[str]:
    """The ends of what failing steps printed."""
    blocks = [
        f"### {result.name}\n\n`{result.command}`\n\n```\n{result.output.strip()[-TAIL:]}\n```"
        for result in results
        if result.status in BAD and result.output.strip()
    ]
    return ["## Output of the steps that failed", *blocks] if blocks else []
