"""slime: its policy loss straight from logits, reduced by slime's own function.

    --loss-type custom_loss --custom-loss-function-path fusedpg.integrations.slime.fused_loss

`check_args(args)` refuses at launch what the loss would refuse at its first call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..functional import token_logprobs
from ..presets import slime as slime_preset
from ..presets._slime import options_of
from ..presets.base import TrainerSpec
from ._shared import advantages_of, boundaries, packed, per_token_loss

#: advantage_estimator -> loss, where it decides; every other one has PPO's
_BY_ESTIMATOR = {"gspo": "gspo", "cispo": "cispo"}
_PARALLEL = ("tensor_model_parallel_size", "context_parallel_size")
#: switches of slime's loss that this one does not have
_REFUSED = ("use_opsm", "use_score_centering", "get_mismatch_metrics", "true_on_policy_mode")
_REDUCER = "custom_pg_loss_reducer_function_path"


def fused_loss(
    args: Any, batch: Any, logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """slime's policy loss of one micro-batch.

    Args:
        args: slime's command line.
        batch: lists, one entry a sample: `unconcat_tokens`, `total_lengths`, `response_lengths`, `loss_masks`,
            `log_probs`, `advantages`, and where they are read `rollout_log_probs`, `ref_log_probs` (response tokens
            only).
        logits: (1, T, V), the whole vocabulary; row i scores token i + 1 of its sample.
        sum_of_sample_mean: slime's reducer of concatenated response tokens.

    Raises:
        ValueError: an option or a parallel layout that cannot be honoured, by name.
    """
    spec = check_args(args)
    totals, lengths = list(batch["total_lengths"]), list(batch["response_lengths"])
    rows = _rows(totals, lengths, logits.device)
    ids = torch.zeros(logits.shape[1], dtype=torch.int64, device=logits.device)
    tokens = [t[len(t) - n :] for t, n in zip(batch["unconcat_tokens"], lengths, strict=True)]
    mask = packed([m.reshape(-1) for m in batch["loss_masks"]], "loss_masks").to(logits.device)
    # every response token is scored: a reducer may read those that loss_masks leaves out
    ids[rows] = packed(tokens, "unconcat_tokens").to(ids) if tokens else ids[rows]
    scored = torch.zeros_like(ids, dtype=torch.bool).index_fill_(0, rows, True)
    lp = token_logprobs(
        logits[0], ids, mask=scored, temperature=float(args.rollout_temperature), return_entropy=bool(spec.entropy_coef)
    )
    logp, entropy = lp.logp[rows], None if lp.entropy is None else lp.entropy[rows]
    cu_seqlens = boundaries(lengths, logits.device)
    read = lambda name: packed(batch[name], name).to(logits.device) if batch.get(name) else None  # noqa: E731
    x, out = per_token_loss(
        spec,
        logp,
        mask=mask,
        entropy=entropy,
        logp_old=read("rollout_log_probs" if args.use_rollout_logprobs else "log_probs"),
        logp_ref=read("ref_log_probs") if spec.needs_logp_ref else None,
        logp_rollout=read("rollout_log_probs") if spec.needs_logp_rollout else None,
        cu_seqlens=cu_seqlens,
        **advantages_of(spec, packed(batch["advantages"], "advantages").to(logits.device), mask, cu_seqlens),
    )
    reduce = _own_reducer(args, batch) or sum_of_sample_mean
    loss = reduce(x)
    if logp.numel() == 0:
        loss = loss + lp.logp.sum()  # zeros, connected whatever the logits hold
    with torch.no_grad():
        reported = {"loss": loss.detach()}
        if not spec.has_kl and not spec.entropy_coef:
            reported["pg_loss"] = loss.detach()
        reported["ppo_kl"] = sum_of_sample_mean(_log_ratio(out.logp, read("log_probs"), mask))
        if entropy is not None:
            reported["entropy_loss"] = sum_of_sample_mean(entropy)
    return loss, {name: value.detach().clone() for name, value in reported.items()}


def check_args(args: Any) -> TrainerSpec:
    """The loss of a command line.

    Raises:
        ValueError: an option or a parallel layout that cannot be honoured, by name.
    """
    for name in _PARALLEL:
        size = getattr(args, name, 1)
        if size != 1:
            what = "vocabulary-sharded logits" if name.startswith("tensor") else "split sequences"
            raise ValueError(f"{name}: {what} are not supported; got {size}; run with 1, or use slime's own loss")
    for name in _REFUSED:
        if getattr(args, name, False):
            raise ValueError(f"{name}: the fused loss does not have it; got True; use slime's own loss")
    loss = _BY_ESTIMATOR.get(getattr(args, "advantage_estimator", "grpo"), "ppo")
    reads = options_of(loss)
    given = {key: getattr(args, key) for key in reads if hasattr(args, key)}
    spec = slime_preset(loss, **{key: value for key, value in given.items() if value != reads[key]})
    if getattr(args, _REDUCER, None) is not None and (spec.has_kl or spec.entropy_coef):
        raise ValueError(
            f"{_REDUCER}: slime reduces the policy term with it and the KL and entropy terms without; got it with one "
            "of those; set their coefficients to 0"
        )
    _reducer_builder(args)
    return spec


def _rows(totals: Sequence[int], lengths: Sequence[int], device: torch.device) -> Tensor:
    """Rows of the logits that score response tokens, sample by sample."""
    rows, end = [], 0
    for total, length in zip(totals, lengths, strict=True):
        if not 0 <= length < total:
            raise ValueError(f"response_lengths: expected less than the sample's {total} tokens; got {length}")
        end += total
        rows.append(torch.arange(end - length - 1, end - 1, device=device))
    return torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64, device=device)


def _reducer_builder(args: Any) -> Callable[..., Callable[[Tensor], Tensor]] | None:
    """The function that `--custom-pg-loss-reducer-function-path` names.

    Raises:
        ValueError: it cannot be imported.
    """
    path = getattr(args, _REDUCER, None)
    if path is None:
        return None
    module, _, name = path.rpartition(".")
    try:
        found: Callable[..., Callable[[Tensor], Tensor]] = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{_REDUCER}: expected module.function; got {path!r}: {error}") from error
    return found


def _own_reducer(args: Any, batch: Any) -> Callable[[Tensor], Tensor] | None:
    """The custom reducer of a micro-batch."""
    build = _reducer_builder(args)
    if build is None:
        return None
    return build(batch["total_lengths"], batch["response_lengths"], batch["loss_masks"], args.calculate_per_token_loss)


def _log_ratio(logp: Tensor, old: Tensor | None, mask: Tensor) -> Tensor:
    """slime's `ppo_kl`: old - new."""
    return torch.zeros_like(logp) if old is None else torch.where(mask != 0, old.to(logp) - logp, 0.0)
