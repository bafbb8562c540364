"""Launch shapes: block sizes, warps, grids. Nothing here depends on N or V, so one compilation serves every shape."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fusedpg.spec import Divergence

# which optional tensors a launch really has, one bit each: a missing one costs no compilation of its own
HAS_W = 1
HAS_ROW_TEMPERATURE = 2
HAS_SCALE = 4
HAS_LOGP_OLD = 8
HAS_LOGP_REF = 16
HAS_LOGP_ROLLOUT = 32
HAS_IS_WEIGHTS = 64
HAS_ENTROPY = 128
HAS_OBS_WEIGHTS = 256
HAS_SELECTED = 512
HAS_SEGMENTS = 1024

#: Arguments that are never specialised: every integer (N, V, strides may be anything) and every per-token tensor (a
#: view at an odd address must not recompile). The logits and their gradient are: their alignment decides load widths.
RUNTIME = [
    *("T", "V", "N", "S", "stride_b", "stride_t", "out_stride_b", "out_stride_t", "shift", "out_shift"),
    *("given", "chunks", "blocks", "target_ptr", "w_ptr", "scale_ptr", "row_temperature_ptr", "spec_ptr", "adv_ptr"),
    *("logp_old_ptr", "logp_ref_ptr", "logp_rollout_ptr", "is_weights_ptr", "obs_weights_ptr", "selected_ptr"),
    *("cu_ptr", "logp_ptr", "entropy_ptr", "row_max_ptr", "log_sum_ptr", "c_ptr", "e_ptr", "z_ptr", "adjoint_ptr"),
    *("factor_ptr", "counter_ptr", "per_token_ptr", "part_max_ptr", "part_sum_ptr", "part_entropy_ptr"),
    *("partial_ptr", "sums_ptr", "y_stride_b", "y_stride_t", "y_shift", "value_ptr"),
    *("student_entropy_ptr", "teacher_entropy_ptr"),
]


@dataclass(frozen=True)
class Shape:
    """Tile of a kernel: `block` elements a loop step, `threads` in a program, `chunk` columns reduced as one unit.

    `programs` of a vocabulary kernel shall fit a multiprocessor: what caps its registers.
    """

    block: int
    threads: int
    chunk: int = 0
    programs: int = 2


# Every vocabulary kernel shares one shape: a row then has the same bits whichever kernel reads it. 512 threads and two
# 128-bit loads a thread keep about 32 KB in flight on an SM with two programs, and two rows a multiprocessor in L2.
VOCABULARY = Shape(block=8192, threads=512, chunk=32768)
TOKENS = Shape(block=256, threads=256)
SEQUENCE = Shape(block=512, threads=512)
# Two rows at a time and a state of seven numbers a group: half the columns a thread keep it in registers.
PAIRS = Shape(block=2048, threads=256, chunk=32768, programs=3)
FINISH = Shape(block=64, threads=256)

_REGISTERS = 65536  # 32-bit registers of an NVIDIA multiprocessor

#: Rows below which a row is split over programs; None: the device's multiprocessor count.
SPLIT_BELOW: int | None = None
_INTERPRETER_MULTIPROCESSORS = 4


@functools.cache
def _device_numbers(device: torch.device) -> tuple[int, int]:
    """(multiprocessors, threads in a warp)."""
    if device.type == "cpu":
        return _INTERPRETER_MULTIPROCESSORS, 32
    properties = torch.get_device_module(device.type).get_device_properties(device)
    count = getattr(properties, "multi_processor_count", None) or getattr(properties, "gpu_subslice_count", 64)
    return int(count), int(getattr(properties, "warp_size", 32))


def options(shape: Shape, device: torch.device, constants: dict[str, Any] | None = None) -> dict[str, Any]:
    """Compile options of a launch on `device`."""
    backend = "hip" if torch.version.hip else device.type
    return target_options(shape, backend, _device_numbers(device)[1], constants or {})


def target_options(shape: Shape, backend: str, warp_size: int, constants: dict[str, Any]) -> dict[str, Any]:
    """Compile options for a target. Fused multiply-adds are written out where wanted: the compiler adds none."""
    chosen: dict[str, Any] = {"num_warps": shape.threads // warp_size, "enable_fp_fusion": False}
    if backend == "cuda" and shape.chunk:
        # Without a cap ptxas spills to fit more programs than it is worth. Two of 512 threads fit in 64 registers a
        # thread; the soft cap's tanh needs more. tests/triton/test_aot.py holds every variant to zero spills.
        programs = 1 if constants.get("SOFTCAP") else shape.programs
        chosen["maxnreg"] = _REGISTERS // (shape.threads * programs)
    return chosen


def split_rows(rows: int, chunks: int, device: torch.device) -> bool:
    """Whether the rows are too few to fill the device with one program each."""
    limit = _device_numbers(device)[0] if SPLIT_BELOW is None else SPLIT_BELOW
    return chunks > 1 and rows < limit


def reachable_variants() -> Iterator[tuple[Any, dict[str, Any], Shape]]:
    """(kernel, constexpr arguments, shape) of everything that gpu.py can launch, once per logits dtype."""
    from . import distill, logprob, one_pass, rescale, segments, token_loss

    loop = {"BLOCK": VOCABULARY.block, "CHUNK": VOCABULARY.chunk}
    flags = [{"ENTROPY": e, "SOFTCAP": s} for e in (False, True) for s in (False, True)]
    for flag in flags:
        yield logprob.logprob_forward_kernel, {**loop, **flag}, VOCABULARY
        yield logprob.logprob_split_kernel, {**loop, **flag}, VOCABULARY
        yield logprob.logprob_combine_kernel, flag, VOCABULARY
        yield logprob.logprob_backward_kernel, {**loop, **flag}, VOCABULARY
        yield one_pass.one_pass_kernel, {**loop, **flag}, VOCABULARY
        yield one_pass.sequence_forward_kernel, {**loop, **flag, "TOKENS": SEQUENCE.block}, VOCABULARY
    for kind in Divergence:
        for grad in (False, True):
            yield distill.distill_kernel, {"BLOCK": PAIRS.block, "KIND": int(kind), "GRAD": grad}, PAIRS
    yield rescale.rescale_kernel, loop, VOCABULARY
    yield segments.segments_kernel, {"TOKENS": SEQUENCE.block}, SEQUENCE
    yield token_loss.token_block_kernel, {"BLOCK": TOKENS.block}, TOKENS
    yield token_loss.token_finish_kernel, {"BLOCK": FINISH.block}, FINISH
