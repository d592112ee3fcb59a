"""Every error that a real server can be brought to give is the same with all kinds of client: type, code, words."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from deepseek_triton_client import Client, InvalidRequest, ModelNotFound, Retries, ServerUnavailable
from deepseek_triton_tools.server.server_process import ServerProcess
from support.client_kinds import ClientKind, call
from support.scraping import published, settled, value
from support.wire import LONG_ANSWER, WHOLE, ask

VERBS = ("generate", "stream", "chat", "stream_chat")
ONCE = Retries(attempts=1)
PATIENT = Retries(attempts=1000, initial_s=0.05, max_s=0.05)


REFUSED: dict[str, list[tuple[dict[str, Any], Any, Sequence[str], str]]] = {
    "tiny": [
        ({"top_p": 1.5, "max_tokens": 0, "n": 65}, "x", VERBS, "E_INVALID_ARGUMENT"),
        ({}, [3, 10**6], VERBS[:2], "E_INVALID_ARGUMENT"),
        ({}, [{"role": "x", "content": ""}], VERBS[2:], "E_INVALID_ARGUMENT"),
        ({"guided_structural_tag": '{"structures": []}'}, "x", VERBS, "E_UNSUPPORTED"),
        ({}, "word " * 20_000, VERBS, "E_PROMPT_TOO_LONG"),
    ],
    "dead": [({}, "x", VERBS, "E_UNAVAILABLE")],
}
"""Server -> (fields, content, verbs, code)"""


@pytest.mark.parametrize("server", REFUSED)
def test_a_refusal_is_the_servers_own(request, client_kind, server, subtests):
    started: ServerProcess = request.getfixturevalue(f"{server}_server")
    for fields, content, verbs, code in REFUSED[server]:
        for verb in verbs:
            with subtests.test(f"{code}, {verb}"):
                with (
                    client_kind.client(started, retries=ONCE) as client,
                    pytest.raises(ServerUnavailable if server == "dead" else InvalidRequest) as caught,
                ):
                    call(client, verb, content, request_id="job-1", **fields)

                error = caught.value
                assert (error.code, error.request_id, error.url) == (code, "job-1", client_kind.url(started))
                assert error.unprocessed is (code == "E_UNAVAILABLE")
                assert str(error) == f"[{code}] {error.message}"
                prefixed = {f"sampling_param_{name}": value for name, value in fields.items()}
                said = ask(started, WHOLE[0], {**_prompt(content, verb), **prefixed}).refusal()
                # Problems are told in the order of the request's fields.
                assert sorted(error.message.split("; ")) == sorted(said.removeprefix(f"[{code}] ").split("; "))


def _prompt(content: Any, verb: str) -> dict[str, Any]:
    if "chat" in verb:
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        return {"messages": json.dumps(messages)}
    return {"text_input": content} if isinstance(content, str) else {"input_ids": content}


@pytest.mark.parametrize("settings", [{"model_name": "gpt"}, {"model_version": "9"}], ids=["model", "version"])
def test_a_model_that_is_not_there(client_kind, tiny_server, settings):
    with client_kind.client(tiny_server, **settings) as client:
        for verb in VERBS:
            with pytest.raises(ModelNotFound) as caught:
                call(client, verb, request_id="job-1")
            error = caught.value
            assert (error.request_id, error.url, error.code) == ("job-1", client_kind.url(tiny_server), None)
            assert next(iter(settings.values())) in error.message
            assert error.message.startswith("Request for unknown model: ")
        with pytest.raises(ModelNotFound) as caught:
            client.metadata()
        assert caught.value.url == client_kind.url(tiny_server)
        assert client.ready() is False


# --- A server with one place ---


@pytest.fixture
def taken(small_server: ServerProcess) -> Iterator[Any]:
    """A stream that has the place until it is closed. The one before leaves it a moment after its client has gone."""
    with (
        Client(small_server.http_url, model_version="1", retries=PATIENT) as client,
        client.stream("first", max_tokens=LONG_ANSWER, ignore_eos=True) as stream,
    ):
        next(stream)
        yield stream


@pytest.mark.parametrize("verb", ["generate", "stream"])
def test_what_was_refused_gets_in_when_there_is_room(client_kind, small_server, taken, verb):
    def refused(series: Any) -> float:
        return value(series, "requests_refused_total", code="E_OVERLOADED")

    before = refused(settled(small_server))
    with ThreadPoolExecutor(1) as pool, client_kind.client(small_server, retries=PATIENT, model_version="1") as client:
        answer = pool.submit(call, client, verb, "second", max_tokens=4)
        published(small_server, lambda series: refused(series) >= before + 2)
        assert not answer.done()
        taken.close()
        assert answer.result(60).num_output_tokens == 4


# --- Cancelled by its id ---


@pytest.mark.parametrize("verb", VERBS)
def test_a_request_is_ended_from_elsewhere_by_its_id(client_kind, simulated_server, verb):
    """By a client of the other protocol."""
    other = ClientKind("grpc" if client_kind.scheme == "http" else "http", client_kind.style, client_kind.loop)
    with (
        ThreadPoolExecutor(1) as pool,
        client_kind.client(simulated_server) as client,
        other.client(simulated_server) as stopper,
    ):
        answer = pool.submit(call, client, verb, request_id="job-9", max_tokens=LONG_ANSWER, ignore_eos=True)
        _cancel_when_it_runs(stopper, "job-9", answer)
        completion = answer.result(60)
        with pytest.raises(InvalidRequest, match="no running request has the id 'job-9'") as caught:
            stopper.cancel("job-9")

    assert completion.finish_reason == "cancelled"
    assert completion.num_output_tokens < LONG_ANSWER
    error = caught.value
    assert (error.code, error.request_id, error.url) == ("E_INVALID_ARGUMENT", "job-9", other.url(simulated_server))


def _cancel_when_it_runs(stopper: Any, request_id: str, answer: Any) -> None:
    while not answer.done():
        try:
            stopper.cancel(request_id)
            return
        except InvalidRequest:  # it is on its way yet
            continue
