"""NeMo-RL: its `LossFunction` protocol over this library's kernels, from log-probs or straight from logits.

loss_fn = FusedClippedPGLoss(master_config["loss_fn"])            # instead of ClippedPGLossFn
loss_fn = FusedClippedPGLoss(cfg, input_type="logit")             # logits are read once, nothing else is allocated
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..functional import policy_loss, policy_loss_from_logits
from ..outputs import LossOutput
from ..presets import nemo_rl as nemo_rl_preset
from ..presets._nemo_rl import options_of
from ..presets.base import TrainerSpec
from ._shared import advantages_of, floats, options_from

_INTERFACES = ("nemo_rl.algorithms.loss.interfaces", "nemo_rl.algorithms.interfaces")
_INPUTS = ("logprob", "logit")
#: NeMo-RL's name -> ours, means over valid tokens
_TOKEN_MEANS = {"probs_ratio": "ratio_mean", "clip_frac": "clip_frac", "approx_kl": "approx_kl", "kl": "kl"}
_EXTREMA = {"probs_ratio_min": "ratio_min", "probs_ratio_max": "ratio_max"}
_FILTERED = ("curr_logprobs_keep_mask", "curr_logprobs_unfiltered")
_GROUPS = ("vocab_parallel_group", "context_parallel_group")


class FusedClippedPGLoss:
    """The clipped policy-gradient loss: a sum over the micro-batch by the global count of valid tokens or sequences.

    Attributes `loss_type`, `input_type` and `metric_normalizations` hold NeMo-RL's own enums; the last tells its split
    API which count divided each metric.

    Args:
        cfg: a ClippedPGLossConfig, as a mapping or the pydantic model.
        input_type: "logprob": `next_token_logprobs` (B, S-1); "logit": `logits` (B, S, V), the whole vocabulary.
        backend: "auto", "cpu", "triton" or "reference".

    Raises:
        ImportError: NeMo-RL is not installed.
        ValueError: an option that cannot be honoured, by name.
    """

    #: NeMo-RL's own forward gives log-probs or logits as usual
    use_fused_linear_logprobs = False

    def __init__(self, cfg: Any = None, *, input_type: str = "logprob", backend: str = "auto") -> None:
        if input_type not in _INPUTS:
            raise ValueError(f"input_type: expected one of {', '.join(_INPUTS)}; got {input_type!r}")
        self.spec = clipped_pg_spec(cfg)
        self.backend = backend
        enums = _interfaces()
        token_level = self.spec.reduction == "token-mean"
        self.loss_type = enums.LossType.TOKEN_LEVEL if token_level else enums.LossType.SEQUENCE_LEVEL
        self.input_type = getattr(enums.LossInputType, input_type.upper())
        self._logits = input_type == "logit"
        kinds: Any = getattr(enums, "MetricNormalizer", None)
        #: empty for versions before the split API
        self.metric_normalizations: dict[str, Any] = {}
        if kinds is not None:
            self.metric_normalizations = {
                "loss": kinds.TOKENS if token_level else kinds.SEQUENCES,
                **dict.fromkeys(_TOKEN_MEANS, kinds.TOKENS),
                **dict.fromkeys((*_EXTREMA, "num_valid_samples", "num_unmasked_tokens"), kinds.NONE),
            }

    def __call__(
        self,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        next_token_logprobs: Tensor | None = None,
        logits: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, dict[str, float]]:
        """The loss and its metrics; the fields of `data` are (B, S), `sample_mask` (B,)."""
        for name in _FILTERED:
            if data.get(name) is not None:
                raise ValueError(f"{name}: top-k or top-p filtered log-probs are not supported; switch the filter off")
        if self._logits:
            _check_whole(logits, kwargs)
        elif next_token_logprobs is None:
            raise ValueError("next_token_logprobs: input_type LOGPROB expects them; got none")
        mask = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)
        fields = self._fields(data, mask)
        toks, seqs = (torch.as_tensor(n).float() + 1e-8 for n in (global_valid_toks, global_valid_seqs))
        fields["normalizer"] = toks if self.spec.reduction == "token-mean" else seqs
        if self._logits:
            assert logits is not None
            out = policy_loss_from_logits(self.spec, logits[:, :-1], data["input_ids"][:, 1:], **fields)
        else:
            assert next_token_logprobs is not None
            out = policy_loss(self.spec, next_token_logprobs, **fields)
        return out.loss, self._metrics(out, toks, data["sample_mask"])

    def _fields(self, data: Mapping[str, Any], mask: Tensor) -> dict[str, Any]:
        spec = self.spec
        after = lambda name, read=True: data[name][:, 1:] if read else None  # noqa: E731
        return {
            "logp_old": after("prev_logprobs", spec.trainer_loss != "force_on_policy_ratio"),
            "logp_ref": after("reference_policy_logprobs", spec.needs_logp_ref),
            "logp_rollout": after("generation_logprobs", spec.needs_logp_rollout),
            "mask": mask,
            "backend": self.backend,
            **advantages_of(spec, data["advantages"][:, 1:], mask, None),
        }

    def _metrics(self, out: LossOutput, toks: Tensor, sample_mask: Tensor) -> dict[str, float]:
        share = out.metrics["tokens"] / toks.to(out.loss.device)
        return floats(
            {
                "loss": out.loss,
                **{theirs: out.metrics[ours] * share for theirs, ours in _TOKEN_MEANS.items()},
                **{theirs: out.metrics[ours] for theirs, ours in _EXTREMA.items()},
                "num_valid_samples": sample_mask.sum(),
                "num_unmasked_tokens": out.metrics["tokens"],
            }
        )


def clipped_pg_spec(cfg: Any = None) -> TrainerSpec:
    """A ClippedPGLossConfig as a spec; options at NeMo-RL's own default say nothing.

    Raises:
        ValueError: an option that cannot be honoured, by name.
    """
    given, defaults = options_from(cfg), options_of()
    said = {key: value for key, value in given.items() if key not in defaults or value != defaults[key]}
    if "token_level_loss" in given:
        said["token_level_loss"] = given["token_level_loss"]
    return nemo_rl_preset(**said)


def _check_whole(logits: Tensor | None, kwargs: Mapping[str, Any]) -> None:
    """Refuse logits that are none, or a part of the vocabulary or of the sequence."""
    if logits is None:
        raise ValueError("logits: input_type LOGIT expects them; got none")
    for name in _GROUPS:
        group = kwargs.get(name)
        if group is not None and torch.distributed.get_world_size(group) > 1:
            raise ValueError(f"{name}: sharded logits are not supported; got a group; use input_type='logprob'")
    if hasattr(logits, "placements"):
        raise ValueError("logits: expected the whole vocabulary; got a DTensor; use input_type='logprob'")


def _interfaces() -> Any:
    """The module of NeMo-RL's enums."""
    for name in _INTERFACES:
        try:
            return import_module(name)
        except ModuleNotFoundError as missing:
            if not name.startswith(missing.name or "?"):
                raise
    raise ImportError(
        "nemo_rl: expected NeMo-RL, whose enums a loss carries; it is not installed; run in its environment"
    )
