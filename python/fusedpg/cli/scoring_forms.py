"""How log-probs and entropy are computed without gradient: ours, torch's, and others' as their trainers call them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedpg import linear_token_logprobs, token_logprobs

from . import availability
from .availability import LIGER_SCORE, LIGER_SELECTIVE, QUACK_CE, TRL_SELECTIVE, VERL_HEAD, VERL_KERNEL, VERL_LOGITS

#: (log-probs, entropy or None) from the scored rows and the targets
Score = Callable[..., tuple[Tensor, Tensor | None]]


def fused(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
    """Ours, one read of the logits."""
    out = token_logprobs(logits, targets, return_entropy=True)
    return out.logp, out.entropy


def fused_logp(logits: Tensor, targets: Tensor) -> tuple[Tensor, None]:
    """Ours without entropy."""
    return token_logprobs(logits, targets).logp, None


def fused_linear(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
    """Ours, one product in a workspace."""
    out = linear_token_logprobs(hidden, weight, targets, return_entropy=True)
    return out.logp, out.entropy


def fused_linear_logp(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, None]:
    """Ours without entropy."""
    return linear_token_logprobs(hidden, weight, targets).logp, None


def eager(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """log_softmax in fp32, gather, and the entropy from it."""
    log_probs = torch.log_softmax(logits.float(), -1)
    return log_probs.gather(-1, targets[:, None]).squeeze(-1), -(log_probs.exp() * log_probs).sum(-1)


def eager_linear(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """All logits at once."""
    return eager(F.linear(hidden, weight), targets)


def cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, None]:
    """PyTorch's."""
    return -F.cross_entropy(logits, targets, reduction="none"), None


def quack_cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, None]:
    """QuACK's forward kernel."""
    return -availability.load(QUACK_CE).cross_entropy(logits, targets, reduction="none"), None


def trl_selective(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """As `GRPOTrainer` scores without its fused head; one sequence."""
    module = availability.load(TRL_SELECTIVE)
    batch = logits.unsqueeze(0)
    return module.selective_log_softmax(batch, targets.unsqueeze(0)), module.entropy_from_logits(batch)


def verl_logits(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """As its workers score without a fused head."""
    module = availability.load(VERL_LOGITS)
    return module.logprobs_from_logits(logits, targets), module.entropy_from_logits(logits)


def liger_selective(padded: Tensor, targets: Tensor) -> tuple[Tensor, None]:
    """`padded` ends with a row that scores nothing, as a sequence's logits do."""
    function = availability.load(LIGER_SELECTIVE).fused_selective_log_softmax
    return function(padded.unsqueeze(0), targets.unsqueeze(0), 1.0, None), None


def verl_head(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """verl's chunks of 512 tokens in PyTorch."""
    function = availability.load(VERL_HEAD).FusedLinearForPPOFunction
    logp, entropy = function.apply(hidden, weight, targets)
    return logp, entropy


def liger_scores(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Its PyTorch form off an H100."""
    function = availability.load(LIGER_SCORE).LigerFusedLinearScaledCrossEntropyFunction
    loss, entropy = function.apply(hidden, weight, targets, return_entropy=True)
    return -loss, entropy


def verl_kernel(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """verl's Triton head."""
    logp, entropy = availability.load(VERL_KERNEL).linear_cross_entropy(hidden, weight, targets)
    return logp, entropy
