"""The tables of performance.md, from what `bench --markdown` printed: `python docs/tables.py bench.md`.

Words of the page stay; everything from "The targets" to "What the misses mean" is written anew.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parent / "performance.md"
FIRST, LAST = "## The targets", "## What the misses mean"

#: heading -> plots (name, what it shows), starts of the tables' titles; tables of the large vocabulary come first
PARTS: dict[str, tuple[dict[str, str], str]] = {
    "From logits": (
        {"ceiling-logits": "Percent of the bandwidth of a copy that each way from logits reaches"},
        "P1: ",
    ),
    "Log-probabilities without a gradient": ({}, "Scoring: "),
    "From hidden states": (
        {
            "ceiling-hidden": "Percent of the bare matrix products' speed that each way from hidden states reaches",
            "accuracy-hidden": "Errors of loss and gradient against fp64, and time, of each way from hidden states",
        },
        "P2, P3: ",
    ),
    "From log-probabilities": ({}, "P4: "),
    "A micro-batch of TRL": ({}, "TRL "),
    "As sizes grow": (
        {
            "time-and-memory": "Time and extra memory against the number of tokens",
            "vocabulary-and-width": "Time and extra memory against vocabulary and hidden size",
        },
        "Scaling ",
    ),
    "Distillation": ({}, "Distillation, "),
    "Triton kernels without a GPU": ({}, "P5: "),
    "Accuracy": ({}, "P7: "),
}


def tables(report: str) -> dict[str, str]:
    """Title -> table with its targets and notes."""
    found = re.split(r"(?m)^(?=\*\*[A-Z][^\n]*\*\*$)", report)[1:]
    return {table.split("\n", 1)[0].strip("*"): table.rstrip() for table in found}


def body(report: str) -> str:
    """The part of the page that a report fills."""
    found = tables(report)
    blocks = [FIRST, found.pop("Promises").split("\n", 1)[1].strip()]
    for heading, (plots, start) in PARTS.items():
        blocks.append(f"## {heading}")
        blocks += [f"```{{image}} images/{name}.png\n:alt: {text}\n```" for name, text in plots.items()]
        titles = [title for title in found if title.startswith(start)]
        blocks += [found.pop(title) for title in sorted(titles, key=lambda title: "V = 32768" in title)]
    if found:
        raise ValueError(f"report: tables without a place in PARTS: {', '.join(found)}")
    return "\n\n".join(blocks) + "\n\n"


def main() -> None:
    """Write the page."""
    page = PAGE.read_text()
    end = page.index(LAST)
    PAGE.write_text(page[: page.index(FIRST)] + body(Path(sys.argv[1]).read_text()) + page[end:])


if __name__ == "__main__":
    main()
