"""The arithmetic of a run: from the records of its requests to figures and a timeline.

Percentiles interpolate linearly, as numpy's do. The order of the records changes nothing.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

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
    each_gaps = [_gaps_of(record) for record in completed]
    gaps = 1000 * np.concatenate([np.empty(0), *(seconds for seconds, _ in each_gaps)])
    later_tokens = np.concatenate([np.empty(0, np.int32), *(tokens for _, tokens in each_gaps)])
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
        # A chunk of k tokens that came after a gap makes k gaps between tokens, each gap / k.
        itl_ms=_distribution(np.repeat(gaps / later_tokens, later_tokens)),
        chunk_gap_ms=_distribution(gaps),
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
    columns: dict[str, NDArray[Any]] = {
        "at_s": edges[:-1],
        "inflight": np.maximum(inflight, 0.0),
        "output_tokens": _tokens_over_time(records, begin, width, bins).astype(int),
        "requests_sent": np.histogram(sent, edges)[0],
        "requests_ended": np.histogram(ended, edges)[0],
        "failed": np.histogram(failed, edges)[0],
    }
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    return tuple(TimelineBin(**dict(zip(columns, row, strict=True))) for row in rows)


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


def _distribution(values: Floats) -> Distribution:
    if not len(values):
        return Distribution()
    # Sums of floats depend on the order, and that of the records must change nothing.
    values = np.sort(values)
    extremes = {"min": values[0], "max": values[-1], "mean": values.mean(), "std": values.std()}
    percentiles = {f"p{percent}": np.percentile(values, percent) for percent in (50, 90, 95, 99)}
    return Distribution(count=len(values), **{name: float(value) for name, value in (extremes | percentiles).items()})
