"""Keys, limits, ids, logs and traces of the whole application, in front of a server written by the test."""

from __future__ import annotations

import json
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from deepseek_triton_tools.gateway.app.access_log import AccessLog
from deepseek_triton_tools.gateway.app.application import create_app
from deepseek_triton_tools.gateway.app.handled_request import HandledRequest
from deepseek_triton_tools.gateway.guard.api_keys import new_key
from deepseek_triton_tools.gateway.settings import GatewaySettings, ModelSettings
from support.asgi_server import serving_app
from support.waiting import PATIENCE_S

MODEL = {"name": "tiny", "engine": "fake", "max_seq_len": 100, "checkpoint": "tiny", "thinking_switch": False}
ANSWER = {"text_output": "Paris", "finish_reason": "stop", "num_input_tokens": 7, "num_output_tokens": 3}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "What is the capital of France?"}]}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class FakeTriton:
    """Answers everything with Paris, and keeps the requests that generate."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for step in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{step}.complete"})
            return
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        answer = b""
        if scope["path"].endswith("/generate_stream"):
            document = json.loads(body)
            if document.get("task") == "describe":
                outputs: dict[str, Any] = {"model_info": json.dumps(MODEL)}
            else:
                headers = {name.decode(): value.decode() for name, value in scope["headers"]}
                self.requests.append((headers, document))
                outputs = ANSWER
            answer = f"data: {json.dumps(outputs)}\n\n".encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": answer})


@pytest.fixture
def triton() -> FakeTriton:
    return FakeTriton()


@pytest.fixture
def gateway(triton: FakeTriton, tmp_path: Path) -> Iterator[Any]:
    with ExitStack() as stack:
        server = stack.enter_context(serving_app(triton))

        @contextmanager
        def begin(**settings: Any) -> Iterator[httpx.Client]:
            models = settings.pop("models", (ModelSettings((server,)),))
            app = create_app(GatewaySettings(models, metrics_port=None, **settings))
            with serving_app(app) as url, httpx.Client(base_url=url) as client:
                yield client

        yield begin


def authorized(tmp_path: Path, words: str = "") -> tuple[Path, dict[str, str]]:
    key, line = new_key("ann")
    (tmp_path / "keys").write_text(f"{line} {words}")
    return tmp_path / "keys", {"Authorization": f"Bearer {key}"}


def test_only_who_has_a_key_may_ask_but_probes_may(gateway, triton, tmp_path):
    keys, headers = authorized(tmp_path)
    with gateway(keys_file=keys, metrics_need_key=True) as client:
        for path in ("v1/models", "metrics"):
            refused = client.get(path)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            assert refused.json()["error"]["type"] == "invalid_request_error"
            assert client.get(path, headers=headers).status_code == 200
        refused = client.post("v1/chat/completions", json=CHAT, headers={"Authorization": "Bearer sk-other"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        for path in ("health", "ready", "v2/health/live", "v2/health/ready", "v2/models/x/ready"):
            assert client.get(path).status_code == 200
    assert triton.requests == []


def test_who_serves_whom_is_for_admins(gateway, tmp_path):
    (owner, owners), (user, users) = new_key("owner"), new_key("user")
    (tmp_path / "keys").write_text(f"{owners} admin=yes\n{users}")
    with gateway(keys_file=tmp_path / "keys") as client:
        headers = {"Authorization": f"Bearer {user}"}
        assert client.post("v1/chat/completions", json=CHAT, headers=headers).status_code == 200
        refused, told = client.get("fleet", headers=headers), client.get("metrics", headers=headers)
        open_to_all = client.get("metrics")
        for unknown in ("Bearer sk-other", "Basic YTpi"):  # the second is a proxy's
            stranger = client.get("metrics", headers={"Authorization": unknown})
            assert (stranger.status_code, 'key="user"' in stranger.text) == (200, False)
        headers = {"Authorization": f"Bearer {owner}"}
        fleet, metrics = client.get("fleet", headers=headers), client.get("metrics", headers=headers)

    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_an_admin")
    assert "admin=yes" in refused.json()["error"]["message"]
    for text in (told.text, open_to_all.text):
        assert "gateway_requests_total{" in text
        assert "http://" not in text
        assert 'key="' not in text
    [model] = fleet.json()["models"]
    assert f'server="{model["servers"][0]["url"]}"' in metrics.text
    assert 'key_requests_total{key="user"} 2.0' in metrics.text


def test_a_key_is_for_some_models_only(gateway, triton, tmp_path):
    keys, headers = authorized(tmp_path, "models=other")
    with gateway(keys_file=keys) as client:
        refused = client.post("v1/chat/completions", json=CHAT, headers=headers)
        assert client.get("v1/models", headers=headers).json()["data"] == []
        one = client.get(f"v1/models/{CHAT['model']}", headers=headers)
        unknown = client.get("v1/models/no-such-model", headers=headers)
    assert (one.status_code, one.json()["error"]["code"]) == (403, "model_not_found")
    assert unknown.status_code == 404
    assert CHAT["model"] not in unknown.text
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_found")
    assert triton.requests == []


def test_limits_count_what_was_used(gateway, triton, tmp_path):
    keys, headers = authorized(tmp_path, "requests_per_minute=2 tokens_per_minute=100000")
    with gateway(keys_file=keys) as client:
        first, second, third = (client.post("v1/chat/completions", json=CHAT, headers=headers) for _ in range(3))

    assert (first.status_code, second.status_code, third.status_code) == (200, 200, 429)
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert int(second.headers["x-ratelimit-remaining-tokens"]) > 100_000 - 10 - 60  # 10 used, and a guess
    assert third.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(third.headers["retry-after"]) <= 30
    assert len(triton.requests) == 2


def test_ids_and_headers_go_through(gateway, triton, tmp_path):
    log = tmp_path / "log"
    with gateway(upstream_headers=(("triton-key", "secret"),), access_log=str(log)) as client:
        for _ in range(2):
            answer = client.post("v1/chat/completions", json=CHAT, headers={"X-Request-Id": "mine"})
            assert answer.headers["x-request-id"] == "mine"
        made = client.post("v1/chat/completions", json={**CHAT, "model": "other"}, headers={"X-Request-Id": "no good"})

    (headers, first), (_, second) = triton.requests
    assert headers["triton-key"] == "secret"
    assert first["id"] != second["id"]
    assert first["id"].startswith("mine-")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["id"] for line in lines] == ["mine", "mine", made.headers["x-request-id"]]
    assert re.fullmatch(r"req-\w{32}", made.headers["x-request-id"])
    assert lines[0]["upstream_id"] in first["id"]
    assert (lines[0]["prompt_tokens"], lines[0]["generated_tokens"], lines[0]["finish_reason"]) == (7, 3, "stop")
    assert (lines[2]["status"], lines[2]["error"]) == (404, "model_not_found")
    assert "secret" not in log.read_text()


def test_a_full_disk_costs_lines_of_the_access_log_and_no_answer(gateway, triton, caplog):
    """Found by filling a disk under load: each request wrote a traceback to the gateway's own log."""
    with gateway(access_log="/dev/full") as client:
        statuses = [client.post("v1/chat/completions", json=CHAT).status_code for _ in range(3)]

    assert statuses == [200, 200, 200]
    told = [record.getMessage() for record in caplog.records if "access log" in record.getMessage()]
    assert told == [
        "the access log can't be written: [Errno 28] No space left on device; requests are served without it"
    ]


def test_it_is_told_when_the_access_log_is_written_again(tmp_path, caplog):
    log = AccessLog(str(tmp_path / "log"))
    log.ends(HandledRequest("first", "/v1/completions"))
    (tmp_path / "log").unlink()
    (tmp_path / "log").mkdir()
    for number in range(2):
        log.ends(HandledRequest(f"lost-{number}", "/v1/completions"))
    (tmp_path / "log").rmdir()
    log.ends(HandledRequest("last", "/v1/completions"))
    log.close()

    assert "the access log is written again; 2 lines are missing" in caplog.text
    assert json.loads((tmp_path / "log").read_text())["id"] == "last"


def test_a_trace_goes_on_to_triton(gateway, triton):
    with gateway(traces_url="http://127.0.0.1:9") as client:
        client.post("v1/chat/completions", json=CHAT, headers={"traceparent": PARENT})
    [(headers, _)] = triton.requests
    assert headers["traceparent"].startswith(PARENT[:36])
    assert headers["traceparent"] != PARENT


def probe(question: str, url: object) -> int:
    command = [sys.executable, "-m", "deepseek_triton_tools.cli.main", "probe", question, str(url)]
    return subprocess.run(command, check=False).returncode


@pytest.mark.slow
def test_one_model_without_servers_takes_no_other_away(gateway):
    with gateway(models=(ModelSettings(("http://127.0.0.1:9",), "away"),)) as client:
        assert client.get("ready").status_code == 503
        assert client.get("v1/models").json()["data"] == []
        assert probe("ready", client.base_url) == 1
        assert probe("live", client.base_url) == 0
    with gateway() as client:
        assert probe("ready", client.base_url) == 0
        assert [model["id"] for model in client.get("v1/models").json()["data"]] == ["tiny"]
        metrics = client.get("metrics").text
    assert re.search(r'deepseek_triton_gateway_server_up\{server="http://127.0.0.1:\d+"\} 1.0', metrics)


def test_pages_of_another_origin_may_ask_where_it_is_named(gateway, tmp_path):
    keys, _ = authorized(tmp_path)
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    with gateway(keys_file=keys, cors_origins=("https://chat.example.com",)) as client:
        allowed, refused = (
            client.options("v1/chat/completions", headers={"Origin": origin, **asked})
            for origin in ("https://chat.example.com", "https://evil.example.com")
        )
        answer = client.get("v1/models", headers={"Origin": "https://chat.example.com"})
    exposed = answer.headers["access-control-expose-headers"].split(", ")
    assert {"x-request-id", "retry-after", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-requests"} <= {*exposed}
    assert allowed.headers["access-control-allow-origin"] == "https://chat.example.com"
    assert "access-control-allow-origin" not in refused.headers


@pytest.mark.slow
def test_the_verb_serves_https_over_two_workers_and_stops(triton, tmp_path):
    keys, headers = authorized(tmp_path, "requests_per_minute=3 admin=yes")
    authority, context = trustme.CA(), ssl.create_default_context()
    authority.configure_trust(context)
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(tmp_path / "pem")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # Without idle connections, because uvicorn waits at a stop until their owners have said goodbye in TLS. And a new
    # connection for each request lets both workers get some.
    limits = httpx.Limits(max_keepalive_connections=0)
    address = f"https://localhost:{port}"
    with serving_app(triton) as server, httpx.Client(base_url=address, verify=context, limits=limits) as client:
        (tmp_path / "gateway.yaml").write_text(
            f"server: {server}\nport: {port}\nworkers: 2\nkeys: {keys}\ntls-certificate: {tmp_path / 'pem'}\n"
            "metrics-port: none\naccess-log: '-'\n"
        )
        command = [sys.executable, "-m", "deepseek_triton_tools.cli.main", "gateway", "--config"]
        with subprocess.Popen([*command, str(tmp_path / "gateway.yaml")], stdout=subprocess.PIPE, text=True) as process:
            try:
                while True:
                    with suppress(httpx.TransportError):
                        client.get("health")
                        break
                    assert process.poll() is None
                statuses = [
                    client.post("v1/chat/completions", json=CHAT, headers=headers).status_code for _ in range(8)
                ]
                counted = client.get("metrics").text
                num_workers = client.get("fleet", headers=headers).json()["workers"]
            finally:
                process.terminate()
                printed, _ = process.communicate()

    assert (process.returncode, num_workers) == (0, 2)
    assert sorted(statuses) == [200] * 3 + [429] * 5
    # Each of the two workers has counted its own, and any of them tells the sum.
    assert re.search(r'gateway_requests_total\{.*status="200"\} 3.0', counted)
    assert re.search(r'gateway_requests_total\{.*status="429"\} 5.0', counted)
    assert f"OpenAI's API at https://127.0.0.1:{port}/v1 (2 workers)" in printed
    assert printed.count('"error":"rate_limit_exceeded"') == 5


@pytest.mark.parametrize("size", [1_000, 200_000])
def test_a_body_that_is_too_large_is_refused(gateway, triton, size):
    with gateway(max_body_bytes=500) as client:
        refused = client.post("v1/chat/completions", content=b" " * size, headers={"Content-Type": "application/json"})
    assert refused.status_code == 413
    assert triton.requests == []


def until_closed(client: httpx.Client, request: bytes) -> tuple[bytes, Any]:
    """Send it, and return (the response's head, its JSON) once the gateway has closed the connection."""
    received = b""
    with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:
        connection.settimeout(PATIENCE_S)
        connection.sendall(request)
        while data := connection.recv(65536):
            received += data
    head, _, body = received.partition(b"\r\n\r\n")
    return head, json.loads(body)


def test_a_body_that_does_not_end_is_not_waited_for(gateway):
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with gateway(body_timeout_s=0.2) as client:
        told, document = until_closed(client, head + b"Content-Length: 100\r\n\r\n{")
        assert client.get("health").status_code == 200
    assert told.startswith(b"HTTP/1.1 408 ")
    error = document["error"]
    assert error["message"] == "the request's body: expected all of it within 0.2 s, got 1 bytes. Send it faster."
    assert error["code"] == "request_timeout"


@pytest.mark.parametrize(
    ("line", "fields", "status"),
    [
        ("POST /v1/completions", "Content-Type: application/json", 401),
        ("POST /v1/completions", "Content-Type: application/json\r\n{key}", 413),
        ("POST /v1/completions", "{key}", 415),
        ("POST /v1/nothing", "{key}", 404),
        ("GET /v1/completions", "{key}", 405),
    ],
)
@pytest.mark.parametrize("size", ["Content-Length: 1000000", "Transfer-Encoding: chunked"])
def test_a_body_that_is_refused_before_its_end_is_not_waited_for(gateway, tmp_path, line, fields, status, size):
    keys, headers = authorized(tmp_path)
    fields = fields.format(key=f"Authorization: {headers['Authorization']}")
    request = f"{line} HTTP/1.1\r\nHost: x\r\n{fields}\r\n{size}\r\n\r\n64\r\n{'x' * 100}\r\n"
    with gateway(keys_file=keys, body_timeout_s=0.2, max_body_bytes=50) as client:
        told, document = until_closed(client, request.encode())
    assert told.startswith(b"HTTP/1.1 %d " % status)
    assert b"\r\nconnection: close" in told
    assert document["error"]["message"]


def test_a_refusal_without_a_body_keeps_the_connection(gateway, tmp_path):
    with gateway(keys_file=authorized(tmp_path)[0]) as client:
        assert "connection" not in client.get("v1/models").headers
        assert "connection" not in client.get("v1/nothing").headers
