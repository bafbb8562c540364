"""The suites: P1 (logits), P2 and P3 (hidden states), P4 (loss alone), P5 (static), P7 (accuracy), distillation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fusedpg import dispatch

from . import accuracy, bench_distill, bench_logits, bench_loss, bench_static, bench_trl, hidden_section, memory
from .report import Section, Target, broken, refusals, row_cells, speed_target
from .timing import Row, Tick, measure, ticks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LOGITS_ROWS, LOSS_ROWS = 9, 3
SUITES = ("logits", "hidden", "loss", "distill", "trl", "accuracy")
#: of the hidden suite, beside that of the other suites
SMALL_VOCAB = 32_768


@dataclass(frozen=True)
class Options:
    """What to measure."""

    suites: tuple[str, ...] = SUITES
    tokens: int = 1024
    vocab: int = 151_936
    width: int = 512
    loss_tokens: int = 1 << 20
    accuracy_rows: int = 16
    rounds: int = 9
    dtypes: tuple[str, ...] = ("fp32", "bf16")
    accuracy_dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")
    device: str = "cpu"
    compiled: bool = True

    @property
    def heads(self) -> list[tuple[int, int]]:
        """(tokens, vocabulary) of the hidden suite: half the tokens at a large vocabulary."""
        small = min(SMALL_VOCAB, self.vocab)
        large = [(max(1, self.tokens // 2), self.vocab)] if self.vocab > small else []
        return [(self.tokens, small), *large]

    @property
    def hidden_rounds(self) -> int:
        """A run of the hidden suite takes seconds."""
        return max(1, self.rounds // 3)


def total_ticks(options: Options) -> int:
    """How often `run` calls its `tick`."""
    skipped = 0 if options.compiled else 1
    total = 0
    if "logits" in options.suites:
        total += len(options.dtypes) * ticks(LOGITS_ROWS - skipped, options.rounds)
    if "hidden" in options.suites:
        device = torch.device(options.device)
        counts = (hidden_section.count(DTYPES[name], device, options.hidden_rounds) for name in options.dtypes)
        total += len(options.heads) * sum(counts)
    if "loss" in options.suites:
        total += ticks(LOSS_ROWS - skipped, 3 * options.rounds)
    if "distill" in options.suites:
        rows = 2 + (bench_distill.liger_refusal(torch.device(options.device)) is None)
        total += len(options.dtypes) * len(bench_distill.DIVERGENCES) * ticks(rows, options.rounds)
    if "trl" in options.suites:
        total += bench_trl.count(options.rounds)
    if "accuracy" in options.suites:
        total += accuracy.cases(tuple(DTYPES[name] for name in options.accuracy_dtypes))
    if "static" in options.suites:
        total += bench_static.count(options.vocab)
    return total


def run(options: Options, tick: Tick = lambda what: None) -> Iterator[Section]:
    """The sections of every chosen suite, each as soon as it is measured."""
    device = torch.device(options.device)
    if "logits" in options.suites:
        for name in options.dtypes:
            yield logits_section(options, name, device, tick)
    if "hidden" in options.suites:
        for name in options.dtypes:
            for tokens, vocab in options.heads:
                shape, rounds = (tokens, vocab, options.width), options.hidden_rounds
                yield hidden_section.section(*shape, DTYPES[name], name, rounds, device, tick)
    if "loss" in options.suites:
        yield loss_section(options, device, tick)
    if "distill" in options.suites:
        for name in options.dtypes:
            for divergence in bench_distill.DIVERGENCES:
                yield distill_section(options, name, divergence, device, tick)
    if "trl" in options.suites:
        table = bench_trl.section(options.vocab, options.rounds, tick)
        if table is not None:
            yield table
    if "accuracy" in options.suites:
        yield accuracy_section(options, device, tick)
    if "static" in options.suites:
        yield from bench_static.sections(options.vocab, tick)


def logits_section(options: Options, dtype: str, device: torch.device, tick: Tick) -> Section:
    """P1 for one dtype."""
    problem = bench_logits.make_problem(options.tokens, options.vocab, DTYPES[dtype], device)
    contenders = bench_logits.contenders(problem, options.compiled)
    rows = measure(contenders, problem.prepare, options.rounds, device, tick)
    by_name = {row.name: row for row in rows}
    ours = by_name[bench_logits.INPLACE]
    logits_bytes = problem.bytes // 2
    return Section(
        title=f"P1: policy loss and gradient from logits, {dtype}, N = {options.tokens}, V = {options.vocab}",
        columns=["what", "median ms", "min ms", "GB/s (1R+1W)", "time / in place", "extra MB", "error loss / grad"],
        cells=[row_cells(row, ours, problem.bytes) for row in rows],
        targets=_logits_targets(by_name, ours, logits_bytes),
        notes=[
            f"{options.rounds} rounds interleaved in one process, inputs restored before each run outside its time; "
            f"every row active; the logits are {logits_bytes / 1e6:.0f} MB; GB/s counts one read and one write of them",
            f"extra memory: {memory.HOW[device.type]}",
            *refusals(rows),
        ],
        record=_record(rows, "P1", options, dtype=dtype, device=device, bytes=problem.bytes),
        broken=broken(rows),
    )


def _logits_targets(rows: dict[str, Row], ours: Row, logits_bytes: int) -> list[Target]:
    result = [
        speed_target(f"in place against {name}", rows.get(name), ours, bound) for name, bound in bench_logits.TARGETS
    ]
    copied, multiplied = (rows[name] for name in bench_logits.COPIES)
    value, also = None, ""
    if ours.samples:
        value = ours.median / copied.median
        also = (
            f"of minima {ours.best / copied.best:.3g}x; against '{multiplied.name}', which reads no second buffer, "
            f"{ours.median / multiplied.median:.3g}x"
        )
    copy = Target("in place / a copy of the same bytes", value, bench_logits.COPY_TARGET, at_least=False, also=also)
    extra = None if ours.peak_bytes is None else 100 * ours.peak_bytes / logits_bytes
    bound = 100 * bench_logits.MEMORY_TARGET
    return [*result, copy, Target("in place, extra memory / logits", extra, bound, at_least=False, unit="%")]


def loss_section(options: Options, device: torch.device, tick: Tick) -> Section:
    """P4."""
    tokens = bench_loss.make_tokens(options.loss_tokens, device)
    contenders = bench_loss.contenders(tokens, options.compiled)
    rows = measure(contenders, lambda: None, 3 * options.rounds, device, tick)
    by_name = {row.name: row for row in rows}
    ours = by_name[bench_loss.OURS]
    selected = 100 * tokens.mask.float().mean().item()
    return Section(
        title=f"P4: policy loss and gradient from log-probs with metrics, fp32, {tokens.logp.numel()} tokens",
        columns=["what", "median ms", "min ms", "time / fusedpg", "extra MB", "error loss / grad"],
        cells=[row_cells(row, ours) for row in rows],
        targets=[speed_target(f"against {name}", by_name.get(name), ours, bound) for name, bound in bench_loss.TARGETS],
        notes=[
            f"shape {tuple(tokens.logp.shape)}, {selected:.0f} % of the places selected; "
            "verl computes its clip fraction and approximate KL, fusedpg its full metric vector",
            *refusals(rows),
        ],
        record=_record(rows, "P4", options, dtype="fp32", device=device),
        broken=broken(rows),
    )


def distill_section(options: Options, dtype: str, divergence: str, device: torch.device, tick: Tick) -> Section:
    """One divergence in one dtype, a quarter of P1's tokens: eager PyTorch holds ten matrices of the logits' size."""
    tokens = max(1, options.tokens // 4)
    problem = bench_distill.make_problem(tokens, options.vocab, DTYPES[dtype], device, divergence)
    rows = measure(bench_distill.contenders(problem), lambda: None, options.rounds, device, tick)
    by_name = {row.name: row for row in rows}
    ours = by_name[bench_distill.OURS]
    refusal = bench_distill.liger_refusal(device)
    return Section(
        title=f"Distillation, {divergence} and its gradient, {dtype}, N = {tokens}, V = {options.vocab}",
        columns=["what", "median ms", "min ms", "GB/s (2R+1W)", "time / fusedpg", "extra MB", "error loss / grad"],
        cells=[row_cells(row, ours, problem.bytes) for row in rows],
        targets=[speed_target("against torch eager", by_name[bench_distill.EAGER], ours, bench_distill.TARGET)],
        notes=[
            f"student and teacher logits of {problem.bytes / 3e6:.0f} MB each; the extra memory holds the gradient",
            *([refusal] if refusal else []),
            *refusals(rows),
        ],
        record=_record(rows, "distill", options, dtype=dtype, device=device, divergence=divergence, tokens=tokens),
        broken=broken(rows),
    )


def accuracy_section(options: Options, device: torch.device, tick: Tick) -> Section:
    """P7."""
    results = []
    chosen = tuple(DTYPES[name] for name in options.accuracy_dtypes)
    for result in accuracy.measure(options.accuracy_rows, options.vocab, device, chosen):
        results.append(result)
        tick(f"{result.dtype} {result.offset:g}")
    worst_logp = max(result.logp for result in results)
    worst_grad = max(result.grad for result in results)
    return Section(
        title=f"P7: errors against fp64 of the same stored logits, {options.accuracy_rows} rows, V = {options.vocab}",
        columns=["dtype", "offset", "logp error", "gradient error", "torch eager logp", "torch eager gradient"],
        cells=[
            [r.dtype, f"{r.offset:g}", f"{r.logp:.1e}", f"{r.grad:.2f}", f"{r.eager_logp:.1e}", f"{r.eager_grad:.2f}"]
            for r in results
        ],
        targets=[
            Target("logp error", worst_logp, accuracy.LOGP_TARGET, at_least=False, unit=""),
            Target("gradient error", worst_grad, accuracy.GRAD_TARGET, at_least=False, unit=" roundings"),
        ],
        notes=[
            "logp: relative to max(1, |logp|); gradient: in roundings (half a unit in the last place) of the storage "
            "dtype at the row's largest gradient; targets are random tokens except the most likely one; offsets "
            "that fp16 cannot store are left out",
        ],
        record={"suite": "P7", "vocab": options.vocab, "results": [r.to_json() for r in results]},
    )


def _record(rows: list[Row], suite: str, options: Options, **more: object) -> dict[str, object]:
    device = more.pop("device")
    assert isinstance(device, torch.device)
    dtype = DTYPES[str(more["dtype"])]
    backend = dispatch.resolve("auto", device, dtype)
    shape = {"tokens": options.loss_tokens} if suite == "P4" else {"tokens": options.tokens, "vocab": options.vocab}
    return {"suite": suite, **shape, **more, "backend": backend, "rows": [row.to_json() for row in rows]}
