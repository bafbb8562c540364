"""`python -m fusedpg demo`: the task, the advantages, and one short run from end to end."""

import pytest
import torch
from typer.testing import CliRunner

from fusedpg.cli import demo
from fusedpg.cli.app import app
from fusedpg.cli.compare import Comparison
from fusedpg.cli.task import END, PAD, SortTask, text

pytest.importorskip("transformers")


def test_fast_demo_learns_and_shows_it(tmp_path):
    result = CliRunner().invoke(app, ["demo", "--fast", "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    png = (tmp_path / "out" / "reward.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    for shown in (
        "clip fraction",
        "KL to start",
        "tokens/s",
        "reward plot:",
        "peak memory, reference",
        "held-out mean",
    ):
        assert shown in result.output, result.output
    backend = "triton" if torch.cuda.is_available() else "cpu"
    assert f"loss backend: {backend}" in result.output.replace("\n", " ")


def comparison(loss=0.0, grad=0.0):
    return Comparison("a batch", "cpu", loss, grad, 1.0, 2.0, 10, 20)


@pytest.mark.parametrize(
    ("before", "after", "compared", "expected"),
    [
        (0.2, 0.5, comparison(), []),
        (0.2, 0.3, comparison(), ["the mean reward rose by 0.100; expected at least 0.2"]),
        (0.2, 0.5, comparison(loss=1e-3), ["cpu and reference disagree on a batch: loss by 1.0e-03"]),
        (0.2, 0.5, comparison(grad=float("nan")), ["gradient by nan"]),
    ],
)
def test_problems_are_reported(before, after, compared, expected):
    found = demo._problems(before, after, [compared])
    assert len(found) == len(expected)
    assert all(part in whole for part, whole in zip(expected, found, strict=True))


def test_a_problem_is_exit_status_1(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "run_demo", lambda *args: ["the mean reward rose by 0.1"])
    result = CliRunner().invoke(app, ["demo", "--fast", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "FAILED: the mean reward rose by 0.1" in result.output


def test_task_answers_are_sorted_and_rewarded_exactly():
    task = SortTask()
    prompts, answers = task.sample(64, torch.Generator().manual_seed(0))
    assert prompts.shape == answers.shape == (64, 7)
    for prompt, answer in zip(prompts, answers, strict=True):
        letters = text(prompt).strip().removesuffix(">")
        assert 3 <= len(letters) <= 6
        assert text(answer).rstrip() == "".join(sorted(letters)) + "."
    assert task.reward(answers, answers).tolist() == [1.0] * 64
    behind = answers.clone()
    behind[answers == PAD] = 0  # what follows the point is not part of the answer
    assert task.reward(behind, answers).tolist() == [1.0] * 64
    early = answers.clone()
    early[:, 0] = END
    assert task.reward(early, answers).sum() == 0


def test_mask_covers_the_answer_and_its_point():
    rows = torch.tensor([[0, 1, END, 3, END], [0, 1, 2, 3, 4], [END, 0, 0, 0, 0]])
    assert SortTask.mask(rows).int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
