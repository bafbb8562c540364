"""A randomly initialised Qwen3 of under a hundred thousand parameters, and sampling from it. Nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def build_model(vocabulary: int, positions: int, width: int = 128, layers: int = 2) -> Any:
    """A `Qwen3ForCausalLM` with random weights from torch's global seed."""
    try:
        from transformers import Qwen3Config, Qwen3ForCausalLM
    except ImportError as error:
        raise SystemExit(f"the demo needs transformers: pip install 'fusedpg[demo]' ({error})") from None
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


@torch.no_grad()
def generate(model: Any, prompts: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """`length` sampled tokens (temperature 1) after each prompt, with a key-value cache."""
    out = model(prompts, use_cache=True)
    tokens = []
    for step in range(length):
        probabilities = torch.softmax(out.logits[:, -1].float(), -1)
        tokens.append(torch.multinomial(probabilities, 1, generator=generator))
        if step + 1 < length:
            out = model(tokens[-1], past_key_values=out.past_key_values, use_cache=True)
    return torch.cat(tokens, 1)


def answer_logits(model: Any, prompts: Tensor, answers: Tensor) -> Tensor:
    """(B, T, V) logits that score each token of `answers`: a strided view, no copy."""
    logits = model(torch.cat([prompts, answers], 1), use_cache=False).logits
    return logits[:, prompts.shape[1] - 1 : -1]
