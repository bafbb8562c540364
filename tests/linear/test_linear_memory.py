"""Peak memory of a call, as the operating system saw it in a fresh process, against the plan."""

import json
import os
import subprocess
import sys

import pytest

MEASURE = """
import json, sys
import torch
import fusedpg
from fusedpg import linear_ops
from fusedpg.cli.memory import peak_extra_bytes

rows, kind, dtype, workspace, gradient = json.loads(sys.argv[1])
vocab, width, dtype = 32768, 64, getattr(torch, dtype)
torch.set_num_threads(1)
plans, plan = [], linear_ops.plan_linear
linear_ops.plan_linear = lambda *a, **k: plans.append(plan(*a, **k)) or plans[-1]
g = torch.Generator().manual_seed(0)
targets = torch.randint(0, vocab, (rows,), generator=g)
spec = fusedpg.loss_spec(kind, anchor="self")
cu = torch.arange(0, rows + 1, 64)

def call(hidden, weight, count):
    size = count // 64
    out = fusedpg.policy_loss_from_hidden(spec, hidden[:count], weight, targets[:count], workspace_mib=workspace,
        cu_seqlens=cu[: size + 1], sequence_advantages=(torch.arange(size) % 2).float(), backend="cpu")
    if gradient:
        return torch.autograd.grad(out.loss, (hidden, weight)) if count == rows else out.loss.backward()

hidden = torch.randn(rows, width, generator=g).to(dtype).requires_grad_(gradient)
weight = (torch.randn(vocab, width, generator=g) / 8).to(dtype).requires_grad_(gradient)
call(hidden, weight, 64)  # thread pools and lazy imports
hidden.grad = weight.grad = None
extra = peak_extra_bytes(lambda: call(hidden, weight, rows), torch.device("cpu"))
gradients = (hidden.nbytes + weight.nbytes) * gradient
print(json.dumps([extra, plans[-1].workspace, plans[-1].accumulator, gradients, plans[-1].mode.name]))
"""


def measure(rows: int, kind: str = "reinforce", dtype: str = "float32", workspace: float = 48, gradient: bool = True):
    """(extra bytes, workspace, accumulator, gradients, mode)."""
    options = json.dumps([rows, kind, dtype, workspace, gradient])
    # a fixed threshold: glibc else keeps large freed blocks after the first
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run([sys.executable, "-c", MEASURE, options], capture_output=True, text=True, check=True, env=env)
    result = json.loads(done.stdout)
    if result[0] is None:
        pytest.skip("this system does not report the peak of the resident memory")
    return result


MIB = 1 << 20
CASES = {
    "chunks": {},
    "chunks-bf16": {"dtype": "bfloat16"},
    "sequences": {"kind": "gspo"},
    "blocks": {"workspace": 3},
    "scoring": {"gradient": False},
    "scoring-blocks-bf16": {"gradient": False, "workspace": 3, "dtype": "bfloat16"},
}


SWEPT = ("chunks", "scoring-blocks-bf16")


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.sweep) if c in SWEPT else c for c in CASES])
def test_peak_is_the_plan_and_the_gradients(case: str):
    """Within a tenth and 3 MiB (allocator, statistics of the rows), for N and for 2N tokens, half without a gradient."""
    few, many = (measure(rows, **CASES[case]) for rows in (2048, 4096))
    for extra, workspace, accumulator, gradients, _ in (few, many):
        planned = workspace + accumulator + gradients
        assert extra <= 1.1 * planned + 3 * MIB, (case, extra / MIB, planned / MIB)
        assert extra >= 0.9 * planned - 3 * MIB, (case, extra / MIB, planned / MIB)
    assert few[1] == many[1]
    own = [extra - gradients for extra, _, _, gradients, _ in (few, many)]
    assert abs(own[1] - own[0]) <= 0.1 * few[1] + 3 * MIB, "flat in N beside the gradients"
