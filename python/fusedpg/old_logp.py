"""Log-probs of policies that do not move: the behaviour policy of a collected batch, and a frozen reference."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from .hidden_states import scored_logprobs
from .objective import PolicyBatch, model_scores


@torch.no_grad()
def score(model: Any, batch: Any, temperature: float, backend: str) -> Tensor:
    """Per-token log-probs of a batch under a model, fp32, targets' shape, without a graph; 0 at masked places."""
    data = PolicyBatch.of(batch)
    scores = model_scores(model, batch)
    return scored_logprobs(scores, data.targets, mask=data.mask, temperature=temperature, backend=backend).logp


class OldLogpCache:
    """π_old of one collected batch, frozen over all of its updates.

    The life of a collected batch: `start()`; the trainer either calls `freeze(model, chunks)` with every chunk before
    the first update, or lets the first update's own forward record its chunks (enough when all chunks belong to that
    update); `seal()`, which `StepAccumulator` calls at the optimizer boundary; then chunks are only looked up, by their
    `batch_id`. A batch that brings `logp_old` needs none of this.

    Args:
        temperature: that of the loss.
        several_updates: whether one collected batch serves several updates; then every chunk must be identifiable.
        certified: the forward gives the same bits each time, so that a separate scoring pass is exact. Otherwise the
            first `freeze` scores one chunk twice and warns of a difference.
        backend: of `token_logprobs`.
    """

    def __init__(
        self,
        temperature: float = 1.0,
        *,
        several_updates: bool = False,
        certified: bool = False,
        backend: str = "auto",
    ) -> None:
        self.temperature = temperature
        self.several_updates = several_updates
        self.certified = certified
        self.backend = backend
        self.sealed = False
        self._logps: dict[Hashable, Tensor] = {}

    def start(self) -> None:
        """A new collected batch: forget the last one's."""
        self._logps.clear()
        self.sealed = False

    def freeze(self, model: Any, batches: Iterable[Any]) -> None:
        """Start a collected batch and record every chunk under the policy as it is now; then seal."""
        self.start()
        for batch in batches:
            key = PolicyBatch.of(batch).batch_id
            if key is None:
                raise ValueError(
                    "batch: freezing reads 'batch_id'; got none; give each chunk a hashable name of its own"
                )
            logp = score(model, batch, self.temperature, self.backend)
            if not self.certified:
                self._attest(logp, score(model, batch, self.temperature, self.backend))
            self.record(key, logp)
        self.seal()

    def _attest(self, first: Tensor, second: Tensor) -> None:
        difference = (first - second).abs().max().item() if first.numel() else 0.0
        self.certified = True  # once is enough
        if difference != 0.0:
            warnings.warn(
                f"certified_deterministic_forward: two forward passes of one chunk differ by {difference:.3g} in a "
                "log-prob, so ratios on the sampling policy are not exactly 1; make the forward deterministic, or "
                "expect clips at an epsilon of that size",
                UserWarning,
                stacklevel=3,
            )

    def record(self, key: Hashable | None, logp: Tensor) -> None:
        """Keep a chunk's log-probs if the chunk has a name."""
        if key is None:
            return
        if key in self._logps:
            raise ValueError(
                f"batch_id: expected a name for each chunk; got {key!r} twice; call start() for a new batch"
            )
        self._logps[key] = logp.detach().clone()

    def keep(self, key: Hashable | None, logp: Tensor) -> None:
        """Record a chunk that has a name and no record yet: what the first update's forward does."""
        if key is not None and key not in self._logps:
            self.record(key, logp)

    def seal(self) -> None:
        """The policy moves from here on."""
        self.sealed = True

    def lookup(self, data: PolicyBatch) -> Tensor | None:
        """π_old of a chunk; None while the policy itself is still π_old and the chunk is not yet recorded.

        Without gradients (an evaluation) an unknown chunk is None too: it is scored on-policy.

        Raises:
            ValueError: the policy has moved and the chunk was never recorded; a chunk without a name where several
                updates need one; a name that belongs to a chunk of another shape.
        """
        if data.logp_old is not None:
            return data.logp_old
        key = data.batch_id
        evaluates = not torch.is_grad_enabled()
        if key is None and self.several_updates and not evaluates:
            raise ValueError(
                "batch: several updates of one collected batch read 'logp_old' or 'batch_id'; got neither; pass the "
                "behaviour log-probs, or name each chunk"
            )
        if key in self._logps:
            logp = self._logps[key]
            if logp.shape != data.targets.shape:
                raise ValueError(
                    f"batch_id: {key!r} was recorded with shape {tuple(logp.shape)}; got {tuple(data.targets.shape)}; "
                    "chunks keep their tokens over all updates of a collected batch"
                )
            return logp
        if self.sealed and not evaluates:
            raise ValueError(
                f"logp_old: the policy has moved since this batch was collected, and chunk {key!r} was not recorded "
                "before; call old_logp_cache.freeze(model, chunks) before the first update, old_logp_cache.start() for "
                "a new collected batch, or pass logp_old"
            )
        return None

    def __len__(self) -> int:
        return len(self._logps)

    def __getstate__(self) -> dict[str, Any]:
        """Recorded log-probs belong to one process and one collected batch: they stay behind."""
        return {**self.__dict__, "_logps": {}, "sealed": False}


class ReferenceScorer:
    """Scores a frozen reference: `scorer(batch)` is its per-token log-probs, without a graph.

    The entry builds the network, hands it to the trainer for device residency and calls `bind`; pickling leaves it
    behind, so nothing ever reads a module off an objective.
    """

    def __init__(self, temperature: float = 1.0, backend: str = "auto") -> None:
        self.temperature = temperature
        self.backend = backend
        self._network: Any = None

    def bind(self, network: Any) -> ReferenceScorer:
        """Use this network; returns the scorer."""
        self._network = network
        return self

    def __call__(self, batch: Any) -> Tensor:
        """Log-probs of the batch's targets, fp32, targets' shape."""
        if self._network is None:
            raise RuntimeError(
                "reference_scorer: expected a network; got none; call objective.reference_scorer.bind(network) where "
                "the trainer is built, or pass logp_ref in the batch"
            )
        return score(self._network, batch, self.temperature, self.backend)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_network": None}
