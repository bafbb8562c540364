"""GRPO with TRL through fusedpg, offline on a CPU: `python examples/trl_grpo.py`.

The model is a random Qwen3 of two layers; with one of your own the only line that differs from stock TRL is the class.
"""

import tempfile
from pathlib import Path

from trl import GRPOConfig

from fusedpg.certify.tiny_trl import COMMON, even_ids, history, make_model, prompts, tokenizer
from fusedpg.integrations.trl import FusedGRPOTrainer


def main(folder: Path) -> FusedGRPOTrainer:
    """A few steps; the reward is the share of even token ids."""
    args = GRPOConfig(output_dir=str(folder / "out"), max_steps=4, loss_type="dapo", beta=0.01, **COMMON)
    trainer = FusedGRPOTrainer(  # stock: GRPOTrainer
        model=make_model(folder),
        reward_funcs=even_ids,
        args=args,
        train_dataset=prompts(),
        processing_class=tokenizer(),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as path:
        trainer = main(Path(path))
    print("loss in", "two passes: " + trainer.why_two_passes if trainer.why_two_passes else "one pass, three products")
    for step in history(trainer):
        print({name: round(step[name], 5) for name in ("loss", "grad_norm", "reward", "kl", "entropy")})
