"""P5, what needs no GPU: bytes a logit, machine code and compilations of Triton kernels, ours beside others'."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial

from ..evidence.cases import ENTROPY, FORWARD, OURS, SEQUENCE, TOKEN
from ..evidence.rows import TARGETS, Compilations, Compiled, Moved
from . import static_parts
from .bench_options import Options
from .report import Job, Section, Target
from .static_parts import Found
from .timing import Tick

#: bytes a logit in bf16: tasks, which figure, bound
BYTES = (
    ("forward", (FORWARD, ENTROPY), "worst", 2.0),
    ("loss and gradient in one pass, re-reads cached", (TOKEN,), "best", 4.0),
    ("loss and gradient in one pass, every access from memory", (TOKEN,), "worst", 6.0),
    ("sequence-level loss and gradient", (SEQUENCE,), "worst", 6.0),
)
NOT_COMPILED = (
    "not here: the CuTe-DSL kernels of QuACK and Liger, which Triton does not compile; Liger's JSD, which reads "
    "log-probabilities that PyTorch has to write first"
)


def jobs(options: Options) -> Iterable[Job]:
    """One: the kernels are traced and compiled together, for the four tables."""
    return [Job(static_parts.count(options.vocab), partial(sections, options.vocab))]


def sections(vocab: int, tick: Tick) -> Iterator[Section]:
    """The tables."""
    yield from tables(static_parts.collect(vocab, tick))


def tables(found: Found) -> Iterator[Section]:
    """What was found, judged."""
    yield bytes_table(found.moved, found.crashes)
    yield code_table(found.compiled, found.crashes)
    yield loops_table(found.compiled)
    yield compilations_table(found.compilations, found.crashes)


# ---------------------------------------------------------------- bytes


def bytes_table(moved: list[Moved], crashes: list[str]) -> Section:
    """Bytes a logit by task, this library's and others'."""
    return Section(
        title="P5: bytes a logit between the Triton kernels and memory, bf16, counted in Triton's interpreter",
        columns=["what", "V", "read", "written", "re-reads cached", "all from memory", "masked row", "row of A = 0"],
        cells=[_bytes_cells(row) for row in sorted(moved, key=_by_task)],
        targets=[_bytes_target(moved, crashes, *target) for target in BYTES],
        notes=[
            "forward and gradient together, every row active; re-reads cached: each launch touches a 32-byte sector "
            "once; the targets judge hundredths, on both vocabularies: the second read of a row's target logit and the "
            "sectors that two rows share are below",
            *_failures((f"{row.library}, {row.task}, V = {row.vocab}", row.error) for row in moved),
            *crashes,
        ],
        record={"suite": "P5", "moved": [asdict(row) for row in moved]},
        broken=_broken(moved, crashes),
    )


def _by_task(row: Moved) -> tuple[int, int, bool]:
    order = (FORWARD, ENTROPY, TOKEN, SEQUENCE)
    return order.index(row.task) if row.task in order else len(order), -row.vocab, row.library != OURS


def _bytes_cells(row: Moved) -> list[str]:
    figures = (row.read, row.written, row.best, row.worst, row.masked, row.idle)
    cells = ["failed"] * len(figures) if row.error else ["-" if f is None else f"{f:.2f}" for f in figures]
    return [f"{row.library}: {row.task}", str(row.vocab), *cells]


def _bytes_target(
    moved: list[Moved], crashes: list[str], what: str, tasks: tuple[str, ...], figure: str, bound: float
) -> Target:
    ours = [row for row in moved if row.library == OURS and row.task in tasks]
    value = max(round(getattr(row, figure), 2) for row in ours) if _complete(ours, crashes) else None
    theirs = [row for row in moved if row.library != OURS and row.task in tasks and not row.error]
    also = ", ".join(sorted({f"{row.library} {getattr(row, figure):.2f}" for row in theirs}))
    return Target(what, value, bound, at_least=False, unit=" B/logit", also=also)


# ---------------------------------------------------------------- machine code


def code_table(compiled: list[Compiled], crashes: list[str]) -> Section:
    """Registers, spills and what the threads of a program wait for, by kernel and target."""
    ours = [row for row in compiled if row.library == OURS]
    complete = _complete(ours, crashes) and {row.target for row in ours} == set(TARGETS)
    value = float(max(row.spills for row in ours)) if complete else None
    spilling = sorted({f"{row.library} {row.kernel}" for row in compiled if row.library != OURS and row.spills})
    also = f"spilling: {', '.join(spilling)}" if spilling else ""
    return Section(
        title="P5: registers / spilled accesses / shuffles and barriers in each loop over the vocabulary, bf16",
        columns=["kernel", "V", *TARGETS],
        cells=_by_target(compiled, _registers_cell),
        targets=[Target("spilled accesses of a kernel", value, 0.0, at_least=False, unit="", also=also)],
        notes=[
            "compiled as the JIT would for these arguments, with its options; ours know nothing of N, V and "
            "strides; loops in the order of the code; verl's run over the hidden size and are left out",
            "gradients have two loops: in the one for rows of logits and gradient that are aligned differently, shared "
            "memory puts the order of the elements right, and its accesses are counted here",
            NOT_COMPILED,
            *_failures((f"{row.library}, {row.kernel}, {row.target}", row.error) for row in compiled),
            *crashes,
        ],
        record={"suite": "P5", "compiled": [asdict(row) for row in compiled]},
        broken=_broken(compiled, crashes),
    )


def loops_table(compiled: list[Compiled]) -> Section:
    """Load widths and instructions of the loops over the vocabulary."""
    streaming = [row for row in compiled if row.per_logit]
    return Section(
        title="P5: bits of the narrowest load, and instructions a logit of each loop over the vocabulary, bf16",
        columns=["kernel", "V", *TARGETS],
        cells=_by_target(streaming, _loops_cell),
        notes=["the same compilations; instructions of one step divided by the logits that its loads bring"],
        record={"suite": "P5", "see": "compiled"},
    )


def _by_target(compiled: list[Compiled], cell: Callable[[Compiled], str]) -> list[list[str]]:
    rows: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for row in compiled:
        rows[f"{row.library}: {row.kernel}", "any" if row.vocab is None else str(row.vocab)][row.target] = cell(row)
    return [[*name, *(cells.get(target, "-") for target in TARGETS)] for name, cells in rows.items()]


def _registers_cell(row: Compiled) -> str:
    if row.error:
        return "failed"
    return f"{row.registers} / {row.spills} / {'+'.join(map(str, row.waits)) or '-'}"


def _loops_cell(row: Compiled) -> str:
    return f"{row.load_bits}: {'+'.join(f'{n:.1f}' for n in row.per_logit)}"


# ---------------------------------------------------------------- compilations


def compilations_table(compilations: list[Compilations], crashes: list[str]) -> Section:
    """How often a kernel is compiled while one thing changes."""
    changes = {row.changed: row.values for row in compilations}
    rows: dict[str, dict[str, str]] = defaultdict(dict)
    for row in compilations:
        rows[f"{row.library}: {row.task}"][row.changed] = "refused" if row.error else str(row.most)
    ours = [row for row in compilations if row.library == OURS]
    value = float(max(row.most or 0 for row in ours)) if _complete(ours, crashes) else None
    return Section(
        title="P5: compilations of a kernel while shapes change, the most of any kernel of a call",
        columns=["what", *(f"{changed} {', '.join(values)}" for changed, values in changes.items())],
        cells=[[name, *(cells.get(changed, "-") for changed in changes)] for name, cells in rows.items()],
        targets=[Target("compilations of a kernel", value, 1.0, at_least=False, unit="")],
        notes=[
            "tokens: of each of two sequences; padding: columns between two rows of logits; counted by the keys of the "
            "JIT's cache; verl's head takes no logits that could be padded, and the number of a vocabulary split as an "
            "argument: one call compiles its gradient three times",
            *_failures((f"{row.library}, {row.task}, {row.changed}", row.error) for row in compilations),
            *crashes,
        ],
        record={"suite": "P5", "compilations": [asdict(row) for row in compilations]},
        broken=_broken(compilations, crashes),
    )


# ---------------------------------------------------------------- failures


def _failures(errors: Iterable[tuple[str, str | None]]) -> list[str]:
    """A line for each distinct reason, after what it kept from running."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for what, error in errors:
        if error:
            by_reason[error].append(what)
    return [f"{'; '.join(what)}: {error}" for error, what in by_reason.items()]


def _complete(ours: Sequence[Moved | Compiled | Compilations], crashes: list[str]) -> bool:
    """Whether a target may be judged: nothing of ours is missing."""
    return bool(ours) and not crashes and not any(row.error for row in ours)


def _broken(rows: Iterable[Moved | Compiled | Compilations], crashes: list[str]) -> bool:
    """Whether something of ours could not be shown."""
    return bool(crashes) or any(row.library == OURS and row.error for row in rows)
