"""Registration, plugins, entry points, and what is refused with which words."""

import importlib
import sys

import batches
import my_losses  # noqa: F401
import pytest
import torch

import fusedpg


def register(name, body, **kwargs):
    fusedpg.register_loss(name, **kwargs)(body)
    return fusedpg.resolve_loss(name)


def score(ctx):
    return ctx.aggregate(-ctx.advantages * ctx.logp_curr, ctx.action_mask)


def plain(ctx):
    return score(ctx), {}


# ------------------------------------------------------------------ names


def test_unknown_name_lists_the_known_ones_and_the_closest():
    with pytest.raises(ValueError, match="name: expected one of ppo_clip, dppo_tv, .*my_icepop.*; got 'icepopp'") as e:
        fusedpg.resolve_loss("icepopp")
    assert "did you mean 'icepop'?" in str(e.value)
    assert "list its module in loss_plugins, or expose it as an entry point of rllm.losses or" in str(e.value)
    with pytest.raises(ValueError, match="did you mean 'my_icepop'"):
        fusedpg.resolve_loss("my_icepo")


def test_decorator_returns_the_function():
    assert fusedpg.register_loss("plain")(plain) is plain
    assert fusedpg.register_loss("plain")(plain) is plain  # once more is no other function


def test_another_function_under_one_name_is_refused():
    def other(ctx):
        return score(ctx), {}

    fusedpg.register_loss("taken")(plain)
    message = "register_loss: 'taken' is already the name of test_registry.plain; got .*other; choose another name"
    with pytest.raises(ValueError, match=message):
        fusedpg.register_loss("taken")(other)
    assert fusedpg.resolve_loss("taken").run.body is plain


def test_a_reloaded_module_replaces_its_own(site):
    (site / "plug_g.py").write_text(BODY.format(name="reloaded"))
    module = importlib.import_module("plug_g")
    before = module.body
    importlib.reload(module)
    assert fusedpg.resolve_loss("reloaded").run.body is module.body is not before


@pytest.mark.parametrize("name", ["icepop", "dr_grpo", "dppo_kimi"])
def test_a_native_name_is_refused(name):
    """Native-first would run the kernel and never the body."""
    with pytest.raises(ValueError, match=f"register_loss: {name!r} is a built-in loss, whose kernel would run instead"):
        fusedpg.register_loss(name)(plain)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: fusedpg.register_loss(plain), TypeError, r"write @register_loss\('my_loss'\) above the function"),
        (lambda: fusedpg.register_loss(""), TypeError, "register_loss: expected a name; got ''"),
        (lambda: fusedpg.register_loss("x")(3), TypeError, "expected a function of a LossContext; got 3"),
        (
            lambda: fusedpg.register_loss("x", agg_mode="mean"),
            ValueError,
            "agg_mode: expected one of seq-mean-token-mean, token-mean, seq-mean-token-sum; got 'mean'",
        ),
        (lambda: fusedpg.resolve_loss("icepop", loss_agg_mode="sum"), ValueError, "loss_agg_mode: expected one of"),
        (lambda: fusedpg.resolve_loss("icepop", path="fast"), ValueError, "path: expected one of auto, native, custom"),
        (lambda: fusedpg.resolve_loss("my_icepop", path="native"), ValueError, "'my_icepop' has no native kernel"),
        (lambda: fusedpg.resolve_loss("sapo", path="custom"), ValueError, "'sapo' has no Python body"),
        (lambda: fusedpg.resolve_loss("ppo_clip", params={"alpha": 1}), ValueError, "alpha: .*never reads it; got 1"),
        (
            lambda: fusedpg.resolve_loss("ppo_clip", params={"alpha": 1}, path="custom"),
            ValueError,
            "alpha: .*never reads it; got 1",
        ),
        (
            lambda: fusedpg.resolve_loss("reinforce_kl", params={"fwd_kl_coef": 1.0, "aplha": 1}),
            ValueError,
            "aplha: .*never reads it; got 1",
        ),
        (lambda: fusedpg.resolve_loss("ppo_clip", kl_beta=0.1), ValueError, "kl_beta: no built-in loss of rLLM reads it"),
    ],
)  # fmt: skip
def test_refused_by_name(call, error, message):
    with pytest.raises(error, match=message):
        call()


# ------------------------------------------------------------------ what a body returns


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (score, TypeError, r"bad: expected the loss to return \(scalar, metrics\); got a tensor torch.float64 of shape"),
        (lambda ctx: (ctx.logp_curr, {}), TypeError, r"bad: expected a scalar loss .*shape \(4, 4\); return ctx.aggre"),
        (lambda ctx: (1.0, {}), TypeError, "bad: expected a scalar loss .*got float"),
        (lambda ctx: (score(ctx), None), TypeError, "bad: expected metrics as a dict of name to number; got NoneType"),
        (lambda ctx: (score(ctx), {"ratio": ctx.logp_curr}), TypeError, r"bad: metrics\['ratio'\]: expected a number; "),
        (lambda ctx: (score(ctx), {"tag": "x"}), TypeError, r"bad: metrics\['tag'\]: expected a number; got str"),
        (lambda ctx: (score(ctx), {3: 1.0}), TypeError, "bad: expected names of metrics to be strings; got 3"),
        (
            lambda ctx: (ctx.aggregate(-ctx.logp_curr.detach(), ctx.action_mask), {}),
            ValueError,
            "bad: expected a loss that depends on ctx.logp_curr; got one whose graph does not reach it",
        ),
        (
            lambda ctx: (ctx.aggregate(ctx.advantages.requires_grad_(), ctx.action_mask), {}),
            ValueError,
            "bad: expected a loss that depends on ctx.logp_curr",
        ),
        (
            lambda ctx: (ctx.aggregate(ctx.logp_curr[0], ctx.action_mask), {}),
            ValueError,
            r"aggregate: per_token: expected shape \(4, 4\)",
        ),
        (
            lambda ctx: (ctx.aggregate(ctx.action_mask, ctx.logp_curr), {}),
            ValueError,
            r"aggregate: mask: expected weights in \[0, 1\]",
        ),
        (
            lambda ctx: (ctx.aggregate(ctx.logp_curr, ctx.action_mask, "mean"), {}),
            ValueError,
            "aggregate: mode: expected one of seq-mean-token-mean, .*; got 'mean'",
        ),
        (
            lambda ctx: (ctx.seq_reduce(ctx.logp_curr, ctx.action_mask, "max"), {}),
            ValueError,
            "seq_reduce: reduction: expected 'mean' or 'sum'; got 'max'",
        ),
    ],
)  # fmt: skip
def test_a_body_that_breaks_the_contract_is_refused_by_name(body, error, message):
    with pytest.raises(error, match=message):
        batches.from_logp(register("bad", body), batches.make())


def test_metrics_may_be_tensors_of_one_element():
    """No body is forced to synchronise."""
    loss = register("tensors", lambda ctx: (score(ctx), {"a": ctx.logp_curr.mean()[None], "b": 2, "c": True}))
    result, _ = batches.from_logp(loss, batches.make())
    assert result.metrics["a"].shape == ()
    assert not result.metrics["a"].requires_grad
    assert (result.metrics["b"], result.metrics["c"]) == (2, True)


# ------------------------------------------------------------------ arguments of a call


@pytest.mark.parametrize("name", ["reinforce", "plain"])
@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"step_tokens": 5}, ValueError, "step_sequences: the mode 'seq-mean-token-mean' divides by it; got None beside"),
        ({"step_tokens": 5, "step_sequences": -1}, ValueError, "step_sequences: expected a finite number >= 0; got -1"),
        ({"step_tokens": 5, "step_sequences": True}, ValueError, "step_sequences: expected a finite number >= 0"),
        ({"step_tokens": 5, "step_sequences": torch.ones(2)}, ValueError, r"step_sequences: .*got shape \(2,\)"),
        ({"advantages": None}, ValueError, "advantages: expected exactly one of .*got neither"),
        ({"advantages": torch.ones(3)}, ValueError, r"advantages: expected shape \(4, 4\)"),
        ({"mask": torch.ones(4)}, ValueError, r"mask: expected shape \(4, 4\)"),
        ({"mask": torch.full((4, 4), 2.0)}, ValueError, r"mask: expected weights in \[0, 1\]"),
        ({"cu_seqlens": torch.tensor([0, 16])}, ValueError, "cu_seqlens: expected None for padded input"),
    ],
)  # fmt: skip
def test_both_paths_refuse_the_same_arguments(name, more, error, message):
    fusedpg.register_loss("plain")(plain)
    loss, data = fusedpg.resolve_loss(name), batches.make()
    for call in (batches.from_logits, batches.from_logp):
        with pytest.raises(error, match=message):
            call(loss, data, **more)


def test_one_advantage_a_sequence_or_one_for_all():
    fusedpg.register_loss("plain")(plain)
    for layout in batches.LAYOUTS:
        data = batches.make(layout)
        count = {"padded": 4, "packed": 4, "datum": 1}[layout]
        for given in ({"sequence_advantages": torch.randn(count).double(), "advantages": None}, {"advantages": 0.5}):
            got, grad = batches.from_logits(fusedpg.resolve_loss("plain"), data, **given)
            want, want_grad = batches.from_logits(fusedpg.resolve_loss("reinforce"), data, **given)
            batches.agree(got.loss, want.loss)
            batches.agree(grad, want_grad)


# ------------------------------------------------------------------ plugins and entry points


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A directory on the path; what was imported from it is forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


BODY = """
import fusedpg

@fusedpg.register_loss({name!r})
def body(ctx):
    return ctx.aggregate(-ctx.advantages * ctx.logp_curr, ctx.action_mask), {{}}
"""


def install(site, package, group, points):
    """An installed distribution that declares entry points."""
    info = site / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))


def test_plugins_are_imported(site):
    (site / "plug_a.py").write_text(BODY.format(name="from_plugin"))
    for _ in range(2):  # again is no harm
        fusedpg.load_loss_plugins(["plug_a"])
    fusedpg.load_loss_plugins("plug_a")
    fusedpg.load_loss_plugins(None)
    assert fusedpg.resolve_loss("from_plugin").path == "custom"


@pytest.mark.parametrize(
    ("source", "cause"),
    [(None, "ModuleNotFoundError: No module named 'plug_b'"), ("1/0", "ZeroDivisionError: division by zero")],
)
def test_a_broken_plugin_is_named_with_its_cause(site, source, cause):
    if source is not None:
        (site / "plug_b.py").write_text(source)
    with pytest.raises(ImportError, match=f"loss_plugins: could not import 'plug_b': {cause}; check that") as e:
        fusedpg.load_loss_plugins(["plug_b"])
    assert e.value.__cause__ is not None


@pytest.mark.parametrize("group", ["rllm.losses", "fusedpg.losses"])
def test_entry_points_make_a_name_resolvable(site, group):
    (site / "plug_c.py").write_text(BODY.format(name="from_entry_point"))
    install(site, "plug_c", group, {"mine": "plug_c"})
    assert "from_entry_point" not in fusedpg.registered_losses()
    loss = fusedpg.resolve_loss("from_entry_point")
    assert batches.from_logp(loss, batches.make())[0].path == "custom"


def test_a_broken_entry_point_is_loud(site):
    """It stops a name that nobody provides, and is a warning beside one that somebody does."""
    (site / "plug_d.py").write_text("raise RuntimeError('no licence')")
    (site / "plug_e.py").write_text(BODY.format(name="sound"))
    install(site, "plug_d", "rllm.losses", {"broken": "plug_d"})
    install(site, "plug_e", "rllm.losses", {"sound": "plug_e:body"})
    said = r"entry point 'broken' of rllm.losses \(plug_d\): could not load it: RuntimeError: no licence; fix or"
    with pytest.raises(ImportError, match=said):
        fusedpg.load_loss_entry_points()
    with pytest.raises(ValueError, match=f"got 'absent'.*{said}"):
        fusedpg.resolve_loss("absent")
    fusedpg.registry._LOSSES.pop("sound")
    del sys.modules["plug_e"]
    with pytest.warns(RuntimeWarning, match=said):
        assert fusedpg.resolve_loss("sound").path == "custom"


def test_builtin_names_read_no_entry_points(site):
    """A broken package stops nobody who does not need it."""
    install(site, "plug_f", "rllm.losses", {"broken": "plug_f_is_missing"})
    assert fusedpg.resolve_loss("icepop").path == "native"
