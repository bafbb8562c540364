"""Which rows of a loss on hidden states come together in a tile, and in which order."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .linear_plan import sequence_chunks


def idle_last(rows: Tensor, advantages: Tensor | None) -> Tensor:
    """Rows without an advantage behind the others: most have no coefficient, and those in front need no gathering."""
    if advantages is None:
        return rows
    live = advantages[rows] != 0
    return torch.cat([rows[live], rows[~live]])


def token_chunks(rows: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Rows by the tile, without boundaries."""
    return ((chunk, None) for chunk in rows.split(size) if chunk.numel())


def whole_sequences(rows: Tensor, lengths: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Rows of consecutive whole sequences, with their boundaries among those rows; `lengths` count the wanted rows."""
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    host = ends.tolist()
    for first, last in sequence_chunks(lengths.tolist(), size):
        if host[last] > host[first]:
            yield rows[host[first] : host[last]], ends[first : last + 1] - ends[first]


def sequence_lengths(rows: Tensor, cu_seqlens: Tensor) -> Tensor:
    """How many of the rows each sequence has, (S,)."""
    sequences = cu_seqlens.numel() - 1
    segment = torch.searchsorted(cu_seqlens, rows, right=True) - 1
    return torch.bincount(segment, minlength=sequences)
