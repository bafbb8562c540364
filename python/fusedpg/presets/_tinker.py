"""Tinker's policy losses (`forward_backward(loss_fn=...)`) under the names of its `loss_fn_config`.

Source: the types of the SDK 0.38.0 and Tinker's documentation of each loss; the service itself is remote.
"""

from __future__ import annotations

from typing import Any

from .base import Options, TrainerSpec, known_loss, trainer_spec

TRAINER, VERSION = "tinker", "0.38.0"

#: loss_fn -> catalogue entry
ENTRY_OF = {"importance_sampling": "importance_sampling", "ppo": "ppo_clip", "cispo": "cispo", "dro": "dro"}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": None},
}
#: other values of tinker's LossFnType
_REFUSED = {
    "cross_entropy": "it is supervised: use torch.nn.functional.cross_entropy, or policy_loss with advantages=1 and "
    "fusedpg.loss_spec('reinforce', reduction='token-sum')",
    "custom": "it is forward_backward_custom: compute any fusedpg loss over its log-probs",
    "gspo": "its formula is not published; use fusedpg.loss_spec('gspo_token', anchor='rollout') through "
    "forward_backward_custom",
    "stable_reinforce": "its formula is not published and needs what the sampler recorded",
}
_CISPO_NOTE = "the default thresholds, 0 and 4, are those of its current documentation"
_NOTE = "anchored on the sampler: pass the datum's `logprobs` as logp_rollout"


def tinker(loss: str = "ppo", **options: Any) -> TrainerSpec:
    """One of Tinker's losses: a plain sum over tokens, anchored on the sampler's log-probs, without a ratio clamp.

    Options: `clip_low_threshold` and `clip_high_threshold`, absolute bounds of the ratio (ppo, cispo), and `beta`
    (dro; required). Thresholds a token, as a datum's tensors may give them, are not supported: they are one number.

    Raises:
        ValueError: a loss that the trainer does not have, an option that the loss never reads or cannot express.
    """
    if loss in _REFUSED:
        raise ValueError(f"loss: presets.tinker has no {loss!r}: {_REFUSED[loss]}")
    known_loss(TRAINER, loss, tuple(ENTRY_OF))
    read = Options(f"presets.tinker({loss!r})", options, _DEFAULTS[loss])
    knobs: dict[str, Any] = {"anchor": "rollout", "reduction": "token-sum"}
    if loss == "dro":
        if read["beta"] is None:
            raise ValueError("beta: presets.tinker('dro') has no default for it; got none; pass beta=...")
        knobs["beta"] = read["beta"]
    else:
        knobs["log_ratio_clamp"] = None
    if loss in ("ppo", "cispo"):
        knobs |= {"clip_low": read["clip_low_threshold"], "clip_high": read["clip_high_threshold"]}
    note = f"{_NOTE}; {_CISPO_NOTE}" if loss == "cispo" else _NOTE
    return trainer_spec(
        ENTRY_OF[loss], knobs, trainer=TRAINER, version=VERSION, trainer_loss=loss, rule=None, note=note
    )
