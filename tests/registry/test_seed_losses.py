"""The guide to custom loss functions: the losses, how they run and how they are found; a docstring is its statement."""

import batches
import my_losses
import pytest
import torch
from batches import capture

import fusedpg
from fusedpg.context import AGG_MODES
from fusedpg.native_losses import RLLM_LOSSES

# ------------------------------------------------------------------ core concept


def test_one_function_returns_the_complete_scalar_objective():
    """ "A policy loss is a single function that returns the complete scalar objective": the printed my_loss."""
    data = batches.make()
    loss = fusedpg.resolve_loss("my_loss", params={"clip": 0.2}, loss_agg_mode="seq-mean-token-mean")
    result, grad = batches.from_logp(loss, data)
    assert result.loss.shape == ()
    assert result.path == "custom"
    action = data.kwargs["mask"]
    logp = data.logp[action]
    x = -data.kwargs["advantages"][action] * (logp - data.kwargs["logp_old"][action]).exp().clamp(max=20)
    per_row = action.sum(1).double()
    share = (1.0 / per_row.clamp(min=1) / (per_row > 0).sum())[:, None].expand(action.shape)[action]
    batches.agree(result.loss, (x * logp * share).sum())
    batches.agree(grad[action], x * share)


def test_selected_by_name_and_no_list():
    """ "You select it by name; there is no list of losses" """
    with pytest.raises(TypeError, match=r"name: expected the name of one loss; got \['ppo_clip', 'echo'\]"):
        fusedpg.resolve_loss(["ppo_clip", "echo"])


def test_metrics_are_numbers_by_name():
    """ "A loss returns (scalar_loss, metrics) where metrics is a dict[str, float]" """
    result, _ = batches.from_logp(fusedpg.resolve_loss("my_loss"), batches.make())
    assert {k: type(v) for k, v in result.metrics.items()} == {"ratio_mean": float}
    native, _ = batches.from_logp(fusedpg.resolve_loss("icepop"), batches.make())
    assert all(isinstance(float(v), float) for v in native.metrics.values())


# ------------------------------------------------------------------ built-in losses


@pytest.mark.parametrize("name", RLLM_LOSSES)
def test_builtins_need_no_plugin_and_run_natively(name):
    """ "Select any of these with algorithm.loss_fn — no plugin needed"; "native-first" """
    assert len(RLLM_LOSSES) == 9
    assert fusedpg.resolve_loss(name).path == "native"
    assert name not in fusedpg.registered_losses()


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
@pytest.mark.parametrize("path", ["native", "custom"])
def test_dppo_uses_the_untruncated_ratio(name, path):
    """ "Uses the untruncated ratio (C=∞)": a ratio of 100 that the mask keeps weighs 100."""
    old = torch.tensor([[-9.0]])
    logp = (old + torch.tensor(100.0).log()).requires_grad_()
    loss = fusedpg.resolve_loss(name, path=path)
    loss.from_logp(logp, logp_old=old, advantages=1.0).loss.backward()
    assert logp.grad.item() == pytest.approx(-100.0, rel=1e-5)


def test_cispo_keeps_every_gradient_and_ppo_does_not():
    """ "clips the importance-sampling weight (stop-grad) but keeps every token's gradient" """
    grads = {}
    for name in ("cispo", "ppo_clip"):
        logp = torch.tensor([[-1.0]], requires_grad=True)
        loss = fusedpg.resolve_loss(name).from_logp(logp, logp_old=torch.tensor([[-2.0]]), advantages=1.0)
        loss.loss.backward()
        grads[name] = logp.grad.item()
    assert grads == {"cispo": pytest.approx(-1.2), "ppo_clip": 0.0}


@pytest.mark.parametrize("path", ["native", "custom"])
def test_gspo_pins_its_mode(path):
    """ "sequence-level importance ratio via seq_reduce; pins seq-mean-token-mean" """
    data = batches.make()
    losses = [
        batches.from_logp(fusedpg.resolve_loss("gspo", loss_agg_mode=mode, path=path), data)[0].loss
        for mode in (None, *AGG_MODES)
    ]
    assert len({loss.item() for loss in losses}) == 1


@pytest.mark.parametrize("name", ["icepop", "my_icepop"])
@pytest.mark.parametrize("path", ["auto", "custom"])
def test_icepop_refuses_absent_rollout_log_probs(name, path):
    """ "Use logp_rollout for the true sampling distribution and guard on None rather than falling back" """
    data = batches.make()
    with pytest.raises(ValueError, match="logp_rollout"):
        batches.from_logp(fusedpg.resolve_loss(name, path=path), data, logp_rollout=None)


def test_echo_is_ppo_plus_observation_cross_entropy():
    """ "PPO term plus an observation-token cross-entropy term, composed in one body" """
    data = batches.make()
    obs = data.kwargs["obs_mask"]
    ppo, ppo_grad = batches.from_logp(fusedpg.resolve_loss("ppo_clip"), data)
    off, off_grad = batches.from_logp(fusedpg.resolve_loss("echo", params={"env_loss_coef": 0.0}), data)
    echo, grad = batches.from_logp(fusedpg.resolve_loss("echo", loss_agg_mode="token-mean"), data)
    assert torch.equal(off.loss, ppo.loss)
    assert torch.equal(off_grad, ppo_grad)
    assert (ppo_grad[obs] == 0).all()
    tokens = data.kwargs["mask"].sum()
    batches.agree(grad[obs], torch.full_like(grad[obs], -0.05) / tokens)
    plain, _ = batches.from_logp(fusedpg.resolve_loss("ppo_clip", loss_agg_mode="token-mean"), data)
    batches.agree(echo.loss, plain.loss + 0.05 * -data.logp[obs].sum() / tokens)


def test_common_hyperparameters_and_loss_params():
    """ "eps_clip, eps_clip_high, kl_beta come from the top-level algorithm config; anything else … in ctx.params" """
    loss, seen = capture(params={"clip": 0.2}, eps_clip=0.3, kl_beta=0.01)
    batches.from_logp(loss, batches.make())
    assert seen[0].params == {"eps_clip": 0.3, "eps_clip_high": None, "kl_beta": 0.01, "clip": 0.2}
    data = batches.make()
    narrow, wide = (batches.from_logp(fusedpg.resolve_loss("ppo_clip", eps_clip=e), data)[0].loss for e in (0.1, 0.9))
    assert narrow != wide
    # one algorithm config for every loss: icepop has no clip range to give it to
    assert fusedpg.resolve_loss("icepop", eps_clip=0.2).path == "native"


# ------------------------------------------------------------------ how each backend runs it


def test_native_first():
    """ "only losses without a native kernel take the custom path"; which one ran is said."""
    data = batches.make()
    for name, path in (("icepop", "native"), ("sapo", "native"), ("my_icepop", "custom")):
        loss = fusedpg.resolve_loss(name)
        assert loss.path == path
        assert batches.from_logits(loss, data)[0].path == path


def test_a_catalogue_entry_is_the_op_itself():
    """A native name runs `policy_loss_from_logits`: the same bits."""
    data = batches.make("packed", torch.float32)
    loss = fusedpg.resolve_loss("dapo", eps_clip=0.1, eps_clip_high=0.3, kl_beta=0.2, loss_agg_mode="token-mean")
    got, grad = batches.from_logits(loss, data)
    spec = fusedpg.loss_spec("dapo", epsilon_low=0.1, epsilon_high=0.3, kl="k3", kl_coef=0.2)
    logits = data.logits.clone().requires_grad_()
    kwargs = {k: v for k, v in data.kwargs.items() if k != "obs_mask"}
    want = fusedpg.policy_loss_from_logits(spec, logits, data.targets, **kwargs)
    want.loss.backward()
    assert torch.equal(got.loss, want.loss)
    assert torch.equal(grad, logits.grad)
    assert got.metrics["clip_frac"] == want.metrics["clip_frac"]


def test_the_body_sees_no_logits_and_a_graph_of_its_own():
    """ "Write the loss body shape-agnostically: elementwise math on the fields, then ctx.aggregate." """
    loss, seen = capture()
    data = batches.make()
    result, _ = batches.from_logits(loss, data, temperature=0.7)
    action = data.kwargs["mask"]
    want = fusedpg.token_logprobs(data.logits, data.targets, mask=action | data.kwargs["obs_mask"], temperature=0.7)
    assert torch.equal(seen[0].logp_curr.detach(), want.logp)
    assert torch.equal(result.logp, want.logp)
    assert not result.logp.requires_grad


# ------------------------------------------------------------------ three conventions


def test_weights_are_detached():
    """ "Anything used as a weight (the ratio, a mask) should be .detach()ed": the gradient is the score's alone."""
    data = batches.make("datum")
    _, grad = batches.from_logp(fusedpg.resolve_loss("my_icepop", loss_agg_mode="token-mean"), data)
    action = data.kwargs["mask"]
    rho = (data.logp[action] - data.kwargs["logp_rollout"][action]).exp()
    keep = (rho >= 0.5) & (rho <= 5.0)
    batches.agree(grad[action], -data.kwargs["advantages"][action] * rho * keep / action.sum())


def test_never_reduce_by_hand():
    """ "Return ctx.aggregate(per_token, mask) so your loss inherits …": anything else is said."""

    @fusedpg.register_loss("by_hand")
    def by_hand(ctx):
        return (-ctx.logp_curr * ctx.action_mask).sum() / ctx.action_mask.sum(), {}

    with pytest.warns(UserWarning, match="by_hand: the loss was reduced without ctx.aggregate"):
        batches.from_logp(fusedpg.resolve_loss("by_hand"), batches.make())


# ------------------------------------------------------------------ selecting and registering


def test_the_printed_config_resolves():
    """ "loss_fn: icepop, loss_params: {alpha: 0.5, beta: 5.0}, loss_plugins: [my_losses]" """
    fusedpg.load_loss_plugins(["my_losses"])
    loss = fusedpg.resolve_loss("icepop", params={"alpha": 0.5, "beta": 5.0})
    data = batches.make()
    mine, grad = batches.from_logits(fusedpg.resolve_loss("my_icepop", params={"alpha": 0.5, "beta": 5.0}), data)
    builtin, builtin_grad = batches.from_logits(loss, data)
    batches.agree(mine.loss, builtin.loss)
    batches.agree(grad, builtin_grad)
    with pytest.raises(ValueError, match="alpha: the loss 'icepop' calls it icepop_alpha too; got both"):
        fusedpg.resolve_loss("icepop", params={"alpha": 0.5, "icepop_alpha": 0.5})


def test_inline_import_makes_a_name_resolvable():
    """ "or simply import it before constructing the trainer" """
    assert "my_icepop" in fusedpg.registered_losses()
    assert fusedpg.resolve_loss("my_icepop").run.body is my_losses.my_icepop
