"""Every public operation as a call that can be repeated: inputs made once, values and gradients returned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import fusedpg


@dataclass(frozen=True)
class Size:
    """Of a batch: `sequences` of `length` tokens, hidden size `width`."""

    sequences: int
    length: int
    vocab: int
    width: int = 16

    @property
    def rows(self) -> int:
        return self.sequences * self.length


#: what keeps a GPU busy, and what the interpreter has time for
SIZES = {"cuda": Size(16, 64, 50_257, 256), "cpu": Size(3, 4, 301)}


@dataclass
class Workload:
    """Inputs that lie still, and a call on them; `call()` returns every tensor that it computed."""

    inputs: dict[str, Tensor]
    run: Callable[[dict[str, Tensor]], list[Tensor]]

    def call(self) -> list[Tensor]:
        return self.run(self.inputs)

    def refill(self, other: Workload) -> None:
        """Other values in the same memory."""
        for name, tensor in self.inputs.items():
            tensor.copy_(other.inputs[name])


def make(name: str, device: torch.device, size: Size, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Workload:
    """One of `NAMES` with random inputs."""
    return Workload(make_inputs(name, device, size, dtype, seed), RUNS[name])


def make_inputs(name: str, device: torch.device, size: Size, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    g = torch.Generator(device).manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=g, device=device)  # noqa: E731
    shape = (size.sequences, size.length)
    inputs = {
        "targets": torch.randint(0, size.vocab, shape, generator=g, device=device),
        "logp_old": 0.3 * rand(*shape) - 8.0,
        "logp_ref": 0.3 * rand(*shape) - 8.0,
        "advantages": rand(size.sequences),
        "mask": (torch.rand(shape, generator=g, device=device) > 0.2).float(),
    }
    if name.startswith("hidden"):
        inputs["hidden"] = rand(*shape, size.width).to(dtype)
        inputs["weight"] = (2 * rand(size.vocab, size.width) / size.width**0.5).to(dtype)
    else:
        inputs["logits"] = (2 * rand(*shape, size.vocab)).to(dtype)
    if name == "distill":
        inputs["teacher"] = (2 * rand(*shape, size.vocab)).to(dtype)
    if name == "distill top-k":
        inputs["ids"] = inputs["logits"].topk(4).indices
        inputs["logps"] = torch.log_softmax(rand(*shape, 5), -1)[..., :4].contiguous()
    return inputs


# ------------------------------------------------------------------ the calls


def _grads(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, leaves))


def logprobs(x: dict[str, Tensor]) -> list[Tensor]:
    leaf = x["logits"].detach().requires_grad_()
    out = fusedpg.token_logprobs(leaf, x["targets"], mask=x["mask"], return_entropy=True, backend="triton")
    return [out.logp.detach(), out.entropy.detach(), *_grads((out.logp + 0.1 * out.entropy).sum(), leaf)]


def scoring(x: dict[str, Tensor]) -> list[Tensor]:
    with torch.no_grad():
        out = fusedpg.token_logprobs(x["logits"], x["targets"], return_entropy=True, backend="triton")
    return [out.logp, out.entropy]


def _policy(name: str, *, inplace: bool = False, **knobs: object) -> Callable[[dict[str, Tensor]], list[Tensor]]:
    spec = fusedpg.loss_spec(name, **knobs)

    def run(x: dict[str, Tensor]) -> list[Tensor]:
        logits = x["logits"].clone() if inplace else x["logits"]
        leaf = logits.detach().requires_grad_()
        out = fusedpg.policy_loss_from_logits(
            spec, leaf.view_as(leaf), x["targets"], inplace=inplace, backend="triton", **_batch(x)
        )
        return [*_values(out), *_grads(out.loss, leaf)]

    return run


def _hidden(name: str, **knobs: object) -> Callable[[dict[str, Tensor]], list[Tensor]]:
    spec = fusedpg.loss_spec(name, **knobs)

    def run(x: dict[str, Tensor]) -> list[Tensor]:
        leaves = [x[k].detach().requires_grad_() for k in ("hidden", "weight")]
        out = fusedpg.policy_loss_from_hidden(spec, *leaves, x["targets"], backend="triton", **_batch(x))
        return [*_values(out), *_grads(out.loss, *leaves)]

    return run


def _batch(x: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        "logp_old": x["logp_old"],
        "logp_ref": x["logp_ref"],
        "sequence_advantages": x["advantages"],
        "mask": x["mask"],
    }


def _values(out: fusedpg.LossOutput) -> list[Tensor]:
    return [out.loss.detach(), out.logp, out.per_token, out.metrics.totals, out.metrics.extrema]


def from_logp(x: dict[str, Tensor]) -> list[Tensor]:
    leaf = (x["logp_old"] + 0.05).requires_grad_()
    spec = fusedpg.loss_spec("grpo", kl="k3", kl_coef=0.1)
    out = fusedpg.policy_loss(spec, leaf, backend="triton", **_batch(x))
    return [out.loss.detach(), out.per_token, out.metrics.totals, *_grads(out.loss, leaf)]


def distill(x: dict[str, Tensor]) -> list[Tensor]:
    return _distilled(x, x["teacher"], divergence="jsd")


def top_k(x: dict[str, Tensor]) -> list[Tensor]:
    return _distilled(x, fusedpg.TopK(x["ids"], x["logps"]), divergence="forward_kl")


def _distilled(x: dict[str, Tensor], teacher: object, **knobs: object) -> list[Tensor]:
    leaf = x["logits"].detach().requires_grad_()
    out = fusedpg.distillation_loss(leaf, teacher, mask=x["mask"], backend="triton", **knobs)
    return [out.loss.detach(), out.per_token, *_grads(out.loss, leaf)]


RUNS: dict[str, Callable[[dict[str, Tensor]], list[Tensor]]] = {
    "scoring": scoring,
    "logprobs": logprobs,
    "ppo_clip": _policy("ppo_clip", entropy_coef=0.01),
    "grpo with k3": _policy("grpo", kl="k3", kl_coef=0.1),
    "gspo": _policy("gspo"),
    "gspo_token": _policy("gspo_token", entropy_coef=0.01),
    "in place": _policy("ppo_clip", inplace=True),
    "from log-probs": from_logp,
    "distill": distill,
    "distill top-k": top_k,
    "hidden ppo_clip": _hidden("ppo_clip", entropy_coef=0.01),
    "hidden gspo": _hidden("gspo"),
}
NAMES = tuple(RUNS)
#: calls without a question to the GPU: those from hidden states ask how many rows are active
WITHOUT_WAITING = tuple(name for name in NAMES if not name.startswith("hidden"))


def assert_same_bits(got: list[Tensor], want: list[Tensor], what: str = "") -> None:
    """Equal bit for bit, NaN included."""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        same = torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (a, b)))
        assert same, f"{what} result {i}: {(a != b).sum().item()} of {a.numel()} values differ"
