"""The catalogue: every loss by name, its knobs with defaults, its formula and its source.

A loss made of existing terms is one `add_entry(...)` call; tests, benchmarks, documentation and the command line
iterate over `CATALOGUE`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from . import knobs as k
from .knobs import LossEntry
from .spec import INF, KL, Anchor, Keep, KLSampled, KLTarget, Level, LossSpec, Selection, Surrogate

_COMMON = k.ENTROPY | k.KL_KNOBS | k.REDUCTION | k.CORRECTION | k.OBSERVATION
_RATIO = _COMMON | k.KEEP | {"anchor", "log_ratio_clamp"}
_BAND = _RATIO | k.BAND
_CLIP = _BAND | {"dual_clip", "delta"}


ENTRIES: dict[str, LossEntry] = {}
_SPECS: dict[str, LossSpec] = {}
#: name -> default `LossSpec`, in the order of the documentation
CATALOGUE: Mapping[str, LossSpec] = MappingProxyType(_SPECS)
#: other names of an entry
ALIASES = {"dppo_kimi": "ipo"}


def add_entry(
    name: str,
    *,
    formula: str,
    gradient: str,
    source: str,
    knobs: frozenset[str],
    own: Mapping[str, Any] | None = None,
    band: Any = k.ratio_band,
    required: frozenset[str] = frozenset(),
    **fields: Any,
) -> None:
    """Add one loss to the catalogue; `fields` are those of its `LossSpec`."""
    own = own or {}
    spec = LossSpec(name, **fields)
    ENTRIES[name] = LossEntry(spec, formula, gradient, source, knobs | frozenset(own), own, band, required)
    _SPECS[name] = spec


def loss_spec(name: str, **knobs: Any) -> LossSpec:
    """The `LossSpec` of a catalogue entry with some knobs changed.

    Args:
        name: a key of `CATALOGUE`, or the alias `dppo_kimi` of `ipo`.

    Knobs: `epsilon_low`, `epsilon_high` (distances from 1) or `clip_low`, `clip_high` (absolute); `dual_clip`; `delta`;
    `log_ratio_clamp` (a number or (low, high)); `anchor` (old, self, rollout); `keep` (ratio, tv, kl) with `keep_low`,
    `keep_high`, `keep_directional`; `is_correction` (truncate, mask) with `is_level` (token, sequence, geometric),
    `is_low`, `is_high`; `is_reject` (token, sequence, geometric) with `is_reject_low`, `is_reject_high`; `is_missing`
    (nan, one); `kl` (k1, k2, k3, abs, a trailing `+` for the straight-through form), `kl_coef`, `kl_target` (ref,
    rollout), `kl_ratio` (none, detached, live), `kl_gradient` (own, straight_through, score), `kl_clamp`,
    `kl_log_ratio_clamp`, `kl_backward` and `kl_forward` (score, k3: on the target's own samples), `kl_backward_coef`,
    `kl_forward_coef`; `entropy_coef`; `obs_coef`; `reduction`,
    `max_tokens`; and the loss's own. None switches a bound off.

    Raises:
        ValueError: an unknown loss, a knob that the loss never reads, a required one missing, a value out of range.
    """
    entry = ENTRIES.get(ALIASES.get(name, name))
    if entry is None:
        raise ValueError(f"name: expected one of {', '.join((*ENTRIES, *ALIASES))}; got {name!r}")
    return k.apply_knobs(name, entry, knobs)


_TOKEN_CLAMP = k.TOKEN_CLAMP
_PPO = "max(-A*r, -A*clip(r, 1-epsilon_low, 1+epsilon_high)), r = exp(logp - logp_old)"
_PPO_GRADIENT = "-A*r where the unclipped branch is chosen (ties too), else 0"
_ppo: dict[str, Any] = {
    "surrogate": Surrogate.CLIPPED_RATIO,
    "log_ratio_clamp": _TOKEN_CLAMP,
    "gradient": _PPO_GRADIENT,
}
_band02: dict[str, Any] = {"clip_low": 0.8, "clip_high": 1.2}

add_entry(
    "reinforce",
    formula="-A*logp",
    gradient="-A",
    source="Williams, Simple Statistical Gradient-Following Algorithms (1992); GPG, arXiv:2504.02546",
    knobs=_COMMON | {"anchor"},
    surrogate=Surrogate.REINFORCE,
    log_ratio_clamp=_TOKEN_CLAMP,
)
add_entry(
    "importance_sampling",
    formula="-A*r, r = exp(logp - logp_old)",
    gradient="-A*r",
    source="Schulman et al., Trust Region Policy Optimization, arXiv:1502.05477, eq. 14",
    knobs=_RATIO,
    surrogate=Surrogate.IMPORTANCE_RATIO,
    log_ratio_clamp=_TOKEN_CLAMP,
)
add_entry(
    "ppo_clip",
    formula=_PPO,
    source="Schulman et al., Proximal Policy Optimization Algorithms, arXiv:1707.06347, eq. 7",
    knobs=_CLIP,
    **_band02,
    **_ppo,
)
add_entry(
    "ppo_dual_clip",
    formula=f"{_PPO}; for A < 0 min(that, -A*dual_clip)",
    source="Ye et al., Mastering Complex Control in MOBA Games with Deep RL, arXiv:1912.09729, eq. 5",
    knobs=_CLIP,
    dual_clip=3.0,
    **_band02,
    **{**_ppo, "gradient": f"{_PPO_GRADIENT}; 0 where dual_clip binds"},
)
add_entry(
    "grpo",
    formula=f"{_PPO} + kl_coef*k3(logp, logp_ref)",
    source="Shao et al., DeepSeekMath, arXiv:2402.03300, eq. 3-4",
    knobs=_CLIP,
    kl=KL.K3,
    kl_coef=0.04,
    kl_log_ratio_clamp=_TOKEN_CLAMP,
    reduction="seq-mean-token-mean",
    **_band02,
    **{**_ppo, "gradient": f"{_PPO_GRADIENT}; + kl_coef*(1 - exp(logp_ref - logp))"},
)
add_entry(
    "dapo",
    formula=_PPO,
    source="Yu et al., DAPO, arXiv:2503.14476, eq. 8 and 10",
    knobs=_CLIP,
    clip_low=0.8,
    clip_high=1.28,
    **_ppo,
)
add_entry(
    "dr_grpo",
    formula=f"{_PPO}; summed over a sequence and divided by a fixed max_tokens",
    source="Liu et al., Understanding R1-Zero-Like Training, arXiv:2503.20783, section 3.2",
    knobs=_CLIP,
    reduction="seq-mean-token-sum-norm",
    max_tokens=1024,
    **_band02,
    **_ppo,
)
add_entry(
    "bnpo",
    formula=_PPO,
    source="TRL's loss_type='bnpo': token mean over the local batch; Xiao et al., BNPO, arXiv:2506.02864",
    knobs=_CLIP,
    **_band02,
    **_ppo,
)
_GSPO: dict[str, Any] = {
    "surrogate": Surrogate.CLIPPED_RATIO,
    "clip_low": 1 - 3e-4,
    "clip_high": 1 + 4e-4,
    "log_ratio_clamp": (-INF, 10.0),
}
_MEAN_RATIO = "s = exp(mean over the sequence of (logp - logp_old))"
add_entry(
    "gspo",
    formula=f"max(-A*s, -A*clip(s)), {_MEAN_RATIO}",
    gradient="-A*s shared by the sequence's tokens where unclipped",
    source="Zheng et al., Group Sequence Policy Optimization, arXiv:2507.18071, eq. 5 and 7",
    knobs=_CLIP - {"dual_clip", "delta"},
    level=Level.SEQUENCE,
    reduction="seq-mean-token-mean",
    **_GSPO,
)
add_entry(
    "gspo_token",
    formula="max(-A*s, -A*clip(s)), s = sg[exp(mean of (logp - logp_old))]*exp(logp - sg[logp])",
    gradient="-A*s where unclipped",
    source="Zheng et al., Group Sequence Policy Optimization, arXiv:2507.18071, eq. 13-14",
    knobs=_CLIP,
    level=Level.SEQUENCE_TOKEN,
    reduction="seq-mean-token-mean",
    **_GSPO,
)
add_entry(
    "gmpo",
    formula="-A*exp(mean over the sequence of u), u = sgn(A)*min(sgn(A)*d, sgn(A)*clip(d, -epsilon, epsilon)), "
    "d = logp - logp_old",
    gradient="-A*exp(mean of u), shared by the sequence's tokens that are not clipped",
    source="Zhao et al., Geometric-Mean Policy Optimization, arXiv:2507.20673, eq. 4; clip in log space",
    knobs=(_RATIO - k.KEEP) | k.BAND,
    band=k.log_band,
    surrogate=Surrogate.IMPORTANCE_RATIO,
    level=Level.SEQUENCE,
    token_clip=(-0.4, 0.4),
    reduction="seq-mean-token-mean",
)
add_entry(
    "luspo",
    formula=f"L*max(-A*s, -A*clip(s)), {_MEAN_RATIO}, L the sequence's token count",
    gradient="-A*s*L shared by the sequence's tokens where unclipped",
    source="LUSPO: Length-Unbiased Sequence Policy Optimization, arXiv:2602.05261",
    knobs=_CLIP - {"dual_clip", "delta"},
    level=Level.SEQUENCE,
    reduction="seq-mean-token-sum",
    **_GSPO,
)
_DETACHED: dict[str, Any] = {"surrogate": Surrogate.CISPO, "log_ratio_clamp": _TOKEN_CLAMP}
add_entry(
    "cispo",
    formula="-sg[clip(r)]*A*logp",
    gradient="-clip(r)*A",
    source="MiniMax-M1, arXiv:2506.13585, eq. 4-5",
    knobs=_BAND,
    clip_high=1.2,
    **_DETACHED,
)
_DPPO: dict[str, Any] = {
    "knobs": _BAND,
    "own": {"delta": k.parse_delta},
    "keep_directional": True,
    "keep_low": -0.2,
    "keep_high": 0.2,
    **_DETACHED,
}
add_entry(
    "dppo_tv",
    formula="-A*sg[r]*logp*K, K = (p - p' <= keep_high) if A > 0 else (p - p' >= keep_low), p = e^logp, "
    "p' = e^logp_old",
    gradient="-A*r*K",
    source="DPPO with the binary total variation, arXiv:2602.04879, section 5.4",
    keep=Keep.TV,
    **_DPPO,
)
add_entry(
    "dppo_kl",
    formula="-A*sg[r]*logp*K, K as in dppo_tv with sgn(p - p')*D(p'||p) in place of p - p'",
    gradient="-A*r*K",
    source="DPPO with the binary KL divergence, arXiv:2602.04879, section 5.4",
    keep=Keep.KL,
    **_DPPO,
)
add_entry(
    "icepop",
    formula="-A*sg[rho]*logp*1[alpha <= rho <= beta], rho = exp(logp - logp_rollout)",
    gradient="-A*rho*1[alpha <= rho <= beta]",
    source="IcePop, arXiv:2510.18855; rLLM's icepop",
    knobs=_RATIO,
    own={"alpha": k.parse_as("keep_low"), "beta": k.parse_as("keep_high")},
    anchor=Anchor.ROLLOUT,
    keep=Keep.RATIO,
    keep_low=0.5,
    keep_high=5.0,
    surrogate=Surrogate.CISPO,
)
add_entry(
    "sapo",
    formula="-A*(4/tau)*sigmoid(tau*(r - 1)), tau = tau_pos if A > 0 else tau_neg",
    gradient="-A*4*s*(1 - s)*r, s = sigmoid(tau*(r - 1))",
    source="Soft Adaptive Policy Optimization, arXiv:2511.20347",
    knobs=_RATIO,
    own={"tau_pos": k.parse_number, "tau_neg": k.parse_number},
    surrogate=Surrogate.SAPO,
    tau_pos=1.0,
    tau_neg=1.05,
    log_ratio_clamp=_TOKEN_CLAMP,
    reduction="seq-mean-token-mean",
)
add_entry(
    "vespo",
    formula="-sg[phi]*A*logp, log phi = lambda + k*log W - lambda*W, W the product of the sequence's ratios (and "
    "correction weights), (k, lambda) = (k_pos, lambda_pos) if A >= 0 else (k_neg, lambda_neg)",
    gradient="-phi*A",
    source="Variational Sequence-Level Soft Policy Optimization, arXiv:2602.10693",
    knobs=_RATIO - k.KEEP,
    own={name: k.parse_number for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
    surrogate=Surrogate.VESPO,
    k_pos=2.0,
    lambda_pos=3.0,
    k_neg=3.0,
    lambda_neg=2.0,
    token_clip=_TOKEN_CLAMP,
    log_w_clamp=(math.log(1e-8), 20.0),
    log_ratio_clamp=_TOKEN_CLAMP,
)
add_entry(
    "topr",
    formula="-A*logp if A > 0 else -A*sg[clip(rho, 0, 1)]*logp, rho = exp(logp - logp_rollout)",
    gradient="-A if A > 0 else -A*clip(rho, 0, 1)",
    source="Le Roux et al., Tapered Off-Policy REINFORCE, arXiv:2503.14286, eq. 8",
    knobs=_BAND,
    anchor=Anchor.ROLLOUT,
    surrogate=Surrogate.TOPR,
    clip_low=0.0,
    clip_high=1.0,
    log_ratio_clamp=_TOKEN_CLAMP,
)
add_entry(
    "dro",
    formula="-(A*logp - beta/2*d^2), d = logp - logp_old",
    gradient="-A + beta*d",
    source="Richemond et al., Direct Reward Optimisation, arXiv:2405.19107; the squared log-ratio of Kimi k1.5, "
    "arXiv:2501.12599",
    knobs=_COMMON | {"anchor"},
    own={"beta": k.parse_beta},
    required=frozenset({"beta"}),
    surrogate=Surrogate.REINFORCE,
    log_ratio_clamp=_TOKEN_CLAMP,
    penalty_coef=0.1,
)
add_entry(
    "ipo",
    formula="-A*r*K + kl_tau*(logp - logp_rollout)^2, r = exp(logp - logp_rollout), K as in dppo_tv",
    gradient="-A*r*K + 2*kl_tau*(logp - logp_rollout)",
    source="prime-rl's default loss; DPPO's mask, arXiv:2602.04879, with Kimi k1.5's penalty, arXiv:2501.12599",
    knobs=_RATIO,
    own={"delta": k.parse_delta, "kl_tau": k.parse_kl_tau},
    surrogate=Surrogate.IMPORTANCE_RATIO,
    anchor=Anchor.ROLLOUT,
    keep=Keep.TV,
    keep_directional=True,
    keep_low=-0.2,
    keep_high=0.2,
    penalty_coef=2e-3,
    log_ratio_clamp=_TOKEN_CLAMP,
)
add_entry(
    "echo",
    formula=f"{_PPO}; + obs_coef*(-logp) on the tokens of obs_mask",
    source="ECHO, arXiv:2605.24517; rLLM's echo",
    knobs=_CLIP,
    obs_coef=0.05,
    **_band02,
    **{**_ppo, "gradient": f"{_PPO_GRADIENT}; -obs_coef on the tokens of obs_mask"},
)
add_entry(
    "reinforce_kl",
    formula="-sg[rho]*A*logp + bwd_kl_coef*KL(rollout||policy) + fwd_kl_coef*KL(policy||rollout), "
    "rho = exp(logp - logp_rollout); the KL terms as -logp and sg[rho*log rho]*logp, or with kl_approx as "
    "rho - 1 - log rho and rho*log rho - rho + 1",
    gradient="-rho*A + bwd_kl_coef*(-1, or rho - 1) + fwd_kl_coef*rho*log rho",
    source="rLLM's reinforce_kl; estimators of Schulman, Approximating KL Divergence (2020)",
    knobs=_BAND,
    own={
        "bwd_kl_coef": k.parse_as("kl_backward_coef"),
        "fwd_kl_coef": k.parse_as("kl_forward_coef"),
        "kl_approx": k.parse_kl_approx,
    },
    anchor=Anchor.ROLLOUT,
    kl_target=KLTarget.ROLLOUT,
    kl_backward=KLSampled.SCORE,
    kl_forward=KLSampled.SCORE,
    kl_log_ratio_clamp=_TOKEN_CLAMP,
    **_DETACHED,
)
_COV = "Cui et al., The Entropy Mechanism of RL for Reasoning Language Models, arXiv:2505.22617"
add_entry(
    "clip_cov",
    formula=f"{_PPO}; 0 on a random clip_cov_ratio of the tokens whose covariance (A - mean A)*(logp - mean logp) lies "
    "between clip_cov_lb and clip_cov_ub",
    gradient=f"{_PPO_GRADIENT}; 0 on the selected tokens",
    source=f"{_COV}, section 4.2",
    knobs=_BAND,
    own={
        "clip_cov_ratio": k.parse_as("select_ratio"),
        "clip_cov_lb": k.parse_as("select_low"),
        "clip_cov_ub": k.parse_as("select_high"),
    },
    surrogate=Surrogate.CLIPPED_RATIO,
    log_ratio_clamp=_TOKEN_CLAMP,
    selection=Selection.CLIP_COV,
    select_ratio=2e-4,
    select_low=1.0,
    select_high=5.0,
    **_band02,
)
add_entry(
    "kl_cov",
    formula="-A*r; + ppo_kl_coef*|logp - logp_old| on the kl_cov_ratio of the tokens with the largest covariance "
    "(A - mean A)*(logp - mean logp)",
    gradient="-A*r; + ppo_kl_coef*sgn(logp - logp_old) on the selected tokens",
    source=f"{_COV}, section 4.3",
    knobs=_RATIO,
    own={"kl_cov_ratio": k.parse_as("select_ratio"), "ppo_kl_coef": k.parse_as("select_coef")},
    surrogate=Surrogate.IMPORTANCE_RATIO,
    log_ratio_clamp=_TOKEN_CLAMP,
    selection=Selection.KL_COV,
    select_ratio=2e-4,
    select_coef=1.0,
)
