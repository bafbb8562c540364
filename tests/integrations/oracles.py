"""What tests of the adapters share: batches, fp64 oracles over the same tensors, and comparisons."""

from dataclasses import dataclass

import torch

from fusedpg.certify.cases import PolicyBatch, make_policy_batch
from fusedpg.certify.transcription import Fields

#: what a trainer's micro-batch looks like: ragged, with holes, with a row without a token
KINDS = ("ragged", "holes", "masked-row")
NAMES = ("logp", "logp_old", "logp_ref", "logp_rollout")


@dataclass
class Lists:
    """The rows of a batch as ragged 1-D tensors, one a sample; every tensor of NAMES, `advantages` and `mask`."""

    logp: list
    logp_old: list
    logp_ref: list
    logp_rollout: list
    advantages: list
    mask: list

    @property
    def cu_seqlens(self):
        return torch.tensor([0, *(len(t) for t in self.logp)]).cumsum(0).int()


def batch(kind: str = "holes", per_token: bool = False, empty: bool = False) -> PolicyBatch:
    """Finite rubbish at masked places; with `empty` no place is selected."""
    made = make_policy_batch(kind)
    if empty:
        made.mask[:] = False
    if not per_token:
        made.token_advantages[:] = made.advantages[:, None]
    return made


def lists(b: PolicyBatch) -> Lists:
    """Rows cut after their last selected place: holes stay, a masked row is an empty sample."""
    lengths = [int(m.nonzero().max()) + 1 if m.any() else 0 for m in b.mask]
    cut = lambda t: [row[:n].clone() for row, n in zip(t, lengths, strict=True)]  # noqa: E731
    return Lists(*(cut(getattr(b, name)) for name in NAMES), cut(b.token_advantages), cut(b.mask))


def fields(b: PolicyBatch, logp: torch.Tensor, obs: torch.Tensor | None = None, entropy=None) -> Fields:
    """The fp64 fields of a formula; `logp` is the leaf."""
    pick = lambda t, on=b.mask: torch.where(on, t.double(), 0.0)  # noqa: E731
    obs = torch.zeros_like(b.mask) if obs is None else obs
    return Fields(
        logp=pick(logp, b.mask | obs),
        logp_old=pick(b.logp_old),
        logp_ref=pick(b.logp_ref),
        logp_rollout=pick(b.logp_rollout),
        advantages=pick(b.token_advantages),
        mask=b.mask.double(),
        obs_mask=obs.double(),
        entropy=pick(-0.3 * logp if entropy is None else entropy),
    )


def truth(b: PolicyBatch, formula, obs=None, **counts):
    """(value, (B, T) gradient) of a formula in fp64."""
    leaf = b.logp.double().requires_grad_()
    value = formula(fields(b, leaf, obs), **counts)
    (grad,) = torch.autograd.grad(value, leaf)
    return value.detach(), grad


def rows_grad(tensors, like: torch.Tensor) -> torch.Tensor:
    """Gradients of ragged samples as (B, T)."""
    full = torch.zeros_like(like)
    for row, t in zip(full, tensors, strict=True):
        row[: len(t)] = t.grad
    return full


def assert_same(value, grad, want, want_grad, limit: float = 1e-5) -> None:
    """Relative to the larger of 1 and the truth's own size."""
    value, scale = value.detach(), max(1.0, float(want.abs()))
    assert abs(float(value) - float(want)) <= limit * scale, (float(value), float(want))
    size = max(float(want_grad.abs().max()), 1e-3)
    worst = float((grad.double() - want_grad).abs().max())
    assert worst <= limit * size, (worst, size)
