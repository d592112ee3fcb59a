"""The HTTP transport, blocking and in asyncio, against a scripted server on a real socket."""

import asyncio
import builtins
import gc
import json
import logging
import socket
import ssl
import time
import warnings
from contextlib import suppress

import h11
import pytest
import trustme
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepseek_triton_client._core.client_settings import Connection, Tls
from deepseek_triton_client._core.exceptions import (
    AccessDenied,
    Cancelled,
    DeepseekTritonError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    ProtocolError,
    ServerError,
    ServerUnavailable,
)
from deepseek_triton_client._core.results import ModelMetadata, TensorMetadata
from deepseek_triton_client._core.transport import Input
from deepseek_triton_client._http.http11 import MOST_INFORMATIONAL
from deepseek_triton_client._http.http_errors import EXCHANGE_ERRORS, exchange_error
from support.drivers import DRIVERS
from support.http_server import HttpServer

FIRST = {"id": "r1", "model_name": "tensorrt_llm", "text_output": "你🙂"}
LAST = {"text_output": "好", "finish_reason": "stop", "num_output_tokens": 2}
INPUTS = [Input("text_input", "BYTES", ["hi"]), Input("sampling_param_stop", "BYTES", ["a", "b"])]
SECRET = "hf-very-secret"


@pytest.fixture(params=DRIVERS)
def driver(request):
    driver = DRIVERS[request.param]()
    yield driver
    driver.close()


@pytest.fixture
def transport(driver, http_server):
    return driver.transport(http_server.url)


def opened(transport):
    return transport.open("r1", INPUTS, connect_s=10)


async def read_all(stream):
    responses = []
    try:
        while (outputs := await stream.receive()) is not None:
            responses.append(outputs)
    finally:
        await stream.close()
    return responses


async def ask(transport):
    return await read_all(opened(transport))


def fails(driver, transport, kind, match=None):
    with pytest.raises(kind, match=match) as caught:
        driver.run(ask(transport))
    return caught.value


def event(payload):
    return b"data: " + json.dumps(payload, ensure_ascii=False).encode() + b"\n\n"


# What is sent, and what comes of it.


def test_a_stream_of_responses(http_server, driver, transport):
    http_server.script(http_server.events(FIRST, LAST))
    assert driver.run(ask(transport)) == [FIRST, LAST]
    body = {"id": "r1", "text_input": "hi", "sampling_param_stop": ["a", "b"]}
    assert http_server.requests == [("POST", "/v2/models/tensorrt_llm/generate_stream", body)]
    (headers,) = http_server.headers
    assert headers.pop("content-length").isdigit()
    assert headers == {
        "host": http_server.url.removeprefix("http://"),
        "user-agent": "deepseek-triton-client",
        "content-type": "application/json",
        "accept": "text/event-stream",
        "accept-encoding": "identity",
    }


def test_odd_names_a_version_and_a_prefix_are_in_the_path(http_server, driver):
    http_server.script(http_server.events(LAST))
    transport = driver.transport(http_server.url + "/through a/proxy/", model_name="a/b c", model_version="2")
    driver.run(ask(transport))
    assert http_server.requests[0][1] == "/through%20a/proxy/v2/models/a%2Fb%20c/versions/2/generate_stream"


def test_the_users_headers_and_a_token_that_changes(http_server, driver):
    http_server.script(*[http_server.events(LAST)] * 2)
    tokens = iter(["one", "two"])
    headers = {"X-Tenant": "blue", "Host": "models.example", "User-Agent": "mine"}
    transport = driver.transport(http_server.url, token=lambda: next(tokens), headers=headers)
    for token in ("one", "two"):
        driver.run(ask(transport))
        sent = http_server.headers[-1]
        assert sent["authorization"] == f"Bearer {token}"
        assert (sent["x-tenant"], sent["host"], sent["user-agent"]) == ("blue", "models.example", "mine")


def test_what_can_not_be_sent_is_refused_beforehand(driver):
    for name in ("Content-Length", "transfer-encoding", "Accept-Encoding"):
        with pytest.raises(InvalidRequest, match=name):
            driver.transport("http://127.0.0.1:1", headers={name: "1"})
    for host in ("ü." + "x" * 70, "x" * 70, "a..b"):
        with pytest.raises(InvalidRequest, match=f"url: expected the name of a host, got '{host}'"):
            driver.transport(f"http://{host}")
    named = {"http://[::1]:8000": b"[::1]:8000", "http://BÜCHER.example": b"xn--bcher-kva.example:8000"}
    for url, name in named.items():
        transport = driver.transport(url)
        assert dict(transport.headers(transport._server))[b"host"] == name


@pytest.mark.parametrize("kind", DRIVERS)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(0, 150)))
def test_bytes_cut_anywhere_give_the_same_responses(http_server, kind, cuts):
    body = event(FIRST) + event({"text_output": "日本語"}) + event(LAST).replace(b"\n", b"\r\n")
    ends = sorted({min(cut, len(body)) for cut in cuts} | {len(body)})
    pieces = [body[a:b] for a, b in zip([0, *ends], ends, strict=False) if a < b]
    http_server.script(http_server.pieces(*pieces))
    driver = DRIVERS[kind]()
    try:
        assert driver.run(ask(driver.transport(http_server.url))) == [FIRST, {"text_output": "日本語"}, LAST]
    finally:
        driver.close()


def test_a_large_request_and_a_large_response(http_server, driver, transport):
    text = "你好" * 500_000
    http_server.script(http_server.events({"text_output": text}))
    stream = transport.open("r1", [Input("text_input", "BYTES", [text])], connect_s=10)
    assert driver.run(read_all(stream)) == [{"text_output": text}]
    assert http_server.requests[0][2]["text_input"] == text


@pytest.mark.slow
def test_a_reader_that_is_slower_than_the_server_gets_everything(http_server, driver, transport):
    """The answer is far larger than the buffers on its way."""
    payload = {"text_output": "x" * 2**18}
    http_server.script(http_server.events(*[payload] * 100))

    async def read_slowly():
        stream = opened(transport)
        num_read = 0
        while await stream.receive() is not None:
            num_read += 1
            if driver.is_asyncio:
                await asyncio.sleep(0.001)
        await stream.close()
        return num_read

    assert driver.run(read_slowly()) == 100


def test_many_events_in_one_piece_come_one_by_one(http_server, driver, transport):
    http_server.script(http_server.pieces(b"".join(event({"n": n}) for n in range(1000))))
    assert driver.run(ask(transport)) == [{"n": n} for n in range(1000)]


# Errors in the answer.


STATUSES = [
    (400, "[E_INVALID_ARGUMENT] top_p", InvalidRequest, "E_INVALID_ARGUMENT", False),
    (400, "[E_OVERLOADED] full", Overloaded, "E_OVERLOADED", True),
    (503, "[E_CANCELLED] by stop", Cancelled, "E_CANCELLED", False),
    (400, "parameter 'a' has invalid type", InvalidRequest, None, False),
    (400, "Request for unknown model: 'x'", ModelNotFound, None, False),
    (503, "[E_UNAVAILABLE] draining", ServerUnavailable, "E_UNAVAILABLE", True),
    (401, "who?", AccessDenied, None, False),
    (403, "no", AccessDenied, None, False),
    (404, "what", ModelNotFound, None, False),
    (408, "slow", ServerUnavailable, None, False),
    (413, "large", InvalidRequest, None, False),
    (429, "many", Overloaded, None, True),
    (499, "left", Cancelled, None, False),
    (500, "what", ServerError, None, False),
    (502, "gone", ServerUnavailable, None, False),
    (503, "full", ServerUnavailable, None, True),
    (504, "late", ServerUnavailable, None, False),
]


@pytest.mark.parametrize("as_event", [False, True])
def test_error_statuses(http_server, driver, transport, as_event, subtests):
    """Triton sends a model's early errors as one event, its own as plain JSON."""
    for status, message, kind, code, unprocessed in STATUSES:
        payload = {"error": message}
        plain = http_server.body(status, json.dumps(payload).encode())
        http_server.script(http_server.events(payload, status=status) if as_event else plain)
        error = fails(driver, transport, DeepseekTritonError)
        with subtests.test(f"{status} {message}"):
            assert (type(error), error.code, error.unprocessed) == (kind, code, unprocessed)
            assert str(error) == message
    http_server.script(http_server.raw(b"HTTP/1.1 204 No Content\r\n\r\n"))
    fails(driver, transport, ProtocolError)


def test_an_error_page_of_something_in_between(http_server, driver, transport):
    """One that breaks off is still the status, and one without an end is not read for ever."""

    def endless(handler):
        handler.start_chunked(502, "text/html")
        handler.send_chunk(b"x" * 2**17)
        http_server.silence(handler)

    http_server.script(http_server.body(502, b"<html>Bad Gateway " + b"x" * 10**6, "text/html"))
    error = fails(driver, transport, ServerUnavailable, r"^HTTP 502: '<html>Bad Gateway x+'$")
    assert len(str(error)) < 300
    http_server.script(http_server.raw(b"HTTP/1.1 503 Busy\r\nContent-Length: 100\r\n\r\nsorry"))
    assert fails(driver, transport, ServerUnavailable, "503: 'sorry'").unprocessed
    http_server.script(endless)
    fails(driver, transport, ServerUnavailable, "HTTP 502: 'xxx")
    assert http_server.gone.wait(30)


def test_redirects_are_not_followed_and_show_the_host_at_most(http_server, driver, transport):
    for location in (f"https://login.example/?token={SECRET}", "/elsewhere", "http://[broken"):
        http_server.script(http_server.body(302, b"", Location=location))
        error = fails(driver, transport, ProtocolError, "HTTP 302: a redirect")
        assert ("to login.example," in str(error)) is ("login" in location)
        assert SECRET not in str(error)


def test_an_error_event_inside_a_200_comes_after_the_responses_before_it(http_server, driver, transport):
    http_server.script(http_server.events(FIRST, {"error": "[E_UNAVAILABLE] engine died"}))
    stream = opened(transport)
    assert driver.run(stream.receive()) == FIRST
    with pytest.raises(ServerUnavailable, match="engine died"):
        driver.run(stream.receive())
    driver.run(stream.close())


def test_half_an_event_at_the_end_of_the_body(http_server, driver, transport):
    for rest in (b"data: {", event(LAST)[:-1]):
        http_server.script(http_server.pieces(event(FIRST), rest))
        stream = opened(transport)
        assert driver.run(stream.receive()) == FIRST
        with pytest.raises(ProtocolError, match="in the middle of an event"):
            driver.run(stream.receive())
        driver.run(stream.close())


def test_what_is_not_a_stream_of_events(http_server, driver, transport):
    for content_type in ("text/html", "application/json", ""):
        http_server.script(http_server.body(200, b"{}", content_type))
        fails(driver, transport, ProtocolError, f"got '{content_type}'")
    http_server.script(http_server.pieces(b"data: hello\n\n"))
    fails(driver, transport, ProtocolError, "hello")


NOT_HTTP = [
    b"\0\0\x12\x04 is what a gRPC port says\r\n\r\n",
    b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n" + b"x-page: " + b"y" * 200_000 + b"\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
]


def test_what_is_not_http(http_server, driver, transport):
    for number, answer in enumerate(NOT_HTTP, 1):
        http_server.script(http_server.raw(answer))
        fails(driver, transport, ProtocolError, "POST http://127")
        http_server.await_closed(number)


def test_an_event_that_is_too_large(http_server, driver):
    transport = driver.transport(http_server.url, connection=Connection(max_message_bytes=1000))
    http_server.script(http_server.pieces(b"data: ", b"x" * 900, b"x" * 900))
    stream = opened(transport)
    with pytest.raises(ProtocolError, match="max_message_bytes, 1000"):
        driver.run(stream.receive())
    driver.run(stream.close())


def test_a_head_is_read_up_to_its_limit(http_server, driver, transport):
    """h11 holds 16 KiB of a head that has not ended."""
    beginning, end = b"HTTP/1.1 200 OK\r\nX: ", b"\r\nContent-Length: 0\r\nContent-Type: text/event-stream\r\n\r\n"
    longest = b"a" * (h11._connection.DEFAULT_MAX_INCOMPLETE_EVENT_SIZE - len(beginning))
    http_server.script(http_server.raw(beginning + longest, end))
    assert driver.run(ask(transport)) == []
    http_server.await_closed(1)  # or the next request may go into the connection that ends
    http_server.script(http_server.raw(beginning + longest + b"a" * 2**17))
    with pytest.raises(ProtocolError, match=r"the answer is not HTTP/1\.1"):
        driver.run(ask(transport))


def test_a_head_after_many_others_is_the_answer_and_after_one_more_is_not(http_server, driver, transport):
    informational = b"HTTP/1.1 103 Early Hints\r\n\r\n"
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nContent-Type: text/event-stream\r\n\r\n"
    http_server.script(http_server.raw(informational * MOST_INFORMATIONAL + answer))
    assert driver.run(ask(transport)) == []
    http_server.await_closed(1)  # or the next request may go into the connection that ends
    http_server.script(http_server.raw(informational * (MOST_INFORMATIONAL + 1) + answer))
    with pytest.raises(ProtocolError, match="more than 100 informational responses"):
        driver.run(ask(transport))


# Connections that don't come about, break off and are broken off.


def test_nobody_listens(http_server, driver, transport):
    """Or the name is not known."""
    http_server.stop()
    assert fails(driver, transport, ServerUnavailable, f"^{http_server.url}: can't connect: .*refused|call").unprocessed
    nowhere = driver.transport("http://no-such-host.invalid")
    error = fails(driver, nowhere, ServerUnavailable, r"no-such-host\.invalid:8000: can't connect")
    assert error.unprocessed


@pytest.fixture
def full_queue():
    """The address of a server whose queue has no room: connecting to it takes for ever."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        waiting = []
        for _ in range(4):  # Linux takes one more than it was told, and drops the rest silently
            each = socket.socket()
            each.setblocking(False)
            each.connect_ex(listening.getsockname())
            waiting.append(each)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        for each in waiting:
            each.close()


def test_connecting_takes_too_long(driver, full_queue):
    stream = driver.transport(full_queue).open("r1", INPUTS, connect_s=0.05)
    with pytest.raises(ServerUnavailable, match=r"no connection within 0\.05 s") as caught:
        driver.run(read_all(stream))
    assert caught.value.unprocessed


@pytest.mark.slow
def test_interrupted_while_connecting(driver, full_queue):
    stream = driver.transport(full_queue).open("r1", INPUTS, connect_s=0.5)
    reading = driver.start(read_all(stream))
    stream.interrupt()
    with pytest.raises(Cancelled):
        reading.result(30)


def test_interrupted_before_it_begins(http_server, driver, transport):
    """Nothing is sent before the first receive."""
    driver.run(opened(transport).close())
    stream = opened(transport)
    stream.interrupt()
    with pytest.raises(Cancelled):
        driver.run(read_all(stream))
    assert not http_server.asked.is_set()


def test_interrupted_while_the_headers_are_awaited(http_server, driver, transport):
    http_server.script(http_server.silence)
    stream = opened(transport)
    reading = driver.start(read_all(stream))
    assert http_server.asked.wait(30)
    stream.interrupt()
    with pytest.raises(Cancelled) as caught:
        reading.result(30)
    assert not caught.value.unprocessed
    assert http_server.gone.wait(30)


def test_interrupted_in_the_middle_of_the_body(http_server, driver, transport):
    http_server.script(http_server.endless(FIRST), http_server.events(LAST))
    stream = opened(transport)
    assert driver.run(stream.receive()) == FIRST
    reading = driver.start(stream.receive())
    stream.interrupt()
    with pytest.raises(Cancelled):
        reading.result(30)
    stream.interrupt()
    driver.run(stream.close())
    stream.interrupt()
    assert http_server.gone.wait(30)
    assert driver.run(ask(transport)) == [LAST]


def test_closing_the_transport_ends_what_is_under_way(http_server, driver, transport):
    http_server.script(http_server.silence)
    stream = opened(transport)
    reading = driver.start(read_all(stream))
    while not http_server.requests:
        time.sleep(0.001)
    driver.run(transport.close())
    with pytest.raises(Cancelled, match="the client was closed"):
        reading.result(30)
    assert http_server.gone.wait(30)


@pytest.mark.slow
def test_a_stream_that_was_dropped_is_left(http_server, driver, transport):
    http_server.script(http_server.endless({"text_output": "a"}))
    stream = opened(transport)
    driver.run(stream.receive())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # which says the same
        del stream
        gc.collect()
        assert http_server.gone.wait(30)


def test_a_connection_interrupted_at_its_end_serves_no_other_request(http_server, driver, transport):
    http_server.script(*[http_server.events(LAST)] * 2)
    stream = opened(transport)
    assert driver.run(stream.receive()) == LAST
    assert driver.run(stream.receive()) is None
    stream.interrupt()
    driver.run(stream.close())
    assert driver.run(ask(transport)) == [LAST]
    assert http_server.num_connections == 2


def test_a_reset_in_the_middle(http_server, driver, transport):
    def broken(handler):
        handler.start_chunked()
        handler.send_chunk(event(FIRST))
        assert http_server.release.wait(30)
        http_server.reset(handler)

    http_server.script(broken)
    stream = opened(transport)
    assert driver.run(stream.receive()) == FIRST
    http_server.release.set()
    with pytest.raises(ServerUnavailable, match="POST http://127") as caught:
        driver.run(stream.receive())
    assert not caught.value.unprocessed
    driver.run(stream.close())


def test_a_server_that_hangs_up_without_an_answer(http_server, driver, transport):
    for number, sent in enumerate((b"", b"HTTP/1.1 200 OK\r\nContent-"), 1):
        http_server.script(http_server.raw(sent))
        assert not fails(driver, transport, ServerUnavailable, "closed it before the end").unprocessed
        http_server.await_closed(number)


def test_a_body_that_is_cut_off(http_server, driver, transport):
    def broken(handler):
        handler.start_chunked()
        handler.send_chunk(event(FIRST))
        handler.close_connection = True

    http_server.script(broken)
    stream = opened(transport)
    assert driver.run(stream.receive()) == FIRST
    with pytest.raises(ServerUnavailable, match="closed it before the end"):
        driver.run(stream.receive())
    driver.run(stream.close())


def test_closing_before_the_end_is_seen_by_the_server(http_server, driver, transport):
    http_server.script(http_server.endless(FIRST))
    stream = opened(transport)
    assert driver.run(stream.receive()) == FIRST
    driver.run(stream.close())
    assert http_server.gone.wait(30)
    driver.run(stream.close())


def test_a_cancelled_task_is_seen_by_the_server(http_server):
    http_server.script(http_server.silence)
    driver = DRIVERS["asyncio"]()
    try:
        reading = driver.start(read_all(opened(driver.transport(http_server.url))))
        assert http_server.asked.wait(30)
        reading.cancel()
        assert http_server.gone.wait(30)
    finally:
        driver.close()


def test_an_early_answer_to_a_request_that_is_not_read(driver):
    """A proxy refuses a large body and hangs up while it is still being sent."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        transport = driver.transport(f"http://127.0.0.1:{listening.getsockname()[1]}")
        stream = transport.open("r1", [Input("text_input", "BYTES", ["x" * 10**7])], connect_s=10)
        reading = driver.start(read_all(stream))
        accepted, _ = listening.accept()
        with accepted:
            accepted.recv(1000)
            accepted.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
            accepted.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):  # the client leaves as soon as it knows
                while accepted.recv(2**20):
                    pass
        with pytest.raises(InvalidRequest, match="HTTP 413"):
            reading.result(30)


def test_an_answer_is_not_lost_when_the_rest_of_the_request_is_reset():
    driver = DRIVERS["blocking"]()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        transport = driver.transport(f"http://127.0.0.1:{listening.getsockname()[1]}")
        stream = transport.open("r1", [Input("text_input", "BYTES", ["x" * 10**7])], connect_s=10)
        reading = driver.start(read_all(stream))
        accepted, _ = listening.accept()
        with accepted:
            accepted.recv(1000)
            accepted.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        with pytest.raises(InvalidRequest, match="HTTP 413"):
            reading.result(30)
    driver.close()


def test_every_exception_of_sockets_and_h11_becomes_one_of_ours():
    kinds = [kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, OSError)]
    kinds += [ssl.SSLError, ssl.SSLEOFError, socket.gaierror]
    h11s = [kind for kind in vars(h11).values() if isinstance(kind, type) and issubclass(kind, h11.ProtocolError)]
    assert len(kinds) > 15
    assert len(h11s) == 3
    for kind in (*kinds, h11.RemoteProtocolError, h11.LocalProtocolError):
        assert issubclass(kind, EXCHANGE_ERRORS)
        assert isinstance(exchange_error(kind("x"), "POST http://a:1/b", 1.0), DeepseekTritonError)


def test_a_header_that_can_not_be_sent_is_not_quoted():
    error = exchange_error(h11.LocalProtocolError(f"Illegal header value b'{SECRET}'"), "POST http://a:1/b", None)
    assert type(error) is InvalidRequest
    assert SECRET not in str(error)


# What is not streamed.


@pytest.mark.parametrize(("method", "path"), [("server_ready", "/v2/health/ready"), ("model_ready", "MODEL/ready")])
def test_ready(http_server, driver, transport, method, path):
    http_server.script(*(http_server.body(status, b"") for status in (400, 503, 200)))
    assert [driver.run(getattr(transport, method)(10)) for _ in range(3)] == [False, False, True]
    assert http_server.requests[0][:2] == ("GET", path.replace("MODEL", "/v2/models/tensorrt_llm"))


def test_ready_does_not_hide_what_waiting_will_not_mend(http_server, driver, transport):
    for status, kind in ((401, AccessDenied), (302, ProtocolError)):
        http_server.script(http_server.body(status, b""))
        with pytest.raises(kind):
            driver.run(transport.server_ready(10))


PAGE = b"<!DOCTYPE html><title>Welcome</title>"


@pytest.mark.parametrize("method", ["server_ready", "metadata"])
def test_another_web_server_is_not_taken_for_triton(http_server, driver, transport, method):
    for status, body, kind in (
        (200, PAGE, ProtocolError),  # a page for every path
        (404, PAGE, ProtocolError),
        (404, b"", ProtocolError),
        (404, b'{"detail":"Not Found"}', ProtocolError),  # an OpenAI server
        (501, PAGE, ProtocolError),
        (502, PAGE, ServerUnavailable),  # a proxy with nobody behind it
        (503, b"no healthy upstream", ServerUnavailable),
    ):
        http_server.script(http_server.body(status, body))
        with pytest.raises(kind, match=f"HTTP {status}") as caught:
            driver.run(getattr(transport, method)(10))
        assert ("this is not Triton's HTTP port (8000 by default)" in str(caught.value)) is (kind is ProtocolError)


def test_a_grpc_port_is_named(http_server, driver, transport):
    settings = bytes.fromhex("000018040000000000000400400000000500400000")
    http_server.script(lambda handler: handler.wfile.write(settings))
    with pytest.raises(ProtocolError, match="HTTP/2, so this is a gRPC port: grpc:// instead of http://"):
        driver.run(transport.server_ready(10))


def test_metadata(http_server, driver, transport):
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [-1]}
    body = {"name": "tensorrt_llm", "versions": ["1"], "platform": "python", "inputs": [tensor], "outputs": []}
    http_server.script(http_server.body(200, json.dumps(body).encode()))
    inputs = (TensorMetadata("text_input", "BYTES", (-1,)),)
    assert driver.run(transport.metadata(10)) == ModelMetadata("tensorrt_llm", ("1",), "python", inputs, ())
    assert http_server.requests == [("GET", "/v2/models/tensorrt_llm", None)]


def test_metadata_that_is_none(http_server, driver):
    transport = driver.transport(http_server.url, connection=Connection(max_message_bytes=1000))
    wrong = (b"<html>", b"{}", b'{"name": "m", "platform": "p", "inputs": [1], "outputs": []}')
    for body, match in (*((body, None) for body in wrong), (b" " * 1001, "max_message_bytes, 1000")):
        http_server.script(http_server.body(200, body))
        with pytest.raises(ProtocolError, match=match):
            driver.run(transport.metadata(10))


def test_a_question_that_is_not_answered_in_time_can_be_asked_again(http_server, driver, transport):
    http_server.script(http_server.silence)
    with pytest.raises(ServerUnavailable, match=r"no answer within 0\.05 s") as caught:
        driver.run(transport.metadata(0.05))
    assert caught.value.unprocessed
    assert http_server.gone.wait(30)


def test_metrics_of_the_same_host_get_the_token(http_server, driver):
    http_server.script(http_server.body(200, "a 1 # 你\n".encode(), "text/plain"))
    transport = driver.transport("http://127.0.0.1:1", token=SECRET, headers={"x-tenant": "blue"})
    assert driver.run(transport.metrics(f"{http_server.url}/metrics?a=b", 10)) == "a 1 # 你\n"
    assert http_server.requests == [("GET", "/metrics?a=b", None)]
    assert (http_server.headers[0]["authorization"], http_server.headers[0]["x-tenant"]) == (f"Bearer {SECRET}", "blue")


def test_metrics_elsewhere_or_without_tls_get_no_token(http_server, driver):
    for own in ("http://localhost:1", "https://127.0.0.1:1"):
        http_server.script(http_server.body(200, b""))
        transport = driver.transport(own, token=SECRET, headers={"x-tenant": "blue"})
        driver.run(transport.metrics(f"{http_server.url}/metrics", 10))
        assert {"authorization", "x-tenant"}.isdisjoint(http_server.headers[-1])


# TLS.


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture(scope="module")
def pem(authority, tmp_path_factory):
    """PEM files: "ca", "other_ca", "client" (certificate and key in one), "certificate", "key", "garbage"."""
    folder = tmp_path_factory.mktemp("pem")
    client = authority.issue_cert("client@example.org")
    files = {
        "ca": authority.cert_pem.bytes(),
        "other_ca": trustme.CA().cert_pem.bytes(),
        "client": client.private_key_and_cert_chain_pem.bytes(),
        "certificate": client.cert_chain_pems[0].bytes(),
        "key": client.private_key_pem.bytes(),
        "garbage": b"not PEM",
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return {name: folder / name for name in files}


@pytest.fixture(params=["", "mtls"])
def tls_server(request, authority):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    if request.param:
        authority.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
    server = HttpServer(context)
    yield server
    server.stop()


only_mtls = pytest.mark.parametrize("tls_server", ["mtls"], indirect=True)
without_mtls = pytest.mark.parametrize("tls_server", [""], indirect=True)


@pytest.mark.parametrize("parts", [("client",), ("certificate", "key")])
def test_tls_with_the_right_certificates(tls_server, driver, pem, parts):
    tls_server.script(tls_server.events(FIRST, LAST), tls_server.events(LAST))
    files = [pem[part] for part in parts]
    tls = Tls(ca=pem["ca"], certificate=files[0], key=files[1] if len(files) > 1 else None)
    transport = driver.transport(tls_server.url, tls=tls)
    assert driver.run(ask(transport)) == [FIRST, LAST]
    assert driver.run(ask(transport)) == [LAST]
    assert tls_server.num_connections == 1


@only_mtls
def test_a_server_that_wants_a_certificate_refuses_who_has_none(tls_server, driver, pem):
    transport = driver.transport(tls_server.url, tls=Tls(ca=pem["ca"]))
    # In asyncio the write that fails may come before the alert that says why.
    with pytest.raises((AccessDenied, ServerUnavailable)) as caught:
        driver.run(ask(transport))
    assert isinstance(caught.value, ServerUnavailable) or "certificate" in str(caught.value)
    assert tls_server.requests == []


@without_mtls
def test_a_server_that_is_not_trusted(tls_server, driver, pem):
    """Its authority is unknown, or its certificate has another name."""
    for tls in (Tls(), Tls(ca=pem["other_ca"])):
        transport = driver.transport(tls_server.url, tls=tls)
        assert fails(driver, transport, ServerUnavailable, "certificate can't be trusted").unprocessed
    transport = driver.transport(tls_server.url.replace("127.0.0.1", "localhost"), tls=Tls(ca=pem["ca"]))
    fails(driver, transport, ServerUnavailable, "localhost")
    assert tls_server.requests == []


@without_mtls
def test_verifying_can_be_turned_off(tls_server, driver):
    tls_server.script(tls_server.events(LAST))
    assert driver.run(ask(driver.transport(tls_server.url, tls=Tls(verify=False)))) == [LAST]


@without_mtls
def test_interrupted_behind_tls(tls_server, driver, pem):
    tls_server.script(tls_server.endless(FIRST))
    stream = opened(driver.transport(tls_server.url, tls=Tls(ca=pem["ca"])))
    assert driver.run(stream.receive()) == FIRST
    reading = driver.start(stream.receive())
    stream.interrupt()
    with pytest.raises(Cancelled):
        reading.result(30)
    driver.run(stream.close())


def test_tls_to_a_port_without(http_server, driver):
    transport = driver.transport(http_server.url.replace("http:", "https:"))
    with pytest.raises(ServerUnavailable, match="TLS handshake failed") as caught:
        driver.run(ask(transport))
    assert caught.value.unprocessed


def test_files_that_are_not_what_they_should_be(driver, pem):
    for given_files, named in (
        ({"ca": "garbage"}, r"tls\.ca: .*garbage"),
        ({"certificate": "garbage"}, r"tls\.certificate: .*garbage"),
        ({"certificate": "certificate"}, r"tls\.certificate: .*certificate"),
        ({"certificate": "certificate", "key": "garbage"}, r"tls\.key .*garbage"),
    ):
        tls = Tls(**{name: pem[file] for name, file in given_files.items()})
        fails(driver, driver.transport("https://127.0.0.1:1", tls=tls), InvalidRequest, named)


# Secrets.


def test_a_token_shows_in_no_log_no_repr_and_no_error(http_server, driver, caplog):
    shown = []
    for answer in (http_server.events(LAST), http_server.body(401, b"no"), http_server.raw(b"")):
        http_server.script(answer)
        transport = driver.transport(http_server.url, token=SECRET, headers={"x-key": SECRET})
        stream = opened(transport)
        shown += [repr(transport), repr(stream)]
        with caplog.at_level(logging.DEBUG):
            try:
                driver.run(read_all(stream))
            except DeepseekTritonError as exc:
                shown += [str(exc), repr(exc), repr(exc.__cause__), repr(vars(exc))]
        assert http_server.headers[-1]["x-key"] == SECRET
    assert SECRET not in "".join([*shown, caplog.text])
