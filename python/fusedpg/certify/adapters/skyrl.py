"""SkyRL's `policy_loss_fn` signature: masked sums, whose advantages carry the reduction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, make_dataclass
from functools import partial
from typing import Any

import torch

from ...integrations.skyrl import fused_loss
from ...presets._skyrl import VERSION
from ..cases import PolicyBatch
from ..rows import Row
from ..transcribed_skyrl import CASES as EVERY
from ..transcription import Case
from .batches import Outcome, differentiated, parts_of, summed, truth
from .compare import rows_of_steps

#: those whose reduction and KL are SkyRL's own affair, as in its workers
CASES = [case for case in EVERY if not {"loss_reduction", "use_kl_loss"} & set(case.options)]
#: what chooses its tokens in each micro-batch
BY_PART = ("clip_cov", "kl_cov")


@dataclass
class Correction:
    """OffPolicyCorrectionConfig, by its contract."""

    tis_ratio_type: str | None = None
    token_tis_ratio_clip_high: float = 2.0
    sequence_tis_ratio_clip_high: float = 5.0
    sequence_mask_metric: str | None = None
    geo_mask_high: float = 1.01
    geo_mask_low: float = 0.99
    product_mask_high: float = 2.0
    product_mask_low: float = 0.5
    outlier_token_is_threshold_low: float | None = None
    outlier_token_is_threshold_high: float | None = None
    token_mask_is_threshold_low: float | None = None
    token_mask_is_threshold_high: float | None = None


def _nested(name: str, **values: Any) -> Any:
    return make_dataclass(name, [(k, type(v), field(default=v)) for k, v in values.items()])


Sapo = _nested("Sapo", tau_pos=1.0, tau_neg=1.05)
Cispo = _nested("Cispo", cispo_eps_clip_low=0.0, cispo_eps_clip_high=5.0)
Dppo = _nested("Dppo", dppo_type="binary_tv", delta_low=0.2, delta_high=0.2)
ClipCov = _nested("ClipCov", clip_ratio=0.0002, clip_cov_lb=1.0, clip_cov_ub=5.0)
KLCov = _nested("KLCov", kl_cov_frac=0.2, ppo_kl_coef=1.0)


@dataclass
class Algorithm:
    """AlgorithmConfig, by its contract; SkyRL's defaults."""

    policy_loss_type: str = "regular"
    loss_reduction: str = "token_mean"
    max_seq_len: int | None = None
    use_kl_loss: bool = True
    kl_loss_coef: float = 0.001
    kl_estimator_type: str = "k3"
    use_tis: bool = False
    eps_clip_low: float = 0.2
    eps_clip_high: float = 0.2
    clip_ratio_c: float = 3.0
    off_policy_correction: Any = field(default_factory=Correction)
    sapo: Any = field(default_factory=Sapo)
    cispo: Any = field(default_factory=Cispo)
    dppo: Any = field(default_factory=Dppo)
    clip_cov: Any = field(default_factory=ClipCov)
    kl_cov: Any = field(default_factory=KLCov)


def algorithm(**options: Any) -> Algorithm:
    """Options where AlgorithmConfig keeps them."""
    config = Algorithm()
    for key, value in options.items():
        homes = [config, *(getattr(config, f.name) for f in fields(config))]
        (home,) = [h for h in homes if key in getattr(type(h), "__dataclass_fields__", {})]
        setattr(home, key, value)
    return config


def step(case: Case, b: PolicyBatch, backend: str = "auto") -> Outcome:
    """The sum of micro-batches; the step's token mean is in the advantages."""
    fn = partial(fused_loss, loss=case.loss, backend=backend)
    config, tokens = algorithm(**case.options), float(b.mask.sum())

    def one(part: PolicyBatch) -> Outcome:
        leaf = part.logp.clone().requires_grad_()
        advantages = part.token_advantages / tokens
        loss, _ = fn(leaf, part.logp_old, advantages, config, part.mask.float(), part.logp_rollout)
        return differentiated(loss, leaf)

    return summed(map(one, parts_of(b)))


def want(case: Case, b: PolicyBatch) -> Outcome:
    """The unsplit step; covariances are taken within a micro-batch."""
    tokens = float(b.mask.sum())
    found = []
    for part in parts_of(b) if case.loss in BY_PART else [b]:
        part.token_advantages.div_(tokens)
        counts: dict[str, Any] = {"batch_size": part.mask.shape[0], "tokens": float(part.mask.sum())}
        empty = Outcome(torch.zeros(()), torch.zeros_like(part.logp).double())
        found.append(truth(part, case.formula, **counts) if part.mask.any() else empty)
    return summed(found)


def rows(backend: str = "auto") -> Iterator[Row]:
    """One row a `policy_loss_type`."""
    yield from rows_of_steps("skyrl", VERSION, CASES, step, want, backend)
