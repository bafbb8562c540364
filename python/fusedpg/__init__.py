"""Fused policy-gradient losses for LLM reinforcement learning.

Importing the package needs neither Triton nor the compiled core; each is loaded by the first call that runs on it.
"""

from .functional import policy_loss, policy_loss_from_logits, token_logprobs
from .losses import CATALOGUE, loss_spec
from .metrics import METRIC_NAMES, Metrics
from .outputs import LogprobOutput, LossOutput
from .spec import LossSpec

__version__ = "0.1.0"

__all__ = [
    "CATALOGUE",
    "METRIC_NAMES",
    "LogprobOutput",
    "LossOutput",
    "LossSpec",
    "Metrics",
    "__version__",
    "loss_spec",
    "policy_loss",
    "policy_loss_from_logits",
    "token_logprobs",
]
