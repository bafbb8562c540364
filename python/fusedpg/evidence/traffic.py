"""Bytes a logit of every case, counted in the interpreter.

    TRITON_INTERPRET=1 python -m fusedpg.evidence.traffic --vocab 151936 --vocab 151665

prints a JSON object a line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict

from . import cases, fast_interpreter
from .cases import Case, Problem
from .global_traffic import GlobalTraffic
from .rows import Moved, reason

#: of each of the two sequences: fewer rows altogether would be split over programs
TOKENS = 2


def run(case: Case, problem: Problem) -> GlobalTraffic:
    """The traffic of one call; what else a launch gets of the logits' size is a gradient or a copy."""
    half = problem.places.numel() * problem.places.element_size() // 2
    tokens = {name: getattr(problem, name) for name in ("ids", "mask", "advantages", "logp_old")}
    named = GlobalTraffic(logits=problem.logits, **tokens).naming(lambda size: "large" if size >= half else "small")
    with named as traffic:
        case.run(problem)
    return traffic


def measure(case: Case, vocab: int, tokens: int = TOKENS) -> Moved:
    """The figures of one case: all rows active, then the second of two sequences masked or without advantage."""
    logits = 2 * tokens * vocab

    def worst(active: str) -> float:
        return _all(run(case, cases.make_problem(tokens, vocab, active)))

    traffic = run(case, cases.make_problem(tokens, vocab))
    total = _all(traffic)

    def inactive(active: str) -> float:
        return (worst(active) - total / 2) / (logits / 2)

    return Moved(
        case.library,
        case.task,
        vocab,
        read=sum(traffic.read(name) for name in ("logits", "large")) / logits,
        written=sum(traffic.written(name) for name in ("logits", "large")) / logits,
        best=sum(traffic.at_best(op, name) for op in ("load", "store") for name in ("logits", "large")) / logits,
        worst=total / logits,
        masked=inactive("mask"),
        idle=inactive("advantage") if case.needs_advantages else None,
    )


def _all(traffic: GlobalTraffic) -> float:
    return float(sum(traffic.read(name) + traffic.written(name) for name in ("logits", "large")))


def measure_all(vocabularies: list[int]) -> Iterator[Moved]:
    """Every case; one that cannot run says why."""
    for case in cases.with_logits():
        for vocab in vocabularies:
            try:
                yield measure(case, vocab)
            except Exception as error:  # another library's code may fail in any way; the table says how
                yield Moved(case.library, case.task, vocab, error=reason(error))


def main() -> None:
    """Print the figures of every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, action="append", required=True)
    fast_interpreter.speed_up()
    for moved in measure_all(parser.parse_args().vocab):
        print(json.dumps({"moved": [asdict(moved)]}), flush=True)


if __name__ == "__main__":
    main()
