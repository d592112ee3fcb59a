"""Figures of records whose truth is known."""

import dataclasses
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_triton_tools.bench.result import Distribution, Figures, RequestRecord, Slo
from deepseek_triton_tools.bench.run_figures import run_figures, run_timeline
from support.documents import read


def record(*, sent_s=0.0, ttft_s=0.1, gaps=(), tokens=None, **more):
    """One that ends with its last chunk."""
    times = np.cumsum([sent_s + ttft_s, *gaps]).tolist()
    tokens = tokens or [1] * len(times)
    own = {"index": 0, "sent_s": sent_s, "ended_s": times[-1]}
    chunks = {"chunk_s": array("d", times), "chunk_tokens": array("i", tokens)}
    return RequestRecord(**own | chunks | {"num_input_tokens": 10, "num_output_tokens": sum(tokens)} | more)


_SECONDS = st.integers(0, 10**7).map(lambda microseconds: microseconds / 10**6)


@st.composite
def _records(draw):
    chunks = draw(st.lists(st.tuples(_SECONDS, st.integers(0, 5)), max_size=6))
    sent = draw(_SECONDS)
    times = np.cumsum([sent, *(gap for gap, _ in chunks)])[1:].tolist()
    tokens = [number for _, number in chunks]
    return RequestRecord(
        index=draw(st.integers(0, 99)),
        due_s=draw(st.none() | _SECONDS),
        sent_s=sent,
        chunk_s=times,
        chunk_tokens=tokens,
        ended_s=(times[-1] if chunks else sent) + draw(_SECONDS),
        num_input_tokens=draw(st.integers(0, 1000)),
        num_output_tokens=sum(tokens),
        outcome=draw(st.sampled_from(["completed", "completed", "failed", "cancelled"])),
        error=draw(st.sampled_from(["", "overloaded", "engine died"])),
    )


def _numbers(value):
    """All numbers in figures."""
    if dataclasses.is_dataclass(value):
        value = [getattr(value, each.name) for each in dataclasses.fields(value)]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [number for each in value for number in _numbers(each)]
    return [] if value is None else [value]


def test_a_request_of_known_times():
    figures = run_figures([record(ttft_s=0.2, gaps=[0.01, 0.03])], gpus=2, concurrency=1, slo=Slo())

    assert (figures.completed, figures.total_input_tokens, figures.total_output_tokens) == (1, 10, 3)
    assert figures.duration_s == pytest.approx(0.24)
    assert figures.output_throughput == pytest.approx(3 / 0.24)
    assert figures.output_throughput_per_gpu == pytest.approx(1.5 / 0.24)
    assert figures.total_token_throughput == pytest.approx(13 / 0.24)
    assert figures.ttft_ms.p99 == pytest.approx(200)
    assert figures.tpot_ms.mean == pytest.approx(20)
    assert (figures.itl_ms.min, figures.itl_ms.max) == pytest.approx((10, 30))
    assert figures.e2el_ms.mean == pytest.approx(240)
    assert (figures.goodput, figures.good_share) == (None, None)  # there are no limits


def test_four_tools_mean_different_things_by_tokens_a_second_for_a_user():
    fast, slow = record(ttft_s=1.0, gaps=[0.1] * 10), record(ttft_s=1.0, gaps=[0.3] * 10)
    figures = run_figures([fast, slow], concurrency=2)

    assert figures.user_throughput == pytest.approx((11 / 2 + 11 / 4) / 2)  # trtllm-bench, benchmark_serving
    assert figures.decode_speed.mean == pytest.approx((1 / 0.1 + 1 / 0.3) / 2)  # AIPerf
    assert figures.decode_user_throughput == pytest.approx(1 / 0.2)  # InferenceX
    assert figures.concurrency_user_throughput == pytest.approx(22 / 4 / 2)  # vLLM's Pareto plot


def test_a_chunk_of_several_tokens_counts_as_that_many_gaps():
    figures = run_figures([record(gaps=[0.08, 0.01], tokens=[1, 8, 1])])

    assert figures.itl_ms.count == 9
    assert (figures.itl_ms.mean, figures.itl_ms.std) == pytest.approx((10, 0), abs=1e-6)
    assert (figures.chunk_gap_ms.count, figures.chunk_gap_ms.mean) == pytest.approx((2, 45))
    assert figures.tpot_ms.mean == pytest.approx(10)


def test_the_gap_before_a_chunk_without_a_token_belongs_to_the_next_one():
    figures = run_figures([record(gaps=[0.01, 0.02, 0.03, 0.5], tokens=[0, 1, 0, 2, 0])], slo=Slo(itl_ms=26))

    assert (figures.itl_ms.count, figures.itl_ms.min, figures.itl_ms.max) == pytest.approx((3, 10, 25))
    assert (figures.chunk_gap_ms.count, figures.chunk_gap_ms.max) == pytest.approx((2, 50))
    assert figures.good_share == 1


def test_tpot_is_of_the_tokens_after_the_first_chunk():
    at_once, later, with_tail = {"tokens": [5]}, {"gaps": [0.04], "tokens": [3, 2]}, {"ended_s": 9.0}
    found = [run_figures([record(**chunks)]).tpot_ms for chunks in (at_once, later, later | with_tail)]
    assert [tpot.mean for tpot in found] == pytest.approx([0, 20, 20])
    assert [tpot.count for tpot in found] == [0, 1, 1]


def test_requests_that_failed_or_were_cancelled_only_count_as_such():
    failed = record(outcome="failed", error="overloaded: the queue is full", ended_s=2.0)
    unfinished = record(outcome="failed", finish_reason="timeout", ended_s=0.5)
    records = [record(ended_s=1.0), failed, failed, unfinished, record(outcome="cancelled")]
    figures = run_figures(records, slo=Slo(ttft_ms=100.1))

    assert (figures.completed, figures.failed, figures.cancelled) == (1, 3, 1)
    assert list(figures.errors.items()) == [("overloaded: the queue is full", 2), ("finish reason timeout", 1)]
    assert figures.total_output_tokens == 1
    assert (figures.duration_s, figures.request_throughput, figures.goodput) == (2.0, 0.5, 0.5)
    assert figures.good_share == pytest.approx(0.2)


def test_what_the_server_cancelled_is_an_error_and_what_the_client_left_is_none():
    said = record(outcome="cancelled", error="[E_CANCELLED] shutting down")
    ended = record(outcome="cancelled", finish_reason="cancelled")
    figures = run_figures([said, ended, record(outcome="cancelled")])
    assert figures.cancelled == 3
    assert figures.errors == {"[E_CANCELLED] shutting down": 1, "finish reason cancelled": 1}


def test_goodput_counts_requests_that_keep_every_limit():
    even, uneven = record(gaps=[0.03, 0.03, 0.03]), record(gaps=[0.01, 0.01, 0.04])
    good = {
        Slo(ttft_ms=150): 2,
        Slo(ttft_ms=50): 0,
        Slo(tpot_ms=25): 1,
        Slo(itl_ms=35): 1,
        Slo(e2el_ms=175): 1,
        Slo(ttft_ms=150, itl_ms=25): 0,
    }
    assert {slo: 2 * run_figures([even, uneven], slo=slo).good_share for slo in good} == good
    # An answer without a token misses the limit of its first.
    empty = record(chunk_s=[], chunk_tokens=[], num_output_tokens=0)
    assert run_figures([empty], slo=Slo(ttft_ms=1000)).good_share == 0
    assert run_figures([empty], slo=Slo(e2el_ms=1000)).good_share == 1


def test_lag_is_how_much_later_than_due_requests_were_sent():
    figures = run_figures([record(sent_s=1.0, due_s=0.9), record(sent_s=2.0, due_s=2.0, outcome="failed"), record()])
    assert (figures.lag_ms.count, figures.lag_ms.mean) == pytest.approx((2, 50))


def test_peaks():
    figures = run_figures([record(sent_s=sent, ttft_s=0.6) for sent in (0.0, 0.5, 1.25)])
    assert figures.peak_concurrency == 2
    assert figures.peak_output_throughput == 2  # at 1.1 and at 1.85 seconds
    # At the moment of an end the next request is the only one.
    assert run_figures([record(sent_s=sent, ttft_s=0.5) for sent in (0.0, 0.5)]).peak_concurrency == 1


def test_a_run_without_requests_has_zeros():
    figures = run_figures([], gpus=8, concurrency=4, slo=Slo(ttft_ms=1))
    assert figures.itl_ms == figures.e2el_ms == Distribution()
    assert set(_numbers(figures)) == {0}
    assert run_timeline([], 10) == ()


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(_records(), max_size=8), st.randoms(use_true_random=False))
def test_the_order_of_records_changes_nothing(records, shuffler):
    slo = Slo(ttft_ms=2000, itl_ms=3000)
    shuffled = shuffler.sample(records, len(records))
    figures = run_figures(records, gpus=2, slo=slo)

    assert run_figures(shuffled, gpus=2, slo=slo) == figures
    assert run_timeline(shuffled, 7) == run_timeline(records, 7)
    assert all(np.isfinite(_numbers(figures)))
    assert all(type(number) in (int, float) for number in _numbers(figures))


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(st.lists(st.tuples(_SECONDS, st.integers(1, 40)), max_size=8), min_size=1, max_size=5))
def test_itl_is_that_of_a_list_with_every_token(answers):
    """The same percentiles as numpy's over one number for each token."""
    records = [record(gaps=[gap for gap, _ in each], tokens=[1, *(number for _, number in each)]) for each in answers]
    gaps = [
        1000 * gap / number
        for each in records
        for gap, number in zip(np.diff(each.chunk_s), each.chunk_tokens[1:], strict=True)
        for _ in range(number)
    ]
    itl = run_figures(records).itl_ms

    assert itl.count == len(gaps)
    if gaps:
        seen = [itl.min, itl.p50, itl.p90, itl.p95, itl.p99, itl.max]
        assert seen == pytest.approx(list(np.percentile(gaps, [0, 50, 90, 95, 99, 100])), rel=1e-9, abs=1e-9)
        assert (itl.mean, itl.std) == pytest.approx((np.mean(gaps), np.std(gaps)), rel=1e-9, abs=1e-6)


def test_a_timeline_has_every_request_once():
    failed = record(sent_s=1.0, ttft_s=3.0, tokens=[4], outcome="failed", error="gone")
    timeline = run_timeline([record(sent_s=0.0, ttft_s=1.0, gaps=[1.0]), failed], 4)

    assert [each.at_s for each in timeline] == [0.0, 1.0, 2.0, 3.0]
    assert [each.inflight for each in timeline] == pytest.approx([1.0, 2.0, 1.0, 1.0])
    assert [each.output_tokens for each in timeline] == [0, 1, 1, 4]
    assert [each.requests_sent for each in timeline] == [1, 1, 0, 0]
    assert [each.requests_ended for each in timeline] == [0, 0, 1, 1]
    assert [each.failed for each in timeline] == [0, 0, 0, 1]


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(_records(), min_size=1, max_size=8), st.integers(1, 30))
def test_a_timeline_adds_up(records, bins):
    timeline = run_timeline(records, bins)
    if timeline:
        assert len(timeline) == bins
        assert sum(each.output_tokens for each in timeline) == sum(each.num_output_tokens for each in records)
        assert sum(each.requests_sent for each in timeline) == len(records)
        assert sum(each.requests_ended for each in timeline) == len(records)
        width = (max(each.ended_s for each in records) - timeline[0].at_s) / bins
        busy = sum(each.ended_s - each.sent_s for each in records)
        assert width * sum(each.inflight for each in timeline) == pytest.approx(busy, abs=1e-6)


def test_the_page_defines_every_figure():
    page = read("docs/bench.md")
    assert {each.name for each in dataclasses.fields(Figures) if f"`{each.name}" not in page} == set()
