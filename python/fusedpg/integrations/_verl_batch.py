"""A micro-batch of verl as the ops take it: padded (B, T) tensors, or jagged ones packed to their response tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class MicroBatch:
    """Response tokens, (B, T) padded or (N,) packed; `layout` is there when they are packed."""

    logp: Tensor
    logp_old: Tensor
    advantages: Tensor
    mask: Tensor
    is_weights: Tensor | None = None
    entropy: Tensor | None = None
    logp_ref: Tensor | None = None
    layout: ResponseLayout | None = None

    def replace(self, **changes: Any) -> MicroBatch:
        """A copy with some fields changed."""
        return replace(self, **changes)

    @property
    def shape(self) -> tuple[int, int]:
        """(sequences, the width to which verl pads their responses)."""
        return (self.logp.shape[0], self.logp.shape[1]) if self.layout is None else self.layout.shape

    @property
    def cu_seqlens(self) -> Tensor | None:
        """Boundaries of packed sequences."""
        return None if self.layout is None else self.layout.cu_seqlens

    def padded(self, values: Tensor) -> Tensor:
        """Per-token values as verl's functions take them, (B, T)."""
        return values if self.layout is None else self.layout.padded(values)

    def like(self, values: Tensor) -> Tensor:
        """(B, T) values in this batch's own form."""
        return values if self.layout is None else values[self.layout.row, self.layout.column]

    def sequence_sum(self, values: Tensor) -> Tensor:
        """Sums over the trained tokens of each sequence, (B,)."""
        return torch.where(self.padded(self.mask), self.padded(values), 0.0).sum(1)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """A value a sequence to its tokens."""
        return self.like(per_sequence[:, None].expand(self.shape))

    def mean(self, values: Tensor) -> Tensor:
        """verl's `masked_mean`: 0 over no tokens."""
        return torch.where(self.mask, values, 0.0).sum() / (self.mask.sum() + 1e-8)


@dataclass(frozen=True)
class ResponseLayout:
    """Where the response tokens of jagged sequences are; nothing is padded until `padded` is called."""

    #: (N,) places of the model's packed output that score the response tokens: each one left of its token
    index: Tensor
    #: (N,) sequence of a response token, and its place in the response
    row: Tensor
    column: Tensor
    cu_seqlens: Tensor
    shape: tuple[int, int]

    def padded(self, values: Tensor) -> Tensor:
        """(N,) values as (B, T), 0 after a response."""
        return values.new_zeros(self.shape).index_put((self.row, self.column), values)

    def take(self, name: str, field: Tensor) -> Tensor:
        """A response field of the data, jagged or padded, as (N,)."""
        if not field.is_nested:
            return field[self.row, self.column]
        values = field.values()
        if values.shape[0] != self.row.shape[0]:
            raise ValueError(
                f"{name}: expected one value for each of the {self.row.shape[0]} response tokens; got {values.shape[0]}"
            )
        return values

    def score(self, name: str, output: Tensor) -> Tensor:
        """The response part of a per-token model output over prompts and responses, (N,), differentiable."""
        values = output.values() if output.is_nested else output
        if values.shape[0] != self._tokens:
            raise ValueError(
                f"{name}: expected one value for each of the {self._tokens} tokens of prompts and responses; got "
                f"{values.shape[0]}"
            )
        return values[self.index]

    @cached_property
    def _tokens(self) -> int:
        return int(self.index[-1]) + 2 if self.index.numel() else 0


def response_layout(data: Mapping[str, Any]) -> ResponseLayout:
    """Where verl's micro-batch has its response tokens, from `prompts` and `responses` (padded: `attention_mask`).

    Raises:
        ValueError: a sequence without a prompt, whose first response token nothing scores.
    """
    prompts, responses, mask = data["prompts"], data["responses"], data["response_mask"]
    if prompts.is_nested:
        lengths = torch.stack([prompts.offsets().diff(), responses.offsets().diff()])
    else:
        attended, width = data["attention_mask"], prompts.shape[1]
        lengths = torch.stack([attended[:, :width].sum(1), attended[:, width:].sum(1)])
    prompt, response = lengths.long().cpu()
    if bool((prompt == 0).any()):
        raise ValueError(f"prompts: expected a token before every response; got prompts of {prompt.tolist()} tokens")
    rows = prompt.shape[0]
    cu_seqlens = torch.nn.functional.pad(response.cumsum(0), (1, 0))
    row = torch.repeat_interleave(torch.arange(rows), response)
    column = torch.arange(row.shape[0]) - cu_seqlens[row]
    starts = (prompt + response).cumsum(0) - response - 1
    width = mask.shape[1] if not mask.is_nested else int(response.max()) if rows else 0
    device = mask.device
    index = (starts[row] + column).to(device)
    return ResponseLayout(index, row.to(device), column.to(device), cu_seqlens.to(device), (rows, width))
