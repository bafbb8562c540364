"""The executable definition of every loss: plain PyTorch, derivatives by autograd, any float dtype.

Clarity first: nothing here is shared with the kernels. Called with fp64 tensors it is the truth that every other
backend is measured against. Masked rows are selected away before any arithmetic, in values and in gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .spec import KL, Anchor, KLRatio, KLTarget, Level, LossSpec, Surrogate

#: rows whose vocabulary-sized temporaries exist at one time
ROW_CHUNK = 256


# ---------------------------------------------------------------- stage A


def logprobs(
    logits: Tensor,
    targets: Tensor,
    active: Tensor,
    temperature: Tensor | float = 1.0,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    want_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`log_softmax(z)[targets]` and the entropy of softmax(z), z = cap(logit_scale*logits)/temperature, per row.

    logits (N, V); targets int64 (N,); active bool (N,); temperature a float or (N,). Rows not active give 0.
    Row chunks are recomputed in backward, so the extra memory does not grow with N.
    """
    logps, entropies = [], []
    for start in range(0, max(logits.shape[0], 1), ROW_CHUNK):
        rows = slice(start, start + ROW_CHUNK)
        t = temperature[rows, None] if isinstance(temperature, Tensor) else temperature
        args = (logits[rows], targets[rows], active[rows], t, softcap, logit_scale, want_entropy)
        if torch.is_grad_enabled() and logits.requires_grad and logits.shape[0] > ROW_CHUNK:
            logp, entropy = checkpoint(_row_logprobs, *args, use_reentrant=False, preserve_rng_state=False)
        else:
            logp, entropy = _row_logprobs(*args)
        logps.append(logp)
        entropies.append(entropy)
    return torch.cat(logps), torch.cat(entropies) if want_entropy else None


def _row_logprobs(
    logits: Tensor,
    targets: Tensor,
    active: Tensor,
    temperature: Tensor | float,
    softcap: float,
    logit_scale: float,
    want_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    x = torch.where(active[:, None], logits, 0.0)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    targets = torch.where(active, targets, 0)
    y = softcap * torch.tanh(x * logit_scale / softcap) if softcap else x
    # the maximum goes first: a large common offset then costs no precision
    z = (y - y.detach().amax(-1, keepdim=True)) * ((1.0 if softcap else logit_scale) / temperature)
    log_sum = z.exp().sum(-1).log()
    logp = z.gather(-1, targets[:, None])[:, 0] - log_sum
    logp = torch.where(active, logp, 0.0)
    if not want_entropy:
        return logp, None
    p = (z - log_sum[:, None]).exp()
    entropy = log_sum - (p * torch.where(p > 0, z, 0.0)).sum(-1)
    # a row that is broken (no finite maximum) has no entropy, as it has no log-softmax
    entropy = torch.where(log_sum == log_sum, entropy, log_sum)
    return logp, torch.where(active, entropy, 0.0)


# ---------------------------------------------------------------- stage B


@dataclass(frozen=True)
class Tokens:
    """What stage B reads, flat (N,) each; `segment` numbers the sequences, None when the loss needs none."""

    w: Tensor
    advantages: Tensor
    logp_old: Tensor | None = None
    logp_ref: Tensor | None = None
    logp_rollout: Tensor | None = None
    is_weights: Tensor | None = None
    segment: Tensor | None = None
    num_segments: int = 0


def clamp_log_ratio(d: Tensor, bounds: tuple[float, float]) -> Tensor:
    """`d.clamp(lo, hi)`, NaN kept; the gradient is 0 outside the bounds and passes at them."""
    low, high = bounds
    return torch.where(d < low, low, torch.where(d > high, high, d))


def reinforce(logp: Tensor, adv: Tensor) -> Tensor:
    """-A*logp."""
    return -adv * logp


def importance_ratio(d: Tensor, adv: Tensor) -> Tensor:
    """-A*r with r = exp(d)."""
    return -adv * d.exp()


def clipped_ratio(d: Tensor, adv: Tensor, spec: LossSpec) -> tuple[Tensor, Tensor]:
    """max(-A*min(r, delta), -A*clip(r)), bounded by -A*dual_clip where A < 0; and where that bound binds.

    The branch is chosen on detached values, so a ratio that overflows in a branch not taken leaves no NaN behind.
    """
    r = d.detach().exp()
    unclipped = -adv * torch.where(r > spec.delta, spec.delta, r)
    clipped = -adv * clamp_log_ratio(r, (spec.clip_low, spec.clip_high))
    taken = ~(unclipped < clipped)  # ties, NaN included, stay on the branch that carries the gradient
    cap = torch.where(adv < 0, -adv * spec.dual_clip, torch.inf)
    dual = torch.where(taken, unclipped, clipped) > cap
    live = taken & ~(r > spec.delta) & ~dual
    value = torch.where(dual, cap, torch.where(taken, unclipped, clipped))
    ratio = torch.where(live, d, 0.0).exp()
    return torch.where(live, -adv * ratio, value), dual


def cispo(logp: Tensor, d: Tensor, adv: Tensor, spec: LossSpec) -> Tensor:
    """-sg[clip(r)]*A*logp."""
    return -clamp_log_ratio(d.detach().exp(), (spec.clip_low, spec.clip_high)) * adv * logp


def surrogate(logp: Tensor, d: Tensor, adv: Tensor, spec: LossSpec) -> tuple[Tensor, Tensor]:
    """The policy term per token, and where the dual clip binds. A = 0 gives exactly 0, also when r overflows."""
    zero = adv == 0
    broken = (logp != logp) | (d != d)  # an unmasked NaN stays visible
    d_live, logp_live = torch.where(zero, 0.0, d), torch.where(zero, 0.0, logp)
    dual = torch.zeros_like(zero)
    if spec.surrogate == Surrogate.REINFORCE:
        x = reinforce(logp_live, adv)
    elif spec.surrogate == Surrogate.IMPORTANCE_RATIO:
        x = importance_ratio(d_live, adv)
    elif spec.surrogate == Surrogate.CLIPPED_RATIO:
        x, dual = clipped_ratio(d_live, adv, spec)
    elif spec.surrogate == Surrogate.CISPO:
        x = cispo(logp_live, d_live, adv, spec)
    else:
        raise ValueError(f"surrogate: the reference has no term for {spec.surrogate!r}")
    return torch.where(zero, torch.where(broken, torch.nan, 0.0).to(x.dtype), x), dual & ~zero


def kl_k1(d: Tensor) -> Tensor:
    """Log pi/pi_ref: unbiased, signed."""
    return d


def kl_k2(d: Tensor) -> Tensor:
    """d^2/2: its gradient is that of the reverse KL."""
    return d * d / 2


def kl_k3(d: Tensor) -> Tensor:
    """exp(-d) + d - 1: unbiased, never negative."""
    return (-d).exp() + d - 1


def kl_abs(d: Tensor) -> Tensor:
    """|d|."""
    return d.abs()


_ESTIMATORS = {KL.K1: kl_k1, KL.K2: kl_k2, KL.K3: kl_k3, KL.ABS: kl_abs}


def kl_term(logp: Tensor, anchor: Tensor, spec: LossSpec) -> Tensor:
    """The KL estimate per token with its clamps; `+` keeps the value and has the gradient of k2."""
    d = logp - anchor
    value = clamp_log_ratio(_ESTIMATORS[spec.kl](clamp_log_ratio(d, spec.kl_log_ratio_clamp)), spec.kl_clamp)
    if spec.kl_straight_through:
        infinite = d.isinf()  # else a step of exactly 0 whose gradient is d: the value keeps its bits
        step = torch.where(infinite, 0.0, d - d.detach()) * torch.where(infinite, 0.0, d.detach())
        value = value.detach() + step
    return value


def log_ratio(logp: Tensor, tokens: Tokens, spec: LossSpec) -> Tensor:
    """The log-ratio of the spec's anchor and level, per token, before its clamp."""
    anchor = tokens.logp_rollout if spec.anchor == Anchor.ROLLOUT else tokens.logp_old
    if spec.anchor == Anchor.SELF or anchor is None:
        anchor = logp.detach()
    d = logp - torch.where(tokens.w != 0, anchor, 0.0)
    if spec.level == Level.TOKEN:
        return d
    assert tokens.segment is not None
    mean = segment_mean(d, tokens.w, tokens.segment, tokens.num_segments)
    if spec.level == Level.SEQUENCE_TOKEN:
        return mean.detach() + torch.where(logp.isinf(), 0.0, logp - logp.detach())
    return mean


def segment_mean(values: Tensor, w: Tensor, segment: Tensor, num_segments: int) -> Tensor:
    """sum(w*values)/sum(w) over each sequence, spread back to its tokens; 0 for a sequence without weight."""
    total = values.new_zeros(num_segments).index_add(0, segment, w * values)
    weight = values.new_zeros(num_segments).index_add(0, segment, w)
    return (total / torch.where(weight > 0, weight, 1.0))[segment]


def token_loss(
    spec: LossSpec, logp: Tensor, entropy: Tensor | None, tokens: Tokens
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Stage B: (sum of w*x, x per token, the sums of `fusedpg.metrics.SUM_NAMES`); differentiable in logp, entropy."""
    selected = tokens.w != 0
    pick = lambda t: torch.where(selected, t, 0.0)  # noqa: E731
    logp = pick(logp)
    adv = pick(tokens.advantages)
    d = clamp_log_ratio(log_ratio(logp, tokens, spec), spec.log_ratio_clamp)
    om = None if tokens.is_weights is None else pick(tokens.is_weights)
    if om is None:
        x, dual = surrogate(logp, d, adv, spec)
    else:
        # a dropped token enters detached: its ratio may overflow, and inf*0 would be its gradient
        attach = lambda t: torch.where(om == 0, t.detach(), t)  # noqa: E731
        x, dual = surrogate(attach(logp), attach(d), adv, spec)
        x = torch.where(om == 0, 0.0, om * torch.where(om == 0, 0.0, x))
    kl = torch.zeros_like(logp)
    if spec.has_kl:
        anchor = tokens.logp_ref if spec.kl_target == KLTarget.REF else tokens.logp_rollout
        assert anchor is not None
        kl = kl_term(logp, pick(anchor), spec)
        if spec.kl_ratio != KLRatio.NONE:
            r = d.exp()
            x = x + spec.kl_coef * (r if spec.kl_ratio == KLRatio.LIVE else r.detach()) * kl
        else:
            x = x + spec.kl_coef * kl
    h = None if entropy is None else pick(entropy)
    if spec.entropy_coef != 0.0:
        assert h is not None
        x = x - spec.entropy_coef * h
    x = pick(x)
    numerator = (tokens.w * x).sum()
    with torch.no_grad():
        sums = _sums(spec, selected, numerator, adv, d, dual, kl, h, om)
    return numerator, x, sums


def _sums(
    spec: LossSpec,
    selected: Tensor,
    numerator: Tensor,
    adv: Tensor,
    d: Tensor,
    dual: Tensor,
    kl: Tensor,
    entropy: Tensor | None,
    om: Tensor | None,
) -> dict[str, Tensor]:
    """Sums and extrema over the selected tokens; `active` is the caller's, who knows the gradient."""
    r = d.exp()
    zero = torch.zeros_like(numerator)
    total = lambda t: torch.where(selected, t, 0).sum(dtype=numerator.dtype)  # noqa: E731
    low, high = r < spec.clip_low, r > spec.clip_high
    return {
        "numerator": numerator,
        "tokens": total(selected),
        "ratio": total(r),
        "clip_low": total(low & (adv < 0)),
        "clip_high": total(high & (adv > 0)),
        "dual_clip": total(dual),
        "out_of_band": total(low | high),
        "approx_kl": total(-d),
        "approx_kl_k3": total(r - 1 - d),
        "kl": total(kl),
        "entropy": zero if entropy is None else total(entropy),
        "is_weight": zero if om is None else total(om),
        "is_masked": zero if om is None else total(om == 0),
        "keep": total(selected),
        "active": zero,
        "ratio_min": _extremum(torch.where(selected, r, torch.inf), torch.inf, torch.amin),
        "ratio_max": _extremum(torch.where(selected, r, -torch.inf), -torch.inf, torch.amax),
        "is_weight_max": zero - torch.inf
        if om is None
        else _extremum(torch.where(selected, om, -torch.inf), -torch.inf, torch.amax),
    }


def _extremum(values: Tensor, empty: float, reduce: object) -> Tensor:
    return reduce(values) if values.numel() else values.new_full((), empty)  # type: ignore[operator]
