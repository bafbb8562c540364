"""`resolve_loss`: a loss by name, native-first, that runs from logits or from log-probs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .builtin_losses import BODIES, PINS
from .context import AGG_MODES, check_mode
from .custom import CustomPath
from .hidden_states import HiddenStates, Scores
from .loss_call import LogitMap, LossInputs, LossPath, LossResult
from .native_losses import NATIVE_NAMES, native_path, rllm_params
from .registry import find_loss

PATHS = ("auto", "native", "custom")
#: the common part of the algorithm config, as a custom body finds it in `ctx.params`
_COMMON = {"eps_clip": 0.2, "eps_clip_high": None, "kl_beta": 0.0}


@dataclass(frozen=True)
class ResolvedLoss:
    """A loss that was selected by name; from `resolve_loss`.

    Attributes:
        name: what it was selected by.
        backend: what the vocabulary-sized work was asked to run on.
        run: the path behind it.
    """

    name: str
    backend: str
    run: LossPath

    @property
    def path(self) -> str:
        """ "native" (its own kernel) or "custom" (its Python body)."""
        return self.run.path

    def from_logits(
        self,
        logits: Scores,
        targets: Tensor,
        *,
        logp_old: Tensor | None = None,
        advantages: Tensor | float | None = None,
        sequence_advantages: Tensor | None = None,
        mask: Tensor | None = None,
        obs_mask: Tensor | None = None,
        logp_ref: Tensor | None = None,
        logp_rollout: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        step_tokens: float | Tensor | None = None,
        step_sequences: float | Tensor | None = None,
        temperature: float | Tensor = 1.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
    ) -> LossResult:
        """The loss and, in backward, the gradient of the logits.

        A native token-level loss reads the logits once. A custom one reads them twice (its log-probs, then its
        gradient) and does no other vocabulary-sized work.

        Args:
            logits: (N, V) or (B, T, V), any dtype and strides that `token_logprobs` takes; the only differentiable one.
                Or `HiddenStates`.
            targets: token ids (N,) or (B, T); `logits[i]` scores `targets[i]`.
            logp_old: the importance ratio's denominator, targets' shape. None runs on-policy, and says so.
            advantages: targets' shape, or one number.
            sequence_advantages: (S,), instead.
            mask: the action tokens, targets' shape, bool or weights in [0, 1]; None is all.
            obs_mask: the observation tokens; None is none. A loss without an observation term ignores them.
            logp_ref, logp_rollout: log-probs of the reference and of the sampler; a loss that reads one refuses None.
            cu_seqlens: boundaries of packed sequences; without them (N,) is one datum, which is one sequence.
            step_tokens, step_sequences: action tokens, and sequences with one, of the whole optimizer step; None: those
                of this call. See `LossContext`.
            temperature, softcap, logit_scale: as in `token_logprobs`.

        Returns:
            `LossResult(loss, metrics, path, backend, logp)`.

        Raises:
            TypeError, ValueError, RuntimeError: an argument, or what a custom body returned, by name.

        References:
            Of a built-in loss: `python -m fusedpg losses NAME`; `ppo_clip` is arXiv:1707.06347, eq. 7.
        """
        inputs = LossInputs(
            logp_old,
            advantages,
            sequence_advantages,
            mask,
            obs_mask,
            logp_ref,
            logp_rollout,
            cu_seqlens,
            step_tokens,
            step_sequences,
        )
        logit_map = LogitMap(temperature, softcap, logit_scale)
        return self.run.from_logits(logits, targets, inputs, logit_map, self.backend)

    def from_hidden(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        bias: Tensor | None = None,
        workspace_mib: float | None = None,
        **keywords: Any,
    ) -> LossResult:
        """The loss and the gradients of hidden states and output head, without logits of the batch's size.

        A native loss costs three matrix products, a custom one four. `keywords` are those of `from_logits`.

        Args:
            hidden: (N, D) or (B, T, D), any float dtype; differentiable.
            weight: the output head (V, D), any float dtype; differentiable.
            targets: token ids (N,) or (B, T); `hidden[i]` scores `targets[i]`.
            bias: (V,), differentiable.
            workspace_mib: as in `linear_token_logprobs`.

        Returns:
            `LossResult(loss, metrics, path, backend, logp)`.

        Raises:
            TypeError, ValueError, RuntimeError: an argument, or what a custom body returned, by name.

        References:
            As of `from_logits`; without logits as in arXiv:2411.09009.
        """
        return self.from_logits(HiddenStates(hidden, weight, bias, workspace_mib=workspace_mib), targets, **keywords)

    def from_logp(
        self,
        logp: Tensor,
        *,
        logp_old: Tensor | None = None,
        advantages: Tensor | float | None = None,
        sequence_advantages: Tensor | None = None,
        mask: Tensor | None = None,
        obs_mask: Tensor | None = None,
        logp_ref: Tensor | None = None,
        logp_rollout: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        step_tokens: float | Tensor | None = None,
        step_sequences: float | Tensor | None = None,
    ) -> LossResult:
        """The loss from log-probs.

        Args:
            logp: (N,) or (B, T), any float dtype; differentiable.
            logp_old, advantages, sequence_advantages, mask, obs_mask: as in `from_logits`.
            logp_ref, logp_rollout, cu_seqlens, step_tokens, step_sequences: likewise.

        Returns:
            `LossResult(loss, metrics, path, backend, logp)`.

        Raises:
            TypeError, ValueError, RuntimeError: an argument, or what a custom body returned, by name.

        References:
            Of a built-in loss: `python -m fusedpg losses NAME`; `ppo_clip` is arXiv:1707.06347, eq. 7.
        """
        inputs = LossInputs(
            logp_old,
            advantages,
            sequence_advantages,
            mask,
            obs_mask,
            logp_ref,
            logp_rollout,
            cu_seqlens,
            step_tokens,
            step_sequences,
        )
        return self.run.from_logp(logp, inputs, self.backend)


def resolve_loss(
    name: str,
    backend: str = "auto",
    params: Mapping[str, Any] | None = None,
    loss_agg_mode: str | None = None,
    *,
    eps_clip: float | None = None,
    eps_clip_high: float | None = None,
    kl_beta: float | None = None,
    path: str = "auto",
) -> ResolvedLoss:
    """The loss of a name (`algorithm.loss_fn`): its native kernel where one exists, else its body over `LossContext`.

    Args:
        name: one of rLLM's nine built-in losses (`ppo_clip`, `dppo_tv`, `dppo_kl`, `cispo`, `gspo`, `icepop`,
            `reinforce`, `echo`, `reinforce_kl`), another entry of `fusedpg.CATALOGUE`, or a registered loss.
        backend: "auto", "cpu", "triton" or "reference": who does the vocabulary-sized work.
        params: `algorithm.loss_params`; what a body finds in `ctx.params`.
        loss_agg_mode: "seq-mean-token-mean" (rLLM's default), "token-mean" or "seq-mean-token-sum"; ignored by a
            loss that pins its own. None leaves a catalogue entry that is not rLLM's its own reduction.
        eps_clip, eps_clip_high, kl_beta: the common hyperparameters of the algorithm config (0.2, symmetric, 0). A
            built-in loss ignores the clip range where it has none; a body finds them in `ctx.params`.
        path: "auto" is native-first; "native" refuses a loss without a kernel; "custom" runs the body even so.

    Raises:
        TypeError: a name that is no string, such as a list of losses.
        ValueError: an unknown name (with the closest one), an unknown mode or path, an option that a built-in loss
            never reads, a path that the loss does not have.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"name: expected the name of one loss; got {name!r}; an additional term is composed in a loss's body"
        )
    if path not in PATHS:
        raise ValueError(f"path: expected one of {', '.join(PATHS)}; got {path!r}")
    mode = None if loss_agg_mode is None else check_mode("loss_agg_mode", loss_agg_mode)
    given = {"eps_clip": eps_clip, "eps_clip_high": eps_clip_high, "kl_beta": kl_beta}
    common = {key: value for key, value in given.items() if value is not None}
    params = dict(params or {})
    if name in NATIVE_NAMES:
        return ResolvedLoss(name, backend, _builtin(name, params, mode, common, path))
    loss = find_loss(name)
    if path == "native":
        raise ValueError(f"path: the registered loss {name!r} has no native kernel; got 'native'; use 'auto'")
    mode = loss.agg_mode or mode or AGG_MODES[0]
    return ResolvedLoss(name, backend, CustomPath(name, loss.body, mode, {**_COMMON, **common, **params}))


def _builtin(name: str, params: Mapping[str, Any], mode: str | None, common: Mapping[str, Any], path: str) -> LossPath:
    mode = PINS.get(name, mode)
    native = native_path(name, params, mode, common)
    if path != "custom":
        return native
    if name not in BODIES:
        raise ValueError(f"path: the loss {name!r} has no Python body; got {path!r}; use 'auto'")
    params = {**_COMMON, **common, **rllm_params(name, params)}
    return CustomPath(name, BODIES[name], mode or AGG_MODES[0], params)
