"""The planner alone: shapes and a workspace in, a walk out; no tensors."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedpg import LinearShape, plan_linear
from fusedpg.linear_plan import (
    ACCELERATOR_GRANULE,
    CAST_COLUMNS,
    COLUMNS,
    GRANULE,
    LEAST_ROWS,
    MIB,
    MOST_ROWS,
    Mode,
    row_stride,
    sequence_chunks,
)

QWEN = LinearShape(151936, 4096)

shapes = st.builds(
    LinearShape,
    vocab=st.one_of(st.integers(1, 300), st.sampled_from([32768, 50257, 151665, 151936])),
    width=st.sampled_from([1, 7, 64, 896, 4096]),
    itemsize=st.sampled_from([4, 8]),
    cast=st.booleans(),
    accumulate=st.booleans(),
    gradient=st.booleans(),
    granule=st.sampled_from([GRANULE, ACCELERATOR_GRANULE]),
)
workspaces = st.integers(10, 33).flatmap(lambda bits: st.integers(1 << bits, 2 << bits))


def plan_or_none(shape, workspace, **options):
    try:
        return plan_linear(shape, workspace, **options)
    except ValueError as error:
        assert "workspace_mib" in str(error)  # noqa: PT017
        return None


def test_a_token_level_loss_takes_chunks_and_three_products():
    plan = plan_linear(QWEN, 512 * MIB)
    assert (plan.mode, plan.products, plan.columns) == (Mode.TOKENS, 3, 151936)
    assert plan.rows % GRANULE == 0
    assert plan.rows >= LEAST_ROWS


def test_a_sequence_level_loss_takes_whole_sequences_while_they_fit():
    rows = plan_linear(QWEN, 512 * MIB).rows
    for longest, mode, products in ((1, Mode.SEQUENCES, 3), (rows, Mode.SEQUENCES, 3), (rows + 1, Mode.TWO_PASSES, 4)):
        plan = plan_linear(QWEN, 512 * MIB, longest_sequence=longest)
        assert (plan.mode, plan.products, plan.rows, plan.columns) == (mode, products, rows, QWEN.vocab)


def test_unknown_coefficients_take_two_passes_over_the_whole_vocabulary():
    plan = plan_linear(QWEN, 512 * MIB, known_coefficients=False)
    assert (plan.mode, plan.products, plan.columns) == (Mode.TWO_PASSES, 4, QWEN.vocab)


def test_a_small_workspace_cuts_the_vocabulary():
    plan = plan_linear(QWEN, 32 * MIB)
    assert (plan.mode, plan.products) == (Mode.TWO_PASSES, 4)
    assert plan.columns < QWEN.vocab
    assert plan.columns % COLUMNS == 0


@pytest.mark.parametrize("workspace", [32 * MIB, 512 * MIB])
def test_without_a_gradient_there_is_one_product(workspace):
    plan = plan_linear(LinearShape(151936, 4096, gradient=False), workspace)
    assert (plan.mode, plan.products, plan.accumulator) == (Mode.TOKENS, 1, 0)


def test_a_narrower_weight_is_cast_in_blocks_and_its_gradient_summed_aside():
    plan = plan_linear(LinearShape(151936, 4096, cast=True, accumulate=True), 512 * MIB)
    assert plan.cast_columns == 2048
    assert plan.accumulator == 151936 * 4096 * 4
    blocks = plan_linear(LinearShape(151936, 4096, cast=True, accumulate=True), 64 * MIB)
    assert blocks.accumulator == blocks.columns * 4096 * 4  # one block's at a time
    assert blocks.cast_columns == blocks.columns


def test_products_that_pick_rows_need_no_block_to_gather_them_in():
    gathers, packs = (plan_linear(LinearShape(32768, 64, packs=packs), 64 * MIB) for packs in (False, True))
    each = 4 * (row_stride(32768) + 2 * 64)  # of a row: its logits, hidden states and their gradient
    assert packs.workspace == packs.rows * each
    assert gathers.workspace == gathers.rows * (each + 4 * CAST_COLUMNS)


def test_an_accelerator_s_products_have_whole_granules():
    for workspace in (128 * MIB, 2048 * MIB):
        assert plan_linear(LinearShape(151936, 4096, granule=512), workspace).rows % ACCELERATOR_GRANULE == 0


def test_it_prints_itself():
    text = str(plan_linear(LinearShape(32768, 1024, cast=True, accumulate=True), 256 * MIB))
    assert re.fullmatch(
        r"token chunks: tile \d+ x 32768, \d+ MiB of workspace \+ 128 MiB for the weight's gradient, 6NDV", text
    )
    assert str(plan_linear(QWEN, 512 * MIB, longest_sequence=9)).startswith("sequence-aligned chunks: tile ")
    assert str(plan_linear(QWEN, 512 * MIB, known_coefficients=False)).endswith(" MiB of workspace, 8NDV")


def test_too_small_a_workspace_names_the_argument_and_the_least():
    with pytest.raises(ValueError) as error:  # noqa: PT011
        plan_linear(QWEN, MIB)
    assert str(error.value) == (
        "workspace_mib: expected at least 2 for 64 rows of hidden size 4096 and 16 columns of the vocabulary; got 1; "
        "raise it, or pass None"
    )


@given(shapes, workspaces, st.booleans(), st.integers(0, 5000))
@settings(max_examples=300, deadline=None)
def test_every_plan_fits_and_is_well_formed(shape, workspace, known, longest):
    plan = plan_or_none(shape, workspace, known_coefficients=known, longest_sequence=longest)
    if plan is None:
        assert plan_or_none(shape, 8 << 30) is not None
        return
    assert 0 < plan.workspace <= workspace
    assert plan.rows % min(shape.granule, GRANULE) == 0
    assert GRANULE <= plan.rows <= MOST_ROWS
    assert plan.columns == shape.vocab or plan.columns % COLUMNS == 0
    assert 1 <= plan.columns <= shape.vocab
    assert bool(plan.cast_columns) == shape.cast
    assert bool(plan.accumulator) == shape.accumulate
    assert plan.products == (1 if not shape.gradient else 4 if plan.mode == Mode.TWO_PASSES else 3)
    if plan.mode != Mode.TWO_PASSES and shape.gradient:
        assert plan.columns == shape.vocab
        assert longest <= plan.rows
        assert known


@given(shapes, workspaces, workspaces, st.booleans(), st.sampled_from([0, 100, 1000]))
@settings(max_examples=300, deadline=None)
def test_more_workspace_is_never_worse(shape, one, other, known, longest):
    plans = [plan_or_none(shape, w, known_coefficients=known, longest_sequence=longest) for w in sorted((one, other))]
    if plans[0] is None:
        return
    less, more = plans
    assert more is not None
    assert more.products <= less.products
    assert more.columns >= less.columns or more.rows > less.rows
    if (more.columns == shape.vocab) == (less.columns == shape.vocab):
        assert more.rows >= less.rows


@given(shapes, workspaces)
@settings(max_examples=300, deadline=None)
def test_a_gradient_does_not_change_how_the_vocabulary_is_cut(shape, workspace):
    """So that the log-probs of a call with and of one without have the same bits."""
    columns = set()
    for gradient, known, longest in itertools.product((False, True), (False, True), (0, 700)):
        kind = LinearShape(shape.vocab, shape.width, shape.itemsize, shape.cast, False, gradient, shape.granule)
        plan = plan_or_none(kind, workspace, known_coefficients=known, longest_sequence=longest)
        columns.add(plan and (plan.columns, plan.cast_columns))
    assert len(columns) == 1


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(0, 60))
@settings(max_examples=300, deadline=None)
def test_sequence_chunks_cover_every_sequence_in_order(lengths, more):
    rows = max([1, *lengths]) + more
    chunks = sequence_chunks(lengths, rows)
    assert [i for first, last in chunks for i in range(first, last)] == list(range(len(lengths)))
    sizes = [sum(lengths[first:last]) for first, last in chunks]
    assert all(size <= rows for size in sizes)
    assert all(last > first for first, last in chunks)
    for (_, last), size in zip(chunks[:-1], sizes[:-1], strict=True):
        assert size + lengths[last] > rows, "a chunk ends only where the next sequence does not fit"
