"""Losses written as user code equal the built-in ones, and the nine bodies equal their kernels."""

import batches
import my_losses  # noqa: F401
import pytest
import torch

import fusedpg
from fusedpg.builtin_losses import BODIES
from fusedpg.context import AGG_MODES
from fusedpg.native_losses import RLLM_LOSSES

#: user's name -> (built-in name, params of the user's, params of the built-in)
PAIRS = {
    "my_icepop": ("icepop", {"alpha": 0.8, "beta": 1.3}, {"icepop_alpha": 0.8, "icepop_beta": 1.3}),
    "my_echo": ("echo", {"env_loss_coef": 0.3}, {"env_loss_coef": 0.3}),
    "my_gspo": ("gspo", {}, {}),
}
#: options that bind in a small batch
OPTIONS = {
    "ppo_clip": [{}, {"eps_clip": 0.1, "eps_clip_high": 0.4}],
    "dppo_tv": [{"eps_clip": 0.02}, {"delta_low": 0.01, "delta_high": 0.03}],
    "dppo_kl": [{"eps_clip": 0.01}, {"delta": 0.002}],
    "cispo": [{}, {"eps_clip": 0.1, "eps_clip_high": 0.4}],
    "gspo": [{"eps_clip": 0.05}, {"eps_clip_high": 0.3}],
    "icepop": [{}, {"icepop_alpha": 0.8, "icepop_beta": 1.3}, {"alpha": 0.8, "beta": 1.3}],
    "reinforce": [{}],
    "echo": [{}, {"env_loss_coef": 0.5, "eps_clip": 0.1}],
    "reinforce_kl": [
        {},
        {"ratio_clamp_min": 0.8, "ratio_clamp_max": 1.2},
        {"bwd_kl_coef": 0.3, "fwd_kl_coef": 0.2},
        {"bwd_kl_coef": 0.3, "fwd_kl_coef": 0.2, "kl_approx": True},
    ],
}
#: rLLM's metrics of each
METRICS = {
    "ppo_clip": {"ppo/clip_frac"},
    "dppo_tv": {"dppo_tv/mask_frac"},
    "dppo_kl": {"dppo_kl/mask_frac"},
    "cispo": {"cispo/clip_frac"},
    "gspo": {"gspo/clip_frac"},
    "icepop": {"icepop/mask_frac", "icepop/ratio_mean", "icepop/ratio_min", "icepop/ratio_max"},
    "reinforce": set(),
    "echo": {"ppo/clip_frac", "echo/coef"},
    "reinforce_kl": {
        f"reinforce_kl/{name}" for name in ("kl_bwd", "kl_fwd", "ratio_mean", "ratio_min", "ratio_max", "clamp_frac")
    },
}


@pytest.mark.parametrize("layout", batches.LAYOUTS)
@pytest.mark.parametrize("name", PAIRS)
def test_user_code_equals_the_builtin(name, layout, backend):
    """Value, gradient and normalisation, from logits; a step of three times the batch."""
    builtin, params, builtin_params = PAIRS[name]
    dtype = torch.float32 if backend == "triton" else torch.float64
    data = batches.on(batches.make(layout, dtype), backend)
    config = {"backend": backend, "eps_clip": 0.1}
    mine = fusedpg.resolve_loss(name, params=params, **config)
    theirs = fusedpg.resolve_loss(builtin, params=builtin_params, **config)
    assert (mine.path, theirs.path) == ("custom", "native")
    for counts in ({}, {"step_tokens": 30, "step_sequences": torch.tensor(9)}):
        got, got_grad = batches.from_logits(mine, data, **counts)
        want, want_grad = batches.from_logits(theirs, data, **counts)
        assert (got.path, want.path, got.backend, want.backend) == ("custom", "native", backend, backend)
        assert got.loss != 0
        assert (got_grad != 0).any()
        batches.agree(got.loss, want.loss)
        batches.agree(got_grad, want_grad)


@pytest.mark.parametrize("mode", AGG_MODES)
@pytest.mark.parametrize("name", RLLM_LOSSES)
def test_nine_bodies_equal_their_kernels(name, mode):
    """Value, gradient and metrics, from logits and from log-probs, in every mode and layout."""
    assert set(BODIES) == set(RLLM_LOSSES) == set(OPTIONS)
    for layout in batches.LAYOUTS:
        data = batches.make(layout)
        for options in OPTIONS[name]:
            common = {k: v for k, v in options.items() if k.startswith("eps_clip")}
            params = {k: v for k, v in options.items() if k not in common}
            native, custom = (
                fusedpg.resolve_loss(name, params=params, loss_agg_mode=mode, path=path, **common)
                for path in ("native", "custom")
            )
            for call in (batches.from_logits, batches.from_logp):
                (want, want_grad), (got, got_grad) = call(native, data), call(custom, data)
                assert (want.path, got.path) == ("native", "custom")
                assert torch.isfinite(got.loss)
                assert torch.isfinite(got_grad).all()
                batches.agree(got.loss, want.loss)
                batches.agree(got_grad, want_grad)
                assert set(got.metrics) == set(want.metrics) == METRICS[name]
                for key in METRICS[name]:
                    batches.agree(torch.as_tensor(got.metrics[key]).double(), want.metrics[key])


def test_metrics_count_something():
    """The options above bind: a fraction that is always 0 would agree too."""
    data = batches.make()
    for name, key in (("icepop", "icepop/mask_frac"), ("dppo_tv", "dppo_tv/mask_frac"), ("gspo", "gspo/clip_frac")):
        options = OPTIONS[name][-1 if name == "icepop" else 0]
        common = {k: v for k, v in options.items() if k.startswith("eps_clip")}
        params = {k: v for k, v in options.items() if k not in common}
        result, _ = batches.from_logits(fusedpg.resolve_loss(name, params=params, **common), data)
        assert 0 < float(result.metrics[key]) < 1, name


def test_icepop_by_hand():
    """Ratios 0.3, 1, 10 with the default band [0.5, 5]: only the middle token trains; x = -1*1*logp = 0.5."""
    rollout = torch.tensor([[-0.5, -0.5, -0.5]]) - torch.tensor([[0.3, 1.0, 10.0]]).log()
    for name in ("icepop", "my_icepop"):
        logp = torch.full((1, 3), -0.5, requires_grad=True)
        kwargs = {"logp_old": rollout, "logp_rollout": rollout, "advantages": 1.0}
        result = fusedpg.resolve_loss(name, loss_agg_mode="token-mean").from_logp(logp, **kwargs)
        result.loss.backward()
        assert result.loss.item() == pytest.approx(0.5 / 3)
        assert logp.grad.tolist()[0] == pytest.approx([0.0, -1 / 3, 0.0], abs=1e-6)
        assert float(result.metrics[f"{name}/mask_frac"]) == pytest.approx(2 / 3)
        if name == "icepop":
            ratios = [float(result.metrics[f"icepop/ratio_{key}"]) for key in ("min", "max", "mean")]
            assert ratios == pytest.approx([0.3, 10.0, 11.3 / 3])


@pytest.mark.parametrize("path", ["native", "custom"])
@pytest.mark.parametrize(("delta", "dropped"), [(0.002, True), (0.003, False)])
def test_dppo_kl_near_certainty(path, delta, dropped):
    """p 0.995, p' 0.999: D = 0.999*ln(0.999/0.995) + 0.001*ln(0.001/0.005) = 0.0024."""
    logp = torch.tensor([[0.995]]).log().requires_grad_()
    loss = fusedpg.resolve_loss("dppo_kl", params={"delta": delta}, path=path)
    loss.from_logp(logp, logp_old=torch.tensor([[0.999]]).log(), advantages=-1.0).loss.backward()
    assert (logp.grad.item() == 0) == dropped


def test_ratio_that_overflows_is_dropped_not_nan():
    """The sampler's log-prob is so low that rho is inf: outside the band, gradient 0."""
    for path in ("native", "custom"):
        logp = torch.tensor([-0.1, -0.5], requires_grad=True)
        rollout = torch.tensor([-200.0, -0.4])
        loss = fusedpg.resolve_loss("icepop", path=path).from_logp(
            logp, logp_old=rollout, logp_rollout=rollout, advantages=1.0
        )
        loss.loss.backward()
        assert torch.isfinite(loss.loss)
        assert logp.grad[0] == 0
        assert logp.grad[1] < 0
