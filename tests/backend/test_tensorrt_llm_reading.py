"""TensorRT-LLM's responses become steps: one step for all waiting ones, in order, with one end."""

from types import SimpleNamespace

import pytest

from deepseek_backend.engines.prompting import PromptTokenizer
from deepseek_backend.engines.tensorrt_llm import tensorrt_llm_engine as engine_module
from deepseek_backend.engines.tensorrt_llm.outputs import OutputIncrements
from deepseek_backend.errors import EngineError
from support.engine_driver import make_request
from support.waiting import wait_for

ENDLESS = {"max_tokens": 3000, "ignore_eos": True}


@pytest.fixture
def slow(make_engine, monkeypatch):
    """Make an engine whose requests run for a minute."""
    monkeypatch.setenv("STANDIN_TOKENS_PER_S", "50")
    return make_engine()


@pytest.fixture
def reference(make_engine):
    """Return the first tokens of the answer to every ENDLESS request."""
    return make_engine().run(max_tokens=500, ignore_eos=True).token_ids


def begun(harness, **sampling):
    return harness.begun(**{**ENDLESS, **sampling})


def await_waiting(harness, request, count):
    wait_for(lambda: len(harness.waiting(request)) >= count)


def await_joined(harness, request):
    """Wait for a step of several responses."""
    harness.sink.wait_for(lambda: any(len(step.token_ids) >= 4 for step in harness.steps_of(request)))


def await_last(harness, request, is_last):
    await_waiting(harness, request, 1)
    wait_for(lambda: is_last(harness.waiting(request)[-1]))


@pytest.mark.slow
def test_waiting_responses_become_one_step(reference, slow):
    request = begun(slow)
    with slow.held_loop():
        await_waiting(slow, request, 4)
    await_joined(slow, request)
    steps = slow.steps_of(request)
    assert steps.token_ids == reference[: len(steps.token_ids)]


@pytest.mark.slow
def test_the_last_step_contains_the_responses_before_it(reference, slow):
    request = begun(slow, max_tokens=30)
    with slow.held_loop():
        await_last(slow, request, lambda response: response.finish_reason is not None)
        num_waiting = len(slow.waiting(request))
    steps = slow.result(request)
    assert len(steps[-1].token_ids) >= num_waiting
    assert steps.token_ids == reference[:30]
    assert slow.ended(request) == ["length"]


def test_logprobs_belong_to_their_tokens_when_several_waited(slow):
    request = begun(slow, logprobs=1)
    with slow.held_loop():
        await_waiting(slow, request, 4)
    await_joined(slow, request)
    for step in slow.steps_of(request):
        assert [entry[0].token_id for entry in step.logprobs] == list(step.token_ids)


@pytest.mark.slow
def test_an_abort_loses_no_waiting_response(reference, slow):
    request = begun(slow)
    num_tokens = len(slow.steps_of(request).token_ids)
    with slow.held_loop():
        await_waiting(slow, request, 4)
        slow.engine.abort(request.request_id)
    steps = slow.result(request)
    assert len(steps.token_ids) >= num_tokens + 4
    assert steps.token_ids == reference[: len(steps.token_ids)]
    assert slow.ended(request) == ["cancelled"]


@pytest.mark.slow
def test_responses_before_a_fault_are_delivered_before_it(reference, slow):
    request = begun(slow)
    with slow.held_loop():
        num_tokens = len(slow.steps_of(request).token_ids)
        await_waiting(slow, request, 4)
        slow.engine._llm._executor.fault = "an assertion failed"
        await_last(slow, request, lambda response: response.error is not None)
    steps = slow.result(request)
    assert steps.last.error
    assert not steps.last.token_ids
    assert len(steps.token_ids) >= num_tokens + 4
    assert steps.token_ids == reference[: len(steps.token_ids)]


def test_no_step_comes_after_the_end(slow):
    request = begun(slow)
    entry = slow.engine._open[request.request_id]

    def end_and_read_on():
        slow.engine._fail("it died")
        entry.output.outputs[0].token_ids.append(5)
        slow.engine._note_output(entry)

    slow.engine._loop.call(end_and_read_on)
    slow.result(request)
    with slow.held_loop():  # the flush has run by now
        assert str(slow.ended(request)[0]) == "it died"


@pytest.mark.slow
def test_steps_of_several_requests_leave_in_one_call(slow, monkeypatch):
    monkeypatch.setattr(engine_module, "MAX_TURN_S", 60.0)  # a slow machine needs more than the usual 5 ms to read them
    requests = [slow.submit(**ENDLESS) for _ in range(8)]
    slow.sink.wait_for(lambda: all(slow.steps_of(request) for request in requests))
    with slow.held_loop():
        num_calls = len(slow.sink.calls)
        for request in requests:
            await_waiting(slow, request, 2)  # the loop has been told of the whole first iteration
    everyone = {request.request_id for request in requests}
    slow.sink.wait_for(lambda: len(slow.sink.calls) > num_calls + 1)
    together = [{name for name, _ in call} for call in slow.sink.calls[num_calls:][:2]]
    assert everyone in together, "what was read before the loop stood still may have left first"


def test_a_long_turn_delivers_before_its_end(slow, monkeypatch):
    monkeypatch.setattr(engine_module, "MAX_TURN_S", -1.0)
    requests = [slow.submit(**ENDLESS) for _ in range(4)]
    slow.sink.wait_for(lambda: all(len(slow.steps_of(request)) > 1 for request in requests))
    assert {len(call) for call in slow.sink.calls} == {1}


def with_two_tokens_and_one_logprob(finish_reason):
    """The part of a RequestOutput and its single CompletionOutput that the engine reads, and what reads it."""
    tokenizer = PromptTokenizer(SimpleNamespace(decode=lambda token_ids, **_: "".join(map(chr, token_ids))))
    request = make_request("r", "p", max_tokens=9, logprobs=0)
    output = SimpleNamespace(text="ab", token_ids=[97, 98], finish_reason=finish_reason, stop_reason=None)
    output.logprobs = [{97: SimpleNamespace(logprob=-1.0, rank=1)}]
    output.outputs = [output]
    return output, OutputIncrements(request, output, tokenizer)


def test_after_an_abort_tokens_without_logprobs_are_left_out_and_come_later_with_them():
    for finish_reason, cut_short in (None, True), ("cancelled", False), ("cancelled", True):
        output, increments = with_two_tokens_and_one_logprob(finish_reason)
        step = increments.take(cut_short=cut_short)
        assert list(step.token_ids) == [97]
        assert [entry[0].token_id for entry in step.logprobs] == [97]
        assert increments.num_tokens_sent == 1
        output.logprobs.append({98: SimpleNamespace(logprob=-2.0, rank=1)})
        assert list(increments.take(cut_short=True).token_ids) == [98]


def test_without_an_abort_missing_logprobs_are_a_fault():
    for finish_reason, cut_short in (None, False), ("stop", False), ("length", True):
        _, increments = with_two_tokens_and_one_logprob(finish_reason)
        with pytest.raises(EngineError, match="do not belong"):
            increments.take(cut_short=cut_short)


@pytest.mark.slow
def test_an_abort_between_a_token_and_its_logprob_is_no_fault(slow, monkeypatch):
    monkeypatch.setattr(engine_module, "ABORT_TIMEOUT_S", 0.2)
    request = begun(slow, logprobs=1)
    entry = slow.engine._open[request.request_id]

    def read_a_token_and_abort():
        entry.task.cancel()  # no response is read after it
        entry.output.outputs[0].token_ids.append(5)
        slow.engine._abort(request.request_id)
        slow.engine._note_output(entry)

    slow.engine._loop.call(read_a_token_and_abort)
    steps = slow.result(request)
    assert [step.error for step in steps] == [None] * len(steps)
    assert steps[-1].finish_reason == "cancelled"


def test_a_death_between_a_token_and_its_logprob_is_reported(slow):
    request = begun(slow, logprobs=1)
    entry = slow.engine._open[request.request_id]

    def read_a_token_and_die():
        entry.output.outputs[0].token_ids.append(5)
        slow.engine._note_output(entry)
        slow.engine._fail("it died")

    slow.engine._loop.call(read_a_token_and_die)
    assert str(slow.result(request)[-1].error) == "it died"


def test_a_request_with_a_reading_fault_is_not_read_further(slow):
    request = begun(slow, logprobs=1)
    entry = slow.engine._open[request.request_id]
    open_then = []

    def read_a_token_alone():
        entry.output.outputs[0].token_ids.append(5)
        slow.engine._note_output(entry)
        slow.engine._flush()
        open_then.extend(slow.engine._open)

    slow.engine._loop.call(read_a_token_alone)
    assert "do not belong" in str(slow.result(request)[-1].error)
    assert open_then == []
    with slow.held_loop():  # a turn after it was cancelled
        assert entry.task.cancelled()
    assert entry.output.aborted()
