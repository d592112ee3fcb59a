"""Servers' metrics during a run, from real sockets."""

import ssl
import threading
from contextlib import contextmanager

import trustme

from deepseek_backend.backend_metrics import FAMILIES, PREFIX
from deepseek_triton_client import Tls
from deepseek_triton_tools.bench.result import MetricSummary
from deepseek_triton_tools.bench.result_tables import COUNTERS, GAUGES, metrics_table
from deepseek_triton_tools.bench.servers import MetricsWatch, usual_metrics_urls
from support.http_server import HttpServer

RUNNING = 'deepseek_triton_engine_running_requests{model="r1",version="1"}'
TOKENS = 'deepseek_triton_generated_tokens_total{model="r1",version="1"}'


@contextmanager
def serving(*answers, **options):
    """A server of metrics; an answer is a body, or a status and a body."""
    server = HttpServer(**options)
    server.script(*(server.body(*(each if isinstance(each, tuple) else (200, each))) for each in answers))
    try:
        yield server
    finally:
        server.stop()


def address(server):
    return f"{server.url}/metrics"


def watched(*addresses, **options):
    """The watch of a run in which they are read at the begin and at the end only."""
    with MetricsWatch(addresses, interval_s=3600.0, **options) as watch:
        pass
    return watch


def metrics(running, tokens):
    return f"""\
# HELP deepseek_triton_engine_running_requests Sequences in the engine's running batch.
# TYPE deepseek_triton_engine_running_requests gauge
deepseek_triton_engine_running_requests{{model="r1",version="1"}} {running}
deepseek_triton_generated_tokens_total{{version="1",model="r1"}} {tokens}
deepseek_triton_time_to_first_token_seconds_bucket{{le="0.1"}} 5
nv_gpu_utilization{{gpu_uuid="GPU-1"}} nan
up 1
""".encode()


def test_it_reads_when_the_block_begins_and_ends():
    with serving(metrics(2, 100), metrics(4, 150)) as server:
        with MetricsWatch([address(server)], interval_s=3600.0) as watch:
            assert len(server.requests) == 1
        assert [request[:2] for request in server.requests] == [("GET", "/metrics")] * 2  # Triton answers HEAD with 405

    assert watch.problems == {}
    assert watch.summaries() == {
        RUNNING: MetricSummary(first=2, last=4, mean=3, max=4),
        TOKENS: MetricSummary(first=100, last=150, mean=125, max=150),
        "up": MetricSummary(first=1, last=1, mean=1, max=1),
    }
    assert watch.summaries()[TOKENS].increase == 50


def test_it_reads_again_and_again_in_between():
    many = threading.Semaphore(0)

    def answer(handler):
        server.body(200, metrics(len(server.requests), 0))(handler)
        many.release()

    with serving() as server:
        server.script(*[answer] * 10_000)
        with MetricsWatch([address(server)], interval_s=0.001) as watch:
            for _ in range(5):
                assert many.acquire(timeout=30)
        running = watch.summaries()[RUNNING]
        assert running.first == 1
        assert running.last == running.max == len(server.requests) >= 5


def test_several_servers_are_told_apart():
    with serving(*[b"tokens_total 1\n"] * 2) as one, serving(*[b"tokens_total 2\n"] * 2) as other:
        found = watched(address(one), address(other)).summaries()
        names = [f'tokens_total{{server="{each.url.removeprefix("http://")}"}}' for each in (one, other)]
    assert [found[name].last for name in names] == [1, 2]


def test_a_server_without_metrics_is_one_line():
    cases = {
        (404, b"no such page"): "404",
        (200, b""): "the page has none",
        (200, b"<html>"): "Prometheus's text format",
        (200, b"\xff"): "expected text",
    }
    for answer, reason in cases.items():
        with serving(answer, answer) as server:
            watch = watched(address(server))
        [problem] = watch.problems.values()
        assert problem.startswith(f"{address(server)}: no metrics: ")
        assert reason in problem
        assert watch.summaries() == {}

    problems = watched(address(server), "no url at all").problems  # the server is gone
    assert {url[:4]: problem[:4] for url, problem in problems.items()} == {"http": "http", "no u": "url:"}


def test_what_was_read_before_or_after_a_failure_is_kept():
    tokens, failure = b"tokens_total 7\n", (503, b"")
    for answers in ((tokens, failure), (failure, tokens)):
        with serving(*answers) as server:
            watch = watched(address(server))
        assert watch.summaries()["tokens_total"].last == 7
        assert list(watch.problems) == [address(server)]


def test_the_token_goes_to_the_servers_own_hosts():
    for asked, expected in (("http://127.0.0.1:8000", "Bearer secret"), ("http://other", None)):
        with serving(b"up 1\n", b"up 1\n") as server:
            watched(address(server), own_urls=[asked], token="secret")
            assert [headers.get("authorization") for headers in server.headers] == [expected] * 2


def test_certificates_of_the_server_are_used_for_its_metrics(tmp_path):
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    with serving(b"up 1\n", b"up 1\n", tls=context) as server:
        watch = watched(address(server), tls=Tls(ca=tmp_path / "ca.pem"))
    assert (watch.problems, watch.summaries()["up"].last) == ({}, 1)


def test_where_metrics_usually_are():
    cases = {
        ("triton-http", "http://a:8000", "grpc://a:8001"): ("http://a:8002/metrics",),
        ("triton-grpc", "grpcs://[::1]:8001", "grpcs://[::1]:9"): ("http://[::1]:8002/metrics",),
        ("openai", "https://gateway:9000/v1"): ("https://gateway:9000/metrics",),
        ("triton-http", "localhost"): ("http://localhost:8002/metrics",),
    }
    assert {case: usual_metrics_urls(case[1:], case[0]) for case in cases} == cases


def test_the_table_has_a_row_for_each_metric_that_explains_something():
    def gauge(mean, most):
        return MetricSummary(first=0, last=0, mean=mean, max=most)

    found = {
        'nv_gpu_utilization{gpu_uuid="a"}': gauge(0.5, 0.75),
        'nv_gpu_utilization{gpu_uuid="b"}': gauge(0.75, 0.875),
        "deepseek_triton_generated_tokens_total": MetricSummary(first=100, last=5100, mean=0, max=0),
        "process_open_fds": gauge(1, 1),
        "deepseek_triton_kv_cache_used_blocks": gauge(0, 0),
        "deepseek_triton_requests_refused_total": MetricSummary(first=3, last=3, mean=3, max=3),
    }
    table = metrics_table(found, "the last run")
    assert "the last run" in table.title
    assert table.rows == [
        ("nv_gpu_utilization", "2", "0.625", "0.875", "-"),
        ("deepseek_triton_generated_tokens_total", "1", "-", "-", "5,000"),
    ]
    assert metrics_table({"process_open_fds": gauge(1, 1)}, "the last run") is None


def test_our_own_metrics_in_the_table_exist():
    ours = {name for name in GAUGES + COUNTERS if name.startswith(PREFIX)}
    assert ours <= {f"{PREFIX}{family.name.removeprefix(PREFIX)}" for family in FAMILIES}
