"""`Objective`: a loss as trainers that own the model see it, and the prepared batch that it reads.

    loss, metrics = objective(model, batch)

The objective says how its loss composes over chunks and ranks (`Reduction`); `fusedpg.StepAccumulator` does it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor

from .hidden_states import HiddenStates, Scores
from .metric_adapter import OBJECTIVE_WEIGHT_SUM, MetricAdapter

ObjectiveFn = Callable[[Any, Any], tuple[Tensor, Mapping[str, Any]]]


class Reduction(str, Enum):
    """How a chunk's loss enters the step.

    MEAN: the loss is a sample mean; the step averages its chunks. TOKEN_SUM: the loss is a numerator over a weight that
    the metrics report as OBJECTIVE_WEIGHT_SUM (tokens, sequences, pairs: the loss's own unit); the step adds numerators
    and weights and divides once. SUM: the loss is a sum of its own and the step adds its chunks (Tinker's losses).
    """

    MEAN = "mean"
    TOKEN_SUM = "token_sum"
    SUM = "sum"


class OldLogps(Protocol):
    """State that keeps the behaviour policy frozen over the updates of one collected batch."""

    def seal(self) -> None:
        """The policy is about to move: from now on nothing new may be taken for the behaviour policy's."""
        ...


@dataclass(frozen=True)
class Objective:
    """A loss for trainers that own the model. It launches, moves, saves and places nothing.

    Args:
        fn: `fn(model, batch) -> (loss, metrics)`; `loss` 0-d and connected to the model, `metrics` algorithm-local
            names -> 0-d values. A module-level function or a `functools.partial` of one, so that it pickles.
        reduction: how losses of chunks and ranks compose.
        old_logp_cache: behaviour log-probs that stay frozen over several updates; `fn` holds the same object.
        metric_adapter: internal metric names -> `train/*`, `val/*`.
        identity: values that take part in the objective's provenance.
        reference_scorer: scorer of a frozen reference's per-token log-probs; the network behind it is the entry's.
    """

    fn: ObjectiveFn
    reduction: Reduction = Reduction.MEAN
    old_logp_cache: Any = None
    metric_adapter: MetricAdapter | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    reference_scorer: Any = None

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(f"fn: expected a function (model, batch) -> (loss, metrics); got {type(self.fn).__name__}")
        if not isinstance(self.reduction, Reduction):
            valid = ", ".join(f"Reduction.{r.name}" for r in Reduction)
            raise TypeError(f"reduction: expected one of {valid}; got {self.reduction!r}")
        if self.metric_adapter is not None and not isinstance(self.metric_adapter, MetricAdapter):
            raise TypeError(
                f"metric_adapter: expected a MetricAdapter or None; got {type(self.metric_adapter).__name__}"
            )
        object.__setattr__(self, "identity", dict(self.identity))

    def __call__(self, model: Any, batch: Any) -> tuple[Tensor, Mapping[str, Any]]:
        """`fn(model, batch)`, with what the contract asks of its results checked.

        Raises:
            TypeError, ValueError: a result that is not (0-d connected loss, metrics with the reduction's weight).
        """
        result = self.fn(model, batch)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"fn: expected it to return (loss, metrics); got {type(result).__name__}")
        loss, metrics = result
        if not isinstance(loss, Tensor) or loss.ndim != 0:
            got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(f"fn: expected a loss of shape () (one number a chunk); got {got}; reduce it")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise ValueError(
                "fn: expected a loss connected to the model; got one without a graph; a chunk with nothing to train on "
                "still returns a connected 0"
            )
        if not isinstance(metrics, Mapping):
            raise TypeError(f"fn: expected a mapping of metrics; got {type(metrics).__name__}")
        if self.reduction is Reduction.TOKEN_SUM and OBJECTIVE_WEIGHT_SUM not in metrics:
            raise ValueError(
                f"metrics: Reduction.TOKEN_SUM expects {OBJECTIVE_WEIGHT_SUM!r} (OBJECTIVE_WEIGHT_SUM), the weight "
                f"that divided the loss; got {', '.join(metrics) or 'no metrics'}; report it, or use Reduction.MEAN"
            )
        return loss, metrics

    def public_metrics(self, metrics: Mapping[str, Any], split: str = "train") -> dict[str, Any]:
        """The metrics under their public names; as they are without an adapter."""
        return dict(metrics) if self.metric_adapter is None else self.metric_adapter.adapt(metrics, split)


@dataclass(frozen=True)
class PolicyBatch:
    """What the policy objectives read of a prepared batch; per-token tensors have the shape of `targets`.

    A trainer may pass this, a mapping with these keys, or any object with these attributes; `model(batch)` receives it
    as it came. More keys are the model's own.
    """

    #: (N,) packed or (B, T) padded token ids; the model's logits[i] or hidden[i] score targets[i]
    targets: Tensor
    #: bool, or weights in [0, 1]: the tokens that are trained on
    mask: Tensor
    #: what the model reads; the objectives do not
    input_ids: Tensor | None = None
    #: one advantage a sequence (S,), from an annotator that saw whole groups
    sequence_advantages: Tensor | None = None
    #: one advantage a token, instead
    advantages: Tensor | None = None
    #: log-probs of the behaviour policy; without them they are frozen by the objective's cache
    logp_old: Tensor | None = None
    #: log-probs of the frozen reference; without them the objective's scorer computes them
    logp_ref: Tensor | None = None
    #: log-probs of the sampling engine
    logp_rollout: Tensor | None = None
    #: the tokens of the observation term, bool or weights in [0, 1]
    obs_mask: Tensor | None = None
    #: a constant factor on the policy term
    is_weights: Tensor | None = None
    #: (S+1,) boundaries of packed sequences
    cu_seqlens: Tensor | None = None
    #: log-probs of the teacher for the same tokens (distillation_mode="advantage")
    teacher_logp: Tensor | None = None
    #: what `fusedpg.distill` takes for a teacher (distillation_mode="direct")
    teacher: Any = None
    #: names the chunk over the updates of one collected batch, so that its behaviour log-probs are found again
    batch_id: Hashable | None = None

    @classmethod
    def of(cls, batch: Any) -> PolicyBatch:
        """The fields of a mapping or an object.

        Raises:
            ValueError: `targets` or `mask` is missing.
        """
        if isinstance(batch, PolicyBatch):
            return batch
        values: dict[str, Any] = {
            f.name: batch.get(f.name) if isinstance(batch, Mapping) else getattr(batch, f.name, None)
            for f in fields(cls)
        }
        for name in ("targets", "mask"):
            require(name, values[name], "every objective")
        return cls(**values)


def require(name: str, value: Any, who: str) -> Any:
    """A field of the batch that must have been prepared before dispatch."""
    if value is None:
        raise ValueError(
            f"batch: {who} reads {name!r}; got none; annotate the batch before dispatch (an objective never derives it "
            "from its own chunk)"
        )
    return value


def sequence_sums(values: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Sums over each sequence of padded (B, T) or packed (N,) values, (S,); differentiable.

    Sequence by sequence: unlike differences of one running sum these keep a sequence's NaN to itself.
    """
    if cu_seqlens is None:
        return values.sum(1)
    return torch.segment_reduce(values, "sum", offsets=cu_seqlens.long(), unsafe=True, initial=0)


def model_scores(model: Any, batch: Any) -> Scores:
    """`model(batch)`: hidden states with their head, the logits, or an output that holds those as `.logits`."""
    out = model(batch)
    scores = out if isinstance(out, (Tensor, HiddenStates)) else getattr(out, "logits", None)
    if not isinstance(scores, (Tensor, HiddenStates)):
        raise TypeError(
            "model: expected model(batch) to return HiddenStates, logits, or an output with .logits; got "
            f"{type(out).__name__}"
        )
    return scores
