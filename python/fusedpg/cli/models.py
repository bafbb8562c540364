"""Output heads of real models by name: hidden size and vocabulary (rows of the head, padding included).

From each model's published `config.json` (`hidden_size`, `vocab_size`) at huggingface.co under the repository named
here. Soft caps and tied embeddings change no shape and are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Head:
    """What decides the cost of a head; `source` is the repository that holds its config."""

    width: int
    vocab: int
    source: str


_QWEN3, _LLAMA3, _GEMMA2, _GEMMA3, _GPT_OSS = 151_936, 128_256, 256_000, 262_208, 201_088

MODELS: Mapping[str, Head] = MappingProxyType(
    {
        "qwen3-0.6b": Head(1024, _QWEN3, "Qwen/Qwen3-0.6B"),
        "qwen3-1.7b": Head(2048, _QWEN3, "Qwen/Qwen3-1.7B"),
        "qwen3-4b": Head(2560, _QWEN3, "Qwen/Qwen3-4B"),
        "qwen3-8b": Head(4096, _QWEN3, "Qwen/Qwen3-8B"),
        "qwen3-14b": Head(5120, _QWEN3, "Qwen/Qwen3-14B"),
        "qwen3-30b-a3b": Head(2048, _QWEN3, "Qwen/Qwen3-30B-A3B"),
        "qwen3-32b": Head(5120, _QWEN3, "Qwen/Qwen3-32B"),
        "llama3.2-1b": Head(2048, _LLAMA3, "meta-llama/Llama-3.2-1B"),
        "llama3.2-3b": Head(3072, _LLAMA3, "meta-llama/Llama-3.2-3B"),
        "llama3.1-8b": Head(4096, _LLAMA3, "meta-llama/Llama-3.1-8B"),
        "llama3.1-70b": Head(8192, _LLAMA3, "meta-llama/Llama-3.1-70B"),
        "gemma2-2b": Head(2304, _GEMMA2, "google/gemma-2-2b"),
        "gemma2-9b": Head(3584, _GEMMA2, "google/gemma-2-9b"),
        "gemma2-27b": Head(4608, _GEMMA2, "google/gemma-2-27b"),
        "gemma3-1b": Head(1152, 262_144, "google/gemma-3-1b-pt"),
        "gemma3-4b": Head(2560, _GEMMA3, "google/gemma-3-4b-pt"),
        "gemma3-12b": Head(3840, _GEMMA3, "google/gemma-3-12b-pt"),
        "gemma3-27b": Head(5376, _GEMMA3, "google/gemma-3-27b-pt"),
        "gpt-oss-20b": Head(2880, _GPT_OSS, "openai/gpt-oss-20b"),
        "gpt-oss-120b": Head(2880, _GPT_OSS, "openai/gpt-oss-120b"),
    }
)
#: products of a head that one row of the benchmark may take on a CPU: about a second of two cores
CPU_FLOPS = 2.5e11


def find(name: str) -> Head:
    """A model's head, whatever the case of its name.

    Raises:
        ValueError: no such model; the message lists all.
    """
    head = MODELS.get(name.lower())
    if head is None:
        raise ValueError(f"model: expected one of {', '.join(MODELS)}; got {name!r}")
    return head


def cpu_tokens(head: Head, most: int) -> int:
    """The tokens (a power of two, at most `most`) whose three products through the head a CPU can afford."""
    tokens = 1
    while 2 * tokens <= most and 6 * 2 * tokens * head.width * head.vocab <= CPU_FLOPS:
        tokens *= 2
    return tokens
