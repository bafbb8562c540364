"""A function on two gloo processes of their own, with the environment that launchers set."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

WORLD = 2


def on_each(function: Callable[..., Any], *arguments: Any, seconds: float = 240) -> list[Any]:
    """What `function(rank, *arguments)` returns on each rank; a hang or an error there fails here."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [
        context.Process(target=_run, args=(rank, port, results, function, arguments), daemon=True)
        for rank in range(WORLD)
    ]
    for worker in workers:
        worker.start()
    try:
        found = {rank: (value, error) for rank, value, error in (results.get(timeout=seconds) for _ in workers)}
    finally:
        for worker in workers:
            worker.join(timeout=20)
            worker.kill()
    for _, error in found.values():
        assert error is None, error
    return [found[rank][0] for rank in range(WORLD)]


def _run(rank: int, port: int, results: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    world = {"WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD)}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), **world, **address}
    import torch.distributed as dist

    try:
        results.put((rank, function(rank, *arguments), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
