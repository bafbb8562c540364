"""verl's modules without Ray, with its engine; what of them the tests compare."""

import importlib.util
from functools import cache

import pytest
import torch

from fusedpg.certify.adapters import verl
from fusedpg.certify.adapters.verl import actor_config, in_fp64, jagged, micro_batch, modes, run

__all__ = ["actor_config", "close", "in_fp64", "jagged", "load", "micro_batch", "modes", "needs_verl", "run"]

MISSING = [name for name in ("verl", "tensordict", "omegaconf") if importlib.util.find_spec(name) is None]
needs_verl = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed (certify-no-deps.txt)")

ENGINE = {
    "engine": "fusedpg.integrations._verl_engine",
    "fsdp": "verl.workers.engine.fsdp.transformer_impl",
}


@cache
def load():
    """The modules, and the oracle over them; imported once."""
    return verl.import_modules({**verl.NAMES, **ENGINE})


def close(ours, theirs, limit, what):
    ours, theirs = torch.as_tensor(ours).double(), torch.as_tensor(theirs).double()
    assert torch.isfinite(theirs).all(), what
    worst = ((ours - theirs).abs() / theirs.abs().clamp(min=1.0)).max() if theirs.numel() else torch.zeros(())
    assert worst <= limit, (what, worst.item(), ours, theirs)
