"""What an objective reports: exactly mergeable metrics, and the adapter from internal to public names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .metrics import Metrics

#: the control metric of `Reduction.TOKEN_SUM`: the weight by which the loss was divided
OBJECTIVE_WEIGHT_SUM = "objective_weight_sum"
#: a control metric for losses whose numerator may be nonzero where their weight is 0 (an observation term on a chunk
#: without policy tokens): the numerator itself, connected to the model, because the loss cannot give it back
OBJECTIVE_NUMERATOR = "objective_numerator"
_CONTROL = (OBJECTIVE_WEIGHT_SUM, OBJECTIVE_NUMERATOR)
#: where public metrics live
SPLITS = ("train", "val")


class ObjectiveMetrics(Mapping[str, Any]):
    """Internal name -> 0-d value: plain numbers, and metric vectors under a prefix, read lazily and merged exactly.

    `vectors={"grpo/": out.metrics}` makes `metrics["grpo/clip_frac"]` readable without computing it before.
    """

    def __init__(self, scalars: Mapping[str, Any], vectors: Mapping[str, Metrics] | None = None) -> None:
        self.scalars = dict(scalars)
        self.vectors = dict(vectors or {})

    @classmethod
    def of(cls, metrics: Mapping[str, Any]) -> ObjectiveMetrics:
        """Any mapping an objective returned."""
        return metrics if isinstance(metrics, ObjectiveMetrics) else cls(metrics)

    def updated(self, changes: Mapping[str, Any]) -> ObjectiveMetrics:
        """A copy with some values replaced: what a wrapper that changes the reported loss returns."""
        return ObjectiveMetrics({**self.scalars, **changes}, self.vectors)

    def detached(self) -> ObjectiveMetrics:
        """A copy that keeps no graph alive; OBJECTIVE_NUMERATOR has served its purpose."""
        kept = {k: v for k, v in self.scalars.items() if k != OBJECTIVE_NUMERATOR}
        scalars = {k: v.detach() if isinstance(v, Tensor) else v for k, v in kept.items()}
        return ObjectiveMetrics(scalars, {k: type(v)(v.totals.detach(), v.extrema.detach()) for k, v in self._items()})

    def on_cpu(self) -> ObjectiveMetrics:
        """A copy on the host, numbers in fp64: what ranks exchange."""
        scalars = {k: torch.as_tensor(v).double().cpu() for k, v in self.scalars.items()}
        return ObjectiveMetrics(scalars, {k: type(v)(v.totals.cpu(), v.extrema.cpu()) for k, v in self._items()})

    def _items(self) -> Any:
        return self.vectors.items()

    def __getitem__(self, name: str) -> Any:
        if name in self.scalars:
            return self.scalars[name]
        for prefix, vector in self.vectors.items():
            if name.startswith(prefix) and name[len(prefix) :] in vector:
                return vector[name[len(prefix) :]]
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        yield from self.scalars
        for prefix, vector in self.vectors.items():
            yield from (prefix + name for name in vector if prefix + name not in self.scalars)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"ObjectiveMetrics({', '.join(self)})"


@dataclass(frozen=True)
class MetricAdapter:
    """Algorithm-local metric names to stable public ones.

    Args:
        prefix: of every internal name, with its slash: "grpo/".
        names: internal name without the prefix -> public leaf: {"clip_frac": "clip_frac"} is `train/clip_frac` of a
            training step and `val/clip_frac` of a validation step.
        weighted_by: internal name (with the prefix) -> internal name of the count that its mean was taken over. Counts
            add over chunks and ranks; a mean without one here is weighted by the chunk's objective weight.
        extrema: internal name (with the prefix) -> "min" or "max".
        loss: internal name (with the prefix) of the metric that is the loss itself: a step reports its own there.
        ignored: names, or prefixes that end in a slash, that are deliberately not public.
    """

    prefix: str
    names: Mapping[str, str]
    weighted_by: Mapping[str, str] = field(default_factory=dict)
    extrema: Mapping[str, str] = field(default_factory=dict)
    loss: str | None = None
    ignored: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not self.prefix.endswith("/") or self.prefix.rstrip("/") in ("", *SPLITS):
            raise ValueError(
                f"prefix: expected an internal prefix that ends in '/' and is neither 'train/' nor 'val/'; got "
                f"{self.prefix!r}; use the algorithm's name, e.g. 'grpo/'"
            )
        taken: dict[str, str] = {}
        for name, leaf in self.names.items():
            if leaf in taken:
                raise ValueError(
                    f"names: expected one internal name for each public one; got {taken[leaf]!r} and {name!r} for "
                    f"{leaf!r}; rename one"
                )
            taken[leaf] = name
        bad = {name: how for name, how in self.extrema.items() if how not in ("min", "max")}
        if bad:
            raise ValueError(f"extrema: expected 'min' or 'max'; got {bad}")

    def adapt(self, metrics: Mapping[str, Any], split: str = "train") -> dict[str, Any]:
        """The metrics under their public names; control metrics and ignored ones are left out.

        Raises:
            ValueError: a name with the prefix that is not mapped, or one with a prefix that nobody declared.
        """
        if split not in SPLITS:
            raise ValueError(f"split: expected 'train' or 'val'; got {split!r}")
        public = {}
        for name in metrics:
            if name in _CONTROL or self._ignores(name):
                continue
            if name.startswith(tuple(f"{s}/" for s in SPLITS)):
                public[name] = metrics[name]
                continue
            leaf = self.names.get(name.removeprefix(self.prefix)) if name.startswith(self.prefix) else None
            if leaf is None:
                raise ValueError(
                    f"metrics: expected names of the map of prefix {self.prefix!r}; got {name!r}; map it in "
                    "MetricAdapter.names, or list it (or its prefix) in MetricAdapter.ignored"
                )
            public[f"{split}/{leaf}"] = metrics[name]
        return public

    def _ignores(self, name: str) -> bool:
        return any(name == i or (i.endswith("/") and name.startswith(i)) for i in self.ignored)


@dataclass(frozen=True)
class Reported:
    """What one chunk reported, and the weight with which its means enter a step."""

    metrics: ObjectiveMetrics
    weight: Tensor


def merge_metrics(parts: Sequence[Reported], adapter: MetricAdapter | None) -> ObjectiveMetrics:
    """Metrics of the union of chunks and ranks.

    Vectors add (`Metrics.merge`); a scalar is averaged with the count that `weighted_by` names, else with the chunk's
    objective weight; counts (every name that weighs another, and OBJECTIVE_WEIGHT_SUM) add. A mean of nothing is 0.
    """
    adapter = adapter or MetricAdapter("none/", {})
    names = {name: None for p in parts for name in p.metrics.scalars}
    prefixes = {prefix: None for p in parts for prefix in p.metrics.vectors}
    vectors = {x: [p.metrics.vectors[x] for p in parts if x in p.metrics.vectors] for x in prefixes}
    return ObjectiveMetrics(
        {name: _merged(name, [p for p in parts if name in p.metrics.scalars], adapter) for name in names},
        {prefix: found[0].merge(*found[1:]) for prefix, found in vectors.items()},
    )


def _merged(name: str, parts: list[Reported], adapter: MetricAdapter) -> Tensor:
    """One scalar over the chunks that reported it, fp64."""
    device = parts[0].weight.device

    def stacked(values: list[Any]) -> Tensor:
        return torch.stack([torch.as_tensor(v, device=device).double() for v in values])

    values = stacked([p.metrics.scalars[name] for p in parts])
    if name == OBJECTIVE_WEIGHT_SUM or name in adapter.weighted_by.values():
        return values.sum()
    count = adapter.weighted_by.get(name)
    w = stacked([p.metrics[count] if count else p.weight for p in parts])
    # a chunk without any unit has nothing to add, whatever it reports
    if name in adapter.extrema:
        sign = 1.0 if adapter.extrema[name] == "max" else -1.0
        largest = torch.where(w != 0, sign * values, -torch.inf).amax()
        return torch.where(largest == -torch.inf, 0.0, sign * largest)
    return torch.where(w.sum() != 0, torch.where(w != 0, values * w, 0.0).sum() / w.sum(), 0.0)
