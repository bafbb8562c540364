"""verl's modules without Ray, its actor config, and jagged micro-batches as its trainer makes them."""

import importlib
import importlib.util
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from fusedpg.certify import verl_oracle
from fusedpg.spec import REDUCTIONS

MISSING = [name for name in ("verl", "tensordict", "omegaconf") if importlib.util.find_spec(name) is None]
needs_verl = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed (certify-no-deps.txt)")

NAMES = {
    "algos": "verl.trainer.ppo.core_algos",
    "losses": "verl.workers.utils.losses",
    "configs": "verl.workers.config",
    "metric": "verl.utils.metric",
    "tu": "verl.utils.tensordict_utils",
    "fused": "fusedpg.integrations.verl",
    "engine": "fusedpg.integrations._verl_engine",
    "fsdp": "verl.workers.engine.fsdp.transformer_impl",
}


@cache
def load():
    """The modules, and the oracle over them; imported once."""
    oracle = verl_oracle.load()
    stock = dict(oracle.algos.POLICY_LOSS_REGISTRY)
    with verl_oracle.import_environment():
        modules = {key: importlib.import_module(name) for key, name in NAMES.items()}
    # importing the integration registers; the oracle of other tests in this process is verl as it comes
    oracle.algos.POLICY_LOSS_REGISTRY.clear()
    oracle.algos.POLICY_LOSS_REGISTRY.update(stock)
    return SimpleNamespace(oracle=oracle, **modules)


def close(ours, theirs, limit, what):
    ours, theirs = torch.as_tensor(ours).double(), torch.as_tensor(theirs).double()
    assert torch.isfinite(theirs).all(), what
    worst = ((ours - theirs).abs() / theirs.abs().clamp(min=1.0)).max() if theirs.numel() else torch.zeros(())
    assert worst <= limit, (what, worst.item(), ours, theirs)


def modes(loss):
    return ("token-mean",) if loss in ("sapo", "geo_mean") else REDUCTIONS


def actor_config(loss, options, counts=None):
    """verl's `FSDPActorConfig` with each option where verl has it."""
    base = load().oracle.config(loss, options, {})
    values = {f: getattr(base, f) for f in base if f not in ("strategy", "engine", "global_batch_info", "_target_")}
    info = {**(counts or {}), "loss_scale_factor": options.get("loss_scale_factor")}
    return load().configs.FSDPActorConfig(
        strategy="fsdp", global_batch_info=info if counts is not None else {}, **values
    )


def jagged(rows):
    return torch.nested.as_nested_tensor([r.clone() for r in rows], layout=torch.jagged)


def micro_batch(lengths, mask_rows=(), counts=None, seed=0, dense=False, weights=False, per_token=True, holes=True):
    """(data, log-probs, entropy): `lengths` are (prompt, response) pairs; values have both signs and hit every clip."""
    from tensordict import TensorDict

    g = torch.Generator().manual_seed(seed)
    rand = lambda n: torch.randn(n, generator=g)  # noqa: E731
    total = [p + r for p, r in lengths]
    logp = [-(0.05 + 3 * torch.rand(n, generator=g)) for n in total]
    response = [values[max(p - 1, 0) : max(p - 1, 0) + r] for values, (p, r) in zip(logp, lengths, strict=True)]
    fields = {
        "old_log_probs": [(v + 0.4 * rand(len(v))).clamp(max=-0.01) for v in response],
        "ref_log_prob": [v + 0.4 * rand(len(v)) for v in response],
        "advantages": [rand(len(v)) if per_token else rand(1).expand(len(v)) for v in response],
        "response_mask": [torch.rand(len(v), generator=g) > 0.25 * holes for v in response],
    }
    for i, mask in enumerate(fields["response_mask"]):
        mask[0] = True
        if i in mask_rows:
            mask[:] = False
    if weights:
        fields["rollout_is_weights"] = [2 * torch.rand(len(v), generator=g) for v in response]
    rows = len(lengths)
    data = {name: jagged(values) for name, values in fields.items()}
    data["prompts"] = jagged([torch.ones(p, dtype=torch.int64) for p, _ in lengths])
    data["responses"] = jagged([torch.ones(r, dtype=torch.int64) for _, r in lengths])
    if dense:
        width = max(p for p, _ in lengths)
        for name in fields:
            data[name] = data[name].to_padded_tensor(0)
        data["attention_mask"] = torch.cat(
            [
                torch.stack([torch.arange(width) >= width - p for p, _ in lengths]),
                torch.stack([torch.arange(data["response_mask"].shape[1]) < r for _, r in lengths]),
            ],
            1,
        ).long()
        data["prompts"] = torch.ones(rows, width, dtype=torch.int64)
        data["responses"] = torch.ones(data["response_mask"].shape, dtype=torch.int64)
    td = TensorDict(data, batch_size=[rows])
    counts = {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None, **(counts or {})}
    load().tu.assign_non_tensor(td, **counts)
    entropy = [v.detach().abs() + 0.3 * rand(len(v)).abs() for v in logp]
    return td, torch.cat(logp), torch.cat(entropy), total
