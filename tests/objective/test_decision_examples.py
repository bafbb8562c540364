"""The guide's two decision examples (Dr-GRPO and GSPO are configs) and what its review checklist asks of them."""

import dataclasses
import math

import pytest
import torch
from toy import CONTEXT, LENGTHS, Policy, assert_same, gradients, make_batch, split, whole_gradients

import fusedpg
from fusedpg.accumulate import StepAccumulator
from fusedpg.annotators import annotate_advantages
from fusedpg.builders import build_grpo_objective
from fusedpg.config import LOSS_TYPES, GRPOConfig
from fusedpg.metric_adapter import OBJECTIVE_WEIGHT_SUM
from fusedpg.presets import cosmos
from fusedpg.recipes import (
    apply_gspo_knobs,
    build_dapo_config,
    build_dr_grpo_config,
    build_grpo_config,
    build_gspo_config,
)

SEQUENCE = {"importance_sampling_level": "sequence", "lower_bound_ratio": 0}


def grpo(**knobs):
    return build_grpo_objective(GRPOConfig(**knobs), CONTEXT)


def spec_in(objective):
    return objective.fn.keywords["spec"]


def changed(config, base):
    return {
        f.name: getattr(config, f.name)
        for f in dataclasses.fields(base)
        if getattr(config, f.name) != getattr(base, f.name)
    }


# ------------------------------------------------------------------ Dr-GRPO


def test_dr_grpo_is_a_config():
    """Two mathematical choices of the clipped objective, a name for provenance; no class, wrapper or estimator."""
    base, config = build_grpo_config(), build_dr_grpo_config()
    assert type(config.rl) is GRPOConfig
    assert changed(config.rl, base.rl) == {"unbiased_advantage": True, "loss_type": "seq-mean-token-sum-fixed"}
    assert (config.algorithm, config.job.name) != (base.algorithm, base.job.name)
    objective = build_grpo_objective(config.rl, CONTEXT)
    assert objective.fn.func is grpo().fn.func
    assert objective.reduction is grpo().reduction


def test_dr_grpo_divides_by_the_rollout_bound():
    """sum(sequence token losses) / rollout.max_tokens / number of sequences; the weight stays the sequence count."""
    batch = make_batch()
    loss, _, metrics = whole_gradients(build_grpo_objective(build_dr_grpo_config().rl, CONTEXT), batch)
    r = (fusedpg.token_logprobs(Policy()(batch), batch["targets"], backend="reference").logp - batch["logp_old"]).exp()
    a = batch["sequence_advantages"][:, None]
    x = torch.max(-a * r, -a * r.clamp(0.8, 1.2))
    x = torch.where(a < 0, torch.min(x, -3 * a), x)
    sequences = (batch["mask"].sum(1) > 0).sum()
    torch.testing.assert_close(loss, ((x * batch["mask"]).sum() / 7 / sequences).detach())
    assert metrics[OBJECTIVE_WEIGHT_SUM] == sequences


def test_dr_grpo_centres_and_grpo_scales():
    """Standard: (r - mean)/(std + eps); Dr-GRPO: r - mean. The reward stage's estimator follows the config."""
    rewards = torch.tensor([0.0, 1.0, 1.0, 4.0])
    # mean 1.5, deviations -1.5 -.5 -.5 2.5, variance 9/3 = 3
    centred = torch.tensor([-1.5, -0.5, -0.5, 2.5])
    assert torch.equal(annotate_advantages(build_dr_grpo_config().rl, rewards, 4), centred)
    want = centred / (math.sqrt(3.0) + 1e-4)
    torch.testing.assert_close(annotate_advantages(build_grpo_config().rl, rewards, 4), want)


def test_dr_grpo_without_a_bound_is_refused():
    """The fixed divisor comes from the builder's context, not from a second field under `rl`."""
    with pytest.raises(ValueError, match=r"^max_response_length: expected a positive int; got None"):
        build_grpo_objective(build_dr_grpo_config().rl, dataclasses.make_dataclass("C", ["name_or_path"])("m"))
    assert not hasattr(GRPOConfig(), "max_response_length")


# ------------------------------------------------------------------ GSPO


def test_gspo_is_a_config():
    """One function turns a clipped section into the paper's objective, with the caller's mini_batch_per_replica."""
    rl = GRPOConfig(grpo_surrogate="legacy_pg", loss_type="seq-mean-token-sum")
    apply_gspo_knobs(rl, mini_batch_per_replica=32)
    assert changed(rl, GRPOConfig()) == {
        "importance_sampling_level": "sequence",
        "lower_bound_ratio": 0,
        "epsilon_low": 3e-4,
        "epsilon_high": 4e-4,
        "loss_type": "seq-mean-token-mean",
        "mini_batch_per_replica": 32,
        "certified_deterministic_forward": True,
    }
    assert rl == build_gspo_config().rl
    objective = build_grpo_objective(rl, CONTEXT)
    assert objective.fn.func is grpo().fn.func
    assert objective.old_logp_cache is not None


def test_gspo_shares_one_ratio_and_clips_responses():
    """z_i is the mean log-ratio over the response's masked tokens, capped at 10 from above; the clip drops responses."""
    batch = make_batch()
    objective = grpo(**SEQUENCE, epsilon_low=0.02, epsilon_high=0.02, loss_type="seq-mean-token-mean")
    loss, got, metrics = whole_gradients(objective, batch)
    model = Policy()
    c = torch.log_softmax(model(batch), -1).gather(-1, batch["targets"][..., None])[..., 0]
    m = batch["mask"].double()
    z = ((c - batch["logp_old"]) * m).sum(1, keepdim=True) / m.sum(1, keepdim=True).clamp(min=1)
    s = (z.detach() + c - c.detach()).clamp(max=10.0).exp()
    a = batch["sequence_advantages"][:, None]
    x = torch.max(-a * s, -a * s.clamp(0.98, 1.02))
    want = ((x * m).sum(1) / m.sum(1).clamp(min=1)).sum() / (m.sum(1) > 0).sum()
    want.backward()
    torch.testing.assert_close(loss, want.detach())
    assert_same(got, gradients(model))
    clipped = ((s > 1.02) & (a > 0) | (s < 0.98) & (a < 0)) & batch["mask"]
    assert metrics["grpo/clip_frac"] == clipped.sum() / m.sum()
    assert 0 < metrics["grpo/clip_frac"] < 1
    per_response = clipped.sum(1)[clipped.any(1)]
    assert torch.equal(per_response, batch["mask"].sum(1)[clipped.any(1)]), "whole responses are dropped"


def test_sequence_log_ratio_is_capped_from_above_only():
    """The log-ratio is clamped at 10 from above and not from below."""
    spec = spec_in(grpo(**SEQUENCE, epsilon_low=3e-4, epsilon_high=4e-4))
    assert spec.log_ratio_clamp == (-math.inf, 10.0)
    assert spec.dual_clip == math.inf


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_token_level_is_untouched_by_the_knob(loss_type):
    """`token` is byte-identical to the surrogate before the knob existed."""
    length = {"max_tokens": 7} if loss_type == "seq-mean-token-sum-fixed" else {}
    before = fusedpg.loss_spec(
        "ppo_dual_clip", epsilon_low=0.2, epsilon_high=0.2, dual_clip=3.0, reduction=loss_type, **length
    )
    batch = make_batch()
    bits = []
    for objective in (grpo(loss_type=loss_type), grpo(loss_type=loss_type, importance_sampling_level="token")):
        bits.append(whole_gradients(objective, batch)[:2])
    model = Policy()
    streams = {k: batch[k] for k in ("logp_old", "sequence_advantages", "mask")}
    out = fusedpg.policy_loss_from_logits(before, model(batch), batch["targets"], backend="reference", **streams)
    out.loss.backward()
    for loss, got in bits:
        assert torch.equal(loss, out.loss)
        for g, w in zip(got, gradients(model), strict=True):
            assert (g is None and w is None) or torch.equal(g, w)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_on_policy_the_levels_agree(loss_type, backend):
    """With π_old == π the two levels agree exactly in value and gradient under every loss_type."""
    context = dataclasses.make_dataclass("C", ["name_or_path", "max_response_length", "backend"])("m", 7, backend)
    batch = make_batch()
    logits = Policy()(batch).detach()
    own = fusedpg.token_logprobs(logits, batch["targets"], mask=batch["mask"], backend=backend).logp
    for old in (own, None):  # from the batch, and from the objective's own forward
        chunk = {**batch, "logp_old": old}
        levels = []
        for level in ("token", "sequence"):
            rl = GRPOConfig(importance_sampling_level=level, lower_bound_ratio=0, loss_type=loss_type)
            rl.epsilon_low = rl.epsilon_high = 0.01
            levels.append(whole_gradients(build_grpo_objective(rl, context), chunk)[:2])
        (token_loss, token), (sequence_loss, sequence) = levels
        assert torch.equal(token_loss, sequence_loss)
        for t, s in zip(token, sequence, strict=True):
            assert (t is None and s is None) or torch.equal(t, s)


def test_the_sequence_level_takes_one_advantage_a_response():
    """Per-token advantages are refused at the sequence level, where the two forms of the objective would differ."""
    batch = make_batch()
    per_token = batch.pop("sequence_advantages")[:, None].expand(len(LENGTHS), max(LENGTHS)).contiguous()
    batch["advantages"] = per_token
    whole_gradients(grpo(), batch)
    with pytest.raises(
        ValueError, match=r"^advantages: importance_sampling_level='sequence' takes one advantage a resp"
    ):
        grpo(**SEQUENCE, epsilon_low=3e-4, epsilon_high=4e-4)(Policy(), batch)


def test_coarse_log_probs_are_warned_of():
    """bf16 log-probs are honoured, and too coarse for a sequence-scale epsilon."""
    batch = make_batch()
    batch["logp_old"] = batch["logp_old"].bfloat16()
    whole_gradients(grpo(), batch)
    with pytest.warns(UserWarning, match=r"^logp_old: torch.bfloat16 rounds a log-prob more coarsely"):
        grpo(**SEQUENCE, epsilon_low=3e-4, epsilon_high=4e-4)(Policy(), batch)


@pytest.mark.parametrize("recipe", [build_grpo_config, build_dr_grpo_config, build_gspo_config, build_dapo_config])
@pytest.mark.parametrize("packed", [False, True])
def test_recipes_split_like_the_whole(recipe, packed):
    """Split and unsplit micro-batches use the same numerator and normalisation unit."""
    objective = build_grpo_objective(recipe().rl, CONTEXT)
    batch = make_batch(packed=packed)
    loss, want, _ = whole_gradients(objective, batch)
    model = Policy()
    result = StepAccumulator(objective, model).step(split(batch, [1, 4, 7]))
    torch.testing.assert_close(result.loss, loss)
    assert_same(gradients(model), want)


def test_recipes_are_the_presets():
    """The objective's loss is the certified preset of the same knobs."""
    assert spec_in(grpo()) == cosmos("clipped")
    assert spec_in(build_grpo_objective(build_gspo_config().rl, CONTEXT)).replace(name="gspo") == cosmos(
        "gspo"
    ).replace(name="gspo").replace(trainer_loss="clipped")
    assert spec_in(grpo(grpo_surrogate="legacy_pg")) == cosmos("legacy_pg")
    dapo, paper = spec_in(build_grpo_objective(build_dapo_config().rl, CONTEXT)), fusedpg.CATALOGUE["dapo"]
    fields = [f.name for f in dataclasses.fields(fusedpg.LossSpec) if f.name != "name"]
    assert [getattr(dapo, f) for f in fields] == [getattr(paper, f) for f in fields]


def test_legacy_pg_is_the_plain_policy_gradient():
    """-A*logp, token mean; it keeps no π_old and needs none."""
    objective = grpo(grpo_surrogate="legacy_pg")
    assert objective.old_logp_cache is None
    batch = make_batch()
    del batch["logp_old"]
    loss = whole_gradients(objective, batch)[0]
    logp = fusedpg.token_logprobs(Policy()(batch), batch["targets"], backend="reference").logp
    want = -(batch["sequence_advantages"][:, None] * logp * batch["mask"]).sum() / batch["mask"].sum()
    torch.testing.assert_close(loss, want.detach())


def test_the_loss_temperature_is_read():
    """The clipped surrogate owns the loss temperature: the policy, π_old and the reference are scored at it."""
    batch = make_batch()
    cold = grpo(temperature=0.5)
    assert cold.old_logp_cache.temperature == 0.5
    assert grpo(temperature=0.5, kl_beta=0.1).reference_scorer.temperature == 0.5
    loss = whole_gradients(cold, batch)[0]
    doubled = lambda b: 2 * Policy()(b)  # noqa: E731
    torch.testing.assert_close(loss, grpo()(doubled, batch)[0].detach())
