"""The README's plot and table, from a benchmark's report: `python docs/figures.py`.

The plot goes to docs/images, the table to standard output; a test holds both to the report.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "benchmarks" / "results" / "2026-11-30-cpu-epyc-2-threads.json"
PLOT = ROOT / "docs" / "images" / "against-rivals.svg"

#: column of the plot -> (start of the sections' titles, their last words, row -> label; the first row is ours)
PANELS: dict[str, tuple[str, str, dict[str, str]]] = {
    "from logits": (
        "P1: policy loss",
        "N = 1024, V = 151936",
        {
            "fusedpg in place": "fusedpg, in place",
            "fusedpg out of place": "fusedpg, out of place",
            "torch.compile": "torch.compile",
            "torch eager": "PyTorch eager",
            "torch eager, TRL form": "PyTorch eager, as in TRL",
            "F.cross_entropy": "F.cross_entropy (another loss)",
        },
    ),
    "from hidden states": (
        "P2, P3: policy loss",
        "N = 512, V = 151936, D = 512",
        {
            "fusedpg": "fusedpg",
            "torch eager, all logits": "PyTorch eager",
            "TRL fused head": "TRL's fused head",
            "Liger chunked GRPO": "Liger, chunked GRPO",
            "Liger scaled CE and PPO": "Liger, scaled CE and PPO",
            "F.linear_cross_entropy": "F.linear_cross_entropy (another loss)",
        },
    ),
}
DTYPES = {"fp32": "#4c72b0", "bf16": "#dd8452"}

#: row of the table -> (start of the section's title, its rows for each column)
TABLE: dict[str, tuple[str, tuple[str | None, ...]]] = {
    "logits, 1,024 x 151,936": (
        "P1: policy loss and gradient from logits, fp32",
        ("fusedpg in place", "torch eager", "torch.compile", None),
    ),
    "hidden states, 512 x 512, V = 151,936": (
        "P2, P3: policy loss and gradients from hidden states, fp32, N = 512, V = 151936",
        ("fusedpg", "torch eager, all logits", None, "Liger chunked GRPO"),
    ),
    "log-probs, 1,048,576": (
        "P4:",
        ("fusedpg", "verl's function, eager", "verl's function, torch.compile", None),
    ),
    "student's and teacher's logits, 128 x 151,936": (
        "Distillation, reverse_kl and its gradient, fp32",
        ("fusedpg", "torch eager", None, None),
    ),
    "a TRL micro-batch of 8 x 64": ("TRL", ("FusedGRPOTrainer", None, None, "GRPOTrainer")),
}
OTHERS = {"Liger chunked GRPO": "Liger", "GRPOTrainer": "TRL"}


def rows_of(report: dict[str, Any], start: str, end: str = "") -> dict[str, dict[str, Any]]:
    """Name -> row of the one section whose title starts and ends so."""
    found = [s for s in report["sections"] if s["title"].startswith(start) and s["title"].endswith(end)]
    if len(found) != 1:
        raise ValueError(f"report: expected one section {start!r} ... {end!r}; got {len(found)}")
    return {row["name"]: row for row in found[0]["rows"]}


def bars(report: dict[str, Any], panel: str, dtype: str) -> list[tuple[str, float, float]]:
    """(label, time / ours, extra MB) of a panel's rows."""
    start, end, names = PANELS[panel]
    marker = "gradient" if "logits" in panel else "gradients"
    rows = rows_of(report, f"{start} and {marker} {panel}, {dtype}", end)
    ours = rows[next(iter(names))]["median_s"]
    return [(label, rows[n]["median_s"] / ours, rows[n]["peak_extra_bytes"] / 1e6) for n, label in names.items()]


def marks(report: dict[str, Any]) -> list[str]:
    """Every number that stands at a bar."""
    values = [bar for panel in PANELS for dtype in DTYPES for bar in bars(report, panel, dtype)]
    return [text for _, ratio, extra in values for text in (f"{ratio:.2g}x", f"{extra:,.0f} MB")]


def draw(report: dict[str, Any], path: Path) -> None:
    """Time and memory of every contender, one column a kind of input."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    # text stays text, and two runs write the same file
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "fusedpg", "font.size": 9})
    fig, axes = plt.subplots(2, len(PANELS), figsize=(11, 6), layout="constrained")
    for column, panel in enumerate(PANELS):
        for i, (dtype, color) in enumerate(DTYPES.items()):
            found = bars(report, panel, dtype)
            places = [row + 0.4 * (i - 0.5) for row in range(len(found))]
            for line, unit, label in ((0, "time / fusedpg", "{:.2g}x"), (1, "extra memory, MB", "{:,.0f} MB")):
                ax = axes[line, column]
                values = [bar[1 + line] for bar in found]
                drawn = ax.barh(places, values, 0.38, color=color, label=dtype)
                ax.bar_label(drawn, [label.format(v) for v in values], padding=3, fontsize=8)
                ax.set_yticks(range(len(found)), [bar[0] for bar in found])
                ax.set_xlabel(unit)
                ax.margins(x=0.15)
        for ax in axes[:, column]:
            ax.invert_yaxis()
            ax.spines[["top", "right"]].set_visible(False)
        axes[0, column].axvline(1, color="0.5", linewidth=0.8, linestyle=":")
        axes[0, column].set_title(f"policy loss and gradient {panel}\n{PANELS[panel][1]}")
    axes[0, 0].legend(loc="lower right", frameon=False)
    machine = report["machine"]
    title = f"{machine['cpu']}, {machine['threads']} threads, PyTorch {machine['torch']}; shorter is better"
    fig.suptitle(title, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, metadata={"Date": None})
    plt.close(fig)


def table(report: dict[str, Any]) -> str:
    """The README's table."""
    lines = ["| loss and gradient from | fusedpg | PyTorch eager | torch.compile | others |", "|---|--:|--:|--:|--:|"]
    for what, (start, names) in TABLE.items():
        rows = rows_of(report, start)
        lines.append(f"| {what} | {' | '.join(_cell(rows, name) for name in names)} |")
    return "\n".join(lines) + "\n"


def _cell(rows: dict[str, dict[str, Any]], name: str | None) -> str:
    if name is None:
        return "-"
    ms, extra = 1e3 * rows[name]["median_s"], rows[name]["peak_extra_bytes"] / 1e6
    text = f"{ms:,.0f} ms, {extra:,.0f} MB" if ms >= 100 else f"{ms:.3g} ms, {extra:,.0f} MB"
    return f"{OTHERS[name]} {text}" if name in OTHERS else text


if __name__ == "__main__":
    measured = json.loads(REPORT.read_text())
    draw(measured, PLOT)
    print(table(measured), end="")
