"""What each process of the multi-process tests runs; it imports neither pytest nor triton."""

from __future__ import annotations

import datetime
import itertools
import warnings
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import toy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fusedpg
from fusedpg.accumulate import StepAccumulator
from fusedpg.context import AGG_MODES
from fusedpg.metric_adapter import ObjectiveMetrics
from fusedpg.objective import Objective, Reduction
from fusedpg.policy_objective import build_policy_objective

#: world size -> which of the split's parts each rank trains on, by their index: uneven, and some ranks without any
PLANS = {
    1: [[[0, 1, 2, 3]]],
    2: [[[0, 1, 2], [3]], [[], [0, 1, 2, 3]]],
    4: [[[0], [1, 2], [], [3]], [[], [], [0, 1, 2, 3], []]],
}
CUTS = [1, 2, 6]


def run(rank: int, world: int, store: str, wide: bool = False) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
    try:
        if wide:
            everything(rank, world)
            return
        every_loss_and_reduction(rank, world)
        nothing_anywhere()
        means(rank, world)
        bodies(rank, world)
        wrapped(rank, world)
        sharded(rank, world)
        a_rank_without_filler(rank, world)
    finally:
        dist.destroy_process_group()


def every_loss_and_reduction(rank: int, world: int) -> None:
    """Each pair once: the layouts, and the plans of chunks over ranks, take turns."""
    plans = PLANS[world]
    for i, (name, reduction) in enumerate(toy.ALL):
        one_pair(name, reduction, plans[i // 2 % len(plans)][rank], i % 2 == 1, "reference", world, seed=i)


def everything(rank: int, world: int) -> None:
    """Each pair under every plan, in both layouts, on the reference and the compiled core."""
    choices = itertools.product(toy.ALL, PLANS[world], (False, True), ("reference", "cpu"))
    for (name, reduction), plan, packed, backend in choices:
        one_pair(name, reduction, plan[rank], packed, backend, world)


def one_pair(name: str, reduction: str, mine: list[int], packed: bool, backend: str, world: int, seed: int = 0) -> None:
    spec = toy.spec_of(name, reduction)
    objective = build_policy_objective(spec, backend=backend)
    batch = toy.make_batch(spec, packed=packed, seed=seed)
    check(objective, batch, mine, f"{name} {reduction} {backend} packed={packed} world {world} {mine}")


def check(objective: Objective, batch: Any, mine: list[int], label: str, **options: Any) -> None:
    """The step of this rank's parts against the unsplit batch."""
    loss, want, metrics = toy.whole_gradients(objective, batch)
    metrics = ObjectiveMetrics.of(metrics).detached()
    parts = toy.split(batch, CUTS)
    model = toy.Policy()
    wrap = options.pop("wrap", None)
    filler = options.pop("filler", None)
    module = model if wrap is None else wrap(model)
    result = StepAccumulator(objective, module, **options).step([parts[i] for i in mine], filler=filler)
    if wrap is not None:  # DDP gives an unused parameter zeros
        want = [torch.zeros_like(p) if w is None else w for w, p in zip(want, model.parameters(), strict=True)]
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    toy.assert_same(toy.gradients(model), want, label)
    torch.testing.assert_close(result.loss, loss.double(), rtol=1e-9, atol=1e-11)
    assert result.chunks == len(CUTS) + 1, label
    public = objective.public_metrics(metrics)
    assert set(result.metrics) == set(public), label
    for key, value in public.items():
        torch.testing.assert_close(
            result.metrics[key].double(),
            value.double(),
            rtol=1e-9,
            atol=1e-11,
            msg=lambda m, k=key: f"{label} {k}: {m}",
        )


def nothing_anywhere() -> None:
    """No rank has a chunk: no gradient appears, the loss is 0 and nobody waits."""
    objective = build_policy_objective(toy.spec_of("ppo_clip", "token-mean"), backend="reference")
    model = toy.Policy()
    result = StepAccumulator(objective, model).step([])
    assert result.loss == 0
    assert result.weight == 0
    assert result.chunks == 0
    assert toy.gradients(model) == [None] * 3


def means(rank: int, world: int) -> None:
    """`Reduction.MEAN`: chunks of one size average to the whole, whatever rank they are on."""
    objective = Objective(toy.mean_loss, Reduction.MEAN)
    batch = toy.make_batch()
    loss, want, _ = toy.whole_gradients(objective, batch)
    parts = toy.split(batch, [2, 4, 6])
    model = toy.Policy()
    result = StepAccumulator(objective, model).step([parts[i] for i in PLANS[world][-1][rank]])
    toy.assert_same(toy.gradients(model), want, "mean")
    torch.testing.assert_close(result.loss, loss)
    torch.testing.assert_close(result.metrics["toy/loss"], loss)


def bodies(rank: int, world: int) -> None:
    """Bodies over `LossContext` with the counts of the step: `aggregate` normalises over chunks and ranks, chunks add."""
    batch = toy.make_batch()
    counts = {"step_tokens": int(batch["mask"].sum()), "step_sequences": int(batch["mask"].any(1).sum())}
    parts = [part | counts for part in toy.split(batch, CUTS)]
    for (name, mode), plan in itertools.product(itertools.product(("icepop", "gspo"), AGG_MODES), PLANS[world]):
        loss = fusedpg.resolve_loss(name, "reference", loss_agg_mode=mode, path="custom")
        objective = Objective(partial(toy.body_loss, loss), Reduction.SUM)
        whole, want, _ = toy.whole_gradients(objective, batch)
        model = toy.Policy()
        result = StepAccumulator(objective, model).step([parts[i] for i in plan[rank]])
        toy.assert_same(toy.gradients(model), want, f"{name} {mode} world {world}")
        torch.testing.assert_close(result.loss, whole.double(), rtol=1e-9, atol=1e-11)


def wrapped(rank: int, world: int) -> None:
    """DDP's averaging is cancelled; or switched off, and the accumulator sums."""
    objective = build_policy_objective(toy.spec_of("ppo_clip", "seq-mean-token-mean"), backend="reference")
    batch = toy.make_batch(seed=3)
    ddp = lambda model: DistributedDataParallel(model, find_unused_parameters=True)  # noqa: E731
    for plan in PLANS[world]:
        check(objective, batch, plan[rank], "ddp, own sum", wrap=ddp)
        filler = toy.split(batch, CUTS)[0]
        check(objective, batch, plan[rank], "ddp, averaged", wrap=ddp, gradients="averaged", filler=filler)


def sharded(rank: int, world: int) -> None:
    """FSDP: parameters and gradients in shards, every pass a collective call, uneven and empty ranks."""
    objective = build_policy_objective(toy.spec_of("gspo", "seq-mean-token-mean"), backend="reference")
    batch = toy.make_batch(seed=4)
    _, want, _ = toy.whole_gradients(objective, batch)
    parts = toy.split(batch, CUTS)
    for plan in PLANS[world]:
        model = toy.Policy()
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        accumulator = StepAccumulator(objective, model, gradients="averaged")
        accumulator.step([parts[i] for i in plan[rank]], filler=parts[0])
        got = [None if g is None else g.full_tensor() for g in toy.gradients(model)]
        toy.assert_same(got, want, "fsdp")


def a_rank_without_filler(rank: int, world: int) -> None:
    """A rank that cannot take part in a wrapper's collective calls is refused on every rank."""
    if world == 1:
        return
    objective = build_policy_objective(toy.spec_of("ppo_clip", "token-mean"), backend="reference")
    chunks = toy.split(toy.make_batch(), CUTS) if rank == 0 else []
    message = ""
    try:
        StepAccumulator(objective, toy.Policy(), gradients="averaged").step(chunks)
    except ValueError as error:
        message = str(error)
    assert message.startswith("filler: gradients='averaged' makes every backward pass a collective call"), message
