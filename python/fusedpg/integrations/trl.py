"""TRL 1.16: hidden states to log-probs, and to GRPO's loss, inside the trainers' own forward.

    trainer = FusedGRPOTrainer(model=..., reward_funcs=..., args=..., train_dataset=...)   # instead of GRPOTrainer

or, for any trainer that scores through TRL's fused head (GRPO, RLOO, SFT, DPO, KTO):

    fuse_trainer(trainer)            # after its construction
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from trl import GRPOTrainer
from trl.trainer.utils import FusedCausalLMOutput, maybe_gather_lm_head_ctx

from .. import linear_ops
from ..dispatch import resolve
from ..hidden_states import HiddenStates, scored_loss
from ..linear_walk import Head
from ..outputs import LossOutput
from ..presets import trl as trl_preset
from ..presets._trl import options_of
from ..presets.base import TrainerSpec
from ..spec import Anchor, Level
from ._hf_head import answer, backbone_states, base_of, logit_map, masked_ids, mean_capped_logits, plain_head, states

OUTPUTS = ("log_probs", "entropy", "is_top1", "mean_logits")
_EVERY_OUTPUT = (*OUTPUTS, "log_sum_sq_probs")
#: nats below the most likely token that still count as it: the rounding of a log-prob in fp32
_TIE = 1e-6


def attach_fused_head(
    model: nn.Module, temperature: float = 1.0, *, outputs: Sequence[str] = OUTPUTS, backend: str = "auto"
) -> None:
    """Make `model(..., labels=labels, fused_lm_head=True)` score labels without allocating logits.

    The protocol is TRL's: a `FusedCausalLMOutput` with `log_probs` and `entropy` (B, S-1), `loss`, `label_mask`, and
    the other per-token fields of `outputs`. Call it after the trainer's construction, which attaches TRL's own head.

    Args:
        model: a transformers causal language model, or a PEFT model around one.
        temperature: of the log-probs.
        outputs: fields to fill; "log_sum_sq_probs" costs one more product, as does "mean_logits" under a soft cap.
        backend: as in `linear_token_logprobs`.

    Raises:
        ValueError: an adapter on the head, prompt-learning PEFT, or an unknown field.
    """
    base = base_of(model)
    plain_head(base)
    unknown = sorted(set(outputs) - set(_EVERY_OUTPUT))
    if unknown:
        raise ValueError(f"outputs: expected fields among {', '.join(_EVERY_OUTPUT)}; got {unknown}")
    mapping = logit_map(base)
    inner: Any = base.forward
    inner_is_fused = "fused_lm_head" in inspect.signature(inner, follow_wrapped=False).parameters

    @functools.wraps(inner)
    def forward(
        self: Any,
        *args: Any,
        fused_lm_head: bool = False,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        if not fused_lm_head:
            given = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
            return inner(*args, **{k: v for k, v in given.items() if v is not None}, **kwargs)
        if kwargs.get("output_router_logits"):
            if not inner_is_fused:
                raise ValueError(
                    "output_router_logits: TRL's own head computes the auxiliary loss; got a model without it; attach "
                    "after the trainer's construction"
                )
            given = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
            return inner(*args, fused_lm_head=True, **given, **kwargs)
        hidden = backbone_states(self, *args, **kwargs).last_hidden_state
        if shift_labels is None:
            assert labels is not None
            hidden, shift_labels = hidden[:, :-1], labels[:, 1:]
        head: Any = plain_head(self)
        with maybe_gather_lm_head_ctx(head.weight, head.bias):
            return _score(
                states(self, hidden, mapping), shift_labels, temperature, outputs, num_items_in_batch, backend
            )

    base.forward = types.MethodType(forward, base)


def fuse_trainer(trainer: Any, backend: str = "auto") -> None:
    """`attach_fused_head` for the policy and the reference of a trainer, at the trainer's own temperature."""
    temperature = float(getattr(trainer, "temperature", 1.0))
    outputs = _EVERY_OUTPUT if getattr(trainer, "use_weighting", False) else OUTPUTS
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        if model is not None:
            attach_fused_head(model, temperature, outputs=outputs, backend=backend)


def _score(
    scores: HiddenStates,
    labels: Tensor,
    temperature: float,
    outputs: Sequence[str],
    num_items_in_batch: Any,
    backend: str,
) -> FusedCausalLMOutput:
    """Per-token fields of the labels, 0 where a label is -100."""
    ids, mask = masked_ids(labels.to(scores.hidden.device))
    logp, entropy, log_sum = _logprobs(scores, ids, mask, temperature, "entropy" in outputs, backend)
    fields: dict[str, Any] = {"log_probs": logp, "entropy": entropy}
    if "is_top1" in outputs:
        fields["is_top1"] = mask & (logp.detach() + log_sum >= -_TIE)
    if "mean_logits" in outputs:
        with torch.no_grad(), linear_ops.no_autocast(scores.hidden):
            fields["mean_logits"] = _mean_logits(scores, mask, temperature)
    if "log_sum_sq_probs" in outputs:
        with torch.no_grad():
            halved, _, _ = _logprobs(scores, ids, mask, temperature / 2, False, backend)
            # log sum p^2 = lse(2z) - 2 lse(z), each from its log-prob of the same label
            fields["log_sum_sq_probs"] = torch.where(mask, 2 * logp - halved, 0.0)
    total = -logp.sum()
    count = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return FusedCausalLMOutput(loss=total / count, label_mask=mask, **fields)


def _logprobs(
    scores: HiddenStates, ids: Tensor, mask: Tensor, temperature: float, want_entropy: bool, backend: str
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(logp, entropy, log-sum relative to the largest logit), ids' shape."""
    compute = Head(scores.hidden, scores.weight, scores.bias).compute
    name = resolve(backend, scores.hidden.device, compute)
    mapping = (None, float(temperature), scores.softcap or 0.0, scores.logit_scale)
    out = linear_ops.logprob(
        scores.hidden, scores.weight, scores.bias, ids.reshape(-1), mask.reshape(-1), *mapping, want_entropy, 0, name
    )
    logp, entropy, _, log_sum = out
    return logp.view(ids.shape), entropy.view(ids.shape) if want_entropy else None, log_sum.view(ids.shape)


def _mean_logits(scores: HiddenStates, mask: Tensor, temperature: float) -> Tensor:
    """The mean over the vocabulary: of linear logits a product with the head's mean row, of capped ones all of them."""
    if scores.softcap is not None:
        head = Head(scores.hidden, scores.weight, scores.bias)
        mean = mean_capped_logits(head, mask.reshape(-1), scores.softcap, scores.logit_scale).view(mask.shape)
        return torch.where(mask, mean / temperature, 0.0)
    row = scores.weight.float().mean(0)
    shift = 0.0 if scores.bias is None else scores.bias.float().mean()
    mean = (scores.hidden.float() @ row + shift) * (scores.logit_scale / temperature)
    return torch.where(mask, mean, 0.0)


# ------------------------------------------------------------------ GRPO in one pass


class FusedGRPOTrainer(GRPOTrainer):
    """`GRPOTrainer` whose loss and gradients come from the hidden states in three matrix products, without logits.

    Everything else is TRL's: options, generation, rewards, metrics under their own names, scaling. Scoring under the
    old and the reference policy goes through `attach_fused_head`. A run whose loss no spec holds (`why_two_passes`)
    keeps TRL's own loss over fused log-probs, in four products.
    """

    _name = "GRPO"
    _scored: tuple[Tensor, Tensor, None] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        trainer: Any = self
        fuse_trainer(trainer)
        #: why the loss does not come out of one pass; None when it does
        self.why_two_passes: str | None = None
        self._fused_spec: TrainerSpec | None = None
        try:
            self._fused_spec = grpo_spec(trainer)
        except ValueError as reason:
            self.why_two_passes = str(reason)
        else:
            _accept_objective(base_of(trainer.model), self.temperature)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """TRL's loss of a micro-batch; its metrics are logged by TRL's own code from the same log-probs."""
        if self._fused_spec is None or _needs_trl(self._fused_spec, inputs):
            return super()._compute_loss(model, inputs)
        loss, logp, entropy = model(fused_objective=self._objective(self._fused_spec, inputs))
        with torch.no_grad():
            self._scored = (logp, entropy, None)
            super()._compute_loss(model, inputs)
        return loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        scored, self._scored = self._scored, None
        return super()._get_per_token_logps_and_entropies(*args, **kwargs) if scored is None else scored

    def _objective(self, spec: TrainerSpec, inputs: dict[str, Any]) -> dict[str, Any]:
        """What the model's forward needs to return this micro-batch's loss."""
        trainer: Any = self
        completion, mask = inputs["completion_ids"], inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]
        old = inputs.get("old_per_token_logps")
        advantages = inputs["advantages"]
        fields: dict[str, Any] = {
            "logp_old": old,
            "logp_ref": inputs.get("ref_per_token_logps") if spec.has_kl else None,
            "mask": mask.bool(),
            ("sequence_advantages" if advantages.dim() == 1 else "advantages"): advantages,
            "normalizer": spec.normalizer(
                rows=completion.shape[0],
                tokens=int(mask.sum()) if spec.trainer_loss == "bnpo" else None,
                num_items_in_batch=inputs.get("num_items_in_batch"),
                num_processes=self.accelerator.num_processes,
                gradient_accumulation_steps=self.current_gradient_accumulation_steps,
                steps_per_generation=trainer.args.steps_per_generation,
                train=trainer.model.training,
            ),
        }
        if self.use_vllm and self.vllm_importance_sampling_correction:
            ratio = inputs["importance_sampling_ratio"]
            fields["is_weights"] = ratio.expand(completion.shape)
        return {
            "spec": spec if old is not None else spec.replace(anchor=Anchor.SELF),
            "input_ids": torch.cat([inputs["prompt_ids"], completion], 1),
            "attention_mask": torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
            "targets": completion,
            "fields": fields,
        }


def grpo_spec(trainer: Any) -> TrainerSpec:
    """The loss of a GRPO run as a spec.

    Raises:
        ValueError: an option that one pass over the hidden states cannot honour, by name.
    """
    args, loss_type = trainer.args, trainer.loss_type
    refused = {
        "router_aux_loss_coef": trainer.aux_loss_enabled,
        "entropy_coef": bool(args.entropy_coef),
        "use_adaptive_entropy": args.use_adaptive_entropy,
        "off_policy_mask_threshold": args.off_policy_mask_threshold is not None,
        "top_entropy_quantile": args.top_entropy_quantile < 1.0,
    }
    for option, on in refused.items():
        if on:
            raise ValueError(f"{option}: its term needs log-probs before the loss; got {getattr(args, option, True)!r}")
    corrected = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    if corrected and loss_type == "vespo":
        raise ValueError("vllm_importance_sampling_correction: 'vespo' multiplies the weights into its product")
    own = {key: getattr(args, key) for key in options_of(loss_type) if not key.startswith(("vllm", "use_vllm"))}
    return trl_preset(loss_type, **own)


def _needs_trl(spec: TrainerSpec, inputs: dict[str, Any]) -> bool:
    """Whether a micro-batch has what only TRL's own path takes: images, token advantages under a sequence ratio."""
    per_token = inputs["advantages"].dim() > 1 and spec.level == Level.SEQUENCE
    return per_token or any(inputs.get(key) is not None for key in ("pixel_values", "image_grid_thw"))


def _accept_objective(base: nn.Module, temperature: float) -> None:
    """Let the model's forward return a micro-batch's loss for `fused_objective=`."""
    mapping = logit_map(base)

    def loss(model: Any, objective: dict[str, Any], **unread: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        # PEFT's forward adds its own arguments, all None: the objective holds the inputs
        targets = objective["targets"]
        inputs = {name: objective[name] for name in ("input_ids", "attention_mask")}
        hidden = backbone_states(model, **inputs).last_hidden_state[:, -targets.shape[1] - 1 : -1]
        head: Any = plain_head(model)
        with maybe_gather_lm_head_ctx(head.weight, head.bias):
            out: LossOutput = scored_loss(
                objective["spec"],
                states(model, hidden, mapping),
                targets,
                temperature=temperature,
                return_entropy=True,
                metrics="none",
                **objective["fields"],
            )
        return out.loss, out.logp, out.entropy

    answer(base, "fused_objective", loss)
