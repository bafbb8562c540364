"""TRL's GRPO loss of a step, stock and fused, over the same tiny model: two micro-batches and an empty one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...presets._trl import ENTRY_OF
from .. import trl_oracle
from ..against_trl_runs import quietly
from ..rows import Row, not_installed
from .batches import PARTS, Outcome
from .compare import OWN_CODE, Largest

PROMPT, COMPLETION = 3, 12
SEEDS = (0, 1, 2)


def rows(backend: str = "auto") -> Iterator[Row]:
    """One row a loss type; `backend` is the one that fits the tensors whatever is asked."""
    installed = trl_oracle.installed_version()
    if trl_oracle.load() is None:
        yield from not_installed("trl", installed, ENTRY_OF, "pip install 'fusedpg[trl]'")
        return
    for loss in ENTRY_OF:
        largest = quietly(compare, loss)
        yield largest.row("trl", installed, loss, "", OWN_CODE)


def compare(folder: Path, options: dict[str, Any]) -> Largest:
    """The largest differences over several batches."""
    from trl import GRPOTrainer

    from ...integrations.trl import FusedGRPOTrainer
    from ..tiny_trl import VOCAB, grpo_trainer, one_thread

    largest = Largest()
    with one_thread():
        fused, stock = (grpo_trainer(folder, kind, **options) for kind in (FusedGRPOTrainer, GRPOTrainer))
        for seed in SEEDS:
            micro_batches = step_inputs(VOCAB, seed)
            largest.note(step(fused, micro_batches), step(stock, micro_batches))
    return largest


def step(trainer: Any, micro_batches: list[dict[str, Tensor]]) -> Outcome:
    """The step's loss and the gradient of every parameter, end to end."""
    trainer.current_gradient_accumulation_steps = len(micro_batches)
    model = trainer.model.train()
    model.zero_grad(set_to_none=True)
    loss = torch.zeros(())
    for one in micro_batches:
        part = trainer._compute_loss(model, dict(one))
        part.backward()
        loss = loss + part.detach()
    return Outcome(loss, torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]))


def step_inputs(vocab: int, seed: int) -> list[dict[str, Tensor]]:
    """What TRL hands to its loss, a dict a micro-batch: ratios on both sides of the clip, a row of one token."""
    g = torch.Generator().manual_seed(seed)
    rows = PARTS[-1].stop
    lengths = torch.randint(1, COMPLETION + 1, (rows, 1), generator=g)
    lengths[1] = 1
    mask = (torch.arange(COMPLETION) < lengths).long()
    mask[PARTS[-1]] = 0
    uniform = -torch.log(torch.tensor(float(vocab)))  # what a model before training gives every token
    old, ref = (uniform + 0.3 * torch.randn(rows, COMPLETION, generator=g) for _ in range(2))
    whole = {
        "prompt_ids": torch.randint(3, vocab, (rows, PROMPT), generator=g),
        "prompt_mask": torch.ones(rows, PROMPT, dtype=torch.long),
        "completion_ids": torch.randint(3, vocab, (rows, COMPLETION), generator=g),
        "completion_mask": mask,
        "advantages": torch.randn(rows, generator=g),
        "old_per_token_logps": old,
        "ref_per_token_logps": ref,
    }
    return [{**{k: v[part] for k, v in whole.items()}, "num_items_in_batch": mask.sum()} for part in PARTS]
