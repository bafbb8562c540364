"""Registers, spills and loops of a compiled kernel, read from SASS or AMDGCN."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton

_LOAD = re.compile(r"LDG|global_load|buffer_load")
#: bits of a load by what its name holds; one without any of these loads 32
_BITS = (
    (re.compile(r"\.256|dwordx8"), 256),
    (re.compile(r"\.128|dwordx4"), 128),
    (re.compile(r"dwordx3"), 96),
    (re.compile(r"\.64|dwordx2"), 64),
    (re.compile(r"\.[US]16|short"), 16),
    (re.compile(r"\.[US]8|byte"), 8),
)
_SASS = r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]*)"


def load_bits(op: str) -> int:
    """Bits that one thread loads from global memory by an instruction; 0 for any other instruction."""
    if not _LOAD.match(op):
        return 0
    return next((bits for pattern, bits in _BITS if pattern.search(op)), 32)


@dataclass(frozen=True)
class Loop:
    """An innermost loop of the machine code."""

    ops: Counter[str]
    element_bits: int  # of one logit of every tensor that the kernel streams

    def count(self, pattern: str) -> int:
        """Instructions whose name matches."""
        return sum(n for op, n in self.ops.items() if re.match(pattern, op))

    @property
    def loads(self) -> Counter[int]:
        """Loads from global memory by their bits."""
        found: Counter[int] = Counter()
        for op, n in self.ops.items():
            if bits := load_bits(op):
                found[bits] += n
        return found

    @property
    def elements(self) -> float:
        """Logits that a thread handles in one step."""
        return sum(bits * n for bits, n in self.loads.items()) / self.element_bits

    @property
    def wide_loads(self) -> int:
        """Loads of whole 16-byte vectors."""
        return sum(n for bits, n in self.loads.items() if bits >= 128)

    @property
    def narrow_loads(self) -> int:
        """All other loads."""
        return self.loads.total() - self.wide_loads

    @property
    def wide_stores(self) -> int:
        """Stores of whole 16-byte vectors."""
        return self.count(r"STG\S*\.128|global_store_dwordx4|buffer_store_dwordx4")

    @property
    def narrow_stores(self) -> int:
        """All other stores."""
        return self.count(r"STG|global_store|buffer_store") - self.wide_stores

    @property
    def shuffles_and_barriers(self) -> int:
        """Instructions by which the threads of a program wait for each other or exchange values."""
        return self.count(r"SHFL|BAR|ds_|s_barrier|LDS|STS")

    @property
    def per_logit(self) -> float:
        """Instructions for one logit."""
        return sum(self.ops.values()) / self.elements


@dataclass(frozen=True)
class MachineCode:
    """What one compiled kernel consists of."""

    registers: int
    spills: int
    loops: tuple[Loop, ...]
    code: str
    ptx: str = field(default="", repr=False)

    @property
    def vocabulary_loops(self) -> tuple[Loop, ...]:
        """The loops that stream logits with whole 16-byte vectors.

        A loop over tokens has many narrow loads; a compiler may merge neighbours of the spec into a wide one there.
        """
        return tuple(loop for loop in self.loops if loop.wide_loads and loop.wide_loads >= loop.narrow_loads)

    @property
    def loading_loops(self) -> tuple[Loop, ...]:
        """The loops that load at all, whatever their vectors: of a kernel without loops over tokens."""
        return tuple(loop for loop in self.loops if loop.loads)


def read(asm: dict[str, Any], element_bits: int) -> MachineCode:
    """What Triton compiled (`CompiledKernel.asm`); `element_bits` of the logits that one loop step reads at a place."""
    if "amdgcn" in asm:
        code = asm["amdgcn"]
        registers = _amd_field(code, "vgpr_count")
        spills = _amd_field(code, "vgpr_spill_count") + _amd_field(code, "sgpr_spill_count")
        bodies = _loops(code, r"^(\.LBB\w+):", r"^\ts_c?branch\S*\s+(\.LBB\w+)", r"^\t([a-z]\w+)")
    else:
        code, usage = _disassemble(asm["cubin"])
        registers = _number(r"REG:(\d+)", usage)
        spills = len(re.findall(r"\b(?:LDL|STL)\b", code))
        bodies = _loops(code, r"^(\.L_x_\d+):", r"\bBRA\b.*`\((\.L_x_\d+)\)", _SASS)
    loops = tuple(Loop(ops, element_bits) for ops in bodies)
    return MachineCode(registers, spills, loops, code, asm.get("ptx", ""))


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"expected {pattern} in the compiler's report; got {text[:200]!r}")
    return int(found[1])


def _amd_field(code: str, key: str) -> int:
    return _number(rf"\.{key}:\s*(\d+)", code)


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """(SASS, resource usage) by the tools inside Triton."""
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as place:
        path = os.path.join(place, "kernel.cubin")
        Path(path).write_bytes(cubin)

        def run(tool: str, option: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run([str(folder / tool), option, path], capture_output=True, text=True, check=False)

        sass, usage = run("nvdisasm", "-c"), run("cuobjdump", "-res-usage")
    return sass.stdout, usage.stdout + usage.stderr


# ---------------------------------------------------------------- loops


def _loops(code: str, label: str, branch: str, instruction: str) -> list[Counter[str]]:
    """Instruction counts of the innermost natural loops, in the order of the code.

    A compiler may put a loop's predicated parts anywhere, so a backward jump alone says little: a loop is an edge to a
    block that dominates its source, with every block from which the source is reached.
    """
    blocks, successors = _blocks(code, label, branch, instruction)
    reached = _reach(0, successors)
    predecessors: list[set[int]] = [set() for _ in blocks]
    for source in reached:
        for target in successors[source]:
            predecessors[target].add(source)
    dominators = _dominators(reached, predecessors)
    bodies: dict[int, set[int]] = {}
    for source in reached:
        for header in successors[source] & dominators[source]:
            bodies[header] = bodies.get(header, {header}) | _reach(source, predecessors, stop=header)
    innermost = [h for h, body in bodies.items() if not any(other != h and other in body for other in bodies)]
    return [Counter(op for block in sorted(bodies[h]) for op in blocks[block]) for h in sorted(innermost)]


def _blocks(code: str, label: str, branch: str, instruction: str) -> tuple[list[list[str]], list[set[int]]]:
    """The instructions of every straight piece of code, and which pieces may follow it."""
    blocks: list[list[str]] = [[]]
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
    return blocks, successors


def _reach(start: int, edges: list[set[int]], stop: int | None = None) -> set[int]:
    """Every block that is reached from `start`, and not through `stop`."""
    reached, pending = {start}, [start]
    while pending:
        if (block := pending.pop()) != stop:
            new = edges[block] - reached
            reached |= new
            pending += new
    return reached


def _dominators(reached: set[int], predecessors: list[set[int]]) -> list[set[int]]:
    """The blocks through which every way to a block leads."""
    everything = set(range(len(predecessors)))
    dominators = [{0}] + [everything] * (len(predecessors) - 1)
    changed = True
    while changed:
        changed = False
        for i in range(1, len(predecessors)):
            common = set.intersection(*(dominators[p] for p in predecessors[i])) if predecessors[i] else set()
            if i in reached and (new := common | {i}) != dominators[i]:
                dominators[i], changed = new, True
    return dominators
