"""Hidden states to log-probs and losses as `torch.library` custom operators.

`hidden` is (B, T, D) with any strides, `weight` (V, D), `bias` (V,) or None, per-row tensors are (B*T,). `workspace` is
in bytes, 0 for the default. The plan is made inside the operator, so a traced graph does not depend on it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import dispatch, ops
from .linear_chunks import idle_last, sequence_lengths, token_chunks, whole_sequences
from .linear_plan import LinearPlan, Mode, plan_linear
from .linear_stages import (
    Gradients,
    LogitMap,
    LossConstants,
    RowStats,
    differentiate,
    fuse,
    gradient_dtype,
    score,
)
from .linear_walk import Head
from .metrics import NSUMS
from .spec import ENTROPY_COEF, STREAMS, segments_needed
from .workspace import default_workspace

_HEAD = "Tensor hidden, Tensor weight, Tensor? bias, Tensor targets"
_WANTED = "bool want_hidden, bool want_weight, bool want_bias"


def _plan(head: Head, workspace: int, gradient: bool, weight_gradient: bool, **options: Any) -> LinearPlan:
    shape = head.shape(gradient, weight_gradient)
    return plan_linear(shape, workspace or default_workspace(head.hidden.device, shape), **options)


def _computed(hidden: Tensor, weight: Tensor) -> torch.dtype:
    return Head(hidden, weight, None).compute


def no_autocast(hidden: Tensor) -> torch.autocast:
    """The products' dtypes are the plan's, whatever surrounds the call."""
    return torch.autocast(hidden.device.type, enabled=False)


# ------------------------------------------------------------------ A: log-probabilities


def _logprob_kernel(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, active: Tensor | None, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logp, entropy or empty, row_max, log_sum), each (N,)."""
    *logit_map, want_entropy, workspace, backend = args
    head = Head(hidden, weight, bias)
    rows = torch.arange(targets.numel(), device=targets.device) if active is None else active.nonzero().view(-1)
    with torch.no_grad(), no_autocast(hidden):
        plan = _plan(head, workspace, False, False)
        return score(head, plan, targets, rows, LogitMap(*logit_map), want_entropy, backend)


def _logprob_fake(hidden: Tensor, weight: Tensor, bias: Any, targets: Tensor, *args: Any) -> tuple[Tensor, ...]:
    row = lambda present=True: targets.new_empty(  # noqa: E731
        targets.numel() if present else 0, dtype=_computed(hidden, weight)
    )
    return row(), row(args[-3]), row(), row()


logprob = ops._define(
    "linear_logprob",
    f"({_HEAD}, Tensor? active, {ops._MAP}, bool want_entropy, int workspace, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _logprob_kernel,
    _logprob_fake,
)


def _grad_kernel(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *args: Any) -> tuple[Any, ...]:
    """C: (d hidden, d weight, d bias), each empty where not wanted, from c = dL/dlogp and e = dL/dentropy."""
    row_max, log_sum, entropy, c, e, *logit_map, want_hidden, want_weight, want_bias, workspace, backend = args
    head = Head(hidden, weight, bias)
    stats = RowStats(c, c if entropy is None else entropy, row_max, log_sum)
    with torch.no_grad(), no_autocast(hidden):
        plan = _plan(head, workspace, True, want_weight, known_coefficients=False)
        gradients = Gradients(head, (want_hidden, want_weight, want_bias), keep_fp16=False)
        differentiate(head, plan, targets, stats, c, e, LogitMap(*logit_map), gradients, backend)
    return gradients.all()


def _grad_fake(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *args: Any) -> tuple[Any, ...]:
    return _fake_gradients(hidden, weight, bias, args[-5:-2], keep_fp16=False)


def _fake_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Any, keep_fp16: bool
) -> tuple[Any, ...]:
    compute = _computed(hidden, weight)
    return tuple(
        torch.empty(t.shape, dtype=gradient_dtype(t, compute, keep_fp16), device=t.device)
        if t is not None and want
        else hidden.new_empty(0)
        for t, want in zip((hidden, weight, bias), wanted, strict=True)
    )


logprob_grad = ops._define(
    "linear_logprob_grad",
    f"({_HEAD}, Tensor row_max, Tensor log_sum, Tensor? entropy, Tensor c, Tensor? e, {ops._MAP}, {_WANTED}, "
    "int workspace, str backend) -> (Tensor, Tensor, Tensor)",
    _grad_kernel,
    _grad_fake,
)


def _save_logprob(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, targets, active, row_temperature, *numbers, want_entropy, workspace, backend = inputs
    _, entropy, row_max, log_sum = output
    ctx.mark_non_differentiable(row_max, log_sum)
    if not want_entropy:
        ctx.mark_non_differentiable(entropy)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, bias, targets, active, row_temperature, row_max, log_sum, entropy)
    ctx.numbers, ctx.plain, ctx.want_entropy = tuple(numbers), (workspace, backend), want_entropy


def _backward_logprob(ctx: Any, g_logp: Tensor | None, g_entropy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    hidden, weight, bias, targets, active, row_temperature, row_max, log_sum, entropy = ctx.saved_tensors
    g_entropy = g_entropy if ctx.want_entropy else None
    if g_logp is None and g_entropy is None:
        return (None,) * 12
    c = ops._selected(g_logp, active, row_max)
    e = None if g_entropy is None else ops._selected(g_entropy, active, row_max)
    saved = (row_max, log_sum, None if e is None else entropy, c, e, row_temperature, *ctx.numbers)
    return (*_gradients(ctx, (hidden, weight, bias, targets), saved), *(None,) * 9)


def _gradients(ctx: Any, head: tuple[Any, ...], saved: tuple[Any, ...], first: int = 0) -> tuple[Tensor | None, ...]:
    """The gradients of the head's inputs, the first of which is input `first`, that autograd asks for."""
    wanted = ctx.needs_input_grad[first : first + 3]
    grads = logprob_grad(*head, *saved, *wanted, *ctx.plain)
    return tuple(g if want else None for g, want in zip(grads, wanted, strict=True))


ops._differentiate(logprob, _save_logprob, _backward_logprob)


# ------------------------------------------------------------------ A + B + C: the loss


def _loss_kernel(
    spec: list[float], hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *args: Any
) -> tuple[Any, ...]:
    """(loss, logp, entropy, row_max, log_sum, per_token, c, e, sums, d hidden, d weight, d bias).

    The gradients (times scale) are formed here, while each chunk's logits are there; empty where not wanted.
    """
    w, scale, streams, cu, *logit_map, want_entropy, want_hidden, want_weight, want_bias, workspace, backend = args
    head, wanted = Head(hidden, weight, bias), (want_hidden, want_weight, want_bias)
    constants, mapping = LossConstants(w, scale, streams, cu), LogitMap(*logit_map)
    want_entropy = want_entropy or spec[ENTROPY_COEF] != 0
    with torch.no_grad(), no_autocast(hidden):
        rows = ops.active_rows(w, streams[STREAMS.index("obs_weights")]).nonzero().view(-1)
        lengths = sequence_lengths(rows, cu) if segments_needed(spec) and cu is not None else None
        longest = 0 if lengths is None or not lengths.numel() else max(1, int(lengths.max()))
        plan = _plan(head, workspace, any(wanted), want_weight, longest_sequence=longest)
        gradients = Gradients(head, wanted, keep_fp16=True)
        walk = (spec, constants, mapping, want_entropy, gradients, backend)
        if any(wanted) and plan.mode != Mode.TWO_PASSES:
            if lengths is None:
                chunks = token_chunks(idle_last(rows, streams[STREAMS.index("advantages")]), plan.rows)
            else:
                chunks = whole_sequences(rows, lengths, plan.rows)
            stats = fuse(head, plan, targets, chunks, *walk)
        else:
            stats = score(head, plan, targets, rows, mapping, want_entropy, backend)
        entropy = stats.entropy if want_entropy else None
        per_token, c, e, sums = dispatch.native(backend).token_loss(spec, stats.logp, entropy, w, streams, cu)
        if any(wanted) and plan.mode == Mode.TWO_PASSES:
            scaled = (c * scale, e * scale if e.numel() else None)
            differentiate(head, plan, targets, stats, *scaled, mapping, gradients, backend)
    return (sums[0] * scale, *stats, per_token, c, e, sums, *gradients.all())


def _loss_fake(
    spec: list[float], hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *args: Any
) -> tuple[Any, ...]:
    scale, want_entropy, wanted = args[1], args[-6] or spec[ENTROPY_COEF] != 0, args[-5:-2]
    row = lambda present=True: targets.new_empty(  # noqa: E731
        targets.numel() if present else 0, dtype=_computed(hidden, weight)
    )
    rows = (row(), row(want_entropy), row(), row(), row(), row(), row(spec[ENTROPY_COEF] != 0))
    grads = _fake_gradients(hidden, weight, bias, wanted, keep_fp16=True)
    return (torch.empty_like(scale), *rows, scale.new_empty(NSUMS), *grads)


loss = ops._define(
    "linear_loss",
    f"(float[] spec, {_HEAD}, Tensor w, Tensor scale, {ops._STREAMS}, {ops._MAP}, bool want_entropy, {_WANTED}, "
    "int workspace, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _loss_kernel,
    _loss_fake,
)


def _save_loss(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, hidden, weight, bias, targets, _, scale, _, _, row_temperature, *numbers, _, _, _, _, workspace, backend = inputs
    _, _, entropy, row_max, log_sum, _, c, e, _, *grads = output
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    tensors = (hidden, weight, bias, targets, scale, row_temperature, row_max, log_sum, entropy, c, e)
    ctx.save_for_backward(*tensors)
    ctx.numbers, ctx.plain, ctx.grads = tuple(numbers), (workspace, backend), grads
    ctx.dtypes = [None if t is None else t.dtype for t in (hidden, weight, bias)]


def _backward_loss(ctx: Any, g_loss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    none = (None,) * 15
    if g_loss is None:
        return (None,) * 4 + none
    grads, ctx.grads = ctx.grads, None
    if grads is None:  # handed out once; a retained graph computes the next ones afresh
        hidden, weight, bias, targets, scale, row_temperature, row_max, log_sum, entropy, c, e = ctx.saved_tensors
        c, h, e = ops.scaled_pair(c, e, entropy, g_loss * scale)
        saved = (row_max, log_sum, h, c, e, row_temperature, *ctx.numbers)
        return (None, *_gradients(ctx, (hidden, weight, bias, targets), saved, first=1), *none)
    scaled = (
        ops.rescale_any(grad, g_loss, ctx.plain[-1]).to(dtype) if want else None
        for grad, want, dtype in zip(grads, ctx.needs_input_grad[1:4], ctx.dtypes, strict=True)
    )
    return (None, *scaled, *none)


ops._differentiate(loss, _save_loss, _backward_loss)
