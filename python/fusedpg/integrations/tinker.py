"""Tinker: `fn(data, logprobs_list) -> (loss, metrics)` for `TrainingClient.forward_backward_custom`.

    client.forward_backward_custom(data, fusedpg.integrations.tinker.custom_loss("cispo", epsilon_high=4.0))

The client differentiates the loss by the log-probs and sends the negative gradients as cross-entropy weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..functional import policy_loss
from ..presets import tinker as tinker_preset
from ..spec import Anchor, LossSpec, Surrogate
from ._datums import read_datums
from ._shared import floats, refuse_terms, spec_of


def own_loss(loss: str = "ppo", **options: Any) -> LossSpec:
    """One of Tinker's own losses under its own option names, as a spec for `custom_loss`."""
    return tinker_preset(loss, **options)


def custom_loss(
    loss: str | LossSpec,
    *,
    normalizer: float | None = None,
    backend: str = "auto",
    **knobs: Any,
) -> Callable[[Any, Any], tuple[Tensor, dict[str, float]]]:
    """A loss of the catalogue (or any spec) over the data of one call; every datum is one sequence.

    A datum's `loss_fn_inputs` holds `advantages`, `logprobs` (the sampler's, which is also the ratio's denominator
    unless there are `old_logprobs`), and, where the loss needs them, `mask`, `obs_mask`, `ref_logprobs`. Without a
    `mask` all tokens count, as in Tinker's own losses: only a plain sum is then the same with and without the prompt.

    Args:
        loss: a name of `fusedpg.CATALOGUE`, or a spec (`own_loss(...)` for Tinker's losses).
        normalizer: divides the sum, for steps of several calls; None: the counts of the call.
        backend: as in `policy_loss`.
        knobs: as in `loss_spec`.

    Raises:
        ValueError: an unknown loss or knob, or a term that a datum has no data for, by name.
    """
    spec = spec_of(loss, knobs)
    refuse_terms(spec, "Tinker's forward_backward_custom", entropy="a datum carries no entropy")

    reads_sampler = spec.needs_logp_rollout or (spec.anchor == Anchor.OLD and spec.surrogate != Surrogate.REINFORCE)

    def loss_fn(data: Any, logprobs_list: Any) -> tuple[Tensor, dict[str, float]]:
        batch = read_datums(data, logprobs_list)
        if batch.mask is None and len(data) and spec.reduction != "token-sum":
            raise ValueError(
                f"data: the loss {spec.name!r} counts tokens ({spec.reduction}) and expects loss_fn_inputs['mask'] of "
                "the sampled ones; got none; add it, or use reduction='token-sum'"
            )
        if batch.logp_rollout is None and reads_sampler:
            raise ValueError(f"data: the loss {spec.name!r} reads loss_fn_inputs['logprobs'], the sampler's; got none")
        out = policy_loss(spec, batch.logp, **batch.fields(spec), normalizer=normalizer, backend=backend)
        return out.loss, floats(out.metrics, f"{spec.name}/")

    return loss_fn
