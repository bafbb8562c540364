"""An FSDP engine of verl whose model scores tokens from its hidden states, inside its own (wrapped) forward."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from verl.utils import tensordict_utils as tu
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead

from ..hidden_states import scored_logprobs
from ._hf_head import answer, backbone_states, base_of, logit_map, plain_head, states

#: what needs every logit of a token
_NEEDS_LOGITS = ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only")


@dataclass
class ScoredOutput:
    """What verl reads of a model with fused kernels."""

    log_probs: Tensor
    entropy: Tensor | None = None


def score_in_forward(model: Any, backend: str = "auto") -> None:
    """Let `model(..., fused_labels=, fused_temperature=)` return log-probs and entropy instead of logits.

    It runs inside whatever wraps the model: FSDP has gathered the head there, and its hooks see the gradient.

    Raises:
        ValueError: a head that is not one matrix, or prompt-learning PEFT.
    """
    base: Any = base_of(model)
    plain_head(base)
    mapping = logit_map(base)

    def score(
        model: Any,
        labels: Tensor,
        *args: Any,
        fused_temperature: Tensor | float = 1.0,
        fused_entropy: bool = False,
        **kwargs: Any,
    ) -> ScoredOutput:
        hidden = backbone_states(model, *args, **kwargs).last_hidden_state
        scored = scored_logprobs(
            states(model, hidden, mapping),
            labels,
            temperature=fused_temperature,
            return_entropy=fused_entropy,
            backend=backend,
        )
        return ScoredOutput(scored.logp, scored.entropy)

    answer(base, "fused_labels", score)


class FusedFSDPEngine(FSDPEngineWithLMHead):
    """verl's FSDP engine without logits: log-probs and entropy come from hidden states and the head, in tiles.

    Sharding, packing, sequence parallelism, LoRA on the body and optimisation are verl's; a temperature may differ by
    sample. `entropy_checkpointing` and chunked entropy have nothing left to save and are inert.
    """

    def _build_module(self) -> nn.Module:
        config = self.model_config
        if config.use_fused_kernels:
            raise ValueError(
                "use_fused_kernels: it replaces the model's forward with verl's own fused head; got True with "
                "VERL_ENGINE_VENDOR=fusedpg; pass False"
            )
        module = super()._build_module()
        score_in_forward(module)
        return module

    def _build_lora_module(self, module: nn.Module) -> nn.Module:
        wrapped = super()._build_lora_module(module)
        plain_head(base_of(wrapped))
        return wrapped

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """verl's inputs with what the model scores: the next tokens, their temperatures, and whether the entropy."""
        flag = functools.partial(tu.get_non_tensor_data, micro_batch, default=False)
        for name in _NEEDS_LOGITS:
            if flag(key=name):
                raise ValueError(f"{name}: it reads whole rows of logits, which VERL_ENGINE_VENDOR=fusedpg never forms")
        inputs, args = super().prepare_model_inputs(micro_batch)
        labels = args["input_ids_rmpad_rolled"]
        if "temperature_rmpad" in args:
            labels, temperature = labels[None], args["temperature_rmpad"][None]
        else:
            ids = inputs["input_ids"]
            jagged = torch.nested.nested_tensor_from_jagged(labels, micro_batch["input_ids"].offsets())
            labels = torch.nested.to_padded_tensor(jagged, padding=0, output_size=tuple(ids.shape))
            temperature = args["temperature"][:, None].expand(ids.shape)
        inputs |= {
            "fused_labels": labels,
            "fused_temperature": temperature.clamp(min=1e-8).contiguous(),
            "fused_entropy": flag(key="calculate_entropy"),
        }
        return inputs, args

    def prepare_model_outputs(self, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any) -> Any:
        """verl's jagged `log_probs` and `entropy` of what the model scored."""
        scored = micro_batch.copy()
        tu.assign_non_tensor(scored, use_fused_kernels=True)
        return super().prepare_model_outputs(output, output_args, scored, logits_processor_func)


@cache
def registered_engine() -> type[FusedFSDPEngine]:
    """The engine, registered once."""
    register = EngineRegistry.register("language_model", ["fsdp", "fsdp2"], "cuda", vendor="fusedpg")
    return register(FusedFSDPEngine)
