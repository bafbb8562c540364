"""Split = whole: gradients, loss and metrics of a step do not depend on its chunks and ranks."""

import random
import time

import pytest
import ranks
import torch
import torch.multiprocessing as mp
import toy

from fusedpg.accumulate import StepAccumulator
from fusedpg.metric_adapter import OBJECTIVE_WEIGHT_SUM, MetricAdapter
from fusedpg.objective import Objective, Reduction
from fusedpg.policy_objective import build_policy_objective


def spawn(world, *args, seconds):
    """`ranks.run` in processes of their own: a hang fails at the deadline."""
    context = mp.spawn(ranks.run, args=(world, *args), nprocs=world, join=False)
    deadline = time.monotonic() + seconds
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < deadline, f"{world} processes did not finish: a rank waits for another"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks(world, tmp_path):
    """Every loss and reduction, uneven and empty ranks, DDP, FSDP."""
    spawn(world, str(tmp_path / "store"), seconds=180)


@pytest.mark.sweep
@pytest.mark.parametrize("world", [1, 2, 4])
def test_everything_on_ranks(world, tmp_path):
    """Every loss and reduction x plan of chunks over ranks x layout x backend."""
    spawn(world, str(tmp_path / "store"), True, seconds=600)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", toy.ADDITIVE)
def test_chunks(name, backend):
    """Any cut of the batch, padded and packed, under every reduction."""
    rng = random.Random(name)
    for reduction in toy.REDUCTIONS:
        spec = toy.spec_of(name, reduction)
        objective = build_policy_objective(spec, backend=backend)
        for packed in (False, True):
            batch = toy.make_batch(spec, packed=packed)
            loss, want, metrics = toy.whole_gradients(objective, batch)
            cuts = sorted(rng.sample(range(1, len(toy.LENGTHS)), rng.randint(1, 7)))
            model = toy.Policy()
            result = StepAccumulator(objective, model).step(toy.split(batch, cuts))
            toy.assert_same(toy.gradients(model), want, f"{reduction} {packed} {cuts}")
            torch.testing.assert_close(result.loss, loss, rtol=1e-9, atol=1e-11)
            for key, value in objective.public_metrics(metrics).items():
                torch.testing.assert_close(result.metrics[key].double(), value.double(), rtol=1e-9, atol=1e-11, msg=key)


def test_a_mean_of_means_is_not_the_whole():
    """A changed loss that keeps an incompatible weight is a silent error: the test above would see it."""
    spec = toy.spec_of("ppo_clip", "token-mean")
    objective = Objective(build_policy_objective(spec, backend="reference").fn, Reduction.MEAN)
    batch = toy.make_batch(spec)
    _, want, _ = toy.whole_gradients(objective, batch)
    model = toy.Policy()
    StepAccumulator(objective, model).step(toy.split(batch, [1, 3]))
    with pytest.raises(AssertionError):
        toy.assert_same(toy.gradients(model), want)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo"])
def test_a_step_of_masked_chunks(name):
    """Nothing to train on: zero gradients through a connected graph, loss 0, metrics finite."""
    spec = toy.spec_of(name, "seq-mean-token-mean")
    batch = toy.make_batch(spec)
    batch["mask"] = torch.zeros_like(batch["mask"])
    model = toy.Policy()
    result = StepAccumulator(build_policy_objective(spec, backend="reference"), model).step(toy.split(batch, [4]))
    assert result.loss == 0
    assert result.weight == 0
    assert all(torch.isfinite(torch.as_tensor(v)) for v in result.metrics.values())
    assert model.table.grad is not None
    assert not model.table.grad.any()


def test_gradients_of_an_earlier_step_are_refused():
    objective = build_policy_objective(toy.spec_of("ppo_clip", "token-mean"), backend="reference")
    model = toy.Policy()
    accumulator = StepAccumulator(objective, model)
    accumulator.step(toy.split(toy.make_batch(), [3]))
    with pytest.raises(ValueError, match=r"^model: expected no gradients at the start of a step.*zero_grad"):
        accumulator.step([])
    model.zero_grad()
    accumulator.step(toy.split(toy.make_batch(), [3]))


def constant(model, batch):
    loss = model(batch).mean() * 0.0 + batch["value"]
    metrics = {"my/loss": loss.detach(), "my/rate": batch["rate"], "my/n": batch["n"], "my/peak": batch["rate"]}
    return loss, {**metrics, OBJECTIVE_WEIGHT_SUM: batch["weight"]}


def test_scalars_merge_by_their_own_count():
    """`weighted_by` names the count of a mean, counts add, extrema stay extrema; the rest goes by the loss's weight."""
    adapter = MetricAdapter(
        "my/",
        {"loss": "loss", "rate": "rate", "n": "n", "peak": "peak"},
        weighted_by={"my/rate": "my/n"},
        extrema={"my/peak": "max"},
    )
    objective = Objective(constant, Reduction.TOKEN_SUM, metric_adapter=adapter)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    chunks = [
        {"input_ids": ids, "value": 2.0, "weight": 3.0, "rate": 0.5, "n": 10},
        {"input_ids": ids, "value": 6.0, "weight": 1.0, "rate": 1.0, "n": 30},
        {"input_ids": ids, "value": 0.0, "weight": 0.0, "rate": 9.0, "n": 0},  # nothing to train on
    ]
    result = StepAccumulator(objective, toy.Policy()).step(chunks)
    assert result.loss == 3.0  # (2*3 + 6*1)/4
    assert result.weight == 4.0
    got = {k: float(v) for k, v in result.metrics.items()}
    assert got == {"train/loss": 3.0, "train/rate": 0.875, "train/n": 40.0, "train/peak": 1.0}  # (0.5*10 + 1*30)/40


def test_gradients_argument():
    objective = Objective(toy.mean_loss)
    with pytest.raises(ValueError, match=r"^gradients: expected one of local, averaged, summed; got 'ddp'"):
        StepAccumulator(objective, toy.Policy(), gradients="ddp")
    with pytest.raises(ValueError, match="requires grad; got none"):
        StepAccumulator(objective, toy.Policy().requires_grad_(False))
