"""What Liger 0.8.5 computes wrongly, measured against the right loss; this library copies none of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ..functional import policy_loss_from_logits
from .against_liger import DAPO, VERSION, Case, Head, clip_loss, denominator, liger_loss, make_head, unclamped
from .cases import PolicyBatch, make_policy_batch
from .rows import Difference, Row


def error_rows(backend: str) -> Iterator[Row]:
    """One row an error; the Triton kernels are not run, they need a GPU."""
    yield _minus_infinity(backend)
    yield _token_luspo(backend)
    yield _token_advantages(backend)
    yield _masked_correction(backend)
    yield _row("luspo", "triton, token level", Difference(), f"not run: {_luspo_gradient_shape()}")
    yield _row(
        "triton_grpo_loss",
        "",
        Difference(),
        "its kernels need a GPU, and certification runs on a CPU; the formulas are the chunked loss's. By default "
        "(inplace=True) the gradient overwrites the caller's logits",
        "not run",
    )


def _row(loss: str, option: str, found: Difference, note: str, verdict: str = "trainer errs") -> Row:
    return Row("liger", VERSION, loss, "", option, found.cases, found.value, found.gradient, verdict, note)


def _minus_infinity(backend: str) -> Row:
    """A masked -inf in the old log-probs: Liger multiplies by the mask, and inf*0 is NaN."""
    case = Case("dapo", DAPO)
    batch, head = make_head("ragged")
    old = torch.where(batch.mask, batch.logp_old, -torch.inf)
    batch = replace(batch, logp_old=old, advantages=-batch.advantages.abs())
    found = _differences(case, batch, head, backend)
    note = f"Liger's loss is {float(liger_loss(case, batch, head))}; a masked place is never read here"
    return _row("dapo", "-inf in a masked old log-prob", found, note)


def _token_luspo(backend: str) -> Row:
    """At token level the per-token losses are summed without the mask and divided by B*T."""
    spec = clip_loss("seq-mean-token-sum")
    case = Case("luspo", spec)
    batch, head = make_head("ragged")
    changed = replace(batch, logp_old=torch.where(batch.mask, batch.logp_old, batch.logp_old - 3.0))
    before, after = (float(liger_loss(case, b, head)) for b in (batch, changed))
    note = (
        f"no mask is applied: other old log-probs at masked places move Liger's loss from {before:.4f} to {after:.4f}"
    )
    return _row("luspo", "chunked, token level", _differences(case, batch, head, backend), note)


def _token_advantages(backend: str) -> Row:
    """(B, T) advantages broadcast to (B, B, T) as soon as a chunk holds more than one row."""
    case = Case("dapo", DAPO, {"chunk_size": 4})
    batch, head = make_head("ragged")
    dense = replace(batch, advantages=batch.token_advantages)
    theirs = liger_loss(case, dense, head)
    one_row = liger_loss(Case("dapo", DAPO), dense, head)
    note = (
        f"accepted without a word: {float(theirs):.4f} with four rows a chunk, {float(one_row):.4f} with one; "
        "pass `advantages` here"
    )
    found = Difference()
    found._note(abs(float(theirs) - float(one_row)) / abs(float(one_row)), 0.0)
    return _row("dapo", "advantages (B, T)", found, note)


def _masked_correction(backend: str) -> Row:
    """vespo's product of correction weights runs over masked places too."""
    case = Case("vespo", unclamped("vespo"), is_ratio="token")
    batch, head = make_head("ragged")
    weights = torch.where(batch.mask, 1.0, 0.5)
    theirs = float(liger_loss(case, batch, head, weights))
    ours = float(liger_loss(case, batch, head, torch.ones_like(weights)))
    found = Difference()
    found._note(abs(theirs - ours) / abs(ours), 0.0)
    note = f"a weight of 0.5 at masked places alone moves Liger's loss from {ours:.4f} to {theirs:.4f}"
    return _row("vespo", "correction at masked places", found, note)


def _luspo_gradient_shape() -> str:
    """What the token-level kernel reads: gradient (B, 1) with stride 1, at offset row + column."""
    mask = make_policy_batch("ragged").mask
    rows, columns = mask.shape
    gradient = mask.sum(-1, keepdim=True)
    last = (rows - 1) * gradient.stride(0) + (columns - 1) * gradient.stride(1)
    return (
        f"the backward kernel of a ({rows}, {columns}) batch reads offset {last} of a gradient that holds "
        f"{gradient.numel()} numbers (ops/grpo_loss.py: dloss is (B, 1), the grid is (B, L))"
    )


def _differences(case: Case, batch: PolicyBatch, head: Head, backend: str) -> Difference:
    """Ours against Liger's on one batch; no gradient is measured."""
    out = policy_loss_from_logits(
        case.spec,
        head.hidden @ head.weight.T + head.bias,
        head.targets,
        logp_old=batch.logp_old,
        sequence_advantages=batch.advantages,
        mask=batch.mask,
        normalizer=denominator(case, batch.mask),
        backend=backend,
    )
    found = Difference()
    theirs = float(liger_loss(case, batch, head))
    found._note(abs(float(out.loss) - theirs) / max(abs(float(out.loss)), 1e-30), 0.0)
    return found
