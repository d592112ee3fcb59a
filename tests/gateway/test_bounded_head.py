"""A request's head over real sockets: the largest one that may be unfinished, and how long it may stay so."""

import asyncio
import socket
import threading
from contextlib import contextmanager, suppress

import pytest
import uvicorn

from deepseek_triton_tools.gateway import serving
from deepseek_triton_tools.gateway.serving import MOST_HEAD_BYTES, BoundedHeadProtocol
from support.waiting import PATIENCE_S, wait_for

BEGINNING = b"GET / HTTP/1.1\r\nHost: h\r\nX: "


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def server():
    config = uvicorn.Config(app, port=0, http=BoundedHeadProtocol, ws="none", lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    wait_for(lambda: server.started)
    yield server
    server.should_exit = True
    thread.join()


@contextmanager
def connected(server):
    port = server.servers[0].sockets[0].getsockname()[1]
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as connection:
        yield connection


def until_end(connection):
    answer = b""
    while piece := connection.recv(4096):
        answer += piece
    return answer


def test_a_head_of_the_most_bytes_may_be_unfinished_and_one_of_a_byte_more_is_refused(server):
    def seen():
        protocols = server.server_state.connections
        return [protocol._num_bytes for protocol in protocols if isinstance(protocol, BoundedHeadProtocol)]

    with connected(server) as connection:
        for _ in range(2):  # the second head is counted anew
            connection.sendall(BEGINNING)
            wait_for(lambda: seen() == [0])
            connection.sendall(b"a" * MOST_HEAD_BYTES)
            wait_for(lambda: seen() == [MOST_HEAD_BYTES])
            connection.sendall(b"\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 204 ")
        connection.sendall(BEGINNING)
        wait_for(lambda: seen() == [0])
        connection.sendall(b"a" * (MOST_HEAD_BYTES + 1))
        assert until_end(connection).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("trailers", [b"t: x\r\n" * 50_000, b"t: " + b"x" * 400_000], ids=["many", "one"])
def test_trailers_are_not_kept_and_end_at_the_same_number_of_bytes(server, trailers):
    head = b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connected(server) as connection:
        connection.sendall(head + b"1\r\nx\r\n0\r\nt: x\r\n\r\n")  # a few are allowed
        assert connection.recv(4096).startswith(b"HTTP/1.1 204 ")
        connection.sendall(head + b"1\r\nx\r\n0\r\n")
        wait_for(lambda: connection.recv(4096, socket.MSG_PEEK))
        [protocol] = server.server_state.connections
        assert isinstance(protocol, BoundedHeadProtocol)
        # The server has closed before all is sent, and may say so while it is still being sent.
        with suppress(ConnectionError):
            connection.sendall(trailers)
            until_end(connection)
    wait_for(lambda: not server.server_state.connections)
    assert protocol.headers == [(b"host", b"h"), (b"transfer-encoding", b"chunked")]


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"", BEGINNING, b"GET / HTTP/1.1\r\nHost: h\r\n\r\nGET "])
def test_a_head_that_never_ends_is_ended(sent, monkeypatch, server):
    monkeypatch.setattr(serving, "HEAD_S", 0.2)
    with connected(server) as connection:
        connection.sendall(sent)
        answer = until_end(connection)
    assert b"HTTP/1.1 408 " in answer
    assert answer.count(b"HTTP/1.1 204 ") == sent.count(b"\r\n\r\n")
