"""The suites `scoring` and `scaling` of the benchmark: truth, rows, sweeps, and no time for a wrong result."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from fusedpg import linear_token_logprobs, policy_loss_from_hidden, token_logprobs
from fusedpg.cli import availability, bench, bench_hidden, bench_scoring, scoring_forms
from fusedpg.cli.app import app
from fusedpg.cli.timing import Outcome

TINY = [
    "bench",
    "--tokens",
    "16",
    "--vocab",
    "301",
    "--width",
    "16",
    "--rounds",
    "3",
    "--dtype",
    "fp32",
    "--no-compile",
]
CPU = torch.device("cpu")


def sections(path, *arguments, code=0):
    result = CliRunner().invoke(app, [*TINY, *arguments, "--json", str(path)])
    assert result.exit_code == code, result.output
    return json.loads(path.read_text())["sections"], result.output


def test_the_truth_is_log_softmax_in_fp64():
    problem = bench_scoring.make_logits(130, 50, torch.float32, CPU)  # more than two blocks of rows
    distribution = torch.distributions.Categorical(logits=problem.logits.double())
    assert torch.allclose(problem.logp, distribution.log_prob(problem.targets), rtol=1e-12)
    assert torch.allclose(problem.entropy, distribution.entropy(), rtol=1e-12)
    heads = bench_scoring.make_hidden(70, 50, 8, torch.float32, CPU)
    distribution = torch.distributions.Categorical(logits=heads.hidden.double() @ heads.weight.double().t())
    assert torch.allclose(heads.logp, distribution.log_prob(heads.targets), rtol=1e-12)
    assert torch.allclose(heads.entropy, distribution.entropy(), rtol=1e-12)


@pytest.mark.parametrize("what", ["logp", "entropy"])
def test_each_error_is_seen(what):
    problem = bench_scoring.make_logits(4, 50, torch.float32, CPU)
    ours = next(c for c in bench_scoring.logits_contenders(problem, compiled=False) if c.name == bench_scoring.OURS)
    right = ours.run()
    assert ours.check(right).wrong is None
    off = getattr(right, what).clone()
    off[2] += 1e-3 * off[2].abs().clamp(min=1)
    assert f"{what} error 1.0e-03" in ours.check(replace(right, **{what: off})).wrong
    assert "nan" in ours.check(Outcome(logp=right.logp * torch.nan, entropy=right.entropy)).wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_everyone_scores_the_same(dtype):
    logits = bench_scoring.make_logits(8, 301, dtype, CPU)
    heads = bench_scoring.make_hidden(8, 301, 16, dtype, CPU)
    rows = [*bench_scoring.logits_contenders(logits, compiled=False), *bench_scoring.hidden_contenders(heads)]
    for row in rows:
        assert row.check(row.run()).wrong is None, row.name
    names = {row.name for row in rows}
    assert {availability.TRL_HEAD, availability.TRL_SELECTIVE} <= names or not availability.runs("TRL fused head", CPU)
    assert (bench_scoring.PRODUCT_FP32 in names) == (dtype == torch.bfloat16)


def test_tables_of_scoring(tmp_path):
    tables, output = sections(tmp_path / "a.json", "--suite", "scoring")
    assert [(t["suite"], t["source"], t["tokens"]) for t in tables] == [
        ("scoring", "logits", 2),
        ("scoring", "hidden", 2),
    ]
    assert [t["gauge"]["ceiling"] for t in tables] == [bench_scoring.COPY, bench_scoring.PRODUCT]
    assert "Liger fused_selective_log_softmax: not run" in output
    assert "against torch eager" in output


def test_tables_of_scaling_have_every_point(tmp_path):
    tables, output = sections(tmp_path / "a.json", "--suite", "scaling")
    assert [(t["source"], t["axis"]) for t in tables] == [
        ("logits", "N"),
        ("hidden", "N"),
        ("hidden", "V"),
        ("hidden", "D"),
    ]
    sizes = [
        sorted({row[name] for row in t["rows"]})
        for t, name in zip(tables, ("tokens", "tokens", "vocab", "width"), strict=True)
    ]
    assert sizes == [[2, 4, 8], [2, 4, 8], [75, 150, 301], [4, 8, 16]]
    for row in tables[2]["rows"]:
        assert (row["tokens"], row["width"]) == (4, 16)
        # 6NDV
        assert row["gauge"]["amount"] == 6 * 4 * 16 * row["vocab"]
        assert row["gauge"]["ceiling"] == bench_hidden.GEMMS
    assert "Scaling in V: policy loss and gradient from hidden states, fp32, N = 4, D = 16" in output


# ------------------------------------------------------------------ wrong kernels


def wrong_logprobs(*arguments, **options):
    """One log-prob of the batch is off by a thousandth."""
    out = token_logprobs(*arguments, **options)
    return replace(out, logp=out.logp.index_add(0, torch.tensor([1]), torch.tensor([0.01])))


def wrong_entropy(*arguments, **options):
    """The entropy is 1 % too large."""
    out = linear_token_logprobs(*arguments, **options)
    return replace(out, entropy=None if out.entropy is None else out.entropy * 1.01)


def wrong_gradient(*arguments, **options):
    """A loss whose value is right and whose gradients are 1 % too large."""
    out = policy_loss_from_hidden(*arguments, **options)
    return replace(out, loss=out.loss * 1.01 - (out.loss * 0.01).detach())


def refused(table):
    return {row["name"] for row in table["rows"] if row["samples_s"] == [] and "median_s" not in row and row["wrong"]}


def test_a_wrong_log_prob_gets_no_time(monkeypatch, tmp_path):
    monkeypatch.setattr(scoring_forms, "token_logprobs", wrong_logprobs)
    (logits, hidden), output = sections(tmp_path / "a.json", "--suite", "scoring", code=1)
    assert refused(logits) == {bench_scoring.OURS, bench_scoring.OURS_LOGP}
    assert logits["broken"]
    assert not logits["targets"][0]["met"]
    assert refused(hidden) == set()
    assert "no time reported, its result is wrong: logp error" in output


def test_a_wrong_entropy_gets_no_time(monkeypatch, tmp_path):
    monkeypatch.setattr(scoring_forms, "linear_token_logprobs", wrong_entropy)
    (logits, hidden), output = sections(tmp_path / "a.json", "--suite", "scoring", code=1)
    assert refused(logits) == set()
    assert refused(hidden) == {bench_scoring.OURS}
    assert "its result is wrong: entropy error" in output


def test_a_wrong_gradient_gets_no_time_in_a_sweep(monkeypatch, tmp_path):
    monkeypatch.setattr(bench_hidden, "policy_loss_from_hidden", wrong_gradient)
    tables, output = sections(tmp_path / "a.json", "--suite", "scaling", code=1)
    assert [refused(t) for t in tables] == [set(), *[{bench_hidden.OURS}] * 3]
    assert "wrong result" in output


def test_every_suite_has_a_wrong_kernel():
    """Where the test is that breaks each suite's kernel: a new suite is to name its own."""
    assert set(bench.SUITES) == {
        *("logits", "accuracy", "loss", "distill"),  # test_bench.py
        "hidden",  # test_bench_hidden.py
        "trl",  # test_bench_trl.py
        *("scoring", "scaling"),  # here
        "static",  # test_bench_static.py
    }
