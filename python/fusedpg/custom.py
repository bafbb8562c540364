"""The custom path: a Python body over `LossContext` between native stage A (log-probs) and stage C (their gradient).

The body costs O(tokens) of PyTorch. From logits that makes two reads and one write of the vocabulary-sized data: stage
A reads, stage C reads and writes; a native token-level loss reads once.
"""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import validate
from .context import LossContext, sequence_layout
from .hidden_states import Scores, scored_logprobs
from .loss_call import LogitMap, LossInputs, LossResult

#: a loss: `(ctx) -> (scalar, metrics)`
LossBody = Callable[[LossContext], tuple[Tensor, Mapping[str, Any]]]


@dataclass(frozen=True)
class CustomPath:
    """A body, its aggregation mode and its params."""

    name: str
    body: LossBody
    agg_mode: str
    params: Mapping[str, Any]
    path: str = "custom"

    def from_logits(
        self, scores: Scores, targets: Tensor, inputs: LossInputs, logit_map: LogitMap, backend: str
    ) -> LossResult:
        """Stage A, the body, and (in backward) stage C on the rows whose log-prob got a gradient."""
        validate.check_targets(targets)
        active = _active(inputs, targets, "targets")
        out = scored_logprobs(scores, targets, mask=active, **logit_map.keywords(), backend=backend)
        loss, metrics = self._run(out.logp, inputs)
        return LossResult(loss, metrics, self.path, out.backend, out.logp.detach())

    def from_logp(self, logp: Tensor, inputs: LossInputs, backend: str) -> LossResult:
        """The body alone."""
        if not isinstance(logp, Tensor) or logp.dtype not in validate.FLOATS or logp.ndim not in (1, 2):
            got = f"{logp.dtype} {tuple(logp.shape)}" if isinstance(logp, Tensor) else type(logp).__name__
            raise TypeError(f"logp: expected a float tensor of shape (N,) or (B, T); got {got}")
        _active(inputs, logp, "logp")
        dtype = torch.float64 if logp.dtype == torch.float64 else torch.float32
        loss, metrics = self._run(logp.to(dtype), inputs)
        return LossResult(loss, metrics, self.path, "torch", logp.detach())

    def _run(self, logp: Tensor, inputs: LossInputs) -> tuple[Tensor, dict[str, Any]]:
        """The loss as a function of `logp` that knows its own derivative: the body's graph ends here."""
        differentiable = logp.requires_grad and torch.is_grad_enabled()
        leaf = logp.detach().requires_grad_(differentiable)
        with torch.set_grad_enabled(differentiable):
            ctx = _context(leaf, inputs, self.agg_mode, self.params)
            loss, metrics = _checked(self.name, self.body(ctx), differentiable)
        if not ctx.aggregated:
            warnings.warn(
                f"{self.name}: the loss was reduced without ctx.aggregate, so it follows neither loss_agg_mode nor the "
                "counts of the optimizer step; return ctx.aggregate(per_token, mask)",
                UserWarning,
                stacklevel=4,
            )
        if not differentiable:
            return loss.detach(), metrics
        (c,) = torch.autograd.grad(loss, leaf, allow_unused=True)
        if c is None:
            raise ValueError(_DISCONNECTED.format(name=self.name))
        return _Loss.apply(logp, loss.detach(), c), metrics


class _Loss(torch.autograd.Function):
    """`loss` with the known derivative `c` for `logp`."""

    @staticmethod
    def forward(ctx: Any, logp: Tensor, loss: Tensor, c: Tensor) -> Tensor:
        ctx.save_for_backward(c)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, g_loss: Tensor) -> tuple[Tensor, None, None]:
        (c,) = ctx.saved_tensors
        return torch.where(c == 0, 0.0, c * g_loss), None, None


def _active(inputs: LossInputs, base: Tensor, base_name: str) -> Tensor | None:
    """Tokens whose log-prob is needed, None for all of them; checks both masks."""
    active = None
    for name, mask in (("obs_mask", inputs.obs_mask), ("mask", inputs.mask)):
        if mask is not None:
            validate.check_per_token(name, mask, base_name, base, tuple(base.shape))
            validate.check_mask_values(name, mask)
            active = mask != 0 if active is None else active | (mask != 0)
    return None if inputs.mask is None else active


def _context(logp: Tensor, inputs: LossInputs, agg_mode: str, params: Mapping[str, Any]) -> LossContext:
    return LossContext(
        logp,
        inputs.logp_old,
        _advantages(logp, inputs),
        torch.ones_like(logp, dtype=torch.bool) if inputs.mask is None else inputs.mask,
        inputs.obs_mask,
        inputs.logp_ref,
        inputs.logp_rollout,
        params,
        agg_mode=agg_mode,
        cu_seqlens=inputs.cu_seqlens,
        step_tokens=inputs.step_tokens,
        step_sequences=inputs.step_sequences,
    )


def _advantages(logp: Tensor, inputs: LossInputs) -> Tensor:
    given, by_sequence = inputs.advantages, inputs.sequence_advantages
    if (given is None) == (by_sequence is None):
        got = "neither" if given is None else "both"
        raise ValueError(
            f"advantages: expected exactly one of advantages (one value a token) and sequence_advantages (one a "
            f"sequence); got {got}"
        )
    if by_sequence is not None:
        layout = sequence_layout(logp, "logp", inputs.cu_seqlens)
        count = layout.batch if layout.cu_seqlens is None else layout.cu_seqlens.numel() - 1
        validate.check_sequence_values("sequence_advantages", by_sequence, count, logp)
        return layout.spread(by_sequence.detach().to(logp.dtype)).view(logp.shape)
    if isinstance(given, (int, float)):
        return torch.full_like(logp, float(given), requires_grad=False)
    assert given is not None
    return given


# ------------------------------------------------------------------ what a body returned

_DISCONNECTED = (
    "{name}: expected a loss that depends on ctx.logp_curr; got one whose graph does not reach it, so nothing would "
    "train; return ctx.aggregate(per_token, mask) of values computed from ctx.logp_curr, not detached"
)


def _checked(name: str, returned: Any, differentiable: bool) -> tuple[Tensor, dict[str, Any]]:
    """The scalar and the metrics of a body, or what is wrong with them."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(f"{name}: expected the loss to return (scalar, metrics); got {_kind(returned)}")
    loss, metrics = returned
    if not isinstance(loss, Tensor) or loss.ndim != 0 or not loss.is_floating_point():
        raise TypeError(
            f"{name}: expected a scalar loss (0-d float tensor); got {_kind(loss)}; "
            "return ctx.aggregate(per_token, mask)"
        )
    if not isinstance(metrics, Mapping):
        raise TypeError(f"{name}: expected metrics as a dict of name to number; got {_kind(metrics)}; return {{}}")
    if differentiable and not loss.requires_grad:
        raise ValueError(_DISCONNECTED.format(name=name))
    return loss, {_metric_name(name, key): _metric(name, key, value) for key, value in metrics.items()}


def _metric_name(name: str, key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"{name}: expected names of metrics to be strings; got {key!r}")
    return key


def _metric(name: str, key: str, value: Any) -> Any:
    """A Python number as it is; a tensor of one element detached and 0-d."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().reshape(())
    if not isinstance(value, numbers.Real):
        raise TypeError(
            f"{name}: metrics[{key!r}]: expected a number; got {_kind(value)}; reduce it, or pass value.item()"
        )
    return value


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {value.dtype} of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return type(value).__name__
