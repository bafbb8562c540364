"""`python -m fusedpg bench`: tables, Markdown and JSON on tiny shapes, and no time for a wrong result."""

import itertools
import json
import re
import time
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from fusedpg import distillation_loss, policy_loss, policy_loss_from_logits
from fusedpg.cli import accuracy, bench, bench_distill, bench_logits, bench_loss, bench_trl, report, rivals, timing
from fusedpg.cli.app import app
from fusedpg.cli.report import Job, Section, Target
from fusedpg.cli.timing import Contender, Outcome, Row, Verdict, measure

TINY = ["bench", "--tokens", "5", "--vocab", "301", "--loss-tokens", "1000", "--rounds", "2", "--no-compile"]
CPU = torch.device("cpu")


def run(*extra):
    return CliRunner().invoke(app, [*TINY, *extra])


def test_all_suites_print_tables_and_write_json(tmp_path):
    path = tmp_path / "deep" / "bench.json"
    # the suite `static` compiles for minutes: test_bench_static.py
    suites = [word for name in bench.SUITES if name != "static" for word in ("--suite", name)]
    result = run("--json", str(path), *suites)
    assert result.exit_code == 0, result.output
    record = json.loads(path.read_text())
    suites = [s["suite"] for s in record["sections"]]
    order = ["P1", "P1", *["scoring"] * 4, "P2", "P2", "P4", *["distill"] * 6, "trl", *["scaling"] * 4, "P7"]
    assert suites == order
    assert {"fusedpg", "torch", "python", "cpu", "isa", "threads", "backend", "packages"} <= set(record["machine"])
    for section in record["sections"][:-1]:
        if section["suite"] == "trl" and bench_trl.refusal() is not None:
            continue
        assert section["backend"] == record["machine"]["backend"]
        for row in section["rows"]:
            assert row["wrong"] is None
            rounds = 1 if section["suite"] in ("P2", "scaling") or section.get("source") == "hidden" else 2
            assert len(row["samples_s"]) == {"P4": 6}.get(section["suite"], rounds)
            assert row["min_s"] <= row["median_s"]
        for target in section["targets"]:
            assert {"what", "value", "bound", "met"} <= set(target)
    assert all(r["met"] for r in record["sections"][-1]["results"])
    for title in ("P1: policy loss", "P4: policy loss", "Distillation, jsd", "LigerJSD: not run", "P7: errors"):
        assert title in result.output
    for title in ("Scoring: log-probs and entropy from logits", "Scaling in D", "Promises"):
        assert title in result.output


def test_markdown_is_a_table_for_the_readme():
    result = run("--suite", "logits", "--dtype", "bf16", "--markdown")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("| what |"))
    assert set(lines[header + 1]) == set("| :-")
    assert lines[header + 2].startswith("| fusedpg in place |")
    table = list(itertools.takewhile(lambda line: line.startswith("|"), lines[header:]))
    assert len(table) > 5
    assert len({line.count("|") for line in table}) == 1
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


def wrong_tokens(*arguments, **options):
    """The loss alone, its gradient 1 % too large."""
    out = policy_loss(*arguments, **options)
    return replace(out, loss=out.loss * 1.01 - (out.loss * 0.01).detach())


def wrong_divergence(*arguments, **options):
    """A divergence whose value is 1 % too large."""
    out = distillation_loss(*arguments, **options)
    return replace(out, loss=out.loss * 1.01)


@pytest.mark.parametrize(
    ("suite", "module", "name", "wrong", "error"),
    [
        ("loss", bench_loss, "policy_loss", wrong_tokens, "grad error 1.0e-02"),
        ("distill", bench_distill, "distillation_loss", wrong_divergence, "its result is wrong: loss error"),
    ],
)
def test_a_wrong_kernel_gets_no_time_elsewhere(monkeypatch, tmp_path, suite, module, name, wrong, error):
    monkeypatch.setattr(module, name, wrong)
    path = tmp_path / "bench.json"
    result = run("--suite", suite, "--dtype", "fp32", "--json", str(path))
    assert result.exit_code == 1
    assert error in result.output
    for section in json.loads(path.read_text())["sections"]:
        ours = next(row for row in section["rows"] if row["ours"])
        assert ours["wrong"]
        assert ours["samples_s"] == []
        assert not any(target["met"] for target in section["targets"])
        assert all(row["samples_s"] for row in section["rows"] if not row["ours"])


def test_a_wrong_log_prob_breaks_the_accuracy(monkeypatch):
    right = accuracy._fused
    monkeypatch.setattr(accuracy, "_fused", lambda *a: (right(*a)[0] + 1e-4, right(*a)[1]))
    result = run("--suite", "accuracy", "--dtype", "fp32")
    assert result.exit_code == 1
    assert re.search(r"logp error: \S+e-05, target at most 1e-06: MISSED", result.output)


def test_nan_is_wrong():
    problem = bench_logits.make_problem(4, 64, torch.float32, CPU)
    nan = Outcome(torch.tensor(torch.nan), torch.full_like(problem.pristine, torch.nan))
    assert "loss error nan" in bench_logits.policy_check(problem, bench_logits.TOLERANCE[torch.float32])(nan).wrong


def test_distillation_stands_beside_eager_and_a_copy():
    problem = bench_distill.make_problem(5, 301, torch.float32, CPU, "jsd")
    rows = bench_distill.contenders(problem)
    assert [row.name for row in rows] == [bench_distill.OURS, bench_distill.EAGER, bench_distill.COPY]
    assert all(row.check(row.run()).wrong is None for row in rows)


def test_an_unmeasured_target_is_not_met():
    assert not Target("speed", None, 1.0, at_least=True).met
    assert Target("speed", None, 1.0, at_least=True).line() == "speed: not measured, target at least 1x"
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


def test_ours_runs_once_more_before_the_rounds_in_which_the_others_do_not():
    """The run that measures its memory has lost what calls keep for the next one."""
    log = []
    contenders = [Contender(name, lambda name=name: log.append(name) or Outcome(), ours=name == "b") for name in "abc"]
    rows = measure(contenders, lambda: log.append("prepare"), 1, CPU)
    assert log[::2] == ["prepare"] * (len(log) // 2)
    assert log[1::2] == ["a", "a", "b", "b", "c", "c", "b", "a", "b", "c"]
    assert [len(row.samples) for row in rows] == [1, 1, 1]


def test_a_slow_row_takes_part_in_fewer_rounds_evenly(monkeypatch):
    assert timing.runs_of(0.1, 9) == 9
    assert timing.runs_of(1.0, 9) == 3  # of 3 seconds
    assert timing.runs_of(1000.0, 9) == timing.FEWEST == 2
    assert timing.runs_of(1000.0, 1) == 1
    assert [n for n in range(9) if timing.plays(n, 3, 9)] == [2, 5, 8]
    assert [n for n in range(9) if timing.plays(n, 2, 9)] == [4, 8]
    assert [n for n in range(9) if timing.plays(n, 9, 9)] == list(range(9))
    monkeypatch.setattr(timing, "BUDGET", 0.06)
    quick, slow = (Contender(name, lambda s=s: time.sleep(s) or Outcome()) for name, s in (("q", 0.0), ("s", 0.02)))
    seen = []
    rows = measure([quick, slow], lambda: None, 6, CPU, seen.append)
    assert len(rows[0].samples) == 6
    assert 2 <= len(rows[1].samples) <= 3
    assert len(seen) == timing.ticks(2, 6)
    monkeypatch.setattr(timing, "SLOW", 0.01)
    log = []
    row = measure([Contender("s", lambda: time.sleep(0.02) or log.append(1) or Outcome())], lambda: None, 6, CPU)[0]
    assert len(log) == len(row.samples) + 1  # the run that measures memory is one of them


def test_spread_is_the_distance_of_the_quartiles():
    row = Row("x", True, Verdict(), [1.0, 2.0, 3.0, 4.0, 5.0])
    assert row.spread == pytest.approx((4 - 2) / 3)
    assert Row("x", True, Verdict(), [1.0]).spread is None


def test_a_gauge_counts_useful_work_and_shares_of_the_fastest_ceiling():
    whole, half = Row("whole", True, Verdict(), [2.0]), Row("half", True, Verdict(), [2.0], work=0.5)
    slow, fast = Row("slow", False, Verdict(), [4.0]), Row("fast", False, Verdict(), [1.0])
    gauge = report.flops_gauge(8e12, slow, fast)
    assert gauge.ceiling is fast
    assert gauge.cells(whole) == ["4", "50"]
    assert gauge.cells(half) == ["2", "25"]
    assert gauge.cells(Row("wrong", True, Verdict(wrong="no"))) == ["-", "-"]
    assert "8 TFLOP/s" in gauge.note()


@pytest.mark.parametrize("suite", ["logits", "scoring", "hidden", "loss", "distill", "scaling", "accuracy"])
def test_the_progress_bar_knows_its_length(suite):
    options = bench.Options(
        suites=(suite,), tokens=16, vocab=64, width=8, loss_tokens=256, rounds=3, accuracy_rows=2, compiled=False
    )
    seen = []
    list(bench.run(options, seen.append))
    assert len(seen) == bench.total_ticks(options)


def test_a_new_suite_is_one_entry(monkeypatch):
    """Of a job that yields several tables, each of them promised."""

    def tables(tick):
        for name in ("bytes", "registers"):
            tick(name)
            yield Section(name, ["what"], [], [Target("P5: " + name, 1.0, 2.0, at_least=False)])

    suites = {**bench.SUITES, "compiled": bench.Suite("kernels", lambda options: [Job(2, tables)])}
    monkeypatch.setattr(bench, "SUITES", suites)
    result = run("--suite", "compiled", "--markdown")
    assert result.exit_code == 0, result.output
    assert "| P5 | registers | at most 2x | 1x | met |" in result.output
    assert bench.total_ticks(bench.Options(suites=("compiled",))) == 2


def test_an_unknown_suite_is_refused():
    result = run("--suite", "nope")
    assert result.exit_code == 2
    assert (
        "--suite: expected some of logits, scoring, hidden, loss, distill, trl, scaling, static, accuracy"
        in result.output
    )
