"""cosmos-framework's builder: picklable, its config's keys, the framework's own types, and the objective's numbers."""

import enum
import pickle
import re
import subprocess
import sys
import types
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from oracles import KINDS, assert_step

import fusedpg
from fusedpg.certify.adapters import cosmos
from fusedpg.certify.adapters.batches import batch, two_way
from fusedpg.certify.adapters.cosmos import CASES, CONTEXT, inputs
from fusedpg.integrations.cosmos import build_objective

IDS = [f"{case.loss}-{i}" for i, case in enumerate(CASES)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_objectives_are_the_guide_s(case, kind):
    assert_step(cosmos, case, kind)


@pytest.mark.parametrize("loss_type", ["token-mean", "seq-mean-token-mean"])
def test_the_weight_is_the_count_of_the_reduction(loss_type):
    b = batch("masked-row")
    objective = build_objective(SimpleNamespace(grpo_surrogate="clipped", loss_type=loss_type), CONTEXT)
    _, metrics = objective(lambda given: two_way(b.logp).requires_grad_(), inputs(b))
    unit = b.mask.sum() if loss_type == "token-mean" else b.mask.any(1).sum()
    assert float(metrics[fusedpg.OBJECTIVE_WEIGHT_SUM]) == float(unit)


def test_parts_add_up_to_the_step():
    b = batch("ragged")
    objective = build_objective(SimpleNamespace(grpo_surrogate="clipped", loss_type="seq-mean-token-mean"), CONTEXT)
    given, numerator, weight = inputs(b), 0.0, 0.0
    whole, _ = objective(lambda g: two_way(b.logp).requires_grad_(), given)
    for rows in (slice(0, 1), slice(1, 4)):
        part = {key: value[rows] for key, value in given.items()}
        logits = two_way(b.logp[rows]).requires_grad_()
        loss, metrics = objective(lambda g, z=logits: z, part)
        numerator += loss.detach() * metrics[fusedpg.OBJECTIVE_WEIGHT_SUM]
        weight += metrics[fusedpg.OBJECTIVE_WEIGHT_SUM]
    torch.testing.assert_close(numerator / weight, whole.detach())


def test_hidden_states_and_logits_agree():
    torch.manual_seed(0)
    b = batch("holes")
    hidden, weight = torch.randn(*b.mask.shape, 8), torch.randn(13, 8)
    objective = build_objective(SimpleNamespace(grpo_surrogate="clipped"), CONTEXT)
    losses = []
    for build in (lambda h, w: fusedpg.HiddenStates(h, w), lambda h, w: h @ w.T):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss, _ = objective(lambda g, b=build, h=h, w=w: b(h, w), inputs(b))
        loss.backward()
        losses.append((loss.detach(), h.grad, w.grad))
    for ours, theirs in zip(*losses, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_nothing_selected_is_a_connected_zero():
    b = batch(empty=True)
    logits = two_way(b.logp).requires_grad_()
    loss, metrics = build_objective({"grpo_surrogate": "clipped"}, CONTEXT)(lambda g: logits, inputs(b))
    loss.backward()
    assert loss.item() == 0.0
    assert not logits.grad.any()
    assert float(metrics[fusedpg.OBJECTIVE_WEIGHT_SUM]) == 0.0


# ------------------------------------------------------------------ reaching a worker


def test_the_builder_pickles():
    for builder in (build_objective, partial(build_objective, model_config=CONTEXT)):
        again = pickle.loads(pickle.dumps(builder))
        assert again({"grpo_surrogate": "clipped"}, model_config=CONTEXT).identity["name_or_path"] == "policy"


def test_a_worker_builds_from_the_pickle(tmp_path):
    """Another process, which knows nothing of this one's imports."""
    path = tmp_path / "builder"
    path.write_bytes(pickle.dumps(build_objective))
    code = (
        "import pickle, sys, types\n"
        f"build = pickle.load(open({str(path)!r}, 'rb'))\n"
        "print(build({'grpo_surrogate': 'clipped'}, types.SimpleNamespace(name_or_path='p')).reduction)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.strip() == "Reduction.TOKEN_SUM", done.stderr


def test_the_framework_gets_its_own_types(monkeypatch):
    class Reduction(enum.Enum):
        MEAN = 1
        TOKEN_SUM = 2

    @dataclass
    class Theirs:
        fn: object
        reduction: Reduction
        old_logp_cache: object = None
        metric_adapter: object = None
        reference_scorer: object = None
        identity: object = None

    path = "cosmos_framework.posttrain.algorithm.primitives.objective"
    parts = path.split(".")
    for i in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
    module = sys.modules[path]
    module.Objective, module.Reduction, module.OBJECTIVE_WEIGHT_SUM = Theirs, Reduction, "their/weight"
    objective = build_objective({"grpo_surrogate": "clipped"}, CONTEXT)
    assert type(objective) is Theirs
    assert objective.reduction is Reduction.TOKEN_SUM
    b = batch("ragged")
    _, metrics = objective.fn(lambda g: two_way(b.logp).requires_grad_(), inputs(b))
    assert float(metrics["their/weight"]) == float(b.mask.sum())
    assert fusedpg.OBJECTIVE_WEIGHT_SUM not in metrics
    assert pickle.loads(pickle.dumps(objective.fn)).keywords["key"] == "their/weight"


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("rl", "message"),
    [
        ({}, "rl: expected either grpo_surrogate (GRPO) or distillation_mode (OPD); got neither"),
        ({"grpo_surrogate": "clipped", "distillation_mode": "direct"}, "got grpo_surrogate and distillation_mode"),
        ({"objective": "clipped", "grpo_surrogate": "clipped"}, "rl.objective: the objective has no such term"),
        ({"grpo_surrogate": "clipped", "entropy_coeff": 0.1}, "rl.entropy_coeff: the objective has no such term"),
        ({"grpo_surrogate": "gspo"}, "rl.grpo_surrogate: expected one of clipped, legacy_pg; got 'gspo'"),
        ({"grpo_surrogate": "clipped", "importance_sampling_level": "sequence"}, "lower_bound_ratio"),
        ({"grpo_surrogate": "legacy_pg", "epsilon_low": 0.1}, "epsilon_low"),
    ],
)
def test_refused_at_construction(rl, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build_objective(rl, CONTEXT)


def test_a_missing_response_bound_is_refused():
    rl = {"grpo_surrogate": "clipped", "loss_type": "seq-mean-token-sum-fixed"}
    with pytest.raises(ValueError, match="max_response_length"):
        build_objective(rl, SimpleNamespace(name_or_path="policy"))


def test_distillation_is_selected_by_its_own_key():
    with pytest.warns(UserWarning, match="task reward"):
        objective = build_objective({"distillation_mode": "direct", "divergence": "jsd"}, CONTEXT)
    assert objective.identity["divergence"] == "jsd"
