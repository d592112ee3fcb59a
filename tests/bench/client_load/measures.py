"""Samples -> measures. No I/O."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One run of one contender, as its own process saw it."""

    num_requests: int
    num_chunks: int
    """With text."""
    wall_s: float
    cpu_s: float
    """Of the whole process, all threads, from the first request after the warm-up to the last answer."""
    num_threads: int
    """Alive at the end."""
    others_cpu_s: float = 0.0
    """What the machine's processors did meanwhile for neither the client nor the server."""


@dataclass(frozen=True, kw_only=True)
class Measures:
    """Of one run, or the medians of several."""

    requests_per_s: float
    chunks_per_request: float
    cpu_ms_per_request: float
    cpu_ms_per_1000_chunks: float
    cores: float
    """CPU time over wall time."""
    others: float
    """The same of everything that is neither client nor server."""


def measure(sample: Sample) -> Measures:
    return Measures(
        requests_per_s=sample.num_requests / sample.wall_s,
        chunks_per_request=sample.num_chunks / sample.num_requests,
        cpu_ms_per_request=sample.cpu_s * 1e3 / sample.num_requests,
        cpu_ms_per_1000_chunks=sample.cpu_s * 1e6 / sample.num_chunks if sample.num_chunks else math.nan,
        cores=sample.cpu_s / sample.wall_s,
        others=sample.others_cpu_s / sample.wall_s,
    )


def medians(measured: Sequence[Measures]) -> Measures:
    """Field by field."""
    return Measures(
        **{each.name: statistics.median(getattr(one, each.name) for one in measured) for each in fields(Measures)}
    )
