"""verl 0.9.1: its policy losses from fused kernels, under verl's own registry, options, normalisation and metrics.

`import verl` loads this module through the entry point `verl.plugins` (before 0.9.0:
`VERL_USE_EXTERNAL_MODULES=fusedpg.integrations.verl`) and every loss of verl is there as `fusedpg_<loss>`:

    actor_rollout_ref.actor.policy_loss.loss_mode=fusedpg_vanilla

Environment, read when the module is loaded, in the driver and in every worker:

    FUSEDPG_VERL_REPLACE=1                 verl's own names mean the fused losses; or a list: vanilla,gspo
    VERL_ENGINE_VENDOR=fusedpg             the FSDP engine scores from hidden states, without logits
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["LossFn", "PolicyLoss", "make_loss_fn", "register", "register_engine"]

_REPLACE = "FUSEDPG_VERL_REPLACE"
_VENDOR = "fusedpg"


def _said(error: BaseException) -> None:
    """verl drops a plugin's error at DEBUG level: say it where it is read."""
    print(
        f"fusedpg: its verl losses are NOT registered: {type(error).__name__}: {error}\n"
        "fusedpg: made for verl 0.9.1; fix the cause (pip install --upgrade fusedpg 'verl==0.9.1', or the variable it "
        "names), or set VERL_USE_EXTERNAL_PLUGINS=none to run without it",
        file=sys.stderr,
        flush=True,
    )


try:
    from verl.trainer.ppo.core_algos import register_policy_loss

    from ._verl_loss_fn import LossFn, make_loss_fn
    from ._verl_losses import LOSSES, PREFIX, PolicyLoss
except Exception as error:
    _said(error)
    raise


def register(replace: bool | Sequence[str] = False, backend: str = "auto") -> tuple[str, ...]:
    """Register every loss of verl as `fusedpg_<loss>` in verl's registry.

    Args:
        replace: True puts them under verl's own names as well; a list of verl's names, those.
        backend: "auto", "cpu", "triton" or "reference".

    Returns:
        The names that were registered.

    Raises:
        ValueError: a name in `replace` that verl does not have.
    """
    own = LOSSES if replace is True else tuple(replace or ())
    unknown = [name for name in own if name not in LOSSES]
    if unknown:
        raise ValueError(f"replace: expected names among {', '.join(LOSSES)}; got {', '.join(map(repr, unknown))}")
    names = {**{PREFIX + loss: loss for loss in LOSSES}, **{loss: loss for loss in own}}
    for name, loss in names.items():
        register_policy_loss(name)(PolicyLoss(loss, backend))
    return tuple(names)


def register_engine() -> Any:
    """Register the FSDP engine that scores from hidden states under vendor "fusedpg"; returns its class.

    Raises:
        ImportError: verl's engine modules cannot be imported.
    """
    from ._verl_engine import registered_engine

    return registered_engine()


def _requested() -> bool | list[str]:
    """`FUSEDPG_VERL_REPLACE`."""
    value = os.environ.get(_REPLACE, "").strip()
    if value.lower() in ("", "0", "false", "none"):
        return False
    if value.lower() in ("1", "true", "all"):
        return True
    return [name.strip() for name in value.split(",") if name.strip()]


def _load() -> None:
    """What loading the plugin does."""
    try:
        register(_requested())
    except ValueError as error:
        raise ValueError(f"{_REPLACE}: {error}") from None
    if os.environ.get("VERL_ENGINE_VENDOR") == _VENDOR:
        register_engine()


try:
    _load()
except Exception as error:
    _said(error)
    raise
