"""Flat rows of logits: their checks, their layout, and the reference run on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import reference, validate
from .batch import Batch, flat
from .metrics import SUM_NAMES
from .ops import compute_dtype
from .spec import STREAMS, LossSpec


def check_rows(
    logits: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
    softcap: float | None,
    logit_scale: float,
) -> tuple[Any, ...]:
    """Check the rows; their logit map."""
    validate.check_targets(targets)
    validate.check_logits(logits, targets)
    return check_logit_map(compute_dtype(logits.dtype), targets, temperature, softcap, logit_scale)


def check_logit_map(
    dtype: torch.dtype, targets: Tensor, temperature: float | Tensor, softcap: float | None, logit_scale: float
) -> tuple[Any, ...]:
    """How logits become softmax arguments: (row_temperature in `dtype`, temperature, softcap or 0, logit_scale)."""
    validate.check_temperature(temperature, targets)
    scale = validate.check_positive("logit_scale", logit_scale)
    cap = 0.0 if softcap is None else validate.check_positive("softcap", softcap)
    if isinstance(temperature, Tensor):
        return (flat(temperature, dtype), 1.0, cap, scale)
    return (None, float(temperature), cap, scale)


def check_ids(targets: Tensor, active: Tensor | None, vocab: int) -> Tensor:
    """The targets as flat int64 rows; unmasked ones are ids of the vocabulary."""
    validate.check_target_range(targets, None if active is None else active.view(targets.shape), vocab)
    return targets.reshape(-1).to(torch.int64).contiguous()


def rows3d(logits: Tensor) -> Tensor:
    """(B, T, V) with unit stride along the vocabulary; a copy only where that stride is not 1."""
    if logits.shape[-1] > 1 and logits.stride(-1) != 1:
        logits = logits.contiguous()
    return as_batch(logits)


def as_batch(values: Tensor) -> Tensor:
    """(N, X) packed rows as a batch of one, (1, N, X); padded ones as they are."""
    return values if values.ndim == 3 else values.unsqueeze(0)


def reference_logprobs(
    logits: Tensor, ids: Tensor, active: Tensor | None, logit_map: tuple[Any, ...], want_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Stage A of the reference on logits of any rank."""
    row_temperature, temperature, softcap, logit_scale = logit_map
    rows = logits.reshape(-1, logits.shape[-1])
    if active is None:
        active = torch.ones_like(ids, dtype=torch.bool)
    t = temperature if row_temperature is None else row_temperature
    return reference.logprobs(rows, ids, active, t, softcap, logit_scale, want_entropy)


def reference_loss(spec: LossSpec, logp: Tensor, entropy: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Stage B of the reference: (loss, per_token, the vector of sums that the native backends return)."""
    segment, count = None, 0
    if batch.cu_seqlens is not None:
        count = batch.cu_seqlens.numel() - 1
        rows = torch.arange(batch.layout.tokens, device=logp.device)
        segment = torch.searchsorted(batch.cu_seqlens, rows, right=True) - 1
    streams = dict(zip(STREAMS, batch.streams, strict=True))
    w = batch.weights.w.to(logp.dtype)
    tokens = reference.Tokens(w=w, segment=segment, num_segments=count, **streams)  # type: ignore[arg-type]
    numerator, per_token, sums = reference.token_loss(spec, logp, entropy, tokens)
    leaf = logp.detach().requires_grad_()
    with torch.enable_grad():
        again, _, _ = reference.token_loss(spec, leaf, None if entropy is None else entropy.detach(), tokens)
    (c,) = torch.autograd.grad(again, leaf)
    sums["active"] = (c != 0).sum().to(numerator.dtype)
    return numerator * batch.scale, per_token, torch.stack([sums[name].detach() for name in SUM_NAMES])
