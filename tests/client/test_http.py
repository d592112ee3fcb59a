"""What only the HTTP transport does: its answers that are wrong, its questions and which connections it keeps."""

import asyncio
import builtins
import json
import socket
import ssl
import threading
from contextlib import suppress

import h11
import pytest

from deepseek_triton_client._asyncio_runtime import AsyncioRuntime, _within
from deepseek_triton_client._blocking_runtime import run
from deepseek_triton_client._core.client_settings import Connection, Endpoint, Settings, Tls
from deepseek_triton_client._core.exceptions import (
    AccessDenied,
    Cancelled,
    DeepseekTritonError,
    InvalidRequest,
    ModelNotFound,
    ModelNotReady,
    Overloaded,
    ProtocolError,
    ServerError,
    ServerUnavailable,
)
from deepseek_triton_client._core.interfaces import Input
from deepseek_triton_client._core.results import ModelMetadata, TensorMetadata
from deepseek_triton_client._http import http_connection
from deepseek_triton_client._http.http_connection import MOST_INFORMATIONAL, Pool
from deepseek_triton_client._http.http_errors import EXCHANGE_ERRORS, exchange_error
from support.drivers import opened, read_all

FIRST = {"id": "r1", "model_name": "tensorrt_llm", "text_output": "你🙂"}
LAST = {"text_output": "好", "finish_reason": "stop", "num_output_tokens": 2}
SECRET = "hf-very-secret"
WAIT_S = 30


@pytest.fixture
def transport(driver, http_server):
    return driver.transport(http_server.url)


def event(payload):
    return b"data: " + json.dumps(payload, ensure_ascii=False).encode() + b"\n\n"


# --- What is sent, and what comes of it ---


def test_what_is_sent(http_server, driver, transport):
    http_server.script(*[http_server.events(FIRST, LAST)] * 2)
    inputs = [Input("text_input", "BYTES", ["hi"]), Input("sampling_param_stop", "BYTES", ["a", "b"])]
    assert driver.ask(transport, inputs=inputs) == [FIRST, LAST]
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
    other = {"model_name": "a/b c", "model_version": "2", "headers": {"Host": "models.example", "User-Agent": "mine"}}
    driver.ask(driver.transport(http_server.url + "/through a/proxy/", **other))
    assert http_server.requests[1][1] == "/through%20a/proxy/v2/models/a%2Fb%20c/versions/2/generate_stream"
    assert (http_server.headers[1]["host"], http_server.headers[1]["user-agent"]) == ("models.example", "mine")


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


def test_bytes_cut_anywhere_give_the_same_responses(http_server, driver, transport):
    body = event(FIRST) + event({"text_output": "日本語"}) + event(LAST).replace(b"\n", b"\r\n")
    many = [{"n": n} for n in range(1000)]
    http_server.script(http_server.pieces(*(body[place : place + 1] for place in range(len(body)))))
    http_server.script(http_server.pieces(b"".join(map(event, many))))
    assert driver.ask(transport) == [FIRST, {"text_output": "日本語"}, LAST]
    assert driver.ask(transport) == many


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


# --- Errors in the answer ---


STATUSES = [
    (400, "[E_OVERLOADED] full", Overloaded, "E_OVERLOADED", True),
    (503, "[E_CANCELLED] by stop", Cancelled, "E_CANCELLED", False),
    (400, "parameter 'a' has invalid type", InvalidRequest, None, False),
    (401, "who?", AccessDenied, None, False),
    (403, "no", AccessDenied, None, False),
    (404, "what", ModelNotFound, None, False),
    (407, "who are you to the proxy?", AccessDenied, None, False),
    (408, "slow", ServerUnavailable, None, False),
    (413, "large", InvalidRequest, None, False),
    (429, "many", Overloaded, None, True),
    (499, "left", Cancelled, None, False),
    (500, "what", ServerError, None, False),
    (502, "gone", ServerUnavailable, None, False),
    (503, "full", ServerUnavailable, None, True),
    (504, "late", ServerUnavailable, None, False),
]


def test_error_statuses(http_server, driver, transport, subtests):
    """Triton sends a model's early errors as one event, its own as plain JSON."""
    for status, message, *expected in STATUSES:
        payload = {"error": message}
        for script in (
            http_server.events(payload, status=status),
            http_server.body(status, json.dumps(payload).encode()),
        ):
            http_server.script(script)
            error = driver.fails(transport, DeepseekTritonError)
            with subtests.test(f"{status} {message}"):
                assert [type(error), error.code, error.unprocessed] == expected
                assert str(error) == message
    for after, seconds in (("7", 7), ("3600", 0), ("-1", 0), ("Wed, 21 Oct 2026 07:28:00 GMT", 0)):
        http_server.script(http_server.body(429, b"full", **{"retry-after": after}))
        assert driver.fails(transport, Overloaded).retry_after_s == seconds, after
    http_server.script(http_server.raw(b"HTTP/1.1 204 No Content\r\n\r\n"))
    driver.fails(transport, ProtocolError)


def test_an_error_page_of_something_in_between(http_server, driver, transport):
    """One that breaks off is still the status, and one without an end is not read for ever."""

    def endless(handler):
        handler.start_chunked(502, "text/html")
        handler.send_chunk(b"x" * 2**17)
        http_server.silence(handler)

    http_server.script(http_server.body(502, b"<html>Bad Gateway " + b"x" * 10**6, "text/html"))
    error = driver.fails(transport, ServerUnavailable, match=r"^HTTP 502: '<html>Bad Gateway x+'$")
    assert len(str(error)) < 300
    http_server.script(http_server.raw(b"HTTP/1.1 503 Busy\r\nContent-Length: 100\r\n\r\nsorry"))
    assert driver.fails(transport, ServerUnavailable, match="503: 'sorry'").unprocessed
    http_server.script(endless)
    driver.fails(transport, ServerUnavailable, match="HTTP 502: 'xxx")
    assert http_server.gone.wait(WAIT_S)


def test_redirects_are_not_followed_and_show_the_host_at_most(http_server, driver, transport):
    for location in (f"https://login.example/?token={SECRET}", "/elsewhere", "http://[broken"):
        http_server.script(http_server.body(302, b"", Location=location))
        error = driver.fails(transport, ProtocolError, match="HTTP 302")
        assert ("login.example" in str(error)) is ("login" in location)
        assert SECRET not in str(error)


def cut_off(server):
    def answer(handler):
        handler.start_chunked()
        handler.send_chunk(event(FIRST))
        handler.close_connection = True

    return answer


ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nContent-Type: text/event-stream\r\n\r\n"
INFORMATIONAL = b"HTTP/1.1 103 Early Hints\r\n\r\n"
LONG_HEAD = b"HTTP/1.1 200 OK\r\nX: "
LONG_HEAD += b"a" * (h11._connection.DEFAULT_MAX_INCOMPLETE_EVENT_SIZE - len(LONG_HEAD))
"""h11 holds 16 KiB of a head that has not ended."""
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
BROKEN = [
    (lambda s: s.pieces(event(FIRST), b"data: {"), [FIRST], ProtocolError, "in the middle of an event"),
    (lambda s: s.pieces(event(FIRST), event(LAST)[:-1]), [FIRST], ProtocolError, "in the middle of an event"),
    (cut_off, [FIRST], ServerUnavailable, "closed it before the end"),
    (lambda s: s.raw(b""), [], ServerUnavailable, "closed it before the end"),
    (lambda s: s.raw(b"HTTP/1.1 200 OK\r\nContent-"), [], ServerUnavailable, "closed it before the end"),
    (lambda s: s.body(200, b"{}", "text/html"), [], ProtocolError, "got 'text/html'"),
    (lambda s: s.body(200, b"{}"), [], ProtocolError, "got 'application/json'"),
    (lambda s: s.body(200, b"{}", ""), [], ProtocolError, "got ''"),
    (lambda s: s.pieces(b"data: hello\n\n"), [], ProtocolError, "hello"),
    (lambda s: s.pieces(b"data: [1]\n\n"), [], ProtocolError, "JSON object"),
    (lambda s: s.pieces(b"data: ", b"x" * 900, b"x" * 900), [], ProtocolError, "max_message_bytes, 1000"),
    (lambda s: s.raw(b"\0\0\x12\x04 is what a gRPC port says\r\n\r\n"), [], ProtocolError, "POST http://127"),
    (lambda s: s.raw(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"), [], ProtocolError, "POST http://127"),
    (lambda s: s.raw(CHUNKED + b"zz\r\n"), [], ProtocolError, "POST http://127"),
    (lambda s: s.raw(LONG_HEAD + b"a" * 2**17), [], ProtocolError, "POST http://127"),
    (lambda s: s.raw(INFORMATIONAL * (MOST_INFORMATIONAL + 1) + ANSWER), [], ProtocolError, "more than 100"),
]
"""(what comes, the responses in it, the error after them)"""


def test_answers_that_are_broken(http_server, driver, subtests):
    for make, responses, kind, match in BROKEN:
        http_server.script(make(http_server))
        transport = driver.transport(http_server.url, connection=Connection(max_message_bytes=1000))
        error = driver.fails(transport, DeepseekTritonError, match=match)
        with subtests.test(match):
            assert (error.responses, type(error), error.unprocessed) == (responses, kind, False)
    for head in (INFORMATIONAL * MOST_INFORMATIONAL + ANSWER, LONG_HEAD + ANSWER[ANSWER.index(b"\r\n") :]):
        http_server.script(http_server.raw(head))
        assert driver.ask(driver.transport(http_server.url)) == []


@pytest.mark.slow
def test_an_early_answer_to_a_request_that_is_not_read(driver):
    """A proxy refuses a large body and hangs up while it is still being sent; its answer is not lost in the reset."""
    for is_reset in (False,) if driver.is_asyncio else (False, True):
        with socket.create_server(("127.0.0.1", 0)) as listening:
            transport = driver.transport(f"http://127.0.0.1:{listening.getsockname()[1]}")
            stream = transport.open("r1", [Input("text_input", "BYTES", ["x" * 10**7])], connect_s=10)
            reading = driver.start(read_all(stream))
            accepted, _ = listening.accept()
            with accepted:
                accepted.recv(1000)
                accepted.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
                if not is_reset:
                    accepted.shutdown(socket.SHUT_WR)
                    with suppress(ConnectionResetError):  # the client leaves as soon as it knows
                        while accepted.recv(2**20):
                            pass
            with pytest.raises(InvalidRequest, match="HTTP 413"):
                reading.result(WAIT_S)


def test_every_exception_of_sockets_and_h11_becomes_one_of_ours():
    kinds = [kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, OSError)]
    kinds += [ssl.SSLError, ssl.SSLEOFError, socket.gaierror, h11.RemoteProtocolError, h11.LocalProtocolError]
    for kind in kinds:
        assert issubclass(kind, EXCHANGE_ERRORS)
        assert isinstance(exchange_error(kind("x"), "POST http://a:1/b", 1.0), DeepseekTritonError)
    error = exchange_error(h11.LocalProtocolError(f"Illegal header value b'{SECRET}'"), "POST http://a:1/b", None)
    assert type(error) is InvalidRequest
    assert SECRET not in str(error)


# --- What is not streamed ---


def test_ready(http_server, driver, transport):
    for method, path in (("server_ready", "/v2/health/ready"), ("model_ready", "/v2/models/tensorrt_llm/ready")):
        http_server.script(*(http_server.body(status, b"") for status in (400, 503, 200)))
        assert [driver.run(getattr(transport, method)(10)) for _ in range(3)] == [False, False, True]
        assert http_server.requests[-1][:2] == ("GET", path)
    # Waiting will not mend the first two, and the last is a gateway.
    for status, kind, why in ((401, AccessDenied, ""), (302, ProtocolError, ""), (503, ModelNotReady, "none is up")):
        http_server.script(http_server.body(status, b'{"error":{"message":"%b"}}' % why.encode()))
        with pytest.raises(kind, match=why or None):
            driver.run(transport.server_ready(10))


PAGE = b"<!DOCTYPE html><title>Welcome</title>"
HTTP_2 = bytes.fromhex("000018040000000000000400400000000500400000")


@pytest.mark.parametrize("method", ["server_ready", "metadata"])
def test_another_server_is_not_taken_for_triton(http_server, driver, transport, method):
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
        assert ("not Triton's HTTP port" in str(caught.value)) is (kind is ProtocolError)
    http_server.script(lambda handler: handler.wfile.write(HTTP_2))
    with pytest.raises(ProtocolError, match="grpc:// instead of http://"):
        driver.run(getattr(transport, method)(10))


def test_metadata(http_server, driver):
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [-1]}
    body = {"name": "tensorrt_llm", "versions": ["1"], "platform": "python", "inputs": [tensor], "outputs": []}
    transport = driver.transport(http_server.url, connection=Connection(max_message_bytes=1000))
    http_server.script(http_server.body(200, json.dumps(body).encode()))
    inputs = (TensorMetadata("text_input", "BYTES", (-1,)),)
    assert driver.run(transport.metadata(10)) == ModelMetadata("tensorrt_llm", ("1",), "python", inputs, ())
    assert http_server.requests == [("GET", "/v2/models/tensorrt_llm", None)]
    wrong = (b"<html>", b"{}", b"", b'{"name": "m", "platform": "p", "inputs": [1], "outputs": []}')
    for body, match in (*((body, None) for body in wrong), (b" " * 1001, "max_message_bytes, 1000")):
        http_server.script(http_server.body(200, body))
        with pytest.raises(ProtocolError, match=match):
            driver.run(transport.metadata(10))


def test_a_question_that_is_not_answered_in_time_can_be_asked_again(http_server, driver, transport):
    http_server.script(http_server.silence)
    with pytest.raises(ServerUnavailable, match=r"no answer within 0\.05 s") as caught:
        driver.run(transport.metadata(0.05))
    assert caught.value.unprocessed
    assert http_server.gone.wait(WAIT_S)


def test_metrics_of_the_same_host_get_the_token_and_others_do_not(http_server, driver):
    """Nor those without TLS of a server with it."""
    whole = {"authorization": f"Bearer {SECRET}", "x-tenant": "blue"}
    for own, sent in (("http://127.0.0.1:1", whole), ("http://localhost:1", {}), ("https://127.0.0.1:1", {})):
        http_server.script(http_server.body(200, "a 1 # 你\n".encode(), "text/plain"), http_server.body(503, b""))
        transport = driver.transport(own, token=SECRET, headers={"x-tenant": "blue"})
        assert driver.run(transport.metrics(f"{http_server.url}/metrics?a=b", 10)) == "a 1 # 你\n"
        assert http_server.requests[-1] == ("GET", "/metrics?a=b", None)
        assert {name: value for name, value in http_server.headers[-1].items() if name in whole} == sent
        with pytest.raises(ServerUnavailable) as caught:
            driver.run(transport.metrics(f"{http_server.url}/metrics", 10))
        assert caught.value.unprocessed


@pytest.mark.slow
def test_tls(secure, http_server, driver, pem):
    """A certificate has the server's name, verifying can be turned off, and a request is interrupted behind it too."""
    server = secure("http")
    other_name = driver.transport(server.url.replace("127.0.0.1", "localhost"), tls=Tls(ca=pem["ca"]))
    assert driver.fails(other_name, ServerUnavailable, match=r"localhost.*certificate can't be trusted").unprocessed
    server.script(server.events(LAST), server.endless(FIRST))
    assert driver.ask(driver.transport(server.url, tls=Tls(verify=False))) == [LAST]
    stream = opened(driver.transport(server.url, tls=Tls(ca=pem["ca"])))
    assert driver.run(stream.receive()) == FIRST
    reading = driver.start(stream.receive())
    stream.interrupt()
    with pytest.raises(Cancelled):
        reading.result(WAIT_S)
    driver.run(stream.close())
    transport = driver.transport(http_server.url.replace("http:", "https:"))
    assert driver.fails(transport, ServerUnavailable, match="TLS handshake failed").unprocessed


# --- Which connections are kept ---


@pytest.fixture
def clock(monkeypatch):
    """A clock for the pool."""
    now = [1000.0]

    class Clock:
        @staticmethod
        def monotonic():
            return now[0]

    monkeypatch.setattr(http_connection, "time", Clock)
    return now


def test_one_connection_serves_one_request_after_the_other(http_server, driver, transport):
    """An error status does not cost the connection."""
    statuses = (http_server.body(200, b""), http_server.body(400, b"{}"))
    http_server.script(*[http_server.events(LAST)] * 3, *statuses, http_server.events(LAST))
    for _ in range(3):
        assert driver.ask(transport) == [LAST]
    assert [driver.run(transport.server_ready(10)) for _ in range(2)] == [True, False]
    assert driver.ask(transport) == [LAST]
    assert http_server.num_connections == 1


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_response_not_read_to_its_end_or_interrupted_there_costs_the_connection(
    http_server, driver, transport, interrupted
):
    http_server.script((http_server.events if interrupted else http_server.endless)(LAST), http_server.events(LAST))
    stream = opened(transport)
    assert driver.run(stream.receive()) == LAST
    if interrupted:
        assert driver.run(stream.receive()) is None
        stream.interrupt()
    driver.run(stream.close())
    assert driver.ask(transport) == [LAST]
    assert http_server.num_connections == 2


def test_a_server_that_says_it_will_close_or_has_closed_is_believed(http_server, driver, transport):
    def answer_and_leave(handler):
        http_server.events(LAST)(handler)
        handler.close_connection = True

    http_server.script(http_server.body(200, b"", Connection="close"), answer_and_leave, http_server.events(LAST))
    driver.run(transport.server_ready(10))
    assert driver.ask(transport) == [LAST]
    assert http_server.num_connections == 2
    http_server.await_closed(2)
    assert driver.ask(transport) == [LAST]
    assert http_server.num_connections == 3


def test_a_connection_on_which_something_came_unasked_is_not_used_again(http_server, driver, transport):
    """A proxy's farewell to an idle connection must not be taken for the answer to the next request."""

    def answer_and_farewell(handler):
        http_server.events(LAST)(handler)
        assert http_server.release.wait(WAIT_S)
        handler.wfile.write(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
        http_server.gone.set()

    http_server.script(answer_and_farewell, http_server.events(LAST))
    assert driver.ask(transport) == [LAST]
    http_server.release.set()
    assert http_server.gone.wait(WAIT_S)
    assert driver.ask(transport) == [LAST]
    assert http_server.num_connections == 2


def test_an_idle_connection_that_is_dead_costs_a_question_nothing_and_no_generation_is_sent_twice(
    http_server, driver, transport
):
    http_server.script(http_server.events(LAST), http_server.raw(b""), http_server.body(200, b""))
    driver.ask(transport)
    assert driver.run(transport.server_ready(10)) is True
    assert http_server.num_connections == 2
    http_server.script(http_server.raw(b""), http_server.events(LAST))
    driver.fails(transport, ServerUnavailable, match="closed it before the end")
    assert len(http_server.requests) == 4


def test_the_last_one_used_is_used_next_and_the_others_grow_old(http_server, driver, clock):
    transport = driver.transport(http_server.url, connection=Connection(keepalive_s=30))
    together = threading.Barrier(8)

    def all_at_once(handler):
        together.wait(WAIT_S)
        http_server.events(LAST)(handler)

    http_server.script(*[all_at_once] * 8, *[http_server.events(LAST)] * 5)
    waiting = [driver.start(read_all(opened(transport))) for _ in range(8)]
    assert [each.result(WAIT_S) for each in waiting] == [[LAST]] * 8
    for _ in range(4):
        clock[0] += 10
        driver.ask(transport)
    http_server.await_closed(7)
    assert http_server.num_connections == 8
    clock[0] += 31
    driver.ask(transport)
    http_server.await_closed(8)
    assert http_server.num_connections == 9


def test_closing_closes_what_idles_and_what_comes_back_later(http_server, driver, transport):
    http_server.script(http_server.events(LAST), http_server.events(LAST))
    driver.ask(transport)
    stream = opened(transport)
    driver.run(stream.receive())
    assert driver.run(stream.receive()) is None
    driver.run(transport.close())
    driver.run(stream.close())
    http_server.await_closed(1)


def test_a_second_event_loop_makes_connections_of_its_own(http_server):
    http_server.script(*[http_server.events(LAST)] * 2)
    endpoint = Endpoint.parse(http_server.url)
    transport = AsyncioRuntime().transport(endpoint, Settings(endpoints=(endpoint,), model_name="tensorrt_llm"))
    loops = [asyncio.new_event_loop() for _ in range(2)]
    for loop in loops:
        assert loop.run_until_complete(read_all(opened(transport))) == [LAST]
    loops[1].run_until_complete(transport.close())
    for loop in loops:
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
    assert http_server.num_connections == 2


class Fake:
    """A connection that stays idle until told otherwise."""

    is_connected = True
    is_idle = True
    closed = False

    async def close(self):
        self.closed = True


def test_giving_one_back_looks_at_no_more_than_have_grown_old(clock):
    pool = Pool(30)
    connections = [Fake() for _ in range(10)]
    for each in connections:
        run(pool.give_back(each))
        clock[0] += 4
    assert [each.closed for each in connections] == [True] * 2 + [False] * 8
    assert len(pool._idle) == 8
    clock[0] += 60
    assert run(pool.take()) is None
    assert all(each.closed for each in connections)


def test_a_cancellation_that_comes_with_the_result_is_not_lost():
    """asyncio.wait_for loses the cancellation before Python 3.12."""

    async def both_at_once():
        arrived = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(_within(arrived, 10))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        arrived.set_result("connected")
        task.cancel()
        await asyncio.wait({task})
        return task.cancelled()

    assert asyncio.run(both_at_once())
