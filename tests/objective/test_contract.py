"""The guide's statements on the Objective contract, one test each; the docstring says which."""

import dataclasses
import pickle
from functools import partial

import pytest
import torch
from toy import ADDITIVE, CONTEXT, Policy, assert_same, gradients, make_batch, spec_of, split, whole_gradients

import fusedpg
from fusedpg.accumulate import StepAccumulator
from fusedpg.builders import build_grpo_objective, build_opd_objective
from fusedpg.config import GRPOConfig, OPDConfig
from fusedpg.dpo import build_dpo_objective
from fusedpg.metric_adapter import OBJECTIVE_WEIGHT_SUM, MetricAdapter, ObjectiveMetrics
from fusedpg.objective import Objective, PolicyBatch, Reduction
from fusedpg.old_logp import OldLogpCache
from fusedpg.policy_objective import build_policy_objective
from fusedpg.recipes import RECIPES


def grpo(**knobs):
    return build_grpo_objective(GRPOConfig(**knobs), CONTEXT)


# ------------------------------------------------------------------ what fn returns


def test_the_fields_are_the_guides():
    """An objective is built from fn, reduction, old_logp_cache, metric_adapter, identity and reference_scorer."""
    names = [f.name for f in dataclasses.fields(Objective)]
    assert names == ["fn", "reduction", "old_logp_cache", "metric_adapter", "identity", "reference_scorer"]
    assert {"MEAN", "TOKEN_SUM"} <= set(Reduction.__members__)


def test_loss_is_a_scalar_connected_to_the_model():
    """`fn(model, batch)` returns a scalar loss connected to the model graph, and metrics."""
    model = Policy()
    loss, metrics = grpo().fn(model, make_batch())
    assert loss.shape == ()
    loss.backward()
    assert model.table.grad.any()
    assert metrics["grpo/loss"] == loss.detach()


def returns(value, model, batch):
    return value(model(batch)) if callable(value) else value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3.0, r"^fn: expected it to return \(loss, metrics\); got float"),
        ((1.0, {}), r"^fn: expected a loss of shape \(\) .* got float"),
        (lambda z: (z.sum(-1), {}), r"^fn: expected a loss of shape \(\) .* got \(8, 6\)"),
        (lambda z: (z.detach().mean(), {}), r"^fn: expected a loss connected to the model"),
        (lambda z: (z.mean(), [1.0]), r"^fn: expected a mapping of metrics; got list"),
        (lambda z: (z.mean(), {"my/loss": 1.0}), r"TOKEN_SUM expects 'objective_weight_sum'.* got my/loss"),
    ],
)
def test_a_result_outside_the_contract_is_refused(value, message):
    """TOKEN_SUM must report its weight as OBJECTIVE_WEIGHT_SUM; a loss is scalar and connected."""
    objective = Objective(partial(returns, value), Reduction.TOKEN_SUM)
    with pytest.raises((TypeError, ValueError), match=message):
        objective(Policy(), make_batch())


def test_fields_are_checked():
    with pytest.raises(TypeError, match=r"^fn: expected a function"):
        Objective(None)
    with pytest.raises(TypeError, match=r"^reduction: expected one of Reduction.MEAN, .*got 'mean'"):
        Objective(returns, "mean")
    with pytest.raises(TypeError, match=r"^metric_adapter: expected a MetricAdapter or None; got dict"):
        Objective(returns, metric_adapter={})


# ------------------------------------------------------------------ reduction


@pytest.mark.parametrize("loss_type", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_loss_and_weight_use_one_unit(loss_type):
    """The weight counts tokens or sequences, whichever divided the loss: loss*weight is the numerator."""
    spec = spec_of("ppo_clip", loss_type)
    batch = make_batch()
    model = Policy()
    loss, metrics = grpo(loss_type=loss_type, lower_bound_ratio=0)(model, batch)
    streams = {k: v for k, v in batch.items() if k != "input_ids"}
    out = fusedpg.policy_loss_from_logits(spec, model(batch), streams.pop("targets"), backend="reference", **streams)
    units = batch["mask"].sum() if loss_type == "token-mean" else (batch["mask"].sum(1) > 0).sum()
    assert metrics[OBJECTIVE_WEIGHT_SUM] == units
    torch.testing.assert_close(loss * units, out.numerator, rtol=1e-12, atol=0)


# ------------------------------------------------------------------ metrics


ADAPTER = MetricAdapter("my/", {"loss": "loss", "rate": "clip_frac"}, ignored=frozenset({"my/secret", "debug/"}))


@pytest.mark.parametrize("where", ["train", "val"])
def test_names_become_stable_public_ones(where):
    """The adapter maps algorithm-local names to `train/*` and `val/*`; control metrics are no public ones."""
    got = ADAPTER.adapt(
        {"my/loss": 1.0, "my/rate": 2.0, "my/secret": 3.0, "debug/x": 4.0, OBJECTIVE_WEIGHT_SUM: 5}, where
    )
    assert got == {f"{where}/loss": 1.0, f"{where}/clip_frac": 2.0}


@pytest.mark.parametrize("name", ["my/new", "other/loss", "loss"])
def test_an_unmapped_name_fails(name):
    """A new internal prefix is completely mapped or explicitly ignored; otherwise adaptation fails."""
    with pytest.raises(ValueError, match=rf"^metrics: expected names of the map of prefix 'my/'; got '{name}'; map it"):
        ADAPTER.adapt({"my/loss": 1.0, name: 2.0})


def test_adapter_arguments():
    with pytest.raises(ValueError, match=r"^prefix: .*got 'my'"):
        MetricAdapter("my", {})
    with pytest.raises(ValueError, match=r"^prefix: .*got 'train/'"):
        MetricAdapter("train/", {})
    with pytest.raises(ValueError, match=r"^names: expected one internal name for each public one; got 'a' and 'b'"):
        MetricAdapter("my/", {"a": "loss", "b": "loss"})
    with pytest.raises(ValueError, match=r"^extrema: expected 'min' or 'max'"):
        MetricAdapter("my/", {}, extrema={"my/a": "sum"})
    with pytest.raises(ValueError, match=r"^split: expected 'train' or 'val'; got 'test'"):
        ADAPTER.adapt({}, "test")


def doubled(base, model, batch):
    """A small entry-level wrapper: changes the loss and the metric that reports it."""
    loss, metrics = base(model, batch)
    return 2 * loss, metrics.updated({"grpo/loss": 2 * loss.detach()})


def test_a_wrapper_keeps_the_contract():
    """A small transform wraps a complete objective; metric, adapter, weight, cache and identity are preserved."""
    base = grpo()
    wrapped = dataclasses.replace(base, fn=partial(doubled, base.fn))
    batch = make_batch()
    loss, _, metrics = whole_gradients(base, batch)
    got, _, new = whole_gradients(wrapped, batch)
    assert got == 2 * loss == new["grpo/loss"]
    assert new[OBJECTIVE_WEIGHT_SUM] == metrics[OBJECTIVE_WEIGHT_SUM]
    assert wrapped.metric_adapter is base.metric_adapter
    assert wrapped.old_logp_cache is base.old_logp_cache
    assert wrapped.identity == base.identity
    step = StepAccumulator(pickle.loads(pickle.dumps(wrapped)), Policy()).step(split(batch, [3]))
    torch.testing.assert_close(step.metrics["train/loss"], got.double())


def test_metrics_read_like_a_dict():
    metrics = grpo()(Policy(), make_batch())[1]
    assert isinstance(metrics, ObjectiveMetrics)
    assert metrics["grpo/clip_frac"].shape == ()
    assert set(metrics) == {"grpo/loss", OBJECTIVE_WEIGHT_SUM, *(f"grpo/{n}" for n in fusedpg.METRIC_NAMES)}
    assert len(metrics) == len(list(metrics))
    with pytest.raises(KeyError):
        metrics["grpo/nothing"]


# ------------------------------------------------------------------ prepared data


@pytest.mark.parametrize("missing", ["targets", "mask", "sequence_advantages"])
def test_missing_annotations_fail_loudly(missing):
    """An objective validates required annotations and never derives them from its chunk."""
    batch = make_batch()
    del batch[missing]
    with pytest.raises(
        ValueError, match=rf"^batch: .* reads '{missing}'; got none; annotate the batch before dispatch"
    ):
        grpo()(Policy(), batch)


def test_a_batch_is_a_mapping_an_object_or_a_policy_batch():
    batch = make_batch()
    want = grpo()(Policy(), batch)[0]
    assert grpo()(Policy(), PolicyBatch(**batch))[0] == want
    assert grpo()(Policy(), dataclasses.make_dataclass("Other", batch)(**batch))[0] == want


def test_model_returns_logits_or_an_output():
    class Output:
        def __init__(self, logits):
            self.logits = logits

    batch = make_batch()
    assert grpo()(lambda b: Output(Policy()(b)), batch)[0] == grpo()(Policy(), batch)[0]
    with pytest.raises(TypeError, match=r"^model: expected model\(batch\) to return HiddenStates, logits"):
        grpo()(lambda b: 3, batch)


# ------------------------------------------------------------------ frozen π_old


def without_old(batch, key=None):
    return {k: v for k, v in batch.items() if k != "logp_old"} | {"batch_id": key}


def moved(model):
    with torch.no_grad():
        model.head += 0.1 * torch.randn(
            model.head.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64
        )


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_old_logp_stays_frozen_over_updates(level):
    """A behaviour policy must remain frozen across several updates from one collected batch."""
    knobs = {"importance_sampling_level": level, "lower_bound_ratio": 0, "epochs": 2, "epsilon_low": 0.01}
    knobs |= {"epsilon_high": 0.02}
    objective = grpo(**knobs)
    chunks = [without_old(c, i) for i, c in enumerate(split(make_batch(), [3]))]
    model = Policy()
    frozen = [
        fusedpg.token_logprobs(model(c), c["targets"], mask=c["mask"], backend="reference").logp.detach()
        for c in chunks
    ]
    objective.old_logp_cache.start()
    StepAccumulator(objective, model).step(chunks)  # the first update's own forward is π_old
    model.zero_grad()
    moved(model)
    for _ in range(2):
        StepAccumulator(objective, model).step(chunks)
        got = gradients(model)
        model.zero_grad()
        StepAccumulator(grpo(**knobs), model).step(
            [{**c, "logp_old": old} for c, old in zip(chunks, frozen, strict=True)]
        )
        assert_same(got, gradients(model))
        model.zero_grad()


def test_freeze_scores_all_chunks_before_the_first_update():
    """With mini-batches, chunks of later updates keep the log-probs of the policy that collected them."""
    objective = grpo(mini_batch_per_replica=4, batch_per_replica=8)
    first, second = (without_old(c, i) for i, c in enumerate(split(make_batch(), [4])))
    model = Policy()
    want = fusedpg.token_logprobs(model(second), second["targets"], mask=second["mask"], backend="reference").logp
    objective.old_logp_cache.freeze(model, [first, second])
    assert len(objective.old_logp_cache) == 2
    StepAccumulator(objective, model).step([first])
    moved(model)
    assert torch.equal(objective.old_logp_cache.lookup(PolicyBatch.of(second)), want)


def test_a_moved_policy_is_never_taken_for_the_old_one():
    """A chunk that nobody recorded before the policy moved is refused, not scored on the wrong policy."""
    objective = grpo(epochs=2)
    first, second = (without_old(c, i) for i, c in enumerate(split(make_batch(), [4])))
    model = Policy()
    StepAccumulator(objective, model).step([first])
    model.zero_grad()
    with pytest.raises(ValueError, match=r"^logp_old: the policy has moved .* chunk 1 was not recorded before; call"):
        objective(model, second)
    with torch.no_grad():
        objective(model, second)  # an evaluation scores it on-policy, and records nothing
    assert len(objective.old_logp_cache) == 1
    with pytest.raises(ValueError, match=r"^batch: several updates .* read 'logp_old' or 'batch_id'; got neither"):
        objective(model, without_old(second))
    with pytest.raises(ValueError, match=r"^batch_id: 0 was recorded with shape \(4, 6\); got \(2, 6\)"):
        objective(model, without_old(split(make_batch(), [2])[0], 0))
    objective.old_logp_cache.start()
    objective(model, second)


def test_own_log_probs_need_no_key_on_policy():
    """One update a collected batch: the ratio is exactly 1, and nothing has to be identified."""
    batch = without_old(make_batch())
    loss, got, metrics = whole_gradients(grpo(), batch)
    model = Policy()
    old = fusedpg.token_logprobs(model(batch), batch["targets"], mask=batch["mask"], backend="reference").logp.detach()
    want_loss, want, _ = whole_gradients(grpo(), {**batch, "logp_old": old})
    assert loss == want_loss
    assert_same(got, want)
    assert metrics["grpo/ratio_min"] == metrics["grpo/ratio_max"] == 1


class Noisy(Policy):
    def forward(self, batch):
        return super().forward(batch) + 1e-3 * torch.rand((), dtype=torch.float64) * torch.arange(11)


def test_an_uncertified_forward_is_attested_once():
    """certified_deterministic_forward says that a scoring pass repeats the sampling policy; otherwise it is checked."""
    batch = without_old(make_batch(), 0)
    with pytest.warns(UserWarning, match=r"^certified_deterministic_forward: two forward passes .* differ by"):
        OldLogpCache(backend="reference").freeze(Noisy(), [batch])
    OldLogpCache(backend="reference").freeze(Policy(), [batch])
    OldLogpCache(backend="reference", certified=True).freeze(Noisy(), [batch])


# ------------------------------------------------------------------ frozen reference


def test_reference_scores_come_from_the_scorer_alone():
    """The objective consumes a frozen reference's scores through its scorer; the trainer never reads a module off it."""
    objective = grpo(kl_beta=0.1)
    batch = make_batch()
    reference = Policy(seed=9)
    want_ref = fusedpg.token_logprobs(reference(batch), batch["targets"], mask=batch["mask"], backend="reference").logp
    _, want, metrics = whole_gradients(objective, {**batch, "logp_ref": want_ref.detach()})
    del batch["logp_ref"]
    with pytest.raises(RuntimeError, match=r"^reference_scorer: expected a network; got none; call .*bind"):
        objective(Policy(), batch)
    objective.reference_scorer.bind(reference)
    _, got, scored = whole_gradients(objective, batch)
    assert_same(got, want)
    assert scored["grpo/kl"] == metrics["grpo/kl"] > 0
    assert grpo().reference_scorer is None


# ------------------------------------------------------------------ identity


def test_identity_holds_what_decides_the_loss():
    """identity records objective-specific values for provenance; the GSPO key is present at sequence level only."""
    identity = grpo().identity
    assert identity["name_or_path"] == "toy"
    assert identity["grpo_surrogate"] == "clipped"
    assert identity["loss_type"] == "token-mean"
    assert "importance_sampling_level" not in identity
    assert "max_response_length" not in identity
    at_sequence = grpo(importance_sampling_level="sequence", lower_bound_ratio=0, epsilon_low=3e-4, epsilon_high=4e-4)
    assert at_sequence.identity["importance_sampling_level"] == "sequence"
    assert grpo(loss_type="seq-mean-token-sum-fixed").identity["max_response_length"] == 7
    assert set(grpo(grpo_surrogate="legacy_pg").identity) == {"name_or_path", "grpo_surrogate", "loss_type"}
    changed = [grpo(**k).identity for k in ({"epsilon_low": 0.1}, {"temperature": 0.7}, {"kl_beta": 0.1})]
    assert all(one != identity for one in changed)


def test_context_must_identify_the_policy():
    with pytest.raises(ValueError, match=r"^context: builders read 'name_or_path'; got none"):
        build_grpo_objective(GRPOConfig(), object())


# ------------------------------------------------------------------ serialisation


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "opd"])
def test_objectives_and_builders_pickle(recipe):
    """A builder is module-level and worker-serialisable, specialised by `functools.partial` over plain values."""
    build = build_dpo_objective if recipe == "dpo" else build_grpo_objective
    rl = RECIPES[recipe]().rl
    builder = pickle.loads(pickle.dumps(partial(build, rl, CONTEXT)))
    objective = builder()
    again = pickle.loads(pickle.dumps(objective))
    assert again.identity == objective.identity
    batch = make_batch()
    loss, want, _ = whole_gradients(objective, batch)
    got_loss, got, _ = whole_gradients(again, batch)
    assert got_loss == loss
    assert_same(got, want)


def test_state_stays_behind_and_stays_shared():
    """Pickled caches and scorers are empty, and still the objects that `fn` reads."""
    objective = grpo(kl_beta=0.1)
    objective.reference_scorer.bind(Policy())
    objective(Policy(), without_old(make_batch(), "a"))
    assert len(objective.old_logp_cache) == 1
    again = pickle.loads(pickle.dumps(objective))
    assert len(again.old_logp_cache) == 0
    again(Policy(), {**without_old(make_batch(), "a")})
    assert len(again.old_logp_cache) == 1
    batch = without_old(make_batch())
    del batch["logp_ref"]
    with pytest.raises(RuntimeError, match="expected a network"):
        again(Policy(), batch)


def test_a_batch_global_loss_is_refused():
    for name in set(fusedpg.CATALOGUE) - set(ADDITIVE):
        with pytest.raises(ValueError, match=r"^spec: .* selects tokens over the whole batch"):
            build_policy_objective(fusedpg.CATALOGUE[name])


def test_opd_and_grpo_take_their_own_config():
    """GRPO and OPD select different concepts: a config of one is not the other's."""
    with pytest.raises(TypeError, match=r"^rl: expected a GRPOConfig; got OPDConfig"):
        build_grpo_objective(OPDConfig(), CONTEXT)
    with pytest.raises(TypeError, match=r"^rl: expected an OPDConfig; got GRPOConfig"):
        build_opd_objective(GRPOConfig(), CONTEXT)
    with pytest.raises(TypeError, match=r"^rl: expected a DPOConfig; got GRPOConfig"):
        build_dpo_objective(GRPOConfig(), CONTEXT)
