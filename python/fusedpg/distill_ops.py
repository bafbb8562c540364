"""The distillation kernels as `torch.library` custom operators, for teachers with logits and with top-k log-probs.

`student` and `teacher` are logits (B, T, V) with any row strides, `w` is (B*T,): rows of weight 0 are not read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import dispatch, ops
from .axes import REMAINDER_FLOOR

_OPTIONS = "int kind, float beta, float temperature, float teacher_temperature"


def weighted_sum(w: Tensor, values: Tensor) -> Tensor:
    """sum of w*values in fp64, in the values' dtype; nothing is read where w is 0."""
    return torch.where(w != 0, w * values, 0.0).sum(dtype=torch.float64).to(values.dtype)


# ------------------------------------------------------------------ a teacher's logits


def _distill_kernel(student: Tensor, teacher: Tensor, w: Tensor, scale: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """(loss, per_token, student entropy, teacher entropy, numerator, d student or empty).

    loss = numerator*scale. With `form_grad` the gradient is written while each row is hot.
    """
    *options, form_grad, backend = args
    grad = torch.empty(student.shape if form_grad else 0, dtype=student.dtype, device=student.device)
    rows = dispatch.native(backend).distill(student, teacher, w, scale, *options, grad if form_grad else None)
    numerator = weighted_sum(w, rows[0])
    return (numerator * scale, *rows, numerator, grad)


def _distill_fake(student: Tensor, teacher: Tensor, w: Tensor, scale: Tensor, *args: Any) -> tuple[Tensor, ...]:
    grad = torch.empty(student.shape if args[-2] else 0, dtype=student.dtype, device=student.device)
    rows = (torch.empty_like(w) for _ in range(3))
    return (torch.empty_like(scale), *rows, torch.empty_like(scale), grad)


distill = ops._define(
    "distill",
    f"(Tensor student, Tensor teacher, Tensor w, Tensor scale, {_OPTIONS}, bool form_grad, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _distill_kernel,
    _distill_fake,
)


def _distill_grad_kernel(student: Tensor, teacher: Tensor, w: Tensor, scale: Tensor, *args: Any) -> Tensor:
    """d student of scale*sum(w*divergence), from the logits alone."""
    *options, backend = args
    grad = torch.empty(student.shape, dtype=student.dtype, device=student.device)
    dispatch.native(backend).distill(student, teacher, w, scale, *options, grad)
    return grad


distill_grad = ops._define(
    "distill_grad",
    f"(Tensor student, Tensor teacher, Tensor w, Tensor scale, {_OPTIONS}, str backend) -> Tensor",
    _distill_grad_kernel,
    lambda student, *_: torch.empty(student.shape, dtype=student.dtype, device=student.device),
)


def _save_distill(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, kind, beta, temperature, teacher_temperature, form_grad, backend = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)
    ctx.plain = (kind, beta, temperature, teacher_temperature, backend)
    ctx.grad = output[-1] if form_grad else None


def _backward_distill(ctx: Any, g_loss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    none = (None,) * 9
    if g_loss is None:
        return (None, *none)
    student, teacher, w, scale = ctx.saved_tensors
    grad, ctx.grad = ctx.grad, None
    if grad is not None:  # handed out once; a retained graph computes the next one afresh
        return (ops.rescale_(grad, g_loss, ctx.plain[-1]), *none)
    return (distill_grad(student, teacher, w, scale * g_loss, *ctx.plain), *none)


ops._differentiate(distill, _save_distill, _backward_distill)


# ------------------------------------------------------------------ a teacher's top-k log-probs


def _top_k_kernel(
    student: Tensor, ids: Tensor, logps: Tensor, w: Tensor, scale: Tensor, temperature: float, backend: str
) -> tuple[Tensor, ...]:
    """(loss, per_token, student entropy, teacher entropy, numerator, row_max, log_sum, c, dz).

    The gradient of loss is -c*p/temperature everywhere but at the ids, where it is dz: (N,) and (N, K).
    """
    active = w != 0
    first = torch.where(active, ids[:, 0], 0)
    _, entropy, row_max, log_sum = dispatch.native(backend).logprob_forward(
        student, first, active, None, temperature, 0.0, 1.0, True
    )
    picked = torch.where(active[:, None], _at(student, ids, active), 0.0).to(w.dtype)
    log_p = torch.where(active[:, None], (picked - row_max[:, None]) / temperature - log_sum[:, None], 0.0)
    log_q = torch.where(active[:, None], logps.to(w.dtype), 0.0)
    p, q = log_p.exp(), log_q.exp()
    p_sum, q_sum = p.sum(-1), q.sum(-1)
    p_rest, q_rest = (1.0 - p_sum).clamp(min=REMAINDER_FLOOR), (1.0 - q_sum).clamp(min=0.0)
    log_q_rest = q_rest.clamp(min=REMAINDER_FLOOR).log()
    # a token without probability in the teacher adds 0, one without in the student alone inf
    terms = torch.where(log_q == -torch.inf, 0.0, torch.where(log_p == -torch.inf, torch.inf, q * (log_q - log_p)))
    value = terms.sum(-1) + q_rest * (log_q_rest - p_rest.log())
    surprise = torch.where(log_q == -torch.inf, 0.0, q * log_q).sum(-1)
    # d/dz: -q + p*(sum of q) of the listed tokens, and the bucket's q_rest/p_rest times dp/dz of all of them together
    pull = torch.where(1.0 - p_sum >= REMAINDER_FLOOR, q_rest / p_rest, 0.0)
    weight = w * scale
    dz = weight[:, None] * (p * (q_sum + pull * (1.0 - p_sum))[:, None] - q) / temperature
    c = -weight * (q_sum - pull * p_sum)
    value, teacher_entropy, c = (torch.where(active, v, 0.0) for v in (value, -surprise - q_rest * log_q_rest, c))
    dz = torch.where(active[:, None], dz, 0.0)
    numerator = weighted_sum(w, value)
    return numerator * scale, value, entropy, teacher_entropy, numerator, row_max, log_sum, c, dz


def _at(student: Tensor, ids: Tensor, active: Tensor) -> Tensor:
    """The student's logits at the ids, (N, K)."""
    safe = torch.where(active[:, None], ids, 0)
    return student.gather(-1, safe.view(*student.shape[:2], ids.shape[1])).view(ids.shape)


def _top_k_fake(student: Tensor, ids: Tensor, logps: Tensor, w: Tensor, scale: Tensor, *_: Any) -> tuple[Tensor, ...]:
    row = lambda: torch.empty_like(w)  # noqa: E731
    zero = lambda: torch.empty_like(scale)  # noqa: E731
    return zero(), row(), row(), row(), zero(), row(), row(), row(), torch.empty_like(ids, dtype=w.dtype)


top_k = ops._define(
    "distill_top_k",
    "(Tensor student, Tensor ids, Tensor logps, Tensor w, Tensor scale, float temperature, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _top_k_kernel,
    _top_k_fake,
)


def _top_k_grad_kernel(student: Tensor, ids: Tensor, *args: Any) -> Tensor:
    """d student: the rows' share of p from the log-prob kernel, then the listed columns over it."""
    row_max, log_sum, c, dz, temperature, backend = args
    grad = torch.empty(student.shape, dtype=student.dtype, device=student.device)
    live = c != 0
    first = torch.where(live, ids[:, 0], 0)
    options = (None, temperature, 0.0, 1.0)
    dispatch.native(backend).logprob_backward(student, first, row_max, log_sum, None, c, None, *options, grad)
    listed = torch.where(((dz != 0) | live[:, None]).any(-1, keepdim=True), ids, 0)
    listed = listed.view(*student.shape[:2], ids.shape[1])
    return grad.scatter_(-1, listed, dz.to(grad.dtype).view(listed.shape))


top_k_grad = ops._define(
    "distill_top_k_grad",
    "(Tensor student, Tensor ids, Tensor row_max, Tensor log_sum, Tensor c, Tensor dz, float temperature, str backend)"
    " -> Tensor",
    _top_k_grad_kernel,
    lambda student, *_: torch.empty(student.shape, dtype=student.dtype, device=student.device),
)


def _save_top_k(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    student, ids, _, _, _, *ctx.plain = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(student, ids, *output[5:])


def _backward_top_k(ctx: Any, g_loss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    none = (None,) * 6
    if g_loss is None:
        return (None, *none)
    student, ids, row_max, log_sum, c, dz = ctx.saved_tensors
    c, dz = ops._scaled(c, g_loss), ops._scaled(dz, g_loss)
    return (top_k_grad(student, ids, row_max, log_sum, c, dz, *ctx.plain), *none)


ops._differentiate(top_k, _save_top_k, _backward_top_k)
