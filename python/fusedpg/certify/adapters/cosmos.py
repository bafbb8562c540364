"""cosmos-framework's objective over the model's forward, summed by its weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from ...integrations.cosmos import build_objective
from ...metric_adapter import OBJECTIVE_WEIGHT_SUM
from ...presets._cosmos import RECIPES, VERSION
from ..cases import PolicyBatch
from ..rows import Row
from ..transcribed_cosmos import cases
from ..transcription import Case
from .batches import Outcome, parts_of, truth_of_logits, two_way
from .compare import rows_of_steps

#: those whose counts are the batch's own
CASES = [case for case in cases() if case.counts is None]
CONTEXT = SimpleNamespace(name_or_path="policy", max_response_length=11)


def config(case: Case) -> SimpleNamespace:
    """The framework's `rl` section of a case, with keys that are the trainer's."""
    surrogate = "legacy_pg" if case.loss == "legacy_pg" else "clipped"
    options = {**RECIPES.get(case.loss, {}), **case.options}
    options.pop("max_response_length", None)
    return SimpleNamespace(grpo_surrogate=surrogate, max_steps=3, save_every=0, resume="off", **options)


def inputs(b: PolicyBatch, per_token: bool = False) -> dict[str, Any]:
    """The trainer's batch."""
    kept = {name: getattr(b, name) for name in ("logp_old", "logp_ref", "logp_rollout", "mask")}
    kept["advantages" if per_token else "sequence_advantages"] = b.token_advantages if per_token else b.advantages
    return {"targets": torch.zeros_like(b.mask, dtype=torch.int64), **kept}


def step(case: Case, b: PolicyBatch, backend: str = "auto") -> Outcome:
    """TOKEN_SUM: losses times weights, divided once; the objective takes the backend of its tensors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="kl_beta|importance_sampling|epsilon")
        objective = build_objective(config(case), CONTEXT)
    numerator, weights, grads = torch.zeros(()), torch.zeros(()), []
    for part in parts_of(b):
        logits = two_way(part.logp).requires_grad_()
        loss, metrics = objective.fn(lambda given, z=logits: z, inputs(part, case.token_advantages))
        weight = metrics[OBJECTIVE_WEIGHT_SUM]
        (loss * weight).backward()
        numerator, weights = numerator + loss.detach() * weight, weights + weight
        assert logits.grad is not None
        grads.append(logits.grad)
    return Outcome(numerator / weights, torch.cat(grads) / weights)


def want(case: Case, b: PolicyBatch) -> Outcome:
    """The unsplit step."""
    return truth_of_logits(b, case)


def rows(backend: str = "auto") -> Iterator[Row]:
    """One row a surrogate or recipe."""
    yield from rows_of_steps("cosmos", VERSION, CASES, step, want, backend)
