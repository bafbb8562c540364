"""torchforge's f(logits, **targets): its GRPO recipe, a mean over each micro-batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...integrations.torchforge import logits_loss
from ..cases import PolicyBatch
from ..rows import Row
from .batches import KINDS, Outcome, differentiated, parts_of, step_batch, summed
from .compare import TRANSCRIBED, Largest

VERSION = "contract"
VOCAB, PROMPT = 7, 3
BETA = 0.1


def inputs(b: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """(logits, targets) of prompts and responses."""
    g = torch.Generator().manual_seed(0)
    rows, length = b.mask.shape
    logits = torch.randn(rows, PROMPT + length, VOCAB, generator=g)
    response = torch.randint(0, VOCAB, (rows, length), generator=g)
    p = torch.log_softmax(logits[:, PROMPT - 1 : -1], -1).gather(-1, response[..., None])[..., 0]
    targets = {
        "response": response,
        "ref_logprobs": p + 0.1 * torch.randn(p.shape, generator=g),
        "advantages": b.advantages[:, None],
        "padding_mask": b.mask,
    }
    return logits, targets


def simple_grpo(
    logits: Tensor, response: Tensor, ref_logprobs: Tensor, advantages: Tensor, padding_mask: Tensor
) -> Tensor:
    """torchforge's recipe: on-policy GRPO with k3, the mean of the rows' means over rows with a token."""
    logp = torch.log_softmax(logits[:, -response.shape[1] - 1 : -1], -1).gather(-1, response[..., None])[..., 0]
    kl = (ref_logprobs - logp).exp() - (ref_logprobs - logp) - 1
    x = -((logp - logp.detach()).exp() * advantages - BETA * kl) * padding_mask
    tokens = padding_mask.sum(1)
    return (x.sum(1) / tokens.clamp(min=1)).sum() / (tokens > 0).sum().clamp(min=1)


def in_fp64(targets: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same stored values."""
    return {k: v.double() if v.is_floating_point() else v for k, v in targets.items()}


def step(b: PolicyBatch, backend: str = "auto") -> Outcome:
    """The sum of the micro-batches' losses."""
    fn = logits_loss("grpo", kl_coef=BETA, backend=backend)

    def one(part: PolicyBatch) -> Outcome:
        logits, targets = inputs(part)
        leaf = logits.requires_grad_()
        return differentiated(fn(leaf, **targets), leaf)

    return summed(map(one, parts_of(b)))


def want(b: PolicyBatch) -> Outcome:
    """The recipe over the same micro-batches in fp64."""

    def one(part: PolicyBatch) -> Outcome:
        logits, targets = inputs(part)
        leaf = logits.double().requires_grad_()
        return differentiated(simple_grpo(leaf, **in_fp64(targets)), leaf)

    return summed(map(one, parts_of(b)))


def rows(backend: str = "auto") -> Iterator[Row]:
    """The recipe's row."""
    largest = Largest()
    for kind in KINDS:
        b = step_batch(kind, False)
        largest.note(step(b, backend), want(b))
    yield largest.row("torchforge", VERSION, "grpo", "", TRANSCRIBED)
