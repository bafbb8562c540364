"""AReaL's loss function over packed micro-batches, against its transcribed losses."""

import pickle
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from oracles import KINDS, NAMES, assert_same, batch, lists, truth

from fusedpg.certify.transcribed_areal import CASES
from fusedpg.integrations.areal import actor_loss, actor_loss_of, loss_weight

IDS = [f"{case.loss}-{case.option}" for case in CASES]


def micro_batch(b):
    """(leaf, input_data), packed with labels rolled by -1: a prompt token in front, the last place wraps around."""
    ls = lists(b)
    ones = torch.ones(1)
    pack = lambda rows, first: torch.cat([torch.cat([first, row]) for row in rows])  # noqa: E731
    packed = {name: pack(getattr(ls, name), ones * 5).roll(-1) for name in NAMES}
    lengths = torch.tensor([len(t) + 1 for t in ls.logp])
    data = {
        "logprobs": packed["logp_rollout"],
        "prox_logp": packed["logp_old"],
        "advantages": pack(ls.advantages, ones * 7).roll(-1),
        "loss_mask": pack([m.float() for m in ls.mask], ones * 0).roll(-1),
        "cu_seqlens": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int(),
    }
    return packed["logp"].requires_grad_(), data


def as_rows(grad, data, like):
    full, flat = torch.zeros_like(like), grad
    bounds = data["cu_seqlens"].tolist()
    for row, start, end in zip(full, bounds[:-1], bounds[1:], strict=True):
        row[: end - start - 1] = flat[start : end - 1]
    return full


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_losses(case, kind):
    b = batch(kind, per_token=True)
    leaf, data = micro_batch(b)
    loss = actor_loss(case.loss, **case.options)(leaf, None, data, vocab_min_logits=None, vocab_max_logits=None)
    loss.backward()
    want, grad = truth(b, case.formula, tokens=float(b.mask.sum()))
    assert_same(loss, as_rows(leaf.grad, data, b.logp), want, grad, limit=2e-5)
    wraps = data["cu_seqlens"][1:].long() - 1
    assert not leaf.grad[wraps].any()
    assert int(loss_weight(data)) == int(b.mask.sum())


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


def test_data_are_refused_by_name():
    leaf, data = micro_batch(batch("ragged"))
    with pytest.raises(ValueError, match="^teacher_logp: the fused loss has no distillation term"):
        actor_loss()(leaf, None, {**data, "teacher_logp": leaf.detach()})
    decoupled = actor_loss("ppo", use_decoupled_loss=True, rejection_sampling={"upper": 2.0})
    with pytest.raises(ValueError, match="^prox_logp: the decoupled loss reads it; got none"):
        decoupled(leaf, None, {k: v for k, v in data.items() if k != "prox_logp"})
    with pytest.raises(ValueError, match="^cu_seqlens: importance_sampling_level='sequence'"):
        actor_loss("ppo", importance_sampling_level="sequence")(
            leaf, None, {k: v for k, v in data.items() if k != "cu_seqlens"}
        )
