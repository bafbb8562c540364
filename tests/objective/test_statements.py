"""Statements of the guide that the other tests of the contract leave out; the docstring says which."""

import copy
import dataclasses
import inspect
import pickle
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from toy import CONTEXT, Policy, assert_same, make_batch, split, whole_gradients

import fusedpg
from fusedpg.accumulate import StepAccumulator
from fusedpg.annotators import annotate_advantages
from fusedpg.builders import build_grpo_objective, build_opd_objective
from fusedpg.cli import objectives
from fusedpg.config import DPOConfig, GRPOConfig, OPDConfig, RolloutConfig, RunConfig
from fusedpg.dpo import build_dpo_objective
from fusedpg.old_logp import OldLogpCache
from fusedpg.policy_objective import RESPONSE_METRICS
from fusedpg.preflight import READS, preflight
from fusedpg.recipes import RECIPES, apply_gspo_knobs, build_grpo_config

SEQUENCE = {"importance_sampling_level": "sequence", "lower_bound_ratio": 0, "epsilon_low": 3e-4, "epsilon_high": 4e-4}
BUILDERS = {GRPOConfig: build_grpo_objective, OPDConfig: build_opd_objective, DPOConfig: build_dpo_objective}
CONFIGS = {
    "grpo": GRPOConfig(kl_beta=0.1),
    "gspo": GRPOConfig(**SEQUENCE),
    "legacy_pg": GRPOConfig(grpo_surrogate="legacy_pg"),
    "opd": OPDConfig(),
    "direct": OPDConfig(distillation_mode="direct"),
    "dpo": DPOConfig(),
}
pytestmark = pytest.mark.filterwarnings(
    "ignore:distillation_mode:UserWarning"
)  # direct mode says what it does not read


def build(rl):
    return BUILDERS[type(rl)](rl, CONTEXT)


def every_signal():
    """A batch that any objective can read."""
    batch = make_batch()
    teacher = Policy(seed=4)(batch).detach()
    logp = fusedpg.token_logprobs(teacher, batch["targets"], backend="reference").logp
    return batch | {"teacher": teacher, "teacher_logp": logp}


# ------------------------------------------------------------------ ownership


@pytest.mark.parametrize("name", CONFIGS)
def test_an_objective_is_no_second_control_plane(name):
    """ "It must not launch roles, move weights, fetch remote data, save checkpoints, or decide physical placement." """
    objective, model, batch = build(CONFIGS[name]), Policy().eval(), every_signal()
    state, given = copy.deepcopy(model.state_dict()), copy.deepcopy(batch)
    objective(model, batch)
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key])
    assert not model.training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert batch.keys() == given.keys()
    assert all(torch.equal(value, given[key]) for key, value in batch.items())


def test_no_module_is_read_off_an_objective():
    """ "the trainer never reads a module off the objective": the reference is neither trained nor reachable."""
    objective, reference, model = build(GRPOConfig(kl_beta=0.1)), Policy(seed=9), Policy()
    objective.reference_scorer.bind(reference)
    batch = make_batch()
    del batch["logp_ref"]
    accumulator = StepAccumulator(objective, model)
    accumulator.step(split(batch, [3]))
    values = [getattr(objective, f.name) for f in dataclasses.fields(objective)] + list(objective.fn.keywords.values())
    assert not any(isinstance(v, nn.Module) for v in values)
    assert all(p.grad is None for p in reference.parameters())
    assert {id(p) for p in accumulator.parameters} == {id(p) for p in model.parameters()}
    assert model.table.grad.any()


# ------------------------------------------------------------------ the builders' seam


@pytest.mark.parametrize("builder", BUILDERS.values(), ids=lambda b: b.__name__)
def test_builders_have_the_seams_signature(builder):
    """ "build_objective(rl, model_config) -> Objective", "at module scope"; "The builder is required": no default."""
    parameters = inspect.signature(builder).parameters
    assert list(parameters) == ["rl", "context"]
    assert all(p.default is inspect.Parameter.empty for p in parameters.values())
    assert builder.__qualname__ == builder.__name__


@pytest.mark.parametrize("name", CONFIGS)
def test_every_built_objective_reaches_a_worker(name):
    """ "A module-level function, optionally specialized with functools.partial over primitive values, is serializable" """
    builder = pickle.loads(pickle.dumps(partial(BUILDERS[type(CONFIGS[name])], CONFIGS[name], CONTEXT)))
    objective = build(CONFIGS[name])
    again, batch = pickle.loads(pickle.dumps(builder())), every_signal()
    loss, want, _ = whole_gradients(objective, batch)
    got_loss, got, _ = whole_gradients(again, batch)
    assert again.identity == objective.identity
    assert got_loss == loss
    assert_same(got, want)


def test_preflight_runs_before_a_model_is_built():
    """ "The entry checks this before placement or model construction" """
    with pytest.raises(ValueError, match=r"^rollout.temperature: .*expected rl.temperature=1.0; got 0.5"):
        objectives.choose("gspo", ("rollout.temperature=0.5",))


# ------------------------------------------------------------------ a knob that is accepted is read

#: key -> (another value, the knobs that it needs beside it, where it shows)
OTHER = {
    "epsilon_low": (0.05, {}, "loss"),
    "epsilon_high": (0.05, {}, "loss"),
    "lower_bound_ratio": (1.05, {}, "loss"),
    "temperature": (0.7, {}, "loss"),
    "kl_beta": (0.1, {}, "loss"),
    "loss_type": ("seq-mean-token-mean", {}, "loss"),
    "importance_sampling_level": ("sequence", {**SEQUENCE, "importance_sampling_level": "token"}, "loss"),
    "divergence": ("forward_kl", {}, "loss"),
    "jsd_beta": (0.2, {"divergence": "jsd"}, "loss"),
    "unbiased_advantage": (True, {}, "advantages"),
    "mini_batch_per_replica": (4, {"batch_per_replica": 8}, "updates"),
    "batch_per_replica": (8, {"mini_batch_per_replica": 4}, "updates"),
    "epochs": (2, {}, "updates"),
    "certified_deterministic_forward": (True, {}, "certified"),
}
SELECTED = {
    "grpo_surrogate='clipped'": (GRPOConfig, {}),
    "grpo_surrogate='legacy_pg'": (GRPOConfig, {"grpo_surrogate": "legacy_pg"}),
    "distillation_mode='advantage'": (OPDConfig, {}),
    "distillation_mode='direct'": (OPDConfig, {"distillation_mode": "direct"}),
}


def effect(rl, where):
    if where == "advantages":
        return annotate_advantages(rl, torch.tensor([0.0, 1.0, 1.0, 4.0]), 4).tolist()
    if where == "updates":
        return rl.n_mini, rl.on_policy
    objective = build(rl)
    return objective.old_logp_cache.certified if where == "certified" else objective(Policy(), every_signal())[0].item()


@pytest.mark.parametrize(("who", "key"), [(who, key) for who, keys in READS.items() for key in sorted(keys)])
def test_every_accepted_knob_is_read(who, key):
    """ "a resolved config [never claims] an algorithm setting that the actual loss never reads" """
    kind, base = SELECTED[who]
    value, beside, where = OTHER[key]
    rl = kind(**base, **beside)
    before = effect(rl, where)
    setattr(rl, key, value)
    assert effect(rl, where) != before


# ------------------------------------------------------------------ the decision examples, as printed


def test_dr_grpo_as_printed():
    """ "the complete variant is a recipe choice", with "the existing rollout bound" bound to the builder's context."""
    cfg = build_grpo_config()
    cfg.algorithm = "dr_grpo"
    cfg.job.name = "qwen3b_bf16_dr_grpo_seed42"
    cfg.rl.grpo_surrogate = "clipped"
    cfg.rl.unbiased_advantage = True
    cfg.rl.loss_type = "seq-mean-token-sum-fixed"
    objective_context = SimpleNamespace(name_or_path="model", max_response_length=cfg.rollout.max_tokens)
    preflight(cfg)
    objective = build_grpo_objective(cfg.rl, objective_context)
    assert cfg.rl == RECIPES["dr_grpo"]().rl
    assert objective.identity["max_response_length"] == cfg.rollout.max_tokens == RolloutConfig().max_tokens
    plain = build_grpo_objective(GRPOConfig(), objective_context)
    # "Metrics, π_old caching, and the metric adapter remain on the single production objective path"
    assert objective.metric_adapter == plain.metric_adapter
    assert type(objective.old_logp_cache) is type(plain.old_logp_cache) is OldLogpCache


def test_gspo_as_printed():
    """ "apply_gspo_knobs is the one place that turns a clipped rl section into the paper's objective" """
    cfg = build_grpo_config()
    cfg.algorithm = "gspo"
    cfg.job.name = "qwen3b_bf16_gspo_seed42"
    apply_gspo_knobs(cfg.rl, mini_batch_per_replica=32)
    preflight(cfg)
    assert cfg.rl == RECIPES["gspo"]().rl
    mine, base = build(cfg.rl), build(GRPOConfig())
    assert (mine.fn.func, mine.reduction) == (base.fn.func, base.reduction)
    assert set(mine.metric_adapter.names) - set(base.metric_adapter.names) == set(RESPONSE_METRICS)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "gspo", "dapo"])
def test_recipes_select_the_production_surrogate(name):
    """ "production recipes … explicitly use clipped"; no config class is added "merely to rename existing fields" """
    rl = RECIPES[name]().rl
    assert type(rl) is GRPOConfig
    assert rl.grpo_surrogate == "clipped"


def test_the_sequence_level_inherits_the_gates():
    """ "π_old caching, the attestation gate, the temperature contract, and entry preflight are inherited unchanged" """
    rl = GRPOConfig(**SEQUENCE, mini_batch_per_replica=4, batch_per_replica=8)
    cache = build(rl).old_logp_cache
    assert (cache.several_updates, cache.certified) == (True, False)
    assert build(RECIPES["gspo"]().rl).old_logp_cache.certified
    with pytest.raises(ValueError, match=r"^rollout.temperature: .*expected rl.temperature=1.0; got 0.6"):
        preflight(RunConfig(rl=rl, rollout=RolloutConfig(temperature=0.6)))
    refused = GRPOConfig(grpo_surrogate="legacy_pg", importance_sampling_level="sequence")
    with pytest.raises(ValueError, match=r"^rl.importance_sampling_level: grpo_surrogate='legacy_pg' never reads it"):
        preflight(RunConfig(rl=refused))
