"""TRL runs that need no hub: a random Qwen3 of two layers, a byte-level tokenizer trained on the spot, a toy reward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCAB = 400
PROMPTS = ("sort these words", "one two", "the sea is", "count to ten please")
#: what differs from TRL's defaults in every run
COMMON = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
    "learning_rate": 3e-3,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "max_completion_length": 12,
    "logging_steps": 1,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
    "seed": 0,
    "disable_tqdm": True,
}


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and a few merges."""
    raw = Tokenizer(models.BPE(unk_token=None))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<bos>", "<eos>"]
    raw.train_from_iterator(
        [*PROMPTS] * 10, trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=special, initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )


def make_model(path: Path, *, vocab: int = VOCAB, tie: bool = False) -> str:
    """A saved model, so that a reference can be loaded beside it; a tenth of the vocabulary ends a completion."""
    where = path / "model"
    if where.exists():
        return str(where)
    torch.manual_seed(0)
    tok = tokenizer()
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=tie,
        pad_token_id=tok.pad_token_id,
        bos_token_id=tok.bos_token_id,
        eos_token_id=tok.eos_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = [tok.eos_token_id, *range(vocab - vocab // 10, vocab)]
    model.save_pretrained(where)
    tok.save_pretrained(where)
    return str(where)


def even_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of even token ids: it varies within a group."""
    return [sum(i % 2 == 0 for i in ids) / max(1, len(ids)) for ids in completion_ids]


def prompts() -> Dataset:
    """Every prompt eight times."""
    return Dataset.from_dict({"prompt": [*PROMPTS] * 8})


@contextmanager
def one_thread() -> Iterator[None]:
    """Tiny products do not pay for a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def grpo_trainer(path: Path, trainer_class: Callable[..., Any], *, model: Any = None, **options: Any) -> Any:
    """A GRPO trainer of a saved model, ready to train; the same random numbers each time."""
    from trl import GRPOConfig

    args = GRPOConfig(output_dir=str(path / "out"), **{**COMMON, **options})
    source = make_model(path) if model is None else model
    more = {"eval_dataset": prompts().select(range(4))} if "eval_strategy" in options else {}
    torch.manual_seed(0)
    return trainer_class(
        model=source,
        reward_funcs=even_ids,
        args=args,
        train_dataset=prompts(),
        processing_class=tokenizer(),
        **more,
    )


def grpo(path: Path, trainer_class: Callable[..., Any], *, model: Any = None, **options: Any) -> Any:
    """A whole GRPO run."""
    with one_thread():
        trainer = grpo_trainer(path, trainer_class, model=model, **{"max_steps": 3, **options})
        trainer.train()
    return trainer


def history(trainer: Any) -> list[dict[str, float]]:
    """The logged steps."""
    return [entry for entry in trainer.state.log_history if "grad_norm" in entry]
