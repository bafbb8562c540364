"""The whole actor loss on jagged tensors beside verl's `ppo_loss`: policy, KL and entropy in one pass."""

import pickle

import pytest
import tiny_verl
import torch
from tiny_verl import actor_config, close, in_fp64, micro_batch, modes, run

from fusedpg.certify.adapters.verl import TERMS, split
from fusedpg.certify.verl_jobs import GLOBAL, KL_TYPES, REQUIRED
from fusedpg.presets._verl import ENTRY_OF

pytestmark = [pytest.mark.filterwarnings("ignore"), tiny_verl.needs_verl]

VALUE, GRAD, METRIC = 1e-6, 2e-6, 5e-6
LENGTHS = [(3, 5), (1, 9), (4, 2), (2, 7)]
COUNTS = dict(GLOBAL)


@pytest.fixture(scope="module")
def verl():
    return tiny_verl.load()


def assert_same_step(verl, loss, options, **batch):
    config = actor_config(loss, options)
    made = micro_batch(LENGTHS, per_token=loss != "geo_mean", **batch)
    theirs = run(lambda *a, **k: verl.losses.ppo_loss(config, *a, **k), *in_fp64(*made))
    ours = run(verl.fused.make_loss_fn(config), *made)
    close(ours[0], theirs[0], VALUE, "loss")
    for mine, other in zip(ours[2], theirs[2], strict=True):
        close(mine, other, GRAD, "gradient")
    assert list(ours[1]) == list(theirs[1])
    for name, value in theirs[1].items():
        if name == "kl_coef":
            assert ours[1][name] == value
            continue
        assert ours[1][name].aggregation == value.aggregation, name
        close(ours[1][name].aggregate(), value.aggregate(), METRIC, name)
    assert any(g.any() for g in ours[2])


@pytest.mark.parametrize("dense", [False, True], ids=["jagged", "padded"])
@pytest.mark.parametrize("loss", ENTRY_OF)
def test_whole_loss(verl, loss, dense):
    for mode in modes(loss):
        mode = "seq-mean-token-mean" if loss == "sapo" else mode
        for counts in ({}, COUNTS):
            terms = {} if loss == "geo_mean" else TERMS
            options = {**REQUIRED.get(loss, {}), **terms, "loss_agg_mode": mode}
            assert_same_step(verl, loss, options, counts=counts, dense=dense)
            scaled = {**options, "loss_scale_factor": 6}
            assert_same_step(verl, loss, scaled, counts=counts, dense=dense, mask_rows=(1,), weights=True, seed=1)


@pytest.mark.parametrize("kind", KL_TYPES)
def test_kl_types(verl, kind):
    for plus in ("", "+"):
        options = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": kind + plus}
        assert_same_step(verl, "vanilla", options, counts=COUNTS)


def test_terms_that_are_off_are_still_logged(verl):
    assert_same_step(verl, "vanilla", {}, counts=COUNTS)
    assert_same_step(verl, "gspo", {"use_kl_loss": True, "kl_loss_coef": 0.0}, counts=COUNTS)


def test_micro_batches_add_up_to_the_whole(verl):
    """Global counts: the gradients of two micro-batches are those of the batch."""
    config = actor_config("vanilla", {**TERMS, "loss_agg_mode": "token-mean"})
    fn = verl.fused.make_loss_fn(config)
    td, logp, entropy, total = micro_batch(LENGTHS, counts=COUNTS)
    whole = run(fn, td, logp, entropy, total)
    parts = [run(fn, *part) for part in split(td, logp, entropy, total, ((0, 1), (2, 3)))]
    close(parts[0][0] + parts[1][0], whole[0], VALUE, "loss")
    close(torch.cat([p[2][0] for p in parts]), whole[2][0], GRAD, "gradient")


def test_fully_masked_jagged_micro_batch(verl):
    for loss in ("vanilla", "gspo", "bypass_mode"):
        for counts in ({}, COUNTS):
            config = actor_config(loss, {**TERMS, "loss_agg_mode": "token-mean"})
            made = micro_batch(LENGTHS, mask_rows=range(4), counts=counts)
            value, metrics, grads = run(verl.fused.make_loss_fn(config), *made)
            assert value == 0
            assert not any(g.any() for g in grads)
            assert all(abs(float(m.aggregate())) < 1e9 for m in metrics.values() if not isinstance(m, float))


def test_loss_fn_pickles_and_computes_the_same(verl):
    config = actor_config("fusedpg_vanilla", TERMS)
    fn = verl.fused.make_loss_fn(config)
    made = micro_batch(LENGTHS, counts=COUNTS)
    again = pickle.loads(pickle.dumps(fn))
    assert run(again, *made)[0] == run(fn, *made)[0]


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        ("sapo", {**TERMS, "loss_agg_mode": "token-mean"}, "loss_agg_mode: verl reduces the KL and entropy terms"),
        ("geo_mean", {**TERMS, "loss_agg_mode": "seq-mean-token-mean"}, "correct: verl divides the policy term"),
        ("vanilla", {"use_kl_loss": True, "kl_loss_type": "full"}, "kl_loss_type: .*got 'full'"),
        ("dro", {}, "dro_beta: .*got None"),
        ("mine", {}, "loss_mode: expected one of vanilla, .*; got 'mine'; use verl's own ppo_loss"),
        ("bypass_mode", {"rollout_rs": "token_k1"}, "rollout_rs_threshold: .*no default"),
        ("bypass_mode", {"loss_type": "x"}, "loss_type: bypass_mode expects"),
    ],
    ids=lambda v: v if isinstance(v, str) and len(v) < 12 else "",
)
def test_refused_at_construction(verl, loss, options, message):
    with pytest.raises(ValueError, match=message):
        verl.fused.make_loss_fn(actor_config(loss, options))


def test_refusals_of_data(verl):
    td, logp, _, total = micro_batch(LENGTHS, counts=COUNTS)
    offsets = torch.tensor([0, *total]).cumsum(0)
    scores = {"log_probs": torch.nested.nested_tensor_from_jagged(logp, offsets)}
    with pytest.raises(ValueError, match="entropy: entropy_coeff is 0.05; got a model output without it"):
        verl.fused.make_loss_fn(actor_config("vanilla", {"entropy_coeff": 0.05}))(scores, td)
    del td["ref_log_prob"]
    with pytest.raises(ValueError, match="ref_log_prob: use_kl_loss reads it; got data without it"):
        verl.fused.make_loss_fn(actor_config("vanilla", {"use_kl_loss": True}))(scores, td)
    short = {"log_probs": logp[:-1]}
    with pytest.raises(ValueError, match=r"log_probs: expected one value for each of the 33 tokens .* got 32"):
        verl.fused.make_loss_fn(actor_config("vanilla", {}))(short, td)
    empty, *_ = micro_batch([(0, 3), (2, 2)], counts=COUNTS)
    with pytest.raises(ValueError, match="prompts: expected a token before every response"):
        verl.fused.make_loss_fn(actor_config("vanilla", {}))({"log_probs": torch.zeros(7)}, empty)
