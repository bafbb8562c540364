"""How the path from hidden states walks its logits: chunks of tokens, of whole sequences, or two passes over blocks.

Standard library only. With N tokens, hidden size D and vocabulary V one matrix product costs 2NDV floating-point
operations. The forward product and the two of the gradient make 6NDV where the loss's coefficients are known before the
chunk's logits are gone; where they are not, the forward product is computed again: 8NDV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

MIB = 1 << 20
#: rows of every product are a multiple of this: a row's logits then do not depend on how many rows come with it
GRANULE = 64
#: on an accelerator, whose libraries choose the kernel by the shape, all forward products have exactly this many
ACCELERATOR_GRANULE = 512
#: logits of a row begin at a multiple of this many elements: products into odd strides run at a third of the speed
COLUMNS = 16
#: fewer rows of a chunk cost more, more save no time
LEAST_ROWS, MOST_ROWS = 128, 4096
#: columns of the weight that are cast, or of the gradient that are gathered, at a time: what the caches of a CPU hold,
#: and what keeps the products of an accelerator large
CAST_COLUMNS, ACCELERATOR_COLUMNS = 2048, 16_384
#: columns of a vocabulary block of two passes
BLOCK_COLUMNS = 8208


class Mode(Enum):
    """The three walks."""

    TOKENS = "token chunks"
    SEQUENCES = "sequence-aligned chunks"
    TWO_PASSES = "two passes"


@dataclass(frozen=True)
class LinearPlan:
    """The walk of one call; `print(plan)` says it in a line.

    Attributes:
        mode: which walk.
        rows: rows of the logits tile.
        columns: columns of the logits tile; V unless the vocabulary is cut into blocks.
        cast_columns: columns of the weight (and of a gathered gradient) that are held in the compute dtype at a time;
            0 where the weight is used as it is stored.
        workspace: bytes of everything that is allocated beside the gradients, and does not grow with N.
        accumulator: bytes of the fp32 weight gradient of a narrower weight, which is cast once at the end.
        products: matrix products of 2NDV each, forward and gradient together.
    """

    mode: Mode
    rows: int
    columns: int
    cast_columns: int
    workspace: int
    accumulator: int
    products: int

    def __str__(self) -> str:
        text = f"{self.mode.value}: tile {self.rows} x {self.columns}, {self.workspace / MIB:.0f} MiB of workspace"
        if self.accumulator:
            text += f" + {self.accumulator / MIB:.0f} MiB for the weight's gradient"
        return f"{text}, {2 * self.products}NDV"


@dataclass(frozen=True)
class LinearShape:
    """What a plan depends on, none of which is N.

    Attributes:
        vocab, width: V and D.
        itemsize: bytes of the compute dtype.
        cast: whether the weight is cast to the compute dtype for the products.
        accumulate: whether the weight's gradient needs a sum in the compute dtype before it is stored.
        gradient: whether there is a gradient at all.
        granule: rows of a product, or what they are a multiple of.
        packs: whether the products themselves pick the gradient's rows and round them, so that none is gathered.
    """

    vocab: int
    width: int
    itemsize: int = 4
    cast: bool = False
    accumulate: bool = False
    gradient: bool = True
    granule: int = GRANULE
    packs: bool = False

    @property
    def stride(self) -> int:
        """Elements from one row of the tile to the next."""
        return row_stride(self.vocab)

    @property
    def block(self) -> int:
        """Columns that are cast or gathered at a time."""
        return min(CAST_COLUMNS if self.granule == GRANULE else ACCELERATOR_COLUMNS, self.stride)


def row_stride(columns: int) -> int:
    """A multiple of `COLUMNS`; not one of 1024, at which the rows of a column crowd into a few sets of the caches."""
    stride = -(-columns // COLUMNS) * COLUMNS
    return stride if stride % 1024 else stride + COLUMNS


def plan_linear(
    shape: LinearShape,
    workspace: int,
    *,
    known_coefficients: bool = True,
    longest_sequence: int = 0,
) -> LinearPlan:
    """The cheapest walk whose workspace is at most `workspace` bytes.

    Args:
        shape: vocabulary, hidden size and dtypes.
        workspace: bytes.
        known_coefficients: False where the coefficients of the gradient are known only after every log-prob (a loss in
            Python, a selection over the batch).
        longest_sequence: tokens of the longest sequence where the loss sums over sequences; 0 where it does not.

    Raises:
        ValueError: a workspace that not even one block of the fewest rows by 16 columns fits in.
    """
    cast_columns = shape.block if shape.cast else 0
    # a call without a gradient cuts the vocabulary like one with: the log-probs of both have the same bits
    trained = replace(shape, gradient=True)
    rows = _rows_that_fit(trained, workspace, cast_columns)
    accumulator = shape.vocab * shape.width * shape.itemsize if shape.accumulate else 0
    # chunks of fewer rows than this spend more time on the weight's gradient than a second forward product takes
    fits = rows >= max(LEAST_ROWS, shape.granule)
    if not shape.gradient:
        mode, products = Mode.TOKENS, 1
    elif not known_coefficients or not fits or longest_sequence > rows:
        mode, products = Mode.TWO_PASSES, 4
    else:
        mode, products = (Mode.SEQUENCES if longest_sequence else Mode.TOKENS), 3
    if fits:
        used = _bytes(shape, rows, shape.stride, cast_columns)
        return LinearPlan(mode, rows, shape.vocab, cast_columns, used, accumulator, products)
    return _vocabulary_blocks(shape, workspace, mode, products)


def whole_rows_workspace(shape: LinearShape) -> int:
    """The least workspace that holds whole rows: a default below it would cut a row where memory is short."""
    cast_columns = shape.block if shape.cast else 0
    return _bytes(replace(shape, gradient=True), max(LEAST_ROWS, shape.granule), shape.stride, cast_columns)


def _bytes(shape: LinearShape, rows: int, columns: int, cast_columns: int) -> int:
    """Tile, the chunk's hidden states and their gradient, the cast block of the weight, the gathered block."""
    gathered = rows * min(columns, shape.block) if shape.gradient and not shape.packs else 0
    hidden = rows * shape.width * (2 if shape.gradient else 1)
    return shape.itemsize * (rows * columns + hidden + gathered + cast_columns * shape.width)


def _rows_that_fit(shape: LinearShape, workspace: int, cast_columns: int) -> int:
    fixed = _bytes(shape, 0, shape.stride, cast_columns)
    each = _bytes(shape, 1, shape.stride, 0)
    return min(MOST_ROWS, max(0, workspace - fixed) // each // shape.granule * shape.granule)


def _vocabulary_blocks(shape: LinearShape, workspace: int, mode: Mode, products: int) -> LinearPlan:
    """Tiles of some columns and of as many rows as keep a block's products efficient."""
    trained = replace(shape, gradient=True)
    for rows in (r for r in (1024, 512, 256, 128, GRANULE) if r >= shape.granule):
        fixed = _bytes(trained, rows, 0, 0)
        each = _bytes(trained, rows, COLUMNS, COLUMNS if shape.cast else 0) - fixed
        columns = max(0, workspace - fixed) // each * COLUMNS
        if columns >= min(2048, shape.stride) or (rows == shape.granule and columns >= COLUMNS):
            columns = min(columns, BLOCK_COLUMNS, shape.stride)
            cast = columns if shape.cast else 0
            accumulator = columns * shape.width * shape.itemsize if shape.accumulate else 0
            used = _bytes(shape, rows, columns, cast)
            return LinearPlan(mode, rows, min(columns, shape.vocab), cast, used, accumulator, products)
    least = _bytes(trained, shape.granule, COLUMNS, COLUMNS if shape.cast else 0)
    raise ValueError(
        f"workspace_mib: expected at least {least / MIB:.2g} for {shape.granule} rows of hidden size {shape.width} and "
        f"{COLUMNS} columns of the vocabulary; got {workspace / MIB:.2g}; raise it, or pass None"
    )


def sequence_chunks(lengths: Sequence[int], rows: int) -> list[tuple[int, int]]:
    """Ranges [first, last) of consecutive sequences whose tokens fit in `rows`; each fits alone."""
    chunks, first, used = [], 0, 0
    for i, length in enumerate(lengths):
        if used + length > rows:
            chunks.append((first, i))
            first, used = i, 0
        used += length
    if first < len(lengths):
        chunks.append((first, len(lengths)))
    return chunks
