"""The gateway over real sockets: refusals, errors of the server before and after the first byte, clients that leave."""

import itertools
import json
import threading
import time

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from deepseek_triton_tools.gateway.api_route import MOST_BRACKETS, ApiExchange, ClientLeft, _document
from deepseek_triton_tools.gateway.application import create_app
from deepseek_triton_tools.gateway.chat_request import CHAT_FIELDS
from deepseek_triton_tools.gateway.completions import COMPLETION_FIELDS
from deepseek_triton_tools.gateway.observers import begin_record
from deepseek_triton_tools.gateway.openai_fields import INPUTS, REFUSED, SAMPLING, WITHOUT_EFFECT, OpenAIError
from deepseek_triton_tools.gateway.settings import GatewaySettings, ModelSettings
from gateway.asking import BODIES, CHAT, COMPLETION, HELLO, LAST, MAX_BODY, RESPONSE, ask, error_of
from support.leaving_client import leaving
from support.raw_triton import answer, event, gateway_before, refusal
from support.waiting import PATIENCE_S, wait_for

JSON_TYPE = {"Content-Type": "application/json"}
CALL = '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
BAD_BODIES = {
    b"": "not JSON",
    b"{": "not JSON",
    b'{"messages": "\xff"}': "not JSON",
    b'{"messages": "\\ud800"}': "not JSON",
    b"[" * 100_000: "nested too deeply",
    b"5": "a JSON object",
}


@pytest.mark.slow
def test_a_body_that_is_no_request(triton, client):
    """A page of a stranger may send another type than JSON through a browser without being allowed to."""
    for path in BODIES:
        for body, words in BAD_BODIES.items():
            assert words in error_of(client.post(path, content=body, headers=JSON_TYPE), 400)["message"]
    assert _document(b'"%b"' % (b"[" * MOST_BRACKETS)) == "[" * MOST_BRACKETS
    with pytest.raises(OpenAIError, match="got 1,048,577") as caught:
        _document(b'"%b{"' % (b"[" * MOST_BRACKETS))
    assert caught.value.status == 413
    large = error_of(client.post(CHAT, content=b" " * (MAX_BODY + 1), headers=JSON_TYPE), 413)
    assert (large["code"], str(MAX_BODY) in large["message"]) == ("request_too_large", True)
    for kind in ({}, {"Content-Type": "text/plain"}, {"Content-Type": "multipart/form-data"}):
        refused = client.post(CHAT, content=json.dumps(BODIES[CHAT]).encode(), headers=kind)
        assert error_of(refused, 415)["code"] == "unsupported_media_type"
    assert not triton.asked
    kind = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert client.post(CHAT, content=json.dumps(BODIES[CHAT]).encode(), headers=kind).status_code == 200


@pytest.mark.slow
def test_a_deep_body_is_answered_or_refused(client):
    bodies = [f'{{"messages": [{{"role": "user", "content": {"[" * n + "]" * n}}}]}}' for n in range(100, 1300, 60)]
    assert {client.post(CHAT, content=body, headers=JSON_TYPE).status_code for body in bodies} <= {200, 400}


async def test_a_connection_that_uvicorn_has_closed_is_a_client_that_has_left():
    """uvicorn closes it when bytes behind the request are no HTTP, and uvloop refuses to write from then on."""

    async def receive():
        raise AssertionError("nothing more is to be read")

    async def send(message):
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    record = begin_record(COMPLETION, ())
    exchange = ApiExchange({"headers": []}, receive, send, record, GatewaySettings((ModelSettings(("http://h:1",)),)))
    with pytest.raises(ClientLeft):
        await exchange.respond(200, b"{}")
    assert record.client_left


def test_a_wrong_path_method_or_model(triton, client):
    table = {
        ("GET", CHAT): (405, "method_not_allowed"),
        ("PUT", COMPLETION): (405, "method_not_allowed"),
        ("POST", "/v1/models"): (405, "method_not_allowed"),
        ("GET", "/v1/nothing"): (404, "not_found"),
        ("GET", "/v1/models/gpt-5"): (404, "model_not_found"),
    }
    for (method, path), (status, code) in table.items():
        answer = client.request(method, path, headers={"X-Request-Id": "mine"})
        assert error_of(answer, status)["code"] == code
        assert answer.headers["x-request-id"] == "mine"
    metrics = client.get("/metrics").text
    assert all(f'route="{route}",status="404"' in metrics for route in ("other", "/v1/models/NAME"))
    assert 'route="other",status="405"' in metrics
    for path in (CHAT, COMPLETION):
        error = error_of(ask(client, path, model="gpt-5"), 404)
        assert (error["param"], error["code"], "'tiny'" in error["message"]) == ("model", "model_not_found", True)
    assert not triton.asked
    hints = {
        "/v1/v1/chat/completions": "; did you mean /v1/chat/completions?",
        "/v1/tokenize": "; did you mean /tokenize?",
        "/v1/embeddings": "",
    }
    for path, hint in hints.items():
        assert error_of(client.post(path, json={}), 404)["message"] == f"nothing is at {path}{hint}"


@pytest.mark.slow
def test_the_other_base_urls_of_deepseeks_own_api(client):
    """They have no routes of their own in metrics and logs."""
    paths = {"/chat/completions": CHAT, "/chat/completions/": CHAT, "/completions": COMPLETION}
    for base in ("", "/beta"):
        answers = [client.post(base + path, json=BODIES[api]) for path, api in paths.items()]
        answers += [client.get(f"{base}{path}") for path in ("/models", "/models/tiny")]
        assert [answer.status_code for answer in answers] == [200] * 5
    metrics = client.get("/metrics").text
    assert all(f'route="{route}"' in metrics for route in (CHAT, COMPLETION, "/v1/models"))
    assert not any(f'route="{route}' in metrics for route in ("/chat", "/completions", "/models", "/beta"))


def test_head_and_options(client):
    assert (client.head("/v1/models").status_code, client.head("/v1/models").content) == (200, b"")
    asked = {"Origin": "https://chat.example.com", "Access-Control-Request-Method": "POST"}
    allowed = client.options(CHAT, headers=asked)
    assert allowed.headers["access-control-allow-origin"] == "https://chat.example.com"
    other = client.options(CHAT, headers={**asked, "Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers
    exposed = client.get("/v1/models", headers={"Origin": "https://chat.example.com"}).headers
    wanted = {"x-request-id", "retry-after", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-requests"}
    assert wanted <= {*exposed["access-control-expose-headers"].split(", ")}


def test_a_client_s_own_headers_go_no_further(triton, client):
    client.post(CHAT, json=BODIES[CHAT], headers={"Authorization": "Bearer k", "traceparent": "a\tb"})
    assert not any(word in triton.heads[0].lower() for word in ("bearer", "a\tb"))


ERRORS = [
    (400, "[E_INVALID_ARGUMENT] top_p: expected at most 1", 400, "top_p", None),
    (400, "[E_INVALID_ARGUMENT] bad[0]: expected text", 400, "bad_words", None),
    (400, "[E_INVALID_ARGUMENT] the prompt has no tokens", 400, None, None),
    (400, "[E_INVALID_ARGUMENT] input_ids: expected token ids", 400, "prompt", None),
    (400, "[E_UNSUPPORTED] best_of, stream: not for streams", 400, "best_of", "unsupported_parameter"),
    (400, "[E_PROMPT_TOO_LONG] the prompt is too long", 400, "messages", "context_length_exceeded"),
    (503, "[E_OVERLOADED] too many requests", 429, None, "overloaded"),
    (500, "[E_CANCELLED] stopped", 503, None, "cancelled"),
    (500, "[E_INTERNAL] the engine failed", 500, None, "internal_error"),
    (400, "unexpected inference input of http://10.1.2.3:8000", 502, None, "bad_gateway"),
]


def streamed(client, path, seen, **fields):
    """The status and lines of a stream. seen: set when the first event has come."""
    with client.stream("POST", path, json={**BODIES[path], "stream": True, **fields}) as response:
        lines = []
        for line in filter(None, response.iter_lines()):
            lines.append(line)
            if line.startswith("data: "):
                seen.set()
    return response.status_code, lines


@pytest.mark.slow
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_an_error_before_and_after_the_first_byte(triton, client, path, subtests):
    """Of a stream that has begun it is the last event."""
    for their_status, text, status, param, code in ERRORS:
        seen = threading.Event()

        def later(wire, seen=seen, text=text):
            wire.head()
            wire.chunk(HELLO)
            seen.wait(PATIENCE_S)
            wire.chunk(event(error=text))
            wire.chunk(b"")

        named = "prompt" if param == "messages" and path == COMPLETION else param
        with subtests.test(text=text):
            triton.script = refusal(their_status, text)
            for stream in (False, True):
                response = ask(client, path, stream=stream)
                error = error_of(response, status)
                assert (error["param"], error["code"]) == (named, code)
                assert error["type"] == ("invalid_request_error" if status == 400 else "server_error")
                assert ("retry-after" in response.headers) == (status == 429)
                assert not any(secret in error["message"] for secret in ("E_", "10.1.2.3"))
            triton.script = later
            status_of_stream, lines = streamed(client, path, seen)
            error = json.loads(lines[-1][6:])["error"]
            assert (status_of_stream, error["param"], error["code"]) == (200, named, code)
            assert not any("[DONE]" in line for line in lines)


def dies(wire):
    wire.head()
    wire.chunk(HELLO)
    time.sleep(0.05)
    wire.reset()


@pytest.mark.slow
@pytest.mark.parametrize("script", [dies, answer(HELLO)])
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_half_an_answer_is_an_error(triton, client, path, script):
    for stream in (False, True):
        triton.script = script
        response = ask(client, path, stream=stream)
        if stream and response.status_code == 200:
            assert response.text.count('"error"') == 1
            assert "[DONE]" not in response.text
        else:
            assert response.status_code in (502, 503)
        triton.script = answer(HELLO, LAST)
        # The fleet may have to see first that the server is there.
        wait_for(lambda: ask(client, path).status_code == 200)


def leave(triton, client, body, path, *, until=b"", num_asked=1):
    """Send a request, and close the connection when these bytes have come and the server has been asked so often."""
    with leaving(str(client.base_url).rstrip("/") + path, body, until=until):
        wait_for(lambda: len(triton.asked) == num_asked)
        (fleet,) = client.get("/fleet").json()["models"]
        assert fleet["servers"][0]["own"][1] >= 256 * num_asked


def until_stopped(wire):
    wire.wait_for_stop()
    answer(event(error="[E_CANCELLED] the client had gone"))(wire)


def begun_until_stopped(wire):
    wire.head()
    wire.chunk(HELLO)
    wire.wait_for_stop()
    wire.chunk(event(finish_reason="cancelled"))
    wire.chunk(b"")


def test_of_models_with_one_name_the_first_has_the_requests_even_without_the_name(triton, caplog):
    for second, reasons, status in (("other", [False, False], 404), ("", [False, True], 200)):
        models = ModelSettings((triton.url,)), ModelSettings((triton.url,), second)
        with TestClient(create_app(GatewaySettings(models, metrics_port=None))) as client:
            told = [bool(record.args and triton.url in record.args) for record in caplog.records]
            assert [bool(model["reason"]) for model in client.get("/fleet").json()["models"]] == reasons
            assert (ask(client).status_code, sum(told)) == (status, sum(reasons))
            assert client.get("/tokenizer_info?model=tiny").status_code == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_a_client_that_leaves_stops_the_work(triton, client, path):
    for stream, begun in itertools.product((False, True), repeat=2):
        triton.clear()
        triton.script = begun_until_stopped if begun else until_stopped
        leave(triton, client, {**BODIES[path], "stream": stream}, path, until=b"Hello" if begun and stream else b"")
        wait_for(lambda: triton.stopped)
        assert triton.stopped == [triton.asked[0]["id"]]
        triton.script = answer(HELLO, LAST)
        assert ask(client).status_code == 200
        (fleet,) = client.get("/fleet").json()["models"]
        assert fleet["servers"][0]["own"] == [0, 0]


def test_every_prompt_of_a_client_that_leaves_is_stopped(triton, client):
    triton.script = until_stopped
    leave(triton, client, {"prompt": ["a", "b", "c"]}, COMPLETION, num_asked=3)
    wait_for(lambda: len(triton.stopped) == 3)
    assert sorted(triton.stopped) == sorted(asked["id"] for asked in triton.asked)
    assert len(set(triton.stopped)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("path", BODIES)
def test_a_silent_stream_has_comments(triton, path):
    """Before its first event and after, and an error that comes then is an event."""
    heard = threading.Event()

    def silent(wire):
        assert heard.wait(PATIENCE_S)
        heard.clear()
        wire.head()
        wire.chunk(HELLO)
        assert heard.wait(PATIENCE_S)
        wire.chunk(LAST)
        wire.chunk(b"")

    def refuses(wire):
        assert heard.wait(PATIENCE_S)
        refusal(400, "[E_INVALID_ARGUMENT] top_p: expected less")(wire)

    with gateway_before(triton, keep_alive_s=0.1) as address:
        for script in (silent, refuses):
            triton.script = script
            heard.clear()
            with httpx.stream("POST", address + path, json={**BODIES[path], "stream": True}, timeout=60) as response:
                lines = []
                for line in filter(None, response.iter_lines()):
                    lines.append(line)
                    if line == ": keep-alive":
                        heard.set()
            assert (response.status_code, lines[0]) == (200, ": keep-alive")
            if script is silent:
                assert any("Hello" in line for line in lines)
                assert lines[-1] == "data: [DONE]" or path == RESPONSE
            else:
                last = json.loads(lines[-1].removeprefix("data: "))
                assert last["error"]["type"] == "invalid_request_error"
                assert (last.get("type") == "error") == (path == RESPONSE) == ("event: error" in lines)


@pytest.mark.slow
def test_a_client_that_does_not_read_makes_the_server_wait(triton, client):
    size = 96 * 2**20
    sent = 0

    def long_answer(wire):
        nonlocal sent
        wire.head()
        piece = event(text_output="x" * 60_000)
        while sent < size:
            wire.chunk(piece)
            sent += len(piece)
        wire.chunk(LAST)
        wire.chunk(b"")

    triton.script = long_answer
    with client.stream("POST", CHAT, json={**BODIES[CHAT], "stream": True}) as response:
        pieces = response.iter_raw()
        next(pieces)
        former = -1
        while former != sent:  # until nobody takes more
            former = sent
            time.sleep(0.3)
        assert sent < size // 3
        total = sum(map(len, pieces))
    assert total > size


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_one_call_is_enough_and_stops_the_server(triton, client, stream):
    def two_calls(wire):
        wire.head()
        wire.chunk(event(text_output=f"<｜tool▁calls▁begin｜>{CALL}", num_input_tokens=9, num_output_tokens=5))
        wire.chunk(event(text_output="<｜tool▁call▁begin｜>f", num_input_tokens=9, num_output_tokens=1))
        wire.wait_for_stop()
        wire.chunk(event(finish_reason="stop"))
        wire.chunk(b"")

    triton.script = two_calls
    response = ask(client, tools=[TOOL], parallel_tool_calls=False, stream=stream)
    assert response.text.count("call_") == 1
    assert response.text.count('"tool_calls"') >= 2
    wait_for(lambda: triton.stopped)
    assert triton.asked[0]["streaming"] is True
    if not stream:
        assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
        assert response.json()["usage"]["prompt_tokens"] == 9


def test_prompts_of_a_list_are_answered_in_their_order(triton, client):
    another, is_full = threading.Event(), iter([True])

    def by_prompt(wire):
        asked = next(asked for asked in triton.asked if asked["id"] == wire.request_id)
        if asked["text_input"] == "b" and next(is_full, False):  # it waits for another's end
            refusal(503, "[E_OVERLOADED] full")(wire)
            return
        if asked["text_input"] == "a":  # it does not answer first
            assert another.wait(PATIENCE_S)
        text = asked["text_input"] or str(asked["input_ids"])
        answer(event(text_output=text.upper(), finish_reason="length", num_input_tokens=1, num_output_tokens=1))(wire)
        another.set()

    triton.script = by_prompt
    document = ask(client, COMPLETION, prompt=["a", "b", [5, 6]]).json()
    assert [choice["text"] for choice in document["choices"]] == ["A", "B", "[5, 6]"]
    assert document["usage"]["total_tokens"] == 6


def test_a_prompt_whose_answer_has_begun_is_not_asked_again(triton, client):
    refused = threading.Event()

    def by_prompt(wire):
        is_b = next(asked for asked in triton.asked if asked["id"] == wire.request_id)["text_input"] == "b"
        assert is_b or refused.wait(PATIENCE_S)
        answer(HELLO, event(error="[E_OVERLOADED] full") if is_b else LAST)(wire)
        refused.set()

    triton.script = by_prompt
    assert ask(client, COMPLETION, prompt=["a", "b"]).status_code == 429
    assert [asked["text_input"] for asked in triton.asked].count("b") == 1


def test_the_text_of_ids_is_echoed(triton, client):
    def script(wire):
        detokenizes = triton.asked[-1].get("task") == "detokenize"
        answer(*((event(text_output="Once"),) if detokenizes else (HELLO, LAST)))(wire)

    triton.script = script
    assert ask(client, COMPLETION, prompt=[7, 8], echo=True).json()["choices"][0]["text"] == "OnceHello"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
RESPONSE_FIELDS = {"input", "text", "include", "reasoning", "instructions", "truncation"}
NAMES = sorted({*SAMPLING, *INPUTS, *WITHOUT_EFFECT, *REFUSED, *CHAT_FIELDS, *COMPLETION_FIELDS, *RESPONSE_FIELDS})


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(list(BODIES)),
    fields=st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=8), VALUES, max_size=4),
    whole=st.booleans(),
)
def test_any_body_is_answered_or_refused(client, path, fields, whole):
    response = client.post(path, json={**BODIES[path], **fields} if whole else fields)
    assert response.status_code in (200, 400, 404, 502), response.text
    if response.status_code != 200:
        assert error_of(response, response.status_code)["message"]
