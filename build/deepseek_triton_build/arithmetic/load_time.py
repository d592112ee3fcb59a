"""How long a start may take. Scripts, probes and deployment forms set their deadlines by it."""

from __future__ import annotations

import math

ASSUMED_RATE = 200 * 10**6
"""Bytes a second that weights are assumed to be read at. Users report an hour for the first load of 640 GB, which is
180 MB/s (NVIDIA/TensorRT-LLM#3879, sgl-project/sglang#3825). A late deadline costs nothing while all is well."""
ENGINE_START_S = 1800
"""Seconds to compile kernels and capture CUDA graphs after the weights are loaded. An assumption."""
SMALL_READY_WITHIN_S = 600
"""Seconds for the embedded engines, whose models are small: Python and its packages take seconds. An assumption."""


def load_s(size: int, rate: int | None = None) -> int:
    """Return the whole seconds to read `size` bytes at `rate` bytes a second, ASSUMED_RATE when it is not given."""
    return math.ceil(size / (rate or ASSUMED_RATE))


def ready_within_s(size: int, rate: int | None = None) -> int:
    """Return the seconds, whole minutes, within which a server with `size` bytes of weights has to be ready."""
    return 60 * math.ceil((load_s(size, rate) + ENGINE_START_S) / 60)
