"""What the client does before it asks a server anything, with all four kinds of client."""

import pytest

from deepseek_triton_client import AsyncClient, Client, InvalidRequest, SamplingParams, Timeouts
from deepseek_triton_client._core.checked_request import chat_request, prompt_request

VERBS = ("generate", "stream", "chat", "stream_chat")
SECRET = "hf-very-secret"


@pytest.fixture
def nowhere(client_kind):
    """The URL of a port where nothing listens: the client must not ask it."""
    return f"{client_kind.scheme}://127.0.0.1:1"


DEEP = []
for _ in range(100_000):
    DEEP = [DEEP]

JSON = "messages: expected values that JSON can hold"
NO_PROMPT = "prompt: expected a text or a list of token ids"
NO_IDS = "prompt: expected at least one token id"
WRONG = [
    ("hi", {"temprature": 0.5}, r"unknown field 'temprature'; did you mean 'temperature'\?", VERBS),
    ("hi", {"max_new_tokens": 5}, "use max_tokens", VERBS),
    ("hi", {"sampling_param_top_p": 0.5}, "use top_p", VERBS),
    ("hi", {"streaming": True}, "use stream", VERBS),
    ("hi", {"max_tokens": "many", "temprature": 1}, "temprature.*max_tokens", VERBS),
    ("hi", {"stop_token_ids": [1.5]}, "stop_token_ids: ", VERBS),
    ("hi", {"request_id": 7}, "request_id", VERBS),
    ("hi", {"request_id": ""}, "request_id", VERBS),
    *((prompt, {}, NO_PROMPT, VERBS[:2]) for prompt in (None, 7, b"hi", ["a", "b"], [[1], [2]], [{"role": "user"}])),
    ([], {}, NO_IDS, VERBS[:2]),
    ([1, "two"], {}, "prompt: ", VERBS[:2]),
    ("\ud800", {}, "prompt: ", VERBS[:2]),
    ([], {}, "messages: expected at least one message", VERBS[2:]),
    ({"role": "user", "content": "hi"}, {}, "messages: expected a text or a list", VERBS[2:]),
    ([{"content": "hi"}], {}, r"messages\[0\]: expected", VERBS[2:]),
    *(([{"role": "user", "content": content}], {}, JSON, VERBS[2:]) for content in (float("nan"), DEEP, {1j})),
    (DEEP, {}, r"messages\[0\]: expected", VERBS[2:]),
    ("hi", {"params": {"max_tokens": 1}}, r"params: .*got dict; give fields by name: \*\*", VERBS),
    ("hi", {"params": {}}, "params: expected SamplingParams, got dict", VERBS),
    ("hi", {"timeouts": 5}, r"timeouts: .*Timeouts\(total=5\), got 5", VERBS),
    ("hi", {"timeouts": 0}, r"timeouts: .*, got 0", VERBS),
]


def test_what_is_wrong_is_refused_before_anything_is_sent(client_kind, nowhere):
    """Fields win over params, so of a field that is in both, the message names the other value."""
    replaced = ("hi", {"params": SamplingParams(max_tokens=1), "max_tokens": "new"}, "got 'new'", VERBS)
    with client_kind.client(nowhere) as client:
        for content, fields, expected, verbs in [*WRONG, replaced]:
            for verb in verbs:
                with pytest.raises(InvalidRequest, match=expected) as caught:
                    getattr(client, verb)(content, **fields)
                assert (caught.value.code, caught.value.url, caught.value.unprocessed) == (None, None, False)


def test_a_closed_client_says_so(client_kind, nowhere):
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


def test_a_stream_is_entered_first(client_kind, nowhere):
    """Every request has an id of its own. Neither token nor headers are shown, and what can't be sent is not quoted."""
    settings = {"token": lambda: f"{SECRET}\n", "headers": {"x-api-key": SECRET}}
    with client_kind.client(nowhere, **settings) as client:
        assert (client.url, client.model_name) == (nowhere, "tensorrt_llm")
        assert nowhere in repr(client)
        with pytest.raises(InvalidRequest, match="token") as caught:
            client.generate("hi")
        assert SECRET not in repr(client) + str(caught.value)
        for open_stream in (client.stream, client.stream_chat):
            assert len({open_stream("hi").request_id for _ in range(3)}) == 3
            stream = open_stream("hi", request_id="job-1")
            assert stream.request_id == "job-1"
            for use in (lambda: next(stream), stream.completion, lambda: stream.text, lambda: stream.url):  # noqa: B023
                with pytest.raises(RuntimeError, match="not open"):
                    use()
            stream.close()


WRONG_BATCHES = [
    ("hi", {}, "requests: expected a list or another iterable of requests, got str"),
    ({"prompt": "hi"}, {}, "requests: .* got dict"),
    (None, {}, "requests: .* got NoneType"),
    *((["hi"], {"concurrency": number}, f"concurrency: .* got {number}") for number in (0, 0.5, True)),
    (["hi"], {"temprature": 1}, "unknown field 'temprature'"),
    (["hi"], {"max_tokens": "many"}, "max_tokens: "),
    (["hi"], {"params": {"max_tokens": 1}}, "params: expected SamplingParams, got dict"),
    (["hi"], {"timeouts": 5}, "timeouts: expected Timeouts"),
]


@pytest.mark.parametrize("return_errors", [False, True])
def test_a_batch_that_is_wrong_is_refused_at_the_call(client_kind, nowhere, return_errors):
    with client_kind.client(nowhere) as client:
        for requests, fields, expected in WRONG_BATCHES:
            with pytest.raises(InvalidRequest, match=expected):
                client.generate_many(requests, return_errors=return_errors, **fields)


def test_what_is_wrong_in_general():
    """Settings are checked for both wires, and the blocking client takes no asynchronous requests."""

    async def questions():
        yield "hi"

    for kind in (Client, AsyncClient):
        for url in ("http://host", "grpc://host"):
            with pytest.raises(InvalidRequest, match=r"retries: .*model_name: .*balance: .*headers: .*token: "):
                kind(url, model_name="", balance="random", headers=[], token="", retries=0)
            with pytest.raises(InvalidRequest, match=r"^context_urls: deepseek-triton gateway "):
                kind(url, context_urls="http://b")
    with Client("http://127.0.0.1:1") as client, pytest.raises(InvalidRequest, match="requests: expected"):
        client.generate_many(questions())


def test_a_request_of_a_batch_wins_over_what_all_have(nowhere):
    """None in a request unsets a field that all the others have."""
    with Client(nowhere) as client:
        make = client._batch([], SamplingParams(top_k=1, seed=1), {"seed": 2, "n": 2}, Timeouts(total=5), 1)
        request = make({"messages": "hi", "request_id": "job-1", "seed": 3, "n": None})
        assert (request.request_id, request.is_chat) == ("job-1", True)
        assert request.params == SamplingParams(top_k=1, seed=3)
        assert make("hi").params == SamplingParams(top_k=1, seed=2, n=2)
        assert request.timeouts == make("hi").timeouts == Timeouts(total=5)


def test_a_whole_answer_has_no_limits_of_tokens(nowhere):
    """This holds for the limits of the client and for those of the request."""
    limits = Timeouts(connect=1, first_token=2, between_tokens=3, total=4)
    whole = Timeouts(connect=1, total=4)
    with Client(nowhere, timeouts=limits) as client, Client(nowhere) as other:
        for each in (True, False):
            made = client._request(prompt_request, "hi", None, {}, None, None, streaming=each)
            assert made.timeouts == (limits if each else whole)
            made = other._request(chat_request, "hi", None, {}, limits, None, streaming=each)
            assert made.timeouts == (limits if each else whole)
