"""Servers' metrics during a run, from real sockets."""

from __future__ import annotations

import ssl
import threading

import pytest
import trustme

from deepseek_backend.metrics.backend_metrics import FAMILIES, PREFIX
from deepseek_triton_client import Tls
from deepseek_triton_tools.bench.measuring.figures import MetricSummary
from deepseek_triton_tools.bench.measuring.server_metrics import MetricsWatch, usual_metrics_urls
from deepseek_triton_tools.bench.results.metrics_table import COUNTERS, GAUGES, metrics_table
from support.http_server import HttpServer

_NEVER_S = 3600.0


@pytest.fixture
def server():
    server = HttpServer()
    yield server
    server.stop()


def metrics(running: float, tokens: int) -> bytes:
    return f"""\
# HELP deepseek_triton_engine_running_requests Sequences in the engine's running batch.
# TYPE deepseek_triton_engine_running_requests gauge
deepseek_triton_engine_running_requests{{model="r1",version="1"}} {running}
deepseek_triton_generated_tokens_total{{version="1",model="r1"}} {tokens}
deepseek_triton_time_to_first_token_seconds_bucket{{le="0.1"}} 5
nv_gpu_utilization{{gpu_uuid="GPU-1"}} nan
up 1
""".encode()


def address(server: HttpServer) -> str:
    return f"{server.url}/metrics"


def test_it_reads_when_the_block_begins_and_ends(server) -> None:
    server.script(server.body(200, metrics(2, 100)), server.body(200, metrics(4, 150)))
    with MetricsWatch([address(server)], interval_s=_NEVER_S) as watch:
        assert len(server.requests) == 1

    assert [request[:2] for request in server.requests] == [("GET", "/metrics")] * 2  # Triton answers HEAD with 405
    assert watch.problems == {}
    assert watch.summaries() == {
        'deepseek_triton_engine_running_requests{model="r1",version="1"}': MetricSummary(
            first=2, last=4, mean=3, max=4
        ),
        'deepseek_triton_generated_tokens_total{model="r1",version="1"}': MetricSummary(
            first=100, last=150, mean=125, max=150
        ),
        "up": MetricSummary(first=1, last=1, mean=1, max=1),
    }
    assert watch.summaries()['deepseek_triton_generated_tokens_total{model="r1",version="1"}'].increase == 50


def test_it_reads_again_and_again_in_between(server) -> None:
    many = threading.Semaphore(0)

    def answer(handler) -> None:
        server.body(200, metrics(len(server.requests), 0))(handler)
        many.release()

    server.script(*[answer] * 10_000)
    with MetricsWatch([address(server)], interval_s=0.001) as watch:
        for _ in range(5):
            assert many.acquire(timeout=30)
    running = watch.summaries()['deepseek_triton_engine_running_requests{model="r1",version="1"}']
    assert running.first == 1
    assert running.last == running.max == len(server.requests) >= 5


def test_several_servers_are_told_apart(server) -> None:
    other = HttpServer()
    try:
        for each, tokens in ((server, 1), (other, 2)):
            each.script(*[each.body(200, f"tokens_total {tokens}\n".encode())] * 2)
        with MetricsWatch([address(server), address(other)], interval_s=_NEVER_S) as watch:
            pass
        names = [f'tokens_total{{server="{each.url.removeprefix("http://")}"}}' for each in (server, other)]
        assert [watch.summaries()[name].last for name in names] == [1, 2]
    finally:
        other.stop()


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (404, b"no such page", "404"),
        (200, b"", "the page has none"),
        (200, b"<html>", "Prometheus's text format"),
        (200, b"\xff", "expected text"),
    ],
)
def test_a_server_without_metrics_is_one_line(status, body, reason, server) -> None:
    server.script(*[server.body(status, body)] * 2)
    with MetricsWatch([address(server)], interval_s=_NEVER_S) as watch:
        pass
    [problem] = watch.problems.values()
    assert problem.startswith(f"{address(server)}: no metrics: ")
    assert reason in problem
    assert watch.summaries() == {}


def test_a_server_that_is_not_there_is_one_line() -> None:
    gone = HttpServer()
    gone.stop()
    with MetricsWatch([address(gone), "no url at all"], interval_s=_NEVER_S) as watch:
        pass
    assert [problem[:4] for problem in watch.problems.values()] == ["http", "url:"]


def test_what_was_read_before_a_server_went_away_is_kept(server) -> None:
    server.script(server.body(200, b"tokens_total 7\n"), server.body(503, b""))
    with MetricsWatch([address(server)], interval_s=_NEVER_S) as watch:
        pass
    assert watch.summaries()["tokens_total"].last == 7
    assert list(watch.problems) == [address(server)]


def test_a_server_that_failed_once_is_read_again(server) -> None:
    server.script(server.body(503, b""), server.body(200, b"tokens_total 7\n"))
    with MetricsWatch([address(server)], interval_s=_NEVER_S) as watch:
        pass
    assert watch.summaries()["tokens_total"].last == 7
    assert list(watch.problems) == [address(server)]


@pytest.mark.parametrize(("asked", "expected"), [("http://127.0.0.1:8000", "Bearer secret"), ("http://other", None)])
def test_the_token_goes_to_the_servers_own_hosts(server, asked, expected) -> None:
    server.script(*[server.body(200, b"up 1\n")] * 2)
    with MetricsWatch([address(server)], own_urls=[asked], token="secret", interval_s=_NEVER_S):
        pass
    assert [headers.get("authorization") for headers in server.headers] == [expected] * 2


def test_certificates_of_the_server_are_used_for_its_metrics(tmp_path) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    server = HttpServer(tls=context)
    try:
        server.script(*[server.body(200, b"up 1\n")] * 2)
        with MetricsWatch([address(server)], tls=Tls(ca=tmp_path / "ca.pem"), interval_s=_NEVER_S) as watch:
            pass
        assert (watch.problems, watch.summaries()["up"].last) == ({}, 1)
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("urls", "endpoint", "expected"),
    [
        (["http://a:8000", "grpc://a:8001"], "triton-http", ("http://a:8002/metrics",)),
        (["grpcs://[::1]:9"], "triton-grpc", ("http://[::1]:8002/metrics",)),
        (["https://gateway:9000/v1"], "openai", ("https://gateway:9000/metrics",)),
        (["localhost"], "triton-http", ("http://localhost:8002/metrics",)),
    ],
)
def test_where_metrics_usually_are(urls, endpoint, expected) -> None:
    assert usual_metrics_urls(urls, endpoint) == expected


def test_the_table_has_a_row_for_each_metric_that_explains_something() -> None:
    def gauge(mean: float, most: float) -> MetricSummary:
        return MetricSummary(first=0, last=0, mean=mean, max=most)

    table = metrics_table(
        {
            'nv_gpu_utilization{gpu_uuid="a"}': gauge(0.5, 0.75),
            'nv_gpu_utilization{gpu_uuid="b"}': gauge(0.75, 0.875),
            "deepseek_triton_generated_tokens_total": MetricSummary(first=100, last=5100, mean=0, max=0),
            "process_open_fds": gauge(1, 1),
            "deepseek_triton_kv_cache_used_blocks": gauge(0, 0),
            "deepseek_triton_requests_refused_total": MetricSummary(first=3, last=3, mean=3, max=3),
        },
        "the last run",
    )
    assert table is not None
    assert table.title == "Servers and GPUs during the last run"
    assert table.rows == [
        ("nv_gpu_utilization", "2", "0.625", "0.875", "-"),
        ("deepseek_triton_generated_tokens_total", "1", "-", "-", "5,000"),
    ]
    assert metrics_table({"process_open_fds": gauge(1, 1)}, "the last run") is None


def test_our_own_metrics_in_the_table_exist() -> None:
    ours = {name for name in GAUGES + COUNTERS if name.startswith(PREFIX)}
    assert ours <= {
        f"{PREFIX}{family.name}" if not family.name.startswith(PREFIX) else family.name for family in FAMILIES
    }
