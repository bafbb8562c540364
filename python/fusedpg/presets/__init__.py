"""Every trainer's own losses from its own option names: one function a trainer, each returning a `TrainerSpec`.

`presets.verl("vanilla", clip_ratio_high=0.28)` is a `LossSpec` that any op takes; it also carries the trainer's
normaliser rule and metric names. An option that is not supported is refused by name.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .base import TrainerSpec

if TYPE_CHECKING:  # at run time a trainer's module is imported when it is first asked for
    from ._areal import areal as areal
    from ._cosmos import cosmos as cosmos
    from ._cosmos_rl import cosmos_rl as cosmos_rl
    from ._nemo_rl import nemo_rl as nemo_rl
    from ._openrlhf import openrlhf as openrlhf
    from ._prime_rl import prime_rl as prime_rl
    from ._rllm import rllm as rllm
    from ._skyrl import skyrl as skyrl
    from ._slime import slime as slime
    from ._tinker import tinker as tinker
    from ._trl import trl as trl
    from ._verl import verl as verl

__all__ = ["TRAINERS", "TrainerSpec", "trainers_of"]

#: the trainers, in the order of the parity table and of the documentation
TRAINERS = (
    "verl",
    "trl",
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
__all__ += [*TRAINERS]


def __getattr__(name: str) -> Any:
    """A trainer's preset function; its module is imported when it is first asked for."""
    if name not in TRAINERS:
        raise AttributeError(f"fusedpg.presets has no trainer {name!r}; it has {', '.join(TRAINERS)}")
    return getattr(import_module(f"{__name__}._{name}"), name)


def losses_of(trainer: str) -> tuple[str, ...]:
    """The names of the losses that a trainer's preset knows."""
    return tuple(import_module(f"{__name__}._{trainer}").ENTRY_OF)


def trainers_of(entry: str) -> list[tuple[str, str]]:
    """(trainer, its name of the loss) for everything that runs a catalogue entry.

    Args:
        entry: a key of `fusedpg.CATALOGUE`; another name is run by nobody.

    Returns:
        Pairs in the order of `TRAINERS`; `[]` for an entry that no trainer has.
    """
    found = []
    for trainer in TRAINERS:
        module = import_module(f"{__name__}._{trainer}")
        found += [(trainer, loss) for loss, name in module.ENTRY_OF.items() if name == entry]
    return found
