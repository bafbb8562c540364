"""The output head of a transformers causal language model: its tensors, and how its logits become softmax arguments."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..hidden_states import HiddenStates
from ..linear_plan import plan_linear
from ..linear_walk import Head, LinearWalk
from ..workspace import default_workspace

#: config attributes that multiply the logits, by the first that is set
_MULTIPLIERS = ("logit_scale", "output_multiplier", "lm_head_multiplier")


def text_config(model: nn.Module) -> Any:
    """The language part of a model's config."""
    config: Any = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def logit_map(model: nn.Module) -> dict[str, Any]:
    """{"softcap", "logit_scale"} as the model's own forward applies them."""
    config = text_config(model)
    softcap = getattr(config, "final_logit_softcapping", None)
    for name in _MULTIPLIERS:
        scale = getattr(config, name, None)
        if scale is not None:
            return {"softcap": softcap, "logit_scale": float(scale)}
    divisor = getattr(config, "logits_scaling", None)
    if divisor is None:
        return {"softcap": softcap, "logit_scale": 1.0}
    multiplies = config.model_type == "hyperclovax"
    return {"softcap": softcap, "logit_scale": float(divisor) if multiplies else 1.0 / float(divisor)}


def plain_head(model: Any) -> nn.Module:
    """The output embeddings as one matrix and an optional bias.

    Raises:
        ValueError: there is none, or it carries an adapter whose product no single matrix holds.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None or not isinstance(getattr(head, "weight", None), Tensor):
        raise ValueError(
            f"model: expected output embeddings with a weight (get_output_embeddings()); got {type(model).__name__} "
            "without; a model without a head of its own has no fused path"
        )
    if any("lora_" in name for name, _ in head.named_parameters()) or hasattr(head, "base_layer"):
        raise ValueError(
            f"model: expected an output head without adapter; got {type(head).__name__}; leave lm_head out of PEFT's "
            "target_modules, or merge it first"
        )
    return head


def whole(parameter: Tensor | None) -> Tensor | None:
    """A sharded parameter (FSDP2) gathered; others as they are.

    A parameter that its own module's forward has not gathered misses FSDP's reduction as well: its gradient is the mean
    over the ranks here.
    """
    sharded: Any = parameter
    if parameter is None or not hasattr(parameter, "full_tensor"):
        return parameter
    from torch.distributed.tensor import Partial

    mesh = sharded.device_mesh
    full: Tensor = sharded.full_tensor(grad_placements=[Partial()] * mesh.ndim)
    if full.requires_grad:
        full.register_hook(lambda gradient: gradient / mesh.size())
    return full


def base_of(model: Any) -> nn.Module:
    """The causal language model inside a PEFT wrapper, or the model itself.

    Raises:
        ValueError: prompt-learning PEFT, whose virtual tokens shift every position.
    """
    configs = getattr(model, "peft_config", None)
    if configs is None:
        return model
    if any(getattr(c, "is_prompt_learning", False) for c in configs.values()):
        raise ValueError("model: expected no prompt-learning PEFT, whose virtual tokens shift every position; use LoRA")
    base: nn.Module = model.get_base_model()
    return base


def states(model: nn.Module, hidden: Tensor, mapping: dict[str, Any]) -> HiddenStates:
    """Hidden states with the head as it is now: FSDP and PEFT replace it after construction."""
    head: Any = plain_head(model)
    weight = whole(head.weight)
    assert weight is not None
    return HiddenStates(hidden.to(weight.device), weight, whole(getattr(head, "bias", None)), **mapping)


def mean_capped_logits(head: Head, active: Tensor, softcap: float, scale: float) -> Tensor:
    """(N,) means over the vocabulary of `softcap*tanh(scale*z/softcap)` at the active rows, a tile of z at a time."""
    shape = head.shape(gradient=False, weight_gradient=False)
    walk = LinearWalk(head, plan_linear(shape, default_workspace(head.hidden.device, shape)))
    means = torch.zeros(active.shape, dtype=head.compute, device=active.device)
    for rows in active.nonzero().view(-1).split(walk.plan.rows):
        x = walk.take(rows)
        for begin, end in walk.blocks():
            z = walk.logits(x, rows.numel(), begin, end)[0]
            means[rows] += (softcap * torch.tanh(z * (scale / softcap))).sum(1) / walk.vocab
    return means


def backbone_states(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The backbone's output, with `last_hidden_state`."""
    return model.base_model(*args, **{**kwargs, "use_cache": False})


def answer(base: Any, keyword: str, function: Callable[..., Any]) -> None:
    """Let `model(..., keyword=value)` return `function(model, value, *args, **kwargs)` inside whatever wraps the model.

    Other calls go through as before; the signature stays, against which `generate` checks its keywords.
    """
    inner = base.forward

    @functools.wraps(inner)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        value = kwargs.pop(keyword, None)
        return inner(*args, **kwargs) if value is None else function(self, value, *args, **kwargs)

    base.forward = types.MethodType(forward, base)


def masked_ids(labels: Tensor) -> tuple[Tensor, Tensor]:
    """(token ids, bool mask) of labels that are -100 where nothing is scored."""
    mask = labels != -100
    return torch.where(mask, labels, 0), mask
