"""What is true of a head in fp64: log-probs of all rows, and the gradients of some rows of hidden and weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from .bench_logits import Tolerance
from .timing import Outcome, Verdict, judged

#: rows of the weight that are compared besides the targets of the compared rows of hidden
OTHER_COLUMNS = 4
BLOCK = 64


@dataclass(frozen=True)
class Truth:
    """`logp` (N,); `rows` (R,) of hidden, with the softmax-weighted mean of the weight `mean` (R, D); `columns` (K,) of
    the vocabulary, with their probabilities `probs` (N, K).

    From these follows the gradient of any loss whose dL/dlogp is known, without any logits.
    """

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    logp: Tensor
    rows: Tensor
    mean: Tensor
    columns: Tensor
    probs: Tensor

    def first(self, count: int) -> Truth:
        """The same for the first rows."""
        some = self.rows < count
        cut = {name: getattr(self, name)[:count] for name in ("hidden", "targets", "logp", "probs")}
        return replace(self, **cut, rows=self.rows[some], mean=self.mean[some])

    def gradients(self, c: Tensor) -> tuple[Tensor, Tensor]:
        """(d hidden at `rows`, d weight at `columns`) for c = dL/dlogp: logits get c (onehot - p)."""
        d_hidden = c[self.rows, None] * (self.weight[self.targets[self.rows]].double() - self.mean)
        d_logits = c[:, None] * ((self.targets[:, None] == self.columns).double() - self.probs)
        return d_hidden, d_logits.t() @ self.hidden.double()


def random_head(
    tokens: int, vocab: int, width: int, dtype: torch.dtype, rng: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden states, weight, targets) on the generator's device; the logits have std 3."""
    hidden = torch.randn(tokens, width, generator=rng, device=rng.device).to(dtype)
    weight = torch.empty(vocab, width, dtype=dtype, device=rng.device)
    for rows in weight.split(8192):
        rows.copy_(torch.randn(rows.shape, generator=rng, device=rng.device) * (3 / width**0.5))
    return hidden, weight, torch.randint(0, vocab, (tokens,), generator=rng, device=rng.device)


def make_truth(hidden: Tensor, weight: Tensor, targets: Tensor) -> Truth:
    """One product in fp64, a block of rows at a time."""
    count, vocab = hidden.shape[0], weight.shape[0]
    rows = torch.tensor([0, (count - 1) // 3, (count - 1) // 2, count - 1], device=hidden.device).unique()
    others = torch.arange(OTHER_COLUMNS, device=hidden.device) * (vocab // OTHER_COLUMNS)
    columns = torch.cat([targets[rows], others]).unique()
    logp, probs = [], []
    mean = hidden.new_zeros(rows.numel(), hidden.shape[1], dtype=torch.float64)
    wide = weight.double().t()
    for top in range(0, count, BLOCK):
        ids = targets[top : top + BLOCK]
        log_probs = torch.log_softmax(hidden[top : top + BLOCK].double() @ wide, -1)
        logp.append(log_probs.gather(-1, ids[:, None]).squeeze(-1))
        probs.append(log_probs[:, columns].exp())
        here = (rows >= top) & (rows < top + BLOCK)
        mean[here] = log_probs[rows[here] - top].exp() @ wide.t()
    return Truth(hidden, weight, targets, torch.cat(logp), rows, mean, columns, torch.cat(probs))


def loss_check(
    truth: Truth, function: Callable[[Tensor], Tensor], tolerance: Tolerance
) -> Callable[[Outcome], Verdict]:
    """Judges a loss that is a function of the log-probs, with its gradients of hidden and weight."""
    leaf = truth.logp.clone().requires_grad_()
    loss = function(leaf)
    (c,) = torch.autograd.grad(loss, leaf)
    return partial(_judge, truth, loss.detach(), truth.gradients(c), tolerance)


def logp_check(truth: Truth, tolerance: float) -> Callable[[Outcome], Verdict]:
    """Judges log-probs, which stand in the outcome's loss."""
    return partial(_judge_logp, truth.logp, tolerance)


def _judge(
    truth: Truth, loss: Tensor, gradients: tuple[Tensor, Tensor], tolerance: Tolerance, outcome: Outcome
) -> Verdict:
    assert outcome.loss is not None
    assert outcome.grad is not None
    assert outcome.grad_weight is not None
    got = (outcome.grad[truth.rows], outcome.grad_weight[truth.columns])
    loss_error = (outcome.loss.double() - loss).abs() / loss.abs().clamp(min=1)
    errors = {"loss": loss_error.item()}
    for name, mine, true in zip(("d hidden", "d weight"), got, gradients, strict=True):
        errors[name] = _of_largest(mine.double(), true)
    limits = {"loss": tolerance.loss, "d hidden": tolerance.grad, "d weight": tolerance.grad}
    return judged(errors, limits)


def _judge_logp(logp: Tensor, tolerance: float, outcome: Outcome) -> Verdict:
    assert outcome.loss is not None
    return judged({"logp": (outcome.loss.double() - logp).abs().max().item()}, {"logp": tolerance})


def _of_largest(got: Tensor, true: Tensor) -> float:
    """Largest error of a row over the row's largest entry; of the whole, where a row is zero."""
    largest = true.abs().amax(-1)
    scale = torch.where(largest > 0, largest, true.abs().max().clamp(min=torch.finfo(true.dtype).tiny))
    return float(((got - true).abs().amax(-1) / scale).max())
