"""Trainers that PyPI does not have as an importable loss: their presets against formulas transcribed by hand."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from ..presets import TRAINERS as PRESETS
from .rows import Row

#: trainers with a module `transcribed_<trainer>`: all but those whose own code is the oracle
TRAINERS = tuple(trainer for trainer in PRESETS if trainer not in ("verl", "trl"))


def rows(backend: str = "auto") -> Iterator[Row]:
    """One row a loss, reduction and group of options, trainer by trainer."""
    package = __name__.rpartition(".")[0]
    for trainer in TRAINERS:
        yield from import_module(f"{package}.transcribed_{trainer}").rows(backend)
