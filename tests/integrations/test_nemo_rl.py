"""NeMo-RL's LossFunction protocol against its transcribed formulas, from log-probs and from logits."""

import re
import sys
import types

import pytest
import torch
from oracles import KINDS, assert_same, assert_step

from fusedpg.certify.adapters import nemo_rl
from fusedpg.certify.adapters.batches import batch, step_batch
from fusedpg.certify.adapters.nemo_rl import (
    CASES,
    INTERFACES,
    MEMBERS,
    LossInputType,
    LossType,
    MetricNormalizer,
    counts,
    data_of,
)
from fusedpg.integrations.nemo_rl import FusedClippedPGLoss, clipped_pg_spec

IDS = [f"{case.loss}-{i}" for i, case in enumerate(CASES)]


def install(monkeypatch, path=INTERFACES, names=tuple(MEMBERS)):
    """A stand-in for NeMo-RL: the enums of its interface module."""
    parts = path.split(".")
    for i in range(1, len(parts) + 1):
        module = types.ModuleType(".".join(parts[:i]))
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in names:
        setattr(sys.modules[path], name, MEMBERS[name])


@pytest.fixture(autouse=True)
def nemo(monkeypatch):
    install(monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_from_log_probs(case, kind):
    assert_step(nemo_rl, case, kind)


@pytest.mark.parametrize("case", CASES[::3], ids=IDS[::3])
def test_from_logits(case):
    """The last row of logits scores nothing."""
    b = step_batch("holes", case.token_advantages)
    assert_same(*nemo_rl.step_of_logits(case, b), *nemo_rl.want_of_logits(case, b))


def test_micro_batches_and_metrics_add_up_under_global_counts():
    b = batch("ragged")
    loss_fn = FusedClippedPGLoss({"reference_policy_kl_penalty": 0.0})
    data, given = data_of(b), counts(b)
    whole, all_metrics = loss_fn(data, **given, next_token_logprobs=b.logp)
    parts = [
        loss_fn({k: v[rows] for k, v in data.items()}, **given, next_token_logprobs=b.logp[rows])
        for rows in (slice(0, 1), slice(1, 4))
    ]
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole)
    assert all_metrics["num_valid_samples"] == float(b.mask.any(1).sum())
    for name, kind in loss_fn.metric_normalizations.items():
        if kind is not MetricNormalizer.NONE or name.startswith("num"):
            total = parts[0][1][name] + parts[1][1][name]
            assert total == pytest.approx(all_metrics[name], rel=1e-5), name
    ratio = (b.logp - b.logp_old).exp()[b.mask]
    assert all_metrics["probs_ratio"] == pytest.approx(float(ratio.mean()), rel=1e-5)
    assert all_metrics["probs_ratio_max"] == pytest.approx(float(ratio.max()), rel=1e-5)


def test_the_split_api_rescales_placeholder_counts():
    """Counts of 1 give raw sums, which the advertised normaliser divides."""
    b = batch("ragged")
    loss_fn = FusedClippedPGLoss({"token_level_loss": False, "reference_policy_kl_penalty": 0.0})
    ones = dict.fromkeys(("global_valid_toks", "global_valid_seqs"), torch.tensor(1.0))
    raw, raw_metrics = loss_fn(data_of(b), **ones, next_token_logprobs=b.logp)
    loss, metrics = loss_fn(data_of(b), **counts(b), next_token_logprobs=b.logp)
    divisor = {
        MetricNormalizer.TOKENS: float(b.mask.sum()),
        MetricNormalizer.SEQUENCES: float(b.mask.any(1).sum()),
        MetricNormalizer.NONE: 1.0,
    }
    assert set(metrics) == set(loss_fn.metric_normalizations)
    for name, kind in loss_fn.metric_normalizations.items():
        assert raw_metrics[name] / divisor[kind] == pytest.approx(metrics[name], rel=1e-5), name
    torch.testing.assert_close(raw / divisor[MetricNormalizer.SEQUENCES], loss)


@pytest.mark.parametrize("kind", ["logprob", "logit"])
def test_nothing_valid_is_a_connected_zero(kind):
    b = batch(empty=True)
    loss_fn = FusedClippedPGLoss({}, input_type=kind)
    leaf = (b.logp if kind == "logprob" else torch.randn(*b.mask.shape, 3).new_zeros(4, 10, 3)).clone().requires_grad_()
    given = {"next_token_logprobs": leaf} if kind == "logprob" else {"logits": leaf}
    loss, metrics = loss_fn(data_of(b), **counts(b), **given)
    loss.backward()
    assert loss.item() == 0.0
    assert not leaf.grad.any()
    assert all(value == value for value in metrics.values())


# ------------------------------------------------------------------ the protocol


def test_attributes_are_nemo_s_enums():
    loss_fn = FusedClippedPGLoss()
    assert (loss_fn.loss_type, loss_fn.input_type) == (LossType.TOKEN_LEVEL, LossInputType.LOGPROB)
    assert loss_fn.metric_normalizations["loss"] is MetricNormalizer.TOKENS
    by_sequence = FusedClippedPGLoss({"token_level_loss": False}, input_type="logit")
    assert (by_sequence.loss_type, by_sequence.input_type) == (LossType.SEQUENCE_LEVEL, LossInputType.LOGIT)
    assert by_sequence.metric_normalizations["loss"] is MetricNormalizer.SEQUENCES


def test_older_versions_have_another_module_and_no_normaliser(monkeypatch):
    for name in [n for n in sys.modules if n.startswith("nemo_rl")]:
        monkeypatch.delitem(sys.modules, name)
    install(monkeypatch, "nemo_rl.algorithms.interfaces", ("LossType", "LossInputType"))
    assert FusedClippedPGLoss().metric_normalizations == {}


def test_without_nemo_rl_the_cause_is_named(monkeypatch):
    for name in [n for n in sys.modules if n.startswith("nemo_rl")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match="^nemo_rl: expected NeMo-RL, whose enums"):
        FusedClippedPGLoss()


def test_a_whole_config_says_what_differs_from_its_defaults():
    full = {"disable_ppo_ratio": True, "ratio_clip_min": 0.2, "ratio_clip_max": 0.2, "ratio_clip_c": None}
    assert clipped_pg_spec(full) == clipped_pg_spec({"disable_ppo_ratio": True})


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ({"positive_example_nll_weight": 0.1}, "positive_example_nll_weight: presets.nemo_rl('clipped_pg') does not"),
        ({"use_on_policy_kl_approximation": True}, "use_on_policy_kl_approximation"),
        ({"disable_ppo_ratio": True, "ratio_clip_min": 0.1}, "ratio_clip_min: disable_ppo_ratio leaves no ratio"),
        ({"clip": 0.1}, "clip: presets.nemo_rl('clipped_pg') never reads it"),
        (
            {"sequence_level_importance_ratios": True, "token_level_loss": True},
            "token_level_loss: NeMo-RL refuses True",
        ),
    ],
)
def test_refused_at_construction(cfg, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        FusedClippedPGLoss(cfg)


def test_inputs_are_refused_by_name():
    with pytest.raises(ValueError, match="^input_type: expected one of logprob, logit; got 'hidden'"):
        FusedClippedPGLoss(input_type="hidden")
    b = batch()
    data, given = data_of(b), counts(b)
    with pytest.raises(ValueError, match="^next_token_logprobs: input_type LOGPROB"):
        FusedClippedPGLoss()(data, **given)
    with pytest.raises(ValueError, match="^logits: input_type LOGIT"):
        FusedClippedPGLoss(input_type="logit")(data, **given)
    filtered = {**data, "curr_logprobs_keep_mask": b.mask}
    with pytest.raises(ValueError, match="^curr_logprobs_keep_mask: top-k or top-p"):
        FusedClippedPGLoss()(filtered, **given, next_token_logprobs=b.logp)


def test_sharded_logits_are_refused(monkeypatch):
    b = batch()
    loss_fn = FusedClippedPGLoss(input_type="logit")
    logits = torch.zeros(4, 10, 3)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    with pytest.raises(ValueError, match="^vocab_parallel_group: sharded logits are not supported"):
        loss_fn(data_of(b), **counts(b), logits=logits, vocab_parallel_group=object())
