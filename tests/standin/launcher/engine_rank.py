"""One rank of the stand-in's engine: it loads, waits for all the others, and waits until the leader shuts it down.

What it writes while it loads is some of what TensorRT-LLM writes, in the form of its logger (tensorrt_llm/logger.py,
_torch/models/checkpoints/hf/weight_loader.py, _torch/pyexecutor/model_engine.py).
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

from mpi4py import MPI

READY = "ready"

_POLL_S = 0.02
"""MPI's own waiting takes a processor for each rank."""
_STEPS = (
    "Prefetching 641.30GB checkpoint files.",
    "Model init total -- 412.08s",
    "Creating CUDA graph instances for 34 batch sizes.",
)


@dataclass(frozen=True, kw_only=True)
class Load:
    """How it goes. Rank 0 tells the others."""

    seconds: float = 0.0
    hangs: int | None = None
    """The rank that gets no further than its first step."""


def run(load: Load, leader: Connection | None) -> None:
    """`leader` is rank 0's, to say that all have loaded and to hear when it is over."""
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


def log(rank: int, message: str) -> None:
    line = f"[{time.strftime('%m/%d/%Y-%H:%M:%S')}] [TRT-LLM] [RANK {rank}] [I] {message}\n"
    os.write(1, line.encode())  # at once, so that it stays in one piece


def _wait_for_all(world: MPI.Intracomm) -> None:
    barrier = world.Ibarrier()
    while not barrier.Test():
        time.sleep(_POLL_S)


def _wait_for_shutdown(leader: Connection) -> None:
    try:
        leader.recv()
    except EOFError:
        threading.Event().wait()  # the task has ended without a word
