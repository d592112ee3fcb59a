"""The sender: who goes next, what leaves together, what waits."""

import itertools
import math
import threading
import time
import weakref

import pytest

from deepseek_backend.answer.active_request import ActiveRequest
from deepseek_backend.delivery import sender
from deepseek_backend.delivery.sender import NUM_THREADS, URGENT_IN_A_ROW, Sender
from deepseek_backend.engines.base import Step
from deepseek_backend.engines.generate_request import GenerateRequest
from deepseek_backend.errors import EngineError
from deepseek_backend.request.parsed_request import ParsedRequest, Prompt
from support.fakes import ListReply


class NoSource:
    """Exchanges here have no inflows: their steps are added by the test."""

    pending = False

    def collect(self):
        return []

    def catch_up(self, exchange):
        """There is nothing."""


class Line:
    """A sender without threads, and streams that note the order in which they are served."""

    def __init__(self):
        self.served = []
        self.closed = []
        self.broken = []
        self.sender = Sender(NoSource(), on_closed=self.closed.append, on_broken=self.broken.append)

    def open(self, name, *, started=False, prompts=1, **call):
        """A stream; with `started` its first text has been sent."""
        reply = NotingReply(name, self.served)
        exchange = ActiveRequest(reply, client_id=name)
        asked = ParsedRequest(prompts=(Prompt(text="p"),) * prompts, streaming=True, **call)
        exchange.begin(
            asked,
            [
                GenerateRequest(request_id=f"{name}-{number}", prompt="p", sampling=asked.sampling, max_tokens=9)
                for number in range(prompts)
            ],
        )
        if started:
            self.give(exchange, "0")
            self.serve_all()
            self.served.clear()
        return exchange

    def give(self, exchange, text, *, now=0.0, index=0, **step):
        exchange.add(index, Step(text=text, token_ids=[1], **step), now)
        self.sender.notify([exchange])

    def serve_all(self):
        while self.sender.deliver_next():
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
    for exchange, text in ((two, "a"), (one, "b"), (three, "c"), (two, "d"), (one, "e")):
        line.give(exchange, text)
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
    assert [exchange.client_id for exchange in line.closed] == ["ending"]


def test_what_is_under_way_gets_its_turn_among_any_number_of_new_streams(line):
    under_way = line.open("under way", started=True)
    line.give(under_way, "a")
    for number in range(3 * URGENT_IN_A_ROW):
        line.give(line.open(f"new {number}"), "b")
    line.serve_all()

    assert names(line).index("under way") <= URGENT_IN_A_ROW


def test_past_the_allowance_streams_under_way_wait_and_new_ones_do_not(line, monkeypatch):
    streams_under_way = [line.open(f"{number}", started=True) for number in range(3)]
    monkeypatch.setattr(sender, "RESPONSES_PER_S", 1e-6)
    for exchange in streams_under_way:
        line.give(exchange, "a")
    line.serve_all()
    assert names(line) == ["0"]

    line.give(line.open("new"), "b")
    line.give(streams_under_way[1], "c")
    line.give(streams_under_way[2], "d", finish_reason="stop")
    line.serve_all()
    assert line.served[1:] == [("new", "b"), ("2", "ad")]

    monkeypatch.undo()
    line.sender.stop()
    line.serve_all()
    assert line.served[3:] == [("1", "ac")]


def test_few_chunks_are_sent_where_few_are_asked_for(line):
    exchange = line.open("few", stream_interval=3)
    for text in "abcdefgh":
        line.give(exchange, text)
        line.serve_all()
    line.give(exchange, "i", finish_reason="length")
    line.serve_all()

    assert [text for _, text in line.served] == ["a", "bcd", "efg", "hi"]


def test_an_answer_that_is_over_waits_for_none_of_the_others(line):
    exchange = line.open("two", prompts=2, stream_interval=1000)
    for index in range(2):
        line.give(exchange, "a", index=index)
        line.serve_all()
    line.give(exchange, "b", index=1)
    line.serve_all()
    assert [text for _, text in line.served] == ["a"]
    line.give(exchange, "END", finish_reason="stop")
    line.serve_all()

    assert [text for _, text in line.served] == ["a", ["END", "ab"]]


def test_new_streams_take_nothing_from_what_those_under_way_may_send(line, monkeypatch):
    under_way = line.open("under way", started=True)
    monkeypatch.setattr(sender, "RESPONSES_PER_S", 1e-6)
    for number in range(3):
        line.give(line.open(f"new {number}"), "a")
        line.serve_all()
    line.give(under_way, "b")
    line.serve_all()

    assert line.served[-1] == ("under way", "b")


def test_a_stream_that_is_over_is_not_kept_for_as_long_as_it_might_have_waited(line):
    exchange = line.open("over", stream_interval=2, stream_interval_ms=60_000)
    for text in "abcde":
        line.give(exchange, text, now=time.monotonic())
        line.serve_all()
    line.give(exchange, "f", finish_reason="stop")
    line.serve_all()
    assert exchange.closed
    assert len(line.sender._held) <= 1

    gone = weakref.ref(exchange)
    line.closed.clear()
    del exchange
    assert gone() is None


def test_text_waits_no_longer_than_it_may(line, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(sender.time, "monotonic", clock)
    exchange = line.open("patient", stream_interval_ms=200)
    for text in "abcd":
        line.give(exchange, text, now=clock())
        clock.now += 0.06
        line.serve_all()
    assert [text for _, text in line.served] == ["a"]

    clock.now += 0.03
    line.serve_all()
    assert [text for _, text in line.served] == ["a", "bcd"]


def test_of_two_bounds_the_first_that_is_reached_counts(line, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(sender.time, "monotonic", clock)
    exchange = line.open("both", stream_interval=2, stream_interval_ms=200)
    for text in "abcd":
        line.give(exchange, text, now=clock())
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
    assert line.broken == [broken]


def test_what_is_held_back_or_queued_is_sent_before_the_threads_end(line):
    held = line.open("held", started=True, stream_interval_ms=600_000)
    line.give(held, "a", now=time.monotonic())
    line.give(line.open("new"), "b")
    line.sender.start()
    line.sender.stop()

    assert sorted(line.served) == [("held", "a"), ("new", "b")]


def test_many_threads_keep_the_order_of_every_stream(line):
    exchanges = [line.open(str(number)) for number in range(20)]
    line.sender.start()

    def produce(some):
        for token in range(300):
            for exchange in some:
                line.give(exchange, f"{token},", finish_reason="length" if token == 299 else None)

    producers = [threading.Thread(target=produce, args=(exchanges[n::2],)) for n in range(2)]
    for thread in producers:
        thread.start()
    for thread in producers:
        thread.join()
    line.sender.stop()

    expected = "".join(f"{token}," for token in range(300))
    for name, served in itertools.groupby(sorted(line.served, key=lambda entry: entry[0]), key=lambda entry: entry[0]):
        assert "".join(text for _, text in served) == expected, name
    assert sorted(exchange.client_id for exchange in line.closed) == sorted(str(number) for number in range(20))
    assert NUM_THREADS > 1


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def test_without_a_bound_nothing_is_due(line):
    assert line.open("any").due_s == math.inf
