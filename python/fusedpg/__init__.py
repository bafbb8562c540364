"""Fused policy-gradient losses for LLM reinforcement learning.

Importing the package needs neither Triton nor the compiled core; each is loaded by the first call that runs on it.
"""

from . import annotators, presets, recipes
from .accumulate import StepAccumulator, StepResult
from .builders import build_grpo_objective, build_opd_objective
from .config import DPOConfig, GRPOConfig, OPDConfig, RolloutConfig, RunConfig, with_options
from .context import LossContext
from .distill import DISTILL_METRIC_NAMES, DistillMetrics, DistillOutput, TopK, distillation_loss
from .dpo import build_dpo_objective
from .functional import policy_loss, policy_loss_from_logits, token_logprobs
from .hidden_states import HiddenStates
from .linear import linear_token_logprobs, policy_loss_from_hidden
from .linear_plan import LinearPlan, LinearShape, plan_linear
from .loss_call import LossResult
from .losses import CATALOGUE, loss_spec
from .metric_adapter import OBJECTIVE_NUMERATOR, OBJECTIVE_WEIGHT_SUM, MetricAdapter, ObjectiveMetrics
from .metrics import METRIC_NAMES, Metrics
from .objective import Objective, PolicyBatch, Reduction
from .old_logp import OldLogpCache, ReferenceScorer
from .outputs import LogprobOutput, LossOutput
from .policy_objective import build_policy_objective
from .preflight import preflight
from .registry import load_loss_entry_points, load_loss_plugins, register_loss, registered_losses
from .resolve import ResolvedLoss, resolve_loss
from .spec import LossSpec
from .workspace import release_workspace

__version__ = "0.1.0"

__all__ = [
    "CATALOGUE",
    "DISTILL_METRIC_NAMES",
    "METRIC_NAMES",
    "OBJECTIVE_NUMERATOR",
    "OBJECTIVE_WEIGHT_SUM",
    "DPOConfig",
    "DistillMetrics",
    "DistillOutput",
    "GRPOConfig",
    "HiddenStates",
    "LinearPlan",
    "LinearShape",
    "LogprobOutput",
    "LossContext",
    "LossOutput",
    "LossResult",
    "LossSpec",
    "MetricAdapter",
    "Metrics",
    "OPDConfig",
    "Objective",
    "ObjectiveMetrics",
    "OldLogpCache",
    "PolicyBatch",
    "Reduction",
    "ReferenceScorer",
    "ResolvedLoss",
    "RolloutConfig",
    "RunConfig",
    "StepAccumulator",
    "StepResult",
    "TopK",
    "__version__",
    "annotators",
    "build_dpo_objective",
    "build_grpo_objective",
    "build_opd_objective",
    "build_policy_objective",
    "distillation_loss",
    "linear_token_logprobs",
    "load_loss_entry_points",
    "load_loss_plugins",
    "loss_spec",
    "plan_linear",
    "policy_loss",
    "policy_loss_from_hidden",
    "policy_loss_from_logits",
    "preflight",
    "presets",
    "recipes",
    "register_loss",
    "registered_losses",
    "release_workspace",
    "resolve_loss",
    "token_logprobs",
    "with_options",
]
