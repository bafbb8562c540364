"""The registered losses beside verl's own functions, on the same tensors."""

import pickle
from dataclasses import replace

import pytest
import tiny_verl
import torch
from tiny_verl import actor_config, close, modes

from fusedpg.certify.cases import make_policy_batch
from fusedpg.certify.verl_compare import _decided
from fusedpg.certify.verl_jobs import GLOBAL, OPTIONS, REQUIRED, SCALE_FACTOR
from fusedpg.presets._verl import ENTRY_OF
from fusedpg.spec import REDUCTIONS

pytestmark = [pytest.mark.filterwarnings("ignore"), tiny_verl.needs_verl]

VALUE, GRAD, METRIC = 1e-6, 2e-6, 5e-6


@pytest.fixture(scope="module")
def verl():
    return tiny_verl.load()


# ------------------------------------------------------------------ a registered loss


def called(fn, config, batch, advantages, weights=None, mode=None):
    leaf = batch.logp.clone().requires_grad_()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        loss, metrics = fn(
            old_log_prob=batch.logp_old,
            log_prob=leaf,
            advantages=advantages,
            response_mask=batch.mask,
            loss_agg_mode=mode or config.loss_agg_mode,
            config=config,
            rollout_is_weights=weights,
        )
    loss.backward()
    return loss.detach(), metrics, leaf.grad


def assert_same(verl, loss, options, kind, counts, weights=False, seed=0):
    batch = _decided(make_policy_batch(kind, seed=seed)).cleaned()
    spread = batch.advantages[:, None].expand_as(batch.logp).contiguous()
    advantages = spread if loss == "geo_mean" else batch.token_advantages
    given = torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(3)) * 2 if weights else None
    config = actor_config(loss, options, counts)
    theirs = called(verl.algos.get_policy_loss_fn(loss), config, batch, advantages, given)
    ours = called(verl.fused.PolicyLoss(loss), config, batch, advantages, given)
    close(ours[0], theirs[0], VALUE, "loss")
    close(ours[2], theirs[2], GRAD, "gradient")
    assert list(ours[1]) == list(theirs[1])
    for name, value in theirs[1].items():
        assert type(ours[1][name]) is float
        close(ours[1][name], value, METRIC, name)


@pytest.mark.parametrize("scope", ["local", "global"])
@pytest.mark.parametrize("loss", ENTRY_OF)
def test_every_loss(verl, loss, scope):
    for mode in modes(loss):
        scale = {"loss_scale_factor": SCALE_FACTOR} if scope == "global" else {}
        options = {**REQUIRED.get(loss, {}), "loss_agg_mode": mode, **scale}
        for kind in ("ragged", "holes", "masked-row"):
            assert_same(verl, loss, options, kind, dict(GLOBAL) if scope == "global" else {})


@pytest.mark.parametrize("loss", ENTRY_OF)
def test_options_and_weights(verl, loss):
    base = REQUIRED.get(loss, {})
    for options in OPTIONS[loss]:
        assert_same(verl, loss, {**base, **options}, "ragged", dict(GLOBAL))
    assert_same(verl, loss, base, "holes", dict(GLOBAL), weights=True)
    for kind in ("ties", "ratio-30"):
        assert_same(verl, loss, base, kind, dict(GLOBAL))


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
@pytest.mark.parametrize(
    "options",
    [
        {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
        {"rollout_is": "token", "rollout_is_threshold": "0.5_2.0"},
        {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.3"},
        {"rollout_rs": "seq_max_k3", "rollout_rs_threshold": 0.05},
        {"rollout_rs": "token_k2,seq_mean_k1", "rollout_rs_threshold": "0.1,0.6_1.5"},
    ],
    ids=lambda o: ",".join(map(str, o.values())),
)
def test_bypass_mode(verl, options, loss_type):
    """Every mode of verl's rollout correction, with all of its metrics."""
    for mode in REDUCTIONS:
        for counts in ({}, dict(GLOBAL)):
            given = {"loss_type": loss_type, "loss_agg_mode": mode, **options}
            assert_same(verl, "bypass_mode", given, "holes", counts)


@pytest.mark.parametrize("scope", ["local", "global"])
@pytest.mark.parametrize("loss", ENTRY_OF)
def test_fully_masked_micro_batch(verl, loss, scope):
    """0 with finite metrics, where verl gives nan or raises; the names stay those of any other micro-batch."""
    batch = make_policy_batch("ragged")
    config = actor_config(loss, REQUIRED.get(loss, {}), dict(GLOBAL) if scope == "global" else {})
    spread = batch.advantages[:, None].expand_as(batch.logp).contiguous()
    fn = verl.fused.PolicyLoss(loss)
    _, named, _ = called(fn, config, batch, spread)
    loss_value, metrics, grad = called(fn, config, replace(batch, mask=torch.zeros_like(batch.mask)), spread)
    assert loss_value == 0
    assert not grad.any()
    assert list(metrics) == list(named)
    assert all(abs(value) < 1e9 for value in metrics.values())
    if loss != "bypass_mode":
        assert not any(metrics.values())


def test_nan_at_masked_places_stays_there(verl):
    for loss in ENTRY_OF:
        if loss == "bypass_mode":  # verl's own helper reads them
            continue
        batch = make_policy_batch("inf-masked")
        config = actor_config(loss, REQUIRED.get(loss, {}), {})
        spread = batch.advantages[:, None].expand_as(batch.logp).contiguous()
        value, metrics, grad = called(verl.fused.PolicyLoss(loss), config, batch, spread)
        clean, same, _ = called(verl.fused.PolicyLoss(loss), config, batch.cleaned(), spread)
        assert value == clean, loss
        assert metrics == same, loss
        assert torch.isfinite(grad).all()


def test_padded_width_divides_without_a_scale_factor(verl):
    """verl's `loss_scale_factor=None`: sums over sequences divided by the width of the micro-batch."""
    assert_same(verl, "vanilla", {"loss_agg_mode": "seq-mean-token-sum-norm"}, "holes", {})


# ------------------------------------------------------------------ registry


def test_register(verl, monkeypatch):
    registry = dict(verl.algos.POLICY_LOSS_REGISTRY)
    monkeypatch.setattr(verl.algos, "POLICY_LOSS_REGISTRY", registry)
    stock = registry["vanilla"]
    names = verl.fused.register()
    assert names == tuple(f"fusedpg_{loss}" for loss in ENTRY_OF)
    assert len(names) == 12
    assert registry["vanilla"] is stock
    assert verl.algos.get_policy_loss_fn("fusedpg_gspo") == verl.fused.PolicyLoss("gspo")
    verl.fused.register(replace=["vanilla"])
    assert registry["vanilla"] == verl.fused.PolicyLoss("vanilla")
    assert registry["gspo"] != verl.fused.PolicyLoss("gspo")
    verl.fused.register(replace=True)
    assert all(registry[loss] == verl.fused.PolicyLoss(loss) for loss in ENTRY_OF)
    with pytest.raises(ValueError, match="replace: expected names among vanilla, .*; got 'grpo'"):
        verl.fused.register(replace=["grpo"])


def test_registered_losses_pickle(verl):
    for loss in ENTRY_OF:
        fn = verl.fused.PolicyLoss(loss)
        assert pickle.loads(pickle.dumps(fn)) == fn
        assert fn.__name__ == f"fusedpg_{loss}"


def test_a_registered_loss_refuses_by_name(verl):
    batch = make_policy_batch("ragged")
    fn = verl.fused.PolicyLoss
    with pytest.raises(ValueError, match="dro_beta: .* expects a number > 0; got None"):
        called(fn("dro"), actor_config("dro", {}, {}), batch, batch.token_advantages)
    with pytest.raises(ValueError, match="advantages: 'geo_mean' has one ratio a sequence"):
        called(fn("geo_mean"), actor_config("geo_mean", {}, {}), batch, batch.token_advantages)
    config = actor_config("bypass_mode", {"loss_type": "other"}, {})
    with pytest.raises(ValueError, match="loss_type: bypass_mode expects one of 'ppo_clip', 'reinforce'; got 'other'"):
        called(fn("bypass_mode"), config, batch, batch.token_advantages)
    with pytest.raises(ValueError, match="batch_num_tokens: verl requires it"):
        called(fn("vanilla"), actor_config("vanilla", {}, {"dp_size": 2}), batch, batch.token_advantages)
