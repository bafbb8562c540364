"""`python -m gpu_check`: see `make gpu-check`."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from . import build, plan, report
from .running import BAD, PASSED, SKIPPED, Result, run_all

ROOT = Path(__file__).resolve().parents[2]
SEES_A_GPU = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"


def main(arguments: list[str] | None = None) -> int:
    """Run the check; 0 where every step passed, 1 where one did not, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal without a GPU")
    parser.add_argument("--budget", type=float, default=plan.BUDGET, help="seconds for everything")
    parser.add_argument("--out", type=Path, help="folder of the report")
    parser.add_argument("--only", help="steps whose name this regular expression finds; the build is always made")
    options = parser.parse_args(arguments)
    start, name = time.monotonic(), gpu_name()
    if options.device == "cuda" and not name:
        print(f"torch of {sys.executable} sees no GPU; `--device cpu` rehearses the check without one", file=sys.stderr)
        return 2
    work = ROOT / "build" / "gpu-check"
    work.mkdir(parents=True, exist_ok=True)
    results, notes, environment = prepare(work, options.budget, start, options.device)
    steps = [
        plan.doctor(work, environment),
        *plan.tests(options.device, work, environment),
        *plan.benchmarks(options.device, work, environment),
    ]
    steps = [step for step in steps if options.only is None or re.search(options.only, step.name)]
    results += run_all(steps, options.budget, ROOT, say, start)
    path = report_path(options.out, options.device, name)
    title = f"GPU check: {name}" if options.device == "cuda" else "Rehearsal of the GPU check, WITHOUT a GPU"
    notes.append(f"{time.monotonic() - start:.0f} s of {options.budget:.0f}, {sys.executable}")
    report.write(path, title, notes, facts(results), results)
    say(f"{report.verdict(results)}\nwrote {path}")
    return 1 if any(result.status in BAD for result in results) else 0


def prepare(work: Path, budget: float, start: float, device: str) -> tuple[list[Result], list[str], dict[str, str]]:
    """Build the package, or copy its Python half: (results, notes, environment of the other steps)."""
    site, notes = work / "site", []
    missing = build.missing_tools()
    if missing:
        results = [Result("build", SKIPPED, why=f"{', '.join(missing)} missing")]
    else:
        results = run_all([build.step(site, plan.BUILD_LIMIT)], budget, ROOT, say, start)
    if results[0].status != PASSED:
        build.copy_tree(ROOT, site)
        notes.append(f"The compiled CPU core is not built ({results[0].why}): the package is used from the tree")
        say(notes[-1])
    else:
        notes.append("The package was built and installed by pip install --no-build-isolation --no-deps .")
    if device == "cpu":
        notes.append("No GPU: tests marked gpu are skipped, Triton is interpreted, and no time here means anything")
    path = os.pathsep.join(filter(None, (str(site), str(ROOT / "scripts"), os.environ.get("PYTHONPATH"))))
    environment = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    if device == "cuda":
        environment["TRITON_INTERPRET"] = "0"
    return results, notes, environment


def gpu_name() -> str:
    """As torch says it, in a process of its own; empty without a GPU or without torch."""
    done = subprocess.run([sys.executable, "-c", SEES_A_GPU], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def report_path(out: Path | None, device: str, name: str) -> Path:
    """`benchmarks/results/gpu-<name>-<date>.md`; a rehearsal stays in the build folder."""
    today = datetime.date.today().isoformat()
    if device == "cpu":
        return (out or ROOT / "build" / "gpu-check") / f"rehearsal-{today}.md"
    words = re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("nvidia")).strip("-")
    return (out or ROOT / "benchmarks" / "results") / f"gpu-{words}-{today}.md"


def facts(results: list[Result]) -> dict[str, Any]:
    """What `doctor` found; empty where it did not run."""
    for result in results:
        if result.name == "doctor":
            begin = result.output.find("{\n")
            with contextlib.suppress(ValueError):
                return dict(json.JSONDecoder().raw_decode(result.output[max(begin, 0) :])[0])
    return {}


def say(text: str) -> None:
    """A line of progress, at once."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
