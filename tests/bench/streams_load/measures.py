"""What the samples of a run say, and how it is shown."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from bench._harness import Table
from bench.streams_load.cases import Case
from bench.streams_load.reading import OK, OUTCOMES

Arrays = Mapping[str, npt.NDArray[Any]]

TABLE = Table(
    (
        ("tokens/s", "tokens_per_s", ",.0f"),
        ("total s", "total_s", ".2f"),
        ("x ideal", "over_ideal", ".3f"),
        ("TTFT ms", "ttft_ms", ",.1f"),
        ("p99", "ttft_p99_ms", ",.1f"),
        ("lag ms", "lag_ms", ",.2f"),
        ("p99", "lag_p99_ms", ",.1f"),
        ("max", "lag_max_ms", ",.1f"),
        ("chunks", "chunks_median", ",.0f"),
        ("least", "chunks_min", ",.0f"),
        ("live", "live", ",.0f"),
        ("stub us", "stub_cpu", ",.1f"),
        ("server", "server_cpu", ",.1f"),
        ("clients", "client_cpu", ",.1f"),
        ("undelivered", "undelivered", ",.0f"),
    ),
    name_width=17,
)
LEGEND = (
    "lag: from a token's making to its arrival; chunks: responses with text of a stream, and the least of them; live: "
    "those that came before its last token was made; stub us, server, clients: CPU time a token; undelivered: streams "
    "that were lost, refused, short or wrong"
)
MEASURES = frozenset(measure for _, measure, _ in TABLE.columns)


def measure(case: Case, samples: Sequence[Path], cpu_s: Mapping[str, float]) -> dict[str, float]:
    """:param cpu_s: of stub, server and client."""
    arrays = _load(samples)
    num_tokens = int(arrays["chunk_tokens"].sum())
    per_token = 1e6 / num_tokens if num_tokens else math.nan
    begun, chunk_us = arrays["opened_us"].min(), arrays["chunk_us"]
    total_s = float(chunk_us.max() - begun) / 1e6 if len(chunk_us) else math.nan
    ttft = _first_chunks(arrays) / 1e3
    lag = (arrays["stamp_arrival_us"] - arrays["stamp_us"]) / 1e3
    return {
        "tokens_per_s": num_tokens / total_s,
        "total_s": total_s,
        "over_ideal": total_s / case.ideal_s if case.ideal_s else math.nan,
        "ttft_ms": _percentile(ttft, 50),
        "ttft_p99_ms": _percentile(ttft, 99),
        "lag_ms": _percentile(lag, 50),
        "lag_p99_ms": _percentile(lag, 99),
        "lag_max_ms": _percentile(lag, 100),
        "chunks_min": float(arrays["num_chunks"].min()),
        "chunks_median": float(np.median(arrays["num_chunks"])),
        "live": float(np.median(_live_chunks(arrays))),
        **{f"{process}_cpu": seconds * per_token for process, seconds in cpu_s.items()},
        "undelivered": float((arrays["outcome"] != OUTCOMES.index(OK)).sum()),
    }


def undelivered(samples: Sequence[Path]) -> list[str]:
    """A line for each way in which streams failed, with what the first such stream says."""
    arrays = _load(samples)
    lines = []
    for number, outcome in enumerate(OUTCOMES):
        (those,) = np.nonzero(arrays["outcome"] == number)
        if outcome != OK and len(those):
            lines.append(f"{len(those):,} streams {outcome}: {arrays['detail'][those[0]] or 'by their text'}")
    return lines


def _load(samples: Sequence[Path]) -> Arrays:
    """The clients' arrays, one behind the other."""
    loaded = [dict(np.load(path)) for path in samples]
    return {name: np.concatenate([arrays[name] for arrays in loaded]) for name in loaded[0]}


def _first_chunks(arrays: Arrays) -> npt.NDArray[np.float64]:
    """For each stream with text, from its request to its first text, in microseconds."""
    ends = np.cumsum(arrays["num_chunks"])
    some = arrays["num_chunks"] > 0
    first: npt.NDArray[np.float64] = arrays["chunk_us"][(ends - arrays["num_chunks"])[some]] - arrays["opened_us"][some]
    return first


def _live_chunks(arrays: Arrays) -> npt.NDArray[np.float64]:
    """For each stream, how many chunks came before its last stamp; none where it has no stamp."""
    last_us = np.zeros(len(arrays["num_stamps"]), dtype=np.int64)
    some = arrays["num_stamps"] > 0
    last_us[some] = arrays["stamp_us"][np.cumsum(arrays["num_stamps"])[some] - 1]
    streams = np.repeat(np.arange(len(last_us)), arrays["num_chunks"])
    in_time = (arrays["chunk_us"] < last_us[streams]).astype(np.float64)
    return np.bincount(streams, weights=in_time, minlength=len(last_us)).astype(np.float64)


def _percentile(values: npt.NDArray[Any], percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else math.nan
