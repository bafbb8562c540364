"""SkyRL's `register_policy_loss` signature against its transcribed losses."""

import pickle
import re
import sys
import types
from dataclasses import dataclass, field, fields, make_dataclass
from functools import partial, wraps

import pytest
import torch
from oracles import KINDS, assert_same, batch, truth

from fusedpg.certify.transcribed_skyrl import CASES
from fusedpg.integrations import skyrl

#: those whose reduction and KL are SkyRL's own affair, as in its workers
OWN = [case for case in CASES if not {"loss_reduction", "use_kl_loss"} & set(case.options)]
IDS = [f"{case.loss}-{case.option}" for case in OWN]


@dataclass
class Correction:
    """OffPolicyCorrectionConfig, by its contract."""

    tis_ratio_type: str | None = None
    token_tis_ratio_clip_high: float = 2.0
    sequence_tis_ratio_clip_high: float = 5.0
    sequence_mask_metric: str | None = None
    geo_mask_high: float = 1.01
    geo_mask_low: float = 0.99
    product_mask_high: float = 2.0
    product_mask_low: float = 0.5
    outlier_token_is_threshold_low: float | None = None
    outlier_token_is_threshold_high: float | None = None
    token_mask_is_threshold_low: float | None = None
    token_mask_is_threshold_high: float | None = None


def nested(name, **values):
    return make_dataclass(name, [(k, type(v), field(default=v)) for k, v in values.items()])


Sapo = nested("Sapo", tau_pos=1.0, tau_neg=1.05)
Cispo = nested("Cispo", cispo_eps_clip_low=0.0, cispo_eps_clip_high=5.0)
Dppo = nested("Dppo", dppo_type="binary_tv", delta_low=0.2, delta_high=0.2)
ClipCov = nested("ClipCov", clip_ratio=0.0002, clip_cov_lb=1.0, clip_cov_ub=5.0)
KLCov = nested("KLCov", kl_cov_frac=0.2, ppo_kl_coef=1.0)


@dataclass
class Algorithm:
    """AlgorithmConfig, by its contract; SkyRL's defaults."""

    policy_loss_type: str = "regular"
    loss_reduction: str = "token_mean"
    max_seq_len: int | None = None
    use_kl_loss: bool = True
    kl_loss_coef: float = 0.001
    kl_estimator_type: str = "k3"
    use_tis: bool = False
    eps_clip_low: float = 0.2
    eps_clip_high: float = 0.2
    clip_ratio_c: float = 3.0
    off_policy_correction: Correction = field(default_factory=Correction)
    sapo: Sapo = field(default_factory=Sapo)
    cispo: Cispo = field(default_factory=Cispo)
    dppo: Dppo = field(default_factory=Dppo)
    clip_cov: ClipCov = field(default_factory=ClipCov)
    kl_cov: KLCov = field(default_factory=KLCov)


def algorithm(**options):
    """Options where AlgorithmConfig keeps them."""
    config = Algorithm()
    for key, value in options.items():
        homes = [config, *(getattr(config, f.name) for f in fields(config))]
        (home,) = [h for h in homes if hasattr(type(h), "__dataclass_fields__") and key in type(h).__dataclass_fields__]
        setattr(home, key, value)
    return config


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", OWN, ids=IDS)
def test_losses(case, kind):
    """The advantages come with SkyRL's reduction in them; the loss is a masked sum."""
    b = batch(kind, per_token=True)
    b.token_advantages.div_(float(b.mask.sum()))
    leaf = b.logp.clone().requires_grad_()
    fn = partial(skyrl.fused_loss, loss=case.loss)
    loss, metrics = fn(leaf, b.logp_old, b.token_advantages, algorithm(**case.options), b.mask.float(), b.logp_rollout)
    loss.backward()
    counts = {"batch_size": b.mask.shape[0], "tokens": float(b.mask.sum())}
    assert_same(loss, leaf.grad, *truth(b, case.formula, **counts), limit=2e-5)
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
