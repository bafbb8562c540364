"""polgrad 0.2.1 (declarative references of ten algorithms): from log-probs, from logits and packed.

polgrad computes in fp64 on the values that this library gets in fp32. It bounds no log-ratio, so the catalogue's
clamps are lifted where a batch reaches them; it refuses rows without a token, so batches with such rows stay out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..functional import policy_loss, policy_loss_from_logits
from ..losses import loss_spec
from ..outputs import LossOutput
from ..spec import INF, LossSpec
from .cases import PolicyBatch, make_policy_batch
from .rows import Difference, Row, not_installed

VERSION = "0.2.1"
FORMS = ("logp", "logits", "packed")
#: Dr. GRPO's fixed generation budget, which polgrad leaves to the caller
NORM_LEN = 16
_VOCABULARY = 11
_SHAPES, _CASES = ((4, 8), (2, 12)), 12
_KINDS = ("ragged", "holes", "inf-masked", "ratio-30", "ratio-200")


@dataclass(frozen=True)
class Entry:
    """The catalogue's name of one of polgrad's algorithms, with the knobs that its registry pins."""

    loss: str
    knobs: dict[str, Any] = field(default_factory=dict)
    #: changes of polgrad's own configuration
    theirs: dict[str, Any] = field(default_factory=dict)
    option: str = ""

    def spec(self) -> LossSpec:
        """The same loss here, with the clamp that polgrad lacks."""
        return loss_spec(self.loss, **self.knobs)


ENTRIES = {
    "ppo": Entry("ppo_clip"),
    "dapo": Entry("dapo"),
    "dr_grpo": Entry("dr_grpo", {"max_tokens": NORM_LEN}, {"norm_len": NORM_LEN}, f"norm_len={NORM_LEN}"),
    "grpo": Entry("grpo", option="kl=k3 0.04"),
    "gspo": Entry("gspo"),
    "gspo_token": Entry("gspo_token"),
    "cispo": Entry("cispo"),
    "reinforce_pp": Entry("ppo_clip", {"reduction": "seq-mean-token-mean"}),
    "rloo": Entry("reinforce", {"reduction": "seq-mean-token-sum"}),
    "grpo_tis": Entry("grpo", {"is_correction": "truncate", "is_high": 10.0}, option="token TIS 10, kl=k3 0.04"),
}


def reference(name: str) -> Any:
    """polgrad's configuration of an entry."""
    from polgrad import registry

    return replace(registry.get(name).loss, **ENTRIES[name].theirs)


def rows(backend: str = "auto") -> Iterator[Row]:
    """One row an entry and a form, and one for each of polgrad's other options."""
    if find_spec("polgrad") is None:
        yield from not_installed("polgrad", VERSION, ENTRIES, "pip install polgrad==0.2.1")
        return
    for name, entry in ENTRIES.items():
        for form in FORMS:
            found = difference(entry.spec(), reference(name), form, backend)
            yield found.row(
                "polgrad", VERSION, name, entry.spec().reduction, ", ".join(filter(None, (form, entry.option)))
            )
    for option, spec, config in _options():
        found = difference(spec, config, "logp", backend)
        yield found.row("polgrad", VERSION, "ppo", spec.reduction, f"logp, {option}")


def _options() -> Iterator[tuple[str, LossSpec, Any]]:
    """(name, spec, polgrad's configuration) of what no entry of its registry sets."""
    from polgrad import KLEstimator, KLLossConfig
    from polgrad.losses import ISCorrectionConfig

    base = reference("ppo")
    for kind in KLEstimator:
        knobs: dict[str, Any] = {"kl": kind.value, "kl_coef": 0.1}
        yield f"kl={kind.value} 0.1", loss_spec("ppo_clip", **knobs), replace(base, kl=KLLossConfig(kind, 0.1))
    yield (
        "dual clip 3",
        loss_spec("ppo_dual_clip", dual_clip=3.0),
        replace(base, clip=replace(base.clip, ratio_cap=3.0)),
    )
    yield (
        "sequence TIS 2",
        loss_spec("ppo_clip", is_correction="truncate", is_level="sequence", is_high=2.0),
        replace(base, is_correction=ISCorrectionConfig(2.0, "sequence")),
    )


def callable_of(spec: LossSpec, backend: str = "auto") -> Callable[..., Tensor]:
    """`policy_loss` in polgrad's calling convention, for `polgrad.testing.assert_conforms`."""

    def loss(*, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
        return policy_loss(
            spec,
            logprobs,
            logp_old=old_logprobs,
            sequence_advantages=advantages,
            mask=response_mask,
            backend=backend,
        ).loss

    return loss


def batches() -> Iterator[PolicyBatch]:
    """polgrad's own random batches, then those of `cases`, in fp32 (ties in fp64); every row has a token."""
    from polgrad.testing import random_batches

    for drawn in random_batches(_CASES, _SHAPES, seed=7):
        v = {name: t if t.dtype == torch.bool else t.float() for name, t in drawn.items()}
        yield PolicyBatch(
            "polgrad",
            v["logprobs"],
            v["old_logprobs"],
            v["ref_logprobs"],
            v["rollout_logprobs"],
            v["advantages"],
            v["advantages"][:, None].expand_as(v["logprobs"]).contiguous(),
            v["response_mask"],
        )
    for kind in _KINDS:
        yield make_policy_batch(kind)
    # a ratio on a bound falls on the same side of it only in the same precision
    yield make_policy_batch("ties").to(torch.float64)


def difference(spec: LossSpec, config: Any, form: str, backend: str = "auto") -> Difference:
    """The largest differences of one loss in one form."""
    found = Difference()
    for number, batch in enumerate(batches()):
        far = batch.kind.startswith("ratio-")
        if far and (spec.has_kl or form == "logits"):
            continue  # k3 of such log-probs leaves fp32, and no softmax has them
        if batch.kind == "ties" and (form == "logits" or backend == "triton"):
            continue  # a softmax in fp32 has no exact ties, and Triton no fp64
        unbounded = spec.replace(log_ratio_clamp=(-INF, INF), kl_log_ratio_clamp=(-INF, INF))
        _compare(found, unbounded if far else spec, config, batch, form, number, backend)
    return found


def _compare(
    found: Difference, spec: LossSpec, config: Any, batch: PolicyBatch, form: str, number: int, backend: str
) -> None:
    from polgrad.losses import policy_loss as their_loss

    wide = batch.to(torch.float64)
    targets = torch.randint(0, _VOCABULARY, batch.mask.shape, generator=torch.Generator().manual_seed(number))
    start = batch
    if form == "logits":
        start = replace(batch, logp=_logits(batch.logp, targets, number))

    def theirs(leaf: Tensor) -> Tensor:
        logp = leaf
        if form == "logits":
            logp = leaf.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        loss: Tensor = their_loss(
            config,
            logprobs=logp,
            old_logprobs=wide.logp_old,
            advantages=wide.advantages,
            response_mask=wide.mask,
            ref_logprobs=wide.logp_ref,
            rollout_logprobs=wide.logp_rollout,
        ).loss
        return loss

    def ours(leaf: Tensor) -> LossOutput:
        return _ours(spec, batch, leaf, targets, form, backend)

    found.add(spec, start, ours, theirs, start.to(torch.float64))


def _ours(spec: LossSpec, batch: PolicyBatch, leaf: Tensor, targets: Tensor, form: str, backend: str) -> LossOutput:
    streams = {"logp_old": batch.logp_old, "logp_ref": batch.logp_ref, "logp_rollout": batch.logp_rollout}
    if form == "logits":
        args: dict[str, Any] = {**streams, "sequence_advantages": batch.advantages, "mask": batch.mask}
        return policy_loss_from_logits(spec, leaf, targets, backend=backend, **args)
    if form == "logp":
        args = {**streams, "sequence_advantages": batch.advantages, "mask": batch.mask}
        return policy_loss(spec, leaf, backend=backend, **args)
    on = batch.mask
    boundaries = torch.nn.functional.pad(on.sum(1).cumsum(0), (1, 0))
    packed: dict[str, Any] = {name: t[on] for name, t in streams.items()}
    out = policy_loss(
        spec, leaf[on], sequence_advantages=batch.advantages, cu_seqlens=boundaries, backend=backend, **packed
    )
    return replace(out, per_token=torch.zeros_like(batch.logp).masked_scatter(on, out.per_token))


def _logits(logp: Tensor, targets: Tensor, seed: int) -> Tensor:
    """(B, T, V) logits whose log-softmax at `targets` is `logp` (up to rounding)."""
    noise = torch.randn(*logp.shape, _VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    target = torch.nn.functional.one_hot(targets, _VOCABULARY).bool()
    rest = noise.masked_fill(target, -torch.inf).logsumexp(-1)
    finite = torch.where(logp.isfinite(), logp, -1.0).double()
    # p = e^z / (e^z + e^rest)  =>  z = rest + log p - log(1 - p)
    own = rest + finite - torch.log(-torch.expm1(finite))
    return torch.where(target, own[..., None], noise).float()
