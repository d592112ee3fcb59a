"""What the access log, the metrics and the traces say of a request."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deepseek_triton_tools.gateway.model_front import Observers
from deepseek_triton_tools.gateway.observers import FAMILIES, AccessLog, GatewayMetrics, HandledRequest, begin_record
from deepseek_triton_tools.gateway.settings import GatewaySettings, ModelSettings

ROUTE = "/v1/chat/completions"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def answered(**fields):
    record = HandledRequest(
        "req-1", ROUTE, began_s=100.0, upstream_id="req-1-x", key_name="ann", model="r1", status=200
    )
    record.stream = True
    record.server, record.retries, record.finish_reason = "http://node1:8000", 1, "stop"
    record.num_input_tokens, record.num_output_tokens, record.num_cached_tokens = 10, 5, 8
    record.num_reasoning_tokens, record.first_token_s, record.last_token_s, record.ended_s = 2, 100.5, 100.9, 101.0
    for name, value in fields.items():
        setattr(record, name, value)
    return record


def samples(text):
    """A sample's name and its labels' values, by the labels' names -> its value."""
    families = text_string_to_metric_families(text.decode())
    return {
        (one.name, *(value for _, value in sorted(one.labels.items()))): one.value
        for family in families
        for one in family.samples
    }


def test_a_request_id_is_kept_where_it_can_stand_in_a_header():
    table = {b"trace-1.a_b:C": True, b"x" * 128: True, b"x" * 129: False, b"": False, b"a b": False}
    for given, kept in (table | {b"a\r\nb": False, b"caf\xe9": False}).items():
        record, again = (begin_record(ROUTE, [(b"x-request-id", given), (b"traceparent", b"p")]) for _ in range(2))
        assert (record.request_id == given.decode("latin-1")) is kept
        assert re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", record.request_id)
        assert record.upstream_id.startswith(record.request_id)
        assert record.upstream_id != again.upstream_id  # the client may send its id twice
        assert record.trace_parent == "p"


def test_times_of_a_record():
    record = answered()
    assert record.ttft_s == pytest.approx(0.5)
    assert record.mean_itl_s == pytest.approx(0.1)
    assert record.duration_s == pytest.approx(1.0)
    assert HandledRequest("a", ROUTE).ttft_s is None
    assert answered(num_output_tokens=1).mean_itl_s is None
    assert (answered(stream=False).ttft_s, answered(stream=False).mean_itl_s) == (None, None)


def test_the_access_log_is_a_line_of_json_a_request_and_survives_rotation(tmp_path):
    log = AccessLog(str(tmp_path / "log"))
    log.ends(answered())
    os.rename(tmp_path / "log", tmp_path / "log.1")
    log.ends(answered(key_name="", client_left=True, status=0, first_token_s=None))
    log.close()

    line = json.loads((tmp_path / "log.1").read_text())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line.pop("time"))
    expected = {"id": "req-1", "upstream_id": "req-1-x", "key": "ann", "route": ROUTE, "model": "r1", "stream": True}
    expected |= {"status": 200, "error": None, "finish_reason": "stop", "server": "http://node1:8000", "retries": 1}
    expected |= {"prompt_tokens": 10, "cached_tokens": 8, "generated_tokens": 5, "reasoning_tokens": 2}
    expected |= {"ttft_s": 0.5, "itl_s": 0.1, "duration_s": 1.0, "client_left": False, "context_server": None}
    assert line == expected
    other = json.loads((tmp_path / "log").read_text())
    assert (other["key"], other["status"], other["ttft_s"], other["client_left"]) == (None, None, None, True)


def test_the_metrics_count_what_records_say():
    metrics = GatewayMetrics()
    for _ in range(3):
        metrics.begins(answered())
    metrics.ends(answered())
    metrics.ends(answered(status=429, error_code="rate_limit_exceeded", server="", first_token_s=None, retries=0))

    of_two_models = [("http://node1:8000", True), ("http://node1:8000", False)]
    found = samples(metrics.text([*of_two_models, ("http://node2:8000", False)]))

    name = "deepseek_triton_gateway_{}".format
    assert found[name("inflight_requests"),] == 1
    assert found[name("requests_total"), "", "r1", ROUTE, "200"] == 1
    assert found[name("requests_total"), "rate_limit_exceeded", "r1", ROUTE, "429"] == 1
    assert found[name("retries_total"),] == 1
    assert found[name("key_requests_total"), "ann"] == 2
    assert found[name("key_tokens_total"), "ann"] == 30
    assert found[name("generated_tokens_total"), "r1"] == 10
    assert found[name("server_requests_total"), "http://node1:8000", "200"] == 1
    assert [found[name("server_up"), f"http://node{number}:8000"] for number in (1, 2)] == [1, 0]
    assert found[name("time_to_first_token_seconds_sum"), "r1"] == pytest.approx(0.5)
    assert found[name("inter_token_latency_seconds_count"), "r1"] == 1

    # A server that has left is left out, and so are names for strangers.
    left = samples(metrics.text([("http://node2:8000", True)]))
    stranger = samples(metrics.text([("http://node1:8000", True)], names=False))
    back = samples(metrics.text([("http://node1:8000", True)]))
    assert not any("http://node1:8000" in key for key in left)
    assert (left[name("server_up"), "http://node2:8000"], left[name("key_requests_total"), "ann"]) == (1, 2)
    assert not any({"http://node1:8000", "http://node2:8000", "ann"} & {*key} for key in stranger)
    assert stranger[name("generated_tokens_total"), "r1"] == 10
    assert back[name("server_requests_total"), "http://node1:8000", "200"] == 1  # a counter goes on where it was


COUNT = """
import os, sys
from deepseek_triton_tools.gateway.observers import GatewayMetrics
from deepseek_triton_tools.gateway.observers import HandledRequest
metrics = GatewayMetrics()
record = HandledRequest("a", "/v1/models", model="r1", status=200)
metrics.begins(record)
metrics.begins(record)
metrics.ends(record)
if sys.argv[1] == "die":
    os.kill(os.getpid(), 9)
sys.stdout.buffer.write(metrics.text([("http://node1:8000", True)]))
"""


@pytest.mark.slow
def test_the_metrics_of_all_workers_are_summed_and_the_dead_ones_leave_nothing_in_flight(tmp_path):
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COUNT]
    assert subprocess.run([*command, "die"], env=environment, check=False).returncode == -9

    done = subprocess.run([*command, "print"], env=environment, check=True, capture_output=True)

    found = samples(done.stdout)
    assert found["deepseek_triton_gateway_requests_total", "", "r1", "/v1/models", "200"] == 2
    assert found["deepseek_triton_gateway_inflight_requests",] == 1
    assert found["deepseek_triton_gateway_server_up", "http://node1:8000"] == 1


@pytest.mark.documents
def test_docs_metrics_md_describes_every_family_of_the_gateway():
    page = (Path(__file__).resolve().parents[2] / "docs/metrics.md").read_text("utf-8")
    rows = re.findall(r"^\| `(deepseek_triton_gateway_\w+)` \| (\w+) \| (.*?) \| (.*) \|$", page, re.MULTILINE)

    assert rows == [(f.name, f.kind, ", ".join(f"`{label}`" for label in f.labels), f.help) for f in FAMILIES]


@pytest.mark.slow
def test_a_span_goes_from_the_clients_trace_on_to_triton(collector, tmp_path):
    settings = GatewaySettings(
        (ModelSettings(("u",)),), traces_url=f"{collector.url}/", access_log=str(tmp_path / "log")
    )
    observers = Observers(settings)
    record = begin_record(ROUTE, [(b"traceparent", PARENT.encode())])
    observers.begins(record)
    parent = record.upstream_headers["traceparent"]
    for name, value in (("model", "r1"), ("status", 503), ("error_code", "E_UNAVAILABLE"), ("num_input_tokens", 7)):
        setattr(record, name, value)
    observers.ends(record)
    wrong = begin_record("/v1/models", [(b"traceparent", b"00-xyz")])
    observers.begins(wrong)
    observers.ends(wrong)
    observers.close()

    [span, own] = collector.spans
    assert (own.name, own.parent_span_id) == ("/v1/models", b"")
    assert span.name == "chat r1"
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (PARENT[3:35], PARENT[36:52])
    assert parent == f"00-{span.trace_id.hex()}-{span.span_id.hex()}-01"
    assert span.status.code == 2
    found = {attribute.key: attribute.value for attribute in span.attributes}
    assert found["gen_ai.operation.name"].string_value == "chat"
    assert found["gen_ai.usage.input_tokens"].int_value == 7
    assert found["http.response.status_code"].int_value == 503
    assert found["error.type"].string_value == "E_UNAVAILABLE"
    assert json.loads((tmp_path / "log").read_text().splitlines()[0])["id"] == record.request_id


def test_nobody_is_told_of_probes(tmp_path):
    observers = Observers(GatewaySettings((ModelSettings(("u",)),), access_log=str(tmp_path / "log")))
    for route in ("/health", "/ready", "/health/ready", "/metrics", "/v2/models/NAME/ready"):
        record = begin_record(route, [])
        observers.begins(record)
        observers.ends(record)
        assert route.encode() not in observers.metrics.text()
    observers.close()
    assert (tmp_path / "log").read_text() == ""


@pytest.mark.slow
def test_the_sdk_is_not_imported_without_traces():
    program = "import sys, deepseek_triton_tools.gateway.observers; print('opentelemetry' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"
