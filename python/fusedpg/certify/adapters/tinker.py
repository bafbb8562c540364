"""Tinker's `forward_backward_custom`: the loss over its data, and the weights that its client sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...integrations.tinker import custom_loss, own_loss
from ...presets._tinker import VERSION
from ..cases import PolicyBatch
from ..rows import Row
from ..transcribed_tinker import cases
from ..transcription import Case
from .batches import Lists, Outcome, lists, parts_of, rows_grad, summed, truth
from .compare import rows_of_steps

CASES = list(cases())


class TensorData:
    """The SDK's type, by its contract."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def to_torch(self) -> Tensor:
        """Of the contract."""
        return torch.as_tensor(self.values)


def datums(
    ls: Lists, keys: Sequence[str] = ("mask",), wrap: Callable[[Tensor], Any] = TensorData
) -> list[SimpleNamespace]:
    """The data of a call, with some of its optional fields."""
    names = {"logprobs": ls.logp_rollout, "advantages": ls.advantages, "mask": ls.mask, "ref_logprobs": ls.logp_ref}
    names["old_logprobs"] = ls.logp_old
    chosen = ("logprobs", "advantages", *keys)
    return [SimpleNamespace(loss_fn_inputs={key: wrap(names[key][i]) for key in chosen}) for i in range(len(ls.logp))]


def client(loss_fn: Callable[..., Any], data: list[Any], rows: Sequence[Tensor]) -> tuple[Tensor, dict, list[Tensor]]:
    """What the client does with a loss: (loss, metrics, weights of the cross-entropy that it sends)."""
    leaves = [row.clone().detach().requires_grad_() for row in rows]
    loss, metrics = loss_fn(data, leaves)
    loss.backward()
    return loss, metrics, [-_grad(leaf) for leaf in leaves]


def _grad(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def step(case: Case, b: PolicyBatch, backend: str = "auto") -> Outcome:
    """The sum of the calls of a step; the gradient is that of the client's cross-entropy."""
    loss_fn = custom_loss(own_loss(case.loss, **case.options), backend=backend)

    def one(part: PolicyBatch) -> Outcome:
        ls = lists(part)
        loss, _, weights = client(loss_fn, datums(ls), ls.logp)
        for row, weight in zip(ls.logp, weights, strict=True):
            row.grad = -weight
        return Outcome(loss.detach(), rows_grad(ls.logp, part.logp))

    return summed(map(one, parts_of(b)))


def want(case: Case, b: PolicyBatch) -> Outcome:
    """The unsplit step."""
    return truth(b, case.formula)


def rows(backend: str = "auto") -> Iterator[Row]:
    """One row a loss."""
    yield from rows_of_steps("tinker", VERSION, CASES, step, want, backend)
