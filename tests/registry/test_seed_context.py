"""The guide to custom loss functions: the `LossContext` contract, reducers and modes; a docstring is its statement."""

import inspect

import batches
import pytest
import torch
from batches import capture

import fusedpg
from fusedpg.context import AGG_MODES, step_denominator

ONES = torch.ones(2, 3)


def context(values=((-1.0, -2.0, -3.0), (-4.0, -5.0, -6.0)), mask=((1, 1, 0), (1, 0, 0)), **fields):
    logp = torch.tensor(values, requires_grad=True)
    mask = torch.tensor(mask).bool()
    fields = {"logp_old": logp.detach() - 0.1, "advantages": torch.ones_like(logp), "action_mask": mask} | fields
    return fusedpg.LossContext(logp, **fields)


# ------------------------------------------------------------------ the LossContext contract

FIELDS = ("logp_curr", "logp_old", "advantages", "action_mask", "obs_mask", "logp_ref", "logp_rollout")


@pytest.mark.parametrize("layout", batches.LAYOUTS)
def test_fields_share_one_shape(layout):
    """ "all tensors share a shape — (batch, response_len) …, (num_tokens,) per datum" """
    loss, seen = capture()
    data = batches.make(layout)
    batches.from_logp(loss, data)
    assert {getattr(seen[0], name).shape for name in FIELDS} == {data.targets.shape}
    assert {getattr(seen[0], name).dtype for name in FIELDS} == {torch.float64}


def test_constructor_takes_the_fields_in_the_order_of_the_table():
    """ "Every loss receives a LossContext with these fields" """
    names = list(inspect.signature(fusedpg.LossContext).parameters)
    assert names[: len(FIELDS) + 1] == [*FIELDS, "params"]


def test_absent_fields():
    """ "logp_ref … or None", "logp_rollout … or None"; no observation tokens is a mask of zeros."""
    ctx = context()
    assert ctx.logp_ref is None
    assert ctx.logp_rollout is None
    assert torch.equal(ctx.obs_mask, torch.zeros(2, 3))
    assert ctx.params == {}


def test_masks_are_numbers():
    """ "1.0 on assistant/action tokens", so that `(1.0 - keep) * am` is arithmetic."""
    ctx = context()
    assert ctx.action_mask.dtype == torch.float32
    assert ctx.action_mask.tolist() == [[1, 1, 0], [1, 0, 0]]


def test_only_logp_curr_carries_gradient():
    """ "Only logp_curr carries gradient; everything else is a detached constant." """
    given = {name: torch.zeros(2, 3, requires_grad=True) for name in FIELDS[1:3] + FIELDS[5:]}
    ctx = context(**given)
    assert [name for name in FIELDS if getattr(ctx, name).requires_grad] == ["logp_curr"]


def test_logp_rollout_is_not_logp_old():
    """ "they differ only when a proximal old-policy was recomputed": both arrive as they were given."""
    loss, seen = capture()
    data = batches.make()
    batches.from_logp(loss, data)
    action = data.kwargs["mask"]
    for name in ("logp_old", "logp_rollout", "logp_ref"):
        assert torch.equal(getattr(seen[0], name)[action], data.kwargs[name][action])
    bypass = batches.from_logp(loss, data, logp_old=data.kwargs["logp_rollout"]) and seen[-1]
    assert torch.equal(bypass.logp_old, bypass.logp_rollout)


def test_absent_logp_old_is_on_policy_and_says_so():
    ctx = context(logp_old=None)
    with pytest.warns(UserWarning, match="logp_old: got None, so the loss runs on-policy"):
        assert torch.equal(ctx.logp_old, ctx.logp_curr)
    assert not fusedpg.LossContext(ctx.logp_curr, None, ONES, ONES).advantages.requires_grad  # unread, unsaid


def test_rubbish_behind_a_mask_reaches_nothing():
    """NaN at masked places: fields are 0 there, an unmasked one stays visible."""
    loss, seen = capture()
    batches.from_logp(loss, batches.make())
    ctx = seen[0]
    neither = (ctx.action_mask == 0) & (ctx.obs_mask == 0)
    for name in FIELDS:
        values = getattr(ctx, name)
        assert torch.isfinite(values).all(), name
        assert (values[neither] == 0).all(), name
    visible = context(logp_old=torch.tensor([[torch.nan, 0, 0], [0, 0, 0]]))
    assert visible.logp_old[0, 0].isnan()


def test_constants_at_observation_tokens_are_kept_where_they_are_numbers():
    """A KL term on observation tokens reads logp_ref there; a placeholder that is not finite is 0."""
    obs = torch.tensor([[0, 0, 1], [0, 1, 1]]).bool()
    ref = torch.tensor([[0.0, 0.0, -3.0], [0.0, torch.nan, -torch.inf]])
    ctx = context(obs_mask=obs, logp_ref=ref)
    assert ctx.logp_ref[obs].tolist() == [-3.0, 0.0, 0.0]
    assert ctx.logp_curr[obs].tolist() == [-3.0, -5.0, -6.0]


# ------------------------------------------------------------------ the two reducers, and the modes

#: of x = [[1, 2, 3], [4, 5, 6]] with mask [[1, 1, 0], [1, 0, 0]]
BY_HAND = {
    "token-mean": 7 / 3,  # (1 + 2 + 4)/3
    "seq-mean-token-mean": 2.75,  # (3/2 + 4)/2
    "seq-mean-token-sum": 3.5,  # (3 + 4)/2
}


@pytest.mark.parametrize("mode", AGG_MODES)
def test_modes_by_hand(mode):
    """ "Every token weighted equally"; "Mean within each sequence, then mean over"; "Sum within each sequence, …" """
    for ctx in (context(agg_mode=mode), context()):
        loss = ctx.aggregate(-ctx.logp_curr, ctx.action_mask, None if ctx.agg_mode == mode else mode)
        assert loss.item() == pytest.approx(BY_HAND[mode])


def test_aggregate_selects():
    """A value behind the mask is never read, infinite or not."""
    for rubbish in (torch.nan, torch.inf):
        ctx = context()
        x = torch.where(ctx.action_mask != 0, -ctx.logp_curr, rubbish)
        assert ctx.aggregate(x, ctx.action_mask).item() == pytest.approx(2.75)


def test_default_mode():
    """ "seq-mean-token-mean (default)" """
    ctx = context()
    assert ctx.aggregate(-ctx.logp_curr, ctx.action_mask).item() == pytest.approx(2.75)
    loss, seen = capture()
    batches.from_logp(loss, batches.make())
    assert seen[0].agg_mode == AGG_MODES[0] == "seq-mean-token-mean"


def test_denominators_are_at_least_one():
    """rLLM's clamp(min=1): a step without tokens gives 0, its graph connected."""
    for mode in AGG_MODES:
        for counts in ({}, {"step_tokens": 0, "step_sequences": 0}):
            ctx = context(mask=((0, 0, 0), (0, 0, 0)), agg_mode=mode, **counts)
            loss = ctx.aggregate(-ctx.logp_curr, ctx.action_mask)
            assert loss.item() == 0
            assert loss.requires_grad


def test_step_counts_are_numbers_or_tensors_of_at_least_one():
    for zero in (0, 0.0, torch.tensor(0)):
        assert step_denominator("token-mean", zero, 5) == 1
        assert step_denominator("seq-mean-token-sum", 5, zero) == 1
    assert step_denominator("token-mean", torch.tensor([7.0]), 5).shape == ()
    assert step_denominator("token-mean", None, None) is None


def test_aggregate_takes_the_step_s_counts_whatever_the_mask():
    """ "global normalization spanning the whole optimizer step": an observation term has the policy term's divisor."""
    ctx = context(
        obs_mask=torch.tensor([[0, 0, 1], [0, 1, 1]]), agg_mode="token-mean", step_tokens=10, step_sequences=4
    )
    assert ctx.aggregate(-ctx.logp_curr, ctx.action_mask).item() == pytest.approx(0.7)
    assert ctx.aggregate(-ctx.logp_curr, ctx.obs_mask).item() == pytest.approx(1.4)  # (3 + 5 + 6)/10
    by_row = ctx.aggregate(-ctx.logp_curr, ctx.obs_mask, "seq-mean-token-mean")
    assert by_row.item() == pytest.approx((3 + 5.5) / 4)


def test_seq_reduce_by_hand():
    """ "reduces per sequence and broadcasts back to per-token (a row …; the whole datum on the managed path)" """
    x = torch.tensor([[1.0, 2.0, torch.nan], [4.0, 5.0, 6.0]])
    ctx = context()
    assert ctx.seq_reduce(x, ctx.action_mask, "mean").tolist() == [[1.5] * 3, [4.0] * 3]
    assert ctx.seq_reduce(x, ctx.action_mask, "sum").tolist() == [[3.0] * 3, [4.0] * 3]
    flat = [t.reshape(-1) for t in (ctx.logp_curr, ONES, ctx.action_mask)]
    datum = fusedpg.LossContext(flat[0], flat[1], flat[1], flat[2])
    assert datum.seq_reduce(x.reshape(-1), datum.action_mask, "sum").tolist() == [7.0] * 6
    packed = fusedpg.LossContext(flat[0], flat[1], flat[1], flat[2], cu_seqlens=torch.tensor([0, 3, 3, 6]))
    assert packed.seq_reduce(x.reshape(-1), packed.action_mask, "mean").tolist() == [1.5] * 3 + [4.0] * 3


def test_seq_reduce_keeps_one_sequence_s_nan_to_itself():
    for shape, cu in (((2, 3), None), ((6,), torch.tensor([0, 3, 6]))):
        x = torch.tensor([torch.nan, 1.0, 1.0, 2.0, 2.0, 2.0]).view(shape)
        ctx = fusedpg.LossContext(x, x, x, torch.ones(shape), cu_seqlens=cu)
        reduced = ctx.seq_reduce(x, ctx.action_mask, "mean").reshape(-1)
        assert reduced[:3].isnan().all()
        assert reduced[3:].tolist() == [2.0] * 3


@pytest.mark.parametrize("layout", batches.LAYOUTS)
def test_seq_reduce_is_differentiable(layout):
    """GSPO with the gradient through the mean needs it."""
    data = batches.make(layout)
    action = data.kwargs["mask"]
    logp = data.logp.requires_grad_()
    ctx = fusedpg.LossContext(logp, logp, logp.detach(), action, cu_seqlens=data.kwargs["cu_seqlens"])
    weights = torch.randn(logp.shape, dtype=torch.float64)
    for reduction in ("mean", "sum"):
        (grad,) = torch.autograd.grad(
            (ctx.seq_reduce(ctx.logp_curr, action, reduction) * weights).sum(), logp, retain_graph=True
        )
        per_sequence = ctx.seq_reduce(weights, torch.ones_like(action), "sum")
        count = ctx.seq_reduce(torch.ones_like(weights), action, "sum") if reduction == "mean" else 1.0
        batches.agree(grad, torch.where(action, per_sequence / count, 0.0))


def test_mode_argument_wins_over_the_config_and_the_pin():
    """ "Pass mode= to force a specific reduction regardless of config" """
    for mode in AGG_MODES:
        ctx = context(agg_mode=mode)
        assert ctx.aggregate(-ctx.logp_curr, ctx.action_mask, mode="token-mean").item() == pytest.approx(7 / 3)


def test_pin_at_registration_ignores_the_config():
    """ "A loss whose math requires a specific reduction pins it at registration and ignores the config" """
    loss, seen = capture(agg_mode="token-mean", loss_agg_mode="seq-mean-token-sum")
    batches.from_logp(loss, batches.make())
    assert seen[0].agg_mode == "token-mean"
    config, seen = capture(loss_agg_mode="seq-mean-token-sum")
    batches.from_logp(config, batches.make())
    assert seen[0].agg_mode == "seq-mean-token-sum"
