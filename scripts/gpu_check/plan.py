"""The steps of the check: what they run, for how long, and what they cannot do without."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from .running import Step

BUDGET = 585.0
BUILD_LIMIT = 150.0
#: the benchmark's suites with their limits; `trl` trains a model on the CPU, `static` is what needs no GPU
SUITES = {"logits": 50, "scoring": 30, "hidden": 60, "loss": 20, "distill": 30, "accuracy": 20, "scaling": 30}
#: tests marked `gpu`, by what they are about: name -> (files, seconds)
GPU_TESTS: dict[str, tuple[tuple[str, ...], float]] = {
    "parity on the device": (("tests/gpu/test_device_parity.py",), 120),
    "races, streams, devices, CUDA graphs": (
        ("tests/gpu/test_races.py", "tests/gpu/test_streams.py", "tests/gpu/test_cuda_graphs.py"),
        70,
    ),
    "memory limits, more than 2^31 logits, failure cases": (
        ("tests/gpu/test_gpu_memory.py", "tests/gpu/test_beyond_int32.py", "tests/failure_cases"),
        60,
    ),
}
#: what `make test` interprets, on the device
SUITES_ON_DEVICE = (
    *("tests/test_parity.py", "tests/test_autograd.py", "tests/test_bits.py", "tests/triton/test_kernels.py"),
    *("tests/triton/test_losses.py", "tests/triton/test_rescale.py", "tests/distill/test_distill_parity.py"),
    *("tests/linear/test_linear_parity.py", "tests/linear/test_linear_rows.py", "tests/linear/test_linear_autograd.py"),
    *("tests/linear/test_linear_split.py", "tests/distill/test_distill_hidden.py", "tests/failure_cases"),
)


def doctor(site: Path, environment: dict[str, str]) -> Step:
    """What is here, and a first look at whether it is right."""
    command = [sys.executable, "-m", "fusedpg", "doctor", "--json"]
    return Step("doctor", command, 60, needs=("torch",), environment=environment)


def tests(device: str, folder: Path, environment: dict[str, str]) -> list[Step]:
    """The marked tests, then the ordinary Triton tests on the device; a rehearsal interprets one file of these."""
    steps = [
        _pytest(device, name, files, ["-m", "gpu"], limit, folder, environment)
        for name, (files, limit) in GPU_TESTS.items()
    ]
    selection = ["-k", "triton", "-m", "not gpu and not wide and not sweep"]
    files = SUITES_ON_DEVICE if device == "cuda" else SUITES_ON_DEVICE[2:3]
    ordinary = _pytest(device, "make test's Triton tests", files, selection, 90, folder, environment)
    return [*steps, ordinary]


def _pytest(
    device: str,
    name: str,
    files: tuple[str, ...],
    selection: list[str],
    limit: float,
    folder: Path,
    environment: dict[str, str],
) -> Step:
    tally = folder / f"{''.join(c if c.isalnum() else '-' for c in name)}.jsonl"
    # a warning of a version that nobody has seen yet is listed by pytest; it is no error here
    options = [
        "-q",
        "-W",
        "default",
        "-p",
        "no:cacheprovider",
        "--tb",
        "short",
        "-p",
        "gpu_check.tally",
        f"--tally={tally}",
    ]
    if name.startswith("parity") and find_spec("xdist") is not None:
        options += ["-n", "4"]
    command = [sys.executable, "-m", "pytest", *options, *selection, *files]
    needs, optional = ("torch", "pytest", "numpy"), device == "cpu"
    return Step(name, command, limit, needs=needs, optional=optional, tally=tally, environment=environment)


def benchmarks(device: str, folder: Path, environment: dict[str, str]) -> list[Step]:
    """Each suite in a process of its own: one that dies takes no other with it."""
    steps = []
    for suite, limit in SUITES.items():
        path = folder / f"bench-{suite}.json"
        command = [sys.executable, "-m", "gpu_check.measure", suite, device, str(path)]
        needs = ("torch", "numpy")
        steps.append(Step(f"bench {suite}", command, limit, needs=needs, sections=path, environment=environment))
    return steps
