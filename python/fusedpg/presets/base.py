"""What every trainer's preset is: a `LossSpec` that also knows its trainer's names and its trainer's normaliser."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..losses import loss_spec
from ..metrics import METRIC_NAMES
from ..spec import LossSpec


@dataclass(frozen=True)
class TrainerSpec(LossSpec):
    """A `LossSpec` under a trainer's name; every op takes it as it is.

    `metric_names` pairs the trainer's own metric name with one of ours, only where both are the same number. `rule` is
    the trainer's denominator: `normalizer(**counts)` calls it, and what it returns goes to an op's `normalizer=`.
    """

    #: key of `presets.TRAINERS`
    trainer: str = ""
    #: of the trainer, whose code the parity table compares with
    version: str = ""
    #: the trainer's own name of the loss
    trainer_loss: str = ""
    metric_names: tuple[tuple[str, str], ...] = ()
    rule: Callable[..., float | None] | None = None
    #: what a reader must know where the trainer's number is not the paper's
    note: str = ""

    def normalizer(self, **counts: Any) -> float | None:
        """The denominator of the trainer's loss from its own counts; None: the weight of the call itself."""
        return None if self.rule is None else self.rule(self, **counts)

    def named_metrics(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """The metrics of a call under the trainer's names."""
        return {theirs: metrics[ours] for theirs, ours in self.metric_names if ours in metrics}


def trainer_spec(
    entry: str,
    knobs: Mapping[str, Any],
    *,
    trainer: str,
    version: str,
    trainer_loss: str,
    metric_names: Mapping[str, str] | None = None,
    rule: Callable[..., float | None] | None = None,
    note: str = "",
) -> TrainerSpec:
    """`loss_spec(entry, **knobs)` as a trainer's own."""
    spec = loss_spec(entry, **knobs)
    names = tuple((metric_names or {}).items())
    unknown = [ours for _, ours in names if ours not in METRIC_NAMES]
    if unknown:
        raise ValueError(f"metric_names: expected names of fusedpg.metrics; got {unknown}")
    values = {f.name: getattr(spec, f.name) for f in fields(LossSpec)}
    return TrainerSpec(
        **values, trainer=trainer, version=version, trainer_loss=trainer_loss, metric_names=names, rule=rule, note=note
    )


class Options:
    """A trainer's options for one loss: its defaults, what was given, and what is refused by name."""

    def __init__(
        self,
        where: str,
        given: Mapping[str, Any],
        defaults: Mapping[str, Any],
        refused: Mapping[str, str] | None = None,
    ) -> None:
        for key in given:
            if key in (refused or {}):
                raise ValueError(f"{key}: {where} does not support it; got {given[key]!r}; {(refused or {})[key]}")
            if key not in defaults:
                raise ValueError(
                    f"{key}: {where} never reads it; got {given[key]!r}; it reads {', '.join(sorted(defaults))}"
                )
        self.where = where
        self._values = {**defaults, **given}

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def choice(self, key: str, values: tuple[Any, ...]) -> Any:
        """An option that must be one of `values`."""
        value = self._values[key]
        if value not in values:
            raise ValueError(f"{key}: {self.where} expects one of {', '.join(map(repr, values))}; got {value!r}")
        return value


def known_loss(trainer: str, loss: str, losses: tuple[str, ...]) -> None:
    """Refuse a loss that the trainer does not have."""
    if loss not in losses:
        raise ValueError(f"loss: presets.{trainer} knows {', '.join(losses)}; got {loss!r}")
