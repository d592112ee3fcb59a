"""The backend's numbers on the /metrics of a real tritonserver."""

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deepseek_backend.backend_metrics import FAMILIES, PREFIX, ROUTING_PREFIX, Kind, bound_text
from deepseek_triton_client import Client, InvalidRequest
from deepseek_triton_tools.bench.servers import MetricsWatch
from deepseek_triton_tools.server.server_process import ServerProcess
from support.scraping import LAST, published, settled, value
from support.servers import build
from support.waiting import wait_for
from support.web import web


@pytest.fixture(params=["tiny_server", "simulated_server"])
def server(request: pytest.FixtureRequest) -> ServerProcess:
    served: ServerProcess = request.getfixturevalue(request.param)
    return served


def test_requests_are_counted_where_prometheus_looks(server: ServerProcess) -> None:
    before = settled(server)
    with Client(server.http_url) as client:
        for _ in range(3):
            client.generate("Hello, my name is", max_tokens=8, ignore_eos=True)
        with pytest.raises(InvalidRequest):
            client.generate("Hello", max_tokens=8, temperature=-1)
    refused = {"code": "E_INVALID_ARGUMENT"}
    after = published(
        server,
        lambda series: (
            value(series, "requests_refused_total", **refused) > value(before, "requests_refused_total", **refused)
            and value(series, LAST) >= value(before, LAST) + 3
            and value(series, "inflight_sequences") == 0
        ),
    )

    def grown(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    assert grown("requests_finished_total", outcome="length") == 3
    assert grown("requests_refused_total", **refused) == 1
    assert grown("requests_accepted_total") == 3
    assert grown("generated_tokens_total") == 24
    assert grown("prompt_tokens_total") > 3
    assert grown("time_to_first_token_seconds_count") == 3
    assert grown("time_to_first_token_seconds_bucket", le="+Inf") == 3
    assert grown("request_duration_seconds_sum") > grown("time_to_first_token_seconds_sum") > 0
    assert 0 < grown("inter_token_latency_seconds_count") < 24
    assert value(after, "ready") == 1


def test_a_benchmark_reads_them_during_a_run(server: ServerProcess) -> None:
    """Triton's metrics port refuses HEAD, with a body."""
    with MetricsWatch([server.metrics_url]) as watch, Client(server.http_url) as client:
        client.generate("Hello, my name is", max_tokens=8)
    assert not watch.problems
    summaries = {name.partition("{")[0]: summary for name, summary in watch.summaries().items()}
    assert summaries[f"{PREFIX}ready"].last == 1
    assert not [name for name in summaries if name.endswith("_bucket")]


def test_every_histogram_has_the_series_that_promql_asks_for(server: ServerProcess) -> None:
    series = published(server, lambda series: "info" in {name for name, _ in series})
    for family in (family for family in FAMILIES if family.kind is Kind.HISTOGRAM):
        name = family.name.removeprefix(PREFIX)
        bounds = [bound_text(bound) for bound in (*family.buckets, float("inf"))]
        buckets = [value(series, f"{name}_bucket", le=bound) for bound in bounds]
        assert buckets == sorted(buckets)
        assert buckets[-1] == value(series, f"{name}_count")
        assert value(series, f"{name}_sum") >= 0


def picked(text: str, selector: str) -> list[float]:
    """The numbers that a router's selector finds in the text of /metrics. The endpoint picker (core-metrics-extractor
    of llm-d-inference-scheduler at 520af478) takes one gauge with equal labels, and KEDA's metrics-api the first."""
    name, _, inner = selector.rstrip("}").partition("{")
    wanted = set(re.findall(r"(\w+)=(\w+)", inner))
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families[name].type == "gauge"
    return [sample.value for sample in families[name].samples if wanted <= sample.labels.items()]


PICKER = {
    "queued": "nv_trt_llm_request_metrics{request_type=waiting}",
    "running": "nv_trt_llm_request_metrics{request_type=scheduled}",
    "kv_usage": "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=fraction}",
    "block_size": "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=tokens_per}",
    "num_blocks": "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=max}",
}
"""What the endpoint picker reads of pods with the label llm-d.ai/engine-type: triton-tensorrt-llm."""


def orca(text: str) -> tuple[float, float]:
    """Utilization of the KV cache and its tokens, as server/src/orca_http.cc at e1db8a60 takes them from /metrics: a
    number is digits with a point, and the last series of a type counts."""
    found = {}
    pattern = r"nv_trt_llm_kv_cache_block_metrics(?:{(.*?)})?\s*(\d+(?:\.\d+)?)"
    for labels, number in re.findall(pattern, text):
        found[dict(re.findall(r'(\w+)="([^"]*)"', labels))["kv_cache_block_type"]] = float(number)
    return found["used"] / found["max"], found["max"] * found["tokens_per"]


def test_routers_read_what_the_c_plus_plus_backend_would_say(server: ServerProcess) -> None:
    """They get the numbers of our own families, once each."""
    prompt = "Hello, my name is " * 20
    texts: list[str] = []

    def in_use() -> bool:
        texts.append(web.get(server.metrics_url).text)
        usage, running = (picked(texts[-1], PICKER[name]) for name in ("kv_usage", "running"))
        return sum(usage) > 0 and running == [1]

    with Client(server.http_url) as client, client.stream(prompt, max_tokens=2000, ignore_eos=True) as stream:
        next(iter(stream))
        wait_for(in_use)

    [[queued], [running], [kv_usage], [block_size], [num_blocks]] = (
        picked(texts[-1], spec) for spec in PICKER.values()
    )
    assert (queued, running) == (0, 1)
    assert 0 < kv_usage < 1
    assert block_size == int(block_size) > 0
    utilization, capacity = orca(texts[-1])
    assert utilization == pytest.approx(kv_usage, abs=0.02)
    assert capacity == num_blocks * block_size
    assert picked(texts[-1], f"{PREFIX}kv_cache_capacity_blocks") == [num_blocks]
    assert picked(texts[-1], f"{PREFIX}inflight_sequences") == [1]
    for line in texts[-1].splitlines():
        if line.startswith(ROUTING_PREFIX):
            labels = set(re.findall(r'(\w+)="', line))
            assert labels - {"request_type", "kv_cache_block_type"} == {"model", "version"}


def test_a_server_without_metrics_serves(tmp_path: Path) -> None:
    repository = build(tmp_path / "repository", "tiny", "--engine", "simulated")
    with (
        ServerProcess.serving(repository, server_args=("--allow-metrics=false",)) as server,
        Client(server.http_url) as client,
    ):
        assert client.generate("Hello", max_tokens=4).num_output_tokens == 4
        log = "\n".join(server.log_tail)

    assert "Traceback" not in log
    assert server.returncode == 0


def test_a_model_that_is_loaded_over_itself_keeps_its_metrics(loaded_server: ServerProcess) -> None:
    """Both instances live at once for a moment. With series of the same labels each, Triton's heap is corrupted."""
    server = loaded_server
    with Client(server.http_url) as client:
        before = published(server, lambda series: "info" in {name for name, _ in series})
        client.generate("Hello", max_tokens=4)
        accepted = value(before, "requests_accepted_total") + 1
        published(server, lambda series: value(series, "requests_accepted_total") == accepted)
        unloaded = sum("successfully unloaded" in line for line in server.log_tail)
        with (server.options.repository / "tensorrt_llm/1/model.py").open("a") as file:
            file.write("# changed: Triton loads it again\n")
        web.post(f"{server.http_url}/v2/repository/models/tensorrt_llm/load").raise_for_status()

        wait_for(lambda: sum("successfully unloaded" in line for line in server.log_tail) > unloaded)
        series = published(server, lambda series: True)
        assert value(series, "requests_accepted_total") == 0
        client.generate("Hello", max_tokens=4)
        published(server, lambda series: value(series, "requests_accepted_total") == 1)
