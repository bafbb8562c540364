"""Whole GRPO runs of TRL, stock and fused: a row a loss, the largest difference of any step's loss and grad norm."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

from ..presets._trl import ENTRY_OF, VERSION
from . import trl_oracle
from .rows import Row, not_installed

Found = TypeVar("Found")
#: of a step's logged loss (absolute) and of its gradient norm (relative)
LOSS_LIMIT, GRAD_LIMIT = 1e-5, 1e-4
#: two updates of each of two generated batches, two micro-batches of each update; the reference is the old policy of
#: the first batch alone
RUN: dict[str, Any] = {"max_steps": 4, "beta": 0.04, "num_iterations": 2, "steps_per_generation": 2}


def run_options(loss: str) -> dict[str, Any]:
    """Options under which a short run meets the loss's bounds."""
    options: dict[str, Any] = {"loss_type": loss, "epsilon_high": 5.0 if loss == "cispo" else 0.28, **RUN}
    if loss == "luspo":
        options["importance_sampling_level"] = "sequence"
    if loss in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"):
        options["delta"] = 1.5
    return options


def quietly(compare: Callable[[Path, dict[str, Any]], Found], loss: str) -> Found:
    """What a comparison of trainers finds for a loss, in a folder of its own; trainers warn, log and print."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            return compare(Path(folder), run_options(loss))


def rows(backend: str = "auto") -> Iterator[Row]:
    """One run of each of TRL's losses; `backend` is the one that fits the tensors whatever is asked."""
    installed = trl_oracle.installed_version()
    if trl_oracle.load() is None:
        yield from not_installed("trl", installed, ENTRY_OF, "pip install 'fusedpg[trl]'")
        return
    for loss in ENTRY_OF:
        value, gradient, steps = quietly(compare, loss)
        verdict = "equal" if value <= LOSS_LIMIT and gradient <= GRAD_LIMIT else "differs"
        note = "" if installed == VERSION else f"the presets follow TRL {VERSION}"
        yield Row("trl", installed, loss, "", "GRPOTrainer.train()", steps, value, gradient, verdict, note)


def compare(folder: Path, options: dict[str, Any]) -> tuple[float, float, int]:
    """(largest difference of a loss, largest relative one of a gradient norm, steps)."""
    from trl import GRPOTrainer

    from ..integrations.trl import FusedGRPOTrainer
    from .tiny_trl import grpo, history

    stock, fused = (history(grpo(folder, trainer, **options)) for trainer in (GRPOTrainer, FusedGRPOTrainer))
    losses = [abs(a["loss"] - b["loss"]) for a, b in zip(stock, fused, strict=True)]
    norms = [abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in zip(fused, stock, strict=True) if b["grad_norm"]]
    return max(losses), max(norms, default=0.0), len(losses)
