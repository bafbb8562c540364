"""NeMo-RL's `LossFunction` protocol, from log-probs and from logits, under global counts."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...integrations.nemo_rl import FusedClippedPGLoss
from ...presets._nemo_rl import VERSION
from ..cases import PolicyBatch
from ..rows import Row
from ..transcribed_nemo_rl import cases
from ..transcription import Case
from .batches import Outcome, differentiated, parts_of, summed, truth, truth_of_logits, two_way
from .compare import TRANSCRIBED, Largest, rows_of_steps, stand_in

CASES = [case for case in cases() if case.counts is not None]
INTERFACES = "nemo_rl.algorithms.loss.interfaces"


class LossType(enum.Enum):
    """By NeMo-RL's contract."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossInputType(enum.Enum):
    """By NeMo-RL's contract."""

    LOGIT = "logit"
    LOGPROB = "logprob"


class MetricNormalizer(enum.Enum):
    """By NeMo-RL's contract."""

    TOKENS = "tokens"
    SEQUENCES = "sequences"
    NONE = "none"


MEMBERS = {member.__name__: member for member in (LossType, LossInputType, MetricNormalizer)}


def config(case: Case) -> dict[str, Any]:
    """NeMo-RL's config of a case; a case's name is a flag."""
    cfg = dict(case.options) if case.loss == "clipped_pg" else {**case.options, case.loss: True}
    if cfg.get("sequence_level_importance_ratios"):
        cfg.setdefault("token_level_loss", False)
    return cfg


def data_of(b: PolicyBatch) -> dict[str, Tensor]:
    """(B, S) with a first place that nothing scores; the mask split over tokens and samples."""
    shift = lambda t, fill=7.0: torch.cat([torch.full_like(t[:, :1], fill), t], 1)  # noqa: E731
    return {
        "input_ids": torch.zeros(b.mask.shape[0], b.mask.shape[1] + 1, dtype=torch.int64),
        "advantages": shift(b.token_advantages),
        "prev_logprobs": shift(b.logp_old),
        "generation_logprobs": shift(b.logp_rollout),
        "reference_policy_logprobs": shift(b.logp_ref),
        # a row without a valid token is left out by its sample's mask
        "token_mask": shift((b.mask | ~b.mask.any(1, keepdim=True)).float(), 1.0),
        "sample_mask": b.mask.any(1).float(),
    }


def counts(b: PolicyBatch, factor: float = 1.0) -> dict[str, Any]:
    """The global counts that NeMo-RL hands over."""
    return {"global_valid_toks": b.mask.sum() * factor, "global_valid_seqs": b.mask.any(1).sum() * factor}


def step(case: Case, b: PolicyBatch, backend: str = "auto", input_type: str = "logprob") -> Outcome:
    """The sum of micro-batches; the last row of logits scores nothing."""
    loss_fn = FusedClippedPGLoss(config(case), input_type=input_type, backend=backend)
    given = counts(b, 3.0)

    def of_logprobs(part: PolicyBatch) -> Outcome:
        leaf = part.logp.requires_grad_()
        loss, _ = loss_fn(data_of(part), **given, next_token_logprobs=leaf)
        return differentiated(loss, leaf)

    def of_logits(part: PolicyBatch) -> Outcome:
        rows = two_way(part.logp)
        leaf = torch.cat([rows, torch.full_like(rows[:, :1], torch.nan)], 1).requires_grad_()
        loss, _ = loss_fn(data_of(part), **given, logits=leaf)
        found = differentiated(loss, leaf)
        return Outcome(found.loss, found.grad[:, :-1])

    return summed(map(of_logits if input_type == "logit" else of_logprobs, parts_of(b)))


def want(case: Case, b: PolicyBatch) -> Outcome:
    """The unsplit step, by the log-probs."""
    given: dict[str, Any] = {k: float(v) for k, v in counts(b, 3.0).items()}
    return truth(b, case.formula, **given)


def want_of_logits(case: Case, b: PolicyBatch) -> Outcome:
    """The unsplit step, by the logits."""
    return truth_of_logits(b, case, **{k: float(v) for k, v in counts(b, 3.0).items()})


def step_of_logits(case: Case, b: PolicyBatch, backend: str = "auto") -> Outcome:
    """A step under `input_type="logit"`."""
    return step(case, b, backend, "logit")


def rows(backend: str = "auto") -> Iterator[Row]:
    """One row a flag, from log-probs; one of all from logits."""
    with stand_in(INTERFACES, **MEMBERS):
        yield from rows_of_steps("nemo_rl", VERSION, CASES, step, want, backend)
        largest = Largest()
        largest.take(CASES, step_of_logits, want_of_logits, backend)
        yield largest.row("nemo_rl", VERSION, "all, from logits", "", TRANSCRIBED)
