"""Trouble that a healthy server never makes: every kind of client raises an error of the package that names its
request.

The tests of the transports show how each kind of trouble looks on the wire; these show what a caller sees of it.
"""

import itertools
import json
import os
import socket
import threading
import traceback
from dataclasses import asdict, replace

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
from support.contract_metadata import METADATA
from support.grpc_server import GrpcServer, RawServer
from support.http_server import HttpServer

VERBS = ("generate", "stream", "chat", "stream_chat")
FIRST = {"text_output": "你🙂"}
LAST = {"text_output": "好", "finish_reason": "stop", "num_input_tokens": 3, "num_output_tokens": 2}
OVERLOADED = "[E_OVERLOADED] full: send it again later"
SECRET = "hf-very-secret"
ONCE = Retries(attempts=1)


def call(client, verb, **fields):
    if not verb.startswith("stream"):
        return getattr(client, verb)("hi", **fields)
    with getattr(client, verb)("hi", **fields) as stream:
        return stream.completion()


class OverHttp(HttpServer):
    """Answers questions for metadata by itself."""

    inputs = METADATA.inputs

    def respond(self, handler, body):
        if handler.command == "GET":
            document = asdict(replace(METADATA, name="tensorrt_llm", inputs=self.inputs))
            handler.send_whole(200, json.dumps(document).encode(), "application/json")
        else:
            super().respond(handler, body)

    def split(self):
        whole = b"".join(b"data: " + json.dumps(each, ensure_ascii=False).encode() + b"\n\n" for each in (FIRST, LAST))
        return self.pieces(*(whole[place : place + 1] for place in range(len(whole))))

    def says(self, message, *before):
        if before:
            return self.events(*before, {"error": message})
        return self.body(400, json.dumps({"error": message}).encode())

    def replies(self, *outputs):
        return self.events(*outputs)

    def hangs(self, *outputs):
        return self.endless(*outputs) if outputs else self.silence


class OverGrpc(GrpcServer):
    def split(self):
        return self.replies(FIRST, LAST)

    def says(self, message, *before):
        return self.responses(*(self.response(**each) for each in before), self.error(message))

    def replies(self, *outputs):
        return self.responses(*(self.response(**each, final="finish_reason" in each) for each in outputs))

    def hangs(self, *outputs):
        def answer(request, context):
            """Wait for the end of this call; the server's own `gone` may belong to one before it."""
            yield from (self.response(**each) for each in outputs)
            gone = threading.Event()
            assert not context.add_callback(gone.set) or gone.wait(30)

        return answer


@pytest.fixture
def scripted(client_kind):
    server = OverHttp() if client_kind.scheme == "http" else OverGrpc()
    yield server
    server.stop()


def check_own(error, url):
    """Check that the error is one of the package, names this request and server, and has its own or the server's
    words."""
    assert isinstance(error, DeepseekTritonError)
    assert type(error).__name__ in package.__all__
    assert (error.request_id, error.url) == ("job-1", url)
    assert error.message
    assert "\n" not in error.message
    assert SECRET not in "".join(traceback.format_exception(error))


@pytest.mark.parametrize("verb", VERBS)
def test_an_answer_whose_bytes_come_one_by_one(client_kind, scripted, verb):
    scripted.script(scripted.split())

    with client_kind.client(scripted.url) as client:
        completion = call(client, verb, request_id="job-1")

    assert (completion.text, completion.finish_reason) == ("你🙂好", "stop")
    assert (completion.num_input_tokens, completion.num_output_tokens) == (3, 2)
    assert (completion.request_id, completion.url) == ("job-1", scripted.url)


def reset_later(server):
    def answer(handler):
        handler.start_chunked()
        handler.send_chunk(b'data: {"text_output": "Hel"}\n\n')
        handler.wfile.flush()
        server.reset(handler)

    return answer


def status(code):
    return lambda server: server.body(code, b'{"error": "said by something in between"}')


def aborts(code):
    return lambda server: lambda request, context: context.abort(code, "said by something in between")


TROUBLES = {
    "a wrong value": (lambda s: s.says("[E_INVALID_ARGUMENT] top_p: no"), InvalidRequest, False),
    "full": (lambda s: s.says(OVERLOADED), Overloaded, True),
    "going": (lambda s: s.says("[E_UNAVAILABLE] stopping"), ServerUnavailable, True),
    "failed": (lambda s: s.says("[E_INTERNAL] a bug"), ServerError, False),
    "cancelled": (lambda s: s.says("[E_CANCELLED] gone"), Cancelled, False),
    "no such model": (lambda s: s.says("Request for unknown model: 'x' is not found"), ModelNotFound, False),
    "unloading": (lambda s: s.says("Request for unknown model: '' has no available versions"), ModelNotReady, True),
    "a code of the future": (lambda s: s.says("[E_NEW] what"), DeepseekTritonError, False),
    "failed later": (lambda s: s.says("[E_INTERNAL] a bug", FIRST), ServerError, False),
    "full later": (lambda s: s.says(OVERLOADED, FIRST), Overloaded, False),
    "going later": (lambda s: s.says("[E_UNAVAILABLE] stopping", FIRST), ServerUnavailable, False),
    "no end": (lambda s: s.replies(FIRST), ProtocolError, False),
    "no answer": (lambda s: s.replies(), ProtocolError, False),
}
"""(what the server does, what is raised, whether it is sent again)"""
OF_PROTOCOL = {
    "http": {
        "302": (status(302), ProtocolError, False),
        "401": (status(401), AccessDenied, False),
        "429": (status(429), Overloaded, True),
        "503": (status(503), ServerUnavailable, True),
        "a page": (lambda s: s.body(200, b"<html>hello</html>", "text/html"), ProtocolError, False),
        "a list": (lambda s: s.pieces(b"data: [1]\n\n"), ProtocolError, False),
        "no UTF-8": (lambda s: s.pieces(b"data: \xff\xfe\n\n"), ProtocolError, False),
        "half an event": (lambda s: s.pieces(b'data: {"text_output": "Hel"}\n\n', b"data: {"), ProtocolError, False),
        "a reset in the middle": (reset_later, ServerUnavailable, False),
        "no HTTP": (lambda s: s.raw(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"), ProtocolError, False),
        "hung up": (lambda s: s.raw(), ServerUnavailable, False),
    },
    "grpc": {
        "unauthenticated": (aborts(grpc.StatusCode.UNAUTHENTICATED), AccessDenied, False),
        "exhausted": (aborts(grpc.StatusCode.RESOURCE_EXHAUSTED), Overloaded, True),
        "unimplemented": (aborts(grpc.StatusCode.UNIMPLEMENTED), ProtocolError, False),
    },
}


@pytest.mark.slow
def test_trouble_is_one_of_our_errors_and_the_next_request_goes_well(client_kind, scripted, subtests):
    """Each of the troubles with one of the verbs."""
    troubles = TROUBLES | OF_PROTOCOL[client_kind.scheme]
    for (name, (make, kind, again)), verb in zip(troubles.items(), itertools.cycle(VERBS), strict=False):
        with subtests.test(name, verb=verb), client_kind.client(scripted.url, token=SECRET, retries=ONCE) as client:
            scripted.script(make(scripted))
            with pytest.raises(kind) as caught:
                call(client, verb, request_id="job-1")
            scripted.script(scripted.replies(FIRST, LAST))
            assert call(client, verb).text == "你🙂好"
            check_own(caught.value, scripted.url)
            assert caught.value.unprocessed is again
            assert kind is DeepseekTritonError or type(caught.value) is kind


@pytest.mark.parametrize("verb", VERBS)
def test_only_what_surely_generated_nothing_is_sent_again(client_kind, scripted, verb):
    scripted.script(scripted.says(OVERLOADED), scripted.replies(FIRST, LAST), scripted.says(OVERLOADED, FIRST))

    with client_kind.client(scripted.url, retries=Retries(attempts=2, initial_s=0.001)) as client:
        assert call(client, verb).text == "你🙂好"
        with pytest.raises(Overloaded):
            call(client, verb)

    assert len(scripted.requests) == 3


@pytest.mark.parametrize("verb", ["stream", "stream_chat"])
def test_what_came_before_the_trouble_is_kept(client_kind, scripted, verb):
    scripted.script(scripted.says("[E_INTERNAL] a bug", FIRST))

    with client_kind.client(scripted.url) as client, getattr(client, verb)("hi", request_id="job-1") as stream:
        assert next(stream).text == "你🙂"
        with pytest.raises(ServerError):
            next(stream)
        assert (stream.text, stream.request_id, stream.url) == ("你🙂", "job-1", scripted.url)
        with pytest.raises(DeepseekTritonError):
            stream.completion()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "limit", "before"),
    [
        ("generate", "total", ()),
        ("stream_chat", "total", (FIRST,)),
        ("stream", "first_token", ()),
        ("stream", "between_tokens", (FIRST,)),
    ],
)
def test_a_server_that_says_nothing(client_kind, scripted, verb, limit, before):
    scripted.script(scripted.hangs(*before))

    limits = Timeouts(**{limit: 0.3})  # enough to send it on a busy machine
    with client_kind.client(scripted.url, timeouts=limits) as client, pytest.raises(DeadlineExceeded) as caught:
        call(client, verb, request_id="job-1")

    check_own(caught.value, scripted.url)
    assert caught.value.message == f"timeouts.{limit} of 0.3 s ran out"
    assert scripted.gone.wait(30)


def test_nobody_listens(client_kind):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"{client_kind.scheme}://127.0.0.1:{probe.getsockname()[1]}"
    with client_kind.client(url, retries=Retries(attempts=2, initial_s=0.001)) as client:
        for verb in VERBS:
            with pytest.raises(ServerUnavailable) as caught:
                call(client, verb, request_id="job-1")
            check_own(caught.value, url)
            assert caught.value.unprocessed is True
        for ask in (client.metadata, lambda: client.cancel("job-1")):
            with pytest.raises(ServerUnavailable) as other:
                ask()
            assert other.value.url == url
        assert client.ready() is False


def test_the_token_goes_along_and_shows_nowhere(client_kind, scripted, caplog):
    scripted.script(scripted.replies(FIRST, LAST))
    with caplog.at_level(0), client_kind.client(scripted.url, token=SECRET) as client:
        call(client, "generate")
        assert SECRET not in repr(client)

    sent = scripted.headers if client_kind.scheme == "http" else scripted.metadata
    assert {headers.get("authorization") for headers in sent} == {f"Bearer {SECRET}"}
    assert SECRET not in caplog.text


def test_failover_between_servers_that_misbehave(client_kind, scripted):
    """A list with a dead server, a full one and a good one: the good one answers, and nothing is generated twice."""
    other = type(scripted)()
    try:
        scripted.script(scripted.says(OVERLOADED))
        other.script(other.replies(FIRST, LAST))
        urls = [f"{client_kind.scheme}://127.0.0.1:1", scripted.url, other.url]
        with client_kind.client(urls, retries=ONCE) as client:
            completion = client.generate("hi")
        assert (completion.text, completion.url) == ("你🙂好", other.url)
        assert (len(scripted.requests), len(other.requests)) == (1, 1)
    finally:
        other.stop()


@pytest.mark.slow
def test_trouble_leaves_nothing_behind(client_kind, scripted):
    """No thread is left, and over HTTP no descriptor; gRPC keeps some descriptors for all channels."""
    threads, descriptors = _threads(), _descriptors()
    for _ in range(3):
        with client_kind.client(scripted.url, retries=ONCE) as client:
            for name in ("failed", "full later", "no end", "no answer"):
                make, kind, _again = TROUBLES[name]
                scripted.script(make(scripted))
                with pytest.raises(kind):
                    call(client, "stream")
            scripted.gone.clear()
            scripted.script(scripted.hangs(FIRST))
            with pytest.raises(DeadlineExceeded):
                call(client, "generate", timeouts=Timeouts(total=0.05))

    assert _threads() - threads == set()
    if client_kind.scheme == "http":
        scripted.stop()
        assert _descriptors() <= descriptors


def _threads():
    own = ("deepseek-triton", "watchdog")
    return {thread.name for thread in threading.enumerate() if thread.name.startswith(own)}


def _descriptors():
    return len(os.listdir("/proc/self/fd"))


over_http = pytest.mark.parametrize("client_kind", [("http", "sync"), ("http", "async")], ids=" ".join, indirect=True)
over_grpc = pytest.mark.parametrize("client_kind", [("grpc", "sync"), ("grpc", "async")], ids=" ".join, indirect=True)


@over_http
@pytest.mark.parametrize("verb", ["generate", "stream"])
def test_a_connection_whose_answer_lost_its_end_serves_no_other(client_kind, scripted, verb):
    scripted.script(scripted.replies(FIRST))

    with client_kind.client(scripted.url, retries=ONCE) as client:
        with pytest.raises(ProtocolError, match="grpc://"):
            call(client, verb)
        scripted.await_closed(1)
        scripted.script(*[scripted.replies(FIRST, LAST)] * 2)
        assert [call(client, verb).text for _ in range(2)] == ["你🙂好"] * 2

    assert scripted.num_connections == 2


@over_grpc
def test_what_is_no_grpc(client_kind):
    def behave(connection):
        connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
        connection.recv(65536)
        connection.close()

    with RawServer(behave) as server:
        url = f"grpc://127.0.0.1:{server.port}"
        limits = Timeouts(connect=0.5)
        with client_kind.client(url, retries=ONCE, timeouts=limits) as client:
            with pytest.raises(DeepseekTritonError) as caught:
                call(client, "generate", request_id="job-1")
            check_own(caught.value, url)


def test_a_model_that_takes_no_text(client_kind, scripted):
    image = {"name": "image", "datatype": "FP32", "shape": [3, 8, 8]}
    if client_kind.scheme == "http":
        scripted.inputs = (package.TensorMetadata(**image),)
    else:
        del scripted.model.inputs[:]
        scripted.model.inputs.add(**image)
    with client_kind.client(scripted.url) as client, pytest.raises(ProtocolError) as caught:
        call(client, "generate", request_id="job-1")

    check_own(caught.value, scripted.url)
    assert scripted.requests == []
