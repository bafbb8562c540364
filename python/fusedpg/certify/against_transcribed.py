"""Trainers that PyPI does not have as an importable loss: their presets against formulas transcribed by hand."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec

from .rows import Row

#: trainers with a module `transcribed_<trainer>`, in the order of the table
TRAINERS = (
    "rllm",
    "cosmos",
    "cosmos_rl",
    "nemo_rl",
    "tinker",
    "skyrl",
    "slime",
    "prime_rl",
    "areal",
    "openrlhf",
)


def trainers() -> tuple[str, ...]:
    """The trainers whose formulas are here."""
    package = __name__.rpartition(".")[0]
    return tuple(trainer for trainer in TRAINERS if find_spec(f"{package}.transcribed_{trainer}") is not None)


def rows(backend: str = "auto") -> Iterator[Row]:
    """One row a loss, reduction and group of options, trainer by trainer."""
    package = __name__.rpartition(".")[0]
    for trainer in trainers():
        yield from import_module(f"{package}.transcribed_{trainer}").rows(backend)
