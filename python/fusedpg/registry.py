"""The registry of custom losses: `register_loss`, plugin modules, entry points.

Source: rLLM's guide to custom loss functions.
"""

from __future__ import annotations

import difflib
import importlib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import Any, TypeVar

from .context import check_mode
from .native_losses import NATIVE_NAMES

Body = TypeVar("Body", bound=Callable[..., Any])

#: groups of entry points whose modules register losses
ENTRY_POINT_GROUPS = ("rllm.losses", "fusedpg.losses")


@dataclass(frozen=True)
class RegisteredLoss:
    """A body under its name, with the aggregation mode it is pinned to (or None)."""

    name: str
    body: Callable[..., Any]
    agg_mode: str | None


_LOSSES: dict[str, RegisteredLoss] = {}


def register_loss(name: str, agg_mode: str | None = None) -> Callable[[Body], Body]:
    """Register a loss under `name`; the decorated function stays as it is::

        @fusedpg.register_loss("my_loss")
        def my_loss(ctx: fusedpg.LossContext):
            ratio = (ctx.logp_curr - ctx.logp_old).exp()
            return ctx.aggregate(-ctx.advantages * ratio, ctx.action_mask), {}

    Args:
        name: what `resolve_loss` finds it by.
        agg_mode: "seq-mean-token-mean", "token-mean" or "seq-mean-token-sum", for a loss whose mathematics needs that
            reduction: it then ignores the configured one.

    Raises:
        ValueError: a name with a native loss (which would win over this one), a name that another function has, or an
            unknown mode. A function that its module defines again (a reload) replaces the first.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(
            f"register_loss: expected a name; got {name!r}; write @register_loss('my_loss') above the function"
        )
    if agg_mode is not None:
        check_mode("agg_mode", agg_mode)

    def decorate(body: Body) -> Body:
        if not callable(body):
            raise TypeError(f"register_loss({name!r}): expected a function of a LossContext; got {body!r}")
        if name in NATIVE_NAMES:
            raise ValueError(
                f"register_loss: {name!r} is a built-in loss, whose kernel would run instead; choose another name"
            )
        known = _LOSSES.get(name)
        if known is not None and not _same(known.body, body):
            raise ValueError(
                f"register_loss: {name!r} is already the name of {_place(known.body)}; got {_place(body)}; choose "
                "another name"
            )
        _LOSSES[name] = RegisteredLoss(name, body, agg_mode)
        return body

    return decorate


def registered_losses() -> tuple[str, ...]:
    """Names registered so far, built-in losses apart."""
    return tuple(_LOSSES)


def find_loss(name: str) -> RegisteredLoss:
    """The registered loss of a name; the entry points are read when it is not known yet.

    Raises:
        ValueError: nobody registers the name; lists the known ones, the closest, and entry points that failed.
    """
    if name in _LOSSES:
        return _LOSSES[name]
    failures = _load_entry_points()
    if name in _LOSSES:
        for failure in failures:
            warnings.warn(failure, RuntimeWarning, stacklevel=3)
        return _LOSSES[name]
    known = (*NATIVE_NAMES, *_LOSSES)
    close = difflib.get_close_matches(str(name), known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(
        f"name: expected one of {', '.join(known)}; got {name!r}{hint} A custom loss must be imported first: list its "
        f"module in loss_plugins, or expose it as an entry point of {' or '.join(ENTRY_POINT_GROUPS)}"
        + "".join(f"; {failure}" for failure in failures)
    )


def load_loss_plugins(modules: Iterable[str] | str | None) -> None:
    """Import each module (`algorithm.loss_plugins`), so that its `register_loss` decorators run; again is no harm.

    Args:
        modules: dotted names, or one; None is none.

    Raises:
        ImportError: a module that cannot be imported, by name, with the cause.
    """
    for module in (modules,) if isinstance(modules, str) else modules or ():
        try:
            importlib.import_module(module)
        except Exception as cause:
            raise ImportError(
                f"loss_plugins: could not import {module!r}: {type(cause).__name__}: {cause}; check that the module is "
                "on the path of every worker"
            ) from cause


def load_loss_entry_points() -> None:
    """Load every entry point of `rllm.losses` and `fusedpg.losses`; `resolve_loss` does it for an unknown name.

    Raises:
        ImportError: those that cannot be loaded, by name, with their causes; the others are loaded.
    """
    failures = _load_entry_points()
    if failures:
        raise ImportError("; ".join(failures))


def _load_entry_points() -> list[str]:
    """Load all; what went wrong."""
    failures = []
    for group in ENTRY_POINT_GROUPS:
        for point in metadata.entry_points(group=group):
            try:
                point.load()
            except Exception as cause:
                failures.append(
                    f"entry point {point.name!r} of {group} ({point.value}): could not load it: "
                    f"{type(cause).__name__}: {cause}; fix or uninstall the package that declares it"
                )
    return failures


def _same(known: Callable[..., Any], body: Callable[..., Any]) -> bool:
    """One function, or the next definition of it by the same module."""
    if known is body:
        return True
    where = [(getattr(f, "__module__", None), getattr(f, "__qualname__", "<locals>")) for f in (known, body)]
    return where[0] == where[1] and "<locals>" not in where[0][1]


def _place(body: Callable[..., Any]) -> str:
    return f"{getattr(body, '__module__', '?')}.{getattr(body, '__qualname__', repr(body))}"
