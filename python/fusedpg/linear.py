"""The public ops from hidden states and the output head: no logits of the batch's size are ever allocated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear as project

from . import dispatch, linear_ops, rows
from .batch import Batch, flat_mask, make_batch
from .functional import _loss_of_logp
from .linear_checks import check_head, check_workspace
from .linear_walk import Head
from .outputs import LogprobOutput, LossOutput, check_metrics, make_logprobs, make_output
from .spec import LossSpec


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_entropy: bool = False,
    workspace_mib: float | None = None,
    backend: str = "auto",
) -> LogprobOutput:
    """Log-probability (and entropy) of each target from hidden states: one matrix product forward, three backward.

    Equals `token_logprobs(torch.nn.functional.linear(hidden.float(), weight.float(), bias), targets, ...)` within the
    workspace's memory. Under `torch.no_grad()`, or with inputs that need no gradient, it does the forward product
    alone: what scoring under an old or a reference policy needs.

    Args:
        hidden: (N, D) or (B, T, D), fp32, bf16, fp16 or fp64, any strides; differentiable. `hidden[i]` scores
            `targets[i]`: nothing is shifted.
        weight: the output head (V, D), any of those dtypes, also another than hidden's; differentiable.
        targets: token ids (N,) or (B, T), int32 or int64. Masked places may hold anything, -100 included.
        bias: (V,), differentiable.
        mask: targets' shape, bool or weights in [0, 1]; rows where it is 0 enter no product, their results are 0 and so
            are their gradients.
        temperature, softcap, logit_scale, return_entropy: as in `token_logprobs`.
        workspace_mib: MiB for the logits tile and its neighbours. None takes an eighth of the free memory, between 64
            and 512 MiB (2 GiB on a GPU).
        backend: "auto", "cpu", "triton" or "reference"; the reference allocates all logits.

    Returns:
        `LogprobOutput(logp, entropy, backend)`, fp32 (fp64 where hidden or weight is). A row's log-prob has the same
        bits alone and in any batch.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype, shape, device or value, by name.
        RuntimeError: a backend named explicitly that cannot run here, with the reason and the fix.

    References:
        Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, arXiv:2411.09009, and Hsu et al., Liger
        Kernel, arXiv:2410.10989: losses whose logits never exist at once.
    """
    hidden, weight, bias = check_head(hidden, weight, bias, targets)
    compute = Head(hidden, weight, bias).compute
    logit_map = rows.check_logit_map(compute, targets, temperature, softcap, logit_scale)
    workspace = check_workspace(workspace_mib)
    rows_mask = flat_mask(mask, targets, "targets")
    active = None if rows_mask is None else rows_mask != 0
    ids = rows.check_ids(targets, active, weight.shape[0])
    name = dispatch.resolve(backend, hidden.device, compute)
    if name == "reference":
        logits = all_logits(hidden, weight, bias, active)
        logp, entropy = rows.reference_logprobs(logits, ids, active, logit_map, return_entropy)
    else:
        args = (ids, active, *logit_map, return_entropy, workspace, name)
        logp, entropy, _, _ = linear_ops.logprob(rows.as_batch(hidden), weight, bias, *args)
    return make_logprobs(logp, entropy, targets, return_entropy, name)


def policy_loss_from_hidden(
    spec: LossSpec,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    workspace_mib: float | None = None,
    logp_old: Tensor | None = None,
    advantages: Tensor | float | None = None,
    sequence_advantages: Tensor | None = None,
    mask: Tensor | None = None,
    logp_ref: Tensor | None = None,
    logp_rollout: Tensor | None = None,
    obs_mask: Tensor | None = None,
    is_weights: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    normalizer: Tensor | float | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    inplace: bool = False,
    return_entropy: bool = False,
    metrics: str = "full",
    backend: str = "auto",
) -> LossOutput:
    """A policy loss and its gradients straight from hidden states and the output head, in three matrix products.

    Equals `policy_loss(spec, linear_token_logprobs(hidden, weight, targets).logp, ...)`. The logits live in a tile of
    fp32 that turns into its own gradient; each chunk adds to d weight, in fp32, and d weight is rounded once. Rows
    without a weight enter no product, rows without a gradient (clipped ones) leave before the products of the gradient;
    on a GPU counting either waits for the device. A loss over whole sequences takes chunks of whole sequences; one
    sequence too long for the workspace, a selection over the batch, or a workspace too small for a chunk's rows make
    that four products.

    Gradients are formed in forward, when any of hidden, weight and bias needs one, and handed out by the first
    backward; a second backward over a retained graph computes them again.

    Args:
        spec: from `fusedpg.loss_spec` or `fusedpg.CATALOGUE`.
        hidden: (N, D) packed or (B, T, D) padded, fp32, bf16, fp16 or fp64; differentiable.
        weight: the output head (V, D), any float dtype; differentiable.
        targets, bias, workspace_mib: as in `linear_token_logprobs`: ids (N,) or (B, T); (V,), differentiable; MiB.
        inplace: refused: there are no logits to overwrite.
        logp_old, advantages, sequence_advantages, mask, normalizer: as in `policy_loss_from_logits`.
        logp_ref, logp_rollout, obs_mask, is_weights, cu_seqlens, metrics, backend: likewise.
        temperature, softcap, logit_scale, return_entropy: likewise.

    Returns:
        LossOutput, as from `policy_loss_from_logits`.

    Raises:
        TypeError, ValueError, RuntimeError: by name of the argument, with what was expected, what came and the fix.
    References:
        Each loss has its own, with the equation: `python -m fusedpg losses NAME`; `ppo_clip` is Schulman et al.,
        Proximal Policy Optimization Algorithms, arXiv:1707.06347, eq. 7.
    """
    if inplace:
        raise ValueError("inplace: expected False: there are no logits here to overwrite; got True; drop the option")
    hidden, weight, bias = check_head(hidden, weight, bias, targets)
    compute = Head(hidden, weight, bias).compute
    logit_map = rows.check_logit_map(compute, targets, temperature, softcap, logit_scale)
    workspace = check_workspace(workspace_mib)
    batch = make_batch(
        spec,
        targets,
        "targets",
        compute,
        logp_old=logp_old,
        advantages=advantages,
        sequence_advantages=sequence_advantages,
        mask=mask,
        logp_ref=logp_ref,
        logp_rollout=logp_rollout,
        obs_mask=obs_mask,
        is_weights=is_weights,
        cu_seqlens=cu_seqlens,
        normalizer=normalizer,
    )
    check_metrics(metrics)
    active = batch.active
    ids = rows.check_ids(targets, active, weight.shape[0])
    name = dispatch.resolve(backend, hidden.device, compute)
    want_entropy = return_entropy or spec.entropy_coef != 0.0
    if name == "reference" or spec.batch_global:
        if name == "reference":
            logits = all_logits(hidden, weight, bias, active)
            logp, entropy = rows.reference_logprobs(logits, ids, active, logit_map, want_entropy)
        else:
            args = (ids, active, *logit_map, want_entropy, workspace, name)
            logp, entropy, _, _ = linear_ops.logprob(rows.as_batch(hidden), weight, bias, *args)
        loss, per_token, sums = _loss_of_logp(spec, logp, entropy if want_entropy else None, batch, name)
    else:
        args = (*_constants(batch), *logit_map, want_entropy, *_wanted(hidden, weight, bias), workspace, name)
        out = linear_ops.loss(spec.encode(), rows.as_batch(hidden), weight, bias, ids, *args)
        loss, logp, entropy, _, _, per_token, _, _, sums, *_ = out
    return make_output(
        spec, batch, name, loss, logp, entropy if want_entropy else None, per_token, sums, metrics, return_entropy
    )


def all_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, active: Tensor | None) -> Tensor:
    """The reference's: every logit at once, in the compute dtype; rows that are not wanted are those of zeros."""
    dtype = Head(hidden, weight, bias).compute
    if active is not None:
        hidden = torch.where(active.view(*hidden.shape[:-1], 1), hidden, 0.0)
    with linear_ops.no_autocast(hidden):
        return project(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def _constants(batch: Batch) -> tuple[Any, ...]:
    return batch.weights.w, batch.scale, batch.streams, batch.cu_seqlens


def _wanted(*tensors: Tensor | None) -> tuple[bool, ...]:
    """Which gradients to form."""
    return tuple(t is not None and t.requires_grad and torch.is_grad_enabled() for t in tensors)
