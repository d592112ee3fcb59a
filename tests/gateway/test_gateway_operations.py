"""Keys, limits, ids, logs and traces of the whole application, in front of a server written by the test."""

import json
import re
import socket
from contextlib import contextmanager
from dataclasses import replace

import httpx
import pytest

from deepseek_triton_tools.gateway import guard
from deepseek_triton_tools.gateway.guard import new_key
from deepseek_triton_tools.gateway.model_front import GatewayState
from deepseek_triton_tools.gateway.observers import AccessLog, HandledRequest
from deepseek_triton_tools.gateway.settings import GatewaySettings, ModelSettings
from deepseek_triton_tools.gateway.triton_call import Load
from gateway.asking import BODIES, CHAT, error_of
from support.leaving_client import leaving
from support.raw_triton import RawTriton, answer, event, gateway_before
from support.waiting import PATIENCE_S, wait_for

PARIS = event(text_output="Paris", finish_reason="stop", num_input_tokens=7, num_output_tokens=3)
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def triton():
    with RawTriton().serving() as triton:
        triton.script = answer(PARIS)
        yield triton


@pytest.fixture
def gateway(triton):
    @contextmanager
    def begin(urls=(), **settings):
        with gateway_before(triton, urls=urls, **settings) as address, httpx.Client(base_url=address) as client:
            yield client

    return begin


@pytest.fixture
def authorized(tmp_path):
    """Writes a file of keys: one for each of the words. Returns the file, and the header of each."""

    def write(*words):
        keys = [new_key(f"key-{number}") for number in range(len(words))]
        (tmp_path / "keys").write_text("".join(f"{line} {word}\n" for (_, line), word in zip(keys, words, strict=True)))
        return tmp_path / "keys", *({"Authorization": f"Bearer {key}"} for key, _ in keys)

    return write


def chat(client, headers=None, **fields):
    return client.post(CHAT, json={**BODIES[CHAT], **fields}, headers=headers)


@pytest.mark.slow
def test_only_who_has_a_key_may_ask_for_what_it_is_for(gateway, triton, authorized):
    """Probes need none. Who serves whom is for admins, and limits count what was used."""
    words = ("admin=yes", "requests_per_minute=2 tokens_per_minute=100000", "models=other")
    keys, owner, user, elsewhere = authorized(*words)
    # The last is a proxy's.
    strangers = ({}, {"Authorization": "Bearer sk-other"}, {"Authorization": "Basic YTpi"})
    with gateway(keys_file=keys) as client:
        for path in ("/health", "/ready", "/v2/health/live", "/v2/health/ready", "/v2/models/x/ready"):
            assert client.get(path).status_code == 200
        refused = client.get("/v1/models")
        error_of(refused, 401)
        assert refused.headers["www-authenticate"] == "Bearer"
        assert error_of(chat(client, strangers[1]), 401)["code"] == "invalid_api_key"

        assert error_of(chat(client, elsewhere), 403)["code"] == "model_not_found"
        assert error_of(client.get("/v1/models/tiny", headers=elsewhere), 403)["code"] == "model_not_found"
        assert client.get("/v1/models", headers=elsewhere).json()["data"] == []
        assert "tiny" not in client.get("/v1/models/no-such-model", headers=elsewhere).text
        assert triton.asked == []

        assert error_of(client.get("/fleet", headers=user), 403)["code"] == "not_an_admin"
        first, second, third = (chat(client, user) for _ in range(3))
        assert (first.status_code, second.status_code, len(triton.asked)) == (200, 200, 2)
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert int(second.headers["x-ratelimit-remaining-tokens"]) > 100_000 - 10 - 60  # 10 used, and a guess
        assert error_of(third, 429)["code"] == "rate_limit_exceeded"
        assert 1 <= int(third.headers["retry-after"]) <= 30

        told = [client.get("/metrics", headers=headers) for headers in (user, *strangers)]
        fleet, metrics = client.get("/fleet", headers=owner), client.get("/metrics", headers=owner)
    for response in told:
        assert response.status_code == 200
        assert "gateway_requests_total{" in response.text
        assert "http://" not in response.text
        assert 'key="' not in response.text
    [model] = fleet.json()["models"]
    assert f'server="{model["servers"][0]["url"]}"' in metrics.text
    assert re.search(r'key_requests_total\{key="key-1"\} [\d.]+', metrics.text)
    with gateway(keys_file=keys, metrics_need_key=True) as client:
        assert [client.get("/metrics", headers=headers).status_code for headers in ({}, owner)] == [401, 200]
        keys.write_text("# nobody\n")
        wait_for(lambda: client.get("/metrics", headers=owner).status_code == 401)


@pytest.mark.slow
def test_ids_and_headers_go_through(gateway, triton, tmp_path, collector):
    log = tmp_path / "log"
    settings = {"upstream_headers": (("triton-key", "secret"),), "traces_url": collector.url}
    with gateway(access_log=str(log), **settings) as client:
        for _ in range(2):
            told = chat(client, {"X-Request-Id": "mine", "traceparent": PARENT, "X-Other": "theirs"})
            assert told.headers["x-request-id"] == "mine"
        made = chat(client, {"X-Request-Id": "no good"}, model="other")
    first, second = (asked["id"] for asked in triton.asked)
    assert first != second
    assert first.startswith("mine-")
    assert "\r\ntriton-key: secret" in triton.heads[0]
    assert "x-other" not in triton.heads[0].lower()
    [trace] = re.findall(r"\r\ntraceparent: (\S+)", triton.heads[0])
    assert trace.startswith(PARENT[:36])
    assert trace != PARENT
    assert trace.split("-")[2] in [span.span_id.hex() for span in collector.spans]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["id"] for line in lines] == ["mine", "mine", made.headers["x-request-id"]]
    assert re.fullmatch(r"req-\w{32}", made.headers["x-request-id"])
    assert lines[0]["upstream_id"] in first
    assert (lines[0]["prompt_tokens"], lines[0]["generated_tokens"], lines[0]["finish_reason"]) == (7, 3, "stop")
    assert (lines[2]["status"], lines[2]["error"]) == (404, "model_not_found")
    assert "secret" not in log.read_text()


@pytest.mark.slow
def test_a_full_disk_costs_lines_of_the_access_log_and_no_answer(gateway, caplog):
    """Each request wrote a traceback to the gateway's own log."""
    with gateway(access_log="/dev/full") as client:
        assert [chat(client).status_code for _ in range(3)] == [200] * 3
    [told] = [record.getMessage() for record in caplog.records if "access log" in record.getMessage()]
    assert "[Errno 28]" in told


def test_it_is_told_when_the_access_log_is_written_again(tmp_path, caplog):
    log = AccessLog(str(tmp_path / "log"))
    log.ends(HandledRequest("first", CHAT))
    (tmp_path / "log").unlink()
    (tmp_path / "log").mkdir()
    for number in range(2):
        log.ends(HandledRequest(f"lost-{number}", CHAT))
    (tmp_path / "log").rmdir()
    log.ends(HandledRequest("last", CHAT))
    log.close()
    assert "2 lines are missing" in caplog.text
    assert json.loads((tmp_path / "log").read_text())["id"] == "last"


@pytest.mark.slow
def test_a_gateway_without_servers_is_not_ready(gateway, caplog):
    with gateway(urls=("http://127.0.0.1:9",)) as client:
        asked = ("/ready", "/v2/health/ready", "/health", "/v2/health/live")
        assert [client.get(path).status_code for path in asked] == [503, 503, 200, 200]
        assert client.get("/v1/models").json()["data"] == []
        refused = error_of(chat(client), 503)
        told = refused["message"]
        assert (refused["code"], "0 of 1" in told, ":9" in told) == ("unavailable", True, False)
    with gateway(urls=("file:/no/list",)) as client:
        assert "/no/list" in client.get("/fleet").json()["models"][0]["reason"]
        assert "/no/list" not in error_of(chat(client), 503)["message"]
    assert "request req-" not in caplog.text  # what lasts is told once
    with gateway() as client:
        assert client.get("/ready").status_code == 200
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny"]
        metrics = client.get("/metrics").text
    assert re.search(r'deepseek_triton_gateway_server_up\{server="http://127.0.0.1:\d+"\} 1.0', metrics)


async def test_workers_share_what_they_know_and_one_history_in_which_a_server_of_two_models_counts_once(
    triton, tmp_path, monkeypatch
):
    models = tuple(ModelSettings((f"file:{tmp_path}/servers",), name) for name in ("a", "b"))
    settings = GatewaySettings(models, metrics_port=None, shared_folder=tmp_path)
    workers = []
    for text in (triton.url, "wrong"):
        (tmp_path / "servers").write_text(text)
        workers.append(GatewayState(settings))
        await workers[-1].start()
    (tmp_path / "servers").write_text(triton.url)
    for model in workers[1].models:
        await model.fleet._read(0)  # sees a change, perhaps half of it
    assert [server.state for model in workers[1].models for server in model.fleet.servers()] == ["up", "up"]
    [moment] = workers[0].history()
    assert [moment] == workers[1].history()
    assert (moment["servers"], moment["up"], moment["inflight"]) == (1, 1, 0)
    for counts, inflight in {((3, 0), (1, 4)): 5, ((3, 0), (1, 0)): 4}.items():  # the latter where metrics are older
        for model, (own, others) in zip(workers[0].models, counts, strict=True):
            seen = [replace(server, own=Load(own), others=Load(others)) for server in model.fleet.servers()]
            model.fleet.servers = lambda seen=seen: seen
        assert workers[0].now()["inflight"] == inflight
    fleet = workers[1].models[1].fleet
    with workers[0].models[1].fleet.members[triton.url].working(Load(3, 30)):
        workers[0].models[1].fleet.look()
        fleet.look()
        assert fleet.servers()[0].own == Load(3, 30)
        for text, kept_s in (("http://127.0.0.1:9", 10), (triton.url, 10), ("http://127.0.0.1:9", 0)):
            monkeypatch.setattr("deepseek_triton_tools.gateway.fleet._WORKER_GONE_S", kept_s)  # 0: it was killed
            (tmp_path / "servers").write_text(text)
            _ = await fleet._read(0), await fleet._read(0)  # the first sees a change, perhaps half of it
            fleet.look()
            own = [server.own.sequences for server in fleet.servers() if server.url == triton.url]
            assert sum(own) == (3 if kept_s else 0)
    workers.append(GatewayState(settings))  # new, and none of its servers is up
    await workers[-1].start()
    assert "tiny" in workers[-1].models[1].fleet.model_info
    for worker in workers:
        await worker.close()


def until_closed(client, request):
    """Send it, and return (the response's head, its JSON) once the gateway has closed the connection."""
    received = b""
    with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:
        connection.settimeout(PATIENCE_S)
        connection.sendall(request)
        while data := connection.recv(65536):
            received += data
    head, _, body = received.partition(b"\r\n\r\n")
    return head, json.loads(body)


@pytest.mark.slow
def test_a_body_that_is_refused_or_does_not_end_is_not_waited_for(gateway, authorized, subtests):
    keys, headers = authorized("")
    key = f"Authorization: {headers['Authorization']}"
    json_type = "Content-Type: application/json"
    table = [
        ("POST /v1/completions", json_type, 401),
        ("POST /v1/completions", f"{json_type}\r\n{key}", 413),
        ("POST /v1/completions", key, 415),
        ("POST /v1/completions", f"{json_type}\r\nContent-Encoding: gzip\r\n{key}", 415),
        ("POST /v1/nothing", key, 404),
        ("GET /v1/completions", key, 405),
    ]
    with gateway(keys_file=keys, body_timeout_s=0.2, max_body_bytes=50) as client:
        for size in ("Content-Length: 1000000", "Transfer-Encoding: chunked"):
            for line, fields, status in table:
                with subtests.test(size, status=status):
                    request = f"{line} HTTP/1.1\r\nHost: x\r\n{fields}\r\n{size}\r\n\r\n64\r\n{'x' * 100}\r\n"
                    told, document = until_closed(client, request.encode())
                    assert told.startswith(b"HTTP/1.1 %d " % status)
                    assert b"\r\nconnection: close" in told
                    assert document["error"]["message"]
        request = f"{table[0][0]} HTTP/1.1\r\nHost: x\r\n{table[1][1]}\r\nContent-Length: 40\r\n\r\n{{"
        told, document = until_closed(client, request.encode())
        assert told.startswith(b"HTTP/1.1 408 ")
        assert document["error"]["code"] == "request_timeout"
        assert "got 1 bytes" in document["error"]["message"]
        for path in ("/v1/models", "/v1/nothing"):  # without a body the connection is kept
            assert "connection" not in client.get(path).headers


# --- What the limits of a key count ---

LIMIT = 600_000
PROMPT = "word " * 16_000
"""20,000 tokens by its bytes."""


@pytest.fixture
def limited(triton, tmp_path, monkeypatch):
    """Of a key whose budget is not refilled in any time that a test may take."""
    monkeypatch.setattr(guard, "_MINUTE_S", 1e9)
    key, line = new_key("ann")
    (tmp_path / "keys").write_text(f"{line} tokens_per_minute={LIMIT}")
    with (
        gateway_before(triton, keys_file=tmp_path / "keys") as address,
        httpx.Client(base_url=address, headers={"Authorization": f"Bearer {key}"}, timeout=60) as client,
    ):
        yield client


@pytest.fixture
def charged(limited, triton):
    """How many tokens the key loses by a request of this script, made by `ask`."""

    def used():
        triton.script = answer(event(output_ids=[1]))
        asked = limited.post("/tokenize", json={"prompt": "Hi"})
        return LIMIT - int(asked.headers["x-ratelimit-remaining-tokens"])

    def measure(script, ask):
        before = used()
        triton.clear()
        triton.script = script
        ask()
        return used() - before

    return measure


@pytest.fixture
def leave(limited, triton):
    def leave(path, body, until):
        """Ask, and close the connection when these bytes have come."""

        def num_left():
            return sum(map(float, re.findall(r"clients_left_total\{.*\} (\S+)", limited.get("/metrics").text)))

        before = num_left()
        headers = {"Authorization": limited.headers["authorization"]}
        with leaving(f"{limited.base_url}".rstrip("/") + path, body, until=until, headers=headers):
            wait_for(lambda: triton.asked)
        wait_for(lambda: num_left() > before)

    return leave


def test_tokens_are_counted_while_they_come_and_to_the_end_of_an_answer_that_is_left(gateway, triton, tmp_path):
    counts = {"num_output_tokens": 3, "num_input_tokens": 7}

    def long_answer(wire):
        wire.head()
        if triton.asked[-1]["streaming"]:
            assert triton.asked[-1]["return_num_output_tokens"]
            wire.chunk(event(text_output="Hello", num_output_tokens=2))
        wire.wait_for_stop()
        wire.chunk(event(finish_reason="cancelled", **counts))
        wire.chunk(b"")

    def counted(client, *names):
        text = client.get("/metrics").text
        found = (re.search(rf'^deepseek_triton_gateway_{name}{{model="tiny"}} (.*)$', text, re.M) for name in names)
        return [float(each[1]) if each else None for each in found]

    triton.script = long_answer
    names = ("generated_tokens_total", "time_to_first_token_seconds_count", "prompt_tokens_total")
    with gateway(access_log=str(tmp_path / "log")) as client:
        url = f"{client.base_url}".rstrip("/")
        for path, body in BODIES.items():
            with leaving(url + path, {**body, "stream": True}, until=b"Hello"):
                pass
        wait_for(lambda: counted(client, names[0]) == [15])
        with leaving(url + CHAT, {**BODIES[CHAT], "stream": True}, until=b"Hello"):
            assert counted(client, *names) == [17, 4, 21]
        with leaving(url + CHAT, BODIES[CHAT], until=b""):
            wait_for(lambda: len(triton.asked) == 5)
        wait_for(lambda: counted(client, *names) == [23, 4, 35])
        triton.script = answer(event(text_output="Hello", num_output_tokens=2))
        lost = client.post(CHAT, json={**BODIES[CHAT], "stream": True}).request
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert lines[-1]["prompt_tokens"] == len(lost.content) // 4
    [whole] = [line for line in lines if line["client_left"] and not line["stream"]]
    assert (whole["prompt_tokens"], whole["generated_tokens"]) == (7, 3)


@pytest.mark.slow
def test_answers_that_are_left_are_charged_as_far_as_they_came(charged, leave, triton):
    """And one that nobody has waited for with its prompt."""

    def long_answer(wire):
        wire.head()
        counts = {name: 20_000 for name in ("num_output_tokens",) if triton.asked[0].get(f"return_{name}")}
        wire.chunk(event(text_output="Hello", **counts))
        wire.wait_for_stop()
        wire.chunk(b"")

    def silent(wire):
        wire.wait_for_stop()
        answer(event(error="[E_CANCELLED] the client had gone"))(wire)

    messages = [{"role": "user", "content": PROMPT}]
    for path, prompt in zip(BODIES, ({"messages": messages}, {"prompt": PROMPT}, {"input": PROMPT}), strict=True):
        body = {**prompt, "stream": True}
        assert 40_000 <= charged(long_answer, lambda: leave(path, body, b"Hello")) < 40_200  # noqa: B023
    body = {"prompt": PROMPT, "max_tokens": 9000}
    assert 20_000 <= charged(silent, lambda: leave("/v1/completions", body, b"")) < 20_200


@pytest.mark.slow
def test_what_was_generated_is_charged_and_a_refusal_is_free(limited, charged, triton):
    """Prompts that ran beside one that is refused, and answers that lost against the best, were generated too."""

    def ask(status, **body):
        assert limited.post("/v1/completions", json=body).status_code == status

    def bad_one_last(wire):
        if next(asked for asked in triton.asked if asked["id"] == wire.request_id)["text_input"] == "bad":
            wait_for(lambda: len(triton.asked) == 3)
            answer(event(error="[E_INVALID_ARGUMENT] text_input: bad"))(wire)
        else:
            wire.wait_for_stop()
            answer(event(error="[E_CANCELLED] stopped"))(wire)

    full = answer(event(error="[E_OVERLOADED] the queue is full"))
    assert charged(full, lambda: ask(429, prompt=PROMPT)) < 100
    several = [PROMPT, PROMPT, "bad"]
    assert 40_000 <= charged(bad_one_last, lambda: ask(400, prompt=several, max_tokens=1000)) < 40_200
    best = answer(event(text_output="x", finish_reason="stop", num_input_tokens=3, num_output_tokens=1000))
    assert 40_000 <= charged(best, lambda: ask(200, prompt="Hi", best_of=40, n=1)) < 40_200
    before = int(limited.post("/tokenize", json={"prompt": "Hi"}).headers["x-ratelimit-remaining-tokens"])
    triton.script = answer(*(event(sequence_index=number, finish_reason="stop") for number in range(3)))
    asked = limited.post("/v1/completions", json={"prompt": "Hi", "n": 3, "max_tokens": 10_000})
    reserved = before - int(asked.headers["x-ratelimit-remaining-tokens"])
    assert reserved > 30_000  # for every answer of several
