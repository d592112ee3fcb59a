"""When the requests of an open loop are due."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from deepseek_triton_tools.bench.load.load_settings import LoadPoint
from deepseek_triton_tools.bench.workload.bench_request import Conversation
from deepseek_triton_tools.bench.workload.lazy_conversations import LazyConversations


def due_times(point: LoadPoint, conversations: Sequence[Conversation], seed: int) -> list[float] | None:
    """Return seconds after the start, ascending, one for each conversation; None for a closed loop.

    The gaps are gamma-distributed, as in `vllm bench serve`: with a burstiness of 1 the arrivals are a Poisson process.
    """
    if point.rate is None:
        if point.concurrency is not None:
            return None
        if isinstance(conversations, LazyConversations):  # their times need no prompt
            return [conversations.at_s(index) for index in range(len(conversations))]
        return [conversation[0].at_s or 0.0 for conversation in conversations]
    if math.isinf(point.rate):
        return [0.0] * len(conversations)
    gaps = np.random.default_rng(seed).gamma(
        point.burstiness, 1 / (point.rate * point.burstiness), size=len(conversations)
    )
    return [float(due) for due in np.cumsum(gaps)]
