"""Arguments of the public ops, checked once and laid out as flat rows for the backends."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import validate
from .ops import active_rows, compute_dtype
from .spec import STREAMS, Anchor, Level, LossSpec
from .weights import Layout, Weights, inverse_denominator, token_weights


@dataclass(frozen=True)
class Batch:
    """Flat rows of one call: constants of stage B, weights, and how rows form sequences."""

    shape: tuple[int, ...]
    layout: Layout
    weights: Weights
    scale: Tensor
    #: the constants of stage B in the order of `fusedpg.spec.STREAMS`
    streams: list[Tensor | None]
    cu_seqlens: Tensor | None

    def stream(self, name: str) -> Tensor | None:
        """One of the constants."""
        return self.streams[STREAMS.index(name)]

    @property
    def active(self) -> Tensor:
        """Rows whose log-prob is needed, bool (N,)."""
        return active_rows(self.weights.w, self.stream("obs_weights"))

    def with_selected(self, selected: Tensor) -> Batch:
        """The same batch with the tokens that a batch-global loss has picked."""
        return replace(self, streams=[*self.streams[:-1], selected])


def flat(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A constant as the kernels read it: detached, row-major, contiguous."""
    return tensor.detach().to(dtype).reshape(-1).contiguous()


def make_layout(base: Tensor, base_name: str, cu_seqlens: Tensor | None) -> Layout:
    """How the tokens of `base`, (N,) or (B, T), form sequences."""
    if base.ndim == 2:
        if cu_seqlens is not None:
            validate.check_cu_seqlens(cu_seqlens, base, base_name)
        return Layout(base.shape[0], base.shape[1], True, None)
    if cu_seqlens is not None:
        validate.check_cu_seqlens(cu_seqlens, base, base_name)
        cu_seqlens = cu_seqlens.to(torch.int64).contiguous()
    return Layout(1, base.shape[0], False, cu_seqlens)


def flat_mask(mask: Tensor | None, base: Tensor, base_name: str) -> Tensor | None:
    """The mask as flat rows, its values checked."""
    if mask is None:
        return None
    validate.check_per_token("mask", mask, base_name, base, tuple(base.shape))
    validate.check_mask_values("mask", mask)
    return mask.detach().reshape(-1).contiguous()


def make_batch(
    spec: LossSpec,
    base: Tensor,
    base_name: str,
    dtype: torch.dtype,
    *,
    logp_old: Tensor | None,
    advantages: Tensor | float | None,
    sequence_advantages: Tensor | None,
    mask: Tensor | None,
    logp_ref: Tensor | None,
    logp_rollout: Tensor | None,
    obs_mask: Tensor | None,
    is_weights: Tensor | None,
    cu_seqlens: Tensor | None,
    normalizer: Tensor | float | None,
) -> Batch:
    """Check every per-token argument against `base` and flatten what the spec reads; the rest is not touched."""
    if not isinstance(spec, LossSpec):
        raise TypeError(
            f"spec: expected a LossSpec; got {type(spec).__name__}; build one with fusedpg.loss_spec('ppo_clip', ...)"
        )
    dtype = compute_dtype(dtype)
    layout = make_layout(base, base_name, cu_seqlens)
    if spec.needs_sequences and not layout.padded and cu_seqlens is None:
        raise ValueError(
            f"cu_seqlens: the loss {spec.name!r} (level {spec.level.name.lower()}, reduction {spec.reduction!r}) works "
            "on sequences and expects their boundaries for packed input; got None; pass cumulative lengths (S+1,)"
        )
    if is_weights is not None and spec.has_correction:
        raise ValueError(
            f"is_weights: the loss {spec.name!r} forms its weights from logp_rollout (is_correction, is_reject); got a "
            "tensor as well; pass one of the two"
        )

    def stream(name: str, tensor: Tensor | None, needed: bool) -> Tensor | None:
        if not needed:
            return None
        if tensor is None:
            raise ValueError(
                f"{name}: the loss {spec.name!r} reads it (see its kl, anchor and is_correction); got None; pass the "
                "log-probs"
            )
        validate.check_per_token(name, tensor, base_name, base, tuple(base.shape))
        return flat(tensor, dtype)

    _say_on_policy(spec, logp_old)
    rows_mask = flat_mask(mask, base, base_name)
    weights = token_weights(rows_mask, layout, spec.reduction, spec.max_tokens, dtype=dtype, device=base.device)
    if normalizer is not None:
        check_normalizer(normalizer)
    return Batch(
        shape=tuple(base.shape),
        layout=layout,
        weights=weights,
        scale=inverse_denominator(weights.weight, normalizer),
        streams=[
            _advantages(spec, base, base_name, layout, advantages, sequence_advantages, dtype),
            stream("logp_old", logp_old, spec.anchor == Anchor.OLD and logp_old is not None),
            stream("logp_ref", logp_ref, spec.needs_logp_ref),
            stream("logp_rollout", logp_rollout, spec.needs_logp_rollout),
            stream("is_weights", is_weights, is_weights is not None),
            _obs_weights(spec, base, base_name, layout, obs_mask, dtype),
            None,
        ],
        cu_seqlens=layout.boundaries(base.device) if spec.needs_segments else None,
    )


def _obs_weights(
    spec: LossSpec, base: Tensor, base_name: str, layout: Layout, obs_mask: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """Weights of the observation term: the loss's own reduction over the tokens of `obs_mask`."""
    if spec.obs_coef == 0.0:
        if obs_mask is not None:
            raise ValueError(
                f"obs_mask: the loss {spec.name!r} has no observation term and never reads it; got a tensor; drop it "
                "or pass obs_coef to loss_spec"
            )
        return None
    if obs_mask is None:
        raise ValueError(
            f"obs_mask: the loss {spec.name!r} has obs_coef={spec.obs_coef} and reads it; got None; pass the mask of "
            "the observation tokens"
        )
    validate.check_per_token("obs_mask", obs_mask, base_name, base, tuple(base.shape))
    validate.check_mask_values("obs_mask", obs_mask)
    rows = obs_mask.detach().reshape(-1).contiguous()
    weights = token_weights(rows, layout, spec.reduction, spec.max_tokens, dtype=dtype, device=base.device)
    return weights.w.to(dtype).contiguous()


def _advantages(
    spec: LossSpec,
    base: Tensor,
    base_name: str,
    layout: Layout,
    advantages: Tensor | float | None,
    sequence_advantages: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    if (advantages is None) == (sequence_advantages is None):
        got = "neither" if advantages is None else "both"
        raise ValueError(
            f"advantages: expected exactly one of advantages (one value a token) and sequence_advantages (one a "
            f"sequence); got {got}"
        )
    if sequence_advantages is not None:
        if not layout.padded and layout.cu_seqlens is None:
            raise ValueError(
                "sequence_advantages: packed input needs cu_seqlens to tell the sequences apart; got None; pass it"
            )
        count = layout.batch if layout.cu_seqlens is None else layout.cu_seqlens.numel() - 1
        validate.check_sequence_values("sequence_advantages", sequence_advantages, count, base)
        return layout.spread(sequence_advantages.detach().to(dtype))
    if isinstance(advantages, (int, float)):
        return torch.full((base.numel(),), float(advantages), dtype=dtype, device=base.device)
    validate.check_per_token("advantages", advantages, base_name, base, tuple(base.shape))
    if spec.level == Level.SEQUENCE:
        raise ValueError(
            f"advantages: the loss {spec.name!r} has one ratio a sequence and expects one advantage a sequence; got "
            "one value a token; pass sequence_advantages of shape (S,), or use 'gspo_token'"
        )
    return flat(advantages, dtype)  # type: ignore[arg-type]


def _say_on_policy(spec: LossSpec, logp_old: Tensor | None) -> None:
    reads_ratio = spec.surrogate.name != "REINFORCE" or spec.penalty_coef != 0.0
    if logp_old is None and spec.anchor == Anchor.OLD and reads_ratio and not torch.compiler.is_compiling():
        warnings.warn(
            f"logp_old: got None, so the loss {spec.name!r} runs on-policy: every ratio is exactly 1 and its gradient "
            "that of the log-probability; pass logp_old, or say so with loss_spec(..., anchor='self')",
            UserWarning,
            stacklevel=4,
        )


def check_normalizer(normalizer: Any) -> None:
    """One number that may divide a numerator; 0 for an empty step."""
    if isinstance(normalizer, Tensor):
        if normalizer.numel() != 1:
            raise ValueError(f"normalizer: expected one number; got shape {tuple(normalizer.shape)}; sum it first")
        if validate.reads_values(normalizer) and not normalizer >= 0:
            raise ValueError(f"normalizer: expected a number >= 0 (0 for an empty step); got {normalizer.item()}")
    else:
        validate.check_positive("normalizer", normalizer)
