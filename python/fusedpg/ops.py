"""The native kernels as `torch.library` custom operators: schemas, fakes and autograd formulas.

Every operator takes flat rows: `logits` is (B, T, V) with any row strides, per-row tensors are (B*T,). The string
`backend` names the module that runs (`fusedpg.dispatch.native`); the operators themselves know no device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import dispatch, selection
from .metrics import NSUMS
from .spec import ENTROPY_COEF

_LIBRARY = torch.library.Library("fusedpg", "FRAGMENT")
_MAP = "Tensor? row_temperature, float temperature, float softcap, float logit_scale"
#: `fusedpg.spec.STREAMS`, and the boundaries of the sequences where stage B sums over them
_STREAMS = "Tensor?[] streams, Tensor? cu_seqlens"


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 is computed in fp64, everything else in fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _rows(like: Tensor, dtype: torch.dtype, present: bool = True) -> Tensor:
    rows = like.shape[0] * like.shape[1] if like.ndim == 3 else like.shape[0]
    return like.new_empty(rows if present else 0, dtype=dtype)


def _define(name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Register an operator for every device: what `torch.library.custom_op` does, 0.1 ms a call cheaper."""
    _LIBRARY.define(name + schema)
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fusedpg::{name}", fake)
    return getattr(torch.ops.fusedpg, name).default


def _differentiate(op: Any, save: Callable[..., None], backward: Callable[..., Any]) -> None:
    """Give `op` its autograd formula: `save(ctx, inputs, output)` after forward, then `backward(ctx, *grads)`."""

    class Formula(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                output = op(*inputs)
            save(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            return backward(ctx, *grads)

    _LIBRARY.impl(op.name().split("::")[1], lambda *inputs: Formula.apply(*inputs), "Autograd")


# ------------------------------------------------------------------ A: log-probabilities


def _logprob_kernel(
    logits: Tensor, targets: Tensor, active: Tensor | None, *map_entropy: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logp, entropy or empty, row_max, log_sum), each (N,)."""
    *logit_map, want_entropy, backend = map_entropy
    return dispatch.native(backend).logprob_forward(logits, targets, active, *logit_map, want_entropy)


def _logprob_fake(logits: Tensor, targets: Tensor, active: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    dtype = compute_dtype(logits.dtype)
    want_entropy = rest[-2]
    return (_rows(logits, dtype), _rows(logits, dtype, want_entropy), _rows(logits, dtype), _rows(logits, dtype))


logprob = _define(
    "logprob",
    f"(Tensor logits, Tensor targets, Tensor? active, {_MAP}, bool want_entropy, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _logprob_kernel,
    _logprob_fake,
)


def _logprob_grad_kernel(logits: Tensor, *args: Any) -> Tensor:
    """C: d logits (B, T, V) from `c` = dL/dlogp and `e` = dL/dentropy."""
    *inputs, backend = args
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    dispatch.native(backend).logprob_backward(logits, *inputs, out)
    return out


def _logprob_grad_fake(logits: Tensor, *args: Any) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


logprob_grad = _define(
    "logprob_grad",
    "(Tensor logits, Tensor targets, Tensor row_max, Tensor log_sum, Tensor? entropy, Tensor c, Tensor? e, "
    f"{_MAP}, str backend) -> Tensor",
    _logprob_grad_kernel,
    _logprob_grad_fake,
)


def _save_logprob(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, targets, active, row_temperature, *numbers, want_entropy, backend = inputs
    _, entropy, row_max, log_sum = output
    ctx.mark_non_differentiable(row_max, log_sum)
    if not want_entropy:
        ctx.mark_non_differentiable(entropy)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, targets, active, row_temperature, row_max, log_sum, entropy)
    ctx.plain = (*numbers, backend)
    ctx.want_entropy = want_entropy


def _backward_logprob(ctx: Any, g_logp: Tensor | None, g_entropy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    logits, targets, active, row_temperature, row_max, log_sum, entropy = ctx.saved_tensors
    none = (None,) * 8
    if not ctx.want_entropy:
        g_entropy = None
    if g_logp is None and g_entropy is None:
        return (None, *none)
    c = _selected(g_logp, active, row_max)
    e = None if g_entropy is None else _selected(g_entropy, active, row_max)
    h = None if e is None else entropy
    return (logprob_grad(logits, targets, row_max, log_sum, h, c, e, row_temperature, *ctx.plain), *none)


def _selected(upstream: Tensor | None, active: Tensor | None, like: Tensor) -> Tensor:
    """The upstream gradient as the kernels take it: flat, contiguous, 0 where masked whatever came."""
    if upstream is None:
        return torch.zeros_like(like)
    upstream = upstream.to(like.dtype).contiguous()
    return upstream if active is None else torch.where(active, upstream, 0.0)


_differentiate(logprob, _save_logprob, _backward_logprob)


# ------------------------------------------------------------------ B: the loss from log-probabilities


def _token_loss_kernel(
    spec: list[float], logp: Tensor, entropy: Tensor | None, w: Tensor, scale: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, per_token, c, e or empty, sums): loss = numerator*scale, c and e its derivatives."""
    *streams, backend = args
    per_token, c, e, sums = dispatch.native(backend).token_loss(spec, logp, entropy, w, *streams, scale)
    return sums[0] * scale, per_token, c, e, sums


def _token_loss_fake(
    spec: list[float], logp: Tensor, entropy: Tensor | None, w: Tensor, scale: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    like = torch.empty_like
    return (
        like(scale),
        like(logp),
        like(logp),
        _rows(logp, logp.dtype, spec[ENTROPY_COEF] != 0),
        logp.new_empty(NSUMS),
    )


token_loss = _define(
    "token_loss",
    f"(float[] spec, Tensor logp, Tensor? entropy, Tensor w, Tensor scale, {_STREAMS}, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _token_loss_kernel,
    _token_loss_fake,
)


def _save_token_loss(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, per_token, c, e, sums = output
    ctx.mark_non_differentiable(per_token, c, e, sums)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(c, e)


def _backward_token_loss(ctx: Any, g_loss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    c, e = ctx.saved_tensors
    if g_loss is None:
        return (None,) * 8
    d_entropy = _scaled(e, g_loss) if ctx.needs_input_grad[2] and e.numel() == c.numel() else None
    return (None, _scaled(c, g_loss), d_entropy, *(None,) * 5)


def _scaled(c: Tensor, factor: Tensor) -> Tensor:
    """c*factor, and 0 where c is 0 whatever the factor; `c` itself for the usual factor 1 where that is known."""
    if type(factor) is Tensor and factor.device.type == "cpu":
        value = float(factor)
        if value == 1.0:
            return c
        if math.isfinite(value):
            return c * value
    return torch.where(c == 0, 0.0, c * factor)


_differentiate(token_loss, _save_token_loss, _backward_token_loss)


# ------------------------------------------------------------------ A + B (+ C): the loss from logits


def _logits_loss_kernel(
    spec: list[float], logits: Tensor, targets: Tensor, w: Tensor, scale: Tensor, *args: Any
) -> tuple[Any, ...]:
    """(loss, logp, entropy, row_max, log_sum, per_token, c, e, sums, d logits or empty).

    With `form_grad` the gradient (times scale) is written while each row is hot: one read and one write of the
    logits. Without it, backward computes the gradient from the saved statistics: two reads and one write.
    """
    *rest, form_grad, backend = args
    grad = torch.empty(logits.shape if form_grad else 0, dtype=logits.dtype, device=logits.device)
    out = dispatch.native(backend).loss_forward(spec, logits, targets, w, scale, *rest, grad if form_grad else None)
    return (out[7][0] * scale, *out, grad)


def _logits_loss_fake(
    spec: list[float], logits: Tensor, targets: Tensor, w: Tensor, scale: Tensor, *args: Any
) -> tuple[Any, ...]:
    want_entropy, form_grad = args[-3] or spec[ENTROPY_COEF] != 0, args[-2]
    row = lambda present=True: _rows(logits, scale.dtype, present)  # noqa: E731
    return (
        torch.empty_like(scale),
        row(),
        row(want_entropy),
        row(),
        row(),
        row(),
        row(),
        row(spec[ENTROPY_COEF] != 0),
        scale.new_empty(NSUMS),
        torch.empty(logits.shape if form_grad else 0, dtype=logits.dtype, device=logits.device),
    )


logits_loss = _define(
    "logits_loss",
    f"(float[] spec, Tensor logits, Tensor targets, Tensor w, Tensor scale, {_STREAMS}, {_MAP}, "
    "bool want_entropy, bool form_grad, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _logits_loss_kernel,
    _logits_loss_fake,
)


def _save_logits_loss(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, targets, scale, row_temperature = inputs[1], inputs[2], inputs[4], inputs[7]
    _, logp, entropy, row_max, log_sum, per_token, c, e, sums, grad = output
    ctx.mark_non_differentiable(logp, entropy, row_max, log_sum, per_token, c, e, sums, grad)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, targets, scale, row_temperature, row_max, log_sum, entropy, c, e)
    ctx.plain = (*inputs[8:11], inputs[13])
    ctx.grad = grad if inputs[12] else None


def _backward_logits_loss(ctx: Any, g_loss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    none = (None,) * 12
    if g_loss is None:
        return (None, None, *none)
    logits, targets, scale, row_temperature, row_max, log_sum, entropy, c, e = ctx.saved_tensors
    grad, ctx.grad = ctx.grad, None
    if grad is not None:  # handed out once; a retained graph computes the next one afresh
        return (None, rescale_(grad, g_loss, ctx.plain[-1]), *none)
    factor = g_loss * scale
    c, h, e = scaled_pair(c, e, entropy, factor)
    return (None, logprob_grad(logits, targets, row_max, log_sum, h, c, e, row_temperature, *ctx.plain), *none)


def scaled_pair(c: Tensor, e: Tensor, entropy: Tensor, factor: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(c, entropy or None, e or None), scaled: what `logprob_grad` takes."""
    if e.numel() != c.numel() or e.numel() == 0:
        return _scaled(c, factor), None, None
    return _scaled(c, factor), entropy, _scaled(e, factor)


_differentiate(logits_loss, _save_logits_loss, _backward_logits_loss)


# ------------------------------------------------------------------ selections over the whole batch

select = _define(
    "select_tokens",
    "(Tensor logp, Tensor w, Tensor?[] streams, float[] codes) -> Tensor",
    selection.select_kernel,
    lambda logp, *_: torch.empty_like(logp),
)


def active_rows(w: Tensor, observed: Tensor | None) -> Tensor:
    """Rows whose log-prob is needed, bool (N,): those of the policy term and of the observation term."""
    return w != 0 if observed is None else (w != 0) | (observed != 0)


def rescale_(grad: Tensor, factor: Tensor, backend: str) -> Tensor:
    """`grad *= factor` for a gradient that is ours; nothing is touched for the usual factor 1."""
    if grad.device.type == "cpu":
        value = float(factor)
        return grad if value == 1.0 else grad.mul_(value)
    dispatch.native(backend).rescale_(grad, factor)
    return grad


def rescale_any(grad: Tensor, factor: Tensor, backend: str) -> Tensor:
    """`grad *= factor` for a contiguous gradient of ours of one to three dimensions; a product where that is traced."""
    if type(factor) is not Tensor:  # a traced graph cannot ask for the value, and plans its own memory
        return grad * factor
    rows = grad.view((1,) * (3 - grad.ndim) + tuple(grad.shape))
    rescale_(rows, factor, backend)
    return grad
