"""What the measurements make of bytes, samples and medians; the programs themselves are started by hand."""

import json

import numpy as np
import pytest
from bench._harness import Target, all_met, verdicts
from bench.abandon_load.leaving import Findings
from bench.abandon_load.leaving import Sample as Left
from bench.abandon_load.stayed import Limits, problems
from bench.abandon_load.stayed import table as left_table
from bench.streams_load.cases import Case
from bench.streams_load.measures import MEASURES, measure
from bench.streams_load.reading import (
    LOST,
    OK,
    REFUSED,
    SHORT,
    WRONG,
    Chunk,
    GrpcDecoder,
    HttpDecoder,
    Record,
    read_stamps,
    sample_of,
)
from tritonclient.grpc.service_pb2 import ModelStreamInferResponse

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
NASTY = "é\r\n0\r\n\r\n"


def chunked(*pieces):
    return HEAD + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def event(**fields):
    return b"data: " + json.dumps(fields, ensure_ascii=False).encode() + b"\n\n"


def grpc_message(text="", error=""):
    message = ModelStreamInferResponse(error_message=error)
    for name, value in (("finish_reason", "None"), ("text_output", text)):
        message.infer_response.outputs.add(name=name, datatype="BYTES", shape=[1])
        raw = value.encode()
        message.infer_response.raw_output_contents.append(len(raw).to_bytes(4, "little") + raw)
    return message.SerializeToString()


def stamps(*numbers):
    return "".join(f" {number:015d}" for number in numbers)


@pytest.fixture
def record(monkeypatch):
    """Of gRPC responses, each with the microsecond it came in."""

    def make(*arrivals, cumulative=False):
        made = Record(GrpcDecoder, cumulative=cumulative)
        for arrived_us, data in arrivals:
            monkeypatch.setattr("bench.streams_load.reading.monotonic_ns", lambda now=arrived_us: now * 1000)
            made.arrived(data)
        return made

    return make


# Bytes


def test_events_cut_anywhere():
    body = chunked(event(text_output="a"), event(text_output=NASTY)[:18], event(text_output=NASTY)[18:])
    cuts = [[body[:at], body[at:]] for at in range(len(body))] + [[body[at : at + 1] for at in range(len(body))]]
    for pieces in cuts:
        decoder = HttpDecoder()
        assert [chunk for piece in pieces for chunk in decoder.feed(piece)] == [Chunk("a"), Chunk(NASTY)]
    # An event is there with its last byte.
    body = chunked(event(text_output="a"))
    decoder = HttpDecoder()
    assert decoder.feed(body[: body.index(b"}")]) == []
    assert decoder.feed(body[body.index(b"}") :]) == [Chunk("a")]


def test_errors_and_grpc_responses():
    assert HttpDecoder().feed(chunked(event(error="no room"))) == [Chunk(error="no room")]
    whole = b'HTTP/1.1 400 Bad Request\r\nContent-Length: 15\r\n\r\n{"error": "no"}'
    assert HttpDecoder().feed(whole) == [Chunk(error='{"error": "no"}')]
    decoder = GrpcDecoder()
    assert decoder.feed(grpc_message("é")) == [Chunk("é")]
    assert decoder.feed(grpc_message(error="no room")) == [Chunk(error="no room")]
    assert decoder.feed(ModelStreamInferResponse().SerializeToString()) == [Chunk()]


# Streams


def test_stamps():
    texts = {stamps(5, 123456789012345): [5, 123456789012345], stamps(5, 7)[:-1]: [5], stamps(5, 7)[:17]: [5], "": []}
    assert {text: read_stamps(text).tolist() for text in texts} == texts
    superscript = "\N{SUPERSCRIPT TWO}"
    wrong = [
        stamps(5, 5),
        stamps(7, 5),
        stamps(5)[1:] + " ",
        stamps(5)[:-1] + "x",
        stamps(5)[:-1] + superscript,
        stamps(5) + "0",  # a cut one without its space
        stamps(5) + " 00 ",  # a cut one with something behind
        stamps(500) + stamps(7)[:-1],  # a cut one out of order
        stamps(5) + f" {superscript}",
    ]
    assert [text for text in wrong if read_stamps(text) is not None] == []


def test_a_stream_with_its_lags(record):
    first, both = stamps(100), stamps(100, 200, 300)
    for cumulative in (False, True):
        last = both if cumulative else both.removeprefix(first)
        arrivals = [(150, grpc_message(first)), (350, grpc_message(last)), (360, grpc_message())]
        sample = sample_of(record(*arrivals, cumulative=cumulative), num_tokens=3, chars_per_token=16)
        assert (sample.outcome, sample.detail) == (OK, "")
        assert sample.chunk_us.tolist() == [150, 350]
        assert sample.chunk_tokens.tolist() == [1, 2]
        assert (sample.stamp_arrival_us - sample.stamp_us).tolist() == [50, 150, 50]
    # Where a token is a byte, a stamp is its first one.
    arrivals = [(110 + 10 * place, grpc_message(letter)) for place, letter in enumerate(stamps(100, 200)[:20])]
    sample = sample_of(record(*arrivals), num_tokens=20, chars_per_token=1)
    assert sample.outcome == OK
    assert sample.chunk_tokens.tolist() == [1] * 20
    assert (sample.stamp_us.tolist(), sample.stamp_arrival_us.tolist()) == ([100], [110])


def test_streams_that_were_not_delivered(record):
    one, no = stamps(1), grpc_message(error="no")
    cases = [
        (SHORT, [one], False, ""),
        (SHORT, [], False, ""),
        (WRONG, [stamps(1, 2, 3)], False, ""),
        (WRONG, [stamps(1, 1)], False, ""),
        (REFUSED, [one, no], False, ""),
        (LOST, [one], False, "reset"),
        # A whole text begins with the one before.
        (OK, [one, stamps(1, 2)], True, ""),
        (OK, [one, one, stamps(1, 2), ""], True, ""),
        (WRONG, [one, stamps(2, 3)], True, ""),
        (WRONG, [one, stamps(2)], True, ""),
        (WRONG, [stamps(1, 2), one], True, ""),
    ]
    for outcome, texts, cumulative, lost in cases:
        arrivals = [(10, text if isinstance(text, bytes) else grpc_message(text)) for text in texts]
        made = record(*arrivals, cumulative=cumulative)
        made.lost = lost
        assert sample_of(made, num_tokens=2, chars_per_token=16).outcome == outcome, (texts, lost)


# Measures


def save(path, opened_us, chunk_us, chunk_tokens, outcome=0, more_stamps_us=()):
    stamps_us = [chunk_us[0] - 3000, *more_stamps_us]
    arrays = {
        "outcome": [outcome],
        "detail": [""],
        "opened_us": [opened_us],
        "ended_us": [chunk_us[-1]],
        "num_chunks": [len(chunk_us)],
        "num_stamps": [len(stamps_us)],
        "chunk_us": chunk_us,
        "chunk_tokens": chunk_tokens,
        "stamp_us": stamps_us,
        "stamp_arrival_us": [us + 3000 for us in stamps_us],
    }
    np.savez(path, **{name: np.array(values) for name, values in arrays.items()})
    return path


def test_measures_of_all_clients_together(tmp_path):
    samples = [
        save(tmp_path / "0.npz", 0, [10_000, 500_000], [1, 99]),
        save(tmp_path / "1.npz", 100_000, [130_000, 200_000, 1_000_000], [1, 1, 98], 1, more_stamps_us=[900_000]),
    ]
    case = Case(name="x", num_streams=2, num_tokens=100, systems=(), rate=200, open_s=0.3)
    found = measure(case, samples, {"stub": 0.2, "server": 0.4, "client": 0.6})
    assert found.keys() == MEASURES
    expected = {
        "total_s": 1.0,
        "tokens_per_s": 200,
        "over_ideal": 1.0 / 0.8,
        "ttft_ms": 20,
        "lag_ms": 3,
        "chunks_min": 2,
        "chunks_median": 2.5,
        "live": 1,
        "stub_cpu": 1000,
        "client_cpu": 3000,
        "undelivered": 1,  # live: 0 and 2
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)


# Medians, orders, the table and targets


def test_targets_with_their_verdicts():
    cases = [
        ({"at_most": 1.15}, False, "ours: ms / raw's is 1.2, target at most 1.15: NOT MET"),
        ({"at_most": 1.2}, True, "ours: ms / raw's is 1.2, target at most 1.2: met"),
        ({"at_least": 1}, True, "ours: ms / raw's is 1.2, target at least 1: met"),
        ({"at_least": 1.3}, False, "ours: ms / raw's is 1.2, target at least 1.3: NOT MET"),
    ]
    beside = [Target(who="ours", measure="ms", versus="raw", **limit) for limit, _, _ in cases]
    measured = {"ours": {"ms": 120}, "raw": {"ms": 100}}
    assert verdicts(beside, measured) == [(line, met) for _, met, line in cases]
    assert [met for _, met in verdicts(beside, {"ours": {"ms": 1}})] == [None] * len(cases)
    assert [met for _, met in verdicts(beside, measured | {"raw": {"ms": 1, "undelivered": 1}})] == [False] * len(cases)
    # One by itself; a measure that is not there meets none.
    alone = [Target(who="ours", measure="ms", at_most=2)]
    assert [verdicts(alone, {"ours": each})[0][1] for each in ({"ms": 2}, {"ms": 3}, {})] == [True, False, False]
    judged = {(True, None): True, (True, False): False, (None,): False, (): False}
    assert {each: all_met([("", met) for met in each]) for each in judged} == judged


# What stayed behind

WHEN = ("before", "warm", "quarter 1", "quarter 2", "quarter 3", "quarter 4", "closed")
LEVEL = {
    "descriptors": 8,
    "threads": 2,
    "under_way": 1,
    "objects": 100,
    "left": 0,
    "traced_kib": 100.0,
    "rss_mib": 50.0,
}


def found(unexpected=(), **changes):
    """`changes` by when."""
    samples = [Left(when=when, **LEVEL | changes.get(when.replace(" ", "_"), {})) for when in WHEN]
    return Findings(samples=samples, outcomes={"finish: length": 3}, unexpected=list(unexpected))


def test_each_thing_that_stays_is_a_problem():
    limits = Limits(idle_connections=64)
    assert problems(found(warm={"descriptors": 72}, quarter_4={"descriptors": 70}), limits) == []
    for changes in (
        {"quarter_2": {"under_way": 2}},
        {"warm": {"descriptors": 8 + 64 + 9}},
        {"closed": {"descriptors": 9}},
        {"quarter_3": {"left": 1}},
        {"quarter_4": {"threads": 5}},
        {"closed": {"threads": 5}},
        {"quarter_4": {"traced_kib": 700.0}},
        {"quarter_4": {"rss_mib": 60.0}},
        {"unexpected": ["drop: ValueError()"]},
    ):
        assert len(problems(found(**changes), limits)) == 1, changes
    lines = left_table(found()).splitlines()
    assert len(lines) == 1 + len(WHEN) + 1
    assert lines[-1] == "finish: length 3"
