"""The suite `hidden` of the benchmark: its truth, its rivals, its table, and no time for a wrong result."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from fusedpg import policy_loss_from_hidden
from fusedpg.cli import availability, bench, bench_hidden, hidden_section, hidden_truth
from fusedpg.cli.app import app
from fusedpg.cli.bench_logits import TOLERANCE
from fusedpg.cli.timing import Outcome, Row, Verdict

TINY = ["bench", "--suite", "hidden", "--tokens", "16", "--vocab", "301", "--width", "16", "--rounds", "6"]
CPU = torch.device("cpu")


def run(*extra):
    return CliRunner().invoke(app, [*TINY, *extra])


def make_problem(dtype=torch.float32, tokens=12):
    return bench_hidden.make_problem(tokens, 50, 8, dtype, CPU)


def eager_in_fp64(problem):
    leaves = [t.double().requires_grad_() for t in (problem.hidden, problem.weight)]
    logits = torch.nn.functional.linear(*leaves)
    logp = torch.log_softmax(logits, -1).gather(-1, problem.tokens.targets[:, None]).squeeze(-1)
    loss = problem.tokens.ppo(logp)
    return Outcome(loss.detach(), *torch.autograd.grad(loss, leaves))


CASES = {
    "dense": lambda problem: problem,
    "masked": lambda problem: problem.masked(),
    "idle": lambda problem: problem.idle(),
    "first": lambda problem: problem.first(6),
}


@pytest.mark.parametrize("case", CASES)
def test_the_truth_is_autograd_in_fp64(case):
    problem = CASES[case](make_problem())
    outcome = eager_in_fp64(problem)
    verdict = hidden_truth.loss_check(problem.truth, problem.tokens.ppo, TOLERANCE[torch.float32])(outcome)
    assert verdict.wrong is None
    assert max(verdict.errors.values()) < 1e-12


@pytest.mark.parametrize("what", ["loss", "grad", "grad_weight"])
def test_each_error_is_seen(what):
    problem = make_problem()
    right = eager_in_fp64(problem)
    wrong = replace(right, **{what: getattr(right, what) * 1.01 + 1e-3})
    verdict = hidden_truth.loss_check(problem.truth, problem.tokens.ppo, TOLERANCE[torch.float32])(wrong)
    assert {"loss": "loss error", "grad": "d hidden error", "grad_weight": "d weight error"}[what] in verdict.wrong


def test_a_gradient_for_a_masked_row_is_wrong():
    problem = make_problem().masked()
    right = eager_in_fp64(problem)
    last = problem.truth.rows[-1]
    assert not problem.tokens.mask[last]
    leak = right.grad.clone()
    leak[last] += 1e-3
    check = hidden_truth.loss_check(problem.truth, problem.tokens.ppo, TOLERANCE[torch.float32])
    assert "d hidden error" in check(replace(right, grad=leak)).wrong


def test_nan_is_wrong():
    problem = make_problem()
    nan = [torch.full_like(t, torch.nan) for t in (problem.truth.logp.sum(), problem.hidden, problem.weight)]
    check = hidden_truth.loss_check(problem.truth, problem.tokens.ppo, TOLERANCE[torch.float32])
    assert check(Outcome(*nan)).wrong.count("nan") == 3
    assert "logp error nan" in hidden_truth.logp_check(problem.truth, 1e-5)(Outcome(nan[0])).wrong


@pytest.mark.parametrize("name", [name for name, _ in bench_hidden.PPO_RIVALS])
@pytest.mark.parametrize("case", ["dense", "masked"])
def test_rivals_compute_the_same_loss(name, case):
    if (reason := availability.why_not(name, CPU)) is not None:
        pytest.skip(reason)
    problem = CASES[case](make_problem())
    hidden, weight = problem.leaves()
    loss = dict(bench_hidden.PPO_RIVALS)[name](problem.tokens, hidden, weight)
    outcome = Outcome(loss.detach(), *torch.autograd.grad(loss, (hidden, weight)))
    check = hidden_truth.loss_check(problem.truth, problem.tokens.ppo, TOLERANCE[torch.float32])
    assert check(outcome).wrong is None


def test_all_rows_are_right_in_both_dtypes(tmp_path):
    path = tmp_path / "bench.json"
    result = run("--json", str(path))
    assert result.exit_code == 0, result.output
    sections = json.loads(path.read_text())["sections"]
    assert [(s["suite"], s["dtype"], s["tokens"], s["vocab"]) for s in sections] == [
        ("P2", "fp32", 8, 301),
        ("P2", "bf16", 8, 301),
    ]
    for section in sections:
        names = [row["name"] for row in section["rows"]]
        assert {bench_hidden.OURS, bench_hidden.SCORE, bench_hidden.GEMMS, *bench_hidden.FLAT} <= set(names)
        assert (bench_hidden.GEMMS_FP32 in names) == (section["dtype"] == "bf16")
        for row in section["rows"]:
            assert row["wrong"] is None
            assert len(row["samples_s"]) == 4  # two in three rounds
    for line in ("P2: fusedpg / three bare", "P3: half the rows masked", "Liger fused linear CE: not run"):
        assert line in result.output


def test_two_vocabularies_and_fewer_tokens():
    assert bench.Options().heads == [(512, 32_768), (512, 151_936)]
    assert bench.Options(vocab=1000, tokens=9).heads == [(4, 1000)]


def mutant(*args, **options):
    """A loss whose value is right and whose gradients are 1 % too large."""
    out = policy_loss_from_hidden(*args, **options)
    scaled = out.loss * 1.01
    return replace(out, loss=scaled - (scaled - out.loss).detach())


def test_a_wrong_kernel_gets_no_time(monkeypatch, tmp_path):
    monkeypatch.setattr(bench_hidden, "policy_loss_from_hidden", mutant)
    path = tmp_path / "bench.json"
    result = run("--dtype", "fp32", "--json", str(path))
    assert result.exit_code == 1
    (section,) = json.loads(path.read_text())["sections"]
    for row in section["rows"]:
        if row["name"].startswith(bench_hidden.OURS) and row["name"] != bench_hidden.SCORE:
            assert "d hidden error 1.0e-02 > 1.0e-05; d weight error 1.0e-02 > 1.0e-05" in row["wrong"]
            assert row["samples_s"] == []
        else:
            assert len(row["samples_s"]) == 4
    assert "wrong result" in result.output
    assert all(not target["met"] for target in section["targets"] if "memory" not in target["what"])


def test_the_small_workspace_holds_a_quarter_of_the_rows():
    problem = bench_hidden.make_problem(1024, 4000, 8, torch.float32, CPU)
    plan = problem.plan(problem.small_workspace() << 20)
    assert plan.products == 3
    assert 256 <= plan.rows < 512


def test_the_progress_bar_knows_its_length():
    options = bench.Options(suites=("hidden",), tokens=4, vocab=64, width=8, rounds=3)
    seen = []
    list(bench.run(options, seen.append))
    assert len(seen) == bench.total_ticks(options)


def test_who_is_absent_is_named():
    lines = bench_hidden.absent(CPU)
    for name in (availability.LIGER_CE, availability.VERL_KERNEL, availability.QUACK_LINEAR, availability.CUT_CE):
        assert any(line.startswith(f"{name}: not run, ") for line in lines)


def test_a_large_vocabulary_leaves_the_rivals_half_batches_out():
    assert hidden_section.rows_of(torch.bfloat16, 64, CPU) == hidden_section.rows_of(torch.float32, 64, CPU) + 1
    halved = sum(availability.runs(name, CPU) for name in bench_hidden.HALVED)
    large = bench_hidden.HALVED_VOCAB + 1
    assert hidden_section.rows_of(torch.float32, 64, CPU) == hidden_section.rows_of(torch.float32, large, CPU) + halved
    problem = bench_hidden.make_problem(4, large, 2, torch.float32, CPU)
    assert len(bench_hidden.contenders(problem)) == hidden_section.rows_of(torch.float32, large, CPU)


def test_useful_work_of_each_row():
    problem = make_problem()
    work = {contender.name: contender.work for contender in bench_hidden.contenders(problem)}
    assert work[bench_hidden.OURS] == work[bench_hidden.GEMMS] == work[bench_hidden.FLAT[1]] == 1
    assert work[f"{bench_hidden.OURS}, {bench_hidden.INACTIVE}"] == work[bench_hidden.FLAT[0]] == 1 / 2
    # all rows go forward, half of them back: (1 + 0.5 + 0.5) of 3 products
    assert work[f"{bench_hidden.OURS}, {bench_hidden.IDLE}"] == pytest.approx(2 / 3)
    assert work[bench_hidden.SCORE] == pytest.approx(1 / 3)


def test_the_section_measures_what_a_gpu_promises(monkeypatch):
    """P6 stands in place of P2 and P3 where the tensors are on a GPU."""
    rows = {
        name: Row(name, name == bench_hidden.OURS, Verdict(), [seconds], work=1.0)
        for name, seconds in ((bench_hidden.OURS, 1.1), (bench_hidden.GEMMS, 1.0), (availability.TRL_HEAD, 2.2))
    }
    on_gpu = SimpleNamespace(hidden=SimpleNamespace(device=torch.device("cuda")))
    lines = [t.line() for t in hidden_section._targets(on_gpu, rows, [rows[bench_hidden.GEMMS]])]
    assert lines[0].startswith("P6: fusedpg / three bare products: 1.1x")
    assert lines[1].startswith("P6: against TRL fused head: 2x")
    assert len(lines) == 2
