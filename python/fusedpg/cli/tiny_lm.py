"""A randomly initialised Qwen3 of under a hundred thousand parameters, and sampling from it. Nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fusedpg import HiddenStates


class Policy(nn.Module):
    """The model as objectives call it: a prepared batch in, the hidden states that score its targets out."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, batch: Any) -> HiddenStates:
        """(B, T, D) and the head for `targets` (B, T), which end `input_ids`: a strided view, no copy, no logits."""
        hidden: Tensor = self.lm.model(batch.input_ids, use_cache=False).last_hidden_state
        return HiddenStates(hidden[:, -batch.targets.shape[1] - 1 : -1], self.lm.lm_head.weight)

    @torch.no_grad()
    def generate(self, prompts: Tensor, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """`length` tokens (temperature 1) after each prompt, with a key-value cache, and the sampler's log-probs."""
        out = self.lm(prompts, use_cache=True)
        tokens, logps = [], []
        for step in range(length):
            logp = torch.log_softmax(out.logits[:, -1].float(), -1)
            tokens.append(torch.multinomial(logp.exp(), 1, generator=generator))
            logps.append(logp.gather(1, tokens[-1]))
            if step + 1 < length:
                out = self.lm(tokens[-1], past_key_values=out.past_key_values, use_cache=True)
        return torch.cat(tokens, 1), torch.cat(logps, 1)


def build_policy(vocabulary: int, positions: int, width: int = 128, layers: int = 2) -> Policy:
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
    return Policy(Qwen3ForCausalLM(config))
