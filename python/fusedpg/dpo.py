"""Direct preference optimisation over native sequence log-probs.

For a pair with chosen c, rejected r, sequence log-probs s = sum over the mask of log-probs and reference ones s_ref:

    h = (s_c - s_ref_c) - (s_r - s_ref_r)
    sigmoid   -(1 - eps)*log sigmoid(beta*h) - eps*log sigmoid(-beta*h)     Rafailov et al., arXiv:2305.18290, eq. 7;
                                                                             eps: Mitchell, Conservative DPO (2023)
    ipo       (h - 1/(2*beta))^2                                             Azar et al., arXiv:2310.12036, eq. 17
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .builders import require_context
from .config import DPOConfig
from .hidden_states import scored_logprobs
from .metric_adapter import OBJECTIVE_WEIGHT_SUM, MetricAdapter, ObjectiveMetrics
from .objective import Objective, PolicyBatch, Reduction, model_scores, sequence_sums
from .old_logp import ReferenceScorer
from .preflight import check_dpo

_MEANS = ("loss", "reward_chosen", "reward_rejected", "reward_margin", "accuracy")


def build_dpo_objective(rl: DPOConfig, context: Any) -> Objective:
    """The preference objective of a config; the batch holds every pair whole.

    The batch has 2P sequences, padded (2P, T) or packed with `cu_seqlens` (2P+1,): the P chosen ones, then their
    rejected ones in the same order. Reference log-probs come as `ref_sequence_logp` (2P,), as `logp_ref` a token, or
    from the objective's reference scorer. OBJECTIVE_WEIGHT_SUM counts pairs; a pair whose two masks are empty is none.

    Args:
        rl: the resolved config.
        context: the trainer's: `name_or_path`; optionally `backend`.

    Raises:
        TypeError, ValueError: a config of another kind, a knob that the loss never reads, a context without identity.

    References:
        Rafailov et al., Direct Preference Optimization, arXiv:2305.18290, eq. 7; Azar et al. (IPO), arXiv:2310.12036,
        eq. 17.
    """
    if not isinstance(rl, DPOConfig):
        raise TypeError(f"rl: expected a DPOConfig; got {type(rl).__name__}")
    check_dpo(rl)
    backend = getattr(context, "backend", "auto")
    scorer = ReferenceScorer(rl.temperature, backend)
    fn = partial(
        _pair_loss,
        loss_name=rl.loss,
        beta=rl.beta,
        label_smoothing=rl.label_smoothing,
        temperature=rl.temperature,
        backend=backend,
        reference_scorer=scorer,
    )
    identity = {
        "name_or_path": require_context(context, "name_or_path"),
        "dpo_loss": rl.loss,
        "beta": rl.beta,
        "temperature": rl.temperature,
    }
    if rl.loss == "sigmoid":
        identity["label_smoothing"] = rl.label_smoothing
    return Objective(
        fn,
        Reduction.TOKEN_SUM,
        metric_adapter=MetricAdapter("dpo/", {name: name for name in _MEANS}, loss="dpo/loss"),
        identity=identity,
        reference_scorer=scorer,
    )


def sequence_logprobs(logp: Tensor, mask: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Sums of masked log-probs over each sequence, (S,) in fp64; differentiable in `logp`.

    `logp` and `mask` are (B, T), a sequence a row, or (N,) with `cu_seqlens` (S+1,). Sums are taken sequence by
    sequence, so a NaN stays in its own.
    """
    if logp.ndim == 1 and cu_seqlens is None:
        raise ValueError("cu_seqlens: packed sequences need their boundaries (S+1,); got None; pass it")
    weights = mask.double()
    values = torch.where(weights != 0, logp.double() * weights, 0.0)
    return sequence_sums(values, None if logp.ndim == 2 else cu_seqlens)


def preference_loss(h: Tensor, loss_name: str, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """The loss of each pair from its margin h (P,)."""
    if loss_name == "ipo":
        return (h - 1.0 / (2.0 * beta)).square()
    if loss_name != "sigmoid":
        raise ValueError(f"loss: expected 'sigmoid' or 'ipo'; got {loss_name!r}")
    log_sigmoid = torch.nn.functional.logsigmoid
    return -(1.0 - label_smoothing) * log_sigmoid(beta * h) - label_smoothing * log_sigmoid(-beta * h)


def _pair_loss(
    model: Any,
    batch: Any,
    *,
    loss_name: str,
    beta: float,
    label_smoothing: float,
    temperature: float,
    backend: str,
    reference_scorer: ReferenceScorer,
) -> tuple[Tensor, ObjectiveMetrics]:
    """One chunk of pairs."""
    data = PolicyBatch.of(batch)
    reference = _reference(batch, data, reference_scorer)
    scores = model_scores(model, batch)
    lp = scored_logprobs(scores, data.targets, mask=data.mask, temperature=temperature, backend=backend)
    gain = sequence_logprobs(lp.logp, data.mask, data.cu_seqlens) - reference
    if gain.numel() % 2:
        raise ValueError(
            f"batch: expected P chosen sequences followed by their P rejected ones; got {gain.numel()} sequences; keep "
            "pairs whole when a batch is split"
        )
    chosen, rejected = gain.chunk(2) if gain.numel() else (gain, gain)
    held = sequence_logprobs(torch.ones_like(lp.logp), (data.mask != 0), data.cu_seqlens) > 0
    pairs = torch.logical_or(*held.chunk(2)) if held.numel() else held
    count = pairs.sum().double()
    share = torch.where(count > 0, 1.0 / count, 0.0)

    def mean(values: Tensor) -> Tensor:
        return torch.where(pairs, values, 0.0).sum() * share

    loss = mean(preference_loss(chosen - rejected, loss_name, beta, label_smoothing)).to(lp.logp.dtype)
    c, r = beta * chosen.detach(), beta * rejected.detach()
    means = {"loss": loss.detach(), "reward_chosen": mean(c), "reward_rejected": mean(r)}
    means |= {"reward_margin": mean(c - r), "accuracy": mean((c > r).double())}
    scalars = {f"dpo/{name}": means[name] for name in _MEANS}
    return loss, ObjectiveMetrics({**scalars, OBJECTIVE_WEIGHT_SUM: count})


def _reference(batch: Any, data: PolicyBatch, scorer: ReferenceScorer) -> Tensor:
    """The reference's sequence log-probs (2P,), fp64."""
    given = batch.get("ref_sequence_logp") if isinstance(batch, Mapping) else getattr(batch, "ref_sequence_logp", None)
    if given is not None:
        sequences = data.targets.shape[0] if data.cu_seqlens is None else data.cu_seqlens.numel() - 1
        if given.shape != (sequences,):
            raise ValueError(
                f"ref_sequence_logp: expected shape ({sequences},), one value a sequence; got {tuple(given.shape)}"
            )
        return given.detach().double()
    per_token = scorer(batch) if data.logp_ref is None else data.logp_ref
    return sequence_logprobs(per_token.detach(), data.mask, data.cu_seqlens)
