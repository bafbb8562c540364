"""verl's own loss functions on dense CPU tensors, imported with Ray stubbed where it is not installed."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from types import ModuleType
from typing import Any

from torch import Tensor

from .cases import PolicyBatch

#: of the plugins that verl discovers at import, none: an installed one may replace what is certified
_PLUGINS = "VERL_USE_EXTERNAL_PLUGINS"


@contextmanager
def import_environment() -> Iterator[None]:
    """Without plugins, and with as much of Ray as verl's modules touch when they are imported, for as long as that."""
    stub = ModuleType("ray")
    stub.ObjectRef = type("ObjectRef", (), {})  # type: ignore[attr-defined]
    stubbed = "ray" not in sys.modules and importlib.util.find_spec("ray") is None
    plugins = os.environ.get(_PLUGINS)
    os.environ[_PLUGINS] = "none"
    if stubbed:
        sys.modules["ray"] = stub
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if stubbed and sys.modules.get("ray") is stub:
            del sys.modules["ray"]
        if plugins is None:
            os.environ.pop(_PLUGINS, None)
        else:
            os.environ[_PLUGINS] = plugins


@dataclass(frozen=True)
class Result:
    """What verl's loss function returns, its KL and entropy terms added as its trainer adds them."""

    loss: Tensor
    metrics: dict[str, float]


@dataclass(frozen=True)
class Oracle:
    """The modules of an installed verl."""

    version: str
    algos: ModuleType
    correction: ModuleType
    configs: ModuleType

    def config(self, loss: str, options: Mapping[str, Any], counts: Mapping[str, Any]) -> Any:
        """verl's `ActorConfig`, each option where verl has it."""
        actor, policy = self.configs.ActorConfig, self.correction.PolicyLossConfig
        rollout = self.correction.RolloutCorrectionConfig
        own = lambda cls: {f.name: options[f.name] for f in fields(cls) if f.name in options}  # noqa: E731
        nested = policy(loss_mode=loss, rollout_correction=rollout(**own(rollout)), **own(policy))
        info = {**counts, "loss_scale_factor": options.get("loss_scale_factor")}
        fixed = {"strategy": "fsdp", "rollout_n": 1, "use_dynamic_bsz": True}
        return actor(policy_loss=nested, global_batch_info=info, **fixed, **own(actor))

    def policy_loss(
        self,
        loss: str,
        options: Mapping[str, Any],
        batch: PolicyBatch,
        logp: Tensor,
        advantages: Tensor,
        counts: Mapping[str, Any],
        weights: Tensor | None = None,
        entropy: Tensor | None = None,
    ) -> Result:
        """verl's loss of a batch, (B, T) each; bypass_mode takes `logp_old` for the rollout policy."""
        config = self.config(loss, options, counts)
        if weights is None and loss != "bypass_mode" and options.get("rollout_is"):
            weights, _ = self.correction.compute_rollout_correction_weights(
                batch.logp_old - batch.logp_rollout, batch.mask, options["rollout_is"], options["rollout_is_threshold"]
            )
        value, metrics = self.algos.get_policy_loss_fn(loss)(
            old_log_prob=batch.logp_old,
            log_prob=logp,
            advantages=advantages,
            response_mask=batch.mask,
            loss_agg_mode=config.loss_agg_mode,
            config=config,
            rollout_is_weights=weights,
        )
        mean = lambda values: self.algos.agg_loss(  # noqa: E731
            values, batch.mask, config.loss_agg_mode, **config.global_batch_info
        )
        if config.use_kl_loss:
            kl = self.algos.kl_penalty(logp, batch.logp_ref, config.kl_loss_type)
            value = value + config.kl_loss_coef * mean(kl)
        if entropy is not None:
            value = value - config.entropy_coeff * mean(entropy)
        return Result(value, metrics)

    def kept(self, options: Mapping[str, Any], batch: PolicyBatch) -> Tensor:
        """The mask that verl's rejection leaves."""
        mask, _ = self.correction.compute_rollout_rejection_mask(
            batch.logp - batch.logp_old, batch.mask, options["rollout_rs"], options["rollout_rs_threshold"]
        )
        return mask


@cache
def load() -> Oracle:
    """verl, imported once; whatever keeps it from being imported is raised."""
    with import_environment():
        names = ("verl", "verl.trainer.ppo.core_algos", "verl.trainer.ppo.rollout_corr_helper", "verl.workers.config")
        package, algos, correction, configs = map(importlib.import_module, names)
    return Oracle(package.__version__, algos, correction, configs)
