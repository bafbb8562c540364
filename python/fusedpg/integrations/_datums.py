"""Tinker's data: one sequence each, its tensors in `loss_fn_inputs`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..spec import LossSpec
from ._shared import advantages_of, boundaries, packed


@dataclass(frozen=True)
class Datums:
    """The data of one call, packed; constants are on the log-probs' device."""

    logp: Tensor
    cu_seqlens: Tensor
    advantages: Tensor
    mask: Tensor | None
    obs_mask: Tensor | None
    logp_rollout: Tensor | None
    logp_old: Tensor | None
    logp_ref: Tensor | None

    def fields(self, spec: LossSpec | None) -> dict[str, Any]:
        """Keywords of a loss; None is a body over `LossContext`, which takes all of them."""
        mask = torch.ones_like(self.logp, dtype=torch.bool) if self.mask is None else self.mask
        advantages = {"advantages": self.advantages}
        if spec is not None:
            advantages = advantages_of(spec, self.advantages, mask, self.cu_seqlens)
        fields = {
            "logp_old": self.logp_old,
            "logp_ref": self.logp_ref,
            "logp_rollout": self.logp_rollout,
            "mask": mask,
            "obs_mask": self.obs_mask if spec is None or spec.obs_coef else None,
            "cu_seqlens": self.cu_seqlens,
        }
        return {**fields, **advantages}


def read_datums(data: Sequence[Any], logprobs_list: Sequence[Tensor]) -> Datums:
    """Pack a call of `forward_backward_custom`.

    Each datum's `loss_fn_inputs` holds `advantages`, `logprobs` (the sampler's; also the ratio's denominator unless
    `old_logprobs` says otherwise) and optionally `mask`, `obs_mask`, `ref_logprobs`, each of the length of its
    log-probs. Values may be tensors, sequences, or the SDK's TensorData.

    Raises:
        ValueError: a field that is missing, that only some of the data have, or whose length is not that of its
            log-probs.
    """
    if len(data) != len(logprobs_list):
        raise ValueError(f"logprobs_list: expected one tensor a datum, {len(data)}; got {len(logprobs_list)}")
    logp = packed(logprobs_list, "logprobs_list")
    lengths = [t.shape[0] for t in logprobs_list]

    def field(name: str, required: bool = False) -> Tensor | None:
        values = [_inputs(datum).get(name) for datum in data]
        missing = [i for i, value in enumerate(values) if value is None]
        if len(missing) == len(values) and not (required and values):
            return None
        if missing:
            raise ValueError(f"data: expected loss_fn_inputs[{name!r}] in every datum; got none at {missing[0]}")
        tensors = [_tensor(value, logp.device) for value in values]
        for i, (t, length) in enumerate(zip(tensors, lengths, strict=True)):
            if tuple(t.shape) != (length,):
                raise ValueError(
                    f"data: expected loss_fn_inputs[{name!r}] of shape ({length},) at {i}, as its log-probs; got "
                    f"{tuple(t.shape)}"
                )
        return torch.cat(tensors)

    sampled, old = field("logprobs"), field("old_logprobs")
    advantages = field("advantages", required=True)
    if not data:
        sampled = torch.zeros_like(logp.detach())
    return Datums(
        logp=logp,
        cu_seqlens=boundaries(lengths, logp.device),
        advantages=torch.zeros_like(logp.detach()) if advantages is None else advantages.to(logp.dtype),
        mask=field("mask"),
        obs_mask=field("obs_mask"),
        logp_rollout=sampled,
        logp_old=sampled if old is None else old,
        logp_ref=field("ref_logprobs"),
    )


def _inputs(datum: Any) -> Mapping[str, Any]:
    inputs: Mapping[str, Any] = datum["loss_fn_inputs"] if isinstance(datum, Mapping) else datum.loss_fn_inputs
    return inputs


def _tensor(value: Any, device: torch.device) -> Tensor:
    convert = getattr(value, "to_torch", None)
    tensor: Tensor = convert() if convert is not None else torch.as_tensor(value)
    return tensor.detach().to(device)
