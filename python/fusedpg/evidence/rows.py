"""What the parts of the static suite report, as they print it: importable without Triton."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


@dataclass(frozen=True)
class Moved:
    """Bytes a logit between a case's kernels and its logits and gradient; None where there are no such rows.

    `best`: each launch touches every sector once, its re-reads hit a cache. `worst`: every access goes to memory.
    """

    library: str
    task: str
    vocab: int
    read: float = 0.0
    written: float = 0.0
    best: float = 0.0
    worst: float = 0.0
    masked: float | None = None  # of a masked row
    idle: float | None = None  # of a row whose advantage is 0
    error: str | None = None


@dataclass(frozen=True)
class Compiled:
    """One kernel on one target. The loops are those over the vocabulary, in the order of the code."""

    library: str
    kernel: str
    vocab: int | None  # None: one compilation for all
    target: str
    registers: int = 0
    spills: int = 0
    load_bits: int | None = None  # of the narrowest load of the loops
    per_logit: tuple[float, ...] = ()
    waits: tuple[int, ...] = ()  # shuffles and barriers in each
    error: str | None = None


@dataclass(frozen=True)
class Compilations:
    """How often the kernels of one case are compiled for several values of one thing: the most of any kernel."""

    library: str
    task: str
    changed: str
    values: tuple[str, ...]
    most: int | None = None
    kernels: int = 0
    error: str | None = None


def reason(error: Exception) -> str:
    """An error in one line; of a bare assertion, the line that asserts."""
    lines = str(error).strip().splitlines()
    if not lines:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frames[-1].line or ""] if frames else [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]
