"""Rivals of the benchmark: who can run is a row, who cannot is named with the reason; models by name."""

import os
from dataclasses import replace
from importlib import metadata

import pytest
import torch
from typer.testing import CliRunner

from fusedpg.cli import (
    availability,
    bench_hidden,
    bench_logits,
    bench_scoring,
    hidden_rivals,
    models,
    scoring_forms,
)
from fusedpg.cli.app import app
from fusedpg.cli.bench_options import Options
from fusedpg.cli.hidden_truth import loss_check

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def installed(monkeypatch):
    """Packages by name, whatever this machine has."""
    versions = {}

    def version(package):
        if package not in versions:
            raise metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(availability.metadata, "version", version)
    return versions


def test_a_missing_package_is_named(installed):
    assert availability.why_not(availability.TRL_HEAD, CPU) == "TRL fused head: not run, trl is not installed"
    quack = "QuACK cross_entropy: not run, quack-kernels is not installed"
    assert availability.why_not(availability.QUACK_CE, CUDA) == quack
    assert availability.why_not(availability.QUACK_CE, CPU) == quack + " and needs a GPU"
    assert availability.versions()["trl"] is None


def test_kernels_that_need_a_gpu_are_named(installed):
    installed["liger-kernel"] = "9.9"
    expected = "LigerJSD: not run, the kernels of liger-kernel 9.9 need a GPU; the tensors are on cpu"
    assert availability.why_not(availability.LIGER_JSD, CPU) == expected
    assert availability.absent([availability.LIGER_JSD, "torch eager"], CPU) == [expected]
    assert availability.versions()["liger-kernel"] == "9.9"


def test_a_package_that_breaks_when_imported_is_named(installed, monkeypatch):
    installed["verl"] = "0.1"

    def broken(name):
        raise RuntimeError("no such driver")

    monkeypatch.setattr(availability, "load", broken)
    reason = availability.why_not(availability.VERL_HEAD, CPU)
    assert reason == ("verl FusedLinearForPPO: not run, verl 0.1 cannot be imported: RuntimeError: no such driver")


def test_an_old_torch_has_no_linear_cross_entropy(monkeypatch):
    monkeypatch.delattr(torch.nn.functional, "linear_cross_entropy", raising=False)
    assert "has none" in availability.why_not(availability.TORCH_CE, CPU)


@pytest.mark.parametrize("name", availability.RIVALS)
def test_whoever_is_installed_has_the_module(name):
    rival = availability.RIVALS[name]
    try:
        metadata.version(rival.package)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{rival.package} is not installed")
    if rival.gpu:
        pytest.skip("its module may need a GPU to be imported")
    assert availability.load(name).__name__ == rival.module


# ------------------------------------------------------------------ models


def test_models_have_the_sizes_of_their_configs():
    assert models.find("Qwen3-0.6B") == models.Head(1024, 151_936, "Qwen/Qwen3-0.6B")
    assert (models.find("qwen3-32b").width, models.find("llama3.1-8b").vocab) == (5120, 128_256)
    assert (models.find("gpt-oss-20b").width, models.find("gpt-oss-20b").vocab) == (2880, 201_088)
    for family in ("qwen3", "llama3", "gemma2", "gemma3", "gpt-oss"):
        assert any(name.startswith(family) for name in models.MODELS)


@pytest.mark.parametrize("name", models.MODELS)
def test_a_cpu_takes_as_many_tokens_as_it_affords(name):
    head = models.find(name)
    tokens = models.cpu_tokens(head, 1024)
    assert 6 * tokens * head.width * head.vocab <= models.CPU_FLOPS or tokens == 1
    assert tokens == 1024 or 6 * 2 * tokens * head.width * head.vocab > models.CPU_FLOPS
    assert models.cpu_tokens(head, 3) <= 3


def test_a_model_sets_the_head_and_no_other_vocabulary():
    head = models.find("qwen3-8b")
    options = Options(tokens=1024).with_head("qwen3-8b", head.vocab, head.width, 64)
    assert options.heads == [(64, 151_936)]
    assert options.scored_tokens == 64
    assert options.width == 4096
    assert options.sweeps["N"][-1] == (128, 16_384, 4096)


def test_an_unknown_model_is_refused():
    result = CliRunner().invoke(app, ["bench", "--model", "qwen9"])
    assert result.exit_code == 2
    assert "--model: model: expected one of qwen3-0.6b," in result.output
    assert "got 'qwen9'" in result.output


# ------------------------------------------------------------------ rivals with Triton kernels, in its interpreter


def interpreted(name):
    """Skip where their kernels cannot run at all."""
    pytest.importorskip(availability.RIVALS[name].module.split(".")[0])
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("runs in Triton's interpreter")


def test_ligers_kernel_computes_the_loss_from_logits():
    interpreted(availability.LIGER_GRPO)
    problem = bench_logits.make_problem(4, 50, torch.float32, CPU)
    alike = replace(problem, advantages=torch.ones_like(problem.advantages))
    problem.prepare()
    outcome = bench_logits._liger_grpo(alike)
    assert bench_logits.policy_check(alike, bench_logits.TOLERANCE[torch.float32])(outcome).wrong is None


def test_ligers_kernel_scores_logits():
    interpreted(availability.LIGER_SELECTIVE)
    problem = bench_scoring.make_logits(4, 50, torch.float32, CPU)
    logp, _ = scoring_forms.liger_selective(problem.padded, problem.targets)
    assert torch.allclose(logp.view(-1).double(), problem.logp, atol=1e-5)


def test_ligers_kernel_computes_cross_entropy_from_hidden_states():
    interpreted(availability.LIGER_CE)
    problem = bench_hidden.make_problem(8, 64, 32, torch.float32, CPU)
    outcome = bench_hidden._rival(problem, hidden_rivals.liger_cross_entropy)
    check = loss_check(problem.truth, lambda logp: -logp.mean(), bench_logits.TOLERANCE[torch.float32])
    assert check(outcome).wrong is None
