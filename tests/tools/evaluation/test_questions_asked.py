"""Questions to a server over real sockets: what is sent, what is kept, and what counts as the answer."""

import asyncio
import json
from functools import partial

import pytest

from deepseek_triton_client import AsyncClient, InvalidRequest, Overloaded, Retries, ServerUnavailable
from deepseek_triton_client.testing import FakeServer, Pause
from deepseek_triton_tools.evaluation.questions import (
    Generation,
    Likelihood,
    ask_all,
    failures_by_message,
    open_answers,
)
from support.waiting import PATIENCE_S


@pytest.fixture
def server():
    with FakeServer() as server:
        yield server


@pytest.fixture
def kept(tmp_path):
    with open_answers(tmp_path / "answers.jsonl", {}, overwrite=False) as kept:
        yield kept


def asked(server, kept, questions, concurrency=4):
    connect = partial(AsyncClient, server.url, retries=Retries(attempts=1))
    return asyncio.run(ask_all(questions, connect, kept, concurrency))


def generation(content="2 + 2 =", until=(), **fields):
    return Generation(content=content, fields=fields, until=until)


def test_a_completion_sends_its_stop_strings_and_fields(server, kept):
    question = generation(until=["Question:"], max_tokens=256, temperature=0.0, add_special_tokens=False)
    assert asked(server, kept, [question]) == {}

    [request] = server.requests
    assert request.prompt == "2 + 2 ="
    params = request.params
    assert (params.max_tokens, params.temperature, params.add_special_tokens) == (256, 0.0, False)
    assert list(params.stop or ()) == ["Question:"]


def test_a_chat_is_cut_here_because_its_reasoning_may_have_the_string(server, kept):
    said = {"text_output": "#### 4\n\nQuestion: 3 + 3", "reasoning_output": "Question: what is it?"}
    server.script([said | {"finish_reason": "stop", "num_output_tokens": 9}])
    question = generation([{"role": "user", "content": "2 + 2?"}], until=["Question:"])
    asked(server, kept, [question])

    assert server.requests[0].params.stop is None
    record = kept.get(question.key)
    assert record is not None
    assert question.answer_in(record) == "#### 4\n\n"
    assert record["reasoning"] == "Question: what is it?"


def test_thoughts_are_no_part_of_the_answer():
    answers = {
        " 4": " 4",
        "<think>\n2 and 2</think>\n\n4": "4",
        "2 and 2</think>4</think>5": "5",  # the prompt began the thought
        "<think>\n2 and 2 is": "",  # cut off in the thought
        "STOP</think>4 STOP 5": "4 ",  # a stop string in the thought
    }
    assert {text: generation(until=["STOP"]).answer_in({"text": text}) for text in answers} == answers


def test_what_is_kept_is_not_asked_again_equal_questions_once_and_repeats_each_time(server, kept):
    questions = [generation(f"{number} + 1 =") for number in range(5)]
    asked(server, kept, questions[:3])
    asked(server, kept, questions)
    repeats = [Generation(content="a", fields={}, repeat=number) for number in (0, 1)]
    asked(server, kept, [generation("b"), generation("b"), *repeats])
    expected = [*(f"{number} + 1 =" for number in range(5)), "a", "a", "b"]
    assert sorted(str(request.prompt) for request in server.requests) == expected


def test_no_more_are_under_way_than_allowed(server, kept):
    server.answer = lambda request: iter(["4"])
    asked(server, kept, [generation(str(number)) for number in range(20)], concurrency=3)
    assert 0 < server.most_at_once <= 3
    assert len(server.requests) == 20


def test_a_question_that_fails_is_named_and_the_others_go_on(server, kept):
    server.script(["1"], InvalidRequest("too long", code="E_PROMPT_TOO_LONG"), Overloaded("full"), ["4"])
    questions = [generation(str(number)) for number in range(4)]
    failed = asked(server, kept, questions, concurrency=1)

    assert [question.key in failed for question in questions] == [False, True, True, False]
    assert "1 x [E_PROMPT_TOO_LONG] too long" in failures_by_message(failed)
    assert [kept.get(question.key) is None for question in questions] == [False, True, True, False]


def test_half_an_answer_is_a_failure(server, kept):
    for reason in ("timeout", "cancelled"):
        server.script([{"text_output": "4", "finish_reason": reason, "num_output_tokens": 1}])
        [error] = asked(server, kept, [generation()]).values()
        assert reason in str(error)


def test_a_server_that_is_gone_ends_the_run_and_keeps_what_came(server, kept):
    gone = ServerUnavailable("stopping", code="E_UNAVAILABLE")
    server.script(["1"], gone, ["never"])
    questions = [generation(str(number)) for number in range(3)]
    with pytest.raises(ServerUnavailable):
        asked(server, kept, questions, concurrency=1)
    assert [kept.get(question.key) is None for question in questions] == [False, True, True]


def test_leaving_early_cancels_what_is_under_way(server, kept):
    server.answer = Pause()

    async def leave():
        task = asyncio.create_task(ask_all([generation()], partial(AsyncClient, server.url), kept, 4))
        while not server.requests:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    assert server.client_left.wait(PATIENCE_S)


class OneTokenPerLetter(FakeServer):
    """Its tokens are letters. Each is as likely as its place in the alphabet says: a 0, b -1. A conversation is its
    last message between two z."""

    def __init__(self):
        super().__init__()
        self.answer = self._said

    def _said(self, request):
        body = request.body
        if request.messages:
            text = f"z{request.messages[-1]['content']}z"
        else:
            text = "".join(map(chr, request.prompt)) if isinstance(request.prompt, tuple) else str(request.prompt)
        counts = {"num_input_tokens": len(text), "num_output_tokens": 1, "finish_reason": "stop"}
        if body.get("task") == "tokenize":
            yield {"text_output": "", "output_ids": list(map(ord, text)), **counts}
            return
        entries = [{str(ord(a)): {"logprob": 97.0 - ord(a), "rank": ord(a) - 96, "decoded_token": a}} for a in text]
        entries[:1] = [None]
        yield {"text_output": "x", "prompt_logprobs": json.dumps(entries), **counts}


def test_likelihood_counts_the_continuation_only(tmp_path):
    cases = [
        ("ab", "aa", (0.0, True)),  # greedy
        ("ab", "bc", (-3.0, False)),
        ("ab ", "bc", (-3.0 + 65.0, False)),  # a blank belongs to what follows
        ("", "cba", (-1.0, False)),
        ([{"role": "user", "content": "ab"}], "bc", (-3.0, False)),
    ]
    questions = [Likelihood(context=context, continuation=after, fields={}) for context, after, _ in cases]
    with OneTokenPerLetter() as server, open_answers(tmp_path / "answers", {}, overwrite=False) as kept:
        assert asked(server, kept, questions) == {}
        records = [kept.get(question.key) for question in questions]
    assert [(record["logprob"], record["is_greedy"]) for record in records] == [expected for *_, expected in cases]
