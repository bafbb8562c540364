"""cosmos-framework: the builder that its online entries take, at module level, so that it reaches workers by pickle.

    grpo.run(config, config_path, opts, out_dir, build_objective_fn=fusedpg.integrations.cosmos.build_objective)

The objective owns the forward: a model that returns `fusedpg.HiddenStates` trains without allocating logits.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from importlib import import_module, util
from typing import Any

from torch import Tensor

from ..builders import build_grpo_objective, build_opd_objective
from ..config import GRPOConfig, OPDConfig
from ..metric_adapter import OBJECTIVE_WEIGHT_SUM
from ..objective import Objective, ObjectiveFn
from ._shared import options_from

_THEIRS = "cosmos_framework.posttrain.algorithm.primitives.objective"
#: terms of a loss that the contract does not have; a config that switches one on would train something else
_REFUSED = (
    "objective",
    "objective_mode",
    "aipo_rho",
    "behav_imp_weight_cap",
    "entropy_coeff",
    "off_policy_masking_delta",
    "positive_nll_coef",
    "unbiased_kl_estimate",
    "unbiased_loss_max_tokens",
    "use_decoupled_loss",
)


def build_objective(rl: Any, model_config: Any) -> Any:
    """The GRPO or OPD objective of a resolved config.

    Args:
        rl: the framework's `rl` section: `grpo_surrogate` or `distillation_mode`, and the keys of `fusedpg.GRPOConfig`
            or `fusedpg.OPDConfig`. Keys that are neither a loss's nor refused are the trainer's.
        model_config: the trainer's context: `name_or_path`, and `max_response_length` where the reduction reads it.

    Returns:
        The framework's own `Objective` where it is installed, else `fusedpg.Objective`, which has the same fields.

    Raises:
        TypeError, ValueError: a key that the selected objective cannot honour, a response bound that is none.
    """
    given = options_from(rl)
    for key in _REFUSED:
        if given.get(key):
            raise ValueError(f"rl.{key}: the objective has no such term; got {given[key]!r}; drop it")
    selectors = [key for key in ("grpo_surrogate", "distillation_mode") if given.get(key) is not None]
    if len(selectors) != 1:
        got = " and ".join(selectors) or "neither"
        raise ValueError(f"rl: expected either grpo_surrogate (GRPO) or distillation_mode (OPD); got {got}")
    config: Any = GRPOConfig if selectors == ["grpo_surrogate"] else OPDConfig
    build: Any = build_grpo_objective if config is GRPOConfig else build_opd_objective
    own = {key: value for key, value in given.items() if key in config.__dataclass_fields__}
    return _for_framework(build(config.from_mapping(own), model_config))


def _for_framework(objective: Objective) -> Any:
    """The same objective in the framework's types, which it compares by identity."""
    if "cosmos_framework" not in sys.modules and util.find_spec("cosmos_framework") is None:
        return objective
    theirs = import_module(_THEIRS)
    key = getattr(theirs, "OBJECTIVE_WEIGHT_SUM", OBJECTIVE_WEIGHT_SUM)
    return theirs.Objective(
        objective.fn if key == OBJECTIVE_WEIGHT_SUM else partial(_weight_under, fn=objective.fn, key=key),
        reduction=theirs.Reduction[objective.reduction.name],
        old_logp_cache=objective.old_logp_cache,
        metric_adapter=objective.metric_adapter,
        reference_scorer=objective.reference_scorer,
        identity=objective.identity,
    )


def _weight_under(model: Any, batch: Any, *, fn: ObjectiveFn, key: str) -> tuple[Tensor, Mapping[str, Any]]:
    """The weight of the loss under the framework's name."""
    loss, metrics = fn(model, batch)
    named = dict(metrics)
    named[key] = named.pop(OBJECTIVE_WEIGHT_SUM)
    return loss, named
