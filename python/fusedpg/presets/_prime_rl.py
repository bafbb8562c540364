"""prime-rl's loss functions under the names of its `trainer.loss` configs.

Source: `prime_rl/trainer/rl/loss.py` and `prime_rl/configs/trainer.py` of the repository's main branch.
"""

from __future__ import annotations

from typing import Any

from .base import Options, TrainerSpec, known_loss, trainer_spec

TRAINER, VERSION = "prime_rl", "main"

#: `type` of trainer.loss -> catalogue entry
ENTRY_OF = {"default": "ipo", "ipo": "ipo"}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "default": {"dppo_mask_low": 0.2, "dppo_mask_high": 0.2, "kl_tau": 1e-3, "adv_tau": 1.0},
    "ipo": {"ipo_threshold": 0.1, "kl_tau": 1e-3, "adv_tau": 1.0},
}
_REFUSED = {
    "teacher_tau": "add teacher_tau*(teacher_logp - logp.detach()) to the advantages",
    "import_path": "a loss of type 'custom' is your own function; call policy_loss in it with one of these specs",
    "kwargs": "a loss of type 'custom' is your own function; call policy_loss in it with one of these specs",
}


def prime_rl(loss: str = "default", **options: Any) -> TrainerSpec:
    """`default` (the advantage's sign decides which side of the band drops) or `ipo` (either side drops).

    -A*r*K + kl_tau*(logp - logp_rollout)^2 with r = exp(logp - logp_rollout) and K from the change of probability;
    no clamp. Options: `dppo_mask_low`, `dppo_mask_high` or `ipo_threshold`; `kl_tau`; `adv_tau` (1 only). The token
    weights of `rl_weights` go to `mask`.

    `spec.normalizer(rl_scale=...)` is prime-rl's global count of the component's tokens.

    Raises:
        ValueError: a loss that the trainer does not have, an option that the loss never reads or cannot express.
    """
    known_loss(TRAINER, loss, tuple(ENTRY_OF))
    read = Options(f"presets.prime_rl({loss!r})", options, _DEFAULTS[loss], _REFUSED)
    if read["adv_tau"] != 1.0:
        raise ValueError(
            f"adv_tau: {read.where} expects 1.0; got {read['adv_tau']!r}; the loss is linear in the advantages: "
            "multiply them by it"
        )
    one_sided = loss == "default"
    knobs = {
        "keep_low": -read["dppo_mask_low" if one_sided else "ipo_threshold"],
        "keep_high": read["dppo_mask_high" if one_sided else "ipo_threshold"],
        "keep_directional": one_sided,
        "kl_tau": read["kl_tau"],
        "log_ratio_clamp": None,
        "reduction": "token-sum",
    }
    return trainer_spec(
        ENTRY_OF[loss],
        knobs,
        trainer=TRAINER,
        version=VERSION,
        trainer_loss=loss,
        rule=denominator,
    )


def denominator(spec: TrainerSpec, *, rl_scale: float | None = None) -> float | None:
    """The loss scale; without one the losses are summed."""
    return 1.0 if rl_scale is None else float(rl_scale)
