"""Losses as a user writes them: the guide's examples with the module renamed, and the built-in echo and gspo."""

import torch

import fusedpg as rllm


@rllm.register_loss("my_loss")  # same decorator style as @rllm.rollout
def my_loss(ctx: rllm.LossContext):
    ratio = (ctx.logp_curr - ctx.logp_old).exp()
    pg = -ctx.advantages * ratio.clamp(max=20).detach() * ctx.logp_curr
    return ctx.aggregate(pg, ctx.action_mask), {"ratio_mean": ratio.mean().item()}


@rllm.register_loss("my_icepop")
def my_icepop(ctx: rllm.LossContext):
    """Mask tokens whose train/inference ratio exp(logp_curr - logp_rollout) leaves [alpha, beta]."""
    if ctx.logp_rollout is None:
        raise ValueError("my_icepop needs rollout log-probs, but ctx.logp_rollout is None")
    alpha = float(ctx.params.get("alpha", 0.5))
    beta = float(ctx.params.get("beta", 5.0))
    ratio = torch.exp(ctx.logp_curr.detach() - ctx.logp_rollout)  # detached weight, no grad
    keep = ((ratio >= alpha) & (ratio <= beta)).to(ctx.logp_curr.dtype)
    pg = -ctx.advantages * ratio * ctx.logp_curr * keep  # grad flows via logp_curr
    am = ctx.action_mask
    mask_frac = ((1.0 - keep) * am).sum() / am.sum().clamp(min=1.0)
    return ctx.aggregate(pg, am), {"my_icepop/mask_frac": mask_frac.item()}


def ppo(ctx):
    eps = ctx.params["eps_clip"]
    ratio = (ctx.logp_curr - ctx.logp_old).exp()
    return -torch.minimum(ratio * ctx.advantages, ratio.clamp(1 - eps, 1 + eps) * ctx.advantages)


@rllm.register_loss("my_echo")
def my_echo(ctx):
    loss = ctx.aggregate(ppo(ctx), ctx.action_mask)
    return loss + ctx.params.get("env_loss_coef", 0.05) * ctx.aggregate(-ctx.logp_curr, ctx.obs_mask), {}


@rllm.register_loss("my_gspo", agg_mode="seq-mean-token-mean")
def my_gspo(ctx):
    eps = ctx.params["eps_clip"]
    mean = ctx.seq_reduce(ctx.logp_curr - ctx.logp_old, ctx.action_mask, "mean").detach()
    s = (ctx.logp_curr - ctx.logp_curr.detach() + mean).clamp(max=10.0).exp()
    pg = torch.maximum(-ctx.advantages * s, -ctx.advantages * s.clamp(1 - eps, 1 + eps))
    return ctx.aggregate(pg, ctx.action_mask), {}
