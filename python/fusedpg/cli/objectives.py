"""`--objective`: a recipe of `fusedpg.recipes`, or a loss out of the user's own module."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import fusedpg
from fusedpg import Objective, OPDConfig, RunConfig
from fusedpg.recipes import RECIPES
from fusedpg.registry import find_loss

from .custom_objective import build_custom_objective

Builder = Callable[[Any, Any], Objective]

#: name -> the demo's own options on top of the recipe
OPTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "grpo": ("rl.kl_beta=0.01",),
        "dr_grpo": (),
        "gspo": (),
        "dapo": (),
        "opd": (),
    }
)


class UnknownObjective(Exception):
    """`--objective` names nothing that can be run; the message says why."""


@dataclass(frozen=True)
class Choice:
    """What a run trains with: a resolved config and the builder that it selects."""

    name: str
    config: RunConfig
    builder: Builder

    @property
    def distils(self) -> bool:
        """Whether the batch must carry a teacher's log-probs."""
        return isinstance(self.config.rl, OPDConfig)

    def objective(self, backend: str = "auto") -> Objective:
        """A new objective, with a cache of its own."""
        context = SimpleNamespace(
            name_or_path="random-qwen3",
            max_response_length=self.config.rollout.max_tokens,
            backend=backend,
        )
        return self.builder(self.config.rl, context)


def choose(name: str, options: tuple[str, ...] = ()) -> Choice:
    """The config and the builder of `--objective NAME`, checked by preflight.

    Args:
        name: one of `OPTIONS`, or `module:loss`.
        options: `section.key=value`, set last.

    Raises:
        UnknownObjective: no such name, a module that cannot be imported, or one without such a loss.
    """
    builder: Builder
    if ":" in name:
        loss = _own_loss(*name.split(":", 1))
        config = RECIPES["grpo"]()
        config.algorithm = config.job.name = loss
        builder = partial(build_custom_objective, loss=loss)
    elif name in OPTIONS:
        config = fusedpg.with_options(RECIPES[name](), OPTIONS[name])
        builder = fusedpg.build_opd_objective if isinstance(config.rl, OPDConfig) else fusedpg.build_grpo_objective
    else:
        raise UnknownObjective(f"expected one of {', '.join(OPTIONS)}, or my_module:loss; got {name!r}")
    fusedpg.with_options(config, options)
    fusedpg.preflight(config)
    return Choice(name, config, builder)


def _own_loss(module_name: str, attribute: str) -> str:
    """Import the module; the name under which `resolve_loss` finds its loss.

    The loss is a function of the module, registered by `@fusedpg.register_loss` or not, or a name that it registers.
    """
    if os.getcwd() not in sys.path:  # where `python -m` looks; a console script does not
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as cause:  # whatever the module's own code raises
        raise UnknownObjective(f"could not import {module_name!r}: {type(cause).__name__}: {cause}") from cause
    body = getattr(module, attribute, None)
    registered = {name: find_loss(name).body for name in fusedpg.registered_losses()}
    if body is None and attribute in registered:
        return attribute
    if not callable(body):
        own = [name for name, loss in registered.items() if loss.__module__ == module_name]
        raise UnknownObjective(
            f"expected {module_name!r} to hold a function {attribute!r} of a LossContext, or to register a loss under "
            f"that name; it registers {', '.join(own) or 'none'}"
        )
    for name, loss in registered.items():
        if loss is body:
            return name
    fusedpg.register_loss(f"{module_name}:{attribute}")(body)
    return f"{module_name}:{attribute}"
