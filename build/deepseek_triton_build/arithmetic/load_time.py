"""How long a start may take: by it scripts, probes and forms set their deadlines."""

from __future__ import annotations

import math

ASSUMED_RATE = 200 * 10**6
"""Bytes a second: the hour that users report for the first load of 640 GB (NVIDIA/TensorRT-LLM#3879, sgl-project/
sglang#3825) is 180 MB/s. A deadline that is too late costs nothing while all is well."""
ENGINE_START_S = 1800
"""For kernels to be compiled and CUDA graphs captured after the weights are there. An assumption."""
SMALL_READY_WITHIN_S = 600
"""For the engines on the spot, whose models are small: Python and its packages take seconds. An assumption."""


def load_s(size: int, rate: int | None = None) -> int:
    """Whole seconds to read `size` bytes at `rate` bytes a second; at ASSUMED_RATE unless given."""
    return math.ceil(size / (rate or ASSUMED_RATE))


def ready_within_s(size: int, rate: int | None = None) -> int:
    """Seconds, rounded up to a minute, in which a server with `size` bytes of weights must have become ready."""
    return 60 * math.ceil((load_s(size, rate) + ENGINE_START_S) / 60)
