"""`python -m fusedpg losses`: the catalogue as a table, one entry in full, and the documentation page made from it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..losses import ALIASES, ENTRIES, LossEntry
from ..presets import trainers_of
from ..spec import INF, LossSpec

#: fields that say what a loss is made of rather than a bound of it
_PLAIN = ("name", "surrogate")


def settings(spec: LossSpec) -> dict[str, Any]:
    """The fields in which a spec differs from a bare loss, enum members by name."""
    bare = {f.name: f.default for f in fields(LossSpec)}
    own = {f.name: getattr(spec, f.name) for f in fields(LossSpec) if f.name not in _PLAIN}
    return {name: _text(value) for name, value in own.items() if value != bare[name]}


def _text(value: Any) -> Any:
    if hasattr(value, "name"):
        return value.name.lower()
    if isinstance(value, tuple):
        return "(" + ", ".join(_text(v) for v in value) + ")"
    if isinstance(value, float):
        return "none" if abs(value) == INF else f"{value:.6g}"
    return str(value)


def needs(spec: LossSpec) -> list[str]:
    """What a call must bring besides log-probs, advantages and the mask."""
    named = {
        "logp_ref": spec.needs_logp_ref,
        "logp_rollout": spec.needs_logp_rollout,
        "obs_mask": spec.obs_coef != 0,
        "sequences": spec.needs_sequences,
    }
    return [name for name, wanted in named.items() if wanted]


def passes(spec: LossSpec) -> str:
    """How often the vocabulary-sized data is read and written."""
    if spec.batch_global:
        return "2 reads, 1 write (needs every logp)"
    return "2 reads, 1 write" if spec.needs_segments else "1 read, 1 write"


def names_in_trainers(name: str) -> str:
    """`verl vanilla, rllm ppo_clip` for everything that runs an entry."""
    return ", ".join(f"{trainer} {loss}" for trainer, loss in trainers_of(name))


def show_table(console: Console) -> None:
    """One line an entry."""
    table = Table(
        "loss", "x per token (minimised)", "reduction", "trainers", title="fusedpg catalogue", show_lines=True
    )
    for name, entry in ENTRIES.items():
        table.add_row(name, escape(entry.formula), entry.spec.reduction, names_in_trainers(name))
    console.print(table, highlight=False)
    console.print("python -m fusedpg losses NAME shows one entry in full", highlight=False)


def show_entry(console: Console, name: str) -> None:
    """One entry in full."""
    table = Table(show_header=False, title=name, title_justify="left")
    for key, value in entry_rows(name, ENTRIES[ALIASES.get(name, name)]):
        table.add_row(key, escape(value))
    console.print(table, highlight=False)


def knobs_with_defaults(entry: LossEntry) -> list[str]:
    """`knob=default` for everything that `loss_spec` takes for a loss; a knob without a default says so."""
    spec = entry.spec
    low, high = entry.band({"epsilon_low": 0.0, "epsilon_high": 0.0}), spec.token_clip
    distances = {
        "epsilon_low": -high[0] if "token_clip" in low else 1.0 - spec.clip_low,
        "epsilon_high": high[1] if "token_clip" in low else spec.clip_high - 1.0,
    }
    texts = []
    for knob in sorted(entry.knobs):
        if knob in entry.required:
            texts.append(f"{knob} (required)")
        elif knob in entry.own:
            texts.append(f"{knob}={_own_default(entry, knob)}")
        elif knob == "is_missing":
            texts.append(f"{knob}={'one' if spec.is_missing_one else 'nan'}")
        elif "token_clip" in low and knob in ("clip_low", "clip_high"):
            continue  # a loss that clips the log-ratio has no bound of the ratio
        else:
            texts.append(f"{knob}={_text(distances.get(knob, getattr(spec, knob, None)))}")
    return texts


def _own_default(entry: LossEntry, knob: str) -> str:
    """The default of a knob that has another name in the `LossSpec`."""
    try:
        fields_of = entry.own[knob](knob, 1.0)
    except ValueError:  # a switch
        return str(any(getattr(entry.spec, field) != off for field, off in entry.own[knob](knob, False).items()))
    field, one = list(fields_of.items())[-1]
    value = getattr(entry.spec, field)
    return str(_text(value / one if isinstance(one, float) and isinstance(value, float) else value))


def entry_rows(name: str, entry: LossEntry) -> list[tuple[str, str]]:
    """What there is to say of one loss, name and value."""
    spec = entry.spec
    defaults = ", ".join(f"{key} {value}" for key, value in settings(spec).items())
    aliases = ", ".join(alias for alias, target in ALIASES.items() if target == spec.name)
    rows = [
        ("x per token", entry.formula),
        ("gradient to logp", entry.gradient),
        ("defaults", defaults),
        ("needs", ", ".join(needs(spec)) or "nothing more"),
        ("vocabulary", passes(spec)),
        ("knobs", ", ".join(knobs_with_defaults(entry))),
        ("source", entry.source),
        ("trainers", names_in_trainers(spec.name) or "none"),
    ]
    if aliases:
        rows.insert(0, ("also called", aliases))
    return rows


def markdown() -> str:
    """The catalogue page of the documentation."""
    lines = [
        "# The catalogue",
        "",
        "Made by `python -m fusedpg losses --markdown`. `x` is the loss of one token, minimised; `r` the importance",
        "ratio, `A` the advantage, `sg` a value without gradient. Every loss runs on the backends `reference`, `cpu`",
        "and `triton`, and takes KL terms, an entropy bonus, rollout corrections and any reduction through its knobs.",
        "",
        "| loss | x per token | reduction | source |",
        "|---|---|---|---|",
    ]
    cell = lambda text: text.replace("|", "\\|")  # noqa: E731
    for name, entry in ENTRIES.items():
        link = f"[`{name}`](#{name})"
        lines.append(f"| {link} | {cell(entry.formula)} | {entry.spec.reduction} | {cell(entry.source)} |")
    for name, entry in ENTRIES.items():
        lines += ["", f"## {name}", "", "| | |", "|---|---|"]
        lines += [f"| {key} | {cell(value)} |" for key, value in entry_rows(name, entry)]
    return "\n".join(lines) + "\n"
