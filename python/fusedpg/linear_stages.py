"""The stages of a loss on hidden states, chunk by chunk: log-probs (A), loss and gradient (A, B, C), gradient (C).

All rows are flat; `rows` are the indices of those that are wanted. What a stage leaves out stays zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import dispatch
from .linear_merge import BlockMerge
from .linear_plan import LinearPlan
from .linear_walk import Head, HeadGradient, LinearWalk


class LogitMap(NamedTuple):
    """How logits become softmax arguments: as the native functions take it."""

    row_temperature: Tensor | None
    temperature: float
    softcap: float
    logit_scale: float

    def of(self, rows: Tensor) -> LogitMap:
        """The same for some rows."""
        return self if self.row_temperature is None else self._replace(row_temperature=self.row_temperature[rows])

    def slope(self) -> Tensor | float:
        """What multiplies a difference of (soft-capped) logits."""
        numerator = 1.0 if self.softcap > 0 else self.logit_scale
        temperature = self.temperature if self.row_temperature is None else self.row_temperature.double()
        return numerator / temperature


class RowStats(NamedTuple):
    """Per-row results of stage A, (N,) in the compute dtype; entropy is empty when not wanted."""

    logp: Tensor
    entropy: Tensor
    row_max: Tensor
    log_sum: Tensor

    @classmethod
    def zeros(cls, like: Tensor, dtype: torch.dtype, want_entropy: bool) -> RowStats:
        """One value for each element of `like`."""
        n = like.numel()
        return cls(*(like.new_zeros(n if wanted else 0, dtype=dtype) for wanted in (True, want_entropy, True, True)))

    def put(self, rows: Tensor, values: Sequence[Tensor]) -> None:
        """Store the statistics of some rows."""
        for into, value in zip(self, values, strict=True):
            if into.numel():
                into[rows] = value.to(into.dtype)


class Gradients:
    """d hidden, d weight and d bias of one call, each None where none is wanted.

    Summed in the compute dtype and rounded once; fp16 ones stay in it, because a loss scale may come later.
    """

    def __init__(self, head: Head, wanted: Sequence[bool], keep_fp16: bool) -> None:
        self.head = head
        tensors = (head.hidden, head.weight, head.bias)
        self.hidden, self.weight, self.bias = (
            torch.empty(t.shape, dtype=gradient_dtype(t, head.compute, keep_fp16), device=t.device)
            if t is not None and want
            else None
            for t, want in zip(tensors, wanted, strict=True)
        )
        if self.hidden is not None:
            self.hidden.zero_()

    def block(self, begin: int, end: int, once: bool = False) -> HeadGradient:
        """Where the head's gradient over [begin, end) is summed: its own memory where that is in the compute dtype.

        So it is for d weight of the only chunk (`once`), which has nothing to add to.
        """
        compute = self.head.compute

        def sums(t: Tensor | None) -> Tensor | None:
            if t is None or t.dtype == compute:
                return t if t is None else t[begin:end]
            return torch.empty(t[begin:end].shape, dtype=compute, device=t.device)

        weight = self.weight[begin:end] if once and self.weight is not None else sums(self.weight)
        return HeadGradient(weight, sums(self.bias), compute, begin)

    def close(self, block: HeadGradient, end: int) -> None:
        """All chunks of a block are in: round once."""
        block.finish()
        for into, total in ((self.weight, block.weight), (self.bias, block.bias)):
            if into is not None and total is not None and into.dtype != total.dtype:
                into[block.begin : end] = total

    def put_hidden(self, rows: Tensor, values: Tensor) -> None:
        """d hidden of some flat rows."""
        assert self.hidden is not None
        self.hidden.view(-1, self.hidden.shape[-1])[rows] = values.to(self.hidden.dtype)

    def add_hidden(self, rows: Tensor, values: Tensor) -> None:
        """A block's share of d hidden of some flat rows, where d hidden is in the compute dtype."""
        assert self.hidden is not None
        self.hidden.view(-1, self.hidden.shape[-1]).index_add_(0, rows, values)

    def hidden_sums(self, rows: Tensor) -> Tensor | None:
        """Zeros to sum the blocks' shares of narrower hidden states in; None where d hidden itself serves."""
        if self.hidden is None or self.hidden.dtype == self.head.compute:
            return None
        return self.hidden.new_zeros(rows.numel(), self.hidden.shape[-1], dtype=self.head.compute)

    def all(self) -> tuple[Tensor, Tensor, Tensor]:
        """As an operator returns them: empty for None."""
        empty = self.head.hidden.new_empty(0)
        a, b, c = (empty.clone() if t is None else t for t in (self.hidden, self.weight, self.bias))
        return a, b, c


def gradient_dtype(tensor: Tensor, compute: torch.dtype, keep_fp16: bool) -> torch.dtype:
    """The dtype in which a gradient leaves its operator."""
    return compute if keep_fp16 and tensor.dtype == torch.float16 else tensor.dtype


def score(
    head: Head, plan: LinearPlan, targets: Tensor, rows: Tensor, logit_map: LogitMap, want_entropy: bool, backend: str
) -> RowStats:
    """Stage A: one forward product."""
    walk, native = LinearWalk(head, plan), dispatch.native(backend)
    out = RowStats.zeros(targets, head.compute, want_entropy)
    whole = plan.columns >= walk.vocab
    merge = None if whole else BlockMerge(targets, logit_map.slope())
    for begin, end in walk.blocks():
        for chunk in rows.split(plan.rows):
            tile = walk.logits(walk.take(chunk), chunk.numel(), begin, end)
            ids = _ids(targets, chunk, begin, end, whole)
            parts = native.logprob_forward(tile, ids, None, *logit_map.of(chunk), want_entropy)
            if merge is None:
                out.put(chunk, parts)
            else:
                merge.add(chunk, ids >= 0, *parts)
    if merge is not None and rows.numel():
        out.put(rows, merge.result(rows, want_entropy))
    return out


def differentiate(
    head: Head,
    plan: LinearPlan,
    targets: Tensor,
    stats: RowStats,
    c: Tensor,
    e: Tensor | None,
    logit_map: LogitMap,
    gradients: Gradients,
    backend: str,
) -> None:
    """Stage C: the forward product again for rows with a coefficient, then the two of the gradient."""
    walk, native = LinearWalk(head, plan), dispatch.native(backend)
    rows = (c != 0 if e is None else (c != 0) | (e != 0)).nonzero().view(-1)
    whole = plan.columns >= walk.vocab
    total = gradients.hidden_sums(rows) if not whole else None
    for begin, end in walk.blocks():
        block = gradients.block(begin, end)
        for at, chunk in zip(range(0, rows.numel(), plan.rows), rows.split(plan.rows), strict=False):
            x = walk.take(chunk)
            tile = walk.logits(x, chunk.numel(), begin, end)
            ids = _ids(targets, chunk, begin, end, whole)
            coefficients = (None if e is None else stats.entropy[chunk], c[chunk], None if e is None else e[chunk])
            saved = (stats.row_max[chunk], stats.log_sum[chunk])
            native.logprob_backward(tile, ids, *saved, *coefficients, *logit_map.of(chunk), tile)
            d_hidden = _through_head(walk, gradients, block, tile, x, None, begin, end)
            if d_hidden is not None and total is not None:
                total[at : at + chunk.numel()] += d_hidden
            elif d_hidden is not None and not whole:
                gradients.add_hidden(chunk, d_hidden)
            elif d_hidden is not None:
                gradients.put_hidden(chunk, d_hidden)
        gradients.close(block, end)
    if total is not None:
        gradients.put_hidden(rows, total)


class LossConstants(NamedTuple):
    """What stage B reads: weights (N,), the scale of the loss, per-token streams, boundaries of the sequences."""

    w: Tensor
    scale: Tensor
    streams: list[Tensor | None]
    cu_seqlens: Tensor | None

    def of(self, rows: Tensor, cu_seqlens: Tensor | None) -> tuple[Any, ...]:
        """The same for some rows, as a native function takes them."""
        return self.w[rows], self.scale, [None if s is None else s[rows] for s in self.streams], cu_seqlens


def fuse(
    head: Head,
    plan: LinearPlan,
    targets: Tensor,
    chunks: Iterator[tuple[Tensor, Tensor | None]],
    spec: list[float],
    constants: LossConstants,
    logit_map: LogitMap,
    want_entropy: bool,
    gradients: Gradients,
    backend: str,
) -> RowStats:
    """Stages A, B and C of each chunk while its logits are there; rows without a coefficient leave C's products out."""
    walk, native = LinearWalk(head, plan), dispatch.native(backend)
    out = RowStats.zeros(targets, head.compute, want_entropy)
    every = list(chunks)
    block = gradients.block(0, walk.vocab, once=len(every) == 1)
    for chunk, cu in every:
        x = walk.take(chunk)
        tile = walk.logits(x, chunk.numel(), 0, walk.vocab)
        w, scale, streams, cu = constants.of(chunk, cu)
        result = native.loss_forward(
            spec, tile, targets[chunk], w, scale, streams, cu, *logit_map.of(chunk), want_entropy, tile
        )
        out.put(chunk, result[:4])
        count, keep = worth_keeping(result[5], result[6])
        add_chunk(walk, gradients, block, tile[:, :count], x[:count], chunk[:count], keep)
    gradients.close(block, walk.vocab)
    return out


def add_chunk(
    walk: LinearWalk,
    gradients: Gradients,
    block: HeadGradient,
    tile: Tensor,
    x: Tensor,
    rows: Tensor,
    keep: Tensor | None = None,
) -> None:
    """Take in d logits (1, n, V) of some rows; `keep` are those of the tile that have any, None for all."""
    kept = rows if keep is None else rows[keep]
    if kept.numel() == 0:
        return
    d_hidden = _through_head(walk, gradients, block, tile, x, keep, 0, walk.vocab)
    if d_hidden is not None:
        gradients.put_hidden(kept, d_hidden)


def worth_keeping(c: Tensor, e: Tensor) -> tuple[int, Tensor | None]:
    """(n, keep): the first n rows have every coefficient; `keep` of them do, None where a copy would not pay."""
    has = (c != 0) | (e != 0) if e.numel() else c != 0
    rows = has.nonzero().view(-1)
    count = int(rows[-1]) + 1 if rows.numel() else 0
    return count, rows if 8 * rows.numel() <= 7 * count else None


def _ids(targets: Tensor, chunk: Tensor, begin: int, end: int, whole: bool) -> Tensor:
    """Targets as columns of a block, -1 where they are in another."""
    ids = targets[chunk]
    if whole:
        return ids
    return torch.where((ids >= begin) & (ids < end), ids - begin, -1)


def _through_head(
    walk: LinearWalk,
    gradients: Gradients,
    block: HeadGradient,
    tile: Tensor,
    x: Tensor,
    keep: Tensor | None,
    begin: int,
    end: int,
) -> Tensor | None:
    """The products of a chunk's d logits over a range of the vocabulary; d hidden of the kept rows where wanted."""
    d_hidden = None
    if gradients.hidden is not None:
        count = tile.shape[1] if keep is None else keep.numel()
        d_hidden = torch.empty(count, walk.width, dtype=walk.head.compute, device=tile.device)
    walk.backward(tile[0], x, keep, begin, end, d_hidden, block)
    block.next_chunk()
    return d_hidden
