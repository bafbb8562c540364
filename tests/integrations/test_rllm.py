"""rLLM: bodies over its context, the registry's contract, and the closure of the managed backends."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from oracles import KINDS, assert_same, assert_step

import fusedpg
from fusedpg.certify.adapters import rllm as trainer
from fusedpg.certify.adapters.batches import batch, lists, step_batch, truth
from fusedpg.certify.adapters.rllm import CASES, Context, context, datums, managed_step, managed_want, observed
from fusedpg.certify.transcribed_rllm import MODES, aggregate, gspo
from fusedpg.integrations import rllm

IDS = [f"{case.loss}-{case.options.get('loss_agg_mode', 'pinned')}-{i}" for i, case in enumerate(CASES)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_bodies_are_rllms_losses(case, kind):
    assert_step(trainer, case, kind)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_metrics_are_floats(case):
    b = batch("holes", case.token_advantages)
    params = {k: v for k, v in case.options.items() if k != "loss_agg_mode"}
    _, ctx = context(b, observed(case, b), params, MODES[0])
    _, metrics = rllm.BODIES[f"fusedpg_{case.loss}"](ctx)
    assert bool(metrics) == (case.loss != "reinforce")
    assert all(type(value) is float for value in metrics.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", rllm.LOSSES)
def test_every_loss_is_the_library_s_own(name, kind):
    """Under the mode that it pins, else under each of the three."""
    b = batch(kind)
    obs = torch.zeros_like(b.mask)
    params = {"beta": 0.1} if name == "dro" else {}
    for mode in (rllm.PINS[name],) if name in rllm.PINS else MODES:
        configured = next(m for m in MODES if m != mode) if name in rllm.PINS else mode
        leaf, ctx = context(b, obs, params, configured)
        loss, _ = rllm.BODIES[f"fusedpg_{name}"](ctx)
        loss.backward()
        reduction = None if name == "dr_grpo" else mode
        own = b.logp.double().requires_grad_()
        fields = {n: getattr(b, n).double() for n in ("logp_old", "logp_ref", "logp_rollout")}
        want = fusedpg.resolve_loss(name, "reference", params, reduction).from_logp(
            own, **fields, sequence_advantages=b.advantages.double(), mask=b.mask, obs_mask=obs
        )
        want.loss.backward()
        assert_same(loss, leaf.grad, want.loss.detach(), own.grad)


def test_one_datum_is_one_sequence():
    b = batch("ragged")
    row = SimpleNamespace(**{k: v[0] for k, v in vars(b).items() if isinstance(v, torch.Tensor)})
    leaf = row.logp.clone().requires_grad_()
    ctx = Context(row, leaf, torch.zeros_like(row.mask), {"eps_clip": 3e-4}, MODES[0])
    loss, metrics = rllm.BODIES["fusedpg_gspo"](ctx)
    loss.backward()
    one = SimpleNamespace(**{k: v[:1] for k, v in vars(b).items() if isinstance(v, torch.Tensor)})
    formula = lambda f: aggregate(gspo(f, eps_clip=3e-4), f.mask, f, MODES[0], None, None)  # noqa: E731
    assert_same(loss, leaf.grad[None], *truth(one, formula))
    assert list(metrics) == ["gspo/clip_frac"]


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "echo", "dr_grpo", "vespo"])
def test_nothing_selected_is_a_connected_zero(name):
    b = batch("ragged", empty=True)
    leaf, ctx = context(b, torch.zeros_like(b.mask), {}, MODES[0])
    loss, metrics = rllm.BODIES[f"fusedpg_{name}"](ctx)
    loss.backward()
    assert loss.item() == 0.0
    assert not leaf.grad.any()
    assert all(value == value for value in metrics.values())


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("ppo_clip", {"delta": 0.1}, "delta: presets.rllm('ppo_clip') never reads it"),
        ("ppo_clip", {"kl_beta": 0.1}, "kl_beta: no built-in loss of rLLM reads it"),
        ("dapo", {"reduction": "token-sum"}, "reduction: rLLM owns it"),
        ("dapo", {"entropy_coef": 0.1}, "entropy_coef: rLLM's loss 'fusedpg_dapo' cannot honour it"),
    ],
)
def test_params_are_refused_by_name(name, params, message):
    b = batch()
    _, ctx = context(b, torch.zeros_like(b.mask), params, MODES[0])
    with pytest.raises(ValueError, match=re.escape(message)):
        rllm.BODIES[f"fusedpg_{name}"](ctx)


def test_a_missing_field_is_named():
    b = batch()
    _, ctx = context(b, torch.zeros_like(b.mask), {}, MODES[0])
    ctx.logp_rollout = None
    with pytest.raises(ValueError, match="^logp_rollout: the loss 'icepop' reads it"):
        rllm.BODIES["fusedpg_icepop"](ctx)


def test_advantages_that_differ_need_a_token_s_ratio():
    b = batch("ragged", per_token=True)
    _, ctx = context(b, torch.zeros_like(b.mask), {}, MODES[0])
    with pytest.raises(ValueError, match="^advantages: expected one value a sequence"):
        rllm.BODIES["fusedpg_luspo"](ctx)


def test_losses_over_the_whole_batch_are_not_registered():
    assert not {"fusedpg_clip_cov", "fusedpg_kl_cov"} & set(rllm.BODIES)
    with pytest.raises(ValueError, match="cannot carry 'clip_cov'"):
        rllm.managed_loss("fusedpg_clip_cov")


# ------------------------------------------------------------------ the registry


def test_registration_follows_the_contract():
    seen = {}

    def register_loss(name, agg_mode=None):
        return lambda fn: seen.setdefault(name, (fn, agg_mode))[0]

    names = rllm.register(register_loss)
    assert tuple(seen) == names
    assert {"fusedpg_ppo_clip", "fusedpg_gspo", "fusedpg_sapo"} <= set(seen)
    assert {mode for _, mode in seen.values()} == {None, *MODES}
    assert seen["fusedpg_gspo"] == (rllm.BODIES["fusedpg_gspo"], MODES[0])


FAKE = (
    "import sys, types\n"
    "fake, names = types.ModuleType('rllm'), []\n"
    "fake.register_loss = lambda name, agg_mode=None: (lambda fn: names.append(name) or fn)\n"
    "{install}\n"
    "import fusedpg.integrations.rllm as ours\n"
    "print(len(names) == len(ours.LOSSES), 'rllm' in sys.modules)\n"
)


@pytest.mark.parametrize(("install", "want"), [("sys.modules['rllm'] = fake", "True True"), ("", "False False")])
def test_importing_the_module_registers_when_rllm_is_there(install, want):
    """What an entry point and `loss_plugins` do."""
    code = FAKE.format(install=install)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.strip() == want, done.stderr


def test_the_package_declares_the_entry_point():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    group = re.search(r'\[project\.entry-points\."rllm\.losses"\]\n(\w+) = "(.+)"', text)
    assert group is not None
    assert group[2] == rllm.__name__


# ------------------------------------------------------------------ managed backends


def leaves(ls):
    return [t.clone().requires_grad_() for t in ls.logp]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", rllm.MANAGED)
def test_managed_loss(backend, mode, kind):
    """Tinker divides by the counts of the step; Fireworks gets the sum and divides itself."""
    b = step_batch(kind, False)
    assert_same(*managed_step(backend, mode, b), *managed_want(backend, mode, b))
    ls = lists(b)
    assert list(rllm.managed_loss("fusedpg_ppo_clip", backend)(datums(ls), leaves(ls))[1]) == ["ppo/clip_frac"]


def test_fireworks_sums_add_up_over_calls():
    ls = lists(batch("ragged"))
    fn = rllm.managed_loss("reinforce", "fireworks")
    data, tensors = datums(ls), leaves(ls)
    whole, _ = fn(data, tensors)
    parts = fn(data[:1], tensors[:1])[0] + fn(data[1:], tensors[1:])[0]
    torch.testing.assert_close(whole, parts)


def test_a_registered_python_body_runs_managed():
    @fusedpg.register_loss("of_the_test")
    def of_the_test(ctx):
        return ctx.aggregate(-ctx.advantages * ctx.logp_curr, ctx.action_mask), {"one": 1.0}

    ls = lists(batch("ragged"))
    tensors = leaves(ls)
    loss, metrics = rllm.managed_loss("of_the_test")(datums(ls), tensors)
    loss.backward()
    want = rllm.managed_loss("reinforce")(datums(ls), leaves(ls))[0]
    torch.testing.assert_close(loss, want)
    assert metrics == {"of_the_test/one": 1.0}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rllm.managed_loss("ppo_clip", "verl"), "backend: expected one of tinker, fireworks; got 'verl'"),
        (lambda: rllm.managed_loss("ppo_clip", "fireworks", step_tokens=3.0), "step_tokens: Fireworks divides"),
        (lambda: rllm.managed_loss("pop_clip"), "did you mean 'ppo_clip'"),
        (lambda: rllm.managed_loss("cispo", params={"delta": 1}), "delta: presets.rllm('cispo') never reads it"),
        (lambda: rllm.managed_loss("dapo", params={"entropy_coef": 0.1}), "entropy_coef: the managed path of 'dapo'"),
    ],
)
def test_managed_refuses_at_construction(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
