"""Trouble that a healthy server never makes: every kind of client raises an error of the package that names its
request, and serves the next request well.

The tests of the transports show how each kind of trouble looks on the wire; these show what a caller sees of it.
"""

import itertools
import json
import os
import threading
import traceback
from dataclasses import asdict, replace

import pytest

import deepseek_triton_client as package
from deepseek_triton_client import DeepseekTritonError, Overloaded, ProtocolError, Retries, ServerUnavailable
from support.client_kinds import call
from support.contract_metadata import METADATA
from support.grpc_server import GrpcServer
from support.http_server import HttpServer

VERBS = ("generate", "stream", "chat", "stream_chat")
FIRST = {"text_output": "你🙂"}
LAST = {"text_output": "好", "finish_reason": "stop", "num_input_tokens": 3, "num_output_tokens": 2}
OVERLOADED = "[E_OVERLOADED] full: send it again later"
SECRET = "hf-very-secret"
ONCE = Retries(attempts=1)


class OverHttp(HttpServer):
    """Answers questions for metadata by itself."""

    def respond(self, handler, body):
        if handler.command == "GET":
            document = asdict(replace(METADATA, name="tensorrt_llm"))
            handler.send_whole(200, json.dumps(document).encode(), "application/json")
        else:
            super().respond(handler, body)


@pytest.fixture
def scripted(client_kind):
    server = OverHttp() if client_kind.scheme == "http" else GrpcServer()
    yield server
    server.stop()


def check_own(error, url):
    """Check that the error is one of the package, names this request and server, and has its own or the server's
    words."""
    assert type(error).__name__ in package.__all__
    assert (error.request_id, error.url) == ("job-1", url)
    assert error.message
    assert "\n" not in error.message
    assert SECRET not in "".join(traceback.format_exception(error))


TROUBLES = {
    "full": (lambda s: s.says(OVERLOADED), Overloaded, True),
    "full later": (lambda s: s.says(OVERLOADED, FIRST), Overloaded, False),
    "no end": (lambda s: s.replies(FIRST), ProtocolError, False),
    "no answer": (lambda s: s.replies(), ProtocolError, False),
}
"""(what the server does, what is raised, whether it is sent again)"""


@pytest.mark.slow
def test_trouble_is_one_of_our_errors_and_leaves_nothing_behind(client_kind, scripted, subtests):
    """Each of the troubles with one of the verbs. No thread is left, and over HTTP no descriptor; gRPC keeps some
    descriptors for all channels."""
    threads, descriptors = _threads(), _descriptors()
    for (name, (make, kind, again)), verb in zip(TROUBLES.items(), itertools.cycle(VERBS), strict=False):
        with subtests.test(name, verb=verb), client_kind.client(scripted.url, token=SECRET, retries=ONCE) as client:
            scripted.script(make(scripted))
            with pytest.raises(kind) as caught:
                call(client, verb, request_id="job-1")
            scripted.script(scripted.replies(FIRST, LAST))
            completion = call(client, verb, request_id="job-2")
            assert (completion.text, completion.finish_reason) == ("你🙂好", "stop")
            assert (completion.num_input_tokens, completion.num_output_tokens) == (3, 2)
            assert (completion.request_id, completion.url) == ("job-2", scripted.url)
            check_own(caught.value, scripted.url)
            assert caught.value.unprocessed is again
            assert type(caught.value) is kind
    assert _threads() - threads == set()
    if client_kind.scheme == "http":
        scripted.stop()
        assert _descriptors() <= descriptors


def _threads():
    own = ("deepseek-triton", "watchdog")
    return {thread.name for thread in threading.enumerate() if thread.name.startswith(own)}


def _descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_what_came_before_the_trouble_is_kept_and_only_what_generated_nothing_is_sent_again(client_kind, scripted):
    scripted.script(scripted.says(OVERLOADED), scripted.says("[E_UNAVAILABLE] stopping", FIRST))
    again = Retries(attempts=2, initial_s=0.001)
    with client_kind.client(scripted.url, retries=again) as client, client.stream("hi", request_id="job-1") as stream:
        assert next(stream).text == "你🙂"
        with pytest.raises(ServerUnavailable):
            next(stream)
        assert (stream.text, stream.request_id, stream.url) == ("你🙂", "job-1", scripted.url)
        with pytest.raises(DeepseekTritonError):
            stream.completion()
    assert len(scripted.requests) == 2
    if client_kind.scheme == "http":  # a server of others may write on behind the end
        scripted.script(scripted.replies(FIRST, {"text_output": "好", "finish_reason": "stop"}, {"text_output": "!"}))
        with client_kind.client(scripted.url) as client, client.stream("hi") as stream:
            assert "".join(each.text for each in stream) == stream.text == "你🙂好!"


def test_nobody_listens(client_kind):
    url = f"{client_kind.scheme}://127.0.0.1:1"
    with client_kind.client(url, retries=Retries(attempts=2, initial_s=0.001)) as client:
        for verb in VERBS[:2]:
            with pytest.raises(ServerUnavailable) as caught:
                call(client, verb, request_id="job-1")
            check_own(caught.value, url)
            assert caught.value.unprocessed is True
        for ask in (client.metadata, lambda: client.cancel("job-1")):
            with pytest.raises(ServerUnavailable) as other:
                ask()
            assert other.value.url == url
        assert client.ready() is False


@pytest.mark.parametrize("client_kind", [("http", "sync"), ("http", "async")], ids=" ".join, indirect=True)
def test_a_connection_whose_answer_lost_its_end_serves_no_other(client_kind, scripted):
    scripted.script(scripted.replies(FIRST))

    with client_kind.client(scripted.url, retries=ONCE) as client:
        with pytest.raises(ProtocolError, match="grpc://"):
            call(client, "generate")
        scripted.await_closed(1)
        scripted.script(*[scripted.replies(FIRST, LAST)] * 2)
        assert [call(client, "stream").text for _ in range(2)] == ["你🙂好"] * 2

    assert scripted.num_connections == 2
