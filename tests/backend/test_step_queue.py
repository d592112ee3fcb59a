"""The step queue: steps are taken once, in order, and joined only where that changes nothing."""

import threading

from hypothesis import given
from hypothesis import strategies as st

from deepseek_backend.answer.active_request import ActiveRequest
from deepseek_backend.answer.sequence_buffer import SequenceBuffer
from deepseek_backend.delivery.pending_steps import joined
from deepseek_backend.delivery.queue_entry import MAX_STEPS, QueueEntry, QueueState
from deepseek_backend.delivery.step_queue import MAX_ITERATIONS, StepQueue
from deepseek_backend.engines.base import Logprob, PerfMetrics, Step
from deepseek_backend.engines.generate_request import GenerateRequest, SamplingParams
from deepseek_backend.errors import EngineError
from deepseek_backend.request.parsed_request import ParsedRequest, Prompt


def opened(step_queue, name="r", *, begun=True, **sampling):
    """A stream; `begun`: its first step has been taken."""
    active = ActiveRequest(None, client_id=name)
    parsed = ParsedRequest(prompts=(Prompt(text="p"),), streaming=True, sampling=SamplingParams(**sampling))
    active.begin(parsed, [GenerateRequest(request_id=name, prompt="p", sampling=parsed.sampling, max_tokens=9)])
    entry = QueueEntry(active)
    step_queue.expect(entry)
    entry.pending[0].taken_s, entry.has_tokens = float(begun), begun
    return entry, active.requests[0]


def recording(**kwargs):
    taken = []

    def take(entry, pending, step, at_s):
        taken.append((entry.active.client_id, pending.index, step.text, len(step.token_ids)))
        return True

    return StepQueue(take, fail=kwargs.get("fail")), taken


def timed():
    """A step queue, and the text and time of each step it gives."""
    times = []

    def take(entry, pending, step, at_s):
        times.append((step.text, at_s))
        return True

    return StepQueue(take, fail=None), times


def token(text, **kwargs):
    return Step(text=text, token_ids=[1], **kwargs)


def test_the_iterations_of_a_sequence_are_taken_as_one_step():
    step_queue, taken = recording()
    (one, first), (two, second) = opened(step_queue, "one"), opened(step_queue, "two")
    for text in "abc":
        step_queue.put([(first, token(text)), (second, token(text.upper()))])

    assert step_queue.collect() == [one, two]
    assert taken == []
    step_queue.catch_up(one)
    step_queue.catch_up(two)
    assert taken == [("one", 0, "abc", 3), ("two", 0, "ABC", 3)]
    assert not step_queue.has_uncollected
    assert step_queue.collect() == []


def test_the_first_step_stays_by_itself_for_its_time_is_measured():
    step_queue, times = timed()
    _, request = opened(step_queue, begun=False)
    for text in "abc":
        step_queue.put([(request, token(text))])
    step_queue.collect()
    step_queue.put([(request, token("d", finish_reason="length"))])
    step_queue.collect()

    assert [text for text, _ in times] == ["a", "bc", "d"]
    assert times == sorted(times, key=lambda entry: entry[1])
    assert times[0][1] < times[1][1]


def test_steps_that_are_looked_at_together_share_the_time_between_them():
    step_queue, times = timed()
    entry, request = opened(step_queue, begun=False, stop=("END",))
    for text in "abcde":
        step_queue.put([(request, token(text))])
    (pending,) = entry.pending
    step_queue._sort_in()
    pending.first_s, pending.last_s = 10.0, 12.0
    step_queue.catch_up(entry)

    assert times == [("a", 10.0), ("b", 10.5), ("c", 11.0), ("d", 11.5), ("e", 12.0)]


def test_with_a_stop_string_every_step_is_taken_by_itself():
    step_queue, taken = recording()
    _, request = opened(step_queue, stop=("END",))
    for text in "abc":
        step_queue.put([(request, token(text))])
    step_queue.collect()

    assert [text for _, _, text, _ in taken] == ["a", "b", "c"]


def test_steps_of_a_request_that_is_over_are_dropped():
    step_queue, taken = recording()
    entry, request = opened(step_queue)
    step_queue.put([(request, token("a"))])
    step_queue.forget(entry)

    assert step_queue.collect() == []
    assert taken == []


def test_a_step_that_can_not_be_taken_fails_its_request_and_not_the_engine():
    failed = []
    step_queue = StepQueue(lambda entry, pending, step, at_s: [][1], lambda entry, error: failed.append((entry, error)))
    (one, request), (two, second) = opened(step_queue, "one"), opened(step_queue, "two")
    step_queue.put([(request, token("a")), (second, token("b"))])

    step_queue.collect()
    step_queue.catch_up(one)
    step_queue.catch_up(two)
    assert [entry for entry, _ in failed] == [one, two]
    assert all(isinstance(error, EngineError) and "IndexError" in str(error) for _, error in failed)


def test_it_says_when_an_engine_is_too_far_ahead():
    step_queue, _ = recording()
    _, request = opened(step_queue)
    for _ in range(MAX_ITERATIONS):
        step_queue.put([(request, token("a"))])
        assert not step_queue.is_full
    step_queue.put([(request, token("a"))])
    assert step_queue.is_full


def test_however_many_threads_take_them_steps_stay_in_order():
    step_queue, taken = recording()
    entries, requests = zip(*[opened(step_queue, str(number)) for number in range(8)], strict=True)
    made = threading.Event()

    def collect():
        while not made.is_set() or step_queue.has_uncollected:
            step_queue.collect()
            for entry in entries:
                step_queue.catch_up(entry)

    collectors = [threading.Thread(target=collect) for _ in range(3)]
    for thread in collectors:
        thread.start()
    for number in range(500):
        step_queue.put([(request, token(f"{number},")) for request in requests])
    made.set()
    for thread in collectors:
        thread.join()

    for request in requests:
        text = "".join(text for name, _, text, _ in taken if name == request.request_id)
        assert text == "".join(f"{number}," for number in range(500))


def test_while_it_waits_for_its_turn_a_stream_is_left_alone():
    step_queue, taken = recording()
    entry, request = opened(step_queue)
    entry.queue_state = QueueState.RUNNING
    for text in "ab":
        step_queue.put([(request, token(text))])
        assert step_queue.collect() == []
    assert taken == []
    step_queue.catch_up(entry)

    entry.queue_state = QueueState.SENDING
    step_queue.put([(request, token("c"))])
    assert step_queue.collect() == []
    step_queue.put([(request, token("d", finish_reason="length"))])
    assert step_queue.collect() == [entry]
    assert [text for _, _, text, _ in taken] == ["ab", "cd"]
    step_queue.catch_up(entry)
    assert len(taken) == 2


def test_a_step_that_comes_while_others_are_taken_is_looked_at():
    found = []

    def take(entry, pending, step, at_s):
        entry.has_tokens = True
        if step.text == "a":
            step_queue.put([(request, token("b"))])
            found.extend(step_queue.collect())
        return False

    step_queue = StepQueue(take, fail=None)
    entry, request = opened(step_queue, begun=False)
    step_queue.put([(request, token("a"))])
    assert step_queue.collect() == []
    assert found == [entry]


def test_an_idle_stream_is_found_once_and_again_after_its_turn():
    step_queue, taken = recording()
    entry, request = opened(step_queue)
    for text, expected in (("a", [entry]), ("b", [])):
        step_queue.put([(request, token(text))])
        assert step_queue.collect() == expected
    step_queue.catch_up(entry)
    step_queue.put([(request, token("c"))])
    assert step_queue.collect() == [entry]
    assert [text for _, _, text, _ in taken] == ["ab"]


def test_what_waits_for_a_turn_is_bounded():
    step_queue, taken = recording()
    entry, request = opened(step_queue)
    entry.queue_state = QueueState.RUNNING
    for _ in range(MAX_STEPS):
        assert taken == []
        step_queue.put([(request, token("a"))])
        step_queue.collect()

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
    parsed = ParsedRequest(
        streaming=True, separate_reasoning=True, returned=frozenset({"output_ids", "logprobs", "prompt_logprobs"})
    )
    sequence = SequenceBuffer(0, parsed, "<think>")
    for step in script:
        sequence.add(step)
    chunk = sequence.take(counted=True)
    chunk.cumulative_logprob = round(chunk.cumulative_logprob, 6)
    return chunk
