"""SkyRL's `register_policy_loss` signature against its transcribed losses."""

import pickle
import re
import sys
import types
from functools import partial, wraps

import pytest
import torch
from oracles import KINDS, assert_step

from fusedpg.certify.adapters import skyrl as trainer
from fusedpg.certify.adapters.batches import batch
from fusedpg.certify.adapters.skyrl import CASES, algorithm
from fusedpg.integrations import skyrl

IDS = [f"{case.loss}-{case.option}" for case in CASES]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_losses(case, kind):
    assert_step(trainer, case, kind, limit=2e-5)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_metrics_are_floats(case):
    b = batch("holes", per_token=True)
    given = (b.logp, b.logp_old, b.token_advantages, algorithm(**case.options), b.mask.float(), b.logp_rollout)
    _, metrics = skyrl.fused_loss(*given, loss=case.loss)
    assert metrics
    assert all(type(value) is float for value in metrics.values())


def test_clip_ratio_is_the_share_that_is_dropped_or_clipped():
    b = batch("ragged")
    args = (b.logp, b.logp_old, b.token_advantages, algorithm(), b.mask, b.logp_rollout)
    ratio = (b.logp - b.logp_rollout).exp()[b.mask]
    outside = ((ratio < 0.8) | (ratio > 1.2)).float().mean()
    assert skyrl.fused_loss(*args, loss="rollout_is")[1]["clip_ratio"] == pytest.approx(float(outside))
    assert skyrl.fused_loss(*args, loss="sapo")[1] == {"clip_ratio": 0.0}


def test_parts_add_up():
    b = batch("ragged")
    fn = partial(skyrl.fused_loss, loss="gspo", config=algorithm())
    args = lambda rows: (b.logp[rows], b.logp_old[rows], b.token_advantages[rows])  # noqa: E731
    parts = [fn(*args(rows), loss_mask=b.mask[rows])[0] for rows in (slice(0, 2), slice(2, 4))]
    torch.testing.assert_close(sum(parts), fn(*args(slice(None)), loss_mask=b.mask)[0])


@pytest.mark.parametrize("loss", ["regular", "gspo", "cispo", "sapo"])
def test_nothing_selected_is_a_connected_zero(loss):
    b = batch(empty=True)
    leaf = b.logp.clone().requires_grad_()
    out, metrics = skyrl.fused_loss(leaf, b.logp_old, b.token_advantages, algorithm(), b.mask, loss=loss)
    out.backward()
    assert out.item() == 0.0
    assert not leaf.grad.any()
    assert all(value == value for value in metrics.values())


def test_no_mask_is_all_tokens():
    b = batch("ragged")
    args = (b.logp, b.logp_old, b.token_advantages, algorithm())
    torch.testing.assert_close(skyrl.fused_loss(*args)[0], skyrl.fused_loss(*args, torch.ones_like(b.logp))[0])


# ------------------------------------------------------------------ the registry


def install(monkeypatch):
    """A stand-in for SkyRL's registry, whose decorator wraps what it gets."""
    path = "skyrl.backends.skyrl_train.utils.ppo_utils"
    parts = path.split(".")
    for i in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
    seen = {}

    def register_policy_loss(name):
        def decorator(func):
            @wraps(func)
            def wrapper(*args, **kwargs):
                return func(*args, **kwargs)

            seen[name] = (func, wrapper)
            return wrapper

        return decorator

    sys.modules[path].register_policy_loss = register_policy_loss
    return seen


def test_registration(monkeypatch):
    seen = install(monkeypatch)
    names = skyrl.register(algorithm(policy_loss_type="fusedpg_cispo", cispo_eps_clip_high=4.0))
    assert names == tuple(seen)
    assert set(names) == {f"fusedpg_{loss}" for loss in skyrl.LOSSES}
    b = batch("holes")
    config = algorithm(cispo_eps_clip_high=0.1, cispo_eps_clip_low=0.1)
    func, wrapper = seen["fusedpg_cispo"]
    keywords = {"config": config, "loss_mask": b.mask, "rollout_logprobs": None}
    loss, _ = wrapper(b.logp, b.logp_old, b.token_advantages, **keywords)
    again, _ = pickle.loads(pickle.dumps(func))(b.logp, b.logp_old, b.token_advantages, **keywords)
    assert float(loss) == float(again)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_tis": True}, "use_tis: SkyRL has deprecated it"),
        ({"outlier_token_is_threshold_high": 100.0}, "outlier_token_is_threshold_high: it drops a sequence"),
        ({"policy_loss_type": "fusedpg_dppo", "tis_ratio_type": "token"}, "tis_ratio_type: the loss 'dppo' does not"),
        ({"policy_loss_type": "fusedpg_cross_entropy"}, "loss: expected one of regular, dual_clip"),
        ({"tis_ratio_type": "group"}, "tis_ratio_type: presets.skyrl('regular') expects one of"),
    ],
)
def test_refused_at_registration(options, message, monkeypatch):
    install(monkeypatch)
    with pytest.raises(ValueError, match=re.escape(message)):
        skyrl.register(algorithm(**{"policy_loss_type": "fusedpg_regular", **options}))


def test_a_missing_tensor_is_named():
    b = batch()
    config = algorithm(tis_ratio_type="token")
    with pytest.raises(ValueError, match="^logp_rollout: the loss 'ppo_clip' reads it"):
        skyrl.fused_loss(b.logp, b.logp_old, b.token_advantages, config, b.mask)
