"""Machine code of this library's and others' kernels for four targets, and how often changed shapes compile them anew.

    python -m fusedpg.evidence.code --vocab 151936 --vocab 151665

prints a JSON object a line. Run it without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from ..axes import Divergence
from . import aot, cases, machine_code
from .cases import OURS, Case, Problem
from .launches import Launch, recorded
from .machine_code import Loop, MachineCode
from .rows import Compilations, Compiled, reason

DTYPE = "bf16"
#: kernel and variant of ours that stand for the rest, which the sweep of the tests compiles
CHOSEN = (
    ("logprob_forward_kernel", "plain"),
    ("logprob_forward_kernel", "entropy"),
    ("one_pass_kernel", "plain"),
    ("sequence_forward_kernel", "plain"),
    ("logprob_backward_kernel", "plain"),
    ("distill_kernel", "grad"),
    ("token_block_kernel", "plain"),
)
#: device whose JIT counts compilations; its host tensors' addresses are multiples of 16 as a GPU's are
COUNTED_ON = "sm_90"
#: of each of two sequences: 16 rows, a multiple of 16 as a batch of 8192 is
TOKENS = 8


def _compiled(identity: tuple[str, str, int | None, str], build: Callable[[], MachineCode], ours: bool) -> Compiled:
    try:
        code = build()
    except Exception as error:  # another library's kernel may not fit a target; the table says so
        return Compiled(*identity, error=reason(error))
    loops = code.vocabulary_loops if ours else code.loading_loops
    return Compiled(*identity, code.registers, code.spills, *_loops(loops))


def _loops(loops: tuple[Loop, ...]) -> tuple[int | None, tuple[float, ...], tuple[int, ...]]:
    narrowest = min((min(loop.loads) for loop in loops), default=None)
    per_logit = tuple(round(loop.per_logit, 2) for loop in loops)
    return narrowest, per_logit, tuple(loop.shuffles_and_barriers for loop in loops)


# ---------------------------------------------------------------- this library


def _wanted(fn: Any, constants: dict[str, Any]) -> bool:
    if (fn.__name__, aot.flags(constants)) not in CHOSEN:
        return False
    return constants.get("KIND", int(Divergence.REVERSE_KL)) == Divergence.REVERSE_KL


def ours() -> Iterator[Compiled]:
    """The chosen variants; nothing of them depends on a vocabulary."""
    for fn, constants, shape, dtype in aot.variants(dtypes=(DTYPE,)):
        if _wanted(fn, constants):
            flags = aot.flags(constants)
            name = fn.__name__.removesuffix("_kernel") + ("" if flags in ("plain", "grad") else f", {flags}")
            for target in aot.TARGETS:
                arguments = (fn, constants, shape, dtype, target)
                yield _compiled((OURS, name, None, target), lambda a=arguments: aot.report(*a).machine, ours=True)  # type: ignore[misc]


# ---------------------------------------------------------------- others


def others(case: Case, vocab: int, target: str) -> list[Compiled]:
    """Every kernel that a case launches, as the JIT would compile it."""
    try:
        launches = record(case, cases.make_problem(TOKENS, vocab), target)
    except Exception as error:
        return [Compiled(case.library, case.task, vocab, target, error=reason(error))]
    first = {launch.name: launch for launch in reversed(launches)}
    return [_other(case, launch, vocab, target) for launch in reversed(first.values())]


def _other(case: Case, launch: Launch, vocab: int, target: str) -> Compiled:
    def build() -> MachineCode:
        code = machine_code.read(launch.compile(target).asm, aot.BITS[DTYPE])
        # a matrix product's loop runs over the hidden size: nothing there belongs to one logit
        return MachineCode(code.registers, code.spills, (), code.code) if case.from_hidden else code

    return _compiled(
        (case.library, launch.name.strip("_").replace("_kernel", "").replace("_triton", ""), vocab, target),
        build,
        ours=False,
    )


def record(case: Case, problem: Problem, target: str = COUNTED_ON) -> list[Launch]:
    """What a case launches on a target."""
    with recorded() as launches, case.on(target):
        case.run(problem)
    return launches


# ---------------------------------------------------------------- compilations


def changes(vocab: int) -> dict[str, dict[str, Callable[[], Problem]]]:
    """What changes from step to step in training, and problems that differ in it alone."""
    make = cases.make_problem
    return {
        "tokens": {str(n): lambda n=n: make(n, vocab) for n in (2, 7, 16, 33)},  # type: ignore[misc]
        "vocabulary": {str(v): lambda v=v: make(TOKENS, v) for v in (vocab, 50_257, 32_000, 101)},  # type: ignore[misc]
        "padding": {str(p): lambda p=p: make(TOKENS, vocab, padding=p) for p in (0, 1, 64)},  # type: ignore[misc]
    }


def compilations(case: Case, vocab: int) -> Iterator[Compilations]:
    """Distinct keys of the case's kernels over each change."""
    for changed, problems in changes(vocab).items():
        keys: dict[str, set[str]] = defaultdict(set)
        identity = (case.library, case.task, changed, tuple(problems))
        try:
            for problem in problems.values():
                for launch in record(case, problem()):
                    keys[launch.name].add(launch.key(COUNTED_ON))
        except Exception as error:
            yield Compilations(*identity, error=reason(error))
        else:
            yield Compilations(*identity, max(map(len, keys.values())), len(keys))


def main() -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, action="append", required=True)
    vocabularies = parser.parse_args().vocab
    for row in ours():
        _print("compiled", [row])
    for case in cases.rivals():
        for vocab in vocabularies:
            for target in aot.TARGETS:
                _print("compiled", others(case, vocab, target))
    for case in (*cases.ours(), *cases.rivals()):
        for count in compilations(case, vocabularies[0]):
            _print("compilations", [count])


def _print(kind: str, found: list[Any]) -> None:
    print(json.dumps({kind: [asdict(row) for row in found]}), flush=True)


if __name__ == "__main__":
    main()
