"""Batches of the drop-ins' certification: six rows in three micro-batches, the last of them without a token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cases import PolicyBatch, make_policy_batch
from ..transcription import Case, Fields

#: what a trainer's micro-batch looks like: ragged, with holes, with a row without a token
KINDS = ("ragged", "holes", "masked-row")
#: rows of the micro-batches of a step
PARTS = (slice(0, 2), slice(2, 4), slice(4, 6))
NAMES = ("logp", "logp_old", "logp_ref", "logp_rollout")


class Outcome(NamedTuple):
    """A loss and its gradient by the log-probs (or by the logits) of a step."""

    loss: Tensor
    grad: Tensor


def differentiated(value: Tensor, leaf: Tensor) -> Outcome:
    """A loss and its gradient by one leaf."""
    (grad,) = torch.autograd.grad(value, leaf)
    return Outcome(value.detach(), grad)


def summed(outcomes: Iterable[Outcome]) -> Outcome:
    """A step from its micro-batches: the sum of the losses, the gradients' rows one after the other."""
    loss, grads = torch.zeros(()), []
    for one in outcomes:
        loss = loss + one.loss
        grads.append(one.grad)
    return Outcome(loss, torch.cat(grads))


@dataclass
class Lists:
    """The rows of a batch as ragged 1-D tensors, one a sample; every tensor of NAMES, `advantages` and `mask`."""

    logp: list[Tensor]
    logp_old: list[Tensor]
    logp_ref: list[Tensor]
    logp_rollout: list[Tensor]
    advantages: list[Tensor]
    mask: list[Tensor]


def batch(kind: str = "holes", per_token: bool = False, empty: bool = False, rows: int = 4) -> PolicyBatch:
    """Finite rubbish at masked places; with `empty` no place is selected."""
    made = make_policy_batch(kind, rows=rows)
    if empty:
        made.mask[:] = False
    if not per_token:
        made.token_advantages[:] = made.advantages[:, None]
    return made


def step_batch(kind: str, per_token: bool) -> PolicyBatch:
    """The batch of a step, the rows of `PARTS`."""
    made = batch(kind, per_token, rows=6)
    made.mask[PARTS[-1]] = False
    return made


def part_of(b: PolicyBatch, rows: slice) -> PolicyBatch:
    """Some rows, sharing no memory with the others' gradients."""
    cut = {name: value[rows].clone() for name, value in vars(b).items() if isinstance(value, Tensor)}
    return replace(b, **cut)  # type: ignore[arg-type]


def parts_of(b: PolicyBatch) -> list[PolicyBatch]:
    """The micro-batches of a step."""
    return [part_of(b, rows) for rows in PARTS]


def lists(b: PolicyBatch) -> Lists:
    """Rows cut after their last selected place: holes stay, a masked row is an empty sample."""
    lengths = [int(m.nonzero().max()) + 1 if m.any() else 0 for m in b.mask]
    cut = lambda t: [row[:n].clone() for row, n in zip(t, lengths, strict=True)]  # noqa: E731
    own = {name: cut(getattr(b, name)) for name in NAMES}
    return Lists(**own, advantages=cut(b.token_advantages), mask=cut(b.mask))


def two_way(logp: Tensor) -> Tensor:
    """Logits (..., 2) of a vocabulary of two whose first token has this log-prob."""
    return torch.stack([logp, torch.log1p(-logp.exp())], -1)


def rows_grad(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """Gradients of ragged samples as (B, T)."""
    full = torch.zeros_like(like)
    for row, t in zip(full, tensors, strict=True):
        assert t.grad is not None
        row[: len(t)] = t.grad
    return full


def fields(b: PolicyBatch, logp: Tensor, obs: Tensor | None = None, entropy: Tensor | None = None) -> Fields:
    """The fp64 fields of a formula; `logp` is the leaf."""
    pick = lambda t, on=b.mask: torch.where(on, t.double(), 0.0)  # noqa: E731
    obs = torch.zeros_like(b.mask) if obs is None else obs
    return Fields(
        logp=pick(logp, b.mask | obs),
        logp_old=pick(b.logp_old),
        logp_ref=pick(b.logp_ref),
        logp_rollout=pick(b.logp_rollout),
        advantages=pick(b.token_advantages),
        mask=b.mask.double(),
        obs_mask=obs.double(),
        entropy=pick(-0.3 * logp if entropy is None else entropy),
    )


def truth(b: PolicyBatch, formula: Callable[..., Tensor], obs: Tensor | None = None, **counts: Any) -> Outcome:
    """A formula in fp64 over a batch: its value, and its gradient (B, T)."""
    leaf = b.logp.double().requires_grad_()
    return differentiated(formula(fields(b, leaf, obs), **counts), leaf)


def truth_of_logits(b: PolicyBatch, case: Case, temperature: float = 1.0, **counts: Any) -> Outcome:
    """The same by the logits of `two_way`, entropy included; gradient (B, T, 2)."""
    leaf = (temperature * two_way(b.logp)).double().requires_grad_()
    p = torch.log_softmax(leaf / temperature, -1)
    return differentiated(case.formula(fields(b, p[..., 0], entropy=-(p.exp() * p).sum(-1)), **counts), leaf)
