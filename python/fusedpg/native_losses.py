"""Names that have a native kernel: rLLM's nine losses through its preset, and the other entries of the catalogue."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .context import AGG_MODES, step_denominator
from .functional import policy_loss
from .hidden_states import Scores, scored_loss
from .loss_call import LogitMap, LossInputs, LossResult
from .losses import ALIASES, CATALOGUE, ENTRIES, loss_spec
from .outputs import LossOutput
from .presets import TrainerSpec, losses_of, rllm
from .spec import LossSpec

#: rLLM's built-in losses; the first nine native names
RLLM_LOSSES = losses_of("rllm")
NATIVE_NAMES = (*RLLM_LOSSES, *(name for name in (*CATALOGUE, *ALIASES) if name not in RLLM_LOSSES))

#: other names of rLLM's loss_params, as its guide prints them
_PARAM_ALIASES = {"icepop": {"alpha": "icepop_alpha", "beta": "icepop_beta"}}
_BY_EPS = ("ppo_clip", "dppo_tv", "dppo_kl", "cispo", "gspo", "echo")
_BY_EPS_HIGH = ("ppo_clip", "cispo", "gspo", "echo")


@dataclass(frozen=True)
class NativePath:
    """A `LossSpec` behind the calls of a resolved loss."""

    name: str
    spec: LossSpec
    #: what the observation term of the spec runs over: the observation tokens, or the action tokens themselves
    observes_actions: bool = False
    path: str = "native"

    def from_logits(
        self, scores: Scores, targets: Tensor, inputs: LossInputs, logit_map: LogitMap, backend: str
    ) -> LossResult:
        """`policy_loss_from_logits` or `policy_loss_from_hidden`."""
        keywords = {**self._keywords(inputs, targets), **logit_map.keywords(), "backend": backend}
        return self._result(scored_loss(self.spec, scores, targets, **keywords), inputs)

    def from_logp(self, logp: Tensor, inputs: LossInputs, backend: str) -> LossResult:
        """`policy_loss`."""
        return self._result(policy_loss(self.spec, logp, **self._keywords(inputs, logp), backend=backend), inputs)

    def _keywords(self, inputs: LossInputs, base: Tensor) -> dict[str, Any]:
        cu_seqlens, obs_mask = inputs.cu_seqlens, None
        if isinstance(base, Tensor) and base.ndim == 1 and cu_seqlens is None and self.spec.needs_sequences:
            cu_seqlens = torch.arange(2, device=base.device) * base.shape[0]  # one datum is one sequence
        if self.spec.obs_coef:
            obs_mask = _action_mask(inputs, base) if self.observes_actions else inputs.obs_mask
        normalizer = None
        if self.spec.reduction != "token-sum":
            normalizer = step_denominator(self.spec.reduction, inputs.step_tokens, inputs.step_sequences)
        return {
            "logp_old": inputs.logp_old,
            "advantages": inputs.advantages,
            "sequence_advantages": inputs.sequence_advantages,
            "mask": inputs.mask,
            "obs_mask": obs_mask,
            "logp_ref": inputs.logp_ref,
            "logp_rollout": inputs.logp_rollout,
            "cu_seqlens": cu_seqlens,
            "normalizer": normalizer,
        }

    def _result(self, out: LossOutput, inputs: LossInputs) -> LossResult:
        metrics: Mapping[str, Any] = out.metrics
        if isinstance(self.spec, TrainerSpec):
            metrics = self.spec.named_metrics(out.metrics)
            more = _MORE_METRICS.get(self.name)
            metrics |= {} if more is None else more(self, out, inputs)
        return LossResult(out.loss, metrics, self.path, out.backend, out.logp)


def native_path(name: str, params: Mapping[str, Any], agg_mode: str | None, common: Mapping[str, Any]) -> NativePath:
    """The native loss of a name under these options.

    Args:
        name: one of `NATIVE_NAMES`.
        params: `loss_params`; rLLM's names for its losses, the knobs of `loss_spec` for the others.
        agg_mode: one of the three modes, or None: rLLM's default, or the entry's own reduction.
        common: `eps_clip`, `eps_clip_high` and `kl_beta` of the algorithm config where they are given; a loss that does
            not read one of the first two ignores it.

    Raises:
        ValueError: an option that the loss never reads.
    """
    if name not in RLLM_LOSSES:
        reduction = {} if agg_mode is None else {"reduction": agg_mode}
        return NativePath(name, loss_spec(name, **_catalogue_knobs(name, common), **reduction, **params))
    given = rllm_params(name, params)
    options = {key: value for key, value in common.items() if key == "kl_beta" or _reads(name, key)} | given
    return NativePath(name, rllm(name, loss_agg_mode=agg_mode or AGG_MODES[0], **options), name == "reinforce_kl")


def rllm_params(name: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """`loss_params` under the names of rLLM's code."""
    aliases = _PARAM_ALIASES.get(name, {})
    for alias, param in aliases.items():
        if alias in params and param in params:
            raise ValueError(f"{alias}: the loss {name!r} calls it {param} too; got both; remove one of them")
    return {aliases.get(key, key): value for key, value in params.items()}


def _reads(name: str, key: str) -> bool:
    return name in (_BY_EPS if key == "eps_clip" else _BY_EPS_HIGH)


def _catalogue_knobs(name: str, common: Mapping[str, Any]) -> dict[str, Any]:
    """The algorithm config's common names as knobs of `loss_spec`."""
    entry = ENTRIES[ALIASES.get(name, name)]
    knobs: dict[str, Any] = {}
    if "eps_clip" in common and "epsilon_low" in entry.knobs:
        knobs = {"epsilon_low": common["eps_clip"], "epsilon_high": common.get("eps_clip_high")}
    elif "eps_clip_high" in common and "epsilon_high" in entry.knobs:
        knobs = {"epsilon_high": common["eps_clip_high"]}
    if common.get("kl_beta"):
        knobs |= {"kl": "k3", "kl_coef": common["kl_beta"]}
    return knobs


# ------------------------------------------------------------------ metrics that no kernel counts under rLLM's name


def _action_mask(inputs: LossInputs, like: Tensor) -> Tensor:
    if inputs.mask is None:
        return torch.ones(like.shape, dtype=torch.bool, device=like.device)
    return inputs.mask


def _mask_frac(loss: NativePath, out: LossOutput, inputs: LossInputs) -> dict[str, Any]:
    some = out.metrics["tokens"] > 0
    return {f"{loss.name}/mask_frac": torch.where(some, 1.0 - out.metrics["keep_frac"], 0.0)}


def _kl_to_sampler(loss: NativePath, out: LossOutput, inputs: LossInputs) -> dict[str, Any]:
    """r - 1 - log r, which the kernel counts, and r*log r - r + 1, over the action tokens."""
    assert inputs.logp_rollout is not None
    active = _action_mask(inputs, out.logp) != 0
    log_r = torch.where(active, out.logp - inputs.logp_rollout.detach().to(out.logp.dtype), 0.0)
    r = log_r.clamp(-20.0, 20.0).exp()
    forward = torch.where(active, r * log_r - r + 1, 0.0).sum() / active.sum().clamp(min=1)
    return {"reinforce_kl/kl_bwd": out.metrics["approx_kl_k3"], "reinforce_kl/kl_fwd": forward}


def _echo_coef(loss: NativePath, out: LossOutput, inputs: LossInputs) -> dict[str, Any]:
    return {"echo/coef": loss.spec.obs_coef} if loss.spec.obs_coef else {}


_MORE_METRICS: Mapping[str, Callable[[NativePath, LossOutput, LossInputs], dict[str, Any]]] = {
    "icepop": _mask_frac,
    "dppo_tv": _mask_frac,
    "dppo_kl": _mask_frac,
    "reinforce_kl": _kl_to_sampler,
    "echo": _echo_coef,
}
