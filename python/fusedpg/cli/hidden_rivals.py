"""Others' ways from hidden states to a loss, called as their trainers call them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import rivals
from .availability import (
    CUT_CE,
    LIGER_CE,
    LIGER_CHUNKED,
    LIGER_SCALED,
    QUACK_LINEAR,
    TRL_HEAD,
    TRL_SELECTIVE,
    VERL_KERNEL,
    load,
)

EAGER = "torch eager, all logits"


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
    mask = tokens.mask
    compact = hidden.device.type == "cuda"
    rows, ids = (hidden[mask], tokens.targets[mask]) if compact else (hidden, tokens.targets.where(mask, 0))
    logp, _ = trl_scores(rows, weight, ids)
    spread = logp.new_zeros(mask.shape).masked_scatter(mask, logp) if compact else logp.masked_fill(~mask, 0)
    return tokens.ppo(spread)


def trl_scores(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probs, entropy) of TRL's fused head, differentiable."""
    function = load(TRL_HEAD).ChunkedLogProbFunction
    chunk = load(TRL_SELECTIVE)._CHUNKED_LOGPROB_CHUNK_SIZE
    outputs = ("log_probs", "entropy")
    logp, entropy, *_ = function.apply(hidden, weight, None, targets, 1.0, chunk, None, 1.0, outputs)
    return logp, entropy


def liger_loss(tokens: Tokens, hidden: Tensor, weight: Tensor) -> Tensor:
    """`LigerFusedLinearGRPOLoss`, one sequence a chunk; its arithmetic on log-probs is not compiled."""
    module = load(LIGER_CHUNKED).LigerFusedLinearGRPOLoss(
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
    module = load(LIGER_SCALED)
    ids = tokens.targets.where(tokens.mask, -100)
    return tokens.ppo(-module.LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, weight, ids))


def liger_cross_entropy(tokens: Tokens, hidden: Tensor, weight: Tensor) -> Tensor:
    """Liger's fused linear cross entropy, a Triton kernel."""
    module = load(LIGER_CE).LigerFusedLinearCrossEntropyLoss()
    loss: Tensor = module(weight, hidden, tokens.targets)
    return loss


def torch_cross_entropy(tokens: Tokens, hidden: Tensor, weight: Tensor) -> Tensor:
    """PyTorch's own without options: all logits at once. Its chunks of a few rows take a CPU several times as long."""
    return F.linear_cross_entropy(hidden, weight, tokens.targets)


def verl_loss(tokens: Tokens, hidden: Tensor, weight: Tensor) -> Tensor:
    """verl's Triton head, with the entropy that it always computes."""
    logp, _ = load(VERL_KERNEL).linear_cross_entropy(hidden, weight, tokens.targets)
    return tokens.ppo(logp)


def quack_cross_entropy(tokens: Tokens, hidden: Tensor, weight: Tensor) -> Tensor:
    """QuACK's chunks of tokens with its cross entropy kernel."""
    loss: Tensor = load(QUACK_LINEAR).chunked_linear_cross_entropy(hidden, weight, tokens.targets)
    return loss


def cut_cross_entropy(tokens: Tokens, hidden: Tensor, weight: Tensor) -> Tensor:
    """Apple's kernel without its gradient filter, which leaves small entries out."""
    loss: Tensor = load(CUT_CE).linear_cross_entropy(hidden, weight, tokens.targets, filter_eps=None)
    return loss
