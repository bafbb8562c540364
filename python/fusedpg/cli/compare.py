"""The same objective and batch through the native backend and the reference: agreement, time and memory of each."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedpg import HiddenStates, Objective, PolicyBatch
from fusedpg.hidden_states import scored_logprobs

from .memory import peak_extra_bytes
from .objectives import Choice
from .train import Trainer

LOSS_LIMIT, GRAD_LIMIT = 1e-5, 1e-4
WIDTH = 64


@dataclass(frozen=True)
class Comparison:
    """Largest differences, the gradient's relative to its largest entry, and what each backend took."""

    what: str
    backend: str
    loss_difference: float
    grad_difference: float
    native_seconds: float
    reference_seconds: float
    native_bytes: int | None
    reference_bytes: int | None

    @property
    def memory_saved(self) -> float | None:
        """How many times the native backend's peak the reference's is."""
        if not self.native_bytes or self.reference_bytes is None:
            return None
        return self.reference_bytes / self.native_bytes

    @property
    def agree(self) -> bool:
        """Whether the differences are rounding of fp32 arithmetic."""
        return self.loss_difference <= LOSS_LIMIT and self.grad_difference <= GRAD_LIMIT


def compare_own_batch(trainer: Trainer) -> Comparison:
    """The demo's last rollout under the policy that its updates made: ratios have moved, some are clipped."""
    assert trainer.last is not None
    chunks = trainer.last.chunks
    columns = ("input_ids", "targets", "mask", "sequence_advantages", "logp_ref", "logp_rollout", "teacher_logp")
    found = {name: [getattr(chunk, name) for chunk in chunks] for name in columns}
    batch = PolicyBatch(
        **{name: torch.cat(parts) for name, parts in found.items() if parts[0] is not None},
        logp_old=torch.cat([trainer.objective.old_logp_cache.lookup(chunk) for chunk in chunks]),
    )
    with torch.no_grad():
        states = trainer.policy(batch)
    return _compare(f"the demo's own batch, {_sizes(states)}", trainer.choice, trainer.backend, states, batch)


def compare_large(choice: Choice, backend: str, device: torch.device, shape: tuple[int, int, int]) -> Comparison:
    """Random hidden states (B, T) and a head with the vocabulary of a real model: where the memory and time are."""
    rng = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(*shape[:2], WIDTH, generator=rng, device=device)
    states = HiddenStates(hidden, torch.randn(shape[2], WIDTH, generator=rng, device=device) * 3 / WIDTH**0.5)
    targets = torch.randint(0, shape[2], shape[:2], generator=rng, device=device)
    with torch.no_grad():
        logp = scored_logprobs(states, targets).logp
    noise = torch.randn(4, *shape[:2], generator=rng, device=device) * 0.1
    batch = PolicyBatch(
        targets=targets,
        mask=torch.ones_like(targets, dtype=torch.bool),
        sequence_advantages=torch.randn(shape[0], generator=rng, device=device),
        logp_old=logp + noise[0],
        logp_ref=logp + noise[1],
        logp_rollout=logp + noise[2],
        teacher_logp=logp + noise[3],
    )
    return _compare(f"random, {_sizes(states)}, fp32", choice, backend, states, batch)


def _sizes(states: HiddenStates) -> str:
    hidden, head = (" x ".join(map(str, t.shape)) for t in (states.hidden, states.weight))
    return f"hidden states {hidden}, head {head}"


def _compare(what: str, choice: Choice, backend: str, states: HiddenStates, batch: PolicyBatch) -> Comparison:
    """An objective calls its model for hidden states, so a function that has them is model enough."""
    native, reference = choice.objective(backend), choice.objective("reference")

    def run(objective: Objective) -> tuple[Tensor, tuple[Tensor, ...]]:
        leaves = [t.detach().requires_grad_() for t in (states.hidden, states.weight)]
        loss, _ = objective(lambda _: HiddenStates(leaves[0], leaves[1]), batch)
        return loss.detach(), torch.autograd.grad(loss, leaves)

    loss, grads = run(native)
    expected_loss, expected = run(reference)
    loss_difference = (loss - expected_loss).abs().item()
    grad_difference = max(
        ((g - e).abs().amax() / e.abs().amax().clamp(min=1e-30)).item() for g, e in zip(grads, expected, strict=True)
    )
    del grads, expected
    device = states.hidden.device
    return Comparison(
        what=what,
        backend=backend,
        loss_difference=loss_difference,
        grad_difference=grad_difference,
        native_seconds=_best_seconds(lambda: run(native), device),
        reference_seconds=_best_seconds(lambda: run(reference), device),
        native_bytes=peak_extra_bytes(lambda: run(native), device),
        reference_bytes=peak_extra_bytes(lambda: run(reference), device),
    )


def _best_seconds(call: Callable[[], Any], device: torch.device, repeats: int = 5) -> float:
    best = float("inf")
    for _ in range(repeats):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
