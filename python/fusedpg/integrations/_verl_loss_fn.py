"""verl's whole actor loss on jagged tensors: policy, KL and entropy in one pass over the packed response tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._verl_batch import MicroBatch, response_layout
from ._verl_losses import LOSSES, PREFIX, correction_of, policy_term, resolved, spec_of

_COUNTS = ("dp_size", "batch_num_tokens", "global_batch_size")


@dataclass(frozen=True)
class LossFn:
    """What `set_loss_fn` takes: `fn(model_output, data, dp_group) -> (loss, metrics)`, verl's `ppo_loss` in numbers.

    A plain value, so it pickles to Ray's workers; build it with `make_loss_fn`.
    """

    config: Any
    loss: str
    terms: tuple[tuple[str, Any], ...]
    backend: str = "auto"

    def __call__(self, model_output: Mapping[str, Any], data: Any, dp_group: Any = None) -> tuple[Tensor, dict]:
        """The loss of a micro-batch and verl's metrics of it.

        Args:
            model_output: "log_probs" and, where the engine computes it, "entropy": jagged, over prompts and responses.
            data: verl's TensorDict: prompts, responses, response_mask, old_log_probs, advantages, optionally
                rollout_is_weights and ref_log_prob, jagged or padded, and the counts of the global batch.
            dp_group: unread; the counts are the global batch's.

        Raises:
            ValueError: what a term of the loss reads is missing, by name.
        """
        config, terms = self.config, dict(self.terms)
        entropy = model_output.get("entropy")
        if terms.get("entropy_coeff") and entropy is None:
            raise ValueError(
                f"entropy: entropy_coeff is {terms['entropy_coeff']}; got a model output without it; set "
                "actor.calculate_entropy=True"
            )
        if config.use_kl_loss and "ref_log_prob" not in data:
            raise ValueError("ref_log_prob: use_kl_loss reads it; got data without it; enable the reference policy")
        counts = {name: data[name] for name in _COUNTS} | {"loss_scale_factor": config.loss_scale_factor}
        batch = _micro_batch(model_output["log_probs"], entropy, data, config.use_kl_loss)
        out, policy = policy_term(self.loss, config, config.loss_agg_mode, batch, counts, self.backend, terms)
        return out.loss, self._metrics(out.loss.detach(), policy, batch, counts)

    @torch.no_grad()
    def _metrics(self, total: Tensor, policy: dict[str, float], batch: MicroBatch, counts: dict) -> dict[str, Any]:
        """The terms apart, as verl logs them."""
        # here, so that the registered losses load beside a verl without this class
        from verl.trainer.ppo.core_algos import agg_loss, kl_penalty
        from verl.utils.metric import AggregationType, Metric

        config = self.config
        summed = counts["dp_size"] > 1 or any(value is not None for name, value in counts.items() if name != "dp_size")
        how = AggregationType.SUM if summed else AggregationType.MEAN
        mask = batch.padded(batch.mask)

        def aggregate(values: Tensor) -> Tensor:
            clean = batch.padded(torch.where(batch.mask, values, 0.0))
            return torch.where(mask.any(), agg_loss(clean, mask, config.loss_agg_mode, **counts), 0.0)

        terms: dict[str, Any] = {}
        policy_loss = total.clone()
        if batch.entropy is not None:
            entropy = aggregate(batch.entropy)
            policy_loss += config.entropy_coeff * entropy
            terms["actor/entropy_loss"] = Metric(value=entropy, aggregation=how)
        if batch.logp_ref is not None:
            estimate: Any = kl_penalty
            kl = aggregate(estimate(batch.logp, batch.logp_ref, config.kl_loss_type))
            policy_loss -= config.kl_loss_coef * kl
            terms |= {"kl_loss": Metric(value=kl, aggregation=how), "kl_coef": config.kl_loss_coef}
        metrics = {name: Metric(AggregationType.MEAN, value) for name, value in policy.items()}
        return {**metrics, "actor/pg_loss": Metric(value=policy_loss, aggregation=how), **terms}


def _micro_batch(log_probs: Tensor, entropy: Tensor | None, data: Any, with_reference: bool) -> MicroBatch:
    layout = response_layout(data)
    take = lambda name: layout.take(name, data[name])  # noqa: E731
    return MicroBatch(
        logp=layout.score("log_probs", log_probs),
        logp_old=take("old_log_probs"),
        advantages=take("advantages"),
        mask=take("response_mask").bool(),
        is_weights=take("rollout_is_weights") if "rollout_is_weights" in data else None,
        entropy=None if entropy is None else layout.score("entropy", entropy),
        logp_ref=take("ref_log_prob") if with_reference else None,
        layout=layout,
    )


def make_loss_fn(config: Any, *, backend: str = "auto") -> LossFn:
    """verl's `ppo_loss` of an actor config in one pass over packed tokens.

        actor_rollout_wg.set_loss_fn(make_loss_fn(actor_config))

    Loss, gradients and metrics are those of `functools.partial(verl.workers.utils.losses.ppo_loss, config=config)`.

    Args:
        config: an `ActorConfig`; `policy_loss.loss_mode` is one of verl's names, with or without "fusedpg_".
        backend: "auto", "cpu", "triton" or "reference".

    Raises:
        ValueError: a loss or an option that one pass does not honour, by name.
    """
    name = (config.get("policy_loss") or {}).get("loss_mode", "vanilla")
    loss = name.removeprefix(PREFIX)
    if loss not in LOSSES:
        raise ValueError(f"loss_mode: expected one of {', '.join(LOSSES)}; got {name!r}; use verl's own ppo_loss")
    terms: dict[str, Any] = {}
    if config.entropy_coeff:
        terms["entropy_coeff"] = config.entropy_coeff
    if config.use_kl_loss:
        terms |= {"use_kl_loss": True, "kl_loss_coef": config.kl_loss_coef, "kl_loss_type": config.kl_loss_type}
    if loss == "bypass_mode":
        _check_correction(config)
    spec_of(resolved(loss, config), config, config.loss_agg_mode, config.loss_scale_factor or 1, terms)
    return LossFn(config, loss, tuple(terms.items()), backend)


def _check_correction(config: Any) -> None:
    options = correction_of(config)
    if options.get("rollout_rs") is not None and options.get("rollout_rs_threshold") is None:
        raise ValueError(f"rollout_rs_threshold: rollout_rs={options.get('rollout_rs')!r} has no default; got None")
