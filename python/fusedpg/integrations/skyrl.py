"""SkyRL: its policy losses on this library's kernels, under `fusedpg_<policy_loss_type>` in its registry.

fusedpg.integrations.skyrl.register(cfg.trainer.algorithm)      # in the entry point, before training
# trainer.algorithm.policy_loss_type=fusedpg_gspo
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..functional import policy_loss
from ..presets import losses_of
from ..presets import skyrl as skyrl_preset
from ..presets._skyrl import options_of
from ..presets.base import TrainerSpec
from ._shared import advantages_of, floats, options_from

PREFIX = "fusedpg_"
LOSSES = losses_of("skyrl")
_UTILS = "skyrl.backends.skyrl_train.utils.ppo_utils"
#: AlgorithmConfig's nested configs, whose options have names of their own
_NESTED = ("off_policy_correction", "sapo", "clip_cov", "kl_cov", "cispo", "dppo")
#: what SkyRL adds outside the policy loss, or folds into the advantages before it
_ELSEWHERE = ("loss_reduction", "max_seq_len", "use_kl_loss", "kl_loss_coef", "kl_estimator_type")


def fused_loss(
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    *,
    loss: str = "regular",
    backend: str = "auto",
) -> tuple[Tensor, dict[str, float]]:
    """One of SkyRL's policy losses: a masked sum, since its advantages carry the reduction.

    Args:
        log_probs: (B, T), the only differentiable one; the others have its shape.
        config: the AlgorithmConfig.
        loss: a `policy_loss_type` of SkyRL.

    Raises:
        ValueError: an option that cannot be honoured, a tensor that the loss reads and did not get, by name.
    """
    spec = spec_of_config(loss, config)
    mask = torch.ones_like(log_probs, dtype=torch.bool) if loss_mask is None else loss_mask
    out = policy_loss(
        spec,
        log_probs,
        logp_old=old_log_probs,
        logp_rollout=rollout_logprobs,
        mask=mask,
        normalizer=spec.normalizer(),
        backend=backend,
        **advantages_of(spec, advantages, mask, None),
    )
    metrics = spec.named_metrics(out.metrics)
    if loss not in ("importance_sampling", "clip_cov", "kl_cov"):
        metrics.setdefault("clip_ratio", (1.0 - out.metrics["keep_frac"]) * (out.metrics["tokens"] > 0))
    return out.loss, floats(metrics or out.metrics)


def spec_of_config(loss: str, config: Any) -> TrainerSpec:
    """The spec of a policy loss under an AlgorithmConfig.

    Raises:
        ValueError: an option that cannot be honoured, by name.
    """
    loss = loss.removeprefix(PREFIX)
    if loss not in LOSSES:
        raise ValueError(f"loss: expected one of {', '.join(LOSSES)}; got {loss!r}")
    given = options_from(config)
    for name in _NESTED:
        nested = given.pop(name, None)
        if nested is not None:
            given |= options_from(nested)
    if given.get("use_tis"):
        raise ValueError("use_tis: SkyRL has deprecated it; got True; use off_policy_correction.tis_ratio_type")
    for key in ("outlier_token_is_threshold_low", "outlier_token_is_threshold_high"):
        if given.get(key) is not None:
            raise ValueError(f"{key}: it drops a sequence for one token; got {given[key]}; set it to None")
    reads = options_of(loss)
    own = {k: v for k, v in given.items() if k in reads and k not in _ELSEWHERE and v != reads[k]}
    corrects = [k for k in ("tis_ratio_type", "sequence_mask_metric") if given.get(k) is not None and k not in reads]
    if corrects:
        raise ValueError(f"{corrects[0]}: the loss {loss!r} does not support it; got {given[corrects[0]]!r}; unset it")
    return _cached(loss, tuple(sorted(own.items())))


@lru_cache(64)
def _cached(loss: str, options: tuple[tuple[str, Any], ...]) -> TrainerSpec:
    return skyrl_preset(loss, **dict(options))


def register(config: Any = None, losses: Iterable[str] = LOSSES, backend: str = "auto") -> tuple[str, ...]:
    """Register `fusedpg_<loss>` with SkyRL; the names. With a config, the loss that it selects is checked here.

    Raises:
        ImportError: SkyRL is not installed.
        ValueError: an unknown loss, or an option that the selected one cannot honour.
    """
    selected = getattr(config, "policy_loss_type", None)
    if isinstance(selected, str) and selected.startswith(PREFIX):
        spec_of_config(selected, config)
    decorate: Callable[[str], Callable[[Any], Any]] = import_module(_UTILS).register_policy_loss
    names = []
    for loss in losses:
        if loss not in LOSSES:
            raise ValueError(f"losses: expected names among {', '.join(LOSSES)}; got {loss!r}")
        decorate(PREFIX + loss)(partial(fused_loss, loss=loss, backend=backend))
        names.append(PREFIX + loss)
    return tuple(names)
