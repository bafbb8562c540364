"""A run on two processes: each of them logs what stock TRL logs."""

import multiprocessing
import os
import socket
import warnings

import pytest

pytest.importorskip("trl")


def run(rank, port, path, results):
    """Both runs of one process."""
    os.environ |= {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "HF_HUB_OFFLINE": "1"},
    }
    warnings.simplefilter("ignore")
    from trl import GRPOTrainer

    from fusedpg.certify.tiny_trl import grpo, history
    from fusedpg.integrations.trl import FusedGRPOTrainer

    options = {"beta": 0.04, "num_iterations": 2, "steps_per_generation": 4, "ddp_backend": "gloo"}
    runs = [grpo(path, trainer, **options) for trainer in (GRPOTrainer, FusedGRPOTrainer)]
    assert runs[1].why_two_passes is None
    assert runs[1].accelerator.num_processes == 2
    results.put((rank, [history(trainer) for trainer in runs]))


def test_two_processes(tmp_path):
    from fusedpg.certify.tiny_trl import make_model

    make_model(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [context.Process(target=run, args=(rank, port, tmp_path, results)) for rank in range(2)]
    for worker in workers:
        worker.start()
    try:
        logs = [results.get(timeout=240) for _ in workers]
    finally:
        for worker in workers:
            worker.join(timeout=20)
            worker.kill()
    for _, (stock, fused) in logs:
        for theirs, ours in zip(stock, fused, strict=True):
            for name in ("loss", "grad_norm", "kl", "entropy", "clip_ratio/region_mean", "reward"):
                if name in theirs:
                    assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name
    assert any(stock for _, (stock, _) in logs)
