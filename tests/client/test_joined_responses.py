"""Requests that a context and a generation server share: fake servers on real sockets, blocking and with asyncio."""

import itertools
import threading
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepseek_triton_client import (
    Client,
    DeadlineExceeded,
    DeepseekTritonError,
    InvalidRequest,
    Overloaded,
    Retries,
    ServerError,
    ServerUnavailable,
    Timeouts,
)
from deepseek_triton_client.testing import FakeServer, Pause
from support.client_kinds import STYLES, ClientKind
from support.waiting import PATIENCE_S, wait_for

NOBODY = "http://127.0.0.1:1"
QUICK = Retries(attempts=2, initial_s=0.001)
LOST = ServerUnavailable("the KV cache can't be fetched", code="E_CONTEXT_LOST")
ANSWER = ("Once", " upon", " a time")
TEXT = "".join(ANSWER)
MAX_TOKENS = "sampling_param_max_tokens"
STRICT = [{"type": "function", "function": {"name": "look", "strict": True, "parameters": {"type": "object"}}}]


@pytest.fixture
def fakes():
    with ExitStack() as stack:
        yield lambda answer=ANSWER: stack.enter_context(FakeServer(answer))


@pytest.fixture
def context(fakes):
    return fakes()


@pytest.fixture
def generation(fakes):
    return fakes()


@pytest.fixture(params=STYLES)
def client_kind(request, client_loop):
    return ClientKind("http", request.param, client_loop)


@pytest.fixture
def connect(client_kind, context, generation):
    """Make a client of these servers, or of `generation` and `context`."""

    def make(generations=(), contexts=(), **settings):
        urls = [[getattr(each, "url", each) for each in servers] for servers in (generations, contexts)]
        return client_kind.client(urls[0] or generation.url, context_urls=urls[1] or context.url, **settings)

    return make


@pytest.fixture
def client(connect):
    with connect(retries=QUICK) as client:
        yield client


def asked(server):
    return [request.request_type for request in server.requests]


def test_each_server_does_its_part_of_the_same_request(client, context, generation):
    completion = client.generate("Tell", max_tokens=9, seed=3, request_id="r1")

    (first,), (second,) = context.requests, generation.requests
    assert (first.request_type, second.request_type) == ("context_only", "generation_only")
    own = {"request_type", "context_phase_params"}
    assert {**first.body, **dict.fromkeys(own)} == {**second.body, **dict.fromkeys(own)}
    assert second.body["context_phase_params"] == '{"form": "FakeServer"}'
    assert (completion.text, completion.finish_reason, completion.url) == (TEXT, "stop", generation.url)
    assert (completion.num_input_tokens, completion.num_output_tokens, completion.request_id) == (1, 3, "r1")
    assert [each.text for each in client.generate_many(["a", "b"])] == [TEXT] * 2
    assert (asked(context), asked(generation)) == (["context_only"] * 3, ["generation_only"] * 3)


def test_the_first_text_comes_at_once_and_only_once(client, context, generation):
    generation.answer = [Pause(), *ANSWER]

    with client.stream("Tell") as stream:
        assert str(next(stream)) == "Once"
        assert generation.waiting.wait(PATIENCE_S)
        assert stream.url == generation.url
        generation.release.set()
        assert [str(chunk) for chunk in stream] == [" upon", " a time", ""]
        assert stream.completion().text == TEXT


@st.composite
def cuts(draw, text):
    """A text in pieces, some of which are empty."""
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
    return [text[start:end] for start, end in itertools.pairwise([0, *places, len(text)])]


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_however_the_streams_are_cut_the_answer_is_the_whole_one(client, context, generation, data):
    reasoning, text = data.draw(st.text("xy🙂", max_size=8)), data.draw(st.text("ab🙂é", max_size=8))
    known = data.draw(st.integers(0, len(reasoning) + len(text)))
    responses = [{"text_output": "", "reasoning_output": piece} for piece in data.draw(cuts(reasoning))]
    responses += [{"text_output": piece} for piece in data.draw(cuts(text))]
    last = {"text_output": "", "finish_reason": "stop", "num_input_tokens": 4, "num_output_tokens": 7}
    context.answer = [
        {"text_output": text[: max(0, known - len(reasoning))], "reasoning_output": reasoning[:known]},
        {"text_output": "", "finish_reason": "length", "num_output_tokens": 1, "context_phase_params": "{}"},
    ]
    generation.answer = [*responses, last]

    with client.stream("Tell", separate_reasoning=True) as stream:
        chunks = list(stream)
        completion = stream.completion()

    assert "".join(chunk.reasoning for chunk in chunks) == completion.reasoning == reasoning
    assert "".join(map(str, chunks)) == completion.text == text
    assert (completion.num_input_tokens, completion.num_output_tokens, completion.finish_reason) == (4, 7, "stop")


def test_what_cant_be_shared_goes_whole_to_a_generation_server(client, context, generation):
    unshared = [{"n": 2}, {"best_of": 2}, {"logprobs": 1}, {"prompt_logprobs": 0}, {"return_logprobs": True}]
    unshared += [{"guided_regex": "a+"}, {"tools": STRICT}, {"chat_template_kwargs": {"tools": STRICT}}]
    for fields in unshared:
        client.chat("Tell", **fields)
    client.tokenize("Tell")

    assert (asked(context), asked(generation)) == ([], [""] * (len(unshared) + 1))


CONTEXT, GENERATION, ALONE = ["context_only"], ["generation_only"], [""]
ABOUT_TO_DIE = [{"text_output": ""}, ConnectionResetError()]
"""Nothing has reached the caller yet, so another server may compute the prompt."""
CONTEXT_SERVERS = [
    ([Overloaded("full"), ANSWER], [CONTEXT, CONTEXT], GENERATION),
    ([ServerUnavailable("stopping"), ANSWER], [CONTEXT, CONTEXT], GENERATION),
    ([ABOUT_TO_DIE, ANSWER], [CONTEXT, CONTEXT], GENERATION),
    ([ServerUnavailable("stopping")], [CONTEXT], ALONE),
    ([ConnectionResetError()], [CONTEXT], ALONE),
]
"""(what each says, what each is asked for, what the generation server is asked for)"""


@pytest.mark.slow
def test_where_a_context_server_refuses_or_dies_another_takes_it_or_a_generation_server_does_it_all(connect, fakes):
    for answers, asked_of_contexts, asked_of_generation in CONTEXT_SERVERS:
        contexts, generation = [fakes(answer) for answer in answers], fakes()
        with connect([generation], [NOBODY, *contexts]) as client:
            assert client.generate("Tell").text == TEXT
            assert [each.state for each in client.readiness()][:2] == ["ready", "unreachable"]
        assert [asked(each) for each in (*contexts, generation)] == [*asked_of_contexts, asked_of_generation]


def test_a_context_server_that_died_is_asked_last_for_a_while(connect, fakes, context):
    dies = fakes(ABOUT_TO_DIE)
    with connect(contexts=[dies, context]) as client:
        assert client.generate("Tell").text == client.generate("Tell").text == TEXT
    assert (len(dies.requests), asked(context)) == (1, CONTEXT * 2)


def test_a_generation_server_does_no_prompt_that_full_context_servers_refuse(connect, fakes, generation):
    full = fakes(Overloaded("full"))
    with connect(contexts=[full, NOBODY], retries=QUICK) as client:
        with pytest.raises(Overloaded) as caught:
            client.generate("Tell")
        assert (caught.value.url, caught.value.unprocessed) == (full.url, True)
        full.script(Overloaded("full"))
        full.answer = ANSWER
        assert client.generate("Tell").text == TEXT

    assert (asked(full), asked(generation)) == (CONTEXT * 4, GENERATION)


def test_no_third_server_is_lost_with_a_request(connect, fakes, context, generation):
    dying = [fakes(ConnectionResetError()) for _ in range(4)]
    for servers in ({"contexts": [*dying[:2], context]}, {"generations": [*dying[2:], generation]}):
        with connect(**servers) as client, pytest.raises(ServerUnavailable):
            client.generate("Tell")
    assert [len(each.requests) for each in (*dying, context, generation)] == [1, 1, 1, 1, 1, 0]


def test_after_the_first_text_a_death_is_an_error(connect, fakes, context, generation):
    dies = fakes([{"text_output": "Once"}, ConnectionResetError()])
    with connect(contexts=[dies, context]) as client, client.stream("Tell") as stream:
        assert str(next(stream)) == "Once"
        with pytest.raises(ServerUnavailable):
            next(stream)

    assert context.requests == generation.requests == []


def test_generation_servers_take_turns(connect, fakes, generation):
    servers = [generation, fakes()]
    with connect(servers, balance="round_robin") as client:
        for _ in range(4):
            client.generate("Tell")

    assert [len(each.requests) for each in servers] == [2, 2]


def test_a_wrong_request_is_refused_by_the_context_server(client, context, generation):
    context.script(InvalidRequest("no"))

    with pytest.raises(InvalidRequest, match="no") as caught:
        client.generate("Tell", request_id="r1")

    assert (caught.value.url, caught.value.request_id, generation.requests) == (context.url, "r1", [])


def test_another_generation_server_gets_the_same_handover(connect, fakes, context, generation):
    later = [["On", ServerError("bug")], ["On", "ce", ConnectionResetError()]]
    for number, failing in enumerate([[Overloaded("full")], [ServerUnavailable("stopping")], *later]):
        first = fakes(failing)
        with connect([NOBODY, first, generation]) as client:
            completion = client.generate("Tell")

        assert (completion.text, completion.num_output_tokens, completion.url) == (TEXT, 3, generation.url)
        assert (asked(first), asked(context)[number:]) == (["generation_only"], ["context_only"])
        assert asked(generation)[number:] == ["generation_only"]
        handovers = [each.requests[-1].body["context_phase_params"] for each in (first, generation)]
        assert handovers[0] == handovers[1]


def test_where_the_kv_cache_is_gone_the_prompt_is_computed_again(connect, context, generation):
    generation.script(["Once", LOST])
    with connect([generation, NOBODY], retries=Retries(attempts=1)) as client:  # nothing was refused
        assert client.generate("Tell").text == TEXT

    assert (asked(context), asked(generation)) == (["context_only"], ["generation_only", "context_and_generation"])
    assert generation.requests[1].body["context_phase_params"] == '{"form": "FakeServer"}'


def test_a_kv_cache_that_stays_lost_is_an_error(connect, generation):
    generation.answer = ["Once", LOST]
    with connect(retries=Retries(attempts=1)) as client, pytest.raises(ServerUnavailable, match="E_CONTEXT_LOST"):
        client.generate("Tell")

    assert asked(generation) == ["generation_only", "context_and_generation"]


def test_a_lost_kv_cache_says_nothing_of_the_server_that_wants_it(connect, fakes, generation):
    generation.script([*ANSWER, LOST])
    with connect([generation, fakes()]) as client:
        with pytest.raises(ServerUnavailable, match="E_CONTEXT_LOST"):
            client.generate("Tell")
        assert client.generate("Tell").url == generation.url


def test_an_answer_that_breaks_off_later_is_an_error(client, context, generation):
    generation.script([*ANSWER, ServerError("bug")])

    with client.stream("Tell") as stream:
        assert str(next(stream)) == "Once"
        with pytest.raises(ServerError, match="bug") as caught:
            stream.completion()

    assert (caught.value.url, caught.value.unprocessed) == (generation.url, False)
    assert asked(generation) == ["generation_only"]


def test_when_all_generation_servers_fail_the_last_error_comes_out(client, context, generation):
    generation.script(*[Overloaded("full")] * 2)

    with client.stream("Tell") as stream, pytest.raises(Overloaded) as caught:
        stream.completion()

    assert (caught.value.url, caught.value.unprocessed) == (generation.url, False)
    assert asked(generation)[:2] == ["generation_only"] * 2


class TestReleasing:
    """The caller has an error, and the context server holds the KV cache until a generation server has fetched it."""

    @pytest.mark.parametrize(("refusal", "times"), [(Overloaded("full"), 3), (InvalidRequest("no"), 1)], ids=str)
    def test_one_token_is_asked_for_until_a_server_takes_it(self, client, context, generation, refusal, times):
        generation.script(*[refusal] * times)

        with pytest.raises(type(refusal)) as caught:
            client.chat("Tell", max_tokens=9, seed=3, stop=["x"], request_id="r1")
        wait_for(lambda: len(generation.requests) > times)

        assert (caught.value.url, caught.value.request_id) == (generation.url, "r1")
        *_, last = generation.requests
        assert (last.request_type, last.prompt, last.request_id) == ("generation_only", ".", "r1-release")
        assert {name for name in last.body if name.startswith("sampling")} <= {"sampling_param_n", MAX_TOKENS}
        assert last.body[MAX_TOKENS] == 1
        assert last.body["context_phase_params"] == generation.requests[0].body["context_phase_params"]

    def test_the_caller_does_not_wait_for_it(self, client, context, generation):
        def takes_only_the_release(request):
            if request.request_id == "r1":
                raise InvalidRequest("no")
            yield Pause()
            yield "Once"

        generation.answer = takes_only_the_release
        with pytest.raises(InvalidRequest):
            client.generate("Tell", request_id="r1")
        assert generation.waiting.wait(PATIENCE_S)
        generation.release.set()

    def test_a_server_that_does_not_want_even_that_is_left_alone(self, connect, fakes, generation):
        generation.answer = InvalidRequest("no")
        other = fakes(ServerError("bug"))
        with connect([generation, other]) as client, pytest.raises(InvalidRequest):
            client.generate("Tell")

        assert [len(each.requests) for each in (generation, other)] == [2, 1]

    def test_a_kv_cache_that_is_gone_needs_none(self, client, context, generation):
        generation.script(*[Overloaded("full")] * 2, LOST)

        with pytest.raises(Overloaded):
            client.generate("Tell")
        client.close()

        assert len(generation.requests) == 3


def test_a_prompt_that_is_cancelled_needs_no_generation_server(connect, context, generation):
    context.answer = [Pause(), *ANSWER]
    with connect() as client, Client(context.url) as other:
        leaving = threading.Thread(target=lambda: context.waiting.wait() and other.cancel("r1"))
        leaving.start()
        assert client.generate("Tell", request_id="r1").finish_reason == "cancelled"
        leaving.join()  # the answer may be there before that of the cancel

    assert generation.requests == []


def test_cancel_finds_the_request_on_either_server(connect, generation):
    generation.answer = ["Once", " upon", Pause()]
    with connect() as client, client.stream("Tell", request_id="r1") as stream:
        assert [str(next(stream)) for _ in range(2)] == ["Once", " upon"]
        client.cancel("r1")
        assert stream.completion().finish_reason == "cancelled"


class TestLeaving:
    """Whatever the caller does, the generation server is asked once the context server has answered."""

    def test_after_the_first_text(self, connect, generation):
        generation.answer = [Pause(0.2), *ANSWER, Pause()]
        with connect() as client, client.stream("Tell") as stream:
            assert str(next(stream)) == "Once"

        assert asked(generation) == ["generation_only"]
        assert generation.client_left.wait(PATIENCE_S)  # once the KV cache has been fetched

    def test_before_the_context_server_has_answered_ends_the_prompt(self, connect, context, generation):
        context.answer = [Pause(), *ANSWER]
        with connect() as client, pytest.raises(DeadlineExceeded, match=r"timeouts.total of 0.3 s"):
            client.generate("Tell", request_id="r1", timeouts=Timeouts(total=0.3))

        assert (context.cancelled, generation.requests) == (["r1"], [])

    def test_a_prompt_that_ends_meanwhile_is_fetched_with_one_token(self, connect, context, generation):
        def ends_although_told_to_stop(request):
            wait_for(lambda: context.cancelled)
            yield {"text_output": "Once", "finish_reason": "length", "context_phase_params": "{}"}

        context.answer = ends_although_told_to_stop
        with connect() as client, pytest.raises(DeadlineExceeded):
            client.generate("Tell", max_tokens=9, min_tokens=3, timeouts=Timeouts(total=0.2))

        (request,) = generation.requests
        assert (request.request_type, request.params.max_tokens) == ("generation_only", 1)
        assert request.params.min_tokens is None

    def test_while_the_generation_servers_are_away(self, connect, generation):
        generation.answer = Overloaded("full")
        with connect() as client, client.stream("Tell") as stream:
            assert str(next(stream)) == "Once"
            wait_for(lambda: generation.requests)
            generation.answer = ANSWER

        assert set(asked(generation)) == {"generation_only"}

    def test_closing_the_client_waits_for_it(self, connect, generation):
        generation.answer = [Pause(0.3), *ANSWER]
        with connect() as client:
            stream = client.stream("Tell").__enter__()
            assert str(next(stream)) == "Once"

        assert asked(generation) == ["generation_only"]
        with pytest.raises(DeepseekTritonError):
            next(stream)


def test_each_token_is_counted_once_on_the_chunk_that_has_it(client, context, generation):
    responses = [{"text_output": text, "num_output_tokens": tokens} for text, tokens in (("a", 1), ("bc", 2), ("", 1))]
    last = {"text_output": "d", "num_output_tokens": 1, "finish_reason": "stop"}
    context.answer = [responses[0], {"text_output": "", "finish_reason": "length", "context_phase_params": "{}"}]
    generation.answer = [*responses, last]

    with client.stream("Tell", return_num_output_tokens=True) as stream:
        counts = [(str(chunk), chunk.num_output_tokens) for chunk in stream]

    assert [count for count in counts if count != ("", 0)] == [("a", 1), ("bc", 2), ("", 1), ("d", 1)]
    assert stream.text == "abcd"


def test_the_server_s_own_time_limit_counts_once(client, context, generation):
    context.answer = [Pause(0.2), *ANSWER]

    client.generate("Tell", timeout_ms=100_000)

    assert context.requests[0].params.timeout_ms == 100_000
    assert generation.requests[0].params.timeout_ms <= 100_000 - 200
