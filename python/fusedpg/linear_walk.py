"""Matrix products between hidden states and the output head, a tile of fp32 logits at a time.

A `LinearWalk` owns the workspace of one call: the tile, the chunk's hidden states, the cast block of the weight and the
gathered block of the gradient. Nothing in it grows with the number of tokens, and it knows no loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from . import dispatch
from .linear_plan import (
    ACCELERATOR_COLUMNS,
    ACCELERATOR_GRANULE,
    CAST_COLUMNS,
    COLUMNS,
    GRANULE,
    LinearPlan,
    LinearShape,
    row_stride,
)
from .workspace import lent

_NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Head:
    """Hidden states (B, T, D) with any strides, weight (V, D), bias (V,) or None."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None

    @property
    def compute(self) -> torch.dtype:
        """The dtype of logits and accumulators."""
        wide = torch.float64 in (self.hidden.dtype, self.weight.dtype)
        return torch.float64 if wide else torch.float32

    @property
    def operands(self) -> torch.dtype:
        """The dtype of the products' operands: 16-bit ones where they are added in fp32.

        Tensor cores do that, and CPUs with AVX512-BF16; elsewhere the operands are cast.
        """
        dtype = self.weight.dtype
        if dtype not in _NARROW or self.hidden.dtype != dtype:
            return self.compute
        if self.hidden.device.type == "cpu" and not (dtype == torch.bfloat16 and dispatch.native("cpu").has_product()):
            return self.compute
        return dtype

    @property
    def packs(self) -> bool:
        """Whether the products are the C++ core's: they pick the gradient's rows and round them as they read."""
        return self.hidden.device.type == "cpu" and self.operands != self.compute

    def shape(self, gradient: bool, weight_gradient: bool) -> LinearShape:
        """What the planner needs to know."""
        vocab, width = self.weight.shape
        return LinearShape(
            vocab,
            width,
            itemsize=self.compute.itemsize,
            cast=self.weight.dtype != self.operands,
            accumulate=weight_gradient and self.weight.dtype != self.compute,
            gradient=gradient,
            granule=GRANULE if self.hidden.device.type == "cpu" else ACCELERATOR_GRANULE,
            packs=self.packs,
        )


class LinearWalk:
    """Products over one head, by a plan."""

    def __init__(self, head: Head, plan: LinearPlan) -> None:
        self.head, self.plan = head, plan
        self.vocab, self.width = head.weight.shape
        device, compute, self._operands = head.hidden.device, head.compute, head.operands
        self._step = plan.rows if device.type == "cpu" else ACCELERATOR_GRANULE
        self._granule = GRANULE if device.type == "cpu" else ACCELERATOR_GRANULE
        self._packs = head.packs
        self._block = min(CAST_COLUMNS if device.type == "cpu" else ACCELERATOR_COLUMNS, plan.columns)
        stride = row_stride(self.vocab) if plan.columns == self.vocab else plan.columns
        width = -(-self.width // COLUMNS) * COLUMNS
        self._tile = lent(self, (plan.rows, stride), compute, device)
        self._x = torch.empty(plan.rows, width, dtype=self._operands, device=device)[:, : self.width]
        self._cast = torch.empty(plan.cast_columns, self.width, dtype=self._operands, device=device)
        self._cast_range = (0, 0)
        self._gathered: Tensor | None = None

    def blocks(self) -> Iterator[tuple[int, int]]:
        """The vocabulary in ranges of the tile's columns."""
        return _ranges(0, self.vocab, self.plan.columns)

    # -------------------------------------------------------------- forward

    def take(self, rows: Tensor) -> Tensor:
        """Copy the hidden states of some flat rows into the workspace, the rest of the last granule zero."""
        hidden, count = self.head.hidden, rows.numel()
        x = self._x[: -(-count // self._granule) * self._granule]
        x[:count] = hidden[rows // hidden.shape[1], rows % hidden.shape[1]]
        x[count:] = 0
        return x

    def logits(self, x: Tensor, count: int, begin: int, end: int) -> Tensor:
        """(1, count, end - begin): the logits of the rows taken last, over a range of the vocabulary."""
        tile = self._tile[: x.shape[0], : end - begin]
        for lo, hi in _ranges(begin, end, self.plan.cast_columns):
            weight = self._weight(lo, hi).t()
            for top in range(0, x.shape[0], self._step):
                rows = slice(top, top + self._step)
                product(x[rows], weight, tile[rows, lo - begin : hi - begin])
        if self.head.bias is not None:
            tile += self.head.bias[begin:end]
        return tile[:count].unsqueeze(0)

    def _weight(self, begin: int, end: int) -> Tensor:
        """Rows of the weight as the products take them; the last cast block stays."""
        weight = self.head.weight[begin:end]
        if not self.plan.cast_columns:
            return weight
        cast = self._cast[: end - begin]
        if self._cast_range != (begin, end):
            cast.copy_(weight)
            self._cast_range = (begin, end)
        return cast

    # -------------------------------------------------------------- backward

    def backward(
        self,
        gradient: Tensor,
        x: Tensor,
        keep: Tensor | None,
        begin: int,
        end: int,
        hidden: Tensor | None,
        weight: HeadGradient,
    ) -> None:
        """Add a tile of d logits (count, end - begin) to d hidden (kept rows, D) and to the head's gradient.

        `keep` are the rows of the tile that have a gradient, None for all of them.
        """
        x = x[: gradient.shape[0]] if keep is None else x.index_select(0, keep)
        copies = not self._packs and (keep is not None or self._operands != gradient.dtype)
        step = min(self.plan.cast_columns or self._block, self._block) if copies else self.plan.cast_columns
        for lo, hi in _ranges(begin, end, step):
            g, left = gradient[:, lo - begin : hi - begin], keep
            if not self._packs:
                g, left = self._gather(g, keep), None
            weight.add_bias(g, lo, hi)
            g = g if self._packs else g.to(self._operands)
            if hidden is not None:
                product(g, self._weight(lo, hi), hidden, add=lo > begin, keep=left)
            weight.add(g, x, lo, hi, left)

    def _gather(self, g: Tensor, keep: Tensor | None) -> Tensor:
        """Some rows of a gradient's columns, contiguous."""
        if keep is None:
            return g
        if self._gathered is None:
            self._gathered = torch.empty(self.plan.rows * self._block, dtype=g.dtype, device=g.device)
        out = self._gathered[: keep.numel() * g.shape[1]].view(keep.numel(), g.shape[1])
        return torch.index_select(g, 0, keep, out=out)


class HeadGradient:
    """d weight and d bias, summed over chunks in the compute dtype; the first chunk writes what later ones add to.

    `weight` and `bias` are what is summed into, None where no gradient is wanted, over vocabulary [begin, ...). A
    `weight` in a narrower dtype than `compute` takes one chunk alone, a few columns at a time through `_wide`.
    """

    def __init__(self, weight: Tensor | None, bias: Tensor | None, compute: torch.dtype, begin: int = 0) -> None:
        self.weight, self.bias, self.compute, self.begin = weight, bias, compute, begin
        self._written = False
        self._wide: Tensor | None = None

    def add(self, g: Tensor, x: Tensor, lo: int, hi: int, keep: Tensor | None = None) -> None:
        """The product of a chunk over columns [lo, hi); `keep` are the rows of `g` that `x` has."""
        if self.weight is None:
            return
        into = self.weight[lo - self.begin : hi - self.begin]
        assert into.dtype == self.compute or not self._written
        # in the operands' own dtype the core's product stores its sums rounded
        if into.dtype == self.compute or (into.dtype == x.dtype and into.device.type == "cpu"):
            product(g.t(), x, into, add=self._written, keep=keep)
            return
        if self._wide is None:
            self._wide = torch.empty(hi - lo, into.shape[1], dtype=self.compute, device=into.device)
        wide = self._wide[: hi - lo]
        product(g.t(), x, wide)
        into.copy_(wide)

    def add_bias(self, g: Tensor, lo: int, hi: int) -> None:
        """The column sums of a chunk."""
        if self.bias is not None:
            into = self.bias[lo - self.begin : hi - self.begin]
            sums = g.sum(0, dtype=into.dtype)
            if self._written:
                into += sums
            else:
                into.copy_(sums)

    def next_chunk(self) -> None:
        """All columns of a chunk are in."""
        self._written = True

    def finish(self) -> None:
        """Without any chunk the gradient is zero."""
        if not self._written:
            for tensor in (self.weight, self.bias):
                if tensor is not None:
                    tensor.zero_()


def product(a: Tensor, b: Tensor, out: Tensor, *, add: bool = False, keep: Tensor | None = None) -> None:
    """out = a @ b, or out += a @ b, in the dtype of `out` whatever that of the operands.

    `keep`, on CPUs with 16-bit products only, are the rows (of a transposed `a` the columns) that take part.
    """
    if a.dtype == b.dtype == out.dtype:
        assert keep is None
        if add:
            out.addmm_(a, b)
        else:
            torch.mm(a, b, out=out)
    elif out.device.type == "cpu":
        dispatch.native("cpu").product(a, b, out, add=add, keep=keep)
    elif add:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def _ranges(begin: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    """[begin, end) in ranges of `step`; in one where step is 0."""
    step = step or max(1, end - begin)
    return ((lo, min(lo + step, end)) for lo in range(begin, end, step))
