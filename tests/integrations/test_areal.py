"""AReaL's loss function over packed micro-batches, against its transcribed losses."""

import pickle
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from oracles import KINDS, assert_step

from fusedpg.certify.adapters import areal
from fusedpg.certify.adapters.areal import CASES, micro_batch
from fusedpg.certify.adapters.batches import batch
from fusedpg.integrations.areal import actor_loss, actor_loss_of, loss_weight

IDS = [f"{case.loss}-{case.option}" for case in CASES]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_losses(case, kind):
    assert_step(areal, case, kind, limit=2e-5)


def test_the_places_that_wrap_around_get_no_gradient():
    leaf, data = micro_batch(batch("holes", per_token=True))
    actor_loss()(leaf, None, data, vocab_min_logits=None, vocab_max_logits=None).backward()
    assert leaf.grad.any()
    assert not leaf.grad[data["cu_seqlens"][1:].long() - 1].any()


def test_micro_batches_add_up_as_the_engine_weighs_them():
    b = batch("ragged")
    leaf, data = micro_batch(b)
    fn, total = actor_loss(), float(loss_weight(data))
    cut = int(data["cu_seqlens"][2])
    parts = 0.0
    for rows in (slice(0, cut), slice(cut, None)):
        part = {key: value[rows] for key, value in data.items() if key != "cu_seqlens"}
        parts = parts + fn(leaf[rows], None, part) * float(loss_weight(part)) / total
    torch.testing.assert_close(parts, fn(leaf, None, data))


def test_without_a_proximal_policy_the_sampler_is_the_anchor():
    leaf, data = micro_batch(batch("ragged"))
    del data["prox_logp"]
    same = {**data, "prox_logp": data["logprobs"]}
    torch.testing.assert_close(actor_loss()(leaf, None, data), actor_loss()(leaf, None, same))


@pytest.mark.parametrize("options", [{}, {"importance_sampling_level": "sequence"}])
def test_nothing_selected_is_a_connected_zero(options):
    leaf, data = micro_batch(batch("ragged"))
    data["loss_mask"] = torch.zeros_like(data["loss_mask"])
    loss = actor_loss("ppo", **options)(leaf, None, data)
    loss.backward()
    assert loss.item() == 0.0
    assert not leaf.grad.any()


def test_it_pickles_and_reads_a_whole_config():
    config = SimpleNamespace(
        eps_clip=0.1, eps_clip_higher=None, c_clip=3.0, use_sapo_loss=False, lr=1e-6, m2_threshold=None,
        use_decoupled_loss=True, rejection_sampling=SimpleNamespace(level="token", action="mask", upper=1.1),
    )  # fmt: skip
    leaf, data = micro_batch(batch("holes"))
    own = {"eps_clip": 0.1, "c_clip": 3.0, "use_decoupled_loss": True}
    want = actor_loss("ppo", **own, rejection_sampling={"level": "token", "action": "mask", "upper": 1.1})
    again = pickle.loads(pickle.dumps(actor_loss_of(config)))
    torch.testing.assert_close(again(leaf, None, data), want(leaf, None, data))


def test_metrics_reach_areal_s_tracker(monkeypatch):
    seen = {}
    monkeypatch.setitem(sys.modules, "areal.utils.stats_tracker", SimpleNamespace(scalar=seen.update))
    leaf, data = micro_batch(batch("ragged"))
    actor_loss()(leaf, None, data)
    assert seen["fusedpg/tokens"] == float(data["loss_mask"].sum())


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        ("ppo", {"m2_threshold": 0.1}, "m2_threshold: presets.areal('ppo') does not support it"),
        ("ppo", {"rejection_sampling": {"upper": 2.0}}, "rejection_sampling: AReaL ignores it without"),
        ("sapo", {"eps_clip": 0.1}, "eps_clip: presets.areal('sapo') never reads it"),
        ("grpo", {}, "loss: presets.areal knows ppo, sapo; got 'grpo'"),
    ],
)
def test_refused_at_construction(loss, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        actor_loss(loss, **options)


def test_a_config_s_refused_option_is_named():
    with pytest.raises(ValueError, match="^m2_threshold: presets.areal"):
        actor_loss_of({"m2_threshold": 0.04})
    approximated = {"use_decoupled_loss": True, "prox_logp_method": "loglinear"}
    with pytest.raises(ValueError, match="^prox_logp_method: .*got 'loglinear'.*; use 'recompute'"):
        actor_loss_of(approximated)
    for config in ({**approximated, "use_decoupled_loss": False}, {**approximated, "prox_logp_method": "metrics"}):
        actor_loss_of(config)


def test_data_are_refused_by_name():
    leaf, data = micro_batch(batch("ragged"))
    with pytest.raises(ValueError, match="^teacher_logp: the fused loss has no distillation term"):
        actor_loss()(leaf, None, {**data, "teacher_logp": leaf.detach()})
    for more in ({}, {"rejection_sampling": {"upper": 2.0}}):
        decoupled = actor_loss("ppo", use_decoupled_loss=True, **more)
        with pytest.raises(ValueError, match="^prox_logp: the decoupled loss reads it; got none"):
            decoupled(leaf, None, {k: v for k, v in data.items() if k != "prox_logp"})
    with pytest.raises(ValueError, match="^cu_seqlens: importance_sampling_level='sequence'"):
        actor_loss("ppo", importance_sampling_level="sequence")(
            leaf, None, {k: v for k, v in data.items() if k != "cu_seqlens"}
        )
