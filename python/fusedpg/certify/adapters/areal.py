"""AReaL's `loss_fn` over packed micro-batches, weighed as its engine weighs them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...integrations.areal import actor_loss, loss_weight
from ...presets._areal import VERSION
from .. import own_code
from ..cases import PolicyBatch
from ..rows import Row
from ..transcribed_areal import CASES
from ..transcription import Case
from .batches import NAMES, Outcome, differentiated, lists, parts_of, summed, truth
from .compare import OWN_CODE, TRANSCRIBED, rows_of_steps

#: RejectionSamplingConfig, its defaults
REJECTION = {"level": "token", "action": "mask", "metric": "ratio", "agg": "mean", "upper": 5.0, "lower": None}


def micro_batch(b: PolicyBatch) -> tuple[Tensor, dict[str, Any]]:
    """(leaf, input_data), packed with labels rolled by -1: a prompt token in front, the last place wraps around."""
    ls = lists(b)
    ones = torch.ones(1)
    pack = lambda rows, first: torch.cat([torch.cat([first, row]) for row in rows])  # noqa: E731
    packed = {name: pack(getattr(ls, name), ones * 5).roll(-1) for name in NAMES}
    lengths = torch.tensor([len(t) + 1 for t in ls.logp])
    data = {
        "logprobs": packed["logp_rollout"],
        "prox_logp": packed["logp_old"],
        "advantages": pack(ls.advantages, ones * 7).roll(-1),
        "loss_mask": pack([m.float() for m in ls.mask], ones * 0).roll(-1),
        "cu_seqlens": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int(),
    }
    return packed["logp"].requires_grad_(), data


def in_rows(packed: Outcome, data: dict[str, Any], like: Tensor) -> Outcome:
    """With the packed gradient as (B, T)."""
    full = torch.zeros_like(like)
    bounds = data["cu_seqlens"].tolist()
    for row, start, end in zip(full, bounds[:-1], bounds[1:], strict=True):
        row[: end - start - 1] = packed.grad[start : end - 1]
    return Outcome(packed.loss, full)


def step(case: Case, b: PolicyBatch, backend: str = "auto") -> Outcome:
    """The engine's sum of micro-batches, each times its share of the step's weight."""
    fn = actor_loss(case.loss, backend=backend, **case.options)
    total = float(b.mask.sum())

    def one(part: PolicyBatch) -> Outcome:
        leaf, data = micro_batch(part)
        loss = fn(leaf, None, data, vocab_min_logits=None, vocab_max_logits=None) * (loss_weight(data) / total)
        return in_rows(differentiated(loss, leaf), data, part.logp)

    return summed(map(one, parts_of(b)))


def own(case: Case, b: PolicyBatch) -> Outcome:
    """AReaL's own function over the unsplit step, packed, in fp64 but where it casts to fp32 itself."""
    code = own_code.areal()
    assert code is not None
    leaf, data = micro_batch(b.to(torch.float64))
    options = {k: v for k, v in case.options.items() if k != "use_decoupled_loss"}
    given = {"advantages": data["advantages"], "loss_mask": data["loss_mask"].bool(), "cu_seqlens": data["cu_seqlens"]}
    if case.loss == "sapo":
        taus = {"tau_pos": options.pop("sapo_tau_pos", 1.0), "tau_neg": options.pop("sapo_tau_neg", 1.05)}
        loss, _ = code.sapo_loss_fn(leaf, data["prox_logp"], **given, **taus, **options)
    else:
        if options.get("rejection_sampling") is not None:
            options["rejection_sampling"] = SimpleNamespace(**{**REJECTION, **options["rejection_sampling"]})
        options.setdefault("eps_clip", 0.2)
        loss, _ = code.ppo_actor_loss_fn(leaf, data["prox_logp"], data["logprobs"], **given, **options)
    return in_rows(differentiated(loss, leaf), data, b.logp.double())


def want(case: Case, b: PolicyBatch) -> Outcome:
    """The mean over the step's tokens, by the transcription."""
    return truth(b, case.formula, tokens=float(b.mask.sum()))


def rows(backend: str = "auto") -> Iterator[Row]:
    """One row a loss."""
    beside = (want, TRANSCRIBED) if own_code.areal() is None else (own, OWN_CODE)
    yield from rows_of_steps("areal", VERSION, CASES, step, beside[0], backend, beside[1])
