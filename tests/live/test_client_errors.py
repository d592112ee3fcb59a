"""Every error that a real server can be brought to give is the same with all kinds of client: type, code, words."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from deepseek_triton_client import (
    Client,
    DeadlineExceeded,
    DeepseekTritonError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    Retries,
    ServerUnavailable,
    Timeouts,
)
from deepseek_triton_tools.server.server_process import ServerProcess
from support.client_kinds import ClientKind
from support.scraping import published, settled, value
from support.wire import LONG_ANSWER, STREAMS, WHOLE, ask

VERBS = ("generate", "stream", "chat", "stream_chat")
ONCE = Retries(attempts=1)


def call(client: Any, verb: str, content: Any = "x", **fields: Any) -> Any:
    """The completion of whichever of the four."""
    if not verb.startswith("stream"):
        return getattr(client, verb)(content, **fields)
    with getattr(client, verb)(content, **fields) as stream:
        return stream.completion()


@dataclass(frozen=True)
class Refusal:
    """What a server refuses."""

    kind: type[DeepseekTritonError]
    code: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    content: Any = "x"
    verbs: tuple[str, ...] = VERBS
    server: str = "tiny"


REFUSALS = {
    "a value out of range": Refusal(InvalidRequest, "E_INVALID_ARGUMENT", {"top_p": 1.5, "max_tokens": 3}),
    "several at once": Refusal(InvalidRequest, "E_INVALID_ARGUMENT", {"top_p": 1.5, "max_tokens": 0, "n": 65}),
    "several greedy answers": Refusal(InvalidRequest, "E_INVALID_ARGUMENT", {"n": 2, "temperature": 0}),
    "a token that there is not": Refusal(InvalidRequest, "E_INVALID_ARGUMENT", {}, [3, 10**6], VERBS[:2]),
    "an empty prompt": Refusal(InvalidRequest, "E_INVALID_ARGUMENT", {}, "", VERBS[:2]),
    "a role that there is not": Refusal(
        InvalidRequest, "E_INVALID_ARGUMENT", {}, [{"role": "x", "content": ""}], VERBS[2:]
    ),
    "a list that is too long": Refusal(InvalidRequest, "E_INVALID_ARGUMENT", {"stop_token_ids": [1] * 65}),
    "a field that the engine has not": Refusal(InvalidRequest, "E_UNSUPPORTED", {"guided_regex": "a+"}),
    "no priorities": Refusal(InvalidRequest, "E_UNSUPPORTED", {"priority": 1}, server="trtllm"),
    "no logprobs": Refusal(InvalidRequest, "E_UNSUPPORTED", {"logprobs": 1}, server="trtllm"),
    "longer than the context": Refusal(InvalidRequest, "E_PROMPT_TOO_LONG", {}, "word " * 20_000),
    "an engine that died": Refusal(ServerUnavailable, "E_UNAVAILABLE", server="dead"),
}


@pytest.mark.parametrize(
    ("name", "verb"), [(name, verb) for name, refusal in REFUSALS.items() for verb in refusal.verbs]
)
def test_a_refusal_is_the_servers_own(
    request: pytest.FixtureRequest, client_kind: ClientKind, name: str, verb: str
) -> None:
    refusal = REFUSALS[name]
    server: ServerProcess = request.getfixturevalue(f"{refusal.server}_server")

    with client_kind.client(server, retries=ONCE) as client, pytest.raises(DeepseekTritonError) as caught:
        call(client, verb, refusal.content, request_id="job-1", **refusal.fields)

    error = caught.value
    assert (type(error), error.code) == (refusal.kind, refusal.code)
    assert (error.request_id, error.url) == ("job-1", client_kind.url(server))
    assert error.unprocessed is (refusal.code == "E_UNAVAILABLE")
    assert str(error) == f"[{error.code}] {error.message}"
    said = _said(server, refusal, verb).removeprefix(f"[{refusal.code}] ")
    assert sorted(error.message.split("; ")) == sorted(said.split("; "))  # in the order of the request's fields


_heard: dict[tuple[int, str, bool], str] = {}


def _said(server: ServerProcess, refusal: Refusal, verb: str) -> str:
    """The server's own words, without the client."""
    key = (id(server), repr(refusal)[:200], "chat" in verb)
    if key not in _heard:
        prefixed = {
            name if name == "priority" else f"sampling_param_{name}": value for name, value in refusal.fields.items()
        }
        _heard[key] = ask(server, WHOLE[0], {**_prompt(refusal.content, verb), **prefixed}).refusal()
    return _heard[key]


def _prompt(content: Any, verb: str) -> dict[str, Any]:
    if "chat" in verb:
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        return {"messages": json.dumps(messages)}
    return {"text_input": content} if isinstance(content, str) else {"input_ids": content}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("settings", [{"model_name": "gpt"}, {"model_version": "9"}], ids=["model", "version"])
def test_a_model_that_is_not_there(
    client_kind: ClientKind, tiny_server: ServerProcess, verb: str, settings: Mapping[str, str]
) -> None:
    with client_kind.client(tiny_server, **settings) as client, pytest.raises(ModelNotFound) as caught:
        call(client, verb, request_id="job-1")

    error = caught.value
    assert (error.request_id, error.url, error.code) == ("job-1", client_kind.url(tiny_server), None)
    assert next(iter(settings.values())) in error.message
    assert error.message.startswith("Request for unknown model: ")


def test_a_model_that_is_not_there_has_no_metadata(client_kind: ClientKind, tiny_server: ServerProcess) -> None:
    with client_kind.client(tiny_server, model_name="gpt") as client:
        with pytest.raises(ModelNotFound) as caught:
            client.metadata()
        assert client.ready() is False
    assert caught.value.url == client_kind.url(tiny_server)


@pytest.mark.parametrize("verb", ["stream", "stream_chat"])
def test_a_stream_of_the_best_is_refused(client_kind: ClientKind, tiny_server: ServerProcess, verb: str) -> None:
    with client_kind.client(tiny_server) as client, pytest.raises(InvalidRequest, match="best_of") as caught:
        call(client, verb, temperature=0.8, best_of=2)
    assert caught.value.url == client_kind.url(tiny_server)


@pytest.mark.parametrize("verb", ["generate", "stream"])
def test_a_chats_field_for_a_prompt_is_the_servers_to_judge(
    client_kind: ClientKind, tiny_server: ServerProcess, verb: str
) -> None:
    body = {"text_input": "x", "chat_template_kwargs": "{}", "max_tokens": 2}
    refused = ask(tiny_server, STREAMS[0], body).errors
    with client_kind.client(tiny_server) as client:
        if refused:
            with pytest.raises(InvalidRequest) as caught:
                call(client, verb, chat_template_kwargs={}, max_tokens=2)
            assert str(caught.value) == refused[0]
        else:
            assert call(client, verb, chat_template_kwargs={}, max_tokens=2).num_output_tokens == 2


# --- A server with one place ---


@pytest.fixture
def taken(small_server: ServerProcess) -> Iterator[Any]:
    """A stream that has the place until it is closed."""
    with (
        Client(small_server.http_url, model_version="1") as client,
        client.stream("first", max_tokens=LONG_ANSWER, ignore_eos=True) as stream,
    ):
        next(stream)
        yield stream


@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize("verb", VERBS)
def test_a_full_server_says_so(client_kind: ClientKind, small_server: ServerProcess, verb: str) -> None:
    with (
        client_kind.client(small_server, retries=ONCE, model_version="1") as client,
        pytest.raises(Overloaded) as caught,
    ):
        call(client, verb, request_id="job-1")

    error = caught.value
    assert (error.code, error.request_id, error.url) == ("E_OVERLOADED", "job-1", client_kind.url(small_server))
    assert error.unprocessed is True


@pytest.mark.parametrize("verb", ["generate", "stream"])
def test_what_was_refused_gets_in_when_there_is_room(
    client_kind: ClientKind, small_server: ServerProcess, taken: Any, verb: str
) -> None:
    def refused(series: Any) -> float:
        return value(series, "requests_refused_total", code="E_OVERLOADED")

    before = refused(settled(small_server))
    patient = Retries(attempts=1000, initial_s=0.05, max_s=0.05)
    with ThreadPoolExecutor(1) as pool, client_kind.client(small_server, retries=patient, model_version="1") as client:
        answer = pool.submit(call, client, verb, "second", max_tokens=4)
        published(small_server, lambda series: refused(series) >= before + 2)
        assert not answer.done()
        taken.close()
        assert answer.result(60).num_output_tokens == 4


@pytest.mark.usefixtures("taken")
def test_trying_again_ends_with_the_callers_limit(client_kind: ClientKind, small_server: ServerProcess) -> None:
    """Whose error it is depends on whether the limit found a request under way or a pause between two."""
    patient = Retries(attempts=1000, initial_s=0.05, max_s=0.05)
    with (
        client_kind.client(small_server, retries=patient, model_version="1") as client,
        pytest.raises((Overloaded, DeadlineExceeded)),
    ):
        client.generate("second", timeouts=Timeouts(total=0.5))


# --- Cancelled by its id ---


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("other", ["http", "grpc"])
def test_a_request_is_ended_from_elsewhere_by_its_id(
    client_kind: ClientKind, simulated_server: ServerProcess, verb: str, other: str
) -> None:
    with (
        ThreadPoolExecutor(1) as pool,
        client_kind.client(simulated_server) as client,
        ClientKind(other, client_kind.style, client_kind.loop).client(simulated_server) as stopper,
    ):
        answer = pool.submit(call, client, verb, request_id="job-9", max_tokens=LONG_ANSWER, ignore_eos=True)
        _cancel_when_it_runs(stopper, "job-9", answer)
        completion = answer.result(60)

    assert completion.finish_reason == "cancelled"
    assert completion.num_output_tokens < LONG_ANSWER


def _cancel_when_it_runs(stopper: Any, request_id: str, answer: Any) -> None:
    while not answer.done():
        try:
            stopper.cancel(request_id)
            return
        except InvalidRequest:  # it is on its way yet
            continue


def test_no_request_of_that_id_is_running(client_kind: ClientKind, tiny_server: ServerProcess) -> None:
    with client_kind.client(tiny_server) as client, pytest.raises(InvalidRequest) as caught:
        client.cancel("job-2")

    error = caught.value
    assert error.code == "E_INVALID_ARGUMENT"
    assert "no running request has the id 'job-2'" in error.message
    assert (error.request_id, error.url) == ("job-2", client_kind.url(tiny_server))


# --- The caller's own limits, at a server with one place and a queue ---


@pytest.mark.parametrize(
    ("limit", "verb"),
    [
        ("first_token", "stream"),
        ("first_token", "stream_chat"),
        ("total", "generate"),
        ("total", "chat"),
        ("total", "stream"),
    ],
)
def test_a_limit_runs_out_in_the_queue(
    client_kind: ClientKind, simulated_server: ServerProcess, limit: str, verb: str
) -> None:
    with (
        Client(simulated_server.http_url) as first,
        first.stream("first", max_tokens=LONG_ANSWER, ignore_eos=True) as stream,
        client_kind.client(simulated_server) as client,
    ):
        next(stream)
        with pytest.raises(DeadlineExceeded) as caught:
            call(client, verb, request_id="job-1", timeouts=Timeouts(**{limit: 0.2}))

    error = caught.value
    assert error.message.startswith(f"timeouts.{limit} of 0.2 s ran out")
    assert (error.code, error.request_id, error.url) == (None, "job-1", client_kind.url(simulated_server))
    assert error.unprocessed is False
    assert not [thread.name for thread in threading.enumerate() if "watchdog" in thread.name]


def test_a_limit_runs_out_between_two_tokens(client_kind: ClientKind, simulated_server: ServerProcess) -> None:
    fields = {"max_tokens": LONG_ANSWER, "ignore_eos": True, "stream_interval_ms": 900}
    with (
        client_kind.client(simulated_server, timeouts=Timeouts(between_tokens=0.1)) as client,
        client.stream("x", **fields) as stream,
    ):
        assert next(stream).text is not None
        with pytest.raises(DeadlineExceeded, match=r"timeouts\.between_tokens of 0\.1 s ran out") as caught:
            list(stream)
        assert stream.text

    assert caught.value.request_id == stream.request_id
