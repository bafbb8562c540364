"""verl's actor loss through fusedpg, offline on a CPU: `python examples/verl_loss.py`.

In a run of your own, `loss_mode=fusedpg_vanilla` on the command line is all; this shows that the numbers are verl's.
"""

import functools
import importlib.util
import sys
import time
import types

import torch

if importlib.util.find_spec("ray") is None:  # verl imports it; its losses do without
    sys.modules["ray"] = types.ModuleType("ray")
    sys.modules["ray"].ObjectRef = object

from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from fusedpg.integrations.verl import make_loss_fn  # importing it registers fusedpg_<loss>

PROMPT, ROWS, LONGEST = 32, 64, 512


def actor(loss_mode: str) -> FSDPActorConfig:
    """GRPO with a reference and an entropy bonus."""
    terms = {"use_kl_loss": True, "kl_loss_coef": 0.01, "entropy_coeff": 0.001}
    policy = PolicyLossConfig(loss_mode=loss_mode)
    return FSDPActorConfig(strategy="fsdp", rollout_n=8, use_dynamic_bsz=True, policy_loss=policy, **terms)


def micro_batch(seed: int = 0) -> tuple[TensorDict, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ragged responses as verl's engine hands them over: (data, log-probs, entropy, offsets)."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(8, LONGEST + 1, (ROWS,), generator=g)
    offsets = torch.nn.functional.pad((lengths + PROMPT).cumsum(0), (1, 0))
    logp = -3 * torch.rand(int(offsets[-1]), generator=g)
    starts = (offsets[:-1] + PROMPT - 1).tolist()
    response = [logp[s : s + n] for s, n in zip(starts, lengths.tolist(), strict=True)]
    near = lambda: [v + 0.2 * torch.randn(len(v), generator=g) for v in response]  # noqa: E731
    advantages = [torch.randn(1, generator=g).expand(len(v)) for v in response]
    fields = {"old_log_probs": near(), "ref_log_prob": near(), "advantages": advantages}
    fields["response_mask"] = [torch.ones(len(v), dtype=torch.bool) for v in response]
    fields["responses"] = [torch.ones(len(v), dtype=torch.int64) for v in response]
    fields["prompts"] = [torch.ones(PROMPT, dtype=torch.int64)] * ROWS
    jagged = {k: torch.nested.as_nested_tensor([t.clone() for t in v], layout=torch.jagged) for k, v in fields.items()}
    data = TensorDict(jagged, batch_size=[ROWS])
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=int(lengths.sum()), global_batch_size=ROWS)
    return data, logp, logp.abs(), offsets


def step(fn, data, logp, entropy, offsets):
    """(loss, gradient of the log-probs, metrics, milliseconds of forward and backward)."""
    leaf, bonus = logp.clone().requires_grad_(), entropy.clone().requires_grad_()
    jagged = [torch.nested.nested_tensor_from_jagged(v, offsets) for v in (leaf, bonus)]
    start = time.perf_counter()
    loss, metrics = fn({"log_probs": jagged[0], "entropy": jagged[1]}, data, dp_group=None)
    loss.backward()
    return loss.item(), leaf.grad, metrics, 1e3 * (time.perf_counter() - start)


if __name__ == "__main__":
    torch.set_num_threads(1)  # steady times on a shared machine
    batch = micro_batch()
    print(f"{ROWS} responses of up to {LONGEST} tokens, {len(batch[1])} packed tokens with their prompts")
    print(f"{'loss_mode':<10}{'verl':>12}{'fusedpg':>12}{'gradient diff':>15}{'verl ms':>10}{'fusedpg ms':>12}")
    for mode in ("vanilla", "gspo", "cispo", "dppo_tv"):
        both = functools.partial(ppo_loss, actor(mode)), make_loss_fn(actor(mode))
        runs = [[step(fn, *batch) for fn in both] for _ in range(10)]  # in turn, so that both meet the same machine
        stock, fused = runs[0]
        times = [min(run[i][3] for run in runs) for i in (0, 1)]
        grad = (stock[1] - fused[1]).abs().max().item()
        print(f"{mode:<10}{stock[0]:>12.7f}{fused[0]:>12.7f}{grad:>15.1e}{times[0]:>10.1f}{times[1]:>12.1f}")
        assert list(stock[2]) == list(fused[2])
    print("metrics of both:", ", ".join(fused[2]))
