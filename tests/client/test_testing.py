"""The fake server that users test their programs with, asked by both clients over HTTP."""

import json
import threading
import urllib.error
import urllib.request

import pytest

from deepseek_triton_client import (
    AccessDenied,
    Cancelled,
    Client,
    DeadlineExceeded,
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
from deepseek_triton_client.testing import FakeServer, Pause
from support.client_kinds import STYLES, ClientKind
from support.contract_metadata import METADATA
from support.waiting import PATIENCE_S, wait_for

ONCE = Retries(attempts=1)


@pytest.fixture
def server():
    with FakeServer() as server:
        yield server


@pytest.fixture(params=STYLES)
def client_kind(request, client_loop):
    return ClientKind("http", request.param, client_loop)


@pytest.fixture
def client(client_kind, server):
    with client_kind.client(server.url, retries=ONCE) as client:
        yield client


def test_without_an_answer_it_repeats_the_prompt_or_the_last_message(client):
    completion = client.generate("Why is the sky blue?")
    assert (completion.text, completion.finish_reason) == ("Why is the sky blue?", "stop")
    assert (completion.num_input_tokens, completion.num_output_tokens) == (5, 1)
    assert client.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}]).text == "Hi."
    assert client.generate([7]).text == "(7,)"


def test_tasks_are_scripted_by_their_outputs(client, server):
    ended = {"text_output": "", "finish_reason": "stop"}
    server.script({**ended, "output_ids": [5, 7]}, {**ended, "text_output": "Hi"}, {**ended, "model_info": '{"a": 1}'})

    assert client.tokenize([{"role": "user", "content": "Hi"}], tools=[{"type": "function"}]) == (5, 7)
    assert client.detokenize([5, 7]) == "Hi"
    assert client.model_info() == {"a": 1}
    assert [request.body["task"] for request in server.requests] == ["tokenize", "detokenize", "describe"]
    assert json.loads(server.requests[0].body["tools"]) == [{"type": "function"}]
    with pytest.raises(InvalidRequest, match=r"^token_ids: expected a list of token ids, got a text"):
        client.detokenize("Hi")
    server.script("a text")  # is left for who asks for one
    assert (client.tokenize("hello world"), client.detokenize([5, 7])) == ((0, 1), "5 7")
    assert (client.model_info()["name"], client.generate("x").text) == ("tensorrt_llm", "a text")


def test_each_text_is_a_chunk(server, client):
    """All answers of a request for several are the same."""
    server.script(["A short", Pause(0.01), " story."], ["a", "b"])
    with client.stream("Tell me a story.") as stream:
        assert [chunk.text for chunk in stream] == ["A short", " story.", ""]
    assert stream.completion().num_output_tokens == 2
    answers = client.generate("x", n=2).answers
    assert [(answer.text, answer.finish_reason) for answer in answers] == [("ab", "stop")] * 2


def test_a_mapping_is_a_response_in_full(server, client):
    server.answer = [
        {"text_output": "", "reasoning_output": "6 x 7 is"},
        {"text_output": "42", "finish_reason": "length", "num_output_tokens": 9},
    ]
    for completion in (client.generate("What is 6 x 7?"), client.chat("What is 6 x 7?")):
        assert (completion.reasoning, completion.text) == ("6 x 7 is", "42")
        assert (completion.finish_reason, completion.num_output_tokens) == ("length", 9)


def test_a_function_makes_each_answer_and_scripted_ones_come_first(server, client_kind):
    """A retry uses one up. `most_at_once` counts requests that are answered at the same time."""
    server.answer = lambda request: [Pause(0.01), f"{request.prompt} at most {request.params.max_tokens}"]
    server.script(Overloaded("full"), "once")
    with client_kind.client(server.url, retries=Retries(initial_s=0.01)) as client:
        assert [client.generate("a", max_tokens=5).text for _ in range(2)] == ["once", "a at most 5"]
        assert len(server.requests) == 3
        server.answer = lambda request: [Pause(), str(request.prompt)]
        answers = client.generate_many(["a", "b", "c"], concurrency=2)
        thread = threading.Thread(target=lambda: (wait_for(lambda: server.most_at_once == 2), server.release.set()))
        thread.start()
        assert [answer.text for answer in answers] == ["a", "b", "c"]
        thread.join()
    assert server.most_at_once == 2


def test_requests_are_recorded(server, client_kind):
    with client_kind.client(server.url, token="secret") as client:
        client.generate("a", temperature=0.5, stop="end", stop_token_ids=[7], request_id="r-1")
        client.generate([1, 2])
        client.chat("hello", seed=3)
    text, ids, chat = server.requests
    assert (text.request_id, text.prompt, text.messages) == ("r-1", "a", [])
    assert (text.params.temperature, text.params.stop, text.params.stop_token_ids) == (0.5, ("end",), (7,))
    assert text.headers["authorization"] == "Bearer secret"
    assert "secret" not in repr(server.requests)
    assert (ids.prompt, ids.path) == ((1, 2), "/v2/models/tensorrt_llm/generate_stream")
    assert (chat.prompt, chat.messages, chat.params.seed) == (None, [{"role": "user", "content": "hello"}], 3)


ERRORS = [
    (Overloaded("max_inflight is 8"), "E_OVERLOADED"),
    (InvalidRequest("no"), "E_INVALID_ARGUMENT"),
    (InvalidRequest("2,000 tokens", code="E_PROMPT_TOO_LONG"), "E_PROMPT_TOO_LONG"),
    (ServerUnavailable("stopping"), "E_UNAVAILABLE"),
    (Cancelled("by somebody"), "E_CANCELLED"),
    (ServerError("the engine died"), "E_INTERNAL"),
]


@pytest.mark.parametrize("before", [[], ["half"]], ids=["at once", "in the middle"])
def test_errors_are_raised_as_they_are_scripted(server, client, before):
    for error, code in ERRORS:
        server.script([*before, error])
        with pytest.raises(type(error)) as caught:
            client.generate("x")
        assert (caught.value.message, caught.value.code) == (error.message, code)
        assert caught.value.unprocessed == (code in ("E_OVERLOADED", "E_UNAVAILABLE") and not before)
    server.script([*before, ConnectionResetError()])
    with pytest.raises(ServerUnavailable):
        client.generate("x")
    for error in (AccessDenied("who?"), ModelNotFound("no such model"), ModelNotReady("x")) if not before else ():
        server.script(error)
        with pytest.raises(type(error), match=error.message):
            client.generate("x")
    for error in (DeadlineExceeded("too slow"), ProtocolError("nonsense")):  # no server sends these
        server.script([*before, error])
        with pytest.raises(ServerError, match=r"expected an error that a server can send.*Pause"):
            client.generate("x")
    assert client.generate("again").text == "again"
    assert not server.client_left.is_set()


def test_a_function_may_raise_its_error_and_a_broken_one_is_the_servers_fault(server, client):
    def raising(request):
        yield "half"
        raise {"full": Overloaded("full"), "broken": KeyError("typo")}[request.prompt]

    server.answer = raising
    with client.stream("full") as stream:
        assert next(iter(stream)).text == "half"
        with pytest.raises(Overloaded):
            stream.completion()
    with pytest.raises(ServerError, match="KeyError"):
        client.generate("broken")


@pytest.mark.slow
def test_a_pause_makes_a_time_limit_run_out(server, client):
    server.script([Pause(), "late"], ["early", Pause(60)])
    with pytest.raises(DeadlineExceeded, match=r"timeouts\.total"):
        client.generate("x", timeouts=Timeouts(total=0.2))
    assert server.client_left.wait(PATIENCE_S)
    with client.stream("x", timeouts=Timeouts(between_tokens=0.2)) as stream:
        assert next(iter(stream)).text == "early"
        with pytest.raises(DeadlineExceeded, match=r"timeouts\.between_tokens"):
            stream.completion()


def test_release_ends_a_pause_and_leaving_a_stream_is_seen(server, client):
    server.script(["half", Pause(), " done"], ["half", Pause()])
    with client.stream("x") as stream:
        assert next(iter(stream)).text == "half"
        assert server.waiting.wait(PATIENCE_S)
        server.release.set()
        assert stream.completion().text == "half done"
    server.release.clear()
    with client.stream("x") as stream:
        next(iter(stream))
    assert server.client_left.wait(PATIENCE_S)


def test_cancelling_a_request_ends_it(server, client):
    server.script(["half", Pause(), " done"])
    with client.stream("x", request_id="r-1") as stream:
        client.cancel("r-1")
        completion = stream.completion()
    assert (completion.text, completion.finish_reason) == ("half", "cancelled")
    assert server.cancelled == ["r-1"]
    with pytest.raises(InvalidRequest, match="no such active request"):
        client.cancel("r-1")
    assert len(server.requests) == 1


def test_a_model_that_loads(server, client):
    server.ready = False
    assert not client.ready()
    assert [each.state for each in client.readiness()] == ["loading"]
    with pytest.raises(ModelNotReady):
        client.generate("x")
    server.ready = True
    client.wait_until_ready(30)
    assert client.generate("x").text == "x"


def test_what_it_says_of_itself(client_kind):
    with FakeServer("hi", model_name="my model") as server:
        server.metrics_text = 'nv_inference_count{model="x"} 3\n'
        named = {"model_name": "my model", "model_version": "2", "metrics_url": f"{server.url}/metrics"}
        with client_kind.client(server.url, **named) as client:
            metadata = client.metadata()
            assert metadata.name == "my model"
            assert set(metadata.inputs) <= set(METADATA.inputs)
            assert set(metadata.outputs) <= set(METADATA.outputs)
            assert client.metrics().value("nv_inference_count") == 3
            server.metrics_text = "?"
            with pytest.raises(ProtocolError, check=lambda error: error.url == named["metrics_url"]):
                client.metrics()
            assert client.generate("x").text == "hi"
        with client_kind.client(server.url) as client, pytest.raises(ModelNotFound):
            client.generate("x")
        with client_kind.client(server.url) as client, pytest.raises(InvalidRequest, match="metrics_url"):
            client.metrics()


def post(server, body):
    """The answer of /generate, which the client itself never uses."""
    request = urllib.request.Request(f"{server.url}/v2/models/tensorrt_llm/generate", json.dumps(body).encode())
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def test_generate_joins_the_chunks(server):
    """An error after some text is the whole answer."""
    server.answer = ["a", "b", "c"]
    counts = {"num_input_tokens": 2, "num_cached_tokens": 0, "num_output_tokens": 3}
    assert post(server, {"text_input": "x y"}) == {"text_output": "abc", "finish_reason": "stop", **counts}
    assert post(server, {"text_input": "x", "sampling_param_n": 2})["text_output"] == ["abc", "abc"]
    server.script(["a", Overloaded("full")])
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(server, {"text_input": "x"})
    with caught.value as response:
        assert (response.code, json.load(response)) == (400, {"error": "[E_OVERLOADED] full"})


def test_closing_it_ends_what_waits(server):
    server.script(Pause())
    with Client(server.url, retries=ONCE) as client:
        opened = client.stream("x")

        def close():
            assert server.waiting.wait(PATIENCE_S)
            server.close()

        thread = threading.Thread(target=close)
        thread.start()
        with pytest.raises(ServerUnavailable):
            opened.__enter__()
        thread.join()
