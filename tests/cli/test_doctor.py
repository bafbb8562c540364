"""`python -m fusedpg doctor`: facts, honest backends, and a self-test that sees a wrong kernel."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fusedpg import cpu, dispatch
from fusedpg.cli import doctor, doctor_check, doctor_facts, main
from fusedpg.cli.app import app

BRIEF = ["doctor", "--seconds", "0.1"]


@pytest.fixture
def without_triton(monkeypatch):
    """The interpreter is slow; what the other backends say does not depend on it."""
    look = doctor.look_at_backends
    monkeypatch.setattr(doctor, "look_at_backends", lambda: [b for b in look() if b.argument != "triton"])


def test_tables(without_triton):
    result = CliRunner().invoke(app, BRIEF)
    assert result.exit_code == 0, result.output
    for part in ("fusedpg", "torch threads", "chosen build", "compiler of the core", "workspace, hidden states"):
        assert part in result.output
    assert f"CPU tensors; build {cpu.isa()}" in result.output
    assert "all right" in result.output


def test_json_for_scripts(without_triton):
    result = CliRunner().invoke(app, [*BRIEF, "--json"])
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["ok"] is True
    assert record["versions"]["torch"] == torch.__version__
    assert record["cpu"]["available builds"] == cpu.available_isas()
    assert record["cpu"]["compiler of the core"].startswith(("GCC", "clang"))
    assert record["cpu"]["torch threads"] == torch.get_num_threads()
    assert record["self_test"]["problems"] == []
    assert all(1 <= count <= record["self_test"]["total"] for count in record["self_test"]["done"].values())


@pytest.mark.parametrize("mutant", ["value", "gradient", "raises"])
def test_a_broken_core_fails_by_name(mutant, monkeypatch, without_triton):
    right = cpu.loss_forward

    def broken(*args):
        if mutant == "raises":
            raise RuntimeError("the core is gone")
        out = right(*args)
        if mutant == "value":
            out[7][0] += 1e-3  # the numerator
        elif args[-1] is not None:
            args[-1].mul_(1.001)
        return out

    monkeypatch.setattr(cpu, "loss_forward", broken)
    result = CliRunner().invoke(app, [*BRIEF, "--json"])
    assert result.exit_code == 1
    record = json.loads(result.stdout)
    assert record["ok"] is False
    assert {problem["backend"] for problem in record["self_test"]["problems"]} == {"cpu"}
    first = record["self_test"]["problems"][0]["problem"]
    says = {"value": "loss: error", "gradient": "gradient: error", "raises": "RuntimeError: the core is gone"}[mutant]
    assert first.startswith("ppo_clip float32 packed")
    assert says in first
    result = CliRunner().invoke(app, BRIEF)
    assert result.exit_code == 1
    assert "FAILED: cpu: ppo_clip float32 packed" in result.output
    assert "the self-test failed" in result.output


def test_every_case_is_another(monkeypatch):
    cases = doctor_check.cases()
    assert len({case.label for case in cases}) == len(cases) == 6 * len(doctor_check.LOSSES)
    first = cases[: len(doctor_check.LOSSES)]
    assert {case.loss for case in first} == {name for name, _ in doctor_check.LOSSES}
    assert {case.dtype for case in first} == set(doctor_check.DTYPES)
    assert {case.packed for case in first} == {True, False}


def test_time_bounds_the_self_test():
    checks = doctor_check.run(["reference"], 0.0)
    assert checks.done == {"reference": 1}
    assert f"{checks.total - 1} left out" in checks.lines()[0]


def test_a_build_that_cannot_run_is_explained(monkeypatch, without_triton):
    monkeypatch.setenv("FUSEDPG_CPU_ISA", "v9")
    result = CliRunner().invoke(app, [*BRIEF, "--json"])
    assert result.exit_code == 0
    record = json.loads(result.stdout)
    core = record["backends"][1]
    assert core["works"] is False
    assert core["says"].startswith("FUSEDPG_CPU_ISA: expected one of")
    assert record["environment"]["FUSEDPG_CPU_ISA"] == "v9"
    assert record["cpu"]["chosen build"] is None
    assert "cpu" not in record["self_test"]["done"]


def test_triton_two_ways(monkeypatch):
    """At most one of them works, and the other says how to get it."""
    monkeypatch.setattr(dispatch, "unavailable", lambda backend: None)
    monkeypatch.setattr(doctor_facts, "accelerator", lambda: "cuda")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    compiled, interpreted = doctor._triton()
    assert (compiled.works, interpreted.works) == (False, True)
    assert "unset it" in compiled.says
    monkeypatch.delenv("TRITON_INTERPRET")
    compiled, interpreted = doctor._triton()
    assert (compiled.works, compiled.says) == (True, "tensors of cuda")
    assert not interpreted.works
    assert "set TRITON_INTERPRET=1" in interpreted.says


def test_missing_core_and_triton_are_no_failure():
    """In a fresh interpreter that cannot import either; nor the `cli` extra, which the command does without."""
    code = (
        "import sys\n"
        "from importlib import util\n"
        "real = util.find_spec\n"
        "util.find_spec = lambda name, *a: None if name in ('typer', 'rich', 'matplotlib') else real(name, *a)\n"
        "for name in ('triton', 'fusedpg._core', 'typer', 'rich', 'matplotlib'):\n"
        "    sys.modules[name] = None\n"
        "from fusedpg.cli import main\n"
        "sys.argv = ['fusedpg', 'doctor', '--json']\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["ok"] is True
    reference, core, *triton = record["backends"]
    assert reference["works"] is True
    assert core["works"] is False
    assert "pip install" in core["says"]
    assert not any(way["works"] for way in triton)
    assert all("pip install 'triton>=3.6'" in way["says"] for way in triton)
    assert list(record["self_test"]["done"]) == ["reference"]
    assert record["versions"]["triton"] is None


def test_without_the_extra_there_is_plain_text(monkeypatch, capsys, without_triton):
    monkeypatch.setattr("fusedpg.cli.find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["fusedpg", "doctor"])
    monkeypatch.setattr(doctor_check, "cases", lambda made=doctor_check.cases: made()[:1])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "versions: torch: " in text
    assert "backend: cpu: works: CPU tensors" in text
    assert "self-test: cpu: 1 cases, 0 wrong" in text
    monkeypatch.setattr(sys, "argv", ["fusedpg", "doctor", "--verbose"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "expected --json or nothing where typer and rich are missing; got '--verbose'" in capsys.readouterr().out


def test_the_compiler_is_read_from_the_core(monkeypatch, tmp_path):
    monkeypatch.setattr("fusedpg.__file__", str(tmp_path / "__init__.py"))
    assert doctor_facts._compiler() is None
    Path(tmp_path / "_core.so").write_bytes(b"\x7fELF...clang version 19.1.7\x00")
    assert doctor_facts._compiler() == "clang version 19.1.7"
