"""The executable definition of the distillation divergences: plain PyTorch, derivatives by autograd."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .axes import REMAINDER_FLOOR, Divergence

#: rows whose vocabulary-sized temporaries exist at one time
ROW_CHUNK = 256


def divergence(
    student: Tensor,
    teacher: Tensor,
    active: Tensor,
    kind: int,
    beta: float,
    temperature: float,
    teacher_temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(divergence, student entropy, teacher entropy) of every row, (N,) each; rows that are not active give 0.

    student, teacher: logits (N, V). The entropies are detached. Row chunks are recomputed in backward, so that the
    extra memory does not grow with N.
    """
    parts = []
    for start in range(0, max(student.shape[0], 1), ROW_CHUNK):
        rows = slice(start, start + ROW_CHUNK)
        args = (student[rows], teacher[rows], active[rows], kind, beta, temperature, teacher_temperature)
        if torch.is_grad_enabled() and student.requires_grad and student.shape[0] > ROW_CHUNK:
            parts.append(checkpoint(_rows, *args, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_rows(*args))
    value, student_entropy, teacher_entropy = (torch.cat(column) for column in zip(*parts, strict=True))
    return value, student_entropy.detach(), teacher_entropy.detach()


def top_k_divergence(
    student: Tensor, ids: Tensor, logps: Tensor, active: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward KL over the teacher's K tokens and one bucket of all others; ids and logps (N, K)."""
    log_p = _log_softmax(student, active, temperature)
    log_q = torch.where(active[:, None], logps.to(log_p.dtype), 0.0)
    ids = torch.where(active[:, None] & (log_q != -torch.inf), ids, 0)
    value, teacher_entropy = bucketed_kl(log_p.gather(-1, ids), log_q)
    student_entropy = -_expectation(log_p, log_p)
    return tuple(torch.where(active, v, 0.0) for v in (value, student_entropy.detach(), teacher_entropy))  # type: ignore[return-value]


def bucketed_kl(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """(KL, teacher entropy) over K tokens, log-probs (N, K), and the bucket with the rest of either distribution.

    A token of log_q = -inf is part of the rest.
    """
    q = log_q.exp()
    q_rest = (1.0 - q.sum(-1)).clamp(min=0.0)
    p_rest = (1.0 - torch.where(log_q == -torch.inf, 0.0, log_p.exp()).sum(-1)).clamp(min=REMAINDER_FLOOR)
    log_q_rest = q_rest.clamp(min=REMAINDER_FLOOR).log()
    rest = q_rest * (log_q_rest - p_rest.log())
    entropy = -_expectation(log_q, log_q) - q_rest * log_q_rest
    return _expectation(log_q, log_q, log_p) + rest, entropy


def _rows(
    student: Tensor,
    teacher: Tensor,
    active: Tensor,
    kind: int,
    beta: float,
    temperature: float,
    teacher_temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:
    log_p = _log_softmax(student, active, temperature)
    log_q = _log_softmax(teacher.detach().to(log_p.dtype), active, teacher_temperature)
    if kind == Divergence.REVERSE_KL:
        value = _expectation(log_p, log_p, log_q)
    elif kind == Divergence.FORWARD_KL:
        value = _expectation(log_q, log_q, log_p)
    elif kind == Divergence.JSD:
        # where both are 0 the derivative of logaddexp would be NaN
        neither = (log_q == -torch.inf) & (log_p == -torch.inf)
        log_a, log_b = (torch.where(neither, 0.0, v) for v in (log_q + math.log(beta), log_p + math.log1p(-beta)))
        log_m = torch.where(neither, -torch.inf, torch.logaddexp(log_a, log_b))
        value = beta * _expectation(log_q, log_q, log_m) + (1.0 - beta) * _expectation(log_p, log_p, log_m)
    else:
        raise ValueError(f"kind: no divergence has the code {kind}")
    entropies = (-_expectation(log_p, log_p), -_expectation(log_q, log_q))
    return tuple(torch.where(active, v, 0.0) for v in (value, *entropies))  # type: ignore[return-value]


def _log_softmax(logits: Tensor, active: Tensor, temperature: float) -> Tensor:
    x = torch.where(active[:, None], logits, 0.0)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    # the maximum goes first: a large common offset then costs no precision
    return torch.log_softmax((x - x.detach().amax(-1, keepdim=True)) / temperature, -1)


def _expectation(log_w: Tensor, log_a: Tensor, log_b: Tensor | None = None) -> Tensor:
    """sum of exp(log_w)*(log_a - log_b): a column without weight adds 0, one that only b excludes adds inf."""
    out = log_w == -torch.inf
    w, difference = torch.where(out, 0.0, log_w).exp(), torch.where(out, 0.0, log_a)
    if log_b is not None:
        endless = ~out & (log_b == -torch.inf)
        difference = difference - torch.where(out | endless, 0.0, log_b)
        return torch.where(endless, torch.inf, torch.where(out, 0.0, w * difference)).sum(-1)
    return torch.where(out, 0.0, w * difference).sum(-1)
