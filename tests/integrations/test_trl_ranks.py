"""A run on two processes: each of them logs what stock TRL logs."""

import os
import warnings

import pytest

from processes import on_each

pytest.importorskip("trl")


def run(rank, path):
    """Both runs of one process."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    from trl import GRPOTrainer

    from fusedpg.certify.tiny_trl import grpo, history
    from fusedpg.integrations.trl import FusedGRPOTrainer

    options = {"beta": 0.04, "num_iterations": 2, "steps_per_generation": 4, "ddp_backend": "gloo"}
    runs = [grpo(path, trainer, **options) for trainer in (GRPOTrainer, FusedGRPOTrainer)]
    assert runs[1].why_two_passes is None
    assert runs[1].accelerator.num_processes == 2
    return [history(trainer) for trainer in runs]


def test_two_processes(tmp_path):
    from fusedpg.certify.tiny_trl import make_model

    make_model(tmp_path)
    logs = on_each(run, tmp_path)
    for stock, fused in logs:
        for theirs, ours in zip(stock, fused, strict=True):
            for name in ("loss", "grad_norm", "kl", "entropy", "clip_ratio/region_mean", "reward"):
                if name in theirs:
                    assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name
    assert any(stock for stock, _ in logs)
