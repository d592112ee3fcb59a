"""What the client does before it asks a server anything, with all four kinds of client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from deepseek_triton_client import (
    AsyncClient,
    Client,
    DeadlineExceeded,
    InvalidRequest,
    Readiness,
    SamplingParams,
    Timeouts,
)
from deepseek_triton_client._core import calls as calls_module
from deepseek_triton_client._core.checked_request import chat_request, prompt_request
from support.client_kinds import ClientKind

VERBS = ("generate", "stream", "chat", "stream_chat")
SECRET = "hf-very-secret"


@pytest.fixture
def nowhere(client_kind: ClientKind) -> str:
    """The URL of a port where nothing listens: the client must not ask it."""
    return f"{client_kind.scheme}://127.0.0.1:1"


def test_creating_a_client_connects_nowhere(client_kind: ClientKind, nowhere: str) -> None:
    with client_kind.client(nowhere) as client:
        assert (client.url, client.model_name) == (nowhere, "tensorrt_llm")


DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]

WRONG: dict[str, tuple[Any, dict[str, Any], str, tuple[str, ...]]] = {
    "misspelt": ("hi", {"temprature": 0.5}, r"unknown field 'temprature'; did you mean 'temperature'\?", VERBS),
    "somebody else's name": ("hi", {"max_new_tokens": 5}, "use max_tokens", VERBS),
    "the wire's name": ("hi", {"sampling_param_top_p": 0.5}, "use top_p", VERBS),
    "the wire's business": ("hi", {"streaming": True}, "use stream", VERBS),
    "a wrong type": ("hi", {"max_tokens": "many"}, "max_tokens: ", VERBS),
    "two at once": ("hi", {"max_tokens": "many", "temprature": 1}, "temprature.*max_tokens", VERBS),
    "a list": ("hi", {"stop_token_ids": [1.5]}, "stop_token_ids: ", VERBS),
    "a request id": ("hi", {"request_id": 7}, "request_id", VERBS),
    "an empty request id": ("hi", {"request_id": ""}, "request_id", VERBS),
    "no prompt": (None, {}, "prompt: expected a text or a list of token ids", VERBS[:2]),
    "a number": (7, {}, "prompt: expected a text or a list of token ids", VERBS[:2]),
    "bytes": (b"hi", {}, "prompt: expected a text or a list of token ids", VERBS[:2]),
    "no ids": ([], {}, "prompt: expected at least one token id", VERBS[:2]),
    "an id that is none": ([1, "two"], {}, "prompt: ", VERBS[:2]),
    "half a character": ("\ud800", {}, "prompt: ", VERBS[:2]),
    "no messages": ([], {}, "messages: expected at least one message", VERBS[2:]),
    "one message": ({"role": "user", "content": "hi"}, {}, "messages: expected a text or a list", VERBS[2:]),
    "no role": ([{"content": "hi"}], {}, r"messages\[0\]: expected", VERBS[2:]),
    "no number": (
        [{"role": "user", "content": float("nan")}],
        {},
        "messages: expected values that JSON can hold",
        VERBS[2:],
    ),
    "a deep one": ([{"role": "user", "content": DEEP}], {}, "messages: expected values that JSON can hold", VERBS[2:]),
    "only deep": (DEEP, {}, r"messages\[0\]: expected", VERBS[2:]),
    "params in a dict": ("hi", {"params": {"max_tokens": 1}}, r"params: .*got dict; give fields by name: \*\*", VERBS),
    "no params": ("hi", {"params": {}}, "params: expected SamplingParams, got dict", VERBS),
    "seconds": ("hi", {"timeouts": 5}, r"timeouts: .*Timeouts\(total=5\), got 5", VERBS),
    "no seconds": ("hi", {"timeouts": 0}, r"timeouts: .*, got 0", VERBS),
    "what JSON has not": (
        [{"role": "user", "content": {1j}}],
        {},
        "messages: expected values that JSON can hold",
        VERBS[2:],
    ),
}


@pytest.mark.parametrize(("name", "verb"), [(name, verb) for name, wrong in WRONG.items() for verb in wrong[3]])
def test_what_is_wrong_is_refused_before_anything_is_sent(
    client_kind: ClientKind, nowhere: str, name: str, verb: str
) -> None:
    content, fields, expected, _verbs = WRONG[name]
    with client_kind.client(nowhere) as client, pytest.raises(InvalidRequest, match=expected) as caught:
        getattr(client, verb)(content, **fields)

    assert (caught.value.code, caught.value.url, caught.value.unprocessed) == (None, None, False)


@pytest.mark.parametrize("verb", VERBS)
def test_fields_win_over_params(client_kind: ClientKind, nowhere: str, verb: str) -> None:
    """The refused field shows it: the wrong field of `params` was replaced, so the message names only the other one."""
    with client_kind.client(nowhere) as client, pytest.raises(InvalidRequest, match="got 'new'"):
        getattr(client, verb)("hi", SamplingParams(max_tokens=1), max_tokens="new")


def test_a_closed_client_says_so(client_kind: ClientKind, nowhere: str) -> None:
    client = client_kind.client(nowhere)
    with client:
        pass
    client.close()
    uses = [lambda verb=verb: getattr(client, verb)("hi") for verb in VERBS]
    uses += [client.ready, client.metadata, client.metrics, client.wait_until_ready, lambda: client.cancel("job-1")]
    uses += [lambda: list(client.generate_many(["hi"]))]
    for use in uses:
        with pytest.raises(RuntimeError, match="the client is closed"):
            use()


@pytest.mark.parametrize("verb", ["stream", "stream_chat"])
def test_a_stream_is_entered_first(client_kind: ClientKind, nowhere: str, verb: str) -> None:
    with client_kind.client(nowhere) as client:
        stream = getattr(client, verb)("hi", request_id="job-1")
        assert stream.request_id == "job-1"
        for use in (lambda: next(stream), lambda: stream.completion(), lambda: stream.text, lambda: stream.url):
            with pytest.raises(RuntimeError, match="not open"):
                use()
        stream.close()


@pytest.mark.parametrize("verb", ["stream", "stream_chat"])
def test_every_request_has_an_id_of_its_own(client_kind: ClientKind, nowhere: str, verb: str) -> None:
    with client_kind.client(nowhere) as client:
        assert len({getattr(client, verb)("hi").request_id for _ in range(3)}) == 3


WRONG_BATCHES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a text": ("hi", {}, "requests: expected a list or another iterable of requests, got str"),
    "one request": ({"prompt": "hi"}, {}, "requests: expected a list or another iterable of requests, got dict"),
    "nothing": (None, {}, "requests: expected a list or another iterable of requests, got NoneType"),
    "none at a time": (["hi"], {"concurrency": 0}, "concurrency: expected an integer of at least 1, got 0"),
    "half at a time": (["hi"], {"concurrency": 0.5}, "concurrency: expected"),
    "true at a time": (["hi"], {"concurrency": True}, "concurrency: expected"),
    "misspelt": (["hi"], {"temprature": 1}, "unknown field 'temprature'"),
    "a wrong type": (["hi"], {"max_tokens": "many"}, "max_tokens: "),
    "params in a dict": (["hi"], {"params": {"max_tokens": 1}}, "params: expected SamplingParams, got dict"),
    "seconds": (["hi"], {"timeouts": 5}, "timeouts: expected Timeouts"),
}


@pytest.mark.parametrize("return_errors", [False, True])
@pytest.mark.parametrize("name", WRONG_BATCHES)
def test_a_batch_that_is_wrong_is_refused_at_the_call(
    client_kind: ClientKind, nowhere: str, name: str, return_errors: bool
) -> None:
    requests, fields, expected = WRONG_BATCHES[name]
    with client_kind.client(nowhere) as client, pytest.raises(InvalidRequest, match=expected):
        client.generate_many(requests, return_errors=return_errors, **fields)


def test_the_blocking_client_takes_no_asynchronous_requests() -> None:
    async def questions() -> AsyncIterator[str]:
        yield "hi"

    with Client("http://127.0.0.1:1") as client, pytest.raises(InvalidRequest, match="requests: expected"):
        client.generate_many(questions())  # type: ignore[call-overload]


def test_a_request_of_a_batch_wins_over_what_all_have(nowhere: str) -> None:
    """None in a request unsets a field that all the others have."""
    with Client(nowhere) as client:
        make = client._batch([], SamplingParams(top_k=1, seed=1), {"seed": 2, "n": 2}, Timeouts(total=5), 1)
        request = make({"messages": "hi", "request_id": "job-1", "seed": 3, "n": None})
        assert (request.request_id, request.is_chat) == ("job-1", True)
        assert request.params == SamplingParams(top_k=1, seed=3)
        assert make("hi").params == SamplingParams(top_k=1, seed=2, n=2)
        assert request.timeouts == make("hi").timeouts == Timeouts(total=5)


def test_a_whole_answer_has_no_limits_of_tokens(nowhere: str) -> None:
    """This holds for the limits of the client and for those of the request."""
    limits = Timeouts(connect=1, first_token=2, between_tokens=3, total=4)
    whole = Timeouts(connect=1, total=4)
    with Client(nowhere, timeouts=limits) as client, Client(nowhere) as other:
        for each in (True, False):
            made = client._request(prompt_request, "hi", None, {}, None, None, streaming=each)
            assert made.timeouts == (limits if each else whole)
            made = other._request(chat_request, "hi", None, {}, limits, None, streaming=each)
            assert made.timeouts == (limits if each else whole)


@pytest.mark.parametrize(
    "url", ["", "ftp://host", "http://host:port", "grpc://host/path", "http://u:p@host", [], None, 7, [7], b"host"]
)
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_urls_that_are_none(kind: Any, url: Any) -> None:
    with pytest.raises(InvalidRequest, match="url"):
        kind(url)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    "wrong",
    [
        {"model_name": ""},
        {"model_name": "\ud800"},
        {"balance": "random"},
        {"stream_mode": "both"},
        {"headers": {"a b": "c"}},
        {"headers": []},
        {"token": "a\n"},
        {"token": ""},
        {"timeouts": 0},
        {"retries": 0},
        {"tls": False},
        {"connection": {}},
        {"metrics_url": ""},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_settings_that_are_wrong(kind: Any, wrong: dict[str, Any]) -> None:
    for url in ("http://host", "grpc://host"):
        with pytest.raises(InvalidRequest, match=next(iter(wrong))):
            kind(url, **wrong)


def test_neither_token_nor_headers_are_shown(client_kind: ClientKind, nowhere: str) -> None:
    with client_kind.client(nowhere, token=SECRET, headers={"x-api-key": SECRET}) as client:
        shown = repr(client)
    assert nowhere in shown
    assert SECRET not in shown


def test_a_token_is_asked_for_each_time(client_kind: ClientKind, nowhere: str) -> None:
    """A token that can't be sent is refused without being quoted."""
    asked = []

    def token() -> str:
        asked.append(1)
        return f"{SECRET}\n"

    with client_kind.client(nowhere, token=token, timeouts=Timeouts(connect=1)) as client:
        for number in (1, 2):
            with pytest.raises(InvalidRequest, match="token") as caught:
                client.generate("hi")
            assert len(asked) == number
            assert SECRET not in str(caught.value)


@pytest.mark.slow
def test_waiting_asks_again_until_it_is_ready(client_kind: ClientKind, nowhere: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(calls_module, "_POLL_INTERVAL_S", 0.01)
    told: list[Readiness] = []
    with (
        client_kind.client(nowhere) as client,
        pytest.raises(DeadlineExceeded, match=r"not ready after 1 s: .* is unreachable"),
    ):
        client.wait_until_ready(1, told.append)

    assert len(told) > 1
    assert {readiness.url for readiness in told} == {nowhere}
    assert {readiness.state for readiness in told} == {"unreachable"}
