"""One rank of the stand-in's engine: it loads, waits for all other ranks, and waits until the leader shuts it down.

While it loads it writes some of TensorRT-LLM's log lines, in the form of its logger (tensorrt_llm/logger.py,
_torch/models/checkpoints/hf/weight_loader.py, _torch/pyexecutor/model_engine.py).
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass

from mpi4py import MPI

READY = "ready"

_POLL_S = 0.02
"""Pause between polls: MPI's own waiting would keep a processor busy for each rank."""
_STEPS = (
    "Prefetching 641.30GB checkpoint files.",
    "Model init total -- 412.08s",
    "Creating CUDA graph instances for 34 batch sizes.",
)


@dataclass(frozen=True, kw_only=True)
class Load:
    """Options of a load, which rank 0 sends to the others."""

    seconds: float = 0.0
    hangs: int | None = None
    """Rank that hangs in its first step; None for none."""


def run(load, leader):
    """Load. Only rank 0 has `leader`, to report that all ranks have loaded and to wait for the shutdown."""
    world = MPI.COMM_WORLD
    for number, step in enumerate(_STEPS):
        log(world.rank, step)
        while number == 0 and load.hangs == world.rank:
            time.sleep(_POLL_S)
        time.sleep(load.seconds / len(_STEPS))
    _wait_for_all(world)
    if leader is not None:
        leader.send(READY)
        _wait_for_shutdown(leader)
    _wait_for_all(world)


def log(rank, message):
    line = f"[{time.strftime('%m/%d/%Y-%H:%M:%S')}] [TRT-LLM] [RANK {rank}] [I] {message}\n"
    os.write(1, line.encode())  # one write, so that the line stays whole


def _wait_for_all(world):
    barrier = world.Ibarrier()
    while not barrier.Test():
        time.sleep(_POLL_S)


def _wait_for_shutdown(leader):
    try:
        leader.recv()
    except EOFError:
        threading.Event().wait()  # the task has ended without a shutdown
