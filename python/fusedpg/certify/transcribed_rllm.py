"""rLLM's built-in losses, written down from its guide and from the bodies of `rllm/trainer/algorithms/loss.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..presets import rllm
from .cases import PolicyBatch
from .rows import Row
from .transcription import BOUNDED, EXTREME, MODERATE, Case, Fields, rows_of_cases

Body = Callable[..., Tensor]
#: how a mean of log-ratios is compared
_MEAN = {"kinds": BOUNDED, "kinds_fp64": EXTREME}
MODES = ("seq-mean-token-mean", "token-mean", "seq-mean-token-sum")


def aggregate(x: Tensor, mask: Tensor, b: Fields, mode: str, tokens: float | None, sequences: float | None) -> Tensor:
    """rLLM's reducer: a datum's own sum or mean, then one count of the step, every denominator at least 1."""
    tokens = float(b.mask.sum()) if tokens is None else tokens
    sequences = float((b.mask.sum(1) > 0).sum()) if sequences is None else sequences
    per_datum = (x * mask).sum(1)
    if mode == "seq-mean-token-mean":
        per_datum = per_datum / mask.sum(1).clamp(min=1.0)
    return per_datum.sum() / max(tokens if mode == "token-mean" else sequences, 1.0)


def bounded_ratio(b: Fields) -> Tensor:
    """exp of the log-ratio in +-20."""
    return torch.exp((b.logp - b.logp_old).clamp(-20.0, 20.0))


def ppo_clip(b: Fields, eps_clip: float = 0.2, eps_clip_high: float | None = None) -> Tensor:
    """Plain PPO, no dual clip."""
    r = bounded_ratio(b)
    high = eps_clip if eps_clip_high is None else eps_clip_high
    return -torch.minimum(r * b.advantages, r.clamp(1 - eps_clip, 1 + high) * b.advantages)


def dppo_tv(
    b: Fields,
    eps_clip: float = 0.2,
    delta: float | None = None,
    delta_low: float | None = None,
    delta_high: float | None = None,
) -> Tensor:
    """-A*sg[r]*logp where the probability has not moved too far in the advantage's direction."""
    delta = eps_clip if delta is None else delta
    moved = (b.logp.exp() - b.logp_old.exp()).detach()
    below = -(delta if delta_low is None else delta_low)
    above = delta if delta_high is None else delta_high
    keep = torch.where(b.advantages > 0, moved <= above, moved >= below)
    return -b.advantages * bounded_ratio(b).detach() * b.logp * keep


def dppo_kl(b: Fields, eps_clip: float = 0.2, delta: float | None = None) -> Tensor:
    """The same with the KL divergence of the two-outcome distributions."""
    p, q = (t.detach().exp().clamp(1e-6, 1 - 1e-6) for t in (b.logp, b.logp_old))
    divergence = q * torch.log(q / p) + (1 - q) * torch.log((1 - q) / (1 - p))
    away = torch.where(b.advantages > 0, p > q, p < q)
    drop = away & (divergence > (eps_clip if delta is None else delta))
    return -b.advantages * bounded_ratio(b).detach() * b.logp * (~drop)


def cispo(b: Fields, eps_clip: float = 0.2, eps_clip_high: float | None = None) -> Tensor:
    """-sg[clip(r)]*A*logp, clipped on both sides."""
    high = eps_clip if eps_clip_high is None else eps_clip_high
    return -bounded_ratio(b).clamp(1 - eps_clip, 1 + high).detach() * b.advantages * b.logp


def gspo(b: Fields, eps_clip: float = 0.2, eps_clip_high: float | None = None) -> Tensor:
    """The sequence's mean log-ratio as a value, a token's own logp as the gradient; at most 10."""
    mean = ((b.logp - b.logp_old) * b.mask).sum(1, keepdim=True) / b.mask.sum(1, keepdim=True).clamp(min=1)
    s = torch.exp((b.logp - b.logp.detach() + mean.detach()).clamp(max=10.0))
    high = eps_clip if eps_clip_high is None else eps_clip_high
    return torch.maximum(-b.advantages * s, -b.advantages * s.clamp(1 - eps_clip, 1 + high))


def icepop(b: Fields, icepop_alpha: float = 0.5, icepop_beta: float = 5.0) -> Tensor:
    """-A*rho*logp inside the band of the sampler's ratio, no clamp."""
    rho = torch.exp(b.logp.detach() - b.logp_rollout)
    return -b.advantages * rho * b.logp * ((rho >= icepop_alpha) & (rho <= icepop_beta))


def reinforce(b: Fields) -> Tensor:
    """-A*logp."""
    return -b.advantages * b.logp


def reinforce_kl(
    b: Fields,
    bwd_kl_coef: float = 0.0,
    fwd_kl_coef: float = 0.0,
    kl_approx: bool = False,
    ratio_clamp_min: float | None = None,
    ratio_clamp_max: float | None = None,
) -> Tensor:
    """-sg[r]*A*logp with KL terms against the sampler."""
    log_r = b.logp - b.logp_rollout
    r = torch.exp(log_r.clamp(-20.0, 20.0))
    w = r.detach().clamp(min=0.0 if ratio_clamp_min is None else ratio_clamp_min, max=ratio_clamp_max)
    x = -w * b.advantages * b.logp
    if kl_approx:
        return x + bwd_kl_coef * (r - 1 - log_r) + fwd_kl_coef * (r * log_r - r + 1)
    return x + bwd_kl_coef * -b.logp + fwd_kl_coef * (r * log_r).detach() * b.logp


def _case(body: Body, options: Mapping[str, Any], mode: str, whole_step: bool, **extra: Any) -> Case:
    """One loss under one mode; `whole_step` counts more tokens and sequences than the batch has."""

    def formula(b: Fields, tokens: float | None = None, sequences: float | None = None) -> Tensor:
        return aggregate(body(b, **options), b.mask, b, mode, tokens, sequences)

    pinned = {} if body is gspo else {"loss_agg_mode": mode}
    said = ", ".join(f"{k}={v}" for k, v in options.items())
    return Case(
        body.__name__,
        {**options, **pinned},
        extra.pop("formula", formula),
        "; ".join(part for part in (said, "counts of the step" if whole_step else "") if part),
        step_counts if whole_step else None,
        **extra,
    )


def step_counts(batch: PolicyBatch) -> dict[str, float]:
    """What a step of three such micro-batches and an empty sequence would count."""
    return {"tokens": 3.0 * float(batch.mask.sum()), "sequences": 3.0 * batch.mask.shape[0] + 1}


def echo_case(mode: str, whole_step: bool, coef: float) -> Case:
    """PPO on the action tokens and -coef*logp on the observation tokens, each through the reducer."""

    def formula(b: Fields, tokens: float | None = None, sequences: float | None = None) -> Tensor:
        policy = aggregate(ppo_clip(b), b.mask, b, mode, tokens, sequences)
        return policy + coef * aggregate(-b.logp, b.obs_mask, b, mode, tokens, sequences)

    said = f"env_loss_coef={coef}" + "; counts of the step" * whole_step
    options = {"env_loss_coef": coef, "loss_agg_mode": mode}
    return Case("echo", options, formula, said, step_counts if whole_step else None, observes="apart")


def cases() -> Iterator[Case]:
    """Every loss under every mode with the batch's counts and the step's; then the options."""
    every: list[tuple[Body, dict[str, Any]]] = [
        (ppo_clip, {"token_advantages": True}),
        (dppo_tv, {"token_advantages": True}),
        (dppo_kl, {"token_advantages": True}),
        (cispo, {"token_advantages": True}),
        (gspo, _MEAN),
        (icepop, {"sampler_is_old": True}),
        (reinforce, {"token_advantages": True}),
        (reinforce_kl, {"sampler_is_old": True}),
    ]
    for body, extra in every:
        for mode in MODES[:1] if body is gspo else MODES:
            yield from (_case(body, {}, mode, whole_step, **extra) for whole_step in (False, True))
    yield from (echo_case(mode, whole_step, 0.05) for mode in MODES for whole_step in (False, True))
    optional: list[tuple[Body, dict[str, Any], dict[str, Any]]] = [
        (ppo_clip, {"eps_clip_high": 0.28}, {}),
        (ppo_clip, {"eps_clip": 0.1}, {"clip": 0.1}),
        (dppo_tv, {"delta": 0.02}, {}),
        (dppo_tv, {"delta_low": 0.01, "delta_high": 0.03}, {}),
        (dppo_kl, {"delta": 0.002}, {}),
        (cispo, {"eps_clip": 0.1, "eps_clip_high": 0.3}, {}),
        (gspo, {"eps_clip": 3e-4, "eps_clip_high": 4e-4}, {"clip": 3e-4, **_MEAN}),
        (icepop, {"icepop_alpha": 0.9, "icepop_beta": 1.1}, {}),
        (reinforce_kl, {"ratio_clamp_min": 0.9, "ratio_clamp_max": 1.5}, {"sampler_is_old": True}),
        (reinforce_kl, {"bwd_kl_coef": 0.3}, {"sampler_is_old": True}),
        # beyond 20 nats the KL's own log-ratio is clamped here, in rLLM the ratio alone
        (reinforce_kl, {"fwd_kl_coef": 0.2}, {"sampler_is_old": True, "kinds": MODERATE}),
        (reinforce_kl, {"bwd_kl_coef": 0.3, "kl_approx": True}, {"sampler_is_old": True, "kinds": MODERATE}),
        (reinforce_kl, {"fwd_kl_coef": 0.2, "kl_approx": True}, {"sampler_is_old": True, "kinds": MODERATE}),
    ]
    yield from (_case(body, options, MODES[0], False, **extra) for body, options, extra in optional)
    yield echo_case(MODES[1], False, 0.5)


def rows(backend: str = "auto") -> Iterator[Row]:
    """One row a loss, mode, count and group of options."""
    yield from rows_of_cases(rllm, cases(), backend)
