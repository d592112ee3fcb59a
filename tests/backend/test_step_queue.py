"""The intake: steps are taken once, in order, and joined only where that changes nothing."""

import threading

from hypothesis import given
from hypothesis import strategies as st

from deepseek_backend.answer.active_request import ActiveRequest, QueueState
from deepseek_backend.answer.sequence_buffer import SequenceBuffer
from deepseek_backend.delivery.step_queue import MAX_ITERATIONS, MAX_STEPS, StepQueue, joined
from deepseek_backend.engines.base import Logprob, PerfMetrics, Step
from deepseek_backend.engines.generate_request import GenerateRequest, SamplingParams
from deepseek_backend.errors import EngineError
from deepseek_backend.request.parsed_request import ParsedRequest, Prompt


def opened(intake, name="r", *, begun=True, **sampling):
    """A stream; `begun`: its first step has been taken."""
    exchange = ActiveRequest(None, client_id=name)
    call = ParsedRequest(prompts=(Prompt(text="p"),), streaming=True, sampling=SamplingParams(**sampling))
    exchange.begin(call, [GenerateRequest(request_id=name, prompt="p", sampling=call.sampling, max_tokens=9)])
    intake.expect(exchange)
    exchange.inflows[0].taken_s, exchange.has_tokens = float(begun), begun
    return exchange, exchange.requests[0]


def recording(**kwargs):
    taken = []

    def take(exchange, index, step, now):
        taken.append((exchange.client_id, index, step.text, len(step.token_ids)))
        return True

    return StepQueue(take, fail=kwargs.get("fail")), taken


def timed():
    """An intake, and the text and time of each step it gives."""
    times = []

    def take(exchange, index, step, at_s):
        times.append((step.text, at_s))
        return True

    return StepQueue(take, fail=None), times


def token(text, **kwargs):
    return Step(text=text, token_ids=[1], **kwargs)


def test_the_iterations_of_a_sequence_are_taken_as_one_step():
    intake, taken = recording()
    (one, first), (two, second) = opened(intake, "one"), opened(intake, "two")
    for text in "abc":
        intake.put([(first, token(text)), (second, token(text.upper()))])

    assert intake.collect() == [one, two]
    assert taken == []
    intake.catch_up(one)
    intake.catch_up(two)
    assert taken == [("one", 0, "abc", 3), ("two", 0, "ABC", 3)]
    assert not intake.pending
    assert intake.collect() == []


def test_the_first_step_stays_by_itself_for_its_time_is_measured():
    intake, times = timed()
    _, request = opened(intake, begun=False)
    for text in "abc":
        intake.put([(request, token(text))])
    intake.collect()
    intake.put([(request, token("d", finish_reason="length"))])
    intake.collect()

    assert [text for text, _ in times] == ["a", "bc", "d"]
    assert times == sorted(times, key=lambda entry: entry[1])
    assert times[0][1] < times[1][1]


def test_steps_that_are_looked_at_together_share_the_time_between_them():
    intake, times = timed()
    exchange, request = opened(intake, begun=False, stop=("END",))
    for text in "abcde":
        intake.put([(request, token(text))])
    (inflow,) = exchange.inflows
    intake._sort_in()
    inflow.first_s, inflow.last_s = 10.0, 12.0
    intake.catch_up(exchange)

    assert times == [("a", 10.0), ("b", 10.5), ("c", 11.0), ("d", 11.5), ("e", 12.0)]


def test_with_a_stop_string_every_step_is_taken_by_itself():
    intake, taken = recording()
    _, request = opened(intake, stop=("END",))
    for text in "abc":
        intake.put([(request, token(text))])
    intake.collect()

    assert [text for _, _, text, _ in taken] == ["a", "b", "c"]


def test_steps_of_a_request_that_is_over_are_dropped():
    intake, taken = recording()
    exchange, request = opened(intake)
    intake.put([(request, token("a"))])
    intake.forget(exchange)

    assert intake.collect() == []
    assert taken == []


def test_a_step_that_can_not_be_taken_fails_its_request_and_not_the_engine():
    failed = []
    intake = StepQueue(
        lambda exchange, index, step, now: [][exchange.client_id != "bad"], lambda e, error: failed.append((e, error))
    )
    (one, request), (two, second) = opened(intake, "one"), opened(intake, "two")
    intake.put([(request, token("a")), (second, token("b"))])

    intake.collect()
    intake.catch_up(one)
    intake.catch_up(two)
    assert [exchange for exchange, _ in failed] == [one, two]
    assert all(isinstance(error, EngineError) and "IndexError" in str(error) for _, error in failed)


def test_it_says_when_an_engine_is_too_far_ahead():
    intake, _ = recording()
    _, request = opened(intake)
    for _ in range(MAX_ITERATIONS):
        intake.put([(request, token("a"))])
        assert not intake.is_full
    intake.put([(request, token("a"))])
    assert intake.is_full


def test_however_many_threads_take_them_steps_stay_in_order():
    intake, taken = recording()
    exchanges, requests = zip(*[opened(intake, str(number)) for number in range(8)], strict=True)
    made = threading.Event()

    def collect():
        while not made.is_set() or intake.pending:
            intake.collect()
            for exchange in exchanges:
                intake.catch_up(exchange)

    collectors = [threading.Thread(target=collect) for _ in range(3)]
    for thread in collectors:
        thread.start()
    for number in range(500):
        intake.put([(request, token(f"{number},")) for request in requests])
    made.set()
    for thread in collectors:
        thread.join()

    for request in requests:
        text = "".join(text for name, _, text, _ in taken if name == request.request_id)
        assert text == "".join(f"{number}," for number in range(500))


def test_while_it_waits_for_its_turn_a_stream_is_left_alone():
    intake, taken = recording()
    exchange, request = opened(intake)
    exchange.place = QueueState.RUNNING
    for text in "ab":
        intake.put([(request, token(text))])
        assert intake.collect() == []
    assert taken == []
    intake.catch_up(exchange)

    exchange.place = QueueState.SENDING
    intake.put([(request, token("c"))])
    assert intake.collect() == []
    intake.put([(request, token("d", finish_reason="length"))])
    assert intake.collect() == [exchange]
    assert [text for _, _, text, _ in taken] == ["ab", "cd"]
    intake.catch_up(exchange)
    assert len(taken) == 2


def test_what_waits_for_a_turn_is_bounded():
    intake, taken = recording()
    exchange, request = opened(intake)
    exchange.place = QueueState.RUNNING
    for _ in range(MAX_STEPS):
        assert taken == []
        intake.put([(request, token("a"))])
        intake.collect()

    assert [text for _, _, text, _ in taken] == ["a" * MAX_STEPS]


def test_an_error_stays_a_step_of_its_own():
    error = EngineError("dead")

    assert [(step.text, step.error) for step in joined([token("a"), token("b"), Step(error=error)])] == [
        ("ab", None),
        ("", error),
    ]


steps = st.lists(
    st.builds(
        lambda text, logprob: Step(text=text, token_ids=[7], logprobs=[[Logprob(7, logprob, 1)]], num_input_tokens=3),
        st.text("ab</think> \n", max_size=6),
        st.floats(-5, 0),
    ),
    min_size=1,
    max_size=12,
)


@given(steps, st.data())
def test_joined_steps_say_what_they_say_one_by_one(script, data):
    script = [Step(prompt_logprobs=[None], token_ids=[], text="", num_input_tokens=3), *script]
    script.append(Step(text="!", token_ids=[9], logprobs=[[Logprob(9, 0.0, 1)]], finish_reason="stop", stop_reason=9,
                       num_cached_tokens=2, perf_metrics=PerfMetrics(last_token_time_ns=5)))  # fmt: skip
    cuts = sorted(data.draw(st.sets(st.integers(1, len(script) - 1))))
    groups = [script[start:end] for start, end in zip([0, *cuts], [*cuts, len(script)], strict=True)]

    assert _said([step for group in groups for step in joined(group)]) == _said(script)


def _said(script):
    call = ParsedRequest(
        streaming=True, separate_reasoning=True, returned=frozenset({"output_ids", "logprobs", "prompt_logprobs"})
    )
    sequence = SequenceBuffer(0, call, "<think>")
    for step in script:
        sequence.add(step)
    chunk = sequence.take(counted=True)
    chunk.cumulative_logprob = round(chunk.cumulative_logprob, 6)
    return chunk
