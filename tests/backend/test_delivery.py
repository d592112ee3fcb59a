"""Delivery: steps are taken once and in order, which request is served next, what leaves together, what waits."""

import itertools
import threading
import time
import weakref
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_backend import delivery, send_queue
from deepseek_backend.active_request import ActiveRequest
from deepseek_backend.backend_metrics import BackendMetrics
from deepseek_backend.delivery import MAX_ITERATIONS, NUM_THREADS, Delivery, StepQueue
from deepseek_backend.engines.base import Logprob, PerfMetrics, Step
from deepseek_backend.engines.generate_request import SamplingParams
from deepseek_backend.errors import EngineError
from deepseek_backend.messages import Prompt
from deepseek_backend.parsing import ParsedRequest
from deepseek_backend.send_queue import MAX_STEPS, URGENT_IN_A_ROW, QueueEntry, QueueState, joined
from deepseek_backend.sequence_buffer import SequenceBuffer
from support.engine_driver import make_request
from support.fakes import ListReply


class Line:
    """A delivery without threads, and streams that note the order in which they are served."""

    def __init__(self):
        self.served = []
        self.ended = []
        self.failed = []
        self.delivery = Delivery(self, BackendMetrics())

    def abort(self, requests, *, cause):
        """No test here looks at this."""

    def fail(self, active, error):
        self.failed.append(active)

    def closed(self, active):
        self.ended.append(active)

    def open(self, name, *, started=False, prompts=1, **parsed):
        """A stream; with `started` its first text has been sent."""
        reply = NotingReply(name, self.served)
        active = ActiveRequest(reply, client_id=name)
        parsed = ParsedRequest(prompts=(Prompt(text="p"),) * prompts, streaming=True, **parsed)
        active.begin(parsed, [make_request(f"{name}-{number}", max_tokens=9) for number in range(prompts)])
        self.delivery.put_request(active)
        if started:
            self.give(active, "0")
            self.serve_all()
            self.served.clear()
        return active

    def give(self, active, text, *, index=0, **step):
        self.delivery.put_steps([(active.requests[index], Step(text=text, token_ids=[1], **step))])
        self.delivery.flush(active)

    def serve_all(self):
        while self.delivery.serve_next():
            pass


class NotingReply(ListReply):
    def __init__(self, name, served):
        super().__init__()
        self._name = name
        self._served = served

    def send(self, outputs, *, final):
        super().send(outputs, final=final)
        self._served.append((self._name, self.sent[-1][0]["text_output"]))


@pytest.fixture
def line():
    return Line()


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock


def names(line):
    return [name for name, _ in line.served]


def test_whose_text_has_waited_longest_goes_next_and_takes_all_of_it_along(line):
    one, two, three = (line.open(name, started=True) for name in ("one", "two", "three"))
    for active, text in ((two, "a"), (one, "b"), (three, "c"), (two, "d"), (one, "e")):
        line.give(active, text)
    line.serve_all()
    assert line.served == [("two", "ad"), ("one", "be"), ("three", "c")]


def test_first_texts_and_ends_go_before_what_is_under_way(line):
    under_way, ending = line.open("under way", started=True), line.open("ending", started=True)
    line.give(under_way, "a")
    line.give(ending, "b")
    line.give(line.open("new"), "c")
    line.give(ending, "d", finish_reason="length")
    line.serve_all()
    assert line.served == [("new", "c"), ("ending", "bd"), ("under way", "a")]
    assert [active.client_id for active in line.ended] == ["ending"]


def test_what_is_under_way_gets_its_turn_among_any_number_of_new_streams(line):
    under_way = line.open("under way", started=True)
    line.give(under_way, "a")
    for number in range(3 * URGENT_IN_A_ROW):
        line.give(line.open(f"new {number}"), "b")
    line.serve_all()
    assert names(line).index("under way") <= URGENT_IN_A_ROW


def test_past_the_allowance_streams_under_way_wait_and_new_ones_do_not(line, monkeypatch):
    streams_under_way = [line.open(f"{number}", started=True) for number in range(3)]
    monkeypatch.setattr(send_queue, "RESPONSES_PER_S", 1e-6)
    for active in streams_under_way:
        line.give(active, "a")
    line.serve_all()
    assert names(line) == ["0"]
    line.give(line.open("new"), "b")
    line.give(streams_under_way[1], "c")
    line.give(streams_under_way[2], "d", finish_reason="stop")
    line.serve_all()
    assert line.served[1:] == [("new", "b"), ("2", "ad")]
    monkeypatch.undo()
    line.delivery.stop()
    line.serve_all()
    assert line.served[3:] == [("1", "ac")]


def test_few_chunks_are_sent_where_few_are_asked_for(line):
    active = line.open("few", stream_interval=3)
    for text in "abcdefgh":
        line.give(active, text)
        line.serve_all()
    line.give(active, "i", finish_reason="length")
    line.serve_all()
    assert [text for _, text in line.served] == ["a", "bcd", "efg", "hi"]


def test_an_answer_that_is_over_waits_for_none_of_the_others(line):
    active = line.open("two", prompts=2, stream_interval=1000)
    for index in range(2):
        line.give(active, "a", index=index)
        line.serve_all()
    line.give(active, "b", index=1)
    line.serve_all()
    assert [text for _, text in line.served] == ["a"]
    line.give(active, "END", finish_reason="stop")
    line.serve_all()
    assert [text for _, text in line.served] == ["a", ["END", "ab"]]


@pytest.mark.parametrize("being_served", [False, True])
def test_a_whole_answer_leaves_from_the_engines_thread_unless_another_is_at_it(line, being_served):
    active = line.open("a")
    if being_served:
        line.delivery._entries[active].queue_state = QueueState.SENDING
    whole = Step(text="all", token_ids=[1], finish_reason="length", generation_s=0.0)
    line.delivery.put_steps([(active.requests[0], whole)])
    assert line.served == ([] if being_served else [("a", "all")])
    if being_served:
        line.delivery._entries[active].queue_state = QueueState.IDLE
        line.serve_all()
        assert line.served == [("a", "all")]
    assert line.ended == [active]


def test_tokens_of_few_streams_leave_from_the_engines_thread_where_nothing_waits(line, monkeypatch):
    monkeypatch.setattr(delivery, "SELDOM_S", 0)
    streams = [line.open(name) for name in "abc"]
    line.delivery._num_resting = NUM_THREADS

    def put(text, streams):
        line.delivery.put_steps([(each.requests[0], Step(text=text, token_ids=[1])) for each in streams])
        return "".join(name + sent for name, sent in line.served)

    assert put("0", streams[:2]) == "a0b0"
    assert put("1", streams) == "a0b0"
    assert put("2", streams[:2]) == "a0b0"
    line.serve_all()
    assert sorted(line.served[2:]) == [("a", "12"), ("b", "12"), ("c", "1")]


def test_new_streams_take_nothing_from_what_those_under_way_may_send(line, monkeypatch):
    under_way = line.open("under way", started=True)
    monkeypatch.setattr(send_queue, "RESPONSES_PER_S", 1e-6)
    for number in range(3):
        line.give(line.open(f"new {number}"), "a")
        line.serve_all()
    line.give(under_way, "b")
    line.serve_all()
    assert line.served[-1] == ("under way", "b")


def test_a_stream_that_is_over_is_not_kept_for_as_long_as_it_might_have_waited(line):
    active = line.open("over", stream_interval=2, stream_interval_ms=60_000)
    for text in "abcde":
        line.give(active, text)
        line.serve_all()
    line.give(active, "f", finish_reason="stop")
    line.serve_all()
    assert active.closed
    assert len(line.delivery._queue._held) <= 1
    gone = weakref.ref(active)
    line.ended.clear()
    del active
    assert gone() is None


def test_text_waits_no_longer_than_it_may(line, clock):
    active = line.open("patient", stream_interval_ms=200)
    for text in "abcd":
        line.give(active, text)
        clock.now += 0.06
        line.serve_all()
    assert [text for _, text in line.served] == ["a"]
    clock.now += 0.03
    line.serve_all()
    assert [text for _, text in line.served] == ["a", "bcd"]


def test_of_two_bounds_the_first_that_is_reached_counts(line, clock):
    active = line.open("both", stream_interval=2, stream_interval_ms=200)
    for text, seconds in zip("abcd", (0, 0, 0, 0.3), strict=True):
        line.give(active, text)
        line.serve_all()
        clock.now += seconds
    line.serve_all()
    assert [text for _, text in line.served] == ["a", "bc", "d"]


def test_a_late_answer_comes_in_pieces_and_ends_once(line):
    text = "".join(f"{number:5}" for number in range(200))
    late = line.open("late")
    other = line.open("other", started=True)
    line.give(late, text, finish_reason="length")
    line.give(other, "x")
    line.serve_all()
    assert names(line) == ["late", "other", *["late"] * 4]
    assert late.closed
    assert "".join(text for name, text in line.served if name == "late") == text


def test_a_response_that_fails_ends_its_own_stream_only(line):
    broken, other = line.open("broken"), line.open("other")
    broken._reply.failures = 1
    line.give(broken, "a")
    line.give(other, "b")
    line.serve_all()
    assert line.served == [("other", "b")]
    assert [error.code for error in broken._reply.errors] == [EngineError("x").code]
    assert line.failed == [broken]


def test_what_is_held_back_or_queued_is_sent_before_the_threads_end(line):
    held = line.open("held", started=True, stream_interval_ms=600_000)
    line.give(held, "a")
    line.give(line.open("new"), "b")
    line.delivery.start()
    line.delivery.stop()
    assert sorted(line.served) == [("held", "a"), ("new", "b")]


@pytest.mark.slow
def test_many_threads_keep_the_order_of_every_stream(line):
    requests = [line.open(str(number)) for number in range(20)]
    line.delivery.start()

    def produce(some):
        for token in range(300):
            for active in some:
                line.give(active, f"{token},", finish_reason="length" if token == 299 else None)

    producers = [threading.Thread(target=produce, args=(requests[n::2],)) for n in range(2)]
    for thread in producers:
        thread.start()
    for thread in producers:
        thread.join()
    line.delivery.stop()

    expected = "".join(f"{token}," for token in range(300))
    for name, served in itertools.groupby(sorted(line.served, key=lambda entry: entry[0]), key=lambda entry: entry[0]):
        assert "".join(text for _, text in served) == expected, name
    assert sorted(active.client_id for active in line.ended) == sorted(str(number) for number in range(20))
    assert NUM_THREADS > 1


def opened(step_queue, name="r", *, begun=True, **sampling):
    """A stream; `begun`: its first step has been taken."""
    active = ActiveRequest(None, client_id=name)
    parsed = ParsedRequest(prompts=(Prompt(text="p"),), streaming=True, sampling=SamplingParams(**sampling))
    active.begin(parsed, [make_request(name, max_tokens=9)])
    entry = QueueEntry(active)
    step_queue.expect(entry)
    entry.pending[0].taken_s, entry.has_tokens = float(begun), begun
    return entry, active.requests[0]


class Taken(NamedTuple):
    name: str
    text: str
    num_tokens: int
    at_s: float


def recording():
    """A step queue, and what it takes of each step."""
    taken = []

    def take(entry, pending, step, at_s):
        taken.append(Taken(entry.active.client_id, step.text, len(step.token_ids), at_s))
        return True

    return StepQueue(take, fail=None), taken


def texts(taken):
    return [each.text for each in taken]


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
    assert [each[:3] for each in taken] == [("one", "abc", 3), ("two", "ABC", 3)]
    assert not step_queue.has_uncollected
    assert step_queue.collect() == []


def test_the_first_step_stays_by_itself_for_its_time_is_measured():
    step_queue, taken = recording()
    _, request = opened(step_queue, begun=False)
    for text in "abc":
        step_queue.put([(request, token(text))])
    step_queue.collect()
    step_queue.put([(request, token("d", finish_reason="length"))])
    step_queue.collect()
    assert texts(taken) == ["a", "bc", "d"]
    assert taken[0].at_s < taken[1].at_s <= taken[2].at_s


def test_steps_that_are_looked_at_together_share_the_time_between_them():
    step_queue, taken = recording()
    entry, request = opened(step_queue, begun=False, stop=("END",))
    for text in "abcde":
        step_queue.put([(request, token(text))])
    (pending,) = entry.pending
    step_queue._sort_in()
    pending.first_s, pending.last_s = 10.0, 12.0
    step_queue.catch_up(entry)
    assert [(each.text, each.at_s) for each in taken] == [
        ("a", 10.0),
        ("b", 10.5),
        ("c", 11.0),
        ("d", 11.5),
        ("e", 12.0),
    ]


def test_some_steps_are_taken_by_themselves():
    step_queue, taken = recording()
    _, request = opened(step_queue, stop=("END",))
    for text in "abc":
        step_queue.put([(request, token(text))])
    step_queue.collect()
    assert texts(taken) == ["a", "b", "c"]
    error = EngineError("dead")
    steps = joined([token("a"), token("b"), Step(error=error)])
    assert [(step.text, step.error) for step in steps] == [("ab", None), ("", error)]


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


def test_an_idle_stream_is_found_once_and_a_waiting_one_left_alone():
    step_queue, taken = recording()
    entry, request = opened(step_queue)
    for text, expected in (("a", [entry]), ("b", [])):
        step_queue.put([(request, token(text))])
        assert step_queue.collect() == expected
    step_queue.catch_up(entry)
    step_queue.put([(request, token("c"))])
    assert step_queue.collect() == [entry]
    assert texts(taken) == ["ab"]
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
    assert texts(taken) == ["ab", "cd"]
    step_queue.catch_up(entry)
    assert len(taken) == 2


def test_what_waits_is_bounded_and_what_is_over_dropped():
    step_queue, taken = recording()
    entry, request = opened(step_queue)
    entry.queue_state = QueueState.RUNNING
    for _ in range(MAX_STEPS):
        assert taken == []
        step_queue.put([(request, token("a"))])
        step_queue.collect()
    assert texts(taken) == ["a" * MAX_STEPS]
    step_queue, taken = recording()
    entry, request = opened(step_queue)
    step_queue.put([(request, token("a"))])
    step_queue.forget(entry)
    assert step_queue.collect() == []
    assert taken == []


steps = st.lists(
    st.builds(
        lambda text, logprob: Step(text=text, token_ids=[7], logprobs=[[Logprob(7, logprob, 1)]], num_input_tokens=3),
        st.text("ab</think> \n", max_size=6),
        st.floats(-5, 0),
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.slow
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
