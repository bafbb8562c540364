"""The loss whose gradient overwrites the caller's logits, on explicit request."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import dispatch
from .ops import rescale_, scaled_pair


class InplaceLoss(torch.autograd.Function):
    """`logits_loss` whose gradient overwrites the caller's logits; eager only, one backward.

    The version counter of the logits rises with the write, so autograd refuses any backward that still needs their
    values.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, form_grad: bool, spec: list[float], *args: Any) -> tuple[Tensor, ...]:
        """(loss, logp, entropy, per_token, sums)."""
        targets, w, scale, *rest, backend = args
        values = logits.detach()
        out = dispatch.native(backend).loss_forward(
            spec, values, targets, w, scale, *rest, values if form_grad else None
        )
        logp, entropy, row_max, log_sum, per_token, c, e, sums = out
        if form_grad:
            torch.autograd.graph.increment_version(logits)
        ctx.mark_non_differentiable(logp, entropy, per_token, sums)
        ctx.values, ctx.formed, ctx.backend = logits if not form_grad else values, form_grad, backend
        ctx.version = logits._version
        ctx.stats = (targets, row_max, log_sum, c, e, entropy, scale, rest[2:6])
        return sums[0] * scale, logp, entropy, per_token, sums

    @staticmethod
    def backward(ctx: Any, g_loss: Tensor, *_: Any) -> tuple[Any, ...]:
        """The gradient in the memory of the logits."""
        values, ctx.values = ctx.values, None
        if values is None:
            raise RuntimeError(
                "inplace: expected one backward; got a second one; the first wrote the gradient over the logits; "
                "pass inplace=False to keep the graph"
            )
        if values._version != ctx.version:
            raise RuntimeError(
                "inplace: expected the logits untouched between the loss and its backward; got modified memory; "
                "pass inplace=False"
            )
        if ctx.formed:
            grad = rescale_(values, g_loss, ctx.backend)
        else:
            targets, row_max, log_sum, c, e, entropy, scale, logit_map = ctx.stats
            grad = values.detach()
            c, h, e = scaled_pair(c, e, entropy, g_loss * scale)
            native = dispatch.native(ctx.backend)
            native.logprob_backward(grad, targets, row_max, log_sum, h, c, e, *logit_map, grad)
            torch.autograd.graph.increment_version(values)
        return (grad, *(None,) * (len(ctx.needs_input_grad) - 1))
