"""AReaL's `loss_fn` over packed micro-batches, weighed as its engine weighs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...integrations.areal import actor_loss, loss_weight
from ...presets._areal import VERSION
from ..cases import PolicyBatch
from ..rows import Row
from ..transcribed_areal import CASES
from ..transcription import Case
from .batches import NAMES, Outcome, lists, parts_of, truth
from .compare import rows_of_steps


def micro_batch(b: PolicyBatch) -> tuple[Tensor, dict[str, Any]]:
    """(leaf, input_data), packed with labels rolled by -1: a prompt token in front, the last place wraps around."""
    ls = lists(b)
    ones = torch.ones(1)
    pack = lambda rows, first: torch.cat([torch.cat([first, row]) for row in rows])  # noqa: E731
    packed = {name: pack(getattr(ls, name), ones * 5).roll(-1) for name in NAMES}
    lengths = torch.tensor([len(t) + 1 for t in ls.logp])
    data = {
        "logprobs": packed["logp_rollout"],
        "prox_logp": packed["logp_old"],
        "advantages": pack(ls.advantages, ones * 7).roll(-1),
        "loss_mask": pack([m.float() for m in ls.mask], ones * 0).roll(-1),
        "cu_seqlens": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int(),
    }
    return packed["logp"].requires_grad_(), data


def as_rows(grad: Tensor, data: dict[str, Any], like: Tensor) -> Tensor:
    """A packed gradient as (B, T)."""
    full = torch.zeros_like(like)
    bounds = data["cu_seqlens"].tolist()
    for row, start, end in zip(full, bounds[:-1], bounds[1:], strict=True):
        row[: end - start - 1] = grad[start : end - 1]
    return full


def step(case: Case, b: PolicyBatch, backend: str = "auto") -> Outcome:
    """The engine's sum of micro-batches, each times its share of the step's weight."""
    fn = actor_loss(case.loss, backend=backend, **case.options)
    total, loss, grads = float(b.mask.sum()), torch.zeros(()), []
    for part in parts_of(b):
        leaf, data = micro_batch(part)
        one = fn(leaf, None, data, vocab_min_logits=None, vocab_max_logits=None) * (loss_weight(data) / total)
        one.backward()
        loss = loss + one.detach()
        assert leaf.grad is not None
        grads.append(as_rows(leaf.grad, data, part.logp))
    return Outcome(loss, torch.cat(grads))


def want(case: Case, b: PolicyBatch) -> Outcome:
    """The mean over the step's tokens."""
    return truth(b, case.formula, tokens=float(b.mask.sum()))


def rows(backend: str = "auto") -> Iterator[Row]:
    """One row a loss."""
    yield from rows_of_steps("areal", VERSION, CASES, step, want, backend)
