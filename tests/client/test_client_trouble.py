"""Trouble that a healthy server never makes: every kind of client raises an error of the package that names its
request.

The tests of the transports show how each kind of trouble looks on the wire; these show what a caller sees of it.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import grpc
import pytest

import deepseek_triton_client as package
from deepseek_triton_client import (
    AccessDenied,
    Cancelled,
    DeadlineExceeded,
    DeepseekTritonError,
    InvalidRequest,
    ModelNotFound,
    ModelNotReady,
    Overloaded,
    ProtocolError,
    Retries,
    ServerError,
    ServerUnavailable,
    Timeouts,
)
from support.client_kinds import ClientKind
from support.contract_metadata import METADATA
from support.grpc_server import GrpcServer, Proxy, RawServer
from support.http_server import HttpServer

VERBS = ("generate", "stream", "chat", "stream_chat")
FIRST = {"text_output": "你🙂"}
LAST = {"text_output": "好", "finish_reason": "stop", "num_input_tokens": 3, "num_output_tokens": 2}
OVERLOADED = "[E_OVERLOADED] full: send it again later"
SECRET = "hf-very-secret"

Make = Callable[[Any], Any]


def call(client: Any, verb: str, **fields: Any) -> Any:
    if not verb.startswith("stream"):
        return getattr(client, verb)("hi", **fields)
    with getattr(client, verb)("hi", **fields) as stream:
        return stream.completion()


class OverHttp:
    """One script per request; metadata is answered by itself."""

    def __init__(self) -> None:
        self.server = HttpServer()
        self.url = self.server.url
        self.close = self.server.stop
        metadata = {**asdict(METADATA), "name": "tensorrt_llm"}
        self._metadata = self.server.body(200, json.dumps(metadata).encode())
        self._knows = False

    def answers(self, *scripts: Any) -> None:
        if not self._knows:
            self._knows = True
            self.server.script(self._metadata)
        self.server.script(*scripts)

    def forgotten(self) -> None:
        """The client asks for the metadata again, as it does after a server was away."""
        self._knows = False

    @property
    def num_asked(self) -> int:
        return sum(method == "POST" for method, _, _ in self.server.requests)

    def good(self) -> Any:
        return self.server.events(FIRST, LAST)

    def split(self) -> Any:
        whole = b"".join(b"data: " + json.dumps(each, ensure_ascii=False).encode() + b"\n\n" for each in (FIRST, LAST))
        return self.server.pieces(*(whole[place : place + 1] for place in range(len(whole))))

    def says(self, message: str) -> Any:
        return self.server.body(400, json.dumps({"error": message}).encode())

    def says_later(self, message: str) -> Any:
        return self.server.events(FIRST, {"error": message})

    def without_end(self) -> Any:
        return self.server.events(FIRST)

    def empty(self) -> Any:
        return self.server.events()

    def silent(self) -> Any:
        return self.server.silence

    def silent_later(self) -> Any:
        return self.server.endless(FIRST)


class OverGrpc:
    """One script per request; metadata is answered by itself."""

    def __init__(self) -> None:
        self.server = GrpcServer()
        self.url = self.server.url
        self.close = self.server.stop

    def answers(self, *scripts: Any) -> None:
        self.server.script(*scripts)

    def forgotten(self) -> None:
        """Metadata is answered whenever it is asked for."""

    @property
    def num_asked(self) -> int:
        return len(self.server.requests)

    def _response(self, outputs: dict[str, Any], **kwargs: Any) -> Any:
        return self.server.response(**outputs, **kwargs)

    def good(self) -> Any:
        return self.server.responses(self._response(FIRST), self._response(LAST, final=True))

    split = good

    def says(self, message: str) -> Any:
        return self.server.responses(self.server.error(message))

    def says_later(self, message: str) -> Any:
        return self.server.responses(self._response(FIRST), self.server.error(message))

    def without_end(self) -> Any:
        return self.server.responses(self._response(FIRST))

    def empty(self) -> Any:
        return self.server.responses()

    def silent(self) -> Any:
        return self._silence()

    def silent_later(self) -> Any:
        return self._silence(self._response(FIRST))

    @staticmethod
    def _silence(*responses: Any) -> Any:
        """The server's own `gone` may belong to a request before this one."""

        def answer(request: Any, context: Any) -> Iterator[Any]:
            yield from responses
            gone = threading.Event()
            assert not context.add_callback(gone.set) or gone.wait(30)

        return answer


@pytest.fixture
def scripted(client_kind: ClientKind) -> Iterator[Any]:
    server = OverHttp() if client_kind.scheme == "http" else OverGrpc()
    yield server
    server.close()


def check_own(error: BaseException, url: str) -> None:
    """Check that the error is one of the package, names this request and server, and has its own or the server's
    words."""
    assert isinstance(error, DeepseekTritonError)
    assert type(error).__name__ in package.__all__
    assert (error.request_id, error.url) == ("job-1", url)
    assert error.message
    assert "\n" not in error.message
    assert SECRET not in "".join(traceback.format_exception(error))


# --- The same trouble over both ---


@pytest.mark.parametrize("verb", VERBS)
def test_an_answer_whose_bytes_come_one_by_one(client_kind: ClientKind, scripted: Any, verb: str) -> None:
    scripted.answers(scripted.split())

    with client_kind.client(scripted.url) as client:
        completion = call(client, verb, request_id="job-1")

    assert (completion.text, completion.finish_reason) == ("你🙂好", "stop")
    assert (completion.num_input_tokens, completion.num_output_tokens) == (3, 2)
    assert (completion.request_id, completion.url) == ("job-1", scripted.url)


TROUBLES: dict[str, tuple[Make, type[DeepseekTritonError], bool]] = {
    "a wrong value": (lambda s: s.says("[E_INVALID_ARGUMENT] top_p: no"), InvalidRequest, False),
    "full": (lambda s: s.says(OVERLOADED), Overloaded, True),
    "going": (lambda s: s.says("[E_UNAVAILABLE] stopping"), ServerUnavailable, True),
    "failed": (lambda s: s.says("[E_INTERNAL] a bug"), ServerError, False),
    "cancelled": (lambda s: s.says("[E_CANCELLED] gone"), Cancelled, False),
    "no such model": (lambda s: s.says("Request for unknown model: 'x' is not found"), ModelNotFound, False),
    "unloading": (lambda s: s.says("Request for unknown model: '' has no available versions"), ModelNotReady, True),
    "a code of the future": (lambda s: s.says("[E_NEW] what"), DeepseekTritonError, False),
    "failed later": (lambda s: s.says_later("[E_INTERNAL] a bug"), ServerError, False),
    "full later": (lambda s: s.says_later(OVERLOADED), Overloaded, False),
    "going later": (lambda s: s.says_later("[E_UNAVAILABLE] stopping"), ServerUnavailable, False),
    "no end": (lambda s: s.without_end(), ProtocolError, False),
    "no answer": (lambda s: s.empty(), ProtocolError, False),
}
"""(what the server does, what is raised, whether it is sent again)"""


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", TROUBLES)
def test_trouble_is_one_of_our_errors_and_the_next_request_goes_well(
    client_kind: ClientKind, scripted: Any, name: str, verb: str
) -> None:
    make, kind, again = TROUBLES[name]
    scripted.answers(make(scripted))

    with client_kind.client(scripted.url, token=SECRET, retries=Retries(attempts=1)) as client:
        with pytest.raises(kind) as caught:
            call(client, verb, request_id="job-1")
        if issubclass(kind, ServerUnavailable):
            scripted.forgotten()
        scripted.answers(scripted.good())
        assert call(client, verb).text == "你🙂好"

    check_own(caught.value, scripted.url)
    assert caught.value.unprocessed is again
    assert kind is DeepseekTritonError or type(caught.value) is kind


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", TROUBLES)
def test_only_what_surely_generated_nothing_is_sent_again(
    client_kind: ClientKind, scripted: Any, name: str, verb: str
) -> None:
    make, kind, again = TROUBLES[name]
    scripted.answers(make(scripted))
    if issubclass(kind, ServerUnavailable) and again:
        scripted.forgotten()
    if again:
        scripted.answers(scripted.good())

    with client_kind.client(scripted.url, retries=Retries(attempts=2, initial_s=0.001)) as client:
        if again:
            assert call(client, verb).text == "你🙂好"
        else:
            with pytest.raises(kind):
                call(client, verb)

    assert scripted.num_asked == (2 if again else 1)


@pytest.mark.parametrize("verb", ["stream", "stream_chat"])
def test_what_came_before_the_trouble_is_kept(client_kind: ClientKind, scripted: Any, verb: str) -> None:
    scripted.answers(scripted.says_later("[E_INTERNAL] a bug"))

    with client_kind.client(scripted.url) as client, getattr(client, verb)("hi", request_id="job-1") as stream:
        assert next(stream).text == "你🙂"
        with pytest.raises(ServerError):
            next(stream)
        assert (stream.text, stream.request_id, stream.url) == ("你🙂", "job-1", scripted.url)
        with pytest.raises(DeepseekTritonError):
            stream.completion()


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("later", [False, True], ids=["at first", "later"])
def test_a_server_that_says_nothing(client_kind: ClientKind, scripted: Any, verb: str, later: bool) -> None:
    scripted.answers(scripted.silent_later() if later else scripted.silent())

    with client_kind.client(scripted.url) as client, pytest.raises(DeadlineExceeded) as caught:
        call(client, verb, request_id="job-1", timeouts=Timeouts(total=0.5))  # enough to send it on a busy machine

    check_own(caught.value, scripted.url)
    assert scripted.server.gone.wait(30)


@pytest.mark.parametrize("verb", ["stream", "stream_chat"])
@pytest.mark.parametrize(("limit", "later"), [("first_token", False), ("between_tokens", True)])
def test_the_limits_of_a_stream(client_kind: ClientKind, scripted: Any, verb: str, limit: str, later: bool) -> None:
    scripted.answers(scripted.silent_later() if later else scripted.silent())

    limits = Timeouts(**{limit: 0.1})
    with client_kind.client(scripted.url, timeouts=limits) as client, pytest.raises(DeadlineExceeded) as caught:
        call(client, verb, request_id="job-1")

    check_own(caught.value, scripted.url)
    assert caught.value.message == f"timeouts.{limit} of 0.1 s ran out"


@pytest.mark.parametrize("verb", VERBS)
def test_nobody_listens(client_kind: ClientKind, verb: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"{client_kind.scheme}://127.0.0.1:{probe.getsockname()[1]}"
    with client_kind.client(url, retries=Retries(attempts=2, initial_s=0.001)) as client:
        with pytest.raises(ServerUnavailable) as caught:
            call(client, verb, request_id="job-1")
        for ask in (client.metadata, lambda: client.cancel("job-1")):
            with pytest.raises(ServerUnavailable) as other:
                ask()
            assert other.value.url == url
        assert client.ready() is False

    check_own(caught.value, url)
    assert caught.value.unprocessed is True


def test_the_token_goes_along_and_shows_nowhere(client_kind: ClientKind, scripted: Any, caplog: Any) -> None:
    scripted.answers(scripted.good())
    with caplog.at_level(0), client_kind.client(scripted.url, token=SECRET) as client:
        call(client, "generate")
        assert SECRET not in repr(client)

    sent = scripted.server.headers if client_kind.scheme == "http" else scripted.server.metadata
    assert {headers.get("authorization") for headers in sent} == {f"Bearer {SECRET}"}
    assert SECRET not in caplog.text


def test_failover_between_servers_that_misbehave(client_kind: ClientKind, scripted: Any) -> None:
    """A list with a dead server, a full one and a good one: the good one answers, and nothing is generated twice."""
    other = type(scripted)()
    try:
        scripted.answers(scripted.says(OVERLOADED))
        other.answers(other.good())
        urls = [f"{client_kind.scheme}://127.0.0.1:1", scripted.url, other.url]
        with client_kind.client(urls, retries=Retries(attempts=1)) as client:
            completion = client.generate("hi")
        assert (completion.text, completion.url) == ("你🙂好", other.url)
        assert (scripted.num_asked, other.num_asked) == (1, 1)
    finally:
        other.close()


@pytest.mark.slow
def test_trouble_leaves_nothing_behind(client_kind: ClientKind, scripted: Any) -> None:
    """No thread is left, and over HTTP no descriptor; gRPC keeps some descriptors for all channels."""
    threads, descriptors = _threads(), _descriptors()
    for _ in range(3):
        with client_kind.client(scripted.url, retries=Retries(attempts=1)) as client:
            for name in ("failed", "full later", "no end", "no answer"):
                make, kind, _again = TROUBLES[name]
                scripted.answers(make(scripted))
                with pytest.raises(kind):
                    call(client, "stream")
            scripted.server.gone.clear()
            scripted.answers(scripted.silent_later())
            with pytest.raises(DeadlineExceeded):
                call(client, "generate", timeouts=Timeouts(total=0.05))
        scripted.forgotten()

    assert _threads() - threads == set()
    if client_kind.scheme == "http":
        scripted.close()
        assert _descriptors() <= descriptors


def _threads() -> set[str]:
    own = ("deepseek-triton", "watchdog")
    return {thread.name for thread in threading.enumerate() if thread.name.startswith(own)}


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- Troubles of one protocol alone ---

over_http = pytest.mark.parametrize("client_kind", [("http", "sync"), ("http", "async")], ids=" ".join, indirect=True)
over_grpc = pytest.mark.parametrize("client_kind", [("grpc", "sync"), ("grpc", "async")], ids=" ".join, indirect=True)


def status(code: int) -> Make:
    return lambda server: server.body(code, b'{"error": "said by something in between"}')


def half_an_event(server: Any) -> Any:
    return server.pieces(b'data: {"text_output": "Hel"}\n\n', b'data: {"text_out')


def reset_later(server: Any) -> Any:
    def answer(handler: Any) -> None:
        handler.start_chunked()
        handler.send_chunk(b'data: {"text_output": "Hel"}\n\n')
        handler.wfile.flush()
        server.reset(handler)

    return answer


HTTP_TROUBLES: dict[str, tuple[Make, type[DeepseekTritonError], bool]] = {
    "302": (status(302), ProtocolError, False),
    "400": (status(400), InvalidRequest, False),
    "401": (status(401), AccessDenied, False),
    "403": (status(403), AccessDenied, False),
    "404": (status(404), DeepseekTritonError, False),
    "418": (status(418), DeepseekTritonError, False),
    "429": (status(429), Overloaded, True),
    "500": (status(500), ServerError, False),
    "502": (status(502), ServerUnavailable, False),
    "503": (status(503), ServerUnavailable, True),
    "504": (status(504), DeepseekTritonError, False),
    "a page": (lambda server: server.body(200, b"<html>hello</html>", "text/html"), ProtocolError, False),
    "no JSON": (lambda server: server.pieces(b"data: garbage\n\n"), ProtocolError, False),
    "a list": (lambda server: server.pieces(b"data: [1]\n\n"), ProtocolError, False),
    "a number for a text": (lambda server: server.events({"text_output": 7}), ProtocolError, False),
    "no UTF-8": (lambda server: server.pieces(b"data: \xff\xfe\n\n"), ProtocolError, False),
    "half an event": (half_an_event, DeepseekTritonError, False),
    "a reset in the middle": (reset_later, ServerUnavailable, False),
    "no HTTP": (lambda server: server.raw(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"), ProtocolError, False),
    "half a header": (lambda server: server.raw(b"HTTP/1.1 200 OK\r\nContent-"), DeepseekTritonError, False),
    "hung up": (lambda server: server.raw(), ServerUnavailable, False),
}


@over_http
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", HTTP_TROUBLES)
def test_trouble_over_http(client_kind: ClientKind, scripted: Any, name: str, verb: str) -> None:
    make, kind, again = HTTP_TROUBLES[name]
    scripted.answers(make(scripted.server))

    with client_kind.client(scripted.url, token=SECRET, retries=Retries(attempts=1)) as client:
        with pytest.raises(kind) as caught:
            call(client, verb, request_id="job-1")
        if isinstance(caught.value, ServerUnavailable):
            scripted.forgotten()
        scripted.answers(scripted.good())
        assert call(client, verb).text == "你🙂好"

    check_own(caught.value, scripted.url)
    assert caught.value.unprocessed is again
    assert kind is DeepseekTritonError or type(caught.value) is kind


@over_http
@pytest.mark.parametrize("verb", VERBS)
def test_a_connection_whose_answer_lost_its_end_serves_no_other(
    client_kind: ClientKind, scripted: Any, verb: str
) -> None:
    scripted.answers(scripted.without_end())

    with client_kind.client(scripted.url, retries=Retries(attempts=1)) as client:
        with pytest.raises(ProtocolError, match="grpc://"):
            call(client, verb)
        scripted.server.await_closed(1)
        scripted.answers(scripted.good(), scripted.good())
        assert [call(client, verb).text for _ in range(2)] == ["你🙂好"] * 2

    assert scripted.server.num_connections == 2


STATUSES = {
    "UNAUTHENTICATED": AccessDenied,
    "PERMISSION_DENIED": AccessDenied,
    "RESOURCE_EXHAUSTED": Overloaded,
    "UNAVAILABLE": ServerUnavailable,
    "INTERNAL": ServerError,
    "INVALID_ARGUMENT": InvalidRequest,
    "CANCELLED": Cancelled,
    "UNIMPLEMENTED": ProtocolError,
}


@over_grpc
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", [code.name for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_every_status_of_grpc(client_kind: ClientKind, scripted: Any, name: str, verb: str) -> None:
    def abort(request: Any, context: Any) -> Any:
        context.abort(grpc.StatusCode[name], "said by something in between")

    scripted.answers(abort)
    with client_kind.client(scripted.url, token=SECRET, retries=Retries(attempts=1)) as client:
        with pytest.raises(STATUSES.get(name, DeepseekTritonError)) as caught:
            call(client, verb, request_id="job-1")
        scripted.answers(scripted.good())
        assert call(client, verb).text == "你🙂好"

    check_own(caught.value, scripted.url)
    if name == "RESOURCE_EXHAUSTED":
        assert caught.value.unprocessed is True


@over_grpc
@pytest.mark.parametrize("verb", VERBS)
def test_a_connection_that_is_cut_in_the_middle(client_kind: ClientKind, scripted: Any, verb: str) -> None:
    with Proxy(scripted.server.port) as proxy:

        def answer(request: Any, context: Any) -> Iterator[Any]:
            yield scripted.server.response(text_output="Hel")
            proxy.cut()
            assert scripted.server.gone.wait(30)

        scripted.answers(answer)
        url = f"grpc://127.0.0.1:{proxy.port}"
        with client_kind.client(url) as client, pytest.raises(ServerUnavailable) as caught:
            call(client, verb, request_id="job-1")

    check_own(caught.value, url)
    assert caught.value.unprocessed is False


@over_grpc
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n", b"\0" * 64])
def test_what_is_no_grpc(client_kind: ClientKind, verb: str, greeting: bytes) -> None:
    def behave(connection: socket.socket) -> None:
        connection.sendall(greeting)
        connection.recv(65536)
        connection.close()

    with RawServer(behave) as server:
        url = f"grpc://127.0.0.1:{server.port}"
        limits = Timeouts(connect=0.5)
        with (
            client_kind.client(url, retries=Retries(attempts=1), timeouts=limits) as client,
            pytest.raises(DeepseekTritonError) as caught,
        ):
            call(client, verb, request_id="job-1")

    check_own(caught.value, url)


# --- Metadata ---


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("inputs", [[], [{"name": "image", "datatype": "FP32", "shape": [3, 8, 8]}]], ids=len)
def test_a_model_that_takes_no_text(client_kind: ClientKind, scripted: Any, verb: str, inputs: list[Any]) -> None:
    document = {"name": "tensorrt_llm", "versions": ["1"], "platform": "x", "inputs": inputs, "outputs": []}
    if client_kind.scheme == "http":
        scripted.forgotten = None
        scripted.server.script(scripted.server.body(200, json.dumps(document).encode()))
    else:
        model = scripted.server.model
        del model.inputs[:]
        for each in inputs:
            model.inputs.add(**each)
    with client_kind.client(scripted.url) as client, pytest.raises(ProtocolError) as caught:
        call(client, verb, request_id="job-1")

    check_own(caught.value, scripted.url)
    assert scripted.num_asked == 0
