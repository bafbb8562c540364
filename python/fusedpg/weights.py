"""Mask and reduction to per-token weights: the one definition for all backends.

    loss = sum(w * x) / W        x the per-token loss, w and W from `token_weights`

`Layout` describes how rows form sequences, so that padded and packed input are one case everywhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """`batch` x `length` tokens, numbered row-major; `cu_seqlens` (S+1,) int64 delimits the sequences when packed.

    Padded input has one sequence a row and no `cu_seqlens`. Packed input has batch 1; without `cu_seqlens` its
    sequences are unknown.
    """

    batch: int
    length: int
    padded: bool
    cu_seqlens: Tensor | None

    @property
    def tokens(self) -> int:
        """Number of rows N."""
        return self.batch * self.length

    def boundaries(self, device: torch.device) -> Tensor | None:
        """`cu_seqlens` of the flat rows, also for padded input; None when the sequences are unknown."""
        if not self.padded:
            return self.cu_seqlens
        return torch.arange(self.batch + 1, dtype=torch.int64, device=device) * self.length

    def segment_sum(self, values: Tensor) -> Tensor:
        """Sums of flat fp64 `values` over each sequence, (S,).

        Packed sums are differences of one running sum: exact for 0/1 values in any order of addition.
        """
        if self.padded:
            return values.view(self.batch, self.length).sum(1)
        assert self.cu_seqlens is not None
        running = torch.nn.functional.pad(values.cumsum(0), (1, 0))
        ends = running[self.cu_seqlens.clamp(0, self.tokens)]
        return ends[1:] - ends[:-1]

    def count_sequences(self, selected: Tensor) -> Tensor:
        """How many sequences hold a selected (nonzero) token, 0-d; 0 when the sequences are unknown."""
        if self.padded:
            rows = selected.view(self.batch, self.length)
            if self.length == 0:
                return torch.zeros((), dtype=torch.int64, device=selected.device)
            # the largest byte of a row is found at memory speed, unlike any() of bools
            largest = rows.view(torch.uint8).amax(1) if rows.dtype == torch.bool else rows.amax(1)
            return torch.count_nonzero(largest)
        if self.cu_seqlens is None:
            return torch.zeros((), dtype=torch.int64, device=selected.device)
        return (self.segment_sum((selected != 0).double()) > 0).sum()

    def spread(self, per_sequence: Tensor) -> Tensor:
        """A value a sequence (S,) to its tokens, flat (N,)."""
        if self.padded:
            # one sequence would be flattened to a view of stride 0, which no kernel reads
            return per_sequence[:, None].expand(self.batch, self.length).reshape(-1).contiguous()
        assert self.cu_seqlens is not None
        if per_sequence.numel() == 0:
            return per_sequence.new_zeros(self.tokens)
        rows = torch.arange(self.tokens, device=per_sequence.device)
        segment = torch.searchsorted(self.cu_seqlens, rows, right=True) - 1
        return per_sequence[segment.clamp(0, per_sequence.numel() - 1)]


@dataclass(frozen=True)
class Weights:
    """Per-token weight `w` (N,), the reduction's unit count `weight` (0-d) and the number of sequences (0-d).

    Where the weight is a bool mask itself, `w` is that mask: a backend reads it as 0 and 1.
    """

    w: Tensor
    weight: Tensor
    sequences: Tensor


def token_weights(
    mask: Tensor | None,
    layout: Layout,
    reduction: str,
    max_tokens: int | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Weights:
    """Weights of one reduction; `mask` (N,) selects where nonzero and weighs by its value, None is all ones.

    =========================  ======================  =========================================
    reduction                  w                       weight
    =========================  ======================  =========================================
    token-mean                 m                       sum(m)
    token-sum                  m                       1
    seq-mean-token-mean        m / sum of m over the   sequences with a selected token
                               token's sequence
    seq-mean-token-sum         m                       sequences with a selected token
    seq-mean-token-sum-norm    m / max_tokens          sequences with a selected token
    =========================  ======================  =========================================

    Counts are summed in fp64 and exact whatever the mask's dtype.
    """
    if mask is None:
        mask = torch.ones(layout.tokens, dtype=torch.bool, device=device)
    m = mask if mask.dtype == torch.bool else mask.to(dtype)
    if reduction == "seq-mean-token-mean":
        per_sequence = layout.segment_sum(m.double())
        sequences = (per_sequence > 0).sum().to(dtype)
        inverse = torch.where(per_sequence > 0, 1.0 / per_sequence, 0.0)
        return Weights((m * layout.spread(inverse)).to(dtype), sequences, sequences)
    sequences = layout.count_sequences(m).to(dtype)
    if reduction == "token-mean":
        if m.dtype == torch.bool:
            return Weights(m, torch.count_nonzero(m).to(dtype), sequences)
        return Weights(m, m.sum(dtype=torch.float64).to(dtype), sequences)
    if reduction == "token-sum":
        return Weights(m, torch.ones((), dtype=dtype, device=device), sequences)
    if reduction == "seq-mean-token-sum":
        return Weights(m, sequences, sequences)
    if reduction == "seq-mean-token-sum-norm":
        assert max_tokens is not None
        return Weights(m.to(dtype) / max_tokens, sequences, sequences)
    raise ValueError(f"reduction: no weights are defined for {reduction!r}")


def inverse_denominator(weight: Tensor, normalizer: Tensor | float | None) -> Tensor:
    """1 / (normalizer or weight) as a 0-d tensor; 0 where that denominator is 0, so an empty batch gives loss 0."""
    if normalizer is None:
        denominator = weight
    elif isinstance(normalizer, Tensor):
        denominator = normalizer.detach().to(device=weight.device, dtype=weight.dtype).reshape(())
    else:
        return torch.full((), 1.0 / float(normalizer), dtype=weight.dtype, device=weight.device)
    return torch.where(denominator == 0, 0.0, 1.0 / denominator)
