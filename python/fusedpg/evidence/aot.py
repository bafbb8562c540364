"""Compile this library's kernels ahead of time and read the machine code: no GPU and no driver needed.

    python -m fusedpg.evidence.aot [--targets sm_90,gfx942] [--dtypes bf16] [--kernels one_pass]

prints a row per (kernel, variant, dtype, target). Run it without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fusedpg.kernels import launch

from . import machine_code, rows
from .machine_code import Loop, MachineCode

TARGETS = dict(
    zip(
        rows.TARGETS,
        (
            GPUTarget("cuda", 80, 32),
            GPUTarget("cuda", 90, 32),
            GPUTarget("cuda", 100, 32),
            GPUTarget("hip", "gfx942", 64),
        ),
        strict=True,
    )
)
BITS = {"bf16": 16, "fp16": 16, "fp32": 32}
DTYPES = tuple(BITS)
LOGITS = ("x_ptr", "y_ptr", "out_ptr")
_POINTERS = {"target_ptr": "*i64", "cu_ptr": "*i64", "counter_ptr": "*i32", "partial_ptr": "*fp64"}


@dataclass(frozen=True)
class Report:
    """One compiled kernel."""

    kernel: str
    variant: str
    dtype: str
    target: str
    machine: MachineCode

    @property
    def vocabulary_loops(self) -> tuple[Loop, ...]:
        """The loops that stream logits."""
        return self.machine.vocabulary_loops

    def row(self) -> dict[str, Any]:
        """What a table shows."""
        loops = self.vocabulary_loops
        return {
            "kernel": self.kernel,
            "variant": self.variant,
            "dtype": self.dtype,
            "target": self.target,
            "registers": self.machine.registers,
            "spills": self.machine.spills,
            "load_bits": 128 if loops else 0,
            "loops": len(loops),
            "instructions_per_logit": [round(loop.per_logit, 2) for loop in loops],
        }


def variants(kernels: str = "", dtypes: tuple[str, ...] = DTYPES) -> Iterator[tuple[Any, dict[str, Any], Any, str]]:
    """(kernel, constexprs, shape, dtype) of everything reachable; kernels without logits come once."""
    for fn, constants, shape in launch.reachable_variants():
        if re.search(kernels, fn.__name__):
            for dtype in dtypes if fn.arg_names[0] in LOGITS else dtypes[:1]:
                yield fn, constants, shape, dtype


def flags(constants: dict[str, Any]) -> str:
    """The name of a variant: its compile-time choices that are on."""
    return "+".join(name.lower() for name, value in constants.items() if value is True) or "plain"


def argument_type(parameter: Any, constants: dict[str, Any], dtype: str) -> str:
    """The type that a launch gives a kernel's parameter."""
    if parameter.name in constants:
        return "constexpr"
    if parameter.name in LOGITS:
        return f"*{dtype}"
    return str(parameter.annotation_type or _POINTERS.get(parameter.name, "*fp32"))


def compile_kernel(fn: Any, constants: dict[str, Any], shape: Any, dtype: str, target: str) -> Any:
    """Compile as the JIT would: the logits' addresses are multiples of 16, nothing is known of N, V and strides."""
    signature = {p.name: argument_type(p, constants, dtype) for p in fn.params}
    constexprs = {(i,): constants[p.name] for i, p in enumerate(fn.params) if p.name in constants}
    attrs = {(i,): [["tt.divisibility", 16]] for i, p in enumerate(fn.params) if p.name in LOGITS}
    gpu = TARGETS[target]
    source = ASTSource(fn=fn, signature=signature, constexprs=constexprs, attrs=attrs)
    options = launch.target_options(shape, gpu.backend, gpu.warp_size, constants)
    return triton.compile(source, target=gpu, options=options)


def report(fn: Any, constants: dict[str, Any], shape: Any, dtype: str, target: str) -> Report:
    """Compile and read registers, spills and loops."""
    compiled = compile_kernel(fn, constants, shape, dtype, target)
    bits = BITS[dtype] * (2 if "y_ptr" in fn.arg_names else 1)
    return Report(fn.__name__, flags(constants), dtype, target, machine_code.read(compiled.asm, bits))


def reports(
    targets: tuple[str, ...] = tuple(TARGETS), kernels: str = "", dtypes: tuple[str, ...] = DTYPES
) -> Iterator[Report]:
    """Every reachable variant on every target."""
    for fn, constants, shape, dtype in variants(kernels, dtypes):
        for target in targets:
            yield report(fn, constants, shape, dtype, target)


def main() -> None:
    """Print a row per (kernel, variant, dtype, target)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--kernels", default="")
    a = parser.parse_args()
    for r in reports(tuple(a.targets.split(",")), a.kernels, tuple(a.dtypes.split(","))):
        print(" ".join(f"{key}={value}" for key, value in r.row().items()), flush=True)


if __name__ == "__main__":
    main()
