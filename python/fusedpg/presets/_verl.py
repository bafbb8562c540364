"""verl 0.9.1's policy losses under verl's own option names.

Defaults are those of verl's `ActorConfig`, `PolicyLossConfig` and `RolloutCorrectionConfig` (verl's YAML sets
`rollout_is: null` where the class has "sequence"). `fusedpg.certify.against_verl` compares every loss with verl's code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..knobs import number
from ..spec import INF, REDUCTIONS, Anchor, Reject
from ._verl_knobs import BAND, KNOBS, SAFETY, bypass_metrics, rejection
from .base import Options, TrainerSpec, known_loss, trainer_spec

__all__ = ["ENTRY_OF", "options_of", "verl"]

VERSION = "0.9.1"

#: verl's loss_mode -> the catalogue entry that it is; bypass_mode with loss_type="reinforce" is "reinforce"
ENTRY_OF: dict[str, str] = {
    "vanilla": "ppo_dual_clip",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
    "gspo": "gspo_token",
    "sapo": "sapo",
    "gpg": "reinforce",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "geo_mean": "gmpo",
    "dro": "dro",
    "cispo": "cispo",
    "bypass_mode": "ppo_dual_clip",
}

_PINNED = ("sapo", "geo_mean")
_PER_SEQUENCE = "seq-mean-token-mean"

_CAPPED = {**BAND, "clip_ratio_c": 3.0}
_WEIGHTS = {"rollout_is": None, "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": False}
_REJECTS = {"rollout_rs": None, "rollout_rs_threshold": None}
_READS: dict[str, dict[str, Any]] = {
    "vanilla": _CAPPED,
    "dppo_tv": _CAPPED,
    "dppo_kl": _CAPPED,
    "gspo": BAND,
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
    "gpg": {},
    "clip_cov": {**BAND, "clip_cov_ratio": 2e-4, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0},
    "kl_cov": {"kl_cov_ratio": 2e-4, "ppo_kl_coef": 0.1},
    "geo_mean": {**BAND, "correct": False},
    "dro": {"dro_beta": None},
    "cispo": BAND,
}
_BYPASS_READS: dict[str, dict[str, Any]] = {
    "ppo_clip": {**_CAPPED, **_REJECTS, "loss_type": "ppo_clip", "rollout_is": None},
    "reinforce": {**_WEIGHTS, **_REJECTS, "loss_type": "reinforce", "rollout_is": "sequence"},
}

_PPO_KL = {"actor/ppo_kl": "approx_kl"}
_CLIP_NAMES = {"actor/pg_clipfrac": "clip_frac", "actor/pg_clipfrac_lower": "dual_clip_frac"}
#: verl's metric -> ours, only where both are the same number
_METRICS: dict[str, dict[str, str]] = {
    "vanilla": _CLIP_NAMES | _PPO_KL,
    "dppo_tv": {"actor/pg_clipfrac_lower": "out_of_band_frac", **_PPO_KL},
    "dppo_kl": {"actor/pg_clipfrac_lower": "out_of_band_frac", **_PPO_KL},
    "gspo": _CLIP_NAMES,
    "sapo": _CLIP_NAMES | _PPO_KL,
    "clip_cov": _PPO_KL,
    "dro": _PPO_KL,
    "cispo": {"actor/pg_clipfrac": "out_of_band_frac", "actor/pg_clipfrac_lower": "dual_clip_frac", **_PPO_KL},
}

_COV_NOTE = "the tokens are selected among those of one call, here as in verl: a micro-batch gives verl's number"
_NOTES = {
    "dppo_kl": "verl adds 1e-8 to 1 - p where the catalogue bounds p to [1e-6, 1 - 1e-6]: a token with p outside may "
    "be kept here and dropped there",
    "clip_cov": _COV_NOTE,
    "kl_cov": _COV_NOTE,
    "geo_mean": "verl's mean over a micro-batch's rows grows with the number of micro-batches; correct=True does not; "
    "is_weights: each sequence's geometric mean at its tokens",
    "bypass_mode": "verl's old_log_prob is passed as logp_rollout",
}
_REJECT_NOTE = (
    "verl takes rejected tokens out of the mask: the normalizer needs the counts (a global batch's, or those of the "
    "mask that is left); verl bounds each log-ratio by 20 before a sequence's sum"
)


def options_of(loss: str) -> dict[str, Any]:
    """What verl's function of a policy loss reads of `ActorConfig` and `PolicyLossConfig`, with verl's defaults."""
    known_loss("verl", loss, tuple(_READS))
    return {key: value for key, value in _READS[loss].items() if key != "correct"}


def denominator(
    spec: TrainerSpec,
    *,
    dp_size: int = 1,
    batch_num_tokens: Any = None,
    global_batch_size: Any = None,
    loss_scale_factor: int | None = None,
) -> Any:
    """What verl's `agg_loss` divides the masked sum by, from `config.global_batch_info`; None: the call's own count.

    token-mean: batch_num_tokens/dp_size; token-sum: 1/dp_size; seq-*: global_batch_size/dp_size, where the loss
    already holds seq-mean-token-sum-norm's loss_scale_factor.
    """
    if spec.max_tokens is not None and loss_scale_factor not in (None, spec.max_tokens):
        raise ValueError(
            f"loss_scale_factor: the loss was built with {spec.max_tokens}; got {loss_scale_factor}; pass it to "
            "presets.verl"
        )
    if spec.reduction == "token-sum":
        return None if dp_size == 1 else 1.0 / dp_size
    by_tokens = spec.reduction == "token-mean"
    name, count = ("batch_num_tokens", batch_num_tokens) if by_tokens else ("global_batch_size", global_batch_size)
    if count is not None:
        return count / dp_size
    if dp_size > 1:
        raise ValueError(f"{name}: verl requires it for {spec.reduction!r} with dp_size > 1; got None")
    if spec.is_reject != Reject.NONE:
        raise ValueError(
            f"{name}: rejected tokens leave verl's mask and so its local count; got None; pass the global batch's "
            "count, as verl's trainer does, or that of the tokens (sequences) which are left"
        )
    return None


def micro_batch_rows(spec: TrainerSpec, *, rows: int, **_: Any) -> float:
    """verl's geo_mean divides by the rows of the micro-batch and reads no global count."""
    return float(rows)


def verl(loss: str = "vanilla", **options: Any) -> TrainerSpec:
    """One of verl's registered policy losses, with verl's KL and entropy terms.

    Options have verl's names and defaults; each is read only by the losses that read it in verl. `rollout_is` with
    `rollout_is_threshold` forms verl's rollout weights from `logp_old` and `logp_rollout` inside the loss; weights
    made elsewhere go to an op's `is_weights=`. bypass_mode takes verl's old_log_prob as `logp_rollout` and has
    `loss_type`, `rollout_rs` and `rollout_rs_threshold`. geo_mean has `correct=True` for the catalogue's reduction.

    Raises:
        ValueError: an unknown loss, an option that the loss never reads, one that a loss cannot express, by name.
    """
    known_loss("verl", loss, tuple(ENTRY_OF))
    given = _options(loss, options)
    knobs = {**KNOBS[loss](given), **_terms(loss, given), **_reduction(loss, given)}
    entry, names = ENTRY_OF[loss], _METRICS.get(loss, {})
    notes = [_NOTES[loss]] if loss in _NOTES else []
    fields: dict[str, Any] = {}
    if loss == "bypass_mode":
        entry = "reinforce" if given["loss_type"] == "reinforce" else entry
        knobs |= rejection(given, knobs["reduction"])
        names = bypass_metrics(given)
        fields["anchor"] = Anchor.ROLLOUT
        notes += [_REJECT_NOTE] if given["rollout_rs"] is not None else []
    if entry in ("reinforce", "dro"):  # the ratio is in the metrics alone, where verl has no bound
        fields["log_ratio_clamp"] = (-INF, INF)
    spec = trainer_spec(
        entry,
        knobs,
        trainer="verl",
        version=VERSION,
        trainer_loss=loss,
        metric_names=names,
        rule=micro_batch_rows if loss == "geo_mean" and not given["correct"] else denominator,
        note="; ".join(notes),
    )
    return spec.replace(**fields) if fields else spec  # type: ignore[return-value]


# ------------------------------------------------------------------ which options a loss reads


def _options(loss: str, given: Mapping[str, Any]) -> Options:
    """The options of one loss, with those that another option switches on."""
    where = f"presets.verl({loss!r})"
    if loss == "bypass_mode":
        kind = given.get("loss_type", "ppo_clip")
        if kind not in _BYPASS_READS:
            raise ValueError(f"loss_type: {where} expects one of {', '.join(map(repr, _BYPASS_READS))}; got {kind!r}")
        reads = dict(_BYPASS_READS[kind])
    else:
        reads = {**_READS[loss], **_WEIGHTS}
    reads |= {"entropy_coeff": 0.0, "use_kl_loss": False}
    refused = {
        "rollout_rs": "verl rejects before the loss: pass the mask that is left as mask=",
        "rollout_rs_threshold": "verl rejects before the loss: pass the mask that is left as mask=",
        "kl_loss_coef": "it is read with use_kl_loss=True",
        "kl_loss_type": "it is read with use_kl_loss=True",
        "loss_scale_factor": "it is read with loss_agg_mode='seq-mean-token-sum-norm'",
    }
    if loss not in _PINNED or given.get("use_kl_loss") or given.get("entropy_coeff"):
        reads["loss_agg_mode"] = "token-mean"
    else:
        refused["loss_agg_mode"] = f"verl pins this loss to {_PER_SEQUENCE!r}"
    if given.get("use_kl_loss"):
        reads |= {"kl_loss_coef": 0.001, "kl_loss_type": "low_var_kl"}
    if given.get("loss_agg_mode") == "seq-mean-token-sum-norm":
        reads["loss_scale_factor"] = None
    return Options(where, given, reads, {key: why for key, why in refused.items() if key not in reads})


def _reduction(loss: str, options: Options) -> dict[str, Any]:
    """The reduction; a pinned loss is `_PER_SEQUENCE`."""
    if loss in _PINNED:
        return {"reduction": _PER_SEQUENCE}
    mode = options.choice("loss_agg_mode", REDUCTIONS)
    if mode != "seq-mean-token-sum-norm":
        return {"reduction": mode}
    factor = options["loss_scale_factor"]
    if factor is None:
        raise ValueError(
            "loss_scale_factor: loss_agg_mode 'seq-mean-token-sum-norm' divides by it; got None, for which verl takes "
            "the padded response length; pass the response budget, e.g. loss_scale_factor=4096"
        )
    return {"reduction": mode, "max_tokens": factor}


_KL_TYPES = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def _terms(loss: str, options: Options) -> dict[str, Any]:
    """The KL and entropy terms, which verl reduces by loss_agg_mode whatever the loss is pinned to."""
    knobs: dict[str, Any] = {"entropy_coef": number("entropy_coeff", options["entropy_coeff"])}
    if options.choice("use_kl_loss", (False, True)):
        kind = options.choice("kl_loss_type", tuple(name + plus for name in _KL_TYPES for plus in ("", "+")))
        base = _KL_TYPES[kind.removesuffix("+")]
        knobs |= {"kl": base + "+" * kind.endswith("+"), "kl_coef": number("kl_loss_coef", options["kl_loss_coef"])}
        knobs["kl_log_ratio_clamp"] = SAFETY if base == "k3" else None
        knobs["kl_clamp"] = 10.0 if base == "k3" else None
    if loss in _PINNED and (options["use_kl_loss"] or knobs["entropy_coef"]):
        if options["loss_agg_mode"] != _PER_SEQUENCE:
            raise ValueError(
                f"loss_agg_mode: verl reduces the KL and entropy terms of {loss!r} by it, the policy term by "
                f"{_PER_SEQUENCE!r}; got {options['loss_agg_mode']!r}; a loss has one reduction: pass {_PER_SEQUENCE!r}"
            )
        if loss == "geo_mean" and not options["correct"]:
            raise ValueError(
                "correct: verl divides the policy term of 'geo_mean' by the rows of the micro-batch and its KL and "
                "entropy terms by the sequences; got correct=False; pass correct=True, or leave the terms out"
            )
    return knobs
