"""What is compared with TRL: combinations of options, batches and counts, and one comparison of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..functional import policy_loss
from ..outputs import LossOutput
from ..presets import trl
from ..presets.base import TrainerSpec
from ..spec import Anchor
from .cases import KINDS, PolicyBatch, make_policy_batch
from .rows import Difference
from .trl_oracle import Counts, trl_loss

CLIPPED = ("dapo", "grpo", "bnpo", "dr_grpo", "luspo")
LOSSES = (*CLIPPED, "cispo", "sapo", "vespo")
LEVELS = ("token", "sequence")

#: accumulation, generation, processes, train or eval, tokens of the rest of the generation batch
COUNTS = (
    Counts(),
    Counts(4, 4, 1, True, 70),
    Counts(2, 4, 2, True, 91),
    Counts(4, 2, 1, True, 33),
    Counts(4, 2, 2, False, 20),
)

KLS: tuple[dict[str, Any], ...] = (
    {},
    {"beta": 0.04, "use_bias_correction_kl": False},
    {"beta": 0.04, "use_bias_correction_kl": True},
)
_LOW, _HIGH = "vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"
_BOUNDS = {"token": {_LOW: 0.75, _HIGH: 1.35}, "sequence": {_LOW: 0.7, _HIGH: 1.4}}
#: TRL's default (sequence_mask up to 3), then the four modes with bounds that bind on both sides
CORRECTIONS: tuple[dict[str, Any], ...] = (
    {"use_vllm": True},
    *(
        {"use_vllm": True, "vllm_importance_sampling_mode": f"{level}_{how}", **_BOUNDS[level]}
        for level in LEVELS
        for how in ("truncate", "mask")
    ),
)


@dataclass(frozen=True)
class Case:
    """One loss with its options on one batch."""

    loss: str
    options: Mapping[str, Any]
    batch: PolicyBatch
    counts: Counts = field(default_factory=Counts)
    token_advantages: bool = False
    on_policy: bool = False
    entropy_of: Callable[[Tensor, Tensor], Tensor] | None = None

    @property
    def spec(self) -> TrainerSpec:
        """The preset of the same options."""
        return trl(self.loss, **self.options)

    def normalizer(self, spec: TrainerSpec) -> float:
        """The denominator of the same counts."""
        value = spec.normalizer(**self.counts.of(self.batch.mask))
        assert value is not None
        return value

    def theirs(self, logp: Tensor, batch: PolicyBatch | None = None) -> tuple[Tensor, dict[str, float]]:
        """TRL's loss and metrics, on the values of masked places that it can multiply by 0."""
        return trl_loss(
            self.loss,
            self.options,
            self.batch.cleaned().to(logp.dtype) if batch is None else batch,
            logp,
            counts=self.counts,
            token_advantages=self.token_advantages,
            on_policy=self.on_policy,
            entropy_of=self.entropy_of,
        )

    def ours(
        self, spec: TrainerSpec, logp: Tensor, normalizer: float, backend: str, is_weights: Tensor | None = None
    ) -> LossOutput:
        """The same loss here."""
        batch = self.batch
        if self.token_advantages:
            advantages = {"advantages": batch.token_advantages}
        else:
            advantages = {"sequence_advantages": batch.advantages}
        return policy_loss(
            replace(spec, anchor=Anchor.SELF) if self.on_policy else spec,
            logp,
            logp_old=None if self.on_policy else batch.logp_old,
            logp_ref=batch.logp_ref,
            logp_rollout=batch.logp_rollout,
            mask=batch.mask,
            entropy=None if self.entropy_of is None else self.entropy_of(logp, batch.mask),
            is_weights=is_weights,
            normalizer=normalizer,
            backend=backend,
            **advantages,  # type: ignore[arg-type]
        )

    def compare(
        self,
        difference: Difference,
        backend: str,
        *,
        spec: TrainerSpec | None = None,
        normalizer: float | None = None,
        is_weights: Tensor | None = None,
        against: Case | None = None,
    ) -> None:
        """Note the difference from TRL; another spec, denominator or case of TRL's than its own may be put in."""
        spec = self.spec if spec is None else spec
        by = self.normalizer(spec) if normalizer is None else normalizer
        other = self if against is None else against
        cleaned = other.batch.cleaned().to(torch.float64)
        difference.add(
            spec,
            self.batch,
            lambda logp: self.ours(spec, logp, by, backend, is_weights),
            lambda logp: other.theirs(logp, cleaned)[0],
            cleaned,
            by,
        )


def quadratic_entropy(logp: Tensor, mask: Tensor) -> Tensor:
    """An entropy whose gradient reaches logp, so that one gradient shows both."""
    return torch.where(mask, logp, 0.0) ** 2 / 2


def own_options(loss: str, level: str) -> Iterator[tuple[dict[str, Any], bool]]:
    """(options of the loss alone, whether to combine them with corrections): defaults, then values that often bind."""
    yield {}, False
    if loss in CLIPPED:
        band = {"epsilon": 0.15, "epsilon_high": 0.25} if level == "token" else {"epsilon": 0.04, "epsilon_high": 0.07}
        outside, inside = (1.35, 1.1) if level == "token" else (1.1, 1.03)
        if loss == "dr_grpo":
            band["max_completion_length"] = 11
        yield band, True
        yield {**band, "delta": outside}, True
        yield {**band, "delta": inside}, False
    elif loss == "cispo":
        yield {"epsilon_high": 1.1 if level == "token" else 1.05}, True
    elif loss == "sapo":
        yield {"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.5}, True
    else:
        yield {"vespo_k_pos": 1.2, "vespo_lambda_pos": 0.7, "vespo_k_neg": 2.5, "vespo_lambda_neg": 1.1}, True
        yield {"vespo_k_pos": 0.5, "vespo_lambda_pos": 0.0, "vespo_k_neg": 0.3, "vespo_lambda_neg": 1e-6}, True


def combinations(loss: str, level: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(group of the table, options) of everything that a loss can be given at a level."""
    at = {} if level == "token" else {"importance_sampling_level": "sequence"}
    for own, corrected in own_options(loss, level):
        for kl in KLS:
            yield ("KL times ratio" if kl.get("use_bias_correction_kl") else "KL" if kl else ""), {**at, **own, **kl}
            for correction in CORRECTIONS if corrected else ():
                family = correction.get("vllm_importance_sampling_mode", "sequence").split("_")[0]
                if loss != "vespo" or family == "token":
                    yield f"vLLM {family} modes", {**at, **own, **kl, **correction}


def batch_for(kind: str, options: Mapping[str, Any]) -> PolicyBatch | None:
    """A batch on which fp32 can represent the loss; None for a ratio of e^200 times a KL, which it cannot.

    Around an extreme ratio the rest of the batch stays where fp32 is accurate: k3 away from its cancellation, which
    the ratio would magnify, and the other sequences inside the clip band and the bounds of the correction, so that the
    largest gradient is theirs. With a correction, the sampling log-probs of some tokens are missing.
    """
    batch = make_policy_batch(kind)
    if kind.startswith("ratio"):
        if kind == "ratio-200" and options.get("beta") and options.get("use_bias_correction_kl", True):
            return None
        g = torch.Generator().manual_seed(7)
        away = torch.randn(batch.logp.shape, generator=g)
        old, rollout = batch.logp_old.clone(), batch.logp_rollout.clone()
        old[2:] = torch.lerp(batch.logp, old, 0.1)[2:]
        rollout[2:] = torch.lerp(old, rollout, 0.1)[2:]
        batch = replace(batch, logp_ref=batch.logp + away + away.sign(), logp_old=old, logp_rollout=rollout)
    if options.get("use_vllm"):
        rollout = batch.logp_rollout.clone()
        rollout[1::2, 0] = torch.nan
        batch = replace(batch, logp_rollout=rollout)
    return batch


def cases(loss: str, level: str) -> Iterator[tuple[str, Case]]:
    """(group, case): every combination on every kind of batch.

    The counts, advantages a sequence or a token, and ties at an empty band or inside a wider one take turns: the
    numbers of each are prime to the number of kinds, so all meet. An empty band is where a tie is exact: on which side
    of 1 + 0.2 a ratio lies is decided by the last bit of an exp.
    """
    turn = 0
    for group, options in combinations(loss, level):
        for kind in KINDS:
            batch = batch_for(kind, options)
            if batch is None:
                continue
            turn += 1
            exact = kind == "ties" and loss in CLIPPED and (turn % 2 == 1 or "epsilon" not in options)
            band = {"epsilon": 0.0, "epsilon_high": 0.0} if exact else {}
            by_token = level == "token" and turn % 2 == 0
            yield group, Case(loss, {**options, **band}, batch, COUNTS[turn % len(COUNTS)], by_token)
