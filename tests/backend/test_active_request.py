"""However events interleave, a request gets exactly one final response."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_backend.active_request import ActiveRequest, RequestState, StepEffect
from deepseek_backend.engines.base import Logprob, PerfMetrics, Step
from deepseek_backend.engines.generate_request import SamplingParams
from deepseek_backend.errors import CancelledError, EngineError
from deepseek_backend.messages import Prompt
from deepseek_backend.parsing import ParsedRequest
from support.engine_driver import make_request
from support.fakes import ListReply


def begun(streaming=True, prompts=("p",), **fields):
    reply = ListReply()
    opened = ActiveRequest(reply)
    asked = ParsedRequest(prompts=tuple(Prompt(text=text) for text in prompts), streaming=streaming, **fields)
    every = [text for text in prompts for _ in range(asked.num_sequences_per_prompt)]
    opened.begin(asked, [make_request(str(number), text, max_tokens=9) for number, text in enumerate(every)])
    return opened, reply


def feed(opened, *steps):
    for step in steps:
        opened.add(0, step)
        opened.deliver()


def token(text="a", **kwargs):
    return Step(text=text, token_ids=[1], num_input_tokens=3, **kwargs)


def test_a_stream_is_increments_and_one_final_response_with_usage():
    opened, reply = begun()
    opened.add(0, token("H"))
    feed(opened, token("e"), token("llo"), token("", finish_reason="stop", stop_reason=7))
    assert [outputs["text_output"] for outputs, _ in reply.sent] == ["He", "llo", ""]
    assert [final for _, final in reply.sent] == [False, False, True]
    usage = {"num_input_tokens": 3, "num_output_tokens": 4, "num_cached_tokens": 0}
    assert reply.last == {"text_output": "", "finish_reason": "stop", "stop_reason": "7", **usage}
    assert opened.state is RequestState.CLOSED
    assert opened.client_has_gone() is False, "a reply is not asked once it is closed"


def test_without_streaming_there_is_one_response():
    opened, reply = begun(streaming=False)
    assert opened.add(0, token("a")) is StepEffect.NOTHING
    assert not opened.deliver()
    assert opened.add(0, token("b", finish_reason="length")) is StepEffect.SEND
    assert opened.deliver()
    assert len(reply.sent) == 1
    assert (reply.last["text_output"], reply.last["num_output_tokens"]) == ("ab", 2)


def test_counts_asked_for_on_every_chunk_add_up_to_the_total_and_the_prompt_is_echoed():
    opened, reply = begun(returned=frozenset({"num_input_tokens", "num_output_tokens"}), echo=True)
    feed(opened, token("!"), token(""), token("", finish_reason="length"))
    assert [outputs["num_output_tokens"] for outputs, _ in reply.sent] == [1, 2]
    assert {outputs["num_input_tokens"] for outputs, _ in reply.sent} == {3}
    assert reply.text == "p!"


def test_stop_strings_end_the_text_and_hold_it_back():
    opened, reply = begun(sampling=SamplingParams(stop=("END",)))
    effects = [opened.add(0, token(text)) for text in ("abE", "N", "Dx")]
    opened.deliver()
    assert effects[-1] is StepEffect.SEND_AND_ABORT
    assert opened.add(0, token("late", finish_reason="cancelled")) is StepEffect.NOTHING
    assert (reply.text, reply.last["finish_reason"], reply.last["stop_reason"]) == ("ab", "stop", "END")
    opened, reply = begun(sampling=SamplingParams(stop=("END",)))
    feed(opened, token("abEN"), token("", finish_reason="length"))
    assert reply.text == "abEN"


@pytest.mark.parametrize("streaming", [True, False])
def test_perf_metrics_come_with_a_stop_string_too(streaming):
    sampling = SamplingParams(stop=("END",), return_perf_metrics=True)
    opened, reply = begun(streaming, sampling=sampling)
    assert opened.add(0, token("abENDx")) is StepEffect.ABORT
    assert opened.add(0, token("more")) is StepEffect.NOTHING
    metrics = PerfMetrics(last_token_time_ns=7)
    assert opened.add(0, Step(finish_reason="cancelled", perf_metrics=metrics)) is StepEffect.SEND
    opened.deliver()
    assert (reply.text, reply.last["finish_reason"], reply.last["last_token_time_ns"]) == ("ab", "stop", 7)
    assert reply.finals == 1


def test_perf_metrics_that_never_come_are_not_waited_for_for_ever():
    for end in (
        lambda opened: opened.end(finish_reason="timeout"),
        lambda opened: opened.add(0, Step(error=EngineError("dead"))),
    ):
        opened, reply = begun(sampling=SamplingParams(stop=("END",), return_perf_metrics=True))
        opened.add(0, token("abEND"))
        end(opened)
        opened.deliver()
        assert (reply.text, reply.last["finish_reason"]) == ("ab", "stop")


def test_several_prompts_are_answered_in_order_in_one_response():
    opened, reply = begun(streaming=False, prompts=("a", "b"))
    opened.add(1, token("B", finish_reason="stop"))
    assert opened.add(0, token("A", finish_reason="length")) is StepEffect.SEND
    opened.deliver()
    assert (reply.last["text_output"], reply.last["finish_reason"]) == (["A", "B"], ["length", "stop"])
    assert reply.last["sequence_index"] == [0, 1]
    assert reply.finals == 1


def test_a_stream_of_several_says_which_sequence_moved():
    opened, reply = begun(prompts=("a", "b"))
    opened.add(1, token("B"))
    opened.deliver()
    opened.add(0, token("A", finish_reason="length"))
    opened.add(1, token("!"))
    opened.deliver()
    opened.add(1, token("?", finish_reason="stop"))
    opened.deliver()
    names = ("sequence_index", "text_output", "finish_reason")
    said = [tuple(outputs.get(name) for name in names) for outputs, _ in reply.sent]
    assert said == [(1, "B", None), ([0, 1], ["A", "!"], ["length", "None"]), (1, "?", "stop")]
    assert [final for _, final in reply.sent] == [False, False, True]


def test_a_stop_string_ends_its_own_sequence_only():
    opened, reply = begun(streaming=False, prompts=("a", "b"), sampling=SamplingParams(stop=("END",)))
    assert opened.add(0, token("xEND")) is StepEffect.ABORT
    assert opened.add(0, token("late")) is StepEffect.NOTHING
    assert opened.add(1, token("y", finish_reason="length")) is StepEffect.SEND
    opened.deliver()
    assert reply.last["text_output"] == ["x", "y"]


def test_one_failed_sequence_fails_the_request():
    opened, reply = begun(prompts=("a", "b"))
    opened.add(0, token("A"))
    opened.add(1, Step(error=EngineError("boom")))
    opened.deliver()
    assert [error.wire_message() for error in reply.errors] == ["[E_INTERNAL] boom"]
    assert opened.add(0, token("late")) is StepEffect.NOTHING
    assert reply.finals == 1


def logprob(value):
    return [[Logprob(1, value, rank=1)]]


def test_the_best_of_several_answers_are_returned_likeliest_first():
    sampling = SamplingParams(n=2, best_of=3, temperature=1.0)
    opened, reply = begun(streaming=False, sampling=sampling, returned=frozenset({"cumulative_logprob"}))
    for index, (text, value) in enumerate([("worst", -9.0), ("good", -2.0), ("best", -1.0)]):
        opened.add(index, token(text, logprobs=logprob(value), finish_reason="stop"))
    opened.deliver()
    assert reply.last["text_output"] == ["best", "good"]
    assert reply.last["cumulative_logprob"] == [-1.0, -2.0]
    assert reply.last["sequence_index"] == [0, 1]
    opened, reply = begun(streaming=False, sampling=SamplingParams(best_of=2, temperature=1.0))
    for index, value in enumerate((-1.0, -2.0)):
        opened.add(index, token(str(index), logprobs=logprob(value), finish_reason="stop"))
    opened.deliver()
    assert reply.last["text_output"] == "0"
    assert "sequence_index" not in reply.last
    sampling = SamplingParams(best_of=3, temperature=1.0)
    opened, reply = begun(streaming=False, sampling=sampling)
    opened.add(0, token("cut", logprobs=logprob(-0.1)))
    opened.add(1, token("complete", logprobs=logprob(-3.0), finish_reason="stop"))
    opened.end(finish_reason="timeout")  # the third has nothing at all
    opened.deliver()
    assert reply.last["text_output"] == "complete"


def test_a_request_that_ended_before_it_began_stays_ended():
    reply = ListReply()
    opened = ActiveRequest(reply)
    opened.end(finish_reason="cancelled")
    assert not opened.begin(ParsedRequest(), [])
    opened.deliver()
    assert (reply.last["text_output"], reply.last["finish_reason"]) == ("", "cancelled")


ACTIONS = {
    "token": lambda e, i: e.add(i, token()),
    "finish": lambda e, i: e.add(i, token(finish_reason="length")),
    "fail": lambda e, i: e.add(i, Step(error=EngineError("x"))),
    "cancel": lambda e, i: e.end(error=CancelledError("gone")),
    "stop": lambda e, i: e.end(finish_reason="cancelled"),
    "time out": lambda e, i: e.end(finish_reason="timeout"),
    "deliver": lambda e, i: e.deliver(),
    "watch": lambda e, i: e.client_has_gone(),
}


@pytest.mark.slow
@given(st.booleans(), st.integers(1, 3), st.lists(st.tuples(st.sampled_from(sorted(ACTIONS)), st.integers(0, 2))))
def test_any_interleaving_ends_exactly_once(streaming, num_prompts, actions):
    opened, reply = begun(streaming, prompts="abc"[:num_prompts])
    for action, index in actions:
        ACTIONS[action](opened, index % num_prompts)
    opened.end(finish_reason="cancelled")
    opened.deliver()
    assert reply.finals == 1
    assert opened.closed
