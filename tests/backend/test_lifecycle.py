"""However events interleave, a request gets exactly one final response."""

import itertools

import pytest
from fakes import ListReply
from hypothesis import given
from hypothesis import strategies as st

from deepseek_backend.engines.base import Step
from deepseek_backend.errors import CancelledError, EngineError
from deepseek_backend.lifecycle import TRANSITIONS, Event, Exchange, State, StepEffect
from deepseek_backend.request import Call, SamplingParams


def exchange(streaming=True, **call):
    reply = ListReply()
    opened = Exchange(reply)
    opened.begin(Call(prompt="p", streaming=streaming, **call))
    return opened, reply


def token(text="a", **kwargs):
    return Step(text=text, token_ids=[1], num_input_tokens=3, **kwargs)


def test_a_stream_is_increments_and_one_final_response_with_usage():
    opened, reply = exchange()
    for step in (token("He"), token("llo"), token("", finish_reason="stop", stop_reason=7)):
        opened.add(step)
        opened.deliver()

    assert reply.text == "Hello"
    assert [final for _, final in reply.sent] == [False, False, True]
    assert reply.last == {
        "text_output": "", "finish_reason": "stop", "stop_reason": "7", "num_input_tokens": 3, "num_output_tokens": 3,
    }  # fmt: skip
    assert opened.state is State.CLOSED


def test_deltas_that_have_not_left_leave_together():
    opened, reply = exchange()
    opened.add(token("a"))
    opened.add(token("b"))
    opened.deliver()

    assert [outputs for outputs, _ in reply.sent] == [{"text_output": "ab"}]


def test_without_streaming_there_is_one_response():
    opened, reply = exchange(streaming=False)

    assert opened.add(token("a")) is StepEffect.NOTHING
    assert not opened.deliver()
    assert opened.add(token("b", finish_reason="length")) is StepEffect.ENDED
    assert opened.deliver()
    assert len(reply.sent) == 1
    assert reply.last["text_output"] == "ab"
    assert reply.last["num_output_tokens"] == 2


def test_counts_asked_for_on_every_chunk_add_up_to_the_total():
    opened, reply = exchange(num_output_tokens_always=True, num_input_tokens_always=True)
    for step in (token(), token(), token(finish_reason="length")):
        opened.add(step)
        opened.deliver()

    assert [outputs["num_output_tokens"] for outputs, _ in reply.sent] == [1, 1, 1]
    assert [outputs["num_input_tokens"] for outputs, _ in reply.sent] == [3, 3, 3]


def test_the_prompt_is_echoed_before_the_text_when_asked():
    opened, reply = exchange(echo=True)
    opened.add(token("!", finish_reason="length"))
    opened.deliver()

    assert reply.text == "p!"


def test_a_stop_string_ends_the_request_and_asks_for_an_abort():
    opened, reply = exchange(sampling=SamplingParams(stop=("END",)))

    effects = [opened.add(token(text)) for text in ("abE", "N", "Dx")]
    opened.deliver()

    assert effects[-1] is StepEffect.STOP_STRING
    assert opened.add(token("late", finish_reason="cancelled")) is StepEffect.NOTHING
    assert (reply.text, reply.last["finish_reason"], reply.last["stop_reason"]) == ("ab", "stop", "END")


def test_text_held_back_for_a_stop_string_comes_at_the_end():
    opened, reply = exchange(sampling=SamplingParams(stop=("END",)))
    opened.add(token("abEN"))
    opened.deliver()
    opened.add(token("", finish_reason="length"))
    opened.deliver()

    assert reply.text == "abEN"


def test_an_error_is_the_final_response():
    opened, reply = exchange()
    opened.add(token("a"))
    opened.add(Step(error=EngineError("boom")))
    opened.deliver()

    assert [error.wire_message() for error in reply.errors] == ["[E_INTERNAL] boom"]
    assert reply.finals == 1


def test_a_reply_is_not_asked_for_cancellation_once_closed():
    opened, _ = exchange()
    opened.add(token(finish_reason="stop"))
    opened.deliver()

    assert opened.client_has_gone() is False


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_only_the_transitions_of_the_table_exist(state, event):
    following = TRANSITIONS.get((state, event))

    assert (following is None) == (
        state is State.CLOSED
        or (state is State.ENDED and event is not Event.FINAL_SENT)
        or (state in (State.OPEN, State.GENERATING) and event is Event.FINAL_SENT)
    )


ACTIONS = {
    "token": lambda e: e.add(token()),
    "finish": lambda e: e.add(token(finish_reason="length")),
    "fail": lambda e: e.add(Step(error=EngineError("x"))),
    "cancel": lambda e: e.end(error=CancelledError("gone")),
    "stop": lambda e: e.end(finish_reason="cancelled"),
    "deliver": lambda e: e.deliver(),
    "watch": lambda e: e.client_has_gone(),
}


@given(st.booleans(), st.lists(st.sampled_from(sorted(ACTIONS)), max_size=30))
def test_any_interleaving_ends_exactly_once(streaming, actions):
    opened, reply = exchange(streaming)
    for action in actions:
        ACTIONS[action](opened)
    opened.end(finish_reason="cancelled")
    opened.deliver()

    assert reply.finals == 1
    assert opened.closed
