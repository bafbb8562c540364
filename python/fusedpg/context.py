"""`LossContext`: what the body of a custom loss sees, and its two reducers.

Source: rLLM's guide to custom loss functions (the `LossContext` contract), with its names, modes and denominators.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import validate
from .batch import make_layout
from .weights import Layout, Weights, inverse_denominator, token_weights

#: how `LossContext.aggregate` makes one number of per-token values; the first is the default
AGG_MODES = ("seq-mean-token-mean", "token-mean", "seq-mean-token-sum")
SEQ_REDUCTIONS = ("mean", "sum")


def check_mode(name: str, mode: Any) -> str:
    """`mode` is one of the three aggregation modes."""
    if mode not in AGG_MODES:
        raise ValueError(f"{name}: expected one of {', '.join(AGG_MODES)}; got {mode!r}")
    return str(mode)


def sequence_layout(base: Tensor, base_name: str, cu_seqlens: Tensor | None) -> Layout:
    """(B, T): a row is a sequence; (N,) with `cu_seqlens`: packed; (N,) without: one datum, which is one sequence."""
    if base.ndim == 1 and cu_seqlens is None:
        return Layout(1, base.shape[0], True, None)
    return make_layout(base, base_name, cu_seqlens)


def step_denominator(
    mode: str, step_tokens: float | Tensor | None, step_sequences: float | Tensor | None
) -> float | Tensor | None:
    """What `mode` divides by from the counts of the whole optimizer step, at least 1; None: the counts of the call.

    Raises:
        ValueError: only the count that this mode does not divide by was given: a mixture of global and local counts.
    """
    by_token = mode == "token-mean"
    name, count = ("step_tokens", step_tokens) if by_token else ("step_sequences", step_sequences)
    other, other_count = ("step_sequences", step_sequences) if by_token else ("step_tokens", step_tokens)
    if count is None:
        if other_count is not None:
            raise ValueError(
                f"{name}: the mode {mode!r} divides by it; got None beside {other}={other_count}; pass both counts of "
                "the optimizer step, or neither"
            )
        return None
    if isinstance(count, Tensor):
        if count.numel() != 1:
            raise ValueError(f"{name}: expected one number; got shape {tuple(count.shape)}; sum it first")
        return count.detach().reshape(()).clamp(min=1)
    return max(validate.check_positive(name, count, zero_ok=True), 1.0)


class LossContext:
    """The normalised inputs of a loss: `body(ctx) -> (scalar, metrics)`, written shape-agnostically.

    All tensors share one shape: (B, T) padded, (N,) packed with `cu_seqlens`, or (N,) for one datum. They are fp32
    (fp64 beside fp64 log-probs). `logp_curr` alone is differentiable; the rest are detached constants. At places
    that neither mask selects every field is 0; outside `action_mask`, a constant that is not finite is 0 too. So the
    rubbish behind a mask reaches neither a value nor a gradient, and a NaN at a selected place stays visible.

    Args:
        logp_curr: log-probs of the current policy.
        logp_old: the importance ratio's denominator. None: on-policy, said by a warning when a body reads it.
        advantages: one value a token.
        action_mask: bool, or weights in [0, 1]: the tokens of the policy gradient.
        obs_mask: the same, the tokens of the environment's observations; None is none of them.
        logp_ref: log-probs of the reference policy, or None.
        logp_rollout: log-probs of the sampling engine, or None: guard on it, and do not fall back to `logp_old`.
        params: the loss's hyperparameters.
        agg_mode: what `aggregate` does where the body does not name a mode.
        cu_seqlens: (S+1,) int32 or int64, the boundaries of packed sequences.
        step_tokens, step_sequences: action tokens, and sequences with one, of the whole optimizer step (micro-batches,
            accumulation passes and ranks); None: those of this call. The losses of the parts of a step then add up
            (over ranks too: sum the gradients, do not average) to the loss of the unsplit step.

    Raises:
        TypeError, ValueError: a field of the wrong type, shape, device or value, by name.
    """

    def __init__(
        self,
        logp_curr: Tensor,
        logp_old: Tensor | None,
        advantages: Tensor,
        action_mask: Tensor,
        obs_mask: Tensor | None = None,
        logp_ref: Tensor | None = None,
        logp_rollout: Tensor | None = None,
        params: Mapping[str, Any] | None = None,
        *,
        agg_mode: str = AGG_MODES[0],
        cu_seqlens: Tensor | None = None,
        step_tokens: float | Tensor | None = None,
        step_sequences: float | Tensor | None = None,
    ) -> None:
        if not isinstance(logp_curr, Tensor) or not logp_curr.is_floating_point() or logp_curr.ndim not in (1, 2):
            got = (
                f"{logp_curr.dtype} {tuple(logp_curr.shape)}"
                if isinstance(logp_curr, Tensor)
                else type(logp_curr).__name__
            )
            raise TypeError(f"logp_curr: expected a float tensor of shape (N,) or (B, T); got {got}")
        self.agg_mode = check_mode("agg_mode", agg_mode)
        self.params: Mapping[str, Any] = dict(params or {})
        self.step_tokens, self.step_sequences = step_tokens, step_sequences
        #: whether the body has reduced through the context
        self.aggregated = False
        self._dtype = torch.float64 if logp_curr.dtype == torch.float64 else torch.float32
        self._base = logp_curr.detach()
        self._layout = sequence_layout(logp_curr, "logp_curr", cu_seqlens)
        self._segments = self._layout.boundaries(logp_curr.device)
        self.action_mask = self._mask("action_mask", action_mask)
        self.obs_mask = torch.zeros_like(self.action_mask) if obs_mask is None else self._mask("obs_mask", obs_mask)
        action = self.action_mask != 0
        selected = action | (self.obs_mask != 0)
        self.logp_curr = torch.where(selected, logp_curr.to(self._dtype), 0.0)

        def constant(name: str, values: Tensor) -> Tensor:
            validate.check_per_token(name, values, "logp_curr", logp_curr, tuple(logp_curr.shape))
            values = values.detach().to(self._dtype)
            return torch.where(action | (selected & values.isfinite()), values, 0.0)

        self._logp_old = None if logp_old is None else constant("logp_old", logp_old)
        self.advantages = constant("advantages", advantages)
        self.logp_ref = None if logp_ref is None else constant("logp_ref", logp_ref)
        self.logp_rollout = None if logp_rollout is None else constant("logp_rollout", logp_rollout)

    @property
    def logp_old(self) -> Tensor:
        """The importance ratio's denominator."""
        if self._logp_old is None:
            warnings.warn(
                "logp_old: got None, so the loss runs on-policy: ctx.logp_old is ctx.logp_curr, detached; "
                "pass logp_old",
                UserWarning,
                stacklevel=2,
            )
            return self.logp_curr.detach()
        return self._logp_old

    def aggregate(self, per_token: Tensor, mask: Tensor, mode: str | None = None) -> Tensor:
        """Per-token values to the scalar objective, normalised over the whole optimizer step.

        ======================  ==================================================================
        token-mean              sum(m*x) / step_tokens
        seq-mean-token-mean     sum over sequences of (sum(m*x) / sum(m)) / step_sequences
        seq-mean-token-sum      sum over sequences of sum(m*x) / step_sequences
        ======================  ==================================================================

        The denominators count action tokens, and sequences with one, whatever `mask` is; a step without any gives 0.

        Args:
            per_token: values x in the shape of the fields; read only where `mask` is not 0.
            mask: `ctx.action_mask`, `ctx.obs_mask` or another bool or float mask of that shape; a constant.
            mode: one of the three modes, whatever was configured; None is the context's own.
        """
        mode = self.agg_mode if mode is None else check_mode("aggregate: mode", mode)
        values = self._values("aggregate: per_token", per_token)
        m = self._mask("aggregate: mask", mask).reshape(-1)
        w = self._weights(m, mode).w
        self.aggregated = True
        return (torch.where(m != 0, values.reshape(-1), 0.0) * w).sum() * self._inverse(mode)

    def seq_reduce(self, values: Tensor, mask: Tensor, reduction: str = "mean") -> Tensor:
        """Mean or sum over each sequence's masked tokens, at every token of the sequence; differentiable.

        Args:
            values: per-token values in the shape of the fields; read only where `mask` is not 0.
            mask: as in `aggregate`; a sequence without a masked token gives 0.
            reduction: "mean" or "sum".
        """
        if reduction not in SEQ_REDUCTIONS:
            raise ValueError(f"seq_reduce: reduction: expected 'mean' or 'sum'; got {reduction!r}")
        flat = self._values("seq_reduce: values", values).reshape(-1)
        m = self._mask("seq_reduce: mask", mask).reshape(-1)
        total = self._segment_sum(torch.where(m != 0, flat, 0.0) * m)
        if reduction == "mean":
            count = self._segment_sum(m)
            total = total / torch.where(count == 0, 1.0, count)
        return self._layout.spread(total).view(values.shape)

    def _segment_sum(self, values: Tensor) -> Tensor:
        """(N,) to (S,); one sequence's NaN stays its own."""
        if self._layout.padded:
            return values.view(self._layout.batch, self._layout.length).sum(1)
        return torch.segment_reduce(values, "sum", offsets=self._segments, unsafe=True, initial=0)

    def _weights(self, flat_mask: Tensor, mode: str) -> Weights:
        return token_weights(flat_mask, self._layout, mode, None, dtype=self._dtype, device=flat_mask.device)

    def _inverse(self, mode: str) -> Tensor:
        local = self._weights(self.action_mask.reshape(-1), mode).weight
        return inverse_denominator(local, step_denominator(mode, self.step_tokens, self.step_sequences))

    def _mask(self, name: str, mask: Tensor) -> Tensor:
        validate.check_per_token(name, mask, "logp_curr", self._base, tuple(self._base.shape))
        validate.check_mask_values(name, mask)
        return mask.detach().to(self._dtype)

    def _values(self, name: str, values: Tensor) -> Tensor:
        validate.check_per_token(name, values, "logp_curr", self._base, tuple(self._base.shape))
        return values.to(self._dtype)
