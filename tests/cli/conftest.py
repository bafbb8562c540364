"""Command line tests use one thread: their tensors are tiny and xdist runs several tests at once."""

import gc

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def quick_collections():
    """A memory measurement collects garbage first: not all of what pytest and the trainers have loaded, every time."""
    gc.freeze()
    yield
    gc.unfreeze()
