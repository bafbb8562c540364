"""A finished run as JSON: the machine and its versions, the options, every section with every sample."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .bench_options import Options
from .report import Section

Record = dict[str, Any]

#: what tells two tables apart; a row of a sweep has its own sizes
KEYS = ("suite", "source", "axis", "divergence", "dtype", "tokens", "vocab", "width")
ROW_KEYS = ("tokens", "vocab", "width")


def record(machine: dict[str, Any], options: Options, sections: Iterable[Section]) -> Record:
    """The whole run."""
    return {"machine": machine, "options": vars(options), "sections": [section.to_json() for section in sections]}


def write(path: Path, run: Record) -> None:
    """To a file, whose folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run, indent=1) + os.linesep)


def read(path: Path) -> Record:
    """A run that `--json` wrote, by this version or an earlier one.

    Raises:
        ValueError: the file is no such report; the message says what it is.
    """
    try:
        run = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: expected a report that `bench --json` wrote; it is no JSON: {error}") from None
    if not isinstance(run, dict) or not {"machine", "sections"} <= set(run):
        raise ValueError(f"{path}: expected a report that `bench --json` wrote, with `machine` and `sections`")
    return run


def rows(run: Record) -> Iterator[tuple[Record, Record]]:
    """(section, row) of every row."""
    for section in run["sections"]:
        for row in section.get("rows", ()):
            yield section, row


def key(section: Record, row: Record | None = None) -> tuple[Any, ...]:
    """What a table, or a row, is called in another run."""
    of_section = tuple(section.get(name) for name in KEYS)
    return of_section if row is None else (*of_section, *(row.get(name) for name in ROW_KEYS), row["name"])


def label(section: Record, row: Record | None = None) -> str:
    """`P2 bf16 N=512 V=151936 D=512`."""
    sizes = {**section, **(row or {})}
    words = [sizes[name] for name in ("suite", "source", "axis", "divergence", "dtype") if sizes.get(name)]
    letters = {"tokens": "N", "vocab": "V", "width": "D"}
    return " ".join([*words, *(f"{letter}={sizes[name]}" for name, letter in letters.items() if sizes.get(name))])
