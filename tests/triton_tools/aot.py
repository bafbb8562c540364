"""Compile the Triton kernels ahead of time and read the machine code: no GPU and no driver needed.

    python -m tests.triton_tools.aot [--targets sm_90,gfx942] [--dtypes bf16] [--kernels one_pass]

prints a row per (kernel, variant, dtype, target). Run it without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fusedpg.kernels import launch

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
DTYPES = ("bf16", "fp16", "fp32")
LOGITS = ("x_ptr", "y_ptr", "out_ptr")
_POINTERS = {"target_ptr": "*i64", "cu_ptr": "*i64", "counter_ptr": "*i32", "partial_ptr": "*fp64"}


@dataclass(frozen=True)
class Loop:
    """An innermost loop of the machine code."""

    ops: Counter[str]
    elements: int  # logits a thread handles in one step

    def count(self, pattern: str) -> int:
        """Instructions whose name matches."""
        return sum(n for op, n in self.ops.items() if re.match(pattern, op))

    @property
    def wide_loads(self) -> int:
        return self.count(r"LDG\S*\.128|global_load_dwordx4|buffer_load_dwordx4")

    @property
    def narrow_loads(self) -> int:
        return self.count(r"LDG|global_load|buffer_load") - self.wide_loads

    @property
    def wide_stores(self) -> int:
        return self.count(r"STG\S*\.128|global_store_dwordx4|buffer_store_dwordx4")

    @property
    def narrow_stores(self) -> int:
        return self.count(r"STG|global_store|buffer_store") - self.wide_stores

    @property
    def shuffles_and_barriers(self) -> int:
        return self.count(r"SHFL|BAR|ds_|s_barrier|LDS|STS")

    @property
    def per_logit(self) -> float:
        return sum(self.ops.values()) / self.elements


@dataclass(frozen=True)
class Report:
    """One compiled kernel."""

    kernel: str
    variant: str
    dtype: str
    target: str
    registers: int
    spills: int
    loops: tuple[Loop, ...]
    code: str
    ptx: str = ""

    @property
    def vocabulary_loops(self) -> tuple[Loop, ...]:
        """The loops that stream logits with whole 16-byte vectors.

        A loop over tokens has many narrow loads; a compiler may merge neighbours of the spec into a wide one there.
        """
        return tuple(loop for loop in self.loops if loop.wide_loads and loop.wide_loads >= loop.narrow_loads)

    def row(self) -> dict[str, Any]:
        """What a table shows."""
        loops = self.vocabulary_loops
        return {
            "kernel": self.kernel,
            "variant": self.variant,
            "dtype": self.dtype,
            "target": self.target,
            "registers": self.registers,
            "spills": self.spills,
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


def argument_type(parameter: Any, constants: dict[str, Any], dtype: str) -> str:
    """The type that a launch gives a kernel's parameter."""
    if parameter.name in constants:
        return "constexpr"
    if parameter.name in LOGITS:
        return f"*{dtype}"
    return parameter.annotation_type or _POINTERS.get(parameter.name, "*fp32")


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
    flags = "+".join(name.lower() for name, value in constants.items() if value is True) or "plain"
    elements = max(1, shape.block // shape.threads)
    if target.startswith("gfx"):
        code = compiled.asm["amdgcn"]
        field = lambda key: int(re.search(rf"\.{key}:\s*(\d+)", code)[1])  # noqa: E731
        registers, spills = field("vgpr_count"), field("vgpr_spill_count") + field("sgpr_spill_count")
        loops = _loops(code, r"^(\.LBB\w+):", r"^\ts_c?branch\S*\s+(\.LBB\w+)", r"^\t([a-z]\w+)")
    else:
        code, usage = _disassemble(compiled.asm["cubin"])
        registers = int(re.search(r"REG:(\d+)", usage)[1])
        instruction = r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]*)"
        spills = len(re.findall(r"\b(?:LDL|STL)\b", code))
        loops = _loops(code, r"^(\.L_x_\d+):", r"\bBRA\b.*`\((\.L_x_\d+)\)", instruction)
    found = tuple(Loop(ops, elements) for ops in loops)
    return Report(fn.__name__, flags, dtype, target, registers, spills, found, code, compiled.asm.get("ptx", ""))


def reports(
    targets: tuple[str, ...] = tuple(TARGETS), kernels: str = "", dtypes: tuple[str, ...] = DTYPES
) -> Iterator[Report]:
    """Every reachable variant on every target."""
    for fn, constants, shape, dtype in variants(kernels, dtypes):
        for target in targets:
            yield report(fn, constants, shape, dtype, target)


def _loops(code: str, label: str, branch: str, instruction: str) -> list[Counter[str]]:
    """Instruction counts of the innermost natural loops, in the order of the code.

    A compiler may put a loop's predicated parts anywhere, so a backward jump alone says little: a loop is an edge to a
    block that dominates its source, with every block from which the source is reached.
    """
    blocks: list[list[str]] = [[]]  # instructions
    names: dict[str, int] = {}
    jumps: list[tuple[int, str, bool]] = []  # (block, label, falls through as well)
    for line in code.splitlines():
        if m := re.match(label, line):
            blocks.append([])
            names[m[1]] = len(blocks) - 1
        elif m := re.match(instruction, line):
            blocks[-1].append(m[1])
            if target := re.search(branch, line):
                jumps.append((len(blocks) - 1, target[1], bool(re.search(r"@|cbranch|BRA\S*\s+!?U?P\d", line))))
                blocks.append([])
            elif m[1] in ("EXIT", "s_endpgm") and "@" not in line:
                jumps.append((len(blocks) - 1, "", False))
                blocks.append([])
    successors = [{i + 1} if i + 1 < len(blocks) else set() for i in range(len(blocks))]
    for i, name, falls in jumps:
        successors[i] = (successors[i] if falls else set()) | ({names[name]} if name in names else set())
    predecessors: list[set[int]] = [set() for _ in blocks]
    reached, pending = {0}, [0]
    while pending:
        for t in successors[i := pending.pop()]:
            predecessors[t].add(i)
            if t not in reached:
                reached.add(t)
                pending.append(t)
    everything = set(range(len(blocks)))
    dominators = [{0}] + [everything] * (len(blocks) - 1)
    changed = True
    while changed:
        changed = False
        for i in range(1, len(blocks)):
            common = set.intersection(*(dominators[p] for p in predecessors[i])) if predecessors[i] else set()
            if i in reached and (new := common | {i}) != dominators[i]:
                dominators[i], changed = new, True
    bodies: dict[int, set[int]] = {}
    for source in reached:
        for header in successors[source] & dominators[source]:
            body, pending = bodies.setdefault(header, {header}), [source]
            while pending:
                if (block := pending.pop()) not in body:
                    body.add(block)
                    pending += predecessors[block]
    innermost = [h for h, body in bodies.items() if not any(other != h and other in body for other in bodies)]
    return [Counter(op for block in sorted(bodies[h]) for op in blocks[block]) for h in sorted(innermost)]


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """(SASS, resource usage) by the tools inside Triton."""
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as place:
        path = os.path.join(place, "kernel.cubin")
        Path(path).write_bytes(cubin)
        run = lambda *a: subprocess.run([str(folder / a[0]), *a[1:], path], capture_output=True, text=True)  # noqa: E731
        sass, usage = run("nvdisasm", "-c"), run("cuobjdump", "-res-usage")
    return sass.stdout, usage.stdout + usage.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--kernels", default="")
    a = parser.parse_args()
    for r in reports(tuple(a.targets.split(",")), a.kernels, tuple(a.dtypes.split(","))):
        row = r.row()
        print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
