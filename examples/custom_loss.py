"""A loss of your own, beside a built-in one: register it, train a small policy with both, offline and on a CPU.

python examples/custom_loss.py
"""

import torch

import fusedpg

VOCAB, WIDTH, LENGTH, SAMPLES, STEPS = 512, 32, 8, 32, 40


@fusedpg.register_loss("soft_clip")
def soft_clip(ctx: fusedpg.LossContext):
    """-A*sg[tanh-bounded ratio]*logp: the ratio is bent towards 1 instead of being cut."""
    bound = float(ctx.params.get("bound", 0.5))
    ratio = (ctx.logp_curr.detach() - ctx.logp_old).exp()
    weight = 1 + bound * torch.tanh((ratio - 1) / bound)
    bent = ((weight - ratio).abs() > 0.05).float()
    loss = ctx.aggregate(-ctx.advantages * weight * ctx.logp_curr, ctx.action_mask)
    return loss, {"soft_clip/bent_frac": (bent * ctx.action_mask).sum() / ctx.action_mask.sum().clamp(min=1)}


def reward(tokens: torch.Tensor) -> torch.Tensor:
    """The share of even tokens."""
    return (tokens % 2 == 0).float().mean(1)


def train(name: str, **params: float) -> list[float]:
    """Mean rewards of the steps; each batch serves two updates, so that ratios leave 1."""
    torch.manual_seed(0)
    hidden = torch.nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
    head = torch.nn.Parameter(torch.randn(VOCAB, WIDTH) * 0.1)
    optimizer = torch.optim.Adam([hidden, head], lr=0.05)
    loss = fusedpg.resolve_loss(name, params=params, loss_agg_mode="token-mean")
    mask = torch.ones(SAMPLES, LENGTH, dtype=torch.bool)
    rewards = []
    for _ in range(STEPS):
        with torch.no_grad():
            logits = (hidden @ head.T).expand(SAMPLES, LENGTH, VOCAB)
            tokens = torch.distributions.Categorical(logits=logits).sample()
            logp_old = fusedpg.token_logprobs(logits, tokens).logp
        scores = reward(tokens)
        advantages = (scores - scores.mean()) / (scores.std() + 1e-6)
        for _ in range(2):
            optimizer.zero_grad()
            states = hidden.expand(SAMPLES, LENGTH, WIDTH)
            out = loss.from_hidden(states, head, tokens, logp_old=logp_old, sequence_advantages=advantages, mask=mask)
            out.loss.backward()
            optimizer.step()
        rewards.append(float(scores.mean()))
    metrics = ", ".join(f"{key} {float(value):.3f}" for key, value in out.metrics.items())
    print(f"{name:10} {out.path:6} path: reward {rewards[0]:.2f} -> {rewards[-1]:.2f}; {metrics}")
    return rewards


if __name__ == "__main__":
    torch.set_num_threads(1)  # tensors this small run faster without more
    train("ppo_clip")
    train("soft_clip", bound=0.3)
