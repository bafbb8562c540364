"""`python -m fusedpg doctor`: what runs here, what does not and why, and whether what runs is right.

Needs nothing of the `cli` extra: where that is missing, the command line prints `lines` instead of tables.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fusedpg import dispatch

from . import doctor_check, doctor_facts

INTERPRET = "TRITON_INTERPRET"
REFERENCE, CPU, TRITON, INTERPRETED = "reference", "cpu", "triton on a GPU", "triton interpreted"


@dataclass(frozen=True)
class Backend:
    """One way to run the kernels: whether it works, and why not with the fix, or what it is."""

    name: str
    works: bool
    says: str
    #: what `backend=` takes
    argument: str


@dataclass
class Diagnosis:
    """Everything that the command prints."""

    facts: dict[str, dict[str, Any]]
    backends: list[Backend]
    checks: doctor_check.Checks = field(default_factory=doctor_check.Checks)

    @property
    def ok(self) -> bool:
        """Whether every case of the self-test agreed; a backend that is not there is no failure."""
        return not self.checks.problems

    def to_json(self) -> dict[str, Any]:
        """The record for scripts."""
        return {
            "ok": self.ok,
            "backends": [vars(backend) for backend in self.backends],
            "self_test": self.checks.to_json(),
            **self.facts,
        }

    def lines(self) -> list[str]:
        """The record for people, without tables."""
        facts = [f"{part}: {name}: {value}" for part, values in self.facts.items() for name, value in values.items()]
        ways = [f"backend: {b.name}: {'works' if b.works else 'does not run'}: {b.says}" for b in self.backends]
        return [*facts, *ways, *self.checks.lines()]


def examine(seconds: float = 2.0) -> Diagnosis:
    """Look around, and compare every working backend with fp64 for about `seconds`."""
    backends = look_at_backends()
    diagnosis = Diagnosis(doctor_facts.collect(backends[1].works), backends)
    diagnosis.checks = doctor_check.run([b.argument for b in backends if b.works], seconds)
    return diagnosis


def plain(arguments: Sequence[str]) -> int:
    """The command without the `cli` extra; its exit status."""
    unknown = [argument for argument in arguments if argument != "--json"]
    if unknown:
        print(f"doctor: expected --json or nothing where typer and rich are missing; got {unknown[0]!r}")
        return 2
    diagnosis = examine()
    print(json.dumps(diagnosis.to_json(), indent=1) if arguments else "\n".join(diagnosis.lines()))
    return 0 if diagnosis.ok else 1


def look_at_backends() -> list[Backend]:
    """The reference, the compiled core, and Triton both ways."""
    return [Backend(REFERENCE, True, "plain PyTorch, any device and dtype", "reference"), _core(), *_triton()]


def _core() -> Backend:
    reason = dispatch.unavailable("cpu")
    if reason is None:
        try:
            says = f"CPU tensors; build {dispatch.native('cpu').isa()}"
        except ValueError as error:  # FUSEDPG_CPU_ISA names a build that this machine cannot run
            reason = str(error)
    return Backend(CPU, reason is None, says if reason is None else reason, "cpu")


def _triton() -> tuple[Backend, Backend]:
    """Compiled and interpreted: Triton decides which when it is imported, so at most one of them works."""
    reason = dispatch.unavailable("triton")
    interprets = os.environ.get(INTERPRET) == "1"
    device, interpreted = reason, reason
    if interprets and reason is None:
        device = f"{INTERPRET}=1 is set: the kernels are interpreted; unset it to compile them for a GPU"
    elif not interprets:
        missing = reason if doctor_facts.triton_version() is None else None
        interpreted = missing or f"off, being slow and for tests; set {INTERPRET}=1 to run the kernels on CPU tensors"
    return (
        Backend(TRITON, device is None, device or f"tensors of {doctor_facts.accelerator()}", "triton"),
        Backend(INTERPRETED, interpreted is None, interpreted or "CPU tensors, slow", "triton"),
    )
