"""Forward and backward are captured in a CUDA graph and replayed on new inputs, to the bit."""

import pytest
import torch
from workloads import SIZES, WITHOUT_WAITING, assert_same_bits, make

pytestmark = pytest.mark.gpu


def captured(work):
    """(graph, the tensors that a replay fills), after the warm-up that PyTorch asks for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work.call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = work.call()
    return graph, results


@pytest.mark.parametrize("name", WITHOUT_WAITING)
def test_replay_on_new_inputs(name: str, gpu: torch.device):
    work = make(name, gpu, SIZES["cuda"])
    graph, results = captured(work)
    for seed in (1, 2, 0):
        fresh = make(name, gpu, SIZES["cuda"], seed=seed)
        want = fresh.call()
        work.refill(fresh)
        for result in results:
            result.fill_(7)  # what a replay leaves out would show
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(results, want, f"seed {seed}")


def test_two_graphs_side_by_side(gpu: torch.device):
    """Counters and scratch memory belong to a graph, not to the library."""
    works = [make("gspo", gpu, SIZES["cuda"], seed=seed) for seed in range(2)]
    want = [work.call() for work in works]
    graphs = [captured(work) for work in works]
    streams = [torch.cuda.Stream() for _ in works]
    torch.cuda.synchronize()
    for _ in range(10):
        for (graph, _), stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for (_, results), expected in zip(graphs, want, strict=True):
        assert_same_bits(results, expected)
