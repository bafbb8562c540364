"""A tiny policy, ragged batches for any loss, and their splits at sequence boundaries. Imported by worker processes."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import fusedpg
from fusedpg.spec import REDUCTIONS, LossSpec

VOCAB = 11
LENGTHS = (5, 1, 6, 0, 3, 2, 4, 3)
#: knobs that a loss has no default for, or without which a small batch never meets its bounds
KNOBS: dict[str, dict[str, Any]] = {"dro": {"beta": 0.3}, "dppo_tv": {"delta": 0.02}, "dppo_kl": {"delta": 0.01}}
CONTEXT = SimpleNamespace(name_or_path="toy", max_response_length=7, backend="reference")


class Policy(nn.Module):
    """Token ids to logits, fp64; one parameter is never used."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        rand = lambda *s: torch.randn(*s, generator=g, dtype=torch.float64)  # noqa: E731
        self.table = nn.Parameter(rand(VOCAB, 4))
        self.head = nn.Parameter(rand(4, VOCAB))
        self.unused = nn.Parameter(rand(3))

    def forward(self, batch: Any) -> Tensor:
        ids = batch["input_ids"] if isinstance(batch, dict) else batch.input_ids
        return self.table[ids].tanh() @ self.head


def spec_of(name: str, reduction: str) -> LossSpec:
    knobs = {"reduction": reduction, **KNOBS.get(name, {})}
    if reduction == "seq-mean-token-sum-norm":
        knobs["max_tokens"] = 7
    return fusedpg.loss_spec(name, **knobs)


ADDITIVE = [name for name, spec in fusedpg.CATALOGUE.items() if not spec.batch_global]
ALL = list(itertools.product(ADDITIVE, REDUCTIONS))


def make_batch(spec: LossSpec | None = None, *, packed: bool = False, seed: int = 0, policy: nn.Module | None = None):
    """Eight sequences, one without tokens, one fully masked; streams lie around the policy's own log-probs."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(LENGTHS)
    shape = (int(lengths.sum()),) if packed else (len(LENGTHS), max(LENGTHS))
    rand = lambda *s: torch.randn(*s, generator=g, dtype=torch.float64)  # noqa: E731
    batch: dict[str, Any] = {
        "input_ids": torch.randint(0, VOCAB, shape, generator=g),
        "targets": torch.randint(0, VOCAB, shape, generator=g),
    }
    mask = torch.rand(shape, generator=g) > 0.2
    if packed:
        batch["cu_seqlens"] = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        mask[: LENGTHS[0]] = True
        mask[LENGTHS[0] : LENGTHS[0] + 1] = False
    else:
        mask &= torch.arange(shape[1])[None] < lengths[:, None]
        mask[1] = False
    with torch.no_grad():
        logits = (policy or Policy())(batch)
    logp = fusedpg.token_logprobs(logits, batch["targets"], backend="reference").logp
    batch |= {
        "mask": mask,
        "logp_old": logp + 0.3 * rand(*shape),
        "logp_ref": logp + 0.3 * rand(*shape),
        "logp_rollout": logp + 0.2 * rand(*shape),
        "sequence_advantages": rand(len(LENGTHS)),
    }
    if spec is not None and spec.obs_coef:
        batch["obs_mask"] = torch.rand(shape, generator=g) > 0.6
    return batch


def split(batch: dict[str, Any], cuts: list[int]) -> list[dict[str, Any]]:
    """The batch cut before the sequences `cuts`."""
    parts = []
    for first, last in itertools.pairwise([0, *cuts, len(LENGTHS)]):
        cu = batch.get("cu_seqlens")
        rows = slice(first, last) if cu is None else slice(int(cu[first]), int(cu[last]))
        part = {k: v[rows] for k, v in batch.items() if k not in ("cu_seqlens", "sequence_advantages")}
        part["sequence_advantages"] = batch["sequence_advantages"][first:last]
        if cu is not None:
            part["cu_seqlens"] = cu[first : last + 1] - cu[first]
        parts.append(part)
    return parts


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


def whole_gradients(objective: Any, batch: Any, seed: int = 0) -> tuple[Tensor, list[Tensor | None], Any]:
    """Loss, gradients and metrics of the unsplit batch by plain autograd."""
    model = Policy(seed)
    loss, metrics = objective(model, batch)
    loss.backward()
    return loss.detach(), gradients(model), metrics


def assert_same(got: list[Tensor | None], want: list[Tensor | None], label: str = "") -> None:
    for g, w in zip(got, want, strict=True):
        assert (g is None) == (w is None), f"{label}: a gradient that only one of the two has"
        if g is not None:
            torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-11, msg=lambda m: f"{label}: {m}")


def mean_loss(model: nn.Module, batch: Any) -> Any:
    """A sample mean over rows: `Reduction.MEAN`."""
    loss = torch.logsumexp(model(batch), -1).mean()
    return loss, {"toy/loss": loss.detach()}


def body_loss(loss: fusedpg.ResolvedLoss, model: nn.Module, batch: Any) -> Any:
    """A loss over `LossContext`; `step_tokens` and `step_sequences` of the batch are those of the whole step."""
    fields = {k: v for k, v in batch.items() if k not in ("input_ids", "targets")}
    result = loss.from_logits(model(batch), batch["targets"], **fields)
    return result.loss, {"toy/loss": result.loss.detach()}
