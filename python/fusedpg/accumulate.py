"""`StepAccumulator`: what a trainer does with an objective's `Reduction` over chunks and ranks.

With chunk losses loss_i = numerator_i / weight_i, whatever the split of a step over chunks and ranks,

    gradient of the step = sum of d numerator_i / sum of weight_i

which is the gradient of the unsplit batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .metric_adapter import OBJECTIVE_NUMERATOR, OBJECTIVE_WEIGHT_SUM, ObjectiveMetrics, Reported, merge_metrics
from .objective import Objective, Reduction

_GRADIENTS = ("local", "averaged", "summed")


@dataclass(frozen=True)
class StepResult:
    """One optimizer step over all chunks and ranks: the same values on every rank.

    `loss` is the loss of the unsplit batch, `weight` the sum of the units that divided it, both 0-d fp64. `chunks`
    counts the batches, `metrics` have their public names.
    """

    loss: Tensor
    weight: Tensor
    chunks: int
    metrics: dict[str, Any]


class StepAccumulator:
    """Accumulates chunks, reduces over ranks, and leaves normalised gradients in the parameters::

        result = StepAccumulator(objective, model).step(chunks)
        optimizer.step(); optimizer.zero_grad()

    Args:
        objective: what a chunk's loss is, and how it composes.
        model: a module; its parameters' gradients are empty when a step starts.
        group: the data-parallel group; None is the default group where torch.distributed is initialised. Ranks that
            share their data (tensor parallel) do not belong in it.
        gradients: what a backward pass leaves on a rank. "local": its own gradients, which `finish` sums over the group
            (a bare module, or DDP, whose own reduction is switched off): ranks may have any number of chunks, none too.
            "averaged": the mean over the group (DDP or FSDP as they are), which `finish` turns back into the sum.
            "summed": the sum. With the last two every backward pass is a collective call, so `step` pads ranks to the
            same number of passes.
        bucket_mib: size of one reduced buffer.
    """

    def __init__(
        self,
        objective: Objective,
        model: torch.nn.Module,
        *,
        group: Any = None,
        gradients: str = "local",
        bucket_mib: int = 64,
    ) -> None:
        if gradients not in _GRADIENTS:
            raise ValueError(f"gradients: expected one of {', '.join(_GRADIENTS)}; got {gradients!r}")
        self.objective = objective
        self.model = model
        self.gradients = gradients
        self.group = group
        self.bucket_bytes = bucket_mib * 2**20
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if not self.parameters:
            raise ValueError("model: expected a parameter that requires grad; got none; nothing would be trained")
        self.distributed = group is not None or (dist.is_available() and dist.is_initialized())
        self.world = dist.get_world_size(group) if self.distributed else 1
        self._numerator: Tensor
        self._weights: Tensor
        self._reported: list[Reported]
        self._reset()

    def step(self, chunks: Iterable[Any], *, filler: Any = None) -> StepResult:
        """All of a step's chunks on this rank, then `finish`.

        Args:
            chunks: batches of the objective; any number, also none.
            filler: a batch that a rank without a chunk runs with weight 0, so that it takes part in the collective
                calls of its wrapper. Read with `gradients="averaged"` or "summed" only.

        Raises:
            ValueError: a rank has neither chunk nor filler where it needs one; raised on every rank.
        """
        if self.gradients == "local":
            for batch in chunks:
                self.accumulate(batch)
            return self.finish()
        batches = list(chunks)
        rounds = self._agree_on_rounds(batches, filler)
        for batch in batches:
            self.accumulate(batch)
        for _ in range(rounds - len(batches)):
            self._begin()
            loss, _ = self.objective(self.model, batches[-1] if batches else filler)
            (loss * 0.0).backward()
        return self.finish()

    def accumulate(self, batch: Any) -> None:
        """One chunk: forward, and the gradient of its numerator on top of the step's."""
        self._begin()
        with self._unsynchronised():
            loss, metrics = self.objective(self.model, batch)
            weight = self._weight(loss, metrics)
            numerator = metrics[OBJECTIVE_NUMERATOR] if OBJECTIVE_NUMERATOR in metrics else loss * weight
            numerator.backward()
        self._numerator = self._numerator + numerator.detach().double()
        self._weights = self._weights + weight.double()
        self._reported.append(Reported(ObjectiveMetrics.of(metrics).detached(), weight))

    def finish(self) -> StepResult:
        """The optimizer boundary: every rank of the group calls it once a step, with or without chunks of its own."""
        self._begin()
        device = self.parameters[0].device
        sums = torch.stack([self._numerator.to(device), self._weights.to(device)])
        sums = torch.cat([sums, sums.new_tensor([float(len(self._reported))])])
        reported = self._reported
        if self.distributed:
            dist.all_reduce(sums, group=self.group)
            reported = self._gather(reported)
            if self.gradients == "local":
                self._sum_gradients()
        numerator, weight = sums[0], sums[1]
        if self.objective.reduction is Reduction.SUM:
            weight = torch.ones_like(weight)
        inverse = torch.where(weight != 0, 1.0 / weight, 0.0)
        # a wrapper's mean over the group becomes the sum again
        scale = inverse * self.world if self.gradients == "averaged" else inverse
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(scale.to(parameter.grad.device))
        adapter = self.objective.metric_adapter
        merged = merge_metrics(reported, adapter)
        if adapter is not None and adapter.loss is not None and adapter.loss in merged:
            merged = merged.updated({adapter.loss: numerator * inverse})
        if self.objective.old_logp_cache is not None:
            self.objective.old_logp_cache.seal()
        chunks = int(sums[2]) if self.distributed else len(reported)
        self._reset()
        return StepResult(numerator * inverse, weight, chunks, self.objective.public_metrics(merged))

    def _reset(self) -> None:
        self._begun = False
        self._numerator = torch.zeros((), dtype=torch.float64)
        self._weights = torch.zeros((), dtype=torch.float64)
        self._reported = []

    def _begin(self) -> None:
        if not self._begun and any(p.grad is not None for p in self.parameters):
            raise ValueError(
                "model: expected no gradients at the start of a step, because the boundary divides all there are; got "
                "some; call optimizer.zero_grad(set_to_none=True) first"
            )
        self._begun = True

    def _weight(self, loss: Tensor, metrics: Any) -> Tensor:
        """The units of a chunk: those that divided its loss, or 1."""
        if self.objective.reduction is not Reduction.TOKEN_SUM:
            return loss.new_ones(())
        weight = torch.as_tensor(metrics[OBJECTIVE_WEIGHT_SUM], device=loss.device).detach()
        if weight.numel() != 1:
            raise ValueError(f"OBJECTIVE_WEIGHT_SUM: expected one number a chunk; got shape {tuple(weight.shape)}")
        return weight.reshape(())

    def _unsynchronised(self) -> contextlib.AbstractContextManager[Any]:
        no_sync: Any = getattr(self.model, "no_sync", None)
        return no_sync() if self.gradients == "local" and no_sync else contextlib.nullcontext()

    def _agree_on_rounds(self, batches: list[Any], filler: Any) -> int:
        """The most backward passes of any rank; refuses on all ranks when one could not take part."""
        stuck = not batches and filler is None
        most = torch.tensor([len(batches), int(stuck)], device=self.parameters[0].device)
        if self.distributed:
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        rounds, stuck_somewhere = most.tolist()
        if rounds and stuck_somewhere:
            raise ValueError(
                f"filler: gradients={self.gradients!r} makes every backward pass a collective call, and a rank has no "
                f"chunk; got None there{'' if stuck else ' (on another rank)'}; pass any batch, it runs with weight 0"
            )
        return int(rounds)

    def _gather(self, reported: list[Reported]) -> list[Reported]:
        """What all ranks reported; one collective call, whatever each has."""
        mine = [Reported(r.metrics.on_cpu(), r.weight.cpu()) for r in reported]
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, mine, group=self.group)
        return [r for rank in everyone for r in rank]

    def _sum_gradients(self) -> None:
        """Gradients summed over the group; a parameter without one on any rank stays without."""
        has = torch.tensor([p.grad is not None for p in self.parameters], device=self.parameters[0].device).int()
        dist.all_reduce(has, op=dist.ReduceOp.MAX, group=self.group)
        grads = []
        for parameter, anywhere in zip(self.parameters, has.tolist(), strict=True):
            if anywhere:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                grads.append(parameter.grad)
        for bucket in self._buckets(grads):
            joined = torch.cat([g.reshape(-1) for g in bucket])
            dist.all_reduce(joined, group=self.group)
            for grad, part in zip(bucket, joined.split([g.numel() for g in bucket]), strict=True):
                grad.copy_(part.view_as(grad))

    def _buckets(self, grads: list[Tensor]) -> Iterator[list[Tensor]]:
        """Runs of gradients of one dtype and device, of about the bucket's size: the same on every rank."""
        bucket: list[Tensor] = []
        size = 0
        for grad in grads:
            alike = bucket and (grad.dtype, grad.device) == (bucket[0].dtype, bucket[0].device)
            if bucket and (not alike or size + grad.nbytes > self.bucket_bytes):
                yield bucket
                bucket, size = [], 0
            bucket.append(grad)
            size += grad.nbytes
        if bucket:
            yield bucket
