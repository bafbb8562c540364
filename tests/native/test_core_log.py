"""The fp32 logarithm of csrc/cpu/exp.h, compiled alone for every build: accuracy and special values."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fusedpg import cpu

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which("c++") or shutil.which("g++")
#: what CMakeLists.txt gives every build
FLAGS = ["-std=c++17", "-O2", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]
MARCH = {"generic": [], **{f"v{i}": [f"-march=x86-64-v{i}"] for i in (2, 3, 4)}}
MARCH["v4bf16"] = [*MARCH["v4"], "-mavx512bf16"]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("log")
    for build in cpu.available_isas():
        command = [COMPILER, *FLAGS, *MARCH[build], f"-DFUSEDPG_ISA={build}", f"-I{ROOT / 'csrc'}"]
        subprocess.run([*command, str(ROOT / "tests/native/log_values.cpp"), "-o", str(folder / build)], check=True)
    return {build: folder / build for build in cpu.available_isas()}


def log(program: Path, x: Tensor) -> Tensor:
    """log_any of x; lanes and scalars must agree to the bit."""
    n = x.numel()
    padded = torch.cat([x, torch.ones(-n % 16)])
    out = subprocess.run([program], input=padded.numpy().tobytes(), capture_output=True, check=True).stdout
    lanes, single = torch.frombuffer(bytearray(out), dtype=torch.float32).view(2, -1)[:, :n]
    assert torch.equal(lanes.view(torch.int32), single.view(torch.int32))
    return lanes


def positive_floats() -> Tensor:
    """Every exponent, denormals too, and 1 from both sides."""
    spread = torch.arange(1, 0x7F800000, 4099, dtype=torch.int32).view(torch.float32)
    near_one = (0x3F800000 + torch.arange(-100_000, 100_000, dtype=torch.int32)).view(torch.float32)
    return torch.cat([spread, near_one])


def test_within_two_ulp(programs: dict[str, Path]) -> None:
    x = positive_floats()
    want = x.double().log()
    ulp = torch.finfo(torch.float32).eps * want.abs().clamp(min=torch.finfo(torch.float32).tiny)
    for build, program in programs.items():
        error = (log(program, x).double() - want).abs()
        assert (error <= 2 * ulp).all(), (build, (error / ulp).max())


def test_special_values(programs: dict[str, Path]) -> None:
    inf, nan, denormal = torch.inf, torch.nan, 2.0**-149
    x = torch.tensor([1.0, 0.0, -0.0, inf, -inf, nan, -nan, -1.0, -denormal, denormal])
    want = torch.tensor([0.0, -inf, -inf, inf, nan, nan, nan, nan, nan, -103.27893])
    for program in programs.values():
        torch.testing.assert_close(log(program, x), want, rtol=1e-7, atol=0, equal_nan=True)


def test_builds_with_fma_agree_to_the_bit(programs: dict[str, Path]) -> None:
    x = positive_floats()
    results = [log(programs[build], x) for build in programs if build in ("v3", "v4", "v4bf16")]
    for other in results[1:]:
        assert torch.equal(results[0], other)
