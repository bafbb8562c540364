"""What a trainer runs without this library: plain PyTorch, as in TRL and verl. Also the fp64 truth, when given fp64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

EPSILON_LOW, EPSILON_HIGH = 0.2, 0.28


def ppo_token_mean(
    logp: Tensor, logp_old: Tensor, advantages: Tensor, denominator: float, mask: Tensor | None = None
) -> Tensor:
    """PPO's clipped loss of every (selected) token, summed and divided by a number of tokens."""
    ratio = torch.exp(logp - logp_old)
    clipped = ratio.clamp(1 - EPSILON_LOW, 1 + EPSILON_HIGH)
    loss = torch.max(-advantages * ratio, -advantages * clipped)
    return (loss if mask is None else torch.where(mask, loss, 0.0)).sum() / denominator


def log_softmax_loss(
    logits: Tensor, targets: Tensor, logp_old: Tensor, advantages: Tensor, denominator: float
) -> Tensor:
    """The usual form: log_softmax in fp32, gather, clipped loss, token mean."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    logp = torch.log_softmax(wide, -1).gather(-1, targets[:, None]).squeeze(-1)
    return ppo_token_mean(logp, logp_old, advantages, denominator)


def selective_loss(logits: Tensor, targets: Tensor, logp_old: Tensor, advantages: Tensor, denominator: float) -> Tensor:
    """The same through TRL's `selective_log_softmax`, one sequence (a quarter of the tokens) at a time.

    It takes logsumexp in fp32, and for 16-bit logits log_softmax in their own dtype.
    """
    count = 4 if len(targets) % 4 == 0 else 1
    sequences, ids = logits.view(count, -1, logits.shape[-1]), targets.view(count, -1, 1)
    if logits.dtype in (torch.float32, torch.float64):
        selected = sequences.gather(-1, ids).squeeze(-1)
        logp = selected - torch.stack([torch.logsumexp(part, dim=-1) for part in sequences])
    else:
        pairs = zip(sequences, ids, strict=True)
        logp = torch.stack([F.log_softmax(part, dim=-1).gather(-1, t).squeeze(-1) for part, t in pairs])
    return ppo_token_mean(logp.view(-1), logp_old, advantages, denominator)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """verl's masked_mean: the selected tokens' mean, with its guard against an empty mask."""
    return (torch.where(mask, values, 0.0)).sum() / (mask.sum() + 1e-8)


def verl_policy_loss(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """verl's vanilla policy loss without its dual clip: (loss, clip fraction, approximate KL)."""
    negative_approx_kl = torch.clamp(log_prob - old_log_prob, min=-20.0, max=20.0)
    ratio = torch.exp(negative_approx_kl)
    ppo_kl = masked_mean(-negative_approx_kl, response_mask)
    losses1 = -advantages * ratio
    losses2 = -advantages * torch.clamp(ratio, 1 - EPSILON_LOW, 1 + EPSILON_HIGH)
    losses = torch.maximum(losses1, losses2)
    clip_fraction = masked_mean(torch.gt(losses2, losses1).float(), response_mask)
    return masked_mean(losses, response_mask), clip_fraction, ppo_kl
