"""What the samples of a run say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from bench.streams_load.cases import Case
from bench.streams_load.reading import OK, OUTCOMES

NONE = math.nan
"""For what a system has no number of."""


@dataclass(frozen=True, kw_only=True)
class Used:
    """By the processes of one run. Memory: all resident (rss) and neither file nor shared (anon), at most."""

    stub_cpu_s: float
    server_cpu_s: float
    client_cpu_s: float
    stub_mib: Mapping[str, float]
    server_mib: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Measures:
    """Of one run, or the medians of several and the most undelivered. Numbers only."""

    tokens_per_s: float = NONE
    """Delivered, from the first request to the last token."""
    total_s: float = NONE
    over_ideal: float = NONE
    """total_s in times of the ideal."""
    ttft_ms: float = NONE
    """Median over streams; the 99th percentile is the next."""
    ttft_p99_ms: float = NONE
    lag_ms: float = NONE
    """From a token's making to its arrival; median over tokens."""
    lag_p99_ms: float = NONE
    lag_max_ms: float = NONE
    chunks_min: float = NONE
    """Responses with text, of the stream with the fewest."""
    chunks_median: float = NONE
    live: float = NONE
    """Those of a stream that came before its last token was made; median over streams."""
    stub_cpu: float = NONE
    """CPU time, this and the next two: microseconds a token, which is milliseconds for a thousand."""
    server_cpu: float = NONE
    client_cpu: float = NONE
    stub_rss_mib: float = NONE
    stub_anon_mib: float = NONE
    server_rss_mib: float = NONE
    server_anon_mib: float = NONE
    undelivered: float = NONE
    """Streams that were lost, refused, short or wrong."""


def measure(case: Case, samples: Sequence[Path], used: Used) -> Measures:
    arrays = _load(samples)
    num_tokens = int(arrays["chunk_tokens"].sum())
    per_token = 1e6 / num_tokens if num_tokens else NONE
    begun, chunk_us = arrays["opened_us"].min(), arrays["chunk_us"]
    total_s = float(chunk_us.max() - begun) / 1e6 if len(chunk_us) else NONE
    ttft = _first_chunks(arrays) / 1e3
    lag = (arrays["stamp_arrival_us"] - arrays["stamp_us"]) / 1e3
    return Measures(
        tokens_per_s=num_tokens / total_s,
        total_s=total_s,
        over_ideal=total_s / case.ideal_s if case.ideal_s else NONE,
        ttft_ms=_percentile(ttft, 50),
        ttft_p99_ms=_percentile(ttft, 99),
        lag_ms=_percentile(lag, 50),
        lag_p99_ms=_percentile(lag, 99),
        lag_max_ms=_percentile(lag, 100),
        chunks_min=float(arrays["num_chunks"].min()),
        chunks_median=float(np.median(arrays["num_chunks"])),
        live=float(np.median(_live_chunks(arrays))),
        stub_cpu=used.stub_cpu_s * per_token,
        server_cpu=used.server_cpu_s * per_token,
        client_cpu=used.client_cpu_s * per_token,
        stub_rss_mib=used.stub_mib["rss"],
        stub_anon_mib=used.stub_mib["anon"],
        server_rss_mib=used.server_mib["rss"],
        server_anon_mib=used.server_mib["anon"],
        undelivered=float((arrays["outcome"] != OUTCOMES.index(OK)).sum()),
    )


def undelivered(samples: Sequence[Path]) -> list[str]:
    """A line for each way in which streams failed, with what the first such stream says."""
    arrays = _load(samples)
    lines = []
    for number, outcome in enumerate(OUTCOMES):
        (those,) = np.nonzero(arrays["outcome"] == number)
        if outcome != OK and len(those):
            lines.append(f"{len(those):,} streams {outcome}: {arrays['detail'][those[0]] or 'by their text'}")
    return lines


def medians(runs: Sequence[Measures]) -> Measures:
    """Of undelivered streams the most: a round without any makes up for none."""
    names = [field.name for field in fields(Measures)]
    found = {name: float(np.median([getattr(run, name) for run in runs])) for name in names}
    return Measures(**found | {"undelivered": float(np.max([run.undelivered for run in runs]))})


def _load(samples: Sequence[Path]) -> dict[str, npt.NDArray[Any]]:
    """The clients' arrays, one behind the other."""
    loaded = [dict(np.load(path)) for path in samples]
    return {name: np.concatenate([arrays[name] for arrays in loaded]) for name in loaded[0]}


def _first_chunks(arrays: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.float64]:
    """For each stream with text, from its request to its first text, in microseconds."""
    ends = np.cumsum(arrays["num_chunks"])
    some = arrays["num_chunks"] > 0
    first: npt.NDArray[np.float64] = arrays["chunk_us"][(ends - arrays["num_chunks"])[some]] - arrays["opened_us"][some]
    return first


def _live_chunks(arrays: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.float64]:
    """For each stream, how many chunks came before its last stamp; none where it has no stamp."""
    last_us = np.zeros(len(arrays["num_stamps"]), dtype=np.int64)
    some = arrays["num_stamps"] > 0
    last_us[some] = arrays["stamp_us"][np.cumsum(arrays["num_stamps"])[some] - 1]
    streams = np.repeat(np.arange(len(last_us)), arrays["num_chunks"])
    in_time = (arrays["chunk_us"] < last_us[streams]).astype(np.float64)
    return np.bincount(streams, weights=in_time, minlength=len(last_us)).astype(np.float64)


def _percentile(values: npt.NDArray[Any], percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else NONE
