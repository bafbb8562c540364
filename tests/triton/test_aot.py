"""Machine code of the Triton kernels for four targets, compiled without a GPU.

Triton reads TRITON_INTERPRET when it is imported, so everything here runs in a process of its own.
"""

import json
import os
import subprocess
import sys

import pytest

#: the usual loss in the usual dtype on one NVIDIA and one AMD target; the rest of the matrix is marked `sweep`
QUICK = ["(forward|one_pass|backward).*plain.*bf16.*(sm_90|gfx942)", "(segments|token).*(sm_90|gfx942)"]
QUICK += ["distill.*grad.*bf16.*(sm_90|gfx942)"]

COLLECT = """
import json, re, sys
from fusedpg.evidence import aot

pattern = re.compile(sys.argv[1])
for fn, constants, shape, dtype in aot.variants():
    flags = aot.flags(constants)
    for target in aot.TARGETS:
        if pattern.search(f"{fn.__name__} {flags} {dtype} {target}"):
            r = aot.report(fn, constants, shape, dtype, target)
            loops = [
                {
                    "loads": l.wide_loads, "narrow": l.narrow_loads, "stores": l.wide_stores,
                    "narrow_stores": l.narrow_stores, "sync": l.shuffles_and_barriers,
                }
                for l in r.vocabulary_loops
            ]
            writes = dtype == "bf16" and target.startswith("sm") and "out_ptr" in fn.arg_names
            writes = writes and constants.get("GRAD", True)
            row = r.row() | {"vocabulary_loops": loops, "rounds": not writes or "cvt.rn.bf16" in r.machine.ptx}
            print(json.dumps(row))
"""

CACHE_KEYS = """
import torch
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from fusedpg.evidence import aot

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64, "i64": torch.int64, "i32": torch.int32}


class Pointer:
    def __init__(self, dtype, address):
        self.dtype, self.address = dtype, address

    def data_ptr(self):
        return self.address


def argument(parameter, kind, value, address):
    if kind.startswith("*"):
        return Pointer(DTYPES[kind[1:]], 0 if parameter.name in aot.LOGITS else address)
    if kind.startswith("fp"):
        return float(value)
    return min(value, 2**31 - 1) if kind == "i32" else value


for fn, constants, shape, dtype in aot.variants(dtypes=("bf16",)):
    bind = create_function_from_signature(fn.signature, fn.params, make_backend(aot.TARGETS["sm_90"]))
    keys = set()
    for value in (1, 2, 16, 17, 4096, 151665, 151936, 2**31 - 1, 2**33, 2**40 + 1):
        for address in (0, 4, 8):
            kinds = {p.name: (p, aot.argument_type(p, constants, dtype)) for p in fn.params}
            arguments = {
                name: constants[name] if kind == "constexpr" else argument(p, kind, value, address)
                for name, (p, kind) in kinds.items()
            }
            keys.add(str(bind(**arguments)[1]))
    print(fn.__name__, len(keys))
"""


def run(script, *arguments):
    """Standard output of a script in a Triton that compiles."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout.splitlines()


def check(pattern):
    rows = [json.loads(line) for line in run(COLLECT, pattern)]
    assert rows
    for row in rows:
        where = f"{row['kernel']} {row['variant']} {row['dtype']} {row['target']}"
        assert row["spills"] == 0, where
        streams = any(
            word in row["kernel"] for word in ("forward", "split", "backward", "one_pass", "rescale", "distill")
        )
        loops = row["vocabulary_loops"]
        assert bool(loops) == streams, where
        # two vectors of 16 bytes a thread and step and no narrower load, whatever V and the strides are
        per_step = 4 if row["dtype"] == "fp32" else 2
        assert all(loop["loads"] == per_step and loop["narrow"] == 0 for loop in loops), (where, loops)
        # Gradients have two loops: whole-vector stores where logits and gradient are misaligned alike (in place, and
        # whenever their strides agree), else narrow stores whose order shared memory changes. Only the latter syncs.
        narrow = [loop for loop in loops if loop["narrow_stores"]]
        if any(word in row["kernel"] for word in ("backward", "one_pass")):
            assert len(narrow) == 1, (where, loops)
            assert any(loop["stores"] == per_step for loop in loops), (where, loops)
        else:
            assert not narrow, (where, loops)
        assert all(loop["sync"] == 0 for loop in loops if loop not in narrow), (where, loops)
        assert row["rounds"], f"{where}: bf16 is rounded to nearest even"
    return rows


@pytest.mark.parametrize("pattern", QUICK)
def test_no_spills_and_wide_loads(pattern):
    check(pattern)


@pytest.mark.sweep
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_every_variant_on(target):
    assert len(check(target)) >= 96


def test_one_compilation_serves_every_shape():
    """N, V, T, S, strides and flags equal to 1, odd, divisible by 16, past 2^31; per-token views at any address."""
    counts = dict(line.split() for line in run(CACHE_KEYS))
    assert len(counts) == 11
    assert set(counts.values()) == {"1"}


def test_cpu_tensors_without_the_interpreter_are_refused_with_the_fix():
    script = """
import torch
from fusedpg import gpu
try:
    gpu.logprob_forward(torch.zeros(1, 1, 4), torch.zeros(1, dtype=torch.int64), None, None, 1.0, 0.0, 1.0, False)
except RuntimeError as error:
    print(error)
"""
    assert "TRITON_INTERPRET=1" in run(script)[0]
