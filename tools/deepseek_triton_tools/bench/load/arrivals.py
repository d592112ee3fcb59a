"""When the requests of an open loop are due."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from deepseek_triton_tools.bench.load.load_settings import LoadPoint
from deepseek_triton_tools.bench.workload.bench_request import Conversation
from deepseek_triton_tools.bench.workload.lazy_conversations import LazyConversations

_ENDLESS = 200_000
"""Conversations of a closed loop that goes on for a time: more than it will send, so that no prompt comes twice."""


def conversations_needed(point: LoadPoint) -> int:
    """Return how many conversations the point can send, warm-up included."""
    if point.duration_s is None or (point.rate is None and point.concurrency is None) or point.rate == math.inf:
        return point.num_warmup + point.num_requests
    if point.rate is None:
        return _ENDLESS
    mean = point.rate * point.duration_s
    return math.ceil(mean + 8 * math.sqrt(mean / point.burstiness)) + 50  # never too few, for all practical purposes


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
