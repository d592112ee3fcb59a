"""The gateway over real sockets: refusals, errors of the server before and after the first byte, clients that leave."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepseek_triton_tools.gateway.app.api_exchange import ApiExchange, ClientLeft
from deepseek_triton_tools.gateway.app.api_route import MOST_BRACKETS, _document
from deepseek_triton_tools.gateway.app.handled_request import HandledRequest, begin_record
from deepseek_triton_tools.gateway.protocol.chat_request import CHAT_FIELDS
from deepseek_triton_tools.gateway.protocol.completion_request import COMPLETION_FIELDS
from deepseek_triton_tools.gateway.protocol.openai_errors import OpenAIError
from deepseek_triton_tools.gateway.protocol.openai_fields import INPUTS, SAMPLING
from deepseek_triton_tools.gateway.settings import GatewaySettings, ModelSettings
from support.leaving_client import leaving
from support.raw_triton import RawTriton, Wire, answer, event, gateway_before, refusal
from support.waiting import PATIENCE_S, wait_for

Json = dict[str, Any]
MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = {"messages": MESSAGES}
TEXT, LAST = event(text_output="Hello"), event(finish_reason="stop", num_input_tokens=3, num_output_tokens=2)
JSON_TYPE = {"Content-Type": "application/json"}
MAX_BODY = 200_000
CALL = '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[RawTriton, str]]:
    options = {"max_body_bytes": MAX_BODY, "cors_origins": ("https://chat.example.com",)}
    with RawTriton().serving() as triton, gateway_before(triton, **options) as address:
        yield triton, address


@pytest.fixture
def triton(served: tuple[RawTriton, str]) -> RawTriton:
    served[0].clear()
    served[0].script = answer(TEXT, LAST)
    return served[0]


@pytest.fixture
def address(served: tuple[RawTriton, str]) -> str:
    return served[1]


def ask(address: str, path: str = "chat/completions", **fields: object) -> httpx.Response:
    prompt = {"prompt": "Hi"} if path == "completions" else CHAT
    return httpx.post(f"{address}/v1/{path}", json={**prompt, **fields}, timeout=60)


def error_of(response: httpx.Response) -> Json:
    error: Json = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


BAD_BODIES = [
    (b"", "not JSON"),
    (b"{", "not JSON"),
    (b'{"messages": "\xff"}', "not JSON"),
    (b'{"messages": "\\ud800"}', "not JSON"),
    (b"[" * 100_000, "nested too deeply"),
    (b"5", "a JSON object"),
]


@pytest.mark.parametrize(("body", "words"), BAD_BODIES)
@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
def test_a_body_that_is_no_request(triton: RawTriton, address: str, path: str, body: bytes, words: str) -> None:
    response = httpx.post(f"{address}/v1/{path}", content=body, headers=JSON_TYPE)
    assert response.status_code == 400
    assert words in error_of(response)["message"]


@pytest.mark.parametrize("depth", range(100, 1300, 60))
def test_a_deep_body_is_answered_or_refused(triton: RawTriton, address: str, depth: int) -> None:
    content = "[" * depth + "]" * depth
    body = f'{{"messages": [{{"role": "user", "content": {content}}}]}}'.encode()
    response = httpx.post(f"{address}/v1/chat/completions", content=body, headers=JSON_TYPE)
    assert response.status_code in (200, 400)


@pytest.mark.parametrize("headers", [{"Content-Type": "text/plain"}, {"Content-Type": "multipart/form-data"}])
def test_another_content_type_is_refused(triton: RawTriton, address: str, headers: dict[str, str]) -> None:
    response = httpx.post(f"{address}/v1/chat/completions", content=json.dumps(CHAT).encode(), headers=headers)
    assert (response.status_code, error_of(response)["code"]) == (415, "unsupported_media_type")
    assert not triton.asked


def test_a_content_type_may_have_parameters(triton: RawTriton, address: str) -> None:
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    response = httpx.post(f"{address}/v1/chat/completions", content=json.dumps(CHAT).encode(), headers=headers)
    assert response.status_code == 200


def test_a_body_that_is_too_large(triton: RawTriton, address: str) -> None:
    response = httpx.post(f"{address}/v1/chat/completions", content=b" " * (MAX_BODY + 1), headers=JSON_TYPE)
    assert (response.status_code, error_of(response)["code"]) == (413, "request_too_large")
    assert str(MAX_BODY) in error_of(response)["message"]


def test_a_body_with_the_most_brackets_is_read_and_one_more_is_too_many() -> None:
    assert _document(b'"%b"' % (b"[" * MOST_BRACKETS)) == "[" * MOST_BRACKETS
    with pytest.raises(OpenAIError, match="expected at most 1,048,576 opening brackets, got 1,048,577") as caught:
        _document(b'"%b{"' % (b"[" * MOST_BRACKETS))
    assert caught.value.status == 413


def test_a_connection_that_uvicorn_has_closed_is_a_client_that_has_left() -> None:
    """uvicorn closes it when bytes behind the request are no HTTP, and uvloop refuses to write from then on."""

    async def send(message: object) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    async def answer_it() -> HandledRequest:
        record = begin_record("/v1/completions", ())
        settings = GatewaySettings((ModelSettings(("http://h:1",)),))
        exchange = ApiExchange({"headers": []}, _never, send, record, settings)
        with pytest.raises(ClientLeft):
            await exchange.respond(200, b"{}")
        return record

    assert asyncio.run(answer_it()).client_left


async def _never() -> Any:
    raise AssertionError("nothing more is to be read")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("PUT", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/nothing", 404, "not_found"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("GET", "/v1/models/gpt-5", 404, "model_not_found"),
    ],
)
def test_a_wrong_path_or_method(address: str, method: str, path: str, status: int, code: str) -> None:
    response = httpx.request(method, f"{address}{path}")
    assert (response.status_code, error_of(response)["code"]) == (status, code)


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_a_wrong_model(triton: RawTriton, address: str, path: str) -> None:
    response = ask(address, path, model="gpt-5")
    error = error_of(response)
    assert (response.status_code, error["param"], error["code"]) == (404, "model", "model_not_found")
    assert "'tiny'" in error["message"]
    assert not triton.asked


def test_head_and_options(address: str) -> None:
    assert (httpx.head(f"{address}/v1/models").status_code, httpx.head(f"{address}/v1/models").content) == (200, b"")
    asked = {"Origin": "https://chat.example.com", "Access-Control-Request-Method": "POST"}
    allowed = httpx.options(f"{address}/v1/chat/completions", headers=asked)
    assert allowed.headers["access-control-allow-origin"] == "https://chat.example.com"
    other = httpx.options(f"{address}/v1/chat/completions", headers={**asked, "Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


def test_a_request_id_goes_in_and_out_and_carries_nothing_else(triton: RawTriton, address: str) -> None:
    headers = {"X-Request-Id": "mine-1", "X-Other": "secret", "Authorization": "Bearer k", "traceparent": "a\tb"}
    response = httpx.post(f"{address}/v1/chat/completions", json=CHAT, headers=headers)
    assert response.headers["x-request-id"] == "mine-1"
    assert triton.asked[0]["id"].startswith("mine-1")
    assert "x-other" not in triton.heads[0].lower()
    assert "bearer" not in triton.heads[0].lower()
    assert "a\tb" not in triton.heads[0]
    odd = httpx.post(f"{address}/v1/chat/completions", json=CHAT, headers={"X-Request-Id": 'a"b c'})
    assert odd.headers["x-request-id"].startswith("req-")


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
    (400, "unexpected inference input", 502, None, "bad_gateway"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize(("their_status", "text", "status", "param", "code"), ERRORS)
def test_an_error_before_the_first_byte(
    triton: RawTriton,
    address: str,
    path: str,
    stream: bool,
    their_status: int,
    text: str,
    status: int,
    param: str | None,
    code: str | None,
) -> None:
    triton.script = refusal(their_status, text)
    response = ask(address, path, stream=stream)
    error = error_of(response)
    if param == "messages" and path == "completions":
        param = "prompt"
    assert (response.status_code, error["param"], error["code"]) == (status, param, code)
    assert error["type"] == ("invalid_request_error" if status == 400 else "server_error")
    assert ("retry-after" in response.headers) == (status == 429)
    assert "E_" not in error["message"]


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize(("their_status", "text", "status", "param", "code"), ERRORS)
def test_an_error_after_the_first_byte_is_the_last_event(
    triton: RawTriton,
    address: str,
    path: str,
    their_status: int,
    text: str,
    status: int,
    param: str | None,
    code: str | None,
) -> None:
    seen = threading.Event()
    if param == "messages" and path == "completions":
        param = "prompt"

    def script(wire: Wire) -> None:
        wire.head()
        wire.chunk(TEXT)
        seen.wait(PATIENCE_S)
        wire.chunk(event(error=text))
        wire.chunk(b"")

    triton.script = script
    body = {"prompt": "Hi"} if path == "completions" else CHAT
    with httpx.stream("POST", f"{address}/v1/{path}", json={**body, "stream": True}, timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        seen.set()
        rest = [line for line in lines if line.startswith("data: ")]
    assert response.status_code == 200
    error = json.loads(rest[-1][6:])["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert not any("[DONE]" in line for line in rest)


def dies(wire: Wire) -> None:
    wire.head()
    wire.chunk(TEXT)
    time.sleep(0.05)
    wire.reset()


def stops_short(wire: Wire) -> None:
    wire.head()
    wire.chunk(TEXT)
    wire.chunk(b"")


@pytest.mark.parametrize("script", [dies, stops_short])
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_half_an_answer_is_an_error(triton: RawTriton, address: str, path: str, stream: bool, script: Any) -> None:
    triton.script = script
    response = ask(address, path, stream=stream)
    if stream and response.status_code == 200:
        assert response.text.count('"error"') == 1
        assert "[DONE]" not in response.text
    else:
        assert response.status_code in (502, 503)
    triton.script = answer(TEXT, LAST)

    def again() -> bool:  # the fleet may have to see first that the server is there
        return ask(address, path).status_code == 200

    wait_for(again)


def leave(triton: RawTriton, address: str, body: Json, path: str, *, until: bytes = b"", num_asked: int = 1) -> None:
    """Send a request, and close the connection when these bytes have come and the server has been asked so often."""
    with leaving(f"{address}/v1/{path}", body, until=until):
        wait_for(lambda: len(triton.asked) == num_asked)


def until_stopped(wire: Wire) -> None:
    wire.wait_for_stop()
    answer(event(error="[E_CANCELLED] the client had gone"))(wire)


def begun_until_stopped(wire: Wire) -> None:
    wire.head()
    wire.chunk(TEXT)
    wire.wait_for_stop()
    wire.chunk(event(finish_reason="cancelled"))
    wire.chunk(b"")


@pytest.mark.parametrize(
    ("fields", "begun"), [({"stream": True}, True), ({"stream": True}, False), ({}, False), ({}, True)]
)
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_a_client_that_leaves_stops_the_work(
    triton: RawTriton, address: str, path: str, fields: Json, begun: bool
) -> None:
    triton.script = begun_until_stopped if begun else until_stopped
    body = {**({"prompt": "Hi"} if path == "completions" else CHAT), **fields}
    leave(triton, address, body, path, until=b"Hello" if begun and fields else b"")
    wait_for(lambda: triton.stopped)
    assert triton.stopped == [triton.asked[0]["id"]]
    triton.script = answer(TEXT, LAST)
    assert ask(address).status_code == 200
    (fleet,) = httpx.get(f"{address}/fleet").json()["models"]
    assert fleet["servers"][0]["own"] == [0, 0]


def test_every_prompt_of_a_client_that_leaves_is_stopped(triton: RawTriton, address: str) -> None:
    triton.script = until_stopped
    leave(triton, address, {"prompt": ["a", "b", "c"]}, "completions", num_asked=3)
    wait_for(lambda: len(triton.stopped) == 3)
    assert sorted(triton.stopped) == sorted(asked["id"] for asked in triton.asked)
    assert len(set(triton.stopped)) == 3


def test_connections_are_used_again(triton: RawTriton, address: str) -> None:
    ask(address)
    before = triton.connections
    for _ in range(20):
        assert ask(address, stream=True).status_code == 200
    assert triton.connections - before <= 1  # the fleet's own checks may have the one that is idle


def test_a_silent_stream_has_comments(triton: RawTriton) -> None:
    heard = threading.Event()

    def silent(wire: Wire) -> None:
        wire.head()
        wire.chunk(TEXT)
        assert heard.wait(PATIENCE_S)
        wire.chunk(LAST)
        wire.chunk(b"")

    triton.script = silent
    with (
        gateway_before(triton, keep_alive_s=0.1) as address,
        httpx.stream("POST", f"{address}/v1/chat/completions", json={**CHAT, "stream": True}, timeout=60) as response,
    ):
        lines = []
        for line in response.iter_lines():
            lines.append(line)
            if line == ": keep-alive":
                heard.set()
    assert lines[-2] == "data: [DONE]"
    assert heard.is_set()


def test_a_client_that_does_not_read_makes_the_server_wait(triton: RawTriton, address: str) -> None:
    size = 96 * 2**20
    sent = 0

    def long_answer(wire: Wire) -> None:
        nonlocal sent
        wire.head()
        piece = event(text_output="x" * 60_000)
        while sent < size:
            wire.chunk(piece)
            sent += len(piece)
        wire.chunk(LAST)
        wire.chunk(b"")

    triton.script = long_answer
    with httpx.stream("POST", f"{address}/v1/chat/completions", json={**CHAT, "stream": True}, timeout=60) as response:
        pieces = response.iter_raw()
        next(pieces)
        former = -1
        while former != sent:  # until nobody takes more
            former = sent
            time.sleep(0.3)
        assert sent < size // 3
        total = sum(map(len, pieces))
    assert total > size


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_is_enough_and_stops_the_server(triton: RawTriton, address: str, stream: bool) -> None:
    def two_calls(wire: Wire) -> None:
        wire.head()
        wire.chunk(event(text_output=f"<｜tool▁calls▁begin｜>{CALL}", num_input_tokens=9, num_output_tokens=5))
        wire.chunk(event(text_output="<｜tool▁call▁begin｜>f", num_input_tokens=9, num_output_tokens=1))
        wire.wait_for_stop()
        wire.chunk(event(finish_reason="stop"))
        wire.chunk(b"")

    triton.script = two_calls
    response = ask(address, tools=[TOOL], parallel_tool_calls=False, stream=stream)
    assert response.text.count("call_") == 1
    assert response.text.count('"tool_calls"') >= 2
    wait_for(lambda: triton.stopped)
    assert triton.asked[0]["streaming"] is True
    if not stream:
        assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
        assert response.json()["usage"]["prompt_tokens"] == 9


def test_prompts_of_a_list_are_answered_in_their_order(triton: RawTriton, address: str) -> None:
    def by_prompt(wire: Wire) -> None:
        asked = next(asked for asked in triton.asked if asked["id"] == wire.request_id)
        time.sleep(0.1 if asked["text_input"] == "a" else 0)
        text = asked["text_input"] or str(asked["input_ids"])
        answer(event(text_output=text.upper(), finish_reason="length", num_input_tokens=1, num_output_tokens=1))(wire)

    triton.script = by_prompt
    document = ask(address, "completions", prompt=["a", "b", [5, 6]]).json()
    assert [choice["text"] for choice in document["choices"]] == ["A", "B", "[5, 6]"]
    assert document["usage"]["total_tokens"] == 6


def test_the_text_of_ids_is_echoed(triton: RawTriton, address: str) -> None:
    def script(wire: Wire) -> None:
        detokenizes = triton.asked[-1].get("task") == "detokenize"
        answer(*((event(text_output="Once"),) if detokenizes else (TEXT, LAST)))(wire)

    triton.script = script
    assert ask(address, "completions", prompt=[7, 8], echo=True).json()["choices"][0]["text"] == "OnceHello"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
RESPONSE_FIELDS = {"input", "text", "include", "reasoning", "instructions", "truncation"}
NAMES = st.sampled_from(sorted({*SAMPLING, *INPUTS, *CHAT_FIELDS, *COMPLETION_FIELDS, *RESPONSE_FIELDS}))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(["chat/completions", "completions", "responses"]),
    fields=st.dictionaries(NAMES, JSON, max_size=4),
    whole=st.booleans(),
)
def test_any_body_is_answered_or_refused(triton: RawTriton, address: str, path: str, fields: Json, whole: bool) -> None:
    prompt: Json = {"completions": {"prompt": "Hi"}, "responses": {"input": "Hi"}}.get(path, CHAT)
    response = httpx.post(f"{address}/v1/{path}", json={**prompt, **fields} if whole else fields, timeout=60)
    assert response.status_code in (200, 400, 404, 502), response.text
    if response.status_code != 200:
        assert error_of(response)["message"]
