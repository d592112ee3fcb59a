"""Counting, and writing the differences to a stand-in for Triton's metrics that is as strict as Triton."""

import contextlib
import logging
import math
import re
import threading
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

from deepseek_backend.backend_metrics import (
    COMMON_LABELS,
    FAMILIES,
    INTER_TOKEN,
    PREFIX,
    ROUTED_BLOCKS,
    ROUTED_REQUESTS,
    ROUTING_PREFIX,
    BackendMetrics,
    Kind,
    info,
)
from deepseek_backend.config import parse_config
from deepseek_backend.contract import ErrorCode
from deepseek_backend.engines.base import EngineStats, Step
from deepseek_backend.publishing import MetricsLease, Publisher
from deepseek_backend.service import Service
from support.fakes import send, wait


@dataclass
class FakeSeries:
    """One series. It refuses what Triton refuses."""

    kind: Kind
    labels: dict[str, str]
    value: float = 0.0
    writes: int = 0

    def increment(self, value):
        assert self.kind is Kind.GAUGE or value >= 0
        self.value += value
        self.writes += 1

    def set(self, value):
        assert self.kind is Kind.GAUGE
        self.value = value
        self.writes += 1


class FakeMetrics:
    """A MetricFactory that keeps what is written, and fails from the write on that `fail` names."""

    def __init__(self):
        self.made = []
        self.kinds = {}
        self.refusing = False
        self.free = True
        self.closed = False
        self.asked = 0

    def series(self, name, kind, text, labels):
        assert self.free
        assert not self.closed
        self.asked += 1
        if self.refusing:
            raise RuntimeError("refused")
        assert text.endswith(".")
        assert self.kinds.setdefault(name, kind) is kind
        assert dict(labels) not in [series.labels for other, series in self.made if other == name]
        assert kind is not Kind.HISTOGRAM
        made = FakeSeries(kind, dict(labels))
        self.made.append((name, made))
        return made

    def claim(self):
        return self.free

    def close(self):
        self.closed = True

    def all(self, name, /, **labels):
        return [
            series for other, series in self.made if other == PREFIX + name and labels.items() <= series.labels.items()
        ]

    def __getitem__(self, name):
        (series,) = self.all(name)
        return series.value

    def at(self, name, /, **labels):
        (series,) = self.all(name, **labels)
        return series.value

    def buckets(self, name):
        """le -> cumulative count."""
        return {series.labels["le"]: series.value for series in self.all(f"{name}_bucket")}

    @property
    def writes(self):
        return sum(series.writes for _, series in self.made)


@pytest.fixture
def metrics():
    return BackendMetrics()


@pytest.fixture
def triton():
    return FakeMetrics()


@pytest.fixture
def publisher(metrics, triton):
    return Publisher(metrics, triton, observe_state=lambda: None, period_s=3600)


def state(metrics, *, ready=True, **stats):
    counted = EngineStats(**{"num_running": 2, "num_waiting": 1, **stats})
    metrics.observe_state(inflight=3, inflight_tokens=500, idle_s=0.25, ready=ready, stats=counted)


def test_the_table_keeps_prometheus_rules():
    for family in FAMILIES:
        assert re.fullmatch(rf"({PREFIX}|{ROUTING_PREFIX})[a-z][a-z_]*[a-z]", family.name)
        assert family.name.endswith("_total") is (family.kind is Kind.COUNTER), family.name
        assert not family.name.endswith(("_bucket", "_sum", "_count", "_ms", "_percent"))
        assert bool(family.buckets) is (family.kind is Kind.HISTOGRAM), family.name
        assert list(family.buckets) == sorted(set(family.buckets)), family.name
        assert not {"le", *COMMON_LABELS} & set(family.labels), family.name
        assert not family.known_values or len(family.labels) == 1, family.name
    names = [name for family in FAMILIES for name in (family.name, *family.series_names)]
    assert len(set(names)) == len([name for family in FAMILIES for name in {family.name, *family.series_names}])


def test_every_method_ends_in_a_number(metrics, triton, publisher):
    metrics.accepted(4)
    metrics.first_token(0.5)
    metrics.tokens(2, 0.5)
    metrics.refused(ErrorCode.OVERLOADED)
    metrics.aborted("deadline")
    metrics.ended("stop", 3.0, num_input_tokens=100, num_output_tokens=40, num_cached_tokens=64)
    metrics.loaded({"weights": 12.5}, {"min_p": "why not"})
    state(metrics, kv_blocks_used=7, kv_blocks_total=9, num_draft_tokens=10, num_accepted_draft_tokens=6,
          extra={"iterations": 5.0})  # fmt: skip
    publisher.publish()

    declared = {name: set(family.labels) for family in FAMILIES for name in (family.name, *family.series_names)}
    for name, series in triton.made:
        bucket = {"le"} if name.endswith("_bucket") else set()
        assert set(series.labels) == declared[name] | bucket
    counted = {name for name, series in triton.made if series.value}
    # The information is test_info_says_what_is_served's.
    assert [one.name for one in FAMILIES if not counted & {one.name, *one.series_names}] == [f"{PREFIX}info"]
    assert triton["requests_accepted_total"] == 1
    assert triton["sequences_accepted_total"] == 4
    assert triton.at("requests_refused_total", code="E_OVERLOADED") == 1
    assert triton.at("aborts_total", cause="deadline") == 1
    assert triton.at("requests_finished_total", outcome="stop") == 1
    assert triton["prompt_tokens_total"] == 100
    assert triton["cached_prompt_tokens_total"] == 64
    assert triton.at("load_duration_seconds", phase="weights") == 12.5
    assert triton.at("field_unsupported", field="min_p") == 1
    assert (triton["inflight_sequences"], triton["inflight_tokens"]) == (3, 500)
    assert (triton["engine_running_requests"], triton["engine_waiting_requests"]) == (2, 1)
    assert (triton["kv_cache_used_blocks"], triton["kv_cache_capacity_blocks"]) == (7, 9)
    assert (triton["draft_tokens_proposed_total"], triton["draft_tokens_accepted_total"]) == (10, 6)
    assert triton.at("engine_stat", name="iterations") == 5
    assert (triton["last_token_age_seconds"], triton["ready"]) == (0.25, 1)
    assert triton.buckets("request_duration_seconds")["5"] == 1
    assert triton["request_prompt_tokens_sum"] == 100
    assert triton["request_generated_tokens_sum"] == 40


@pytest.mark.parametrize("has_numbers", [False, True])
def test_routers_find_the_numbers_under_the_names_of_the_cpp_backend(metrics, triton, has_numbers):
    stats = {"kv_blocks_used": 30, "kv_blocks_total": 40, "tokens_per_block": 64} if has_numbers else {}
    blocks = {"used": 30, "free": 10, "max": 40, "tokens_per": 64, "fraction": 0.75}
    Publisher(metrics, triton, observe_state=lambda: state(metrics, **stats), period_s=3600).publish()

    def found(family):
        (label,) = family.labels
        return {series.labels[label]: series.value for name, series in triton.made if name == family.name}

    assert found(ROUTED_REQUESTS) == {"waiting": 1, "scheduled": 2, "active": 3}
    assert found(ROUTED_BLOCKS) == (blocks if has_numbers else dict.fromkeys(blocks, 0))


def test_what_can_be_counted_is_there_from_the_start(triton, publisher):
    """A counter that begins at 1 has no increase that rate() could see."""
    publisher.publish()
    assert {series.labels["code"] for series in triton.all("requests_refused_total")} == {c.value for c in ErrorCode}
    assert triton.at("requests_finished_total", outcome="length") == 0
    assert triton.at("aborts_total", cause="client_gone") == 0
    assert triton["generated_tokens_total"] == 0
    assert triton.buckets("inter_token_latency_seconds")["+Inf"] == 0
    assert triton.writes == 0


def test_only_differences_are_written(metrics, triton, publisher):
    metrics.accepted(1)
    publisher.publish()
    made, writes = len(triton.made), triton.writes
    publisher.publish()
    assert (len(triton.made), triton.writes) == (made, writes)
    metrics.accepted(2)
    publisher.publish()
    assert triton["requests_accepted_total"] == 2
    assert triton["sequences_accepted_total"] == 3
    assert triton.writes == writes + 2


def test_gauges_go_down_and_counters_never_do(metrics, triton, publisher):
    for ready, running, drafts, counted in (True, 2, 10, 10), (False, 0, 4, 10), (True, 1, 11, 11):
        state(metrics, ready=ready, num_running=running, num_draft_tokens=drafts)
        publisher.publish()
        assert (triton["ready"], triton["engine_running_requests"]) == (ready, running)
        assert triton["draft_tokens_proposed_total"] == counted


def test_a_bucket_counts_what_is_at_most_its_bound(metrics, triton, publisher):
    for seconds in (0.0, 0.01, 0.0100001, 0.3, 0.4, 299.0, 1e4, *[0.1] * 7):
        metrics.first_token(seconds)
    publisher.publish()
    buckets = triton.buckets("time_to_first_token_seconds")
    assert list(buckets.values()) == sorted(buckets.values())
    assert [buckets[le] for le in ("0.01", "0.02", "0.05", "0.1", "0.5", "300", "+Inf")] == [2, 3, 3, 10, 12, 13, 14]
    assert triton["time_to_first_token_seconds_sum"] == pytest.approx(0.01 + 0.0100001 + 0.7 + 299 + 1e4 + 0.7)


def test_tokens_that_came_together_share_the_time_and_are_never_a_message_each(metrics, triton, publisher):
    metrics.tokens(3, None)
    metrics.tokens(4, 0.02)
    publisher.publish()
    buckets = triton.buckets("inter_token_latency_seconds")
    assert (buckets["0.004"], buckets["0.006"], buckets["+Inf"]) == (0, 4, 4)
    assert triton["inter_token_latency_seconds_sum"] == pytest.approx(0.02)
    for _ in range(50_000):
        metrics.tokens(1, 0.02)
    before = triton.writes
    publisher.publish()
    assert triton["generated_tokens_total"] == 50_007
    assert triton.all("inter_token_latency_seconds_count")[0].value == 50_004
    assert triton.writes - before <= len(INTER_TOKEN.buckets) + 4


@pytest.mark.slow
def test_several_threads_lose_nothing(metrics, triton, publisher):
    """Threads as in the service: one counts tokens, any thread counts the rest, while a publication runs."""
    ended = threading.Event()

    def publish():
        while not ended.is_set():
            publisher.publish()

    def serve():
        for _ in range(2000):
            metrics.accepted(2)
            metrics.first_token(0.2)
            metrics.refused(ErrorCode.OVERLOADED)
            metrics.aborted("stop")
            metrics.ended("stop", 1.5, num_input_tokens=3, num_output_tokens=2, num_cached_tokens=1)

    def generate():
        for _ in range(20_000):
            metrics.tokens(2, 0.04)

    reader = threading.Thread(target=publish)
    writers = [threading.Thread(target=work) for work in (serve, serve, serve, generate)]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    ended.set()
    reader.join()
    publisher.publish()

    assert triton["sequences_accepted_total"] == 12_000
    assert triton.at("requests_refused_total", code="E_OVERLOADED") == 6000
    assert triton["prompt_tokens_total"] == 18_000
    assert triton["generated_tokens_total"] == 40_000
    assert triton.buckets("time_to_first_token_seconds")["+Inf"] == 6000
    assert triton.buckets("inter_token_latency_seconds")["0.02"] == 40_000


@pytest.mark.parametrize("started", [True, False])
def test_stop_publishes_once_more(metrics, triton, publisher, started):
    if started:
        publisher.start()
    metrics.accepted(1)
    publisher.stop()
    assert triton["requests_accepted_total"] == 1
    assert triton.closed


def test_nothing_is_lost_while_the_instance_before_still_has_the_series(metrics, triton, publisher):
    for free, expected in ((False, None), (True, 2)):
        triton.free = free
        metrics.accepted(1)
        publisher.publish()
        assert (triton["requests_accepted_total"] if triton.made else None) == expected


def test_one_process_at_a_time_has_the_turn():
    labels = {"model": str(uuid.uuid4()), "version": "1"}
    old, new, other = MetricsLease(labels), MetricsLease(labels), MetricsLease({**labels, "version": "2"})
    try:
        assert [lease.take() for lease in (old, old, new, other)] == [True, True, False, True]
        old.give_back()
        assert [lease.take() for lease in (new, old)] == [True, False]
    finally:
        for turn in (old, new, other):
            turn.give_back()


def test_a_refused_write_is_the_last_and_is_said_once(metrics, triton, publisher, caplog):
    triton.refusing = True
    with caplog.at_level(logging.ERROR):
        publisher.publish()
        triton.refusing = False
        publisher.start()
        publisher.stop()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert triton.asked == 1


def test_an_engine_that_has_no_state_to_tell_leaves_the_counters_going(metrics, triton, caplog):
    def unreadable():
        raise OSError("no stats")

    publisher = Publisher(metrics, triton, observe_state=unreadable, period_s=3600)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            metrics.accepted(1)
            publisher.publish()
    assert triton["requests_accepted_total"] == 3
    assert len(caplog.records) == 1


def test_info_says_what_is_served(triton):
    config = parse_config({"model": "/models/r1", "triton_config": {"engine": "simulated"}}, version_dir=Path("/none"))
    Publisher(BackendMetrics(info(config)), triton, observe_state=lambda: None, period_s=1).publish()
    assert triton.at("info", engine="simulated", checkpoint="/models/r1", release="") == 1


@contextlib.contextmanager
def publishing(metrics, triton, engine):
    """A service, and a publisher of its metrics that publishes once more at the end."""
    service = Service(parse_config({"model": "m"}, version_dir=Path()), engine, metrics=metrics)
    service.start()
    publisher = Publisher(metrics, triton, observe_state=service.publish_state, period_s=3600)
    yield service, publisher
    service.stop()
    publisher.stop()


def test_a_request_through_the_service_is_counted(metrics, triton, engine):
    with publishing(metrics, triton, engine) as (service, publisher):
        served, refused = send(service, max_tokens=5), send(service, max_tokens=-1)
        send(service, stop=True)  # answered by an error, but nothing that was refused
        (request,) = engine.requests
        publisher.publish()
        assert triton["inflight_sequences"] == 1
        engine.step([(request, Step(token_ids=[1], num_input_tokens=4))])
        last = {"num_input_tokens": 4, "num_cached_tokens": 2, "finish_reason": "length"}
        engine.step([(request, Step(token_ids=[2, 3], **last))])
        for reply in (served, refused):
            wait(reply)
    assert triton["requests_accepted_total"] == 1
    assert triton.at("requests_finished_total", outcome="length") == 1
    assert triton.at("requests_refused_total", code="E_INVALID_ARGUMENT") == 1
    assert triton["generated_tokens_total"] == 3
    assert (triton["prompt_tokens_total"], triton["cached_prompt_tokens_total"]) == (4, 2)
    assert triton.buckets("time_to_first_token_seconds")["+Inf"] == 1
    assert triton.buckets("inter_token_latency_seconds")["+Inf"] == 2
    assert (triton["ready"], triton["inflight_sequences"]) == (0, 0)
    assert triton.at("field_unsupported", field="min_p") == 1


@pytest.mark.parametrize(("generation_s", "num_first", "num_between"), [(3.0, 1, 2), (0.0, 1, 2), (math.nan, 0, 0)])
def test_the_times_of_an_answer_that_comes_whole_are_the_engines(
    metrics, triton, engine, generation_s, num_first, num_between
):
    with publishing(metrics, triton, engine) as (service, _):
        reply = send(service, max_tokens=3)
        step = Step(token_ids=[1, 2, 3], finish_reason="length", generation_s=generation_s)
        engine.step([(engine.requests[0], step)])
        wait(reply)
    assert triton["generated_tokens_total"] == 3
    assert triton.buckets("time_to_first_token_seconds")["+Inf"] == num_first
    between = triton.buckets("inter_token_latency_seconds")
    assert between["+Inf"] == num_between
    assert between["1"] == (0 if generation_s else 2) * bool(num_between)
