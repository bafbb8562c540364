"""prime-rl's custom loss: LossInputs of one sequence to LossOutputs, summed over a step's sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...integrations.prime_rl import fused_loss
from ...presets._prime_rl import VERSION
from ..cases import PolicyBatch
from ..rows import Row
from ..transcribed_prime_rl import CASES as EVERY
from ..transcription import Case
from .batches import Outcome, lists, rows_grad, truth
from .compare import rows_of_steps, stand_in

#: the sum, which prime-rl divides
CASES = [case for case in EVERY if case.counts is None]
MODULE = "prime_rl.trainer.rl.loss"


@dataclass
class LossInputs:
    """By prime-rl's contract."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None


@dataclass
class LossOutputs:
    """By prime-rl's contract."""

    loss: Tensor
    metrics: dict[str, Any]


MEMBERS = {"LossOutputs": LossOutputs}


def sequences(b: PolicyBatch, weights: Tensor | None = None) -> tuple[list[LossInputs], list[Tensor]]:
    """One LossInputs a sequence; the leaves are the trainer's log-probs."""
    ls = lists(b)
    leaves = [t.clone().requires_grad_() for t in ls.logp]
    rows = zip(leaves, ls.logp_rollout, ls.logp_ref, ls.advantages, ls.mask, strict=True)
    return [LossInputs(*row, weights) for row in rows], leaves


def step(case: Case, b: PolicyBatch, backend: str = "auto") -> Outcome:
    """The sum over sequences, empty ones too."""
    inputs, leaves = sequences(b)
    total = torch.zeros(())
    for one in inputs:
        total = total + fused_loss(one, case.loss, backend, **case.options).loss
    total.backward()
    return Outcome(total.detach(), rows_grad(leaves, b.logp))


def want(case: Case, b: PolicyBatch) -> Outcome:
    """The unsplit step."""
    return truth(b, case.formula)


def rows(backend: str = "auto") -> Iterator[Row]:
    """One row a loss."""
    with stand_in(MODULE, **MEMBERS):
        yield from rows_of_steps("prime_rl", VERSION, CASES, step, want, backend)
