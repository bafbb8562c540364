"""TRL 1.16.0: `presets.trl` against the real `GRPOTrainer._compute_loss`, in fp64 on the values stored in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ..presets._trl import VERSION, with_entropy
from .cases import KINDS, make_policy_batch
from .rows import Difference, Row, not_installed
from .trl_cases import CLIPPED, COUNTS, KLS, LEVELS, LOSSES, Case, batch_for, cases, quadratic_entropy
from .trl_oracle import installed_version, load, stand_in

#: options that a loss has of its own
OWN = {
    **dict.fromkeys(CLIPPED, "epsilon, delta"),
    "cispo": "epsilon_high",
    "sapo": "temperatures",
    "vespo": "k, lambda",
}
ENTROPY_COEF = 0.3
_COUNTS_OF_MANY = COUNTS[2]
#: kinds of batches without ratios on the bounds of TRL's default band
_OFF_BOUNDS = tuple(kind for kind in KINDS if kind != "ties")


def rows(backend: str = "auto") -> Iterator[Row]:
    """A row for every loss, level and group of options; then what a trainer's option becomes outside the spec."""
    if load() is None:
        yield from not_installed("trl", VERSION, LOSSES, "pip install 'trl==1.16.0'")
        return
    for loss in LOSSES:
        for level in levels(loss):
            yield from table(loss, level, backend)
    yield from other_options(backend)
    yield from errors_of_trl(backend)


def levels(loss: str) -> tuple[str, ...]:
    """Levels of the ratio that a loss has."""
    return LEVELS[:1] if loss == "vespo" else LEVELS


def _row(difference: Difference, loss: str, reduction: str, option: str, note: str = "") -> Row:
    return difference.row("trl", installed_version(), loss, reduction, option, note)


def table(loss: str, level: str, backend: str) -> Iterator[Row]:
    """The rows of one loss at one level."""
    groups: dict[str, Difference] = {}
    reduction = note = ""
    for group, case in cases(loss, level):
        spec = case.spec
        case.compare(groups.setdefault(group, Difference()), backend, spec=spec)
        reduction, note = spec.reduction, spec.note
    for group, difference in groups.items():
        yield _row(difference, loss, reduction, f"{level} level: {group or OWN[loss]}", note)


# ------------------------------------------------------------------ options that are not part of the spec


def other_options(backend: str) -> Iterator[Row]:
    """What of TRL's options is passed beside the spec."""
    for loss in LOSSES:
        if loss not in ("grpo", "sapo"):
            yield _row(entropy_bonus(loss, backend), loss, "", f"entropy_coef={ENTROPY_COEF}, through with_entropy")
    yield _row(on_policy(backend), "all", "", "no old_per_token_logps: anchor='self'")
    yield _row(off_policy_mask(backend), "all", "", "off_policy_mask_threshold: advantages of 0")
    yield _row(top_entropy(backend), "all but vespo", "", "top_entropy_quantile: is_weights of 0")


def entropy_bonus(loss: str, backend: str) -> Difference:
    """TRL's own coefficient against a coefficient of each micro-batch."""
    difference = Difference()
    for turn, kind in enumerate(_OFF_BOUNDS):
        for kl in KLS:
            batch = batch_for(kind, kl)
            if batch is None:
                continue
            case = Case(loss, kl, batch, COUNTS[turn % len(COUNTS)], entropy_of=quadratic_entropy)
            spec = with_entropy(case.spec, ENTROPY_COEF, **case.counts.of(batch.mask))
            theirs = replace(case, options={**kl, "entropy_coef": ENTROPY_COEF})
            case.compare(difference, backend, spec=spec, against=theirs)
    return difference


def _every() -> Iterator[Case]:
    """Every loss at every level on every kind of batch, with TRL's defaults and a KL term."""
    for loss in LOSSES:
        for level in levels(loss):
            for kind in _OFF_BOUNDS:
                given = {**KLS[1], "importance_sampling_level": level}
                batch = batch_for(kind, given)
                if batch is not None:
                    yield Case(loss, given, batch, _COUNTS_OF_MANY)


def on_policy(backend: str) -> Difference:
    """Without old log-probs TRL takes the policy's own, detached."""
    difference = Difference()
    for case in _every():
        replace(case, on_policy=True).compare(difference, backend)
    return difference


def off_policy_mask(backend: str) -> Difference:
    """The sequences that TRL drops, with advantages of 0 here."""
    loaded = load()
    assert loaded is not None
    keep_of, difference = loaded[0].get_off_policy_mask, Difference()
    for case in _every():
        batch = case.batch
        clean = batch.cleaned().to(torch.float64)
        keep = keep_of(clean.advantages[:, None], clean.logp, clean.logp_old, batch.mask.double(), 0.01)[:, 0]
        advantages = torch.where(keep != 0, batch.advantages, 0.0)
        theirs = replace(case, options={**case.options, "off_policy_mask_threshold": 0.01})
        replace(case, batch=replace(batch, advantages=advantages)).compare(difference, backend, against=theirs)
    return difference


def top_entropy(backend: str) -> Difference:
    """The tokens that TRL drops, with a weight of 0 here."""
    difference = Difference()
    for case in _every():
        if case.loss == "vespo":
            continue  # its product takes the weights
        case = replace(case, entropy_of=quadratic_entropy)
        clean = case.batch.cleaned().to(torch.float64)
        entropy = quadratic_entropy(clean.logp, clean.mask)
        fake = stand_in(case.loss, {}, case.counts, clean.logp, entropy)
        keep = fake.get_high_entropy_mask(entropy, clean.mask.long(), 0.6)
        theirs = replace(case, options={**case.options, "top_entropy_quantile": 0.4})
        case.compare(difference, backend, is_weights=keep.float(), against=theirs)
    return difference


# ------------------------------------------------------------------ numbers of TRL that are not copied


def errors_of_trl(backend: str) -> Iterator[Row]:
    """Known wrong numbers of TRL, on the batches that show them."""
    difference = Difference()
    bounds = {"vllm_importance_sampling_clip_max": 0.9, "vllm_importance_sampling_mode": "token_truncate"}
    vllm = {"use_vllm": True, **bounds}
    Case("vespo", vllm, make_policy_batch("ragged")).compare(difference, backend)
    yield _error(
        difference,
        "vespo",
        "vLLM token_truncate, clip_max=0.9",
        "a masked token's weight, clip(1), enters the sequence's product, so the loss depends on the padding",
    )
    for loss in ("dapo", "sapo"):
        difference = Difference()
        case = Case(loss, {}, make_policy_batch("ratio-200"))
        _in_fp32(case, backend, difference)
        yield _error(
            difference,
            loss,
            "log-ratio 200 in fp32",
            "exp overflows in a token without a gradient, and 0*inf makes the whole gradient of that row NaN",
        )
    difference = Difference()
    _in_fp32(Case("cispo", {}, make_policy_batch("inf-masked")), backend, difference, cleaned=False)
    yield _error(
        difference,
        "cispo",
        "inf and NaN at masked places",
        "masked values are multiplied by 0, so one that is not finite makes the loss NaN",
    )


def _in_fp32(case: Case, backend: str, difference: Difference, cleaned: bool = True) -> None:
    """The comparison with TRL in the precision that it trains in."""
    batch = case.batch.cleaned() if cleaned else case.batch
    spec, by = case.spec, case.normalizer(case.spec)
    difference.add(
        spec,
        case.batch,
        lambda logp: case.ours(spec, logp, by, backend),
        lambda logp: case.theirs(logp, batch)[0],
        batch,
        by,
    )


def _error(difference: Difference, loss: str, option: str, note: str) -> Row:
    row = _row(difference, loss, "", option, note)
    return row if difference.within else replace(row, verdict="trainer errs")
