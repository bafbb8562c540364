"""Metrics: a literal for each, exact merging over micro-batches, and nothing selected."""

import itertools
import math

import pytest
import torch

import fusedpg
from fusedpg.metrics import METRIC_NAMES, NSUMS, SUM_NAMES, Metrics

ALL = set(METRIC_NAMES)


def ln(*ratios):
    return torch.tensor([math.log(r) for r in ratios])


def metrics_of(spec, logp, backend, **kwargs):
    return fusedpg.policy_loss(spec, logp, backend=backend, **kwargs).metrics


#: ratios 2, 1/2, 1, 5, 1; the last is masked
RATIOS = (2.0, 0.5, 1.0, 5.0, 1.0)
LITERALS = {
    "ratio_mean": 8.5 / 4,
    "ratio_min": 0.5,
    "ratio_max": 5.0,
    "clip_frac": 2 / 4,  # tokens 0 (A > 0, high) and 1 (A < 0, low)
    "clip_frac_low": 1 / 4,
    "clip_frac_high": 1 / 4,
    "dual_clip_frac": 1 / 4,  # token 3: A = -1, r = 5 > 3
    "out_of_band_frac": 3 / 4,  # 2, 1/2, 5
    "keep_frac": 1.0,
    "approx_kl": -(math.log(2) - math.log(2) + 0 + math.log(5)) / 4,  # mean of o - l
    "approx_kl_k3": (8.5 - 4 - math.log(5)) / 4,  # mean of r - 1 - ln r
    "kl": (0.5 + 0.125 + 0 + 2.0) / 4,  # k2 of the gaps 1, 1/2, 0, 2; neither coefficient nor ratio
    "entropy": (0.1 + 0.2 + 0.3 + 0.4) / 4,
    "is_weight_mean": (1.0 + 0.5 + 0.0 + 2.0) / 4,
    "is_weight_max": 2.0,
    "is_masked_frac": 1 / 4,
    "tokens": 4.0,
    "sequences": 2.0,
    # token 0 is clipped but its KL slope is 1; 1: clipped, slope 1/2; 2: weight 0 and gap 0; 3: dual clipped, slope 2
    "active_tokens": 3.0,
}


def full_case(backend, rows=slice(None)):
    logp = ln(*RATIOS)
    gaps = torch.tensor([1.0, 0.5, 0.0, 2.0, 9.0])
    spec = fusedpg.loss_spec("ppo_dual_clip", kl="k2", kl_coef=0.1)
    return metrics_of(
        spec,
        logp[rows].requires_grad_(),
        backend,
        logp_old=torch.zeros(5)[rows],
        logp_ref=(logp - gaps).detach()[rows],
        advantages=torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])[rows],
        entropy=torch.tensor([0.1, 0.2, 0.3, 0.4, 9.0])[rows],
        is_weights=torch.tensor([1.0, 0.5, 0.0, 2.0, 9.0])[rows],
        mask=torch.tensor([1.0, 0.5, 1.0, 0.25, 0.0])[rows],  # metrics count tokens; weights do not enter
        cu_seqlens=torch.tensor([0, 1, 5]) if rows == slice(None) else torch.tensor([0, len(RATIOS[rows])]),
    )


def test_every_metric_has_a_literal():
    assert set(LITERALS) == ALL


@pytest.mark.parametrize("name", METRIC_NAMES)
def test_literal(backend, name):
    value = full_case(backend)[name]
    assert value.shape == ()
    assert value.item() == pytest.approx(LITERALS[name], rel=1e-6, abs=1e-7)


def test_active_tokens_without_kl(backend):
    """c != 0: a clipped token, a zero advantage and a masked token are inactive."""
    logp = ln(2.0, 1.0, 1.0, 1.0).requires_grad_()
    m = metrics_of(
        fusedpg.loss_spec("ppo_clip"),
        logp,
        backend,
        logp_old=torch.zeros(4),
        advantages=torch.tensor([1.0, 1.0, 0.0, 1.0]),
        mask=torch.tensor([1.0, 1.0, 1.0, 0.0]),
    )
    assert m["active_tokens"] == 1


@pytest.mark.parametrize("name", ["reinforce", "importance_sampling"])
def test_losses_without_a_band(backend, name):
    m = metrics_of(fusedpg.loss_spec(name), ln(9.0, 0.1), backend, logp_old=torch.zeros(2), advantages=1.0)
    assert m["clip_frac"] == m["out_of_band_frac"] == m["dual_clip_frac"] == 0
    assert m["ratio_max"].item() == pytest.approx(9.0, rel=1e-6)


def test_sequence_level_ratio_is_the_sequence_ratio(backend):
    """d means 0.2 and 0: every token reports its sequence's ratio."""
    m = metrics_of(
        fusedpg.loss_spec("gspo"),
        torch.tensor([[0.3, 0.1], [0.1, -0.1]]),
        backend,
        logp_old=torch.zeros(2, 2),
        sequence_advantages=torch.tensor([1.0, -1.0]),
    )
    assert m["ratio_mean"].item() == pytest.approx((math.exp(0.2) + 1) / 2, rel=1e-6)
    assert m["ratio_max"].item() == pytest.approx(math.exp(0.2), rel=1e-6)
    assert m["clip_frac_high"] == 0.5
    assert m["sequences"] == 2


def test_absent_streams_report_zero(backend):
    m = metrics_of(fusedpg.loss_spec("ppo_clip"), torch.zeros(2), backend, logp_old=torch.zeros(2), advantages=1.0)
    for name in ("kl", "entropy", "is_weight_mean", "is_weight_max", "is_masked_frac", "sequences"):
        assert m[name] == 0
    assert m["keep_frac"] == 1


@pytest.mark.parametrize("cuts", [[1], [2], [1, 3], [1, 2, 3, 4], [5]], ids=str)
def test_merge_equals_whole(backend, cuts):
    """Means carry their counts, extrema stay extrema."""
    edges = [0, *cuts, 5] if cuts != [5] else [0, 5]
    parts = [full_case(backend, slice(a, b)) for a, b in itertools.pairwise(edges)]
    merged = parts[0].merge(*parts[1:])
    for name, value in LITERALS.items():
        if name != "sequences":  # the cuts make sequences of their own
            assert merged[name].item() == pytest.approx(value, rel=1e-6, abs=1e-7), name


def test_merge_counts_sequences():
    spec = fusedpg.loss_spec("reinforce")
    parts = [metrics_of(spec, torch.zeros(n, 2), "reference", advantages=1.0) for n in (2, 3)]
    assert parts[0].merge(parts[1])["sequences"] == 5
    assert parts[0].merge()["sequences"] == 2


def test_merge_with_a_part_that_has_no_kl():
    """The mean is over the tokens that have one."""
    logp, old = torch.zeros(2), torch.zeros(2)
    with_kl = fusedpg.loss_spec("ppo_clip", kl="k2", kl_coef=1.0)
    a = metrics_of(with_kl, logp, "reference", logp_old=old, logp_ref=logp - 2, advantages=1.0)
    b = metrics_of(fusedpg.loss_spec("ppo_clip"), logp, "reference", logp_old=old, advantages=1.0)
    assert a.merge(b)["kl"] == 2
    assert a.merge(b)["tokens"] == 4


@pytest.mark.parametrize("tokens", [0, 3])
def test_nothing_selected(backend, tokens):
    m = metrics_of(
        fusedpg.loss_spec("ppo_clip", kl="k3", kl_coef=0.1),
        torch.full((tokens,), math.nan),
        backend,
        logp_old=torch.zeros(tokens),
        logp_ref=torch.zeros(tokens),
        advantages=1.0,
        is_weights=torch.ones(tokens),
        mask=torch.zeros(tokens),
    )
    assert m.to_dict() == dict.fromkeys(METRIC_NAMES, 0.0)


def test_merging_nothing_changes_nothing(backend):
    whole = full_case(backend)
    empty = metrics_of(fusedpg.loss_spec("ppo_clip"), torch.zeros(0), backend, logp_old=torch.zeros(0), advantages=1.0)
    assert whole.merge(empty).to_dict() == whole.to_dict()
    assert empty.merge(whole).to_dict() == whole.to_dict()


def test_metrics_none(backend):
    out = fusedpg.policy_loss(
        fusedpg.loss_spec("reinforce"), torch.zeros(2), advantages=1.0, metrics="none", backend=backend
    )
    assert len(out.metrics) == 0
    assert list(out.metrics) == []
    assert out.metrics.to_dict() == {}
    assert repr(out.metrics) == "Metrics()"
    with pytest.raises(KeyError, match="kl"):
        out.metrics["kl"]
    assert out.metrics.merge(out.metrics).to_dict() == {}
    whole = full_case(backend)
    assert out.metrics.merge(whole).to_dict() == whole.merge(out.metrics).to_dict() == whole.to_dict()


def test_mapping_behaviour(backend):
    m = full_case(backend)
    assert tuple(m) == METRIC_NAMES
    assert len(m) == len(METRIC_NAMES)
    assert set(m.to_dict()) == set(dict(m)) == ALL
    assert "ratio_mean=2.125" in repr(m)
    with pytest.raises(KeyError, match="loss"):
        m["loss"]
    assert m.get("loss") is None
    assert not any(value.requires_grad for value in m.values())


def test_unmasked_nan_stays_visible(backend):
    m = metrics_of(
        fusedpg.loss_spec("ppo_clip"), torch.tensor([math.nan, 0.0]), backend, logp_old=torch.zeros(2), advantages=1.0
    )
    for name in ("ratio_mean", "ratio_min", "ratio_max", "approx_kl"):
        assert math.isnan(m[name]), name
    assert m["tokens"] == 2


def test_names():
    assert len(SUM_NAMES) == NSUMS == len(set(SUM_NAMES))
    assert len(METRIC_NAMES) == len(ALL)
    assert issubclass(Metrics, fusedpg.Metrics)
