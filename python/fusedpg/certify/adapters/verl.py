"""verl's whole actor loss on jagged tensors: `make_loss_fn` beside `verl.workers.utils.losses.ppo_loss` in fp64."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...presets._verl import ENTRY_OF
from ...spec import REDUCTIONS
from .. import verl_oracle
from ..against_verl import FIX
from ..rows import Row, not_installed
from ..verl_jobs import GLOBAL, PINNED, REQUIRED, SCALE_FACTOR
from .compare import OWN_CODE, Largest

NAMES = {
    "algos": "verl.trainer.ppo.core_algos",
    "losses": "verl.workers.utils.losses",
    "configs": "verl.workers.config",
    "metric": "verl.utils.metric",
    "tu": "verl.utils.tensordict_utils",
    "fused": "fusedpg.integrations.verl",
}
#: (prompt, response) tokens of each sequence; two a micro-batch
LENGTHS = ((3, 5), (1, 9), (4, 2), (2, 7), (1, 3), (2, 4))
PARTS = ((0, 1), (2, 3), (4, 5))
TERMS = {"use_kl_loss": True, "kl_loss_coef": 0.2, "entropy_coeff": 0.05}
#: losses whose number depends on how a batch is split, and the one of which verl raises on an empty micro-batch
BY_PART = ("clip_cov", "kl_cov", "geo_mean", "bypass_mode")
Result = tuple[Tensor, dict[str, Any], list[Tensor]]


def import_modules(names: Mapping[str, str]) -> SimpleNamespace:
    """Some of verl's and of the integration's modules, and the oracle over them, which stays verl as it comes."""
    oracle = verl_oracle.load()
    stock = dict(oracle.algos.POLICY_LOSS_REGISTRY)
    with verl_oracle.import_environment():
        modules = {key: importlib.import_module(name) for key, name in names.items()}
    # importing the integration registers
    oracle.algos.POLICY_LOSS_REGISTRY.clear()
    oracle.algos.POLICY_LOSS_REGISTRY.update(stock)
    return SimpleNamespace(oracle=oracle, **modules)


@cache
def load() -> SimpleNamespace:
    """What the comparison needs; imported once."""
    return import_modules(NAMES)


def modes(loss: str) -> tuple[str, ...]:
    """The values of loss_agg_mode that a loss reads."""
    return ("token-mean",) if loss in PINNED else REDUCTIONS


def actor_config(loss: str, options: Mapping[str, Any], counts: Mapping[str, Any] | None = None) -> Any:
    """verl's `FSDPActorConfig` with each option where verl has it."""
    base = load().oracle.config(loss, options, {})
    values = {f: getattr(base, f) for f in base if f not in ("strategy", "engine", "global_batch_info", "_target_")}
    info = {**(counts or {}), "loss_scale_factor": options.get("loss_scale_factor")}
    return load().configs.FSDPActorConfig(
        strategy="fsdp", global_batch_info=info if counts is not None else {}, **values
    )


def jagged(rows: Sequence[Tensor]) -> Tensor:
    """Rows as verl's trainer packs them."""
    packed: Tensor = torch.nested.as_nested_tensor([r.clone() for r in rows], layout=torch.jagged)
    return packed


def micro_batch(
    lengths: Sequence[tuple[int, int]],
    mask_rows: Sequence[int] = (),
    counts: Mapping[str, Any] | None = None,
    seed: int = 0,
    dense: bool = False,
    weights: bool = False,
    per_token: bool = True,
) -> tuple[Any, Tensor, Tensor, list[int]]:
    """(data, log-probs, entropy, tokens a sequence): values have both signs and hit every clip."""
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
        "response_mask": [torch.rand(len(v), generator=g) > 0.25 for v in response],
    }
    for i, mask in enumerate(fields["response_mask"]):
        mask[0] = True
        if i in mask_rows:
            mask[:] = False
    if weights:
        fields["rollout_is_weights"] = [2 * torch.rand(len(v), generator=g) for v in response]
    data = {name: jagged(values) for name, values in fields.items()}
    data["prompts"] = jagged([torch.ones(p, dtype=torch.int64) for p, _ in lengths])
    data["responses"] = jagged([torch.ones(r, dtype=torch.int64) for _, r in lengths])
    if dense:
        data |= _padded(data, lengths, fields)
    td = TensorDict(data, batch_size=[len(lengths)])
    own = {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None, **(counts or {})}
    load().tu.assign_non_tensor(td, **own)
    entropy = [v.detach().abs() + 0.3 * rand(len(v)).abs() for v in logp]
    return td, torch.cat(logp), torch.cat(entropy), total


def _padded(
    data: Mapping[str, Tensor], lengths: Sequence[tuple[int, int]], fields: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The padded form: prompts to the left, responses to the right."""
    made = {name: data[name].to_padded_tensor(0) for name in fields}
    width, response = max(p for p, _ in lengths), made["response_mask"].shape
    attended = [
        torch.stack([torch.arange(width) >= width - p for p, _ in lengths]),
        torch.stack([torch.arange(response[1]) < r for _, r in lengths]),
    ]
    return {
        **made,
        "attention_mask": torch.cat(attended, 1).long(),
        "prompts": torch.ones(len(lengths), width, dtype=torch.int64),
        "responses": torch.ones(response, dtype=torch.int64),
    }


def in_fp64(td: Any, logp: Tensor, entropy: Tensor, total: list[int]) -> tuple[Any, Tensor, Tensor, list[int]]:
    """The same stored values: in fp32 verl's own sum of terms of opposite signs rounds by more than the limit."""
    floats = {k: v.double() for k, v in td.items() if isinstance(v, Tensor) and v.dtype == torch.float32}
    wide = td.copy()
    for name, value in floats.items():
        wide[name] = value
    return wide, logp.double(), entropy.double(), total


def run(fn: Callable[..., Any], td: Any, logp: Tensor, entropy: Tensor, total: list[int]) -> Result:
    """(loss, metrics, gradients by the model's log-probs and entropy); losses that draw draw alike."""
    leaves = [logp.clone().requires_grad_(), entropy.clone().requires_grad_()]
    offsets = torch.tensor([0, *total]).cumsum(0)
    output = {
        name: torch.nested.nested_tensor_from_jagged(leaf, offsets)
        for name, leaf in zip(("log_probs", "entropy"), leaves, strict=True)
    }
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        loss, metrics = fn(output, td, dp_group=None)
    loss.backward()
    return loss.detach(), metrics, [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]


def split(td: Any, logp: Tensor, entropy: Tensor, total: list[int], parts: Sequence[Sequence[int]]) -> Iterator[Any]:
    """Micro-batches of adjacent sequences."""
    starts = [0, *torch.tensor(total).cumsum(0).tolist()]
    for part in parts:
        where = slice(starts[part[0]], starts[part[-1] + 1])
        rows = load().tu.index_select_tensor_dict(td, list(part))
        yield rows, logp[where], entropy[where], [total[i] for i in part]


# ------------------------------------------------------------------ rows


def rows(backend: str = "auto") -> Iterator[Row]:
    """One row a loss: every loss_agg_mode, jagged, padded with weights, local counts, and steps of micro-batches."""
    try:
        verl = load()
    except Exception as error:  # whatever an installation lacks, the table says it
        yield from not_installed("verl", "", ENTRY_OF, f"{type(error).__name__}: {error}; {FIX}")
        return
    for loss in ENTRY_OF:
        largest = Largest()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for mode in modes(loss):
                for padded in (False, True):
                    _compare(verl, largest, loss, mode, backend, dense=padded, weights=padded)
        yield largest.row("verl", verl.oracle.version, loss, "", OWN_CODE)


def _compare(verl: Any, largest: Largest, loss: str, mode: str, backend: str, **batch: Any) -> None:
    terms = {} if loss == "geo_mean" else TERMS
    mode = "seq-mean-token-mean" if loss == "sapo" else mode
    options = {**REQUIRED.get(loss, {}), **terms, "loss_agg_mode": mode}
    batch["per_token"] = loss != "geo_mean"

    def both(**more: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
        config = actor_config(loss, {**options, **more})
        return verl.fused.make_loss_fn(config, backend=backend), partial(verl.losses.ppo_loss, config)

    ours, theirs = both()
    local = micro_batch(LENGTHS, mask_rows=(1,), seed=1, **batch)
    _note(largest, [run(ours, *local)], [run(theirs, *in_fp64(*local))])
    # without it the mode seq-mean-token-sum-norm divides by the width of each micro-batch
    ours, theirs = both(loss_scale_factor=SCALE_FACTOR)
    step = micro_batch(LENGTHS, mask_rows=PARTS[-1], counts=GLOBAL, **batch)
    wide = in_fp64(*step)
    mine = [run(ours, *part) for part in split(*step, PARTS)]
    if loss in BY_PART:
        other = [run(theirs, *part) for part in split(*wide, PARTS[:-1])]
        empty = [torch.zeros_like(grad).double() for grad in mine[-1][2]]
        other.append((torch.zeros((), dtype=torch.float64), {}, empty))
    else:
        other = [run(theirs, *wide)]
    _note(largest, mine, other)


def _note(largest: Largest, mine: list[Result], other: list[Result]) -> None:
    """Sums of losses; gradients end to end."""
    losses = [torch.stack([one[0].double() for one in results]).sum() for results in (mine, other)]
    grads = [[torch.cat([one[2][i] for one in results]) for i in (0, 1)] for results in (mine, other)]
    largest.note_each(*losses, *grads)
