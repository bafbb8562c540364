"""Others' ways from hidden states to a loss, called as their trainers call them, and why some are not called."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import rivals

EAGER, TRL, LIGER = "torch eager, all logits", "TRL fused head", "Liger chunked GRPO"
LIGER_SCALED, LIGER_CE = "Liger scaled CE and PPO", "Liger fused linear CE"
TORCH_CE = "F.linear_cross_entropy"


class Tokens:
    """Targets, constants and mask of a batch of equally long sequences, as a rival's loss reads them.

    `targets`, `logp_old` and `mask` are (N,), `sequence_advantages` (S,), in the order of the tokens.
    """

    def __init__(self, targets: Tensor, logp_old: Tensor, sequence_advantages: Tensor, mask: Tensor) -> None:
        self.targets, self.logp_old, self.mask = targets, logp_old, mask
        self.sequence_advantages = sequence_advantages
        self.sequences = sequence_advantages.numel()
        self.advantages = sequence_advantages.repeat_interleave(targets.numel() // self.sequences)
        self.count = float(mask.sum())

    def ppo(self, logp: Tensor) -> Tensor:
        """PPO's token mean, in the dtype of the log-probs."""
        constants = (self.logp_old.to(logp.dtype), self.advantages.to(logp.dtype))
        return rivals.ppo_token_mean(logp, *constants, self.count, self.mask)


def eager_loss(tokens: Tokens, hidden: Tensor, weight: Tensor) -> Tensor:
    """All logits at once, log_softmax in fp32."""
    logp = torch.log_softmax(F.linear(hidden, weight).float(), -1)
    return tokens.ppo(logp.gather(-1, tokens.targets[:, None]).squeeze(-1))


def trl_loss(tokens: Tokens, hidden: Tensor, weight: Tensor) -> Tensor:
    """TRL's `add_fused_lm_head` as `GRPOTrainer` asks for it, with entropy; off a GPU masked places are scored too."""
    function = _import("trl.kernels").ChunkedLogProbFunction
    chunk = _import("trl.trainer.utils")._CHUNKED_LOGPROB_CHUNK_SIZE
    mask = tokens.mask
    compact = hidden.device.type == "cuda"
    rows, ids = (hidden[mask], tokens.targets[mask]) if compact else (hidden, tokens.targets.where(mask, 0))
    logp, *_ = function.apply(rows, weight, None, ids, 1.0, chunk, None, 1.0, ("log_probs", "entropy"))
    spread = logp.new_zeros(mask.shape).masked_scatter(mask, logp) if compact else logp.masked_fill(~mask, 0)
    return tokens.ppo(spread)


def liger_loss(tokens: Tokens, hidden: Tensor, weight: Tensor) -> Tensor:
    """`LigerFusedLinearGRPOLoss`, one sequence a chunk; its arithmetic on log-probs is not compiled."""
    module = _import("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss(
        beta=0.0,
        compiled=False,
        use_ref_model=False,
        epsilon_low=rivals.EPSILON_LOW,
        epsilon_high=rivals.EPSILON_HIGH,
        loss_type="dapo",
    )
    padded = (tokens.sequences, -1)
    ids, mask, old = (t.view(padded) for t in (tokens.targets, tokens.mask.float(), tokens.logp_old))
    hidden = hidden.view(*ids.shape, -1)
    loss, _ = module(hidden, weight, ids, mask, tokens.sequence_advantages, old_per_token_logps=old)
    result: Tensor = loss
    return result


def liger_scaled_loss(tokens: Tokens, hidden: Tensor, weight: Tensor) -> Tensor:
    """Liger's scaled cross entropy (its PyTorch form off an H100) under the same loss."""
    module = _import("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    ids = tokens.targets.where(tokens.mask, -100)
    return tokens.ppo(-module.LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, weight, ids))


def liger_cross_entropy(tokens: Tokens, hidden: Tensor, weight: Tensor) -> Tensor:
    """Liger's fused linear cross entropy, a Triton kernel."""
    module = _import("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
    loss: Tensor = module(weight, hidden, tokens.targets)
    return loss


def torch_cross_entropy(tokens: Tokens, hidden: Tensor, weight: Tensor) -> Tensor:
    """PyTorch's own without options: all logits at once. Its chunks of a few rows take a CPU several times as long."""
    return F.linear_cross_entropy(hidden, weight, tokens.targets)


def refusal(name: str, device: torch.device) -> str | None:
    """Why a rival is not among the rows; None when it is."""
    if name == TORCH_CE and not hasattr(F, "linear_cross_entropy"):
        return f"{name}: not run, PyTorch {torch.__version__} has none"
    package = {TRL: "trl.kernels", LIGER: "liger_kernel.chunked_loss", LIGER_SCALED: "liger_kernel.chunked_loss"}
    try:
        if name in package:
            _import(package[name])
        elif name == LIGER_CE:
            _import("liger_kernel.transformers")
    except ImportError as error:
        return f"{name}: not run, {error}"
    if name == LIGER_CE and device.type != "cuda":
        return f"{name}: not run, its Triton kernel needs a GPU and the tensors are on {device.type}"
    return None


def _import(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they and what they import warn about optional packages
        return importlib.import_module(name)
