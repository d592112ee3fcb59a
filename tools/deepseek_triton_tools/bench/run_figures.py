"""The arithmetic of a run: from the records of its requests to figures and a timeline.

Percentiles interpolate linearly, as numpy's do. The order of the records changes nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from deepseek_triton_tools.bench.result import Distribution, Figures, RequestRecord, Slo, TimelineBin

Floats: TypeAlias = NDArray[np.float64]

_MOST_ERRORS = 10
"""Errors that are listed; a message may hold a number of its own."""


def run_figures(
    records: Sequence[RequestRecord], *, gpus: int | None = None, concurrency: int | None = None, slo: Slo | None = None
) -> Figures:
    """Return the figures of one run.

    :param concurrency: Of a closed loop; None for an open one, where it is only a limit.
    """
    completed = [record for record in records if record.outcome == "completed"]
    begin, end = _span(records)
    duration = end - begin
    input_tokens = _floats(record.num_input_tokens for record in completed)
    output_tokens = _floats(record.num_output_tokens for record in completed)
    e2el = _present(map(_e2el, completed))
    tpot = _present(map(_tpot, completed))
    tpot_ms = _distribution(1000 * tpot)
    gaps, later_tokens = _gaps_ms(completed)
    # A chunk of k tokens that came after a gap makes k gaps between tokens, each gap / k.
    weights = np.flatnonzero(np.bincount(later_tokens)).tolist()
    itl_ms = _weighted({weight: np.sort(gaps[later_tokens == weight] / weight) for weight in weights})
    gaps.sort()
    output_throughput = _rate(output_tokens.sum(), duration)
    good = None if slo in (None, Slo()) else sum(_is_good(record, slo) for record in completed)
    return Figures(
        duration_s=duration,
        completed=len(completed),
        failed=sum(record.outcome == "failed" for record in records),
        cancelled=sum(record.outcome == "cancelled" for record in records),
        short=sum(record.num_output_tokens < (record.asked_tokens or 0) for record in completed),
        errors=_errors(records),
        total_input_tokens=int(input_tokens.sum()),
        total_output_tokens=int(output_tokens.sum()),
        total_cached_tokens=sum(record.num_cached_tokens or 0 for record in completed),
        input_tokens=_distribution(input_tokens),
        output_tokens=_distribution(output_tokens),
        request_throughput=_rate(len(completed), duration),
        output_throughput=output_throughput,
        total_token_throughput=_rate(input_tokens.sum() + output_tokens.sum(), duration),
        peak_output_throughput=float(_tokens_over_time(completed, begin, 1.0, math.floor(duration) + 1).max()),
        peak_concurrency=_peak_concurrency(records),
        output_throughput_per_gpu=output_throughput / gpus if gpus else None,
        user_throughput=_distribution(output_tokens[e2el > 0] / e2el[e2el > 0]).mean,
        decode_user_throughput=_rate(1000, tpot_ms.mean),
        decode_speed=_distribution(1 / tpot[tpot > 0]),
        concurrency_user_throughput=output_throughput / concurrency if concurrency else None,
        ttft_ms=_distribution(1000 * _present(map(_ttft, completed))),
        tpot_ms=tpot_ms,
        itl_ms=itl_ms,
        chunk_gap_ms=_weighted({1: gaps}),
        e2el_ms=_distribution(1000 * e2el),
        lag_ms=_distribution(
            1000 * _floats(record.sent_s - record.due_s for record in records if record.due_s is not None)
        ),
        goodput=None if good is None else _rate(good, duration),
        good_share=None if good is None else _rate(good, len(records)),
    )


def run_timeline(records: Sequence[RequestRecord], bins: int) -> tuple[TimelineBin, ...]:
    """Return `bins` equal parts of the run's time; tokens of failed and cancelled requests count too."""
    begin, end = _span(records)
    width = (end - begin) / bins
    if not width:
        return ()
    edges = np.linspace(begin, end, bins + 1)
    sent = np.sort(_floats(record.sent_s for record in records))
    ended = np.sort(_floats(record.ended_s for record in records))
    failed = _floats(record.ended_s for record in records if record.outcome == "failed")
    inflight = np.diff(_time_since(sent, edges) - _time_since(ended, edges)) / width
    columns = (
        edges[:-1],
        np.maximum(inflight, 0.0),
        _tokens_over_time(records, begin, width, bins),
        *(np.histogram(times, edges)[0] for times in (sent, ended, failed)),
    )
    return tuple(
        TimelineBin(
            at_s=float(at),
            inflight=float(under_way),
            output_tokens=int(tokens),
            requests_sent=int(num_sent),
            requests_ended=int(num_ended),
            failed=int(num_failed),
        )
        for at, under_way, tokens, num_sent, num_ended, num_failed in zip(*columns, strict=True)
    )


def _floats(values: Iterable[float]) -> Floats:
    return np.fromiter(values, float)


def _present(values: Iterable[float | None]) -> Floats:
    return _floats(value for value in values if value is not None)


def _rate(amount: float, per: float) -> float:
    return float(amount / per) if per else 0.0


def _span(records: Sequence[RequestRecord]) -> tuple[float, float]:
    begin = min((record.sent_s for record in records), default=0.0)
    return begin, max((record.ended_s for record in records), default=begin)


def _errors(records: Iterable[RequestRecord]) -> dict[str, int]:
    """Count the failures by reason. A request that the server cancelled is one."""
    reasons = (
        record.error or f"finish reason {record.finish_reason}"
        for record in records
        # A client that leaves gets no error and no finish reason.
        if record.outcome == "failed"
        or (record.outcome == "cancelled" and (record.error or record.finish_reason == "cancelled"))
    )
    return dict(Counter(sorted(reasons)).most_common(_MOST_ERRORS))


# --- One request, in seconds ---


def _ttft(record: RequestRecord) -> float | None:
    return record.chunk_s[0] - record.sent_s if len(record.chunk_s) else None


def _e2el(record: RequestRecord) -> float:
    return record.ended_s - record.sent_s


def _tpot(record: RequestRecord) -> float | None:
    """None where all tokens came at once."""
    later_tokens = record.num_output_tokens - record.chunk_tokens[0] if len(record.chunk_s) else 0
    return (record.chunk_s[-1] - record.chunk_s[0]) / later_tokens if later_tokens else None


def _is_good(record: RequestRecord, slo: Slo) -> bool:
    """A single token has no TPOT, and it keeps every limit of it. An answer without a token misses that of TTFT."""
    ttft = _ttft(record)
    gaps, tokens = _gaps_of(record)
    limits = (
        (slo.ttft_ms, math.inf if ttft is None else ttft),
        (slo.tpot_ms, _tpot(record) or 0.0),
        (slo.itl_ms, float((gaps / tokens).max(initial=0.0))),
        (slo.e2el_ms, _e2el(record)),
    )
    return all(limit is None or 1000 * seconds <= limit for limit, seconds in limits)


def _gaps_of(record: RequestRecord) -> tuple[Floats, NDArray[np.int32]]:
    """The seconds before each chunk but the first, and the tokens of that chunk.

    A chunk without a token, such as one of several that share the tokens of a short answer, is no end of a gap.
    """
    tokens = np.asarray(record.chunk_tokens, np.int32)
    counts = tokens > 0
    counts[:1] = True
    return np.diff(np.asarray(record.chunk_s, float)[counts]), tokens[counts][1:]


# --- All requests: one number for each chunk is a lot, so it is stored once and in arrays ---


def _gaps_ms(records: Sequence[RequestRecord]) -> tuple[Floats, NDArray[np.int32]]:
    size = sum(max(0, len(record.chunk_s) - 1) for record in records)
    gaps, tokens = np.zeros(size), np.empty(size, np.int32)
    at = 0
    for record in records:
        ours, weights = _gaps_of(record)
        gaps[at : at + len(ours)], tokens[at : at + len(ours)] = ours, weights
        at += len(ours)
    gaps *= 1000
    return gaps[:at], tokens[:at]


def _tokens_over_time(records: Iterable[RequestRecord], begin: float, width: float, bins: int) -> Floats:
    """The tokens that came in each of `bins` parts of `width` seconds."""
    total = np.zeros(bins)
    for record in records:
        if len(record.chunk_s):
            places = ((np.asarray(record.chunk_s, float) - begin) / width).astype(int).clip(0, bins - 1)
            first = places.min()
            counted = np.bincount(places - first, record.chunk_tokens)
            total[first : first + len(counted)] += counted
    return total


def _peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """At the moment when one request ends and the next one begins, one is under way."""
    sent = np.sort(_floats(record.sent_s for record in records))
    ended = np.sort(_floats(record.ended_s for record in records))
    return int((np.arange(1, len(sent) + 1) - np.searchsorted(ended, sent, "right")).max(initial=0))


def _time_since(times: Floats, moments: Floats) -> Floats:
    """For each moment, the sum of the seconds since those of the (sorted) `times` that are past."""
    num_past = np.searchsorted(times, moments, "right")
    return np.asarray(num_past * moments - np.concatenate([[0.0], np.cumsum(times)])[num_past])


# --- Distributions ---


def _distribution(values: Floats) -> Distribution:
    return _weighted({1: np.sort(values)})


def _weighted(groups: Mapping[int, Floats]) -> Distribution:
    """The distribution of sorted values, by weight: each value counts as often as its weight says."""
    count = sum(weight * len(values) for weight, values in groups.items())
    if not count:
        return Distribution()
    mean = sum(weight * values.sum() for weight, values in groups.items()) / count
    variance = sum(weight * np.square(values - mean).sum() for weight, values in groups.items()) / count

    def percentile(share: float) -> float:
        rank, rest = divmod(share * (count - 1), 1)
        below = _at_rank(groups, int(rank))
        return below + rest * (_at_rank(groups, int(rank) + 1) - below) if rest else below

    return Distribution(
        mean=float(mean),
        std=math.sqrt(variance),
        min=_at_rank(groups, 0),
        p50=percentile(0.5),
        p90=percentile(0.9),
        p95=percentile(0.95),
        p99=percentile(0.99),
        max=_at_rank(groups, count - 1),
        count=count,
    )


def _at_rank(groups: Mapping[int, Floats], rank: int) -> float:
    """The value at `rank`, from 0, if each value stood there as often as its weight says.

    With several weights it is found by halving until no float is left between the limits, because sorting all values
    together with their weights would take several times the memory and time.
    """
    if len(groups) == 1:
        [(weight, values)] = groups.items()
        return float(values[rank // weight])
    low = -1.0 + min(float(values[0]) for values in groups.values())
    high = max(float(values[-1]) for values in groups.values())
    while low < (middle := (low + high) / 2) < high:
        if sum(weight * int(np.searchsorted(values, middle, "right")) for weight, values in groups.items()) > rank:
            high = middle
        else:
            low = middle
    return high
