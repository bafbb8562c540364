"""Certification: every preset against its trainer's real code, or against a transcription of its formula.

`all_rows(backend)` yields the rows that `python -m fusedpg parity` prints and `make test` asserts. Trainers are
imported when their rows are made; one that is not installed gives rows that say so.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from .rows import Row

__all__ = ["ORACLES", "RUNS", "Row", "all_rows", "rows_of"]

#: modules with `rows(backend)`, in the order of the table
ORACLES = ("verl", "trl", "polgrad", "liger", "transcribed")
#: on demand: every drop-in beside its trainer; whole training runs
RUNS = ("adapters", "trl_runs")


def rows_of(oracle: str, backend: str = "auto") -> Iterator[Row]:
    """The rows of one oracle."""
    if oracle not in ORACLES + RUNS:
        raise ValueError(f"oracle: expected one of {', '.join(ORACLES + RUNS)}; got {oracle!r}")
    yield from import_module(f"{__name__}.against_{oracle}").rows(backend)


def all_rows(backend: str = "auto") -> Iterator[Row]:
    """Every row of the parity table."""
    for oracle in ORACLES:
        yield from rows_of(oracle, backend)
