"""cosmos-rl's compute_loss over selected tokens, against its transcribed losses."""

import re
import sys
import types

import pytest
import torch
from oracles import KINDS, assert_step

from fusedpg.certify.adapters import cosmos_rl as trainer
from fusedpg.certify.adapters.batches import batch
from fusedpg.certify.adapters.cosmos_rl import CASES, call, config
from fusedpg.integrations import cosmos_rl

IDS = [f"{case.loss}-{i}" for i, case in enumerate(CASES)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_losses(case, kind):
    assert_step(trainer, case, kind, limit=2e-5)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_parts_add_up_to_the_loss(case):
    _, (loss, policy, kl) = call(batch("holes", case.token_advantages), case.loss, **case.options)
    assert (policy + case.options.get("kl_beta", 0.0) * kl).item() == pytest.approx(loss.item(), abs=1e-6)
    assert not policy.requires_grad


def test_the_kl_part_is_the_estimate():
    b = batch("ragged")
    _, (_, policy, kl) = call(b, kl_beta=0.2)
    _, (plain, _, none) = call(b)
    torch.testing.assert_close(policy, plain.detach())
    log_ratio = (b.logp_ref - b.logp)[b.mask]
    assert kl.item() == pytest.approx((log_ratio.exp() - 1 - log_ratio).mean().item(), rel=1e-4)
    assert none.item() == 0.0


def test_counts_of_the_minibatch_and_of_the_workers():
    b = batch("ragged")
    n, rows = float(b.mask.sum()), b.mask.shape[0]
    given = {"tokens": torch.tensor(3 * n), "sequences": 3 * rows, "dp_workers": 2}
    args = (b.logp[b.mask], b.logp_old[b.mask], None, b.token_advantages)
    cu = torch.cat([torch.zeros(1), b.mask.sum(1).cumsum(0)]).int()

    def loss(counts=None, comm=None, **options):
        more = {} if counts is None else {"normalization_counts": counts}
        return cosmos_rl.compute_loss(*args, cu, config(**options), b.mask, ddp_comm=comm, **more)[0]

    torch.testing.assert_close(loss(given), loss() * 2 / 3)
    by_row = {"loss_type": "seq-mean-token-mean"}
    torch.testing.assert_close(loss(given, **by_row), loss(**by_row) / 3)

    class Comm:
        def world_size(self):
            return 4

        def allreduce(self, src, dst, op):
            dst.mul_(8.0)

    torch.testing.assert_close(loss(comm=Comm(), balance_dp_token=True), loss() / 2)
    torch.testing.assert_close(loss(comm=Comm()), loss())


def test_nothing_selected_is_a_connected_zero():
    leaf, (loss, _, _) = call(batch(empty=True))
    loss.backward()
    assert loss.item() == 0.0
    assert leaf.grad.shape == (0,)


def test_terms_of_the_trainer_stay_the_trainer_s():
    """It adds the entropy bonus and the positive examples itself."""
    b = batch("ragged")
    both = {"entropy_coeff": 0.1, "positive_nll_coef": 0.1}
    torch.testing.assert_close(call(b, **both)[1][0], call(b)[1][0])


# ------------------------------------------------------------------ the registry


def test_registration(monkeypatch):
    seen = {}
    for path in (cosmos_rl._TRAINER, cosmos_rl._REGISTRY):
        parts = path.split(".")
        for i in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))

    class GRPOTrainer:
        def __init__(self, config):
            self.config = config

    class TrainerRegistry:
        @staticmethod
        def register(name):
            return lambda cls: seen.setdefault(name, cls)

    sys.modules[cosmos_rl._TRAINER].GRPOTrainer = GRPOTrainer
    sys.modules[cosmos_rl._REGISTRY].TrainerRegistry = TrainerRegistry
    cls = cosmos_rl.register("mine")
    assert seen == {"mine": cls}
    assert cls(config()).loss_fn is cosmos_rl.compute_loss
    with pytest.raises(ValueError, match="^lower_bound_ratio: presets.cosmos_rl"):
        cls(config(lower_bound_ratio=0.5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "mean"}, "loss_type: presets.cosmos_rl('grpo') expects one of"),
        ({"off_policy_masking_delta": 0.1}, "off_policy_masking_delta: presets.cosmos_rl('grpo') does not support it"),
        ({"balance_dp_token": True, "loss_type": "token-sum"}, "balance_dp_token: loss_type='token-sum'"),
        ({"variant": "ppo"}, "loss: presets.cosmos_rl knows grpo, dapo, gspo; got 'ppo'"),
    ],
)
def test_refused_at_construction(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        cosmos_rl.policy_spec(config(**options).train.train_policy)
