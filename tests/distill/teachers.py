"""Inputs of the distillation tests: logits with holes, the fp64 truth, and how close a backend must come to it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

import fusedpg
from support import F32, Result, backend_device, largest, store

DIVERGENCES = ("reverse_kl", "forward_kl", "jsd")
INF, NAN = float("inf"), float("nan")


@dataclass
class Pair:
    """Student and teacher logits, and the mask of the tokens."""

    student: Tensor
    teacher: Tensor
    mask: Tensor | None = None

    def like(self, student: torch.dtype, teacher: torch.dtype) -> Pair:
        """The same in other dtypes."""
        return Pair(self.student.to(student), self.teacher.to(teacher), self.mask)


def make_pair(
    shape: tuple[int, ...], student=torch.float32, teacher=torch.float32, *, seed=0, holes=False, masked=False
) -> Pair:
    """Random logits of std 2; `holes` are columns that both exclude, `masked` hides rows of NaN and inf."""
    g = torch.Generator().manual_seed(seed)
    x = (2 * torch.randn(shape, generator=g, dtype=torch.float64)).to(student)
    y = (2 * torch.randn(shape, generator=g, dtype=torch.float64)).to(teacher)
    if holes:
        x[..., 1::5] = y[..., 1::5] = -INF
    mask = None
    if masked:
        mask = torch.rand(shape[:-1], generator=g) > 0.3
        x[~mask], y[~mask] = NAN, INF
    return Pair(x, y, mask)


def run(pair: Pair, backend: str, *, upstream: float = 1.0, **knobs) -> Result:
    """Loss and gradient on one backend."""
    device = backend_device(backend)
    student = pair.student.detach().to(device).clone().requires_grad_()
    mask = None if pair.mask is None else pair.mask.to(device)
    out = fusedpg.distillation_loss(student, pair.teacher.to(device), mask=mask, backend=backend, **knobs)
    (out.loss * upstream).backward()
    names = ("loss", "numerator", "weight", "per_token")
    values = {name: getattr(out, name) for name in names} | {f"metric:{k}": v for k, v in out.metrics.items()}
    return Result({k: v.detach().double().cpu() for k, v in values.items()}, student.grad.double().cpu(), out)


def truth(pair: Pair, **knobs) -> Result:
    """The fp64 reference on the stored inputs."""
    return run(pair.like(torch.float64, torch.float64), "reference", **knobs)


def assert_agrees(got: Result, want: Result, fp32: Result, dtype: torch.dtype, steepness: float, label: str) -> None:
    """Errors within twice those of the reference's formulas in fp32, a few fp32 units, and a rounding of the gradient.

    Logarithms of the probabilities are as exact as they are large; `steepness` is the gradient's factor before them.
    """
    unit = torch.finfo(torch.float64).eps if dtype == torch.float64 else F32
    logs = 1 + sum(want.values[f"metric:{name}"] for name in ("divergence", "student_entropy", "teacher_entropy"))
    for name, expected in want.values.items():
        size = logs + largest(expected)
        count = want.values["metric:tokens"] if name == "numerator" else 1.0
        budget = 2 * largest(fp32.values[name] - expected) + 4 * unit * size * count
        error = largest(got.values[name] - expected)
        assert error <= budget, f"{label} {name}: error {error:.3e} over budget {budget:.3e}"
    stored = largest(store(want.grad, dtype, got.output.backend) - want.grad)
    budget = 2 * (stored + largest(fp32.grad - want.grad)) + unit * (8 * largest(want.grad) + steepness * logs)
    error = largest(got.grad - want.grad)
    assert error <= budget, f"{label} gradient: error {error:.3e} over budget {budget:.3e}"


def check(pair: Pair, backend: str, label: str = "", **knobs) -> Result:
    """One backend against fp64."""
    want, got = truth(pair, **knobs), run(pair, backend, **knobs)
    wide = torch.float64 if pair.student.dtype == torch.float64 else torch.float32
    fp32 = run(pair.like(wide, wide), "reference", **knobs)
    steepness = 1.0 / (max(1.0, float(want.values["weight"])) * knobs.get("temperature", 1.0))
    assert_agrees(got, want, fp32, pair.student.dtype, steepness, label or str(knobs))
    return got


def dtypes_of(backend: str) -> list[tuple[torch.dtype, torch.dtype]]:
    """Pairs of student's and teacher's dtypes that a backend takes; of the slow interpreter's, each twice."""
    every = [torch.float32, torch.bfloat16, torch.float16]
    if backend == "triton":
        return [(a, b) for i, a in enumerate(every) for b in (a, every[i - 1])]
    return list(itertools.product([*every, torch.float64], repeat=2))
