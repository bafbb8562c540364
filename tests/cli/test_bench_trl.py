"""The suite `trl` of the benchmark: one micro-batch, stock and fused, and no time for a wrong result."""

import json

import pytest
from typer.testing import CliRunner

pytest.importorskip("trl")

from fusedpg.cli import bench, bench_trl
from fusedpg.cli.app import app

TINY = ["bench", "--suite", "trl", "--vocab", "401", "--rounds", "1"]


def test_table(tmp_path):
    result = CliRunner().invoke(app, [*TINY, "--markdown", "--json", str(tmp_path / "bench.json")])
    assert result.exit_code == 0, result.output
    assert "| FusedGRPOTrainer |" in result.output
    assert "against stock GRPOTrainer" in result.output
    (section,) = json.loads((tmp_path / "bench.json").read_text())["sections"]
    assert [row["name"] for row in section["rows"]] == ["FusedGRPOTrainer", "GRPOTrainer"]
    for row in section["rows"]:
        assert row["wrong"] is None
        assert set(row["errors_vs_fp64"]) == {"loss", "d head"}


def test_a_row_is_of_the_trainer_that_it_names(monkeypatch):
    seen = {}

    def measure(contenders, *args):
        seen.update({c.name: type(c.run.__self__.trainer).__name__ for c in contenders})
        raise InterruptedError

    monkeypatch.setattr(bench_trl, "measure", measure)
    with pytest.raises(InterruptedError):
        bench_trl.section(bench.Options(vocab=401, rounds=1), lambda what: None)
    assert seen == {name: name for name in ("FusedGRPOTrainer", "GRPOTrainer")}


def test_a_wrong_loss_gets_no_time(monkeypatch):
    step = bench_trl.Run.step

    def wrong(self):
        outcome = step(self)
        if type(self.trainer).__name__ == "FusedGRPOTrainer":
            outcome.grad.mul_(1.01)
        return outcome

    monkeypatch.setattr(bench_trl.Run, "step", wrong)
    result = CliRunner().invoke(app, [*TINY, "--markdown"])
    assert result.exit_code == 1
    assert "FusedGRPOTrainer: no time reported, its result is wrong: d head error" in result.output


def test_the_progress_bar_knows_its_length():
    options = bench.Options(suites=("trl",), vocab=401, rounds=2)
    ticked = []
    assert list(bench.run(options, ticked.append))
    assert len(ticked) == bench.total_ticks(options)
