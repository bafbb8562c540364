"""The public ops: log-probabilities and policy losses from logits or from log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from . import dispatch, ops, rows, validate
from .batch import Batch, flat_mask, make_batch
from .inplace import InplaceLoss
from .outputs import LogprobOutput, LossOutput, check_metrics, make_logprobs, make_output
from .selection import selection_codes
from .spec import LossSpec


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_entropy: bool = False,
    backend: str = "auto",
) -> LogprobOutput:
    """Log-probability (and entropy) of each target, in fp32, with one read of the logits.

    Equals `torch.log_softmax(z.float(), -1).gather(-1, targets[..., None]).squeeze(-1)` with
    `z = softcap*tanh(logit_scale*logits/softcap)/temperature`, without allocating anything of the logits' size.

    Args:
        logits: (N, V) or (B, T, V), fp32, bf16, fp16 or fp64, any strides; differentiable. `logits[i]` scores
            `targets[i]`: nothing is shifted.
        targets: token ids (N,) or (B, T), int32 or int64. Masked places may hold anything, -100 included.
        mask: targets' shape, bool or float weights in [0, 1]; where it is 0 the logits are never read, the results are
            0 and so are the gradients. None selects all.
        temperature: a number > 0, or a tensor of targets' shape.
        softcap: soft cap of the logits, applied after the scale and before the temperature; None is off.
        logit_scale: multiplies the logits first.
        return_entropy: also the entropy (nats) of the same tempered distribution, differentiable.
        backend: "auto", "cpu", "triton" or "reference".

    Returns:
        `LogprobOutput(logp, entropy, backend)`. A row with NaN, +inf or no finite logit gives NaN, as log_softmax does.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype, shape, device or value, by name. On a GPU an unmasked id
            outside the vocabulary gives NaN instead (no synchronisation), or raises with FUSEDPG_DEBUG=1.
        RuntimeError: a backend named explicitly that cannot run here, with the reason and the fix.

    References:
        Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv:1805.02867, algorithm 3: the running
        maximum and sum with which one read is enough.
    """
    logit_map = rows.check_rows(logits, targets, temperature, softcap, logit_scale)
    rows_mask = flat_mask(mask, targets, "targets")
    active = None if rows_mask is None else rows_mask != 0
    ids = rows.check_ids(targets, active, logits.shape[-1])
    name = dispatch.resolve(backend, logits.device, logits.dtype)
    if name == "reference":
        logp, entropy = rows.reference_logprobs(logits, ids, active, logit_map, return_entropy)
    else:
        logp, entropy, _, _ = ops.logprob(rows.rows3d(logits), ids, active, *logit_map, return_entropy, name)
    return make_logprobs(logp, entropy, targets, return_entropy, name)


def policy_loss_from_logits(
    spec: LossSpec,
    logits: Tensor,
    targets: Tensor,
    *,
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
    """A policy loss and its gradient straight from logits.

    Equals `policy_loss(spec, token_logprobs(logits, targets).logp, ...)`; a token-level loss reads the logits once and
    writes their gradient once, in forward; a sequence-level one reads them twice.

    Args:
        spec: from `fusedpg.loss_spec` or `fusedpg.CATALOGUE`.
        logits: (N, V) packed or (B, T, V) padded, fp32, bf16, fp16 or fp64, any strides; the only differentiable
            argument.
        targets: token ids (N,) or (B, T), int32 or int64; `logits[i]` scores `targets[i]`.
        logp_old: log-probs of the policy that the ratio is anchored on, targets' shape, any float dtype. None runs
            on-policy (ratio exactly 1) and says so with a warning.
        advantages: targets' shape (any dtype), or one number for all tokens.
        sequence_advantages: (S,), instead of `advantages`; what a sequence-level loss takes.
        mask: targets' shape, bool, or weights in [0, 1]: selects where nonzero, weighs by its value. None is all ones.
        logp_ref: reference log-probs, read when the spec has a KL term on `ref`.
        logp_rollout: log-probs of the sampling engine, read when the spec's anchor or KL target is `rollout`, or
            when it has a rollout correction.
        obs_mask: targets' shape, bool or weights in [0, 1]; the tokens of the observation term (`obs_coef`). Refused by
            a loss without one.
        is_weights: targets' shape; a constant factor on the policy term (0 drops the token from it). A loss with
            `is_correction` or `is_reject` forms it from `logp_old` and `logp_rollout` instead.
        cu_seqlens: (S+1,) int32 or int64, the boundaries of packed sequences.
        normalizer: one number that divides the numerator instead of the local weight.
        temperature, softcap, logit_scale: as in `token_logprobs`.
        inplace: let the gradient overwrite the logits' memory: one backward, eager only. Call `loss.backward()`; where
            `logits` is a view, `torch.autograd.grad(loss, logits)` no longer finds it after the write.
        return_entropy: also return the entropy of each row.
        metrics: "full" or "none".
        backend: "auto", "cpu", "triton" or "reference".

    Returns:
        LossOutput with `loss` (0-d, differentiable, numerator / (normalizer or weight), exactly 0 and connected when
        that is 0), `numerator` and `weight` (0-d, detached: sums of both over micro-batches and ranks give the unsplit
        loss), `logp`, `entropy`, `per_token` (targets' shape, detached; `per_token` carries no weight), `metrics` and
        `backend`.

    Raises:
        TypeError, ValueError, RuntimeError: by name of the argument, with what was expected, what came and the fix.
    References:
        Each loss has its own, with the equation: `python -m fusedpg losses NAME`; `ppo_clip` is Schulman et al.,
        Proximal Policy Optimization Algorithms, arXiv:1707.06347, eq. 7.
    """
    logit_map = rows.check_rows(logits, targets, temperature, softcap, logit_scale)
    batch = make_batch(
        spec,
        targets,
        "targets",
        logits.dtype,
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
    ids = rows.check_ids(targets, active, logits.shape[-1])
    if inplace:
        validate.check_inplace(logits)
    name = dispatch.resolve(backend, logits.device, logits.dtype)
    want_entropy = return_entropy or spec.entropy_coef != 0.0
    if inplace:
        _check_inplace_loss(spec, name)
    if name == "reference" or spec.batch_global:
        if name == "reference":
            logp, entropy = rows.reference_logprobs(logits, ids, active, logit_map, want_entropy)
        else:
            logp, entropy, _, _ = ops.logprob(rows.rows3d(logits), ids, active, *logit_map, want_entropy, name)
        loss, per_token, sums = _loss_of_logp(spec, logp, entropy if want_entropy else None, batch, name)
    else:
        # fp16 gradients keep their range only when the upstream factor (a loss scale) is known before the rounding;
        # a traced graph plans its own memory
        early = not spec.needs_segments and logits.dtype != torch.float16 and not torch.compiler.is_compiling()
        form_grad = early and logits.requires_grad and torch.is_grad_enabled()
        args = (ids, batch.weights.w, batch.scale, batch.streams, batch.cu_seqlens, *logit_map, want_entropy)
        if inplace:
            out = InplaceLoss.apply(rows.rows3d(logits), form_grad, spec.encode(), *args, name)
            loss, logp, entropy, per_token, sums = out
        else:
            out = ops.logits_loss(spec.encode(), rows.rows3d(logits), *args, form_grad, name)
            loss, logp, entropy, _, _, per_token, _, _, sums, _ = out
    return make_output(
        spec, batch, name, loss, logp, entropy if want_entropy else None, per_token, sums, metrics, return_entropy
    )


def policy_loss(
    spec: LossSpec,
    logp: Tensor,
    *,
    entropy: Tensor | None = None,
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
    metrics: str = "full",
    backend: str = "auto",
) -> LossOutput:
    """A policy loss from log-probabilities, for trainers that hand over `logp`.

    Equals, for `ppo_clip` with `token-mean`,
    `(torch.max(-A*r, -A*r.clamp(1-eps, 1+eps))*mask).sum()/mask.sum()` with `r = (logp - logp_old).exp()`.

    Args:
        spec: from `fusedpg.loss_spec` or `fusedpg.CATALOGUE`.
        logp: (N,) packed or (B, T) padded, any float dtype; differentiable.
        entropy: same shape, differentiable; read when the spec has an entropy bonus, and for the metric.
        logp_old, advantages, sequence_advantages, mask, normalizer: as in `policy_loss_from_logits`.
        logp_ref, logp_rollout, obs_mask, is_weights, cu_seqlens, metrics, backend: likewise.

    Returns:
        LossOutput, with `logp` and `entropy` the detached inputs.

    Raises:
        TypeError, ValueError, RuntimeError: by name of the argument, with what was expected, what came and the fix.
    References:
        Each loss has its own, with the equation: `python -m fusedpg losses NAME`; `ppo_clip` is Schulman et al.,
        Proximal Policy Optimization Algorithms, arXiv:1707.06347, eq. 7.
    """
    if not isinstance(logp, Tensor) or logp.dtype not in validate.FLOATS or logp.ndim not in (1, 2):
        got = f"{logp.dtype} {tuple(logp.shape)}" if isinstance(logp, Tensor) else type(logp).__name__
        raise TypeError(f"logp: expected a float tensor of shape (N,) or (B, T); got {got}")
    batch = make_batch(
        spec,
        logp,
        "logp",
        logp.dtype,
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
    if entropy is not None:
        validate.check_per_token("entropy", entropy, "logp", logp, tuple(logp.shape))
        if not entropy.is_floating_point():
            raise TypeError(f"entropy: expected a float tensor; got {entropy.dtype}; cast with .float()")
    elif spec.entropy_coef != 0.0:
        raise ValueError(
            f"entropy: the loss {spec.name!r} has entropy_coef={spec.entropy_coef} and reads it; got None; "
            "pass token_logprobs(..., return_entropy=True).entropy"
        )
    name = dispatch.resolve(backend, logp.device, logp.dtype)
    dtype = batch.scale.dtype
    flat_logp = logp.to(dtype).reshape(-1).contiguous()
    flat_entropy = None if entropy is None else entropy.to(dtype).reshape(-1).contiguous()
    loss, per_token, sums = _loss_of_logp(spec, flat_logp, flat_entropy, batch, name)
    return make_output(spec, batch, name, loss, flat_logp, flat_entropy, per_token, sums, metrics, entropy is not None)


def _loss_of_logp(
    spec: LossSpec, logp: Tensor, entropy: Tensor | None, batch: Batch, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Stage B of flat rows: (loss, per_token, sums)."""
    if spec.batch_global:
        picked = ops.select(logp.detach(), batch.weights.w, batch.streams, selection_codes(spec))
        batch = batch.with_selected(picked)
    if backend == "reference":
        return rows.reference_loss(spec, logp, entropy, batch)
    args = (batch.weights.w, batch.scale, batch.streams, batch.cu_seqlens, backend)
    loss, per_token, _, _, sums = ops.token_loss(spec.encode(), logp, entropy, *args)
    return loss, per_token, sums


def _check_inplace_loss(spec: LossSpec, backend: str) -> None:
    if backend == "reference":
        raise ValueError(
            "inplace: expected a native backend ('cpu' or 'triton'); got backend='reference'; drop the option"
        )
    if spec.batch_global:
        raise ValueError(
            f"inplace: the loss {spec.name!r} selects tokens over the whole batch and forms its gradient in backward; "
            "got inplace=True; drop the option"
        )
