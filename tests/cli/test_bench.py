"""`python -m fusedpg bench`: tables, Markdown and JSON on tiny shapes, and no time for a wrong result."""

import json
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner

from fusedpg import policy_loss_from_logits
from fusedpg.cli import bench, bench_distill, bench_logits, bench_trl, rivals
from fusedpg.cli.app import app
from fusedpg.cli.report import Target
from fusedpg.cli.timing import Contender, Outcome, Verdict, measure

TINY = ["bench", "--tokens", "5", "--vocab", "301", "--loss-tokens", "1000", "--rounds", "2", "--no-compile"]
CPU = torch.device("cpu")


def run(*extra):
    return CliRunner().invoke(app, [*TINY, *extra])


def test_all_suites_print_tables_and_write_json(tmp_path):
    path = tmp_path / "deep" / "bench.json"
    result = run("--json", str(path))
    assert result.exit_code == 0, result.output
    record = json.loads(path.read_text())
    trl = ["trl"] if bench_trl.refusal() is None else []
    assert [s["suite"] for s in record["sections"]] == ["P1", "P1", "P2", "P2", "P4", *["distill"] * 6, *trl, "P7"]
    assert {"fusedpg", "torch", "python", "cpu", "isa", "threads", "backend"} <= set(record["machine"])
    for section in record["sections"][:-1]:
        assert section["backend"] == record["machine"]["backend"]
        for row in section["rows"]:
            assert row["wrong"] is None
            assert len(row["samples_s"]) == {"P4": 6, "P2": 1}.get(section["suite"], 2)
            assert row["min_s"] <= row["median_s"]
        assert {"what", "value", "bound", "met"} <= set(section["targets"][0])
    assert all(r["met"] for r in record["sections"][-1]["results"])
    for title in ("P1: policy loss", "P4: policy loss", "Distillation, jsd", "LigerJSD: not run", "P7: errors"):
        assert title in result.output


def test_markdown_is_a_table_for_the_readme():
    result = run("--suite", "logits", "--dtype", "bf16", "--markdown")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("| what |"))
    assert set(lines[header + 1]) == set("| :-")
    assert lines[header + 2].startswith("| fusedpg in place |")
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    assert any(line.startswith("- in place against torch eager: ") for line in lines)


def mutant(spec, logits, targets, **options):
    """A loss whose value is right and whose gradient is 1 % too large."""
    out = policy_loss_from_logits(spec, logits, targets, **options)
    scaled = out.loss * 1.01
    return replace(out, loss=scaled - (scaled - out.loss).detach())


def test_a_wrong_kernel_gets_no_time(monkeypatch, tmp_path):
    monkeypatch.setattr(bench_logits, "policy_loss_from_logits", mutant)
    path = tmp_path / "bench.json"
    result = run("--suite", "logits", "--dtype", "fp32", "--json", str(path))
    assert result.exit_code == 1
    rows = {row["name"]: row for row in json.loads(path.read_text())["sections"][0]["rows"]}
    for name in (bench_logits.INPLACE, bench_logits.OUT_OF_PLACE):
        assert "grad error 1.0e-02 > 1.0e-05" in rows[name]["wrong"]
        assert rows[name]["samples_s"] == []
        assert "median_s" not in rows[name]
    assert len(rows[bench_logits.EAGER]["samples_s"]) == 2
    assert "wrong result" in result.output
    assert "no time reported" in result.output


def test_nan_is_wrong():
    problem = bench_logits.make_problem(4, 64, torch.float32, CPU)
    nan = Outcome(torch.tensor(torch.nan), torch.full_like(problem.pristine, torch.nan))
    assert "loss error nan" in bench_logits.policy_check(problem, bench_logits.TOLERANCE[torch.float32])(nan).wrong


def test_distillation_stands_beside_eager_and_says_why_liger_does_not_run(monkeypatch):
    problem = bench_distill.make_problem(5, 301, torch.float32, CPU, "jsd")
    rows = bench_distill.contenders(problem)
    assert [row.name for row in rows] == [bench_distill.OURS, bench_distill.EAGER]
    assert all(row.check(row.run()).wrong is None for row in rows)
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    needs_gpu = "LigerJSD: not run, its Triton kernel needs a GPU and the tensors are on cpu"
    assert bench_distill.liger_refusal(CPU) == needs_gpu
    assert bench_distill.liger_refusal(torch.device("cuda")) is None
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    assert bench_distill.liger_refusal(CPU).startswith("LigerJSD: not run, import of liger_kernel")


def test_unmeasured_target_is_missed():
    assert not Target("speed", None, 1.0, at_least=True).met
    assert "not measured" in Target("speed", None, 1.0, at_least=True).line()
    assert Target("speed", 2.0, 1.0, at_least=True).met
    assert not Target("speed", 2.0, 1.0, at_least=False).met


@pytest.mark.parametrize("form", [rivals.log_softmax_loss, rivals.selective_loss])
def test_rivals_compute_the_same_loss(form):
    problem = bench_logits.make_problem(8, 50, torch.float32, CPU)
    constants = (problem.logp_old.double(), problem.advantages.double())
    got = form(problem.pristine.double(), problem.targets, *constants, 8.0)
    # ratios stay inside the band here, so the loss is the mean of -A*r
    expected = (-constants[1] * (problem.logp64 - constants[0]).exp()).mean()
    assert torch.allclose(got, expected, rtol=1e-12)


def test_measure_restores_the_inputs_before_every_run_and_rotates():
    log = []
    contenders = [Contender(name, lambda name=name: log.append(name) or Outcome()) for name in "ab"]
    contenders.append(Contender("bad", lambda: log.append("bad") or Outcome(), lambda o: Verdict(wrong="no")))
    rows = measure(contenders, lambda: log.append("prepare"), 2, CPU)
    assert log[::2] == ["prepare"] * (len(log) // 2)
    # twice each (check, memory), then two rounds of the right ones, the second in rotated order
    assert log[1::2] == ["a", "a", "b", "b", "bad", "bad", "a", "b", "b", "a"]
    assert [len(row.samples) for row in rows] == [2, 2, 0]


def test_the_progress_bar_knows_its_length():
    options = bench.Options(tokens=4, vocab=64, loss_tokens=256, rounds=1, accuracy_rows=2, compiled=False)
    seen = []
    list(bench.run(options, seen.append))
    assert len(seen) == bench.total_ticks(options)
