"""The verl preset by itself: denominators, fully masked batches, pickling, refusals."""

import pickle
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import fusedpg
from fusedpg.certify.verl_errors import masked_batch
from fusedpg.certify.verl_jobs import REQUIRED, reduction
from fusedpg.presets import TrainerSpec, trainers_of
from fusedpg.presets._verl import ENTRY_OF, denominator, verl
from fusedpg.spec import REDUCTIONS

if find_spec("verl") is None:  # it has no release for Python 3.13
    pytest.skip("needs verl==0.9.1 (certify-no-deps.txt)", allow_module_level=True)

REJECTED = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.6_1.5"}


def complete(loss: str, **options: Any) -> TrainerSpec:
    return verl(loss, **REQUIRED.get(loss, {}), **options)


# ------------------------------------------------------------------ denominators


def test_denominators_are_those_of_agg_loss() -> None:
    spec = {mode: verl(**reduction(mode)) for mode in REDUCTIONS}
    info = {"dp_size": 4, "batch_num_tokens": 100, "global_batch_size": 8}
    # token-mean: sum/100*4; token-sum: sum*4; seq-*: sum/8*4
    want = {"token-mean": 25.0, "token-sum": 0.25}
    assert {mode: s.normalizer(**info) for mode, s in spec.items()} == {m: want.get(m, 2.0) for m in REDUCTIONS}
    assert all(s.normalizer() is None for s in spec.values())
    assert spec["token-mean"].normalizer(batch_num_tokens=torch.tensor(9), dp_size=3).item() == 3.0
    assert spec["seq-mean-token-sum-norm"].normalizer(**info, loss_scale_factor=7) == 2.0
    with pytest.raises(
        ValueError, match="loss_scale_factor: the loss was built with 7; got 8; pass it to presets.verl"
    ):
        spec["seq-mean-token-sum-norm"].normalizer(loss_scale_factor=8)
    for mode, name in (("token-mean", "batch_num_tokens"), ("seq-mean-token-sum", "global_batch_size")):
        with pytest.raises(ValueError, match=f"{name}: verl requires it for '{mode}' with dp_size > 1; got None"):
            spec[mode].normalizer(dp_size=2)


def test_geo_mean_divides_by_rows_unless_it_is_put_right() -> None:
    assert verl("geo_mean").normalizer(rows=4, dp_size=2, global_batch_size=11) == 4.0
    assert verl("geo_mean", correct=True).normalizer(dp_size=2, global_batch_size=11) == 5.5


def test_a_rejection_needs_the_counts() -> None:
    spec = verl("bypass_mode", **REJECTED)
    assert spec.normalizer(batch_num_tokens=12) == 12
    with pytest.raises(ValueError, match="batch_num_tokens: rejected tokens leave verl's mask and so its local count"):
        spec.normalizer()
    assert "the normalizer needs the counts" in spec.note


@pytest.mark.parametrize("loss", ENTRY_OF)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_fully_masked_micro_batch_adds_nothing(loss: str, backend: str) -> None:
    spec, batch = complete(loss), masked_batch()
    logp = batch.logp.requires_grad_()
    out = fusedpg.policy_loss(
        spec,
        logp,
        logp_old=batch.logp_old,
        logp_rollout=batch.logp_rollout,
        sequence_advantages=batch.advantages,
        mask=batch.mask,
        normalizer=spec.normalizer(rows=4) if loss == "geo_mean" else spec.normalizer(batch_num_tokens=37),
        backend=backend,
    )
    out.loss.backward()
    assert out.loss.item() == 0.0
    assert torch.equal(logp.grad, torch.zeros_like(logp))


def test_presets_pickle_and_are_found_by_their_entry() -> None:
    for loss in ENTRY_OF:
        spec = complete(loss)
        assert pickle.loads(pickle.dumps(spec)) == spec
        assert spec.rule is denominator or loss == "geo_mean"
        assert spec.name == ENTRY_OF[loss]
    assert verl("bypass_mode", loss_type="reinforce").name == "reinforce"
    verl_losses = [name for trainer, name in trainers_of("ppo_dual_clip") if trainer == "verl"]
    assert verl_losses == ["vanilla", "bypass_mode"]


# ------------------------------------------------------------------ refusals

PINNED_TERMS = "loss_agg_mode: verl reduces the KL and entropy terms of 'sapo' by it, the policy term by "
REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("ppo", {}, "loss: presets.verl knows vanilla, dppo_tv,"),
    ("vanilla", {"clip_rato": 0.1}, "clip_rato: presets.verl('vanilla') never reads it; got 0.1; it reads clip_ratio"),
    ("vanilla", {"tau_pos": 1.0}, "tau_pos: presets.verl('vanilla') never reads it; got 1.0"),
    ("sapo", {"clip_ratio": 0.2}, "clip_ratio: presets.verl('sapo') never reads it; got 0.2"),
    ("cispo", {"clip_ratio_c": 3.0}, "clip_ratio_c: presets.verl('cispo') never reads it; got 3.0"),
    ("vanilla", {"clip_ratio_c": 1.0}, "dual_clip: expected a number > 1"),
    ("vanilla", {"clip_ratio_c": None}, "clip_ratio_c: expected a number; got None"),
    (
        "vanilla",
        {"loss_agg_mode": "seq-mean-token-sum-norm"},
        "loss_scale_factor: loss_agg_mode 'seq-mean-token-sum-norm' divides by it; got None, for which verl takes the padded response length",
    ),
    ("vanilla", {"loss_scale_factor": 7}, "it is read with loss_agg_mode='seq-mean-token-sum-norm'"),
    ("vanilla", {"loss_agg_mode": "mean"}, "loss_agg_mode: presets.verl('vanilla') expects one of 'token-mean'"),
    ("sapo", {"loss_agg_mode": "token-mean"}, "verl pins this loss to 'seq-mean-token-mean'"),
    ("sapo", {"use_kl_loss": True}, PINNED_TERMS),
    (
        "geo_mean",
        {"entropy_coeff": 0.1, "loss_agg_mode": "seq-mean-token-mean"},
        "correct: verl divides the policy term",
    ),
    ("dro", {}, "dro_beta: presets.verl('dro') expects a number > 0; got None; verl has no default for it"),
    ("dro", {"dro_beta": 0}, "dro_beta: presets.verl('dro') expects a number > 0; got 0"),
    ("vanilla", {"kl_loss_type": "k1"}, "it is read with use_kl_loss=True"),
    ("vanilla", {"use_kl_loss": True, "kl_loss_type": "full"}, "kl_loss_type: presets.verl('vanilla') expects one of"),
    (
        "vanilla",
        {"rollout_is": "batch"},
        "rollout_is: presets.verl('vanilla') expects one of None, 'token', 'sequence'",
    ),
    (
        "vanilla",
        {"rollout_is": "token", "rollout_is_threshold": "2_0.5"},
        "rollout_is_threshold: expected an upper bound",
    ),
    (
        "vanilla",
        {"rollout_is": "token", "rollout_is_batch_normalize": True},
        "rollout_is_batch_normalize: presets.verl('vanilla') forms a weight from its own sequence",
    ),
    ("vanilla", {"rollout_rs": "token_k1"}, "verl rejects before the loss: pass the mask that is left as mask="),
    ("geo_mean", {"rollout_is": "token"}, "rollout_is: verl multiplies 'geo_mean' by the geometric mean"),
    (
        "bypass_mode",
        {"loss_type": "gspo"},
        "loss_type: presets.verl('bypass_mode') expects one of 'ppo_clip', 'reinforce'",
    ),
    ("bypass_mode", {"rollout_is": "token"}, "with loss_type='ppo_clip' forms these weights for metrics alone"),
    (
        "bypass_mode",
        {"loss_type": "reinforce", "clip_ratio": 0.1},
        "clip_ratio: presets.verl('bypass_mode') never reads it",
    ),
    ("bypass_mode", {"rollout_rs": "token_k1"}, "rollout_rs_threshold: rollout_rs='token_k1' has no default for it"),
    ("bypass_mode", {"rollout_rs_threshold": 2.0}, "rollout_rs_threshold: it is read with rollout_rs; got 2.0"),
    (
        "bypass_mode",
        {"rollout_rs": "seq_max_k2", "rollout_rs_threshold": 1.0},
        "rollout_rs: presets.verl('bypass_mode') has a counterpart of token_k1, token_k2, seq_sum_k1, seq_mean_k1; got 'seq_max_k2'",
    ),
    ("bypass_mode", {"rollout_rs": "token_k1,seq_sum_k1", "rollout_rs_threshold": 1.0}, "got 'token_k1,seq_sum_k1'"),
    (
        "bypass_mode",
        {"rollout_rs": "token_k2", "rollout_rs_threshold": "1_2"},
        "'token_k2' expects a number between 0 and 200",
    ),
    (
        "bypass_mode",
        {"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0, "loss_agg_mode": "seq-mean-token-mean"},
        "changes the weight of its other tokens under 'seq-mean-token-mean'",
    ),
]


@pytest.mark.parametrize(
    ("loss", "options", "message"), REFUSALS, ids=[f"{loss}-{'-'.join(o)}" for loss, o, _ in REFUSALS]
)
def test_refusals_name_the_option(loss: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        verl(loss, **options)
    assert message in str(error.value)


def test_an_inert_clip_ratio_is_reported() -> None:
    with pytest.warns(UserWarning, match="clip_ratio: 0.3 is inert because verl reads it only for a clip_ratio_low"):
        spec = verl(clip_ratio=0.3)
    assert (spec.clip_low, spec.clip_high) == (0.8, 1.2)
    spec = verl(clip_ratio=0.3, clip_ratio_low=None, clip_ratio_high=None)
    assert (spec.clip_low, spec.clip_high) == (0.7, 1.3)
