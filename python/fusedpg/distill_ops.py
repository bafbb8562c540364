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
    """(loss, per_token, student entropy, teacher entropy, numerator, row_max, log_sum, ids, c, dz).

    The gradient of loss is -c*p/temperature, (N,), but dz, (N, K), at the ids that are returned: those that are not in
    the list (log-prob -inf) are replaced by the row's most likely one.
    """
    active = w != 0
    listed = active[:, None] & (logps != -torch.inf)
    top = torch.where(listed, logps, -torch.inf).argmax(-1, keepdim=True)
    ids = torch.where(listed, ids, 0)
    ids = torch.where(listed, ids, ids.gather(-1, top))
    first = ids[:, 0].clone(memory_format=torch.contiguous_format)
    _, student_entropy, row_max, log_sum = dispatch.native(backend).logprob_forward(
        student, first, active, None, temperature, 0.0, 1.0, True
    )
    picked = student.gather(-1, ids.view(*student.shape[:2], ids.shape[1])).view(ids.shape).to(w.dtype)
    log_p = torch.where(listed, (picked - row_max[:, None]) / temperature - log_sum[:, None], 0.0)
    log_q = torch.where(listed, logps.to(w.dtype), 0.0)
    p, q = (torch.where(listed, v.exp(), 0.0) for v in (log_p, log_q))
    p_sum, q_sum = p.sum(-1), q.sum(-1)
    p_rest, q_rest = (1.0 - p_sum).clamp(min=REMAINDER_FLOOR), (1.0 - q_sum).clamp(min=0.0)
    log_q_rest = q_rest.clamp(min=REMAINDER_FLOOR).log()
    # a listed token without probability in the student makes the divergence inf, whatever its weight
    terms = torch.where(log_p == -torch.inf, torch.inf, q * (log_q - log_p))
    value = terms.sum(-1) + q_rest * (log_q_rest - p_rest.log())
    teacher_entropy = -(q * log_q).sum(-1) - q_rest * log_q_rest
    # d/dz of -sum q log p is q_sum*p - q; of the bucket's, q_rest/p_rest times dp/dz of the listed tokens together
    pull = torch.where(1.0 - p_sum >= REMAINDER_FLOOR, q_rest / p_rest, 0.0)
    weight, rest = w * scale, q_sum - pull * p_sum
    dz = weight[:, None] * (p * (rest + pull)[:, None] - q) / temperature
    dz = torch.where(listed, dz, dz.gather(-1, top))
    rows = (value, teacher_entropy, -weight * rest)
    value, teacher_entropy, c = (torch.where(active, v, 0.0) for v in rows)
    dz = torch.where(active[:, None], dz, 0.0)
    numerator = weighted_sum(w, value)
    return numerator * scale, value, student_entropy, teacher_entropy, numerator, row_max, log_sum, ids, c, dz


def _top_k_fake(student: Tensor, ids: Tensor, logps: Tensor, w: Tensor, scale: Tensor, *_: Any) -> tuple[Tensor, ...]:
    row = lambda: torch.empty_like(w)  # noqa: E731
    zero = lambda: torch.empty_like(scale)  # noqa: E731
    listed = (torch.empty_like(ids), row(), torch.empty_like(ids, dtype=w.dtype))
    return (zero(), row(), row(), row(), zero(), row(), row(), *listed)


top_k = ops._define(
    "distill_top_k",
    "(Tensor student, Tensor ids, Tensor logps, Tensor w, Tensor scale, float temperature, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _top_k_kernel,
    _top_k_fake,
)


def _top_k_grad_kernel(student: Tensor, ids: Tensor, *args: Any) -> Tensor:
    """d student: the rows' share of p from the log-prob kernel, then the listed columns over it."""
    row_max, log_sum, c, dz, temperature, backend = args
    grad = torch.empty(student.shape, dtype=student.dtype, device=student.device)
    options = (None, temperature, 0.0, 1.0)
    dispatch.native(backend).logprob_backward(
        student, ids[:, 0].clone(memory_format=torch.contiguous_format), row_max, log_sum, None, c, None, *options, grad
    )
    # index_copy_, because scatter_ copies the whole of a 16-bit matrix on the CPU
    columns = torch.arange(ids.shape[0], device=ids.device)[:, None] * student.shape[-1] + ids
    grad.view(-1).index_copy_(0, columns.view(-1), dz.to(grad.dtype).view(-1))
    return grad


top_k_grad = ops._define(
    "distill_top_k_grad",
    "(Tensor student, Tensor ids, Tensor row_max, Tensor log_sum, Tensor c, Tensor dz, float temperature, str backend)"
    " -> Tensor",
    _top_k_grad_kernel,
    lambda student, *_: torch.empty(student.shape, dtype=student.dtype, device=student.device),
)


def _save_top_k(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.plain = inputs[5:]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[0], *output[5:])


def _backward_top_k(ctx: Any, g_loss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    none = (None,) * 6
    if g_loss is None:
        return (None, *none)
    student, row_max, log_sum, ids, c, dz = ctx.saved_tensors
    c, dz = ops._scaled(c, g_loss), ops._scaled(dz, g_loss)
    return (top_k_grad(student, ids, row_max, log_sum, c, dz, *ctx.plain), *none)


ops._differentiate(top_k, _save_top_k, _backward_top_k)
