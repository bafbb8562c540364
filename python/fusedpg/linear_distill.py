"""Distillation where student or teacher come as hidden states with a head: chunks of rows, two tiles of logits.

Either side is a `Head` or logits (N, V); a chunk of the latter is copied into a tile. The student's tile becomes its
gradient, which goes through the head's two products or back to its rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import dispatch, distill_ops, ops
from .distill_ops import weighted_sum
from .linear_ops import no_autocast
from .linear_plan import LEAST_ROWS, MIB, LinearPlan, plan_linear, whole_rows_workspace
from .linear_stages import Gradients, add_chunk, gradient_dtype
from .linear_walk import Head, LinearWalk
from .workspace import default_workspace

_SIDE = "Tensor {0}, Tensor? {0}_weight, Tensor? {0}_bias"


class _Logits:
    """The rows of given logits (B, T, V), as a walk over a head gives them."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def tile(self, rows: Tensor) -> Tensor:
        """(1, n, V), a copy."""
        length = self.logits.shape[1]
        return self.logits[rows // length, rows % length].unsqueeze(0)


class _Products:
    """The rows of a head's logits."""

    def __init__(self, head: Head, plan: LinearPlan) -> None:
        self.walk = LinearWalk(head, plan)
        self.x = head.hidden.new_empty(0)

    def tile(self, rows: Tensor) -> Tensor:
        """(1, n, V) in the compute dtype, valid until the next call."""
        self.x = self.walk.take(rows)
        return self.walk.logits(self.x, rows.numel(), 0, self.walk.vocab)


def _side(tensor: Tensor, weight: Tensor | None, bias: Tensor | None, plan: LinearPlan) -> _Logits | _Products:
    return _Logits(tensor) if weight is None else _Products(Head(tensor, weight, bias), plan)


def _chunk_plan(
    student: tuple[Tensor, Any, Any], teacher: tuple[Tensor, Any, Any], workspace: int, wanted: tuple[bool, ...]
) -> LinearPlan:
    """Rows of whole logits for two tiles, or an error that names the workspace."""
    heads = [Head(*side) for side in (student, teacher) if side[1] is not None]
    shapes = [head.shape(gradient=any(wanted), weight_gradient=wanted[1]) for head in heads]
    needed = 2 * max(map(whole_rows_workspace, shapes))
    device, vocab = student[0].device, shapes[0].vocab
    given = workspace or max(needed, *(default_workspace(device, shape) for shape in shapes))
    if given < needed:
        raise ValueError(
            f"workspace_mib: expected at least {needed / MIB:.2g}, two tiles of {LEAST_ROWS} rows of {vocab} logits; "
            f"got {given / MIB:.2g}; a divergence needs whole rows: raise it, or pass None"
        )
    plans = [plan_linear(shape, given // 2) for shape in shapes]
    cast_columns = max(plan.cast_columns for plan in plans)
    return replace(min(plans, key=lambda plan: plan.rows), cast_columns=cast_columns)


def _kernel(
    student: Tensor,
    student_weight: Tensor | None,
    student_bias: Tensor | None,
    teacher: Tensor,
    teacher_weight: Tensor | None,
    teacher_bias: Tensor | None,
    ids: Tensor | None,
    w: Tensor,
    scale: Tensor,
    *args: Any,
) -> tuple[Tensor, ...]:
    """(loss, per_token, student entropy, teacher entropy, numerator, d student, d weight, d bias), empty unless wanted.

    With `ids` (N, K) the teacher is (N, K) log-probs of those tokens.
    """
    kind, beta, temperature, teacher_temperature, *wanted, workspace, backend = args
    sides = (student, student_weight, student_bias), (teacher, teacher_weight, teacher_bias)
    divergence = (kind, beta, temperature, teacher_temperature)
    with torch.no_grad(), no_autocast(student):
        rows = (w != 0).nonzero().view(-1)
        plan = _chunk_plan(*sides, workspace, tuple(wanted))
        sink = _Sink(*sides[0], wanted)
        mine = _side(*sides[0], plan)
        theirs = None if ids is not None else _side(*sides[1], plan)
        out = [torch.zeros_like(w) for _ in range(3)]
        for chunk in rows.split(plan.rows):
            if not chunk.numel():
                continue
            tile, weights = mine.tile(chunk), w[chunk]
            if theirs is None:
                assert ids is not None
                listed = (ids[chunk], teacher[chunk])
                values, gradient = _top_k(tile, listed, weights, scale, temperature, any(wanted), backend)
            else:
                other = theirs.tile(chunk)
                into = tile if tile.device.type == "cpu" else torch.empty_like(tile)
                gradient = into if any(wanted) else None
                values = dispatch.native(backend).distill(tile, other, weights, scale, *divergence, gradient)
            for total, value in zip(out, values, strict=True):
                total[chunk] = value
            if gradient is not None:
                sink.put(mine, chunk, gradient)
        numerator = weighted_sum(w, out[0])
    return (numerator * scale, *out, numerator, *sink.close())


def _top_k(
    tile: Tensor,
    listed: tuple[Tensor, Tensor],
    w: Tensor,
    scale: Tensor,
    temperature: float,
    gradient: bool,
    backend: str,
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """((divergence, student entropy, teacher entropy), gradient) of a tile against listed log-probs."""
    out = distill_ops.top_k(tile, *listed, w, scale, temperature, backend)
    _, value, student_entropy, teacher_entropy, _, row_max, log_sum, ids, c, dz = out
    grad = distill_ops.top_k_grad(tile, ids, row_max, log_sum, c, dz, temperature, backend) if gradient else None
    return (value, student_entropy, teacher_entropy), grad


class _Sink:
    """Where the student's gradient goes: to its logits, or through its head."""

    def __init__(self, student: Tensor, weight: Tensor | None, bias: Tensor | None, wanted: list[bool]) -> None:
        self.empty = student.new_empty(0)
        self.logits: Tensor | None = None
        self.gradients: Gradients | None = None
        if weight is not None:
            self.gradients = Gradients(Head(student, weight, bias), wanted, keep_fp16=True)
            self.block = self.gradients.block(0, weight.shape[0])
        elif wanted[0]:
            self.logits = torch.zeros_like(student, memory_format=torch.contiguous_format)

    def put(self, side: _Logits | _Products, rows: Tensor, gradient: Tensor) -> None:
        """A chunk's d logits (1, n, V)."""
        if isinstance(side, _Products):
            assert self.gradients is not None
            add_chunk(side.walk, self.gradients, self.block, gradient, side.x, rows)
        elif self.logits is not None:
            self.logits.view(-1, self.logits.shape[-1])[rows] = gradient[0]

    def close(self) -> tuple[Tensor, Tensor, Tensor]:
        """(d student, d weight, d bias)."""
        if self.gradients is None:
            empty = self.empty.clone
            return empty() if self.logits is None else self.logits, empty(), empty()
        self.gradients.close(self.block, self.gradients.head.weight.shape[0])
        return self.gradients.all()


def _fake(
    student: Tensor, student_weight: Tensor | None, student_bias: Tensor | None, teacher: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    w, scale, wanted = args[3], args[4], args[-5:-2]
    grads = []
    for tensor, want in zip((student, student_weight, student_bias), wanted, strict=True):
        if tensor is None or not want:
            grads.append(student.new_empty(0))
            continue
        dtype = tensor.dtype if student_weight is None else gradient_dtype(tensor, w.dtype, keep_fp16=True)
        grads.append(torch.empty(tensor.shape, dtype=dtype, device=w.device))
    rows = [torch.empty_like(w) for _ in range(3)]
    return (torch.empty_like(scale), *rows, torch.empty_like(scale), *grads)


op = ops._define(
    "linear_distill",
    f"({_SIDE.format('student')}, {_SIDE.format('teacher')}, Tensor? ids, Tensor w, Tensor scale, "
    f"{distill_ops._OPTIONS}, bool want_student, bool want_weight, bool want_bias, int workspace, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _kernel,
    _fake,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:9])
    ctx.plain, ctx.grads = inputs[9:], output[5:] if any(inputs[13:16]) else None
    ctx.dtypes = [None if t is None else t.dtype for t in inputs[:3]]


def _backward(ctx: Any, g_loss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    none = (None,) * (6 + len(ctx.plain))
    if g_loss is None:
        return (None,) * 3 + none
    wanted = ctx.needs_input_grad[:3]
    grads, ctx.grads = ctx.grads, None
    if grads is None:  # not formed in forward, or handed out: a retained graph computes them afresh
        *tensors, scale = ctx.saved_tensors
        grads = op(*tensors, scale * g_loss, *ctx.plain[:4], *wanted, *ctx.plain[7:])[5:]
    else:
        grads = [ops.rescale_any(grad, g_loss, ctx.plain[-1]) for grad in grads]
    held = zip(grads, wanted, ctx.dtypes, strict=True)
    return (*(grad.to(dtype) if want else None for grad, want, dtype in held), *none)


ops._differentiate(op, _save, _backward)
