"""rLLM's bodies over its context, and the managed closures of Tinker and Fireworks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...integrations import rllm
from ...presets._rllm import VERSION
from ..cases import PolicyBatch
from ..rows import Row
from ..transcribed_rllm import MODES, aggregate, cases, ppo_clip
from ..transcription import Case, Fields
from .batches import (
    KINDS,
    Lists,
    Outcome,
    differentiated,
    lists,
    part_of,
    parts_of,
    rows_grad,
    step_batch,
    summed,
    truth,
)
from .compare import TRANSCRIBED, Largest, rows_of_steps

#: those whose counts are the batch's own
CASES = [case for case in cases() if case.counts is None]


class Context:
    """The contract's fields and reducers, and nothing else."""

    def __init__(
        self,
        b: PolicyBatch,
        logp: Tensor,
        obs: Tensor,
        params: Mapping[str, Any],
        mode: str,
        tokens: float | None = None,
        sequences: float | None = None,
    ) -> None:
        self.logp_curr, self.logp_old, self.advantages = logp, b.logp_old, b.token_advantages
        self.action_mask, self.obs_mask = b.mask.float(), obs.float()
        self.logp_ref: Tensor | None = b.logp_ref
        self.logp_rollout: Tensor | None = b.logp_rollout
        self.params, self._mode, self._counts = params, mode, (tokens, sequences)

    def aggregate(self, per_token: Tensor, mask: Tensor, mode: str | None = None) -> Tensor:
        """Each row is a sequence; (N,) is one."""
        rows = lambda t: t if t.ndim == 2 else t[None]  # noqa: E731
        counts: Any = SimpleNamespace(mask=rows(self.action_mask).double())
        return aggregate(rows(per_token).double(), rows(mask).double(), counts, mode or self._mode, *self._counts)

    def seq_reduce(self, values: Tensor, mask: Tensor, reduction: str) -> Tensor:
        """Of the contract; the kernel needs no reducer of its own."""
        raise AssertionError("seq_reduce is not called")


def context(
    b: PolicyBatch, obs: Tensor, params: Mapping[str, Any], mode: str, *counts: float | None
) -> tuple[Tensor, Context]:
    """(leaf, context) of a micro-batch; `counts` are the step's tokens and sequences."""
    leaf = b.logp.clone().requires_grad_()
    return leaf, Context(b, leaf, obs, params, mode, *counts)


def observed(case: Case, b: PolicyBatch) -> Tensor:
    """The observation mask of a case."""
    return ~b.mask if case.observes == "apart" else (b.mask if case.observes == "same" else torch.zeros_like(b.mask))


def step(case: Case, b: PolicyBatch, backend: str = "auto") -> Outcome:
    """The sum of micro-batches under the counts of the step; a body takes the backend of its tensors."""
    params = {k: v for k, v in case.options.items() if k != "loss_agg_mode"}
    mode = case.options.get("loss_agg_mode", MODES[0])
    counts = (float(b.mask.sum()), float(b.mask.any(1).sum()))

    def one(part: PolicyBatch) -> Outcome:
        leaf, ctx = context(part, observed(case, part), params, mode, *counts)
        loss, _ = rllm.BODIES[rllm.PREFIX + case.loss](ctx)
        return differentiated(loss, leaf)

    return summed(map(one, parts_of(b)))


def want(case: Case, b: PolicyBatch) -> Outcome:
    """The unsplit step."""
    return truth(b, case.formula, observed(case, b))


# ------------------------------------------------------------------ managed backends


def datums(ls: Lists, extra: Mapping[str, Any] | None = None) -> list[SimpleNamespace]:
    """The data of `forward_backward_custom`."""
    keys = {"logprobs": ls.logp_rollout, "advantages": ls.advantages, "mask": ls.mask, **(extra or {})}
    return [
        SimpleNamespace(loss_fn_inputs={key: values[i] for key, values in keys.items()}) for i in range(len(ls.logp))
    ]


def managed_step(managed: str, mode: str, b: PolicyBatch, backend: str = "auto") -> Outcome:
    """A step of two calls of the PPO closure: Tinker's divides by the step's counts, Fireworks' is the raw sum."""
    counts: dict[str, Any] = {"step_tokens": float(b.mask.sum()), "step_sequences": float(b.mask.any(1).sum())}
    fn = rllm.managed_loss(
        "fusedpg_ppo_clip", managed, loss_agg_mode=mode, kernels=backend, **(counts if managed == "tinker" else {})
    )

    def one(part: PolicyBatch) -> Outcome:
        ls = lists(part)
        leaves = [t.clone().requires_grad_() for t in ls.logp]
        loss, _ = fn(datums(ls), leaves)
        loss.backward()
        return Outcome(loss.detach(), rows_grad(leaves, part.logp))

    return summed(one(part_of(b, rows)) for rows in (slice(0, 2), slice(2, None)))


def managed_want(managed: str, mode: str, b: PolicyBatch) -> Outcome:
    """The step in fp64; the sampler is the ratio's denominator."""
    counts = (None, None) if managed == "tinker" else (1.0, 1.0)

    def formula(f: Fields) -> Tensor:
        return aggregate(ppo_clip(f), f.mask, f, mode, *counts)

    return truth(replace(b, logp_old=b.logp_rollout), formula)


def rows(backend: str = "auto") -> Iterator[Row]:
    """One row a loss of the registry, one a managed backend."""
    yield from rows_of_steps("rllm", VERSION, CASES, step, want, backend)
    for managed in rllm.MANAGED:
        largest = Largest()
        for mode in MODES:
            for kind in KINDS:
                b = step_batch(kind, False)
                largest.note(managed_step(managed, mode, b, backend), managed_want(managed, mode, b))
        yield largest.row("rllm", VERSION, f"ppo_clip, managed by {managed}", "", TRANSCRIBED)
