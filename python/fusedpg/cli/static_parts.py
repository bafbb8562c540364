"""The two processes of the static suite: one that interprets the kernels, one that compiles them, side by side."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..evidence import cases
from ..evidence.rows import TARGETS, Compilations, Compiled, Moved
from .timing import Tick

_ROWS = {"moved": Moved, "compiled": Compiled, "compilations": Compilations}
#: modules of `fusedpg.evidence`, and whether Triton interprets in them
PARTS = (("traffic", True), ("code", False))
#: variants of ours that are compiled, and what the compilations are counted over
_OWN_KERNELS, _CHANGES = 7, 3


@dataclass
class Found:
    """Everything that the two parts reported, and what ended one of them early."""

    moved: list[Moved] = field(default_factory=list)
    compiled: list[Compiled] = field(default_factory=list)
    compilations: list[Compilations] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)


def vocabularies(vocab: int) -> tuple[int, int]:
    """A vocabulary and an odd one near it: that of a tokenizer without its padding, for the usual one."""
    return vocab, 151_665 if vocab == 151_936 else vocab - 1


def count(vocab: int) -> int:
    """How often `collect` calls its `tick` when neither part crashes."""
    shapes = len(vocabularies(vocab))
    compiled = len(TARGETS) * (_OWN_KERNELS + shapes * len(cases.rivals()))
    return shapes * len(cases.with_logits()) + compiled + _CHANGES * len([*cases.ours(), *cases.rivals()])


def collect(vocab: int, tick: Tick) -> Found:
    """Run both parts."""
    found = Found()
    for line in _lines(vocab, found.crashes):
        ((kind, rows),) = line.items()
        for values in rows:
            row = _ROWS[kind](**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
            getattr(found, kind).append(row)
        tick(f"{kind} {rows[0]['library']}" if rows else kind)
    return found


def _lines(vocab: int, crashes: list[str]) -> Iterator[dict[str, list[Any]]]:
    arguments = [f"--vocab={v}" for v in vocabularies(vocab)]
    lines: queue.Queue[str | None] = queue.Queue()
    threads = [
        threading.Thread(target=_run, args=(part, interpret, arguments, lines, crashes), daemon=True)
        for part, interpret in PARTS
    ]
    for thread in threads:
        thread.start()
    running = len(threads)
    while running:
        line = lines.get()
        if line is None:
            running -= 1
        else:
            yield json.loads(line)


def _run(part: str, interpret: bool, arguments: list[str], lines: queue.Queue[str | None], crashes: list[str]) -> None:
    """One part in a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_INTERPRET": "1"} if interpret else {}
    command = [sys.executable, "-W", "ignore", "-m", f"fusedpg.evidence.{part}", *arguments]
    try:
        with tempfile.TemporaryFile("w+") as errors:
            with subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
            ) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    if line.startswith("{"):
                        lines.put(line)
            if process.returncode:
                errors.seek(0)
                last = (errors.read().strip().splitlines() or ["no message"])[-1]
                crashes.append(f"fusedpg.evidence.{part} ended with {process.returncode}: {last}")
    finally:
        lines.put(None)
