"""`python -m fusedpg bench --suite static`: P5 is judged on what was counted, and what could not be shown is said."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from fusedpg import gpu
from fusedpg.cli import bench_static, static_parts
from fusedpg.cli.app import app
from fusedpg.evidence import cases, traffic
from fusedpg.evidence.machine_code import load_bits
from fusedpg.evidence.rows import TARGETS, Compilations, Compiled

counts_loads = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="counts in Triton's interpreter")
VOCAB = 16_383  # odd, and large enough that the sectors which two rows share are less than a hundredth of a byte


def counted(tasks):
    return [traffic.measure(case, VOCAB) for case in cases.ours() if case.task in tasks]


def judged(table):
    return {target.what: (target.value, target.met) for target in table.targets}


@counts_loads
def test_bytes_of_our_kernels_meet_their_targets():
    table = bench_static.bytes_table(counted((cases.FORWARD, cases.ENTROPY, cases.TOKEN, cases.SEQUENCE)), [])
    assert [value for value, met in judged(table).values() if met] == [2.0, 4.0, 6.0, 6.0]
    assert not table.broken
    row = next(cells for cells in table.cells if cells[0] == "fusedpg: token-level loss")
    assert row[1:] == [str(VOCAB), "4.00", "2.00", "4.00", "6.00", "2.00", "4.00"]


@counts_loads
def test_a_loss_that_reads_the_logits_twice_misses(monkeypatch):
    one_pass = gpu._one_pass

    def twice(rows, b, want_entropy, scale, out):
        gpu._forward(rows, want_entropy)
        return one_pass(rows, b, want_entropy, scale, out)

    monkeypatch.setattr(gpu, "_one_pass", twice)
    table = bench_static.bytes_table(counted((cases.TOKEN,)), [])
    assert judged(table)["loss and gradient in one pass, re-reads cached"] == (6.0, False)
    assert judged(table)["loss and gradient in one pass, every access from memory"] == (8.0, False)
    assert judged(table)["forward"] == (None, False), "what was not counted is missed"


@counts_loads
def test_a_rival_that_cannot_run_is_named_with_its_reason(monkeypatch):
    monkeypatch.setattr(cases, "ours", list)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.grpo_loss", None)
    monkeypatch.setattr(cases, "rivals", lambda: cases.liger()[:1])
    moved = list(traffic.measure_all([64]))
    table = bench_static.bytes_table(moved, [])
    assert table.cells[0] == ["Liger: log-probs", "64", *["failed"] * 6]
    assert any(
        note.startswith("Liger, log-probs, V = 64: ModuleNotFoundError: import of liger") for note in table.notes
    )
    assert not table.broken, "only our own failures are"


# ---------------------------------------------------------------- machine code

COMPILED = [Compiled("fusedpg", "one_pass", None, t, 48, 0, 128, (9.0, 12.1), (0, 0)) for t in TARGETS]


def test_spills_and_missing_targets_miss():
    assert judged(bench_static.code_table(COMPILED, [])) == {"spilled accesses of a kernel": (0.0, True)}
    spilling = [*COMPILED[:3], replace(COMPILED[3], spills=3)]
    assert judged(bench_static.code_table(spilling, [])) == {"spilled accesses of a kernel": (3.0, False)}
    assert judged(bench_static.code_table(COMPILED[:3], [])) == {"spilled accesses of a kernel": (None, False)}
    rival = Compiled("Liger", "ce", 151_665, "sm_90", 64, 5, 16, (12.1,), (28,))
    table = bench_static.code_table([*COMPILED, rival], [])
    assert table.targets[0].met, "a rival's spills are not ours"
    assert table.cells == [
        ["fusedpg: one_pass", "any", *["48 / 0 / 0+0"] * 4],
        ["Liger: ce", "151665", "-", "64 / 5 / 28", "-", "-"],
    ]
    assert bench_static.loops_table([*COMPILED, rival]).cells[1][3] == "16: 12.1"


def test_a_second_compilation_misses():
    row = Compilations("fusedpg", "token-level loss", "tokens", ("2", "7"), 1, 3)
    assert bench_static.compilations_table([row], []).targets[0].met
    assert not bench_static.compilations_table([row, replace(row, changed="padding", most=2)], []).targets[0].met


@pytest.mark.parametrize(
    ("op", "bits"),
    [
        ("LDG.E.128.CONSTANT", 128),
        ("LDG.E.LTC128B.U16", 16),
        ("LDGSTS.E.BYPASS.LTC128B.128", 128),
        ("LDG.E.64", 64),
        ("LDG.E", 32),
        ("global_load_dwordx4", 128),
        ("global_load_dword", 32),
        ("global_load_short_d16_hi", 16),
        ("STG.E.128", 0),
    ],
)
def test_bits_of_a_load(op, bits):
    assert load_bits(op) == bits


COMPILING = """
import json, sys, triton
from dataclasses import asdict
from fusedpg.evidence import aot, cases, code
from fusedpg.kernels import one_pass

def most(case):
    return {row.changed: row.most for row in code.compilations(case, 640)}

case = next(case for case in cases.ours() if case.task == cases.TOKEN)
kernel, constants, shape, dtype = next(aot.variants("one_pass", ("bf16",)))
broken = lambda: aot.report(kernel, {**constants, "BLOCK": 7}, shape, dtype, "sm_90").machine
counted = most(case)
one_pass.one_pass_kernel = triton.jit(kernel.fn)  # specialises its integers
failed = code._compiled(("fusedpg", "one_pass", None, "sm_90"), broken, ours=True)
print(json.dumps({"ours": counted, "specialised": most(case), "failed": asdict(failed)}))
"""


def test_compilations_are_counted_and_a_failing_one_is_said():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILING], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ours"] == {"tokens": 1, "vocabulary": 1, "padding": 1}
    assert found["specialised"]["vocabulary"] > 1
    failed = Compiled(**found["failed"])
    table = bench_static.code_table([*COMPILED, failed], [])
    assert "failed" in table.cells[0]
    assert any(note.startswith("fusedpg, one_pass, sm_90: ") and failed.error in note for note in table.notes)
    assert not table.targets[0].met
    assert table.broken


def test_a_part_that_dies_is_said(monkeypatch):
    monkeypatch.setattr(static_parts, "PARTS", (("no_such_part", False),))
    result = CliRunner().invoke(app, ["bench", "--suite", "static", "--vocab", "64"])
    assert result.exit_code == 1
    assert "fusedpg.evidence.no_such_part ended with 1: " in result.output
    assert "No module named fusedpg.evidence.no_such_part" in result.output
    assert result.output.count(": not measured,") == 6
    assert ": met" not in result.output


@pytest.mark.sweep
def test_the_whole_suite():
    ticks = []
    tables = list(bench_static.sections(16_384, ticks.append))
    assert len(ticks) == static_parts.count(16_384)
    assert not any(table.broken for table in tables)
    targets = [target for table in tables for target in table.targets]
    assert len(targets) == 6
    assert [target.line() for target in targets if not target.met] == []
    json.dumps([table.to_json() for table in tables])
