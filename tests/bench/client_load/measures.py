"""Samples -> measures, and how they are shown. No I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from bench._harness import Measures, Table
from bench.client_load.cases import PAIRS, Case

TABLE = Table(
    (
        ("requests/s", "requests_per_s", ",.0f"),
        ("chunks/request", "chunks_per_request", ",.1f"),
        ("CPU ms/request", "cpu_ms_per_request", ",.3f"),
        ("CPU ms/1,000 chunks", "cpu_ms_per_1000_chunks", ",.1f"),
        ("cores", "cores", ".2f"),
        ("others", "others", ".2f"),
        ("CPU / raw", "cpu_over_raw", ".2f"),
    ),
    name_width=27,
)
LEGEND = (
    "chunks: responses with text; CPU: of the client's whole process; cores: that over wall time, and others: likewise "
    "what ran on the machine besides client and server, which is best near 0"
)


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


def measure(sample: Sample) -> dict[str, float]:
    return {
        "requests_per_s": sample.num_requests / sample.wall_s,
        "chunks_per_request": sample.num_chunks / sample.num_requests,
        "cpu_ms_per_request": sample.cpu_s * 1e3 / sample.num_requests,
        "cpu_ms_per_1000_chunks": sample.cpu_s * 1e6 / sample.num_chunks if sample.num_chunks else math.nan,
        "cores": sample.cpu_s / sample.wall_s,
        "others": sample.others_cpu_s / sample.wall_s,
    }


def beside_raw(case: Case, measured: Mapping[str, Measures]) -> dict[str, Measures]:
    """With CPU over that of the library by itself: per chunk of streams, per request of whole answers."""
    of = "cpu_ms_per_1000_chunks" if case.verb == "stream" else "cpu_ms_per_request"
    raw = {name: measured.get(library, {}).get(of, math.nan) for name, library in PAIRS}
    return {name: {**each, "cpu_over_raw": each[of] / raw.get(name, math.nan)} for name, each in measured.items()}
