"""What the benchmark measures: suites, shapes, dtypes, rounds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: of the hidden suite, beside that of the other suites
SMALL_VOCAB = 32_768
#: of the sweeps' middle
SWEEP_VOCAB = 16_384


@dataclass(frozen=True)
class Options:
    """What to measure; no suites are all of them."""

    suites: tuple[str, ...] = ()
    tokens: int = 1024
    vocab: int = 151_936
    width: int = 512
    loss_tokens: int = 1 << 20
    accuracy_rows: int = 16
    rounds: int = 9
    dtypes: tuple[str, ...] = ("fp32", "bf16")
    accuracy_dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")
    device: str = "cpu"
    compiled: bool = True
    model: str | None = None
    #: tokens through a model's whole head; None is `tokens`
    head_tokens: int | None = None

    def with_head(self, model: str, vocab: int, width: int, tokens: int) -> Options:
        """The same for a model's head, which takes so many tokens."""
        return replace(self, model=model, vocab=vocab, width=width, head_tokens=tokens)

    @property
    def place(self) -> torch.device:
        """The device as torch names it."""
        return torch.device(self.device)

    @property
    def heads(self) -> list[tuple[int, int]]:
        """(tokens, vocabulary) of the hidden suite: half the tokens, at a small vocabulary and at the chosen one.

        A model has its own vocabulary alone.
        """
        if self.model is not None:
            return [(self.head_tokens or self.tokens, self.vocab)]
        vocabs = [self.vocab] if self.vocab <= SMALL_VOCAB else [SMALL_VOCAB, self.vocab]
        return [(max(1, self.tokens // 2), vocab) for vocab in vocabs]

    @property
    def hidden_rounds(self) -> int:
        """Two in three: a run of the hidden suite takes seconds."""
        return max(1, 2 * self.rounds // 3)

    @property
    def scored_tokens(self) -> int:
        """Tokens of the scoring suite: an eighth."""
        return max(1, min(self.tokens // 8, self.head_tokens or self.tokens))

    @property
    def distilled_tokens(self) -> int:
        """Tokens of the distillation suite, an eighth: eager PyTorch holds ten matrices of the logits' size."""
        return max(1, self.tokens // 8)

    @property
    def sweeps(self) -> dict[str, list[tuple[int, int, int]]]:
        """(N, V, D) of each point of the scaling suite, by the size that grows; all meet in one middle."""
        tokens = max(1, min(self.tokens // 4, self.head_tokens or self.tokens))
        vocab, width = min(SWEEP_VOCAB, self.vocab), self.width
        return {
            "N": [(n, vocab, width) for n in _halves(2 * tokens, 4)],
            "V": [(tokens, v, width) for v in _halves(min(2 * vocab, self.vocab), 3)],
            "D": [(tokens, vocab, d) for d in _halves(width, 3)],
        }


def _halves(largest: int, count: int) -> list[int]:
    """`count` sizes up to `largest`, each twice the one before; fewer where they would fall under 2."""
    sizes = [largest >> shift for shift in range(count)]
    return sorted({size for size in sizes if size >= min(2, largest)})
