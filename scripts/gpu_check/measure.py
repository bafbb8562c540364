"""One suite of the benchmark, without the command line's packages; every finished table is written down at once.

Run as `python -m gpu_check.measure SUITE DEVICE FILE`. Exits with 1 where a result of ours is wrong.
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from .running import NOTHING_TO_DO

GIB = 1 << 30
#: the reference shape of the targets, and smaller ones for smaller GPUs: free memory -> tokens
SHAPES = ((64 * GIB, 8192), (32 * GIB, 4096), (16 * GIB, 2048), (0, 512))
VOCAB, WIDTH = 151_936, 4096
ROUNDS = 15


def stand_in_for_rich() -> bool:
    """The tables are written as Markdown, and nothing of rich is called: where it is missing, its names will do."""
    if find_spec("rich") is not None:
        return False
    for name in ("rich", "rich.console", "rich.markup", "rich.table", "rich.progress", "rich.text"):
        module = ModuleType(name)
        module.__getattr__ = lambda attribute: None  # type: ignore[method-assign]
        sys.modules[name] = module
    return True


def options(bench: Any, suite: str, device: str) -> Any:
    """The reference shape on a GPU, a tiny one on a CPU: there the run only shows that the program works."""
    import torch

    if device == "cpu":
        small = {"tokens": 8, "vocab": 301, "width": 16, "loss_tokens": 1000, "rounds": 1, "compiled": False}
        return bench.Options(suites=(suite,), device=device, **small)
    free = torch.cuda.mem_get_info()[0]
    tokens = next(tokens for least, tokens in SHAPES if free >= least)
    large = {"tokens": tokens, "vocab": VOCAB, "width": WIDTH, "rounds": ROUNDS, "dtypes": ("bf16",)}
    return bench.Options(suites=(suite,), device=device, **large)


def main(suite: str, device: str, path: str) -> int:
    """Measure, write, judge."""
    if stand_in_for_rich():
        print("rich is not installed: tables as Markdown only")
    from fusedpg.cli import bench

    if suite not in bench.SUITES:
        print(f"the benchmark has no suite {suite!r}; it has {', '.join(bench.SUITES)}")
        return NOTHING_TO_DO
    chosen = options(bench, suite, device)
    print({field.name: getattr(chosen, field.name) for field in fields(chosen)}, flush=True)
    done: list[dict[str, Any]] = []
    broken = False
    for section in bench.run(chosen, lambda what: print(what, flush=True)):
        broken |= section.broken
        lines = [target.line() for target in section.targets]
        done.append({**section.to_json(), "markdown": section.markdown(), "targets": lines})
        Path(path).write_text(json.dumps(done))
    if not done:
        print(f"the suite {suite!r} has nothing to measure here")
        return NOTHING_TO_DO
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
