"""What both transports do, HTTP and gRPC, blocking and in asyncio, against scripted servers on real sockets.

What only one of them does is in test_http.py and test_grpc.py.
"""

import asyncio
import gc
import itertools
import logging
import warnings
from contextlib import suppress

import pytest

from deepseek_triton_client._core.client_settings import Tls
from deepseek_triton_client._core.exceptions import (
    AccessDenied,
    Cancelled,
    DeepseekTritonError,
    InvalidRequest,
    Overloaded,
    ServerError,
    ServerUnavailable,
)
from deepseek_triton_client._core.interfaces import Input
from support.drivers import INPUTS, opened, read_all
from support.grpc_server import Proxy
from support.waiting import wait_for

FIRST = {"text_output": "你🙂"}
LAST = {"text_output": "好", "finish_reason": "stop", "num_output_tokens": 2}
SECRET = "hf-very-secret"
WAIT_S = 30


# --- What is sent, and what comes of it ---


def test_the_users_headers_and_a_token_that_changes(server, driver, caplog):
    """They show in no log, no repr and no error."""
    tokens = itertools.count()
    transport = driver.transport(server.url, token=lambda: f"{SECRET}-{next(tokens)}", headers={"X-Tenant": SECRET})
    shown = []
    with caplog.at_level(logging.DEBUG):
        for script in (server.replies(LAST), server.says("[E_INTERNAL] a bug")):
            server.script(script)
            stream = opened(transport)
            shown += [repr(transport), repr(stream)]
            try:
                driver.run(read_all(stream))
            except DeepseekTritonError as exc:
                shown += [str(exc), repr(exc), repr(exc.__cause__), repr(vars(exc))]
    sent = server.headers if server.wire == "http" else server.metadata  # gRPC asks first whether the server lives
    assert len(sent) == (2 if server.wire == "http" else 3)
    assert [each["authorization"] for each in sent] == [f"Bearer {SECRET}-{number}" for number in range(len(sent))]
    assert {each["x-tenant"] for each in sent} == {SECRET}
    assert SECRET not in "".join([*shown, caplog.text])


@pytest.mark.slow
def test_a_large_request_and_a_large_response(server, driver, transport):
    text = "你好" * 800_000
    server.script(server.replies({"text_output": text}))
    stream = transport.open("r1", [Input("text_input", "BYTES", [text])], connect_s=10)
    assert driver.run(read_all(stream)) == [{"text_output": text}]
    (sent,) = server.requests
    assert (sent[2]["text_input"] if server.wire == "http" else sent.raw_input_contents[0][4:].decode()) == text


def test_many_streams_at_once(server, driver, transport):
    """Each gets its own answer: over HTTP on a connection of its own, which serves the next ones."""
    texts = {str(number): [{"text_output": str(number)}] for number in range(20)}

    def repeat(asked, *context):
        name = asked.id if server.wire == "grpc" else asked.document["id"]
        return server.replies({"text_output": name})(asked, *context)

    server.script(*[repeat] * 60)
    for _ in range(3):
        streams = {name: transport.open(name, INPUTS, connect_s=10.0) for name in texts}
        found = {name: driver.start(read_all(stream)) for name, stream in streams.items()}
        assert {name: each.result(WAIT_S) for name, each in found.items()} == texts
    assert server.wire == "grpc" or server.num_connections <= 20


# --- Errors that the server sends ---


@pytest.mark.parametrize("before", [(), (FIRST,)], ids=["at once", "later"])
def test_an_error_of_the_model_is_the_end(server, driver, transport, before):
    for message, kind, code, unprocessed in (
        ("[E_OVERLOADED] full", Overloaded, "E_OVERLOADED", True),
        ("what", InvalidRequest if server.wire == "http" and not before else ServerError, None, False),
    ):
        server.script(server.says(message, *before))
        stream = opened(transport)
        assert [driver.run(stream.receive()) for _ in before] == [*before]
        with pytest.raises(DeepseekTritonError) as caught:
            driver.run(stream.receive())
        error = caught.value
        assert (type(error), error.code, str(error)) == (kind, code, message)
        if not before or server.wire == "grpc":  # over HTTP it is the exchange that knows what came before
            assert error.unprocessed is (unprocessed and not before)
        if server.wire == "grpc":
            assert driver.run(stream.receive()) is None
        driver.run(stream.close())


# --- Connections that don't come about and break off ---


def test_nobody_listens(server, driver, transport):
    """Or the name is not known."""
    server.stop()
    for each in (transport, driver.transport(f"{server.wire}://no-such-host.invalid")):
        assert driver.fails(each, ServerUnavailable).unprocessed
    for method in ("server_ready", "model_ready", "metadata"):
        with pytest.raises(ServerUnavailable) as caught:
            driver.run(getattr(transport, method)(10.0))
        assert caught.value.unprocessed


@pytest.mark.parametrize("wire", ["http", "grpc"])
def test_connecting_is_limited_and_interrupted(driver, full_queue, wire):
    transport = driver.transport(f"{wire}://127.0.0.1:{full_queue}")
    error = driver.fails(transport, ServerUnavailable, match=r"no connection within 0\.05 s", connect_s=0.05)
    assert error.unprocessed
    # A blocking socket can't be woken while it connects.
    stream = opened(transport, connect_s=0.2 if wire == "http" else 600.0)
    reading = driver.start(read_all(stream))
    wait_for(lambda: (stream._connection if wire == "http" else stream._call) is not None)
    driver.soon(stream.interrupt)
    with pytest.raises(Cancelled):
        reading.result(WAIT_S)


@pytest.mark.parametrize("before", [(), (FIRST,)], ids=["at once", "later"])
def test_a_connection_that_is_lost(server, driver, before):
    """The server had the request, and may have processed it."""
    server.script(server.hangs(*before))
    with Proxy(server.port) as proxy:
        stream = opened(driver.transport(f"{server.wire}://127.0.0.1:{proxy.port}"))
        assert [driver.run(stream.receive()) for _ in before] == [*before]
        reading = driver.start(read_all(stream))
        assert server.asked.wait(WAIT_S)
        proxy.cut()
        with pytest.raises(ServerUnavailable) as caught:
            reading.result(WAIT_S)
    assert not caught.value.unprocessed


# --- Streams that are left ---


def test_an_interrupt_before_anything_was_sent(server, driver, transport):
    """Nothing is sent before the first receive."""
    driver.run(opened(transport).close())
    stream = opened(transport)
    driver.soon(stream.interrupt)
    with pytest.raises(Cancelled):
        driver.run(read_all(stream))
    assert not server.asked.is_set()


@pytest.mark.parametrize("before", [(), (FIRST,)], ids=["at once", "later"])
def test_an_interrupt(server, driver, transport, before):
    """It may come again, and the next request is answered."""
    server.script(server.hangs(*before), server.replies(LAST))
    stream = opened(transport)
    assert [driver.run(stream.receive()) for _ in before] == [*before]
    reading = driver.start(stream.receive())
    assert server.asked.wait(WAIT_S)
    driver.soon(stream.interrupt)
    with pytest.raises(Cancelled) as caught:
        reading.result(WAIT_S)
    assert not caught.value.unprocessed
    driver.soon(stream.interrupt)
    driver.run(stream.close())
    driver.soon(stream.interrupt)
    assert server.gone.wait(WAIT_S)
    assert driver.ask(transport) == [LAST]


def test_closing_before_the_end_is_seen_by_the_server(server, driver, transport):
    server.script(server.hangs(FIRST))
    stream = opened(transport)
    assert driver.run(stream.receive()) == FIRST
    assert not server.gone.is_set()
    driver.run(stream.close())
    assert server.gone.wait(WAIT_S)


@pytest.mark.slow
def test_a_stream_that_was_dropped_is_left(server, driver, transport):
    server.script(server.hangs(FIRST))
    stream = opened(transport)
    driver.run(stream.receive())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # which says the same
        del stream
        gc.collect()
        assert server.gone.wait(WAIT_S)


def test_closing_stream_or_transport_ends_what_is_under_way(server, driver, transport):
    for close in (None, transport.close):
        server.script(server.hangs(FIRST))
        stream = opened(transport)
        driver.run(stream.receive())
        reading = driver.start(read_all(stream))
        driver.run((close or stream.close)())
        with pytest.raises(Cancelled):
            reading.result(WAIT_S)
        assert (server.gone.wait(WAIT_S), server.gone.clear()) == (True, None)
    driver.fails(transport, Cancelled, match="closed")


@pytest.mark.parametrize("driver", ["asyncio"], indirect=True)
def test_a_cancelled_task_stays_cancelled_and_is_seen_by_the_server(server, driver, transport):
    server.script(server.hangs(FIRST))

    async def body():
        stream = opened(transport)
        await stream.receive()
        task = asyncio.ensure_future(stream.receive())
        await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()
        if server.wire == "grpc":  # the call has ended with it, and a later read is no cancelled task
            with pytest.raises(Cancelled):
                await stream.receive()
        await stream.close()
        assert await asyncio.to_thread(server.gone.wait, WAIT_S)

    driver.run(body())


# --- TLS ---


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["http", "grpc"])
def test_tls(secure, driver, pem, wire):
    """A server that nobody vouches for, or that wants a certificate, gets no request without one."""
    plain, mutual = secure(wire), secure(wire, mutual=True)
    known = Tls(ca=pem["ca"])
    for server, tls in (
        (plain, known),
        (mutual, Tls(ca=pem["ca"], certificate=pem["client"])),
        (mutual, Tls(ca=pem["ca"], certificate=pem["certificate"], key=pem["key"])),
    ):
        server.script(server.replies(FIRST, LAST), server.replies(LAST))
        transport = driver.transport(server.url, tls=tls)
        assert [driver.ask(transport) for _ in range(2)] == [[FIRST, LAST], [LAST]]
    for server, tls in ((plain, Tls()), (plain, Tls(ca=pem["other_ca"])), (mutual, known)):
        before = len(server.requests)
        # Over HTTP in asyncio the write that fails may come before the alert that says why.
        error = driver.fails(driver.transport(server.url, tls=tls), (AccessDenied, ServerUnavailable))
        assert len(server.requests) == before
        if server is plain or wire == "grpc":
            assert (type(error), error.unprocessed) == (ServerUnavailable, True)
        else:
            assert isinstance(error, ServerUnavailable) or "certificate" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["https", "grpcs"])
def test_files_that_are_not_what_they_should_be(driver, pem, wire):
    for given, named in (
        ({"ca": "garbage"}, r"tls\.ca: .*garbage"),
        ({"certificate": "garbage"}, r"tls\.certificate: .*garbage"),
        ({"certificate": "certificate"}, r"tls\.certificate: .*certificate"),
        ({"certificate": "certificate", "key": "garbage"}, r"tls\.key .*garbage"),
    ):
        tls = Tls(**{name: pem[file] for name, file in given.items()})
        with pytest.raises(InvalidRequest, match=named):
            driver.ask(driver.transport(f"{wire}://127.0.0.1:1", tls=tls))
