"""Delivery: which request is served next, what leaves together, what waits."""

import itertools
import math
import threading
import time
import weakref

import pytest

from deepseek_backend.answer.active_request import ActiveRequest
from deepseek_backend.delivery import send_queue
from deepseek_backend.delivery.delivery import NUM_THREADS, Delivery
from deepseek_backend.delivery.queue_entry import QueueEntry
from deepseek_backend.delivery.send_queue import URGENT_IN_A_ROW
from deepseek_backend.engines.base import Step
from deepseek_backend.engines.generate_request import GenerateRequest
from deepseek_backend.errors import EngineError
from deepseek_backend.metrics.backend_metrics import BackendMetrics
from deepseek_backend.request.parsed_request import ParsedRequest, Prompt
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
        active.begin(
            parsed,
            [
                GenerateRequest(request_id=f"{name}-{number}", prompt="p", sampling=parsed.sampling, max_tokens=9)
                for number in range(prompts)
            ],
        )
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


def test_text_waits_no_longer_than_it_may(line, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    active = line.open("patient", stream_interval_ms=200)
    for text in "abcd":
        line.give(active, text)
        clock.now += 0.06
        line.serve_all()
    assert [text for _, text in line.served] == ["a"]

    clock.now += 0.03
    line.serve_all()
    assert [text for _, text in line.served] == ["a", "bcd"]


def test_of_two_bounds_the_first_that_is_reached_counts(line, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    active = line.open("both", stream_interval=2, stream_interval_ms=200)
    for text in "abcd":
        line.give(active, text)
        line.serve_all()
    clock.now += 0.3
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


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def test_without_a_bound_nothing_is_due(line):
    assert QueueEntry(line.open("any")).due_s == math.inf
