"""The executable definition of every loss: plain PyTorch, derivatives by autograd, any float dtype.

Clarity first: nothing here is shared with the kernels. Called with fp64 tensors it is the truth that every other
backend is measured against. Masked rows are selected away before any arithmetic, in values and in gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from . import reference_terms as terms
from .spec import Anchor, KLRatio, KLTarget, Level, LossSpec, Selection, Surrogate

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
    obs_weights: Tensor | None = None
    selected: Tensor | None = None
    segment: Tensor | None = None
    num_segments: int = 0

    def pick(self, values: Tensor) -> Tensor:
        """The values of policy tokens, 0 elsewhere."""
        return torch.where(self.w != 0, values, 0.0)

    def sequence_sum(self, values: Tensor) -> Tensor:
        """The sum over each sequence, spread back to its tokens."""
        assert self.segment is not None
        return values.new_zeros(self.num_segments).index_add(0, self.segment, values)[self.segment]

    def sequence_mean(self, values: Tensor, among: Tensor | None = None) -> Tensor:
        """sum(w*values)/sum(w) over each sequence (over `among` of its tokens); 0 where that weight is 0."""
        w = self.w if among is None else torch.where(among, self.w, 0.0)
        total = self.sequence_sum(w * torch.where(w != 0, values, 0.0))
        weight = self.sequence_sum(w)
        return total / torch.where(weight > 0, weight, 1.0)


@dataclass(frozen=True)
class Parts:
    """Intermediate values of stage B that the metrics read."""

    adv: Tensor
    t: Tensor
    d: Tensor
    dual: Tensor
    drop: Tensor
    weight: Tensor | None
    missing: Tensor


def anchor_logp(logp: Tensor, tokens: Tokens, spec: LossSpec) -> Tensor:
    """The denominator of the ratio: the policy itself, detached, where the anchor is `self` or was not given."""
    stream = tokens.logp_rollout if spec.anchor == Anchor.ROLLOUT else tokens.logp_old
    if spec.anchor == Anchor.SELF or stream is None:
        return logp.detach()
    return tokens.pick(stream)


def log_ratio(t: Tensor, logp: Tensor, adv: Tensor, tokens: Tokens, spec: LossSpec) -> Tensor:
    """The log-ratio at the spec's level from the tokens' own `t`, before its clamp."""
    if spec.level == Level.TOKEN:
        return t
    if spec.level == Level.SEQUENCE:
        return tokens.sequence_mean(terms.clip_tokens(t, adv, spec.token_clip))
    return tokens.sequence_mean(t).detach() + terms.step(logp)


def rollout_weights(logp: Tensor, tokens: Tokens, spec: LossSpec) -> tuple[Tensor | None, Tensor]:
    """The constant factor on the policy term, given or formed from `logp_rollout`; and where it was missing."""
    selected = tokens.w != 0
    missing = torch.zeros_like(selected)
    if tokens.is_weights is not None:
        weight = tokens.pick(tokens.is_weights)
        if spec.is_missing_one:
            missing = weight.isnan()
            weight = torch.where(missing, 1.0, weight)
        return weight, missing
    if not spec.has_correction:
        return None, missing
    assert tokens.logp_rollout is not None
    rollout = tokens.pick(tokens.logp_rollout)
    if spec.is_missing_one:
        missing = rollout.isnan()
    use_old = spec.anchor == Anchor.OLD and tokens.logp_old is not None
    numerator = tokens.pick(tokens.logp_old) if use_old else logp.detach()  # type: ignore[arg-type]
    log_rho = numerator - rollout
    product = mean = log_rho
    if tokens.segment is not None:
        known = selected & ~missing
        product = tokens.sequence_sum(torch.where(known, log_rho, 0.0))
        mean = tokens.sequence_mean(log_rho, known)
    return terms.correction_weight(log_rho, product, mean, missing, spec), missing


def product_ratio(t: Tensor, weight: Tensor | None, tokens: Tokens, spec: LossSpec) -> Tensor:
    """Log of the product of a sequence's ratios and correction weights, clamped; detached."""
    log_ratios = terms.clamp(t.detach(), spec.token_clip)
    if weight is not None:
        log_ratios = log_ratios + terms.clamp(weight.log(), terms.LOG_WEIGHT_BOUNDS)
    return terms.clamp(tokens.sequence_sum(tokens.pick(log_ratios)), spec.log_w_clamp)


def policy_term(logp: Tensor, tokens: Tokens, spec: LossSpec) -> tuple[Tensor, Parts]:
    """The policy's loss per token: surrogate, keep mask, penalties, correction weight."""
    adv = tokens.pick(tokens.advantages)
    anchor = anchor_logp(logp, tokens, spec)
    t = logp - anchor
    d = terms.clamp(log_ratio(t, logp, adv, tokens, spec), spec.log_ratio_clamp)
    weight, missing = rollout_weights(logp, tokens, spec)
    drop = terms.dropped(logp, anchor, d, adv, tokens.selected, spec)
    factor = None if spec.surrogate == Surrogate.VESPO else weight  # there the weight is part of the product
    off = drop if factor is None else drop | (factor == 0)
    # a token without a gradient enters detached: its ratio may overflow, and inf*0 would be its gradient
    attach = lambda v, off: torch.where(off, v.detach(), v)  # noqa: E731
    log_w = product_ratio(t, weight, tokens, spec) if spec.surrogate == Surrogate.VESPO else None
    x, dual = terms.surrogate(attach(logp, off), attach(d, off), adv, log_w, spec)
    x = torch.where(drop, 0.0, x)
    if spec.penalty_coef != 0.0:
        x = x + spec.penalty_coef / 2 * t * t
    if spec.selection == Selection.KL_COV:
        assert tokens.selected is not None
        x = x + torch.where(tokens.selected != 0, spec.select_coef * t.abs(), 0.0)
    if factor is not None:
        x = torch.where(factor == 0, 0.0, factor * torch.where(factor == 0, 0.0, x))
    return x, Parts(adv, t, d, dual & ~drop, drop, weight, missing)


def kl_terms(logp: Tensor, d: Tensor, tokens: Tokens, spec: LossSpec) -> tuple[Tensor, Tensor]:
    """(what the KL terms add to the loss, the KL estimate)."""
    target = tokens.logp_ref if spec.kl_target == KLTarget.REF else tokens.logp_rollout
    added = kl = torch.zeros_like(logp)
    if spec.has_kl:
        assert target is not None
        kl = terms.kl_term(logp, tokens.pick(target), spec)
        r = d.exp() if spec.kl_ratio == KLRatio.LIVE else d.detach().exp()
        added = spec.kl_coef * (kl if spec.kl_ratio == KLRatio.NONE else r * kl)
    if spec.has_kl_backward:
        assert target is not None
        added = added + spec.kl_backward_coef * terms.kl_backward(logp, tokens.pick(target), spec)
    if spec.has_kl_forward:
        assert target is not None
        added = added + spec.kl_forward_coef * terms.kl_forward(logp, tokens.pick(target), spec)
    return added, kl


def token_loss(
    spec: LossSpec, logp: Tensor, entropy: Tensor | None, tokens: Tokens
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Stage B: (sum of w*x, x per token, the sums of `fusedpg.metrics.SUM_NAMES`); differentiable in logp, entropy."""
    pick = tokens.pick
    all_logp, logp = logp, pick(logp)
    x, parts = policy_term(logp, tokens, spec)
    added, kl = kl_terms(logp, parts.d, tokens, spec)
    x = x + added
    h = None if entropy is None else pick(entropy)
    if spec.entropy_coef != 0.0:
        assert h is not None
        x = x - spec.entropy_coef * h
    x = pick(x)
    numerator = (tokens.w * x).sum()
    if tokens.obs_weights is not None:
        observed = torch.where(tokens.obs_weights != 0, -spec.obs_coef * all_logp, 0.0)
        numerator = numerator + (tokens.obs_weights * observed).sum()
        x = x + observed
    with torch.no_grad():
        sums = _sums(spec, tokens, numerator, parts, kl, h)
    return numerator, x, sums


def _band(spec: LossSpec, tokens: Tokens, parts: Parts) -> tuple[Tensor, Tensor]:
    """Where the ratio lies below and above the clip band, among the tokens that are kept."""
    r, adv = parts.d.exp(), parts.adv
    low, high = r < spec.clip_low, r > spec.clip_high
    if spec.surrogate == Surrogate.TOPR:
        low, high = low & (adv <= 0), high & (adv <= 0)
    if spec.level == Level.SEQUENCE:
        low, high = low | (parts.t < spec.token_clip[0]), high | (parts.t > spec.token_clip[1])
    kept = (tokens.w != 0) & ~parts.drop
    return low & kept, high & kept


def _sums(
    spec: LossSpec, tokens: Tokens, numerator: Tensor, parts: Parts, kl: Tensor, entropy: Tensor | None
) -> dict[str, Tensor]:
    """Sums and extrema over the selected tokens; `active` is the caller's, who knows the gradient."""
    selected, d, weight = tokens.w != 0, parts.d, parts.weight
    r = d.exp()
    zero = torch.zeros_like(numerator)
    total = lambda t: torch.where(selected, t, 0).sum(dtype=numerator.dtype)  # noqa: E731
    low, high = _band(spec, tokens, parts)
    corrected = selected & ~parts.missing
    om = None if weight is None else torch.where(corrected, weight, 0.0)
    return {
        "numerator": numerator,
        "tokens": total(selected),
        "ratio": total(r),
        "clip_low": total(low & (parts.adv < 0)),
        "clip_high": total(high & (parts.adv > 0)),
        "dual_clip": total(parts.dual),
        "out_of_band": total(low | high),
        "approx_kl": total(-d),
        "approx_kl_k3": total(r - 1 - d),
        "kl": total(kl),
        "entropy": zero if entropy is None else total(entropy),
        "is_weight": zero if om is None else total(om),
        "is_masked": zero if om is None else total(corrected & (om == 0)),
        "keep": total(~parts.drop),
        "active": zero,
        "is_tokens": zero if om is None else total(corrected),
        "ratio_min": _extremum(torch.where(selected, r, torch.inf), torch.inf, torch.amin),
        "ratio_max": _extremum(torch.where(selected, r, -torch.inf), -torch.inf, torch.amax),
        "is_weight_max": zero - torch.inf
        if om is None
        else _extremum(torch.where(corrected, om, -torch.inf), -torch.inf, torch.amax),
    }


def _extremum(values: Tensor, empty: float, reduce: object) -> Tensor:
    return reduce(values) if values.numel() else values.new_full((), empty)  # type: ignore[operator]
