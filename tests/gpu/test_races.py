"""The same inputs give the same bits: many times over, under load, and from several streams at once."""

import pytest
import torch
from workloads import NAMES, SIZES, Size, assert_same_bits, make

TIMES = {"cuda": 50, "cpu": 2}
STREAMS = 4


class Load:
    """Products on a stream of their own that keep the GPU busy beside what is tested."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.a, self.b = (torch.randn(2048, 2048, device=device, dtype=torch.bfloat16) for _ in range(2))
        self.stream.wait_stream(torch.cuda.current_stream(device))

    def more(self) -> None:
        with torch.cuda.stream(self.stream):
            for _ in range(4):
                torch.mm(self.a, self.b)


@pytest.mark.parametrize("name", NAMES)
def test_repeated_calls_under_load(name: str, device: torch.device):
    work = make(name, device, SIZES[device.type])
    load = Load(device) if device.type == "cuda" else None
    want = work.call()
    for number in range(TIMES[device.type]):
        if load is not None:
            load.more()
        assert_same_bits(work.call(), want, f"call {number}")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_few_rows_of_a_split_vocabulary(rows: int, gpu: torch.device):
    """Partial results of one row come from several programs, in any order."""
    work = make("logprobs", gpu, Size(1, rows, 151_936))
    want = work.call()
    for number in range(TIMES["cuda"]):
        assert_same_bits(work.call(), want, f"call {number}")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
@pytest.mark.parametrize("sequences", [1, 7, 300])
def test_the_last_row_of_a_sequence(name: str, sequences: int, gpu: torch.device):
    """Whichever row of a sequence arrives last computes what its tokens share."""
    work = make(name, gpu, Size(sequences, 2100 // sequences, 4099))
    want = work.call()
    for number in range(TIMES["cuda"]):
        assert_same_bits(work.call(), want, f"call {number}")


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_streams_at_once(name: str, gpu: torch.device):
    """Calls that overlap share no scratch memory."""
    works = [make(name, gpu, SIZES["cuda"], seed=seed) for seed in range(STREAMS)]
    want = [work.call() for work in works]
    streams = [torch.cuda.Stream(gpu) for _ in works]
    torch.cuda.synchronize(gpu)
    for _ in range(5):
        got = []
        for work, stream in zip(works, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(work.call())
        torch.cuda.synchronize(gpu)
        for number, results in enumerate(got):
            assert_same_bits(results, want[number], f"stream {number}")
