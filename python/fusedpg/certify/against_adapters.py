"""The drop-ins beside their trainers, trainer by trainer: a step of two micro-batches and an empty one."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from .rows import Row

#: trainers with a module in `adapters`
TRAINERS = (
    *("trl", "verl", "rllm", "tinker", "cosmos", "cosmos_rl", "nemo_rl"),
    *("skyrl", "slime", "prime_rl", "areal", "torchforge"),
)


def rows(backend: str = "auto") -> Iterator[Row]:
    """One row a loss of each drop-in."""
    package = __name__.rpartition(".")[0]
    for trainer in TRAINERS:
        yield from import_module(f"{package}.adapters.{trainer}").rows(backend)
