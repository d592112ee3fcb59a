import json
import math
import sys

import numpy as np
import pytest
from bench import streams
from bench.streams_load import serving, table
from bench.streams_load.cases import CASES, ENGINE, Case, Target
from bench.streams_load.driving import run
from bench.streams_load.measures import Measures, Used, measure, medians
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
    is_cumulative,
    read_stamps,
    sample_of,
)
from bench.streams_load.serving import SYSTEMS
from tritonclient.grpc.service_pb2 import ModelStreamInferResponse

from deepseek_backend.engines.base import Step
from deepseek_backend.errors import EngineError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


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


def record(*arrivals, cumulative=False, monkeypatch):
    """Of gRPC responses, each with the microsecond it came in."""
    made = Record(GrpcDecoder, cumulative=cumulative)
    for arrived_us, data in arrivals:
        monkeypatch.setattr("bench.streams_load.reading.monotonic_ns", lambda now=arrived_us: now * 1000)
        made.arrived(data)
    return made


# Bytes

NASTY = "é\r\n0\r\n\r\n"
BODY = chunked(event(text_output="a"), event(text_output=NASTY)[:18], event(text_output=NASTY)[18:])


@pytest.mark.parametrize("at", range(len(BODY)))
def test_events_cut_at_any_byte(at):
    decoder = HttpDecoder()
    chunks = decoder.feed(BODY[:at]) + decoder.feed(BODY[at:])
    assert chunks == [Chunk("a"), Chunk(NASTY)]


def test_events_byte_by_byte():
    decoder = HttpDecoder()
    assert [chunk.text for at in range(len(BODY)) for chunk in decoder.feed(BODY[at : at + 1])] == ["a", NASTY]


def test_an_event_is_there_with_its_last_byte():
    decoder = HttpDecoder()
    body = chunked(event(text_output="a"))
    assert decoder.feed(body[: body.index(b"}")]) == []
    assert decoder.feed(body[body.index(b"}") :]) == [Chunk("a")]


def test_an_event_may_be_an_error():
    assert HttpDecoder().feed(chunked(event(error="no room"))) == [Chunk(error="no room")]


def test_an_answer_that_is_no_stream_is_an_error():
    head = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 15\r\n\r\n"
    assert HttpDecoder().feed(head + b'{"error": "no"}') == [Chunk(error='{"error": "no"}')]


def test_grpc_responses():
    decoder = GrpcDecoder()
    assert decoder.feed(grpc_message("é")) == [Chunk("é")]
    assert decoder.feed(grpc_message(error="no room")) == [Chunk(error="no room")]
    assert decoder.feed(ModelStreamInferResponse().SerializeToString()) == [Chunk()]


@pytest.mark.parametrize(
    ("texts", "cumulative"),
    [
        pytest.param(["a", "ab", "abc"], True, id="cumulative"),
        pytest.param([" 1", " 2", " 3"], False, id="increments"),
        pytest.param(["abc"], False, id="one"),
        pytest.param([], False, id="none"),
    ],
)
def test_whether_texts_are_cumulative(texts, cumulative):
    assert is_cumulative(texts) is cumulative


# Streams


def test_stamps():
    assert read_stamps(stamps(5, 123456789012345)).tolist() == [5, 123456789012345]
    assert read_stamps(stamps(5, 7)[:-1]).tolist() == [5]
    assert read_stamps(stamps(5, 7)[:17]).tolist() == [5]
    assert read_stamps("").tolist() == []


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(stamps(5, 5), id="twice"),
        pytest.param(stamps(7, 5), id="out of order"),
        pytest.param(stamps(5)[1:] + " ", id="moved"),
        pytest.param(stamps(5)[:-1] + "x", id="no digit"),
        pytest.param(stamps(5)[:-1] + "\N{SUPERSCRIPT TWO}", id="no ASCII"),
        pytest.param(stamps(5) + "0", id="a cut one without its space"),
        pytest.param(stamps(5) + " 00 ", id="a cut one with something behind"),
        pytest.param(stamps(500) + stamps(7)[:-1], id="a cut one out of order"),
        pytest.param(stamps(5) + " \N{SUPERSCRIPT TWO}", id="a cut one that is no ASCII"),
    ],
)
def test_texts_that_are_no_stamps(text):
    assert read_stamps(text) is None


@pytest.mark.parametrize("cumulative", [False, True])
def test_a_stream_with_its_lags(cumulative, monkeypatch):
    first, both = stamps(100), stamps(100, 200, 300)
    responses = (first, both) if cumulative else (first, both.removeprefix(first))
    arrivals = [(150, grpc_message(responses[0])), (350, grpc_message(responses[1])), (360, grpc_message())]
    sample = sample_of(
        record(*arrivals, cumulative=cumulative, monkeypatch=monkeypatch), num_tokens=3, chars_per_token=16
    )
    assert (sample.outcome, sample.detail) == (OK, "")
    assert sample.chunk_us.tolist() == [150, 350]
    assert sample.chunk_tokens.tolist() == [1, 2]
    assert (sample.stamp_arrival_us - sample.stamp_us).tolist() == [50, 150, 50]


def test_where_a_token_is_a_byte_a_stamp_is_its_first_one(monkeypatch):
    text = stamps(100, 200)[:20]
    arrivals = [(110 + 10 * place, grpc_message(letter)) for place, letter in enumerate(text)]
    sample = sample_of(record(*arrivals, monkeypatch=monkeypatch), num_tokens=20, chars_per_token=1)
    assert sample.outcome == OK
    assert sample.chunk_tokens.tolist() == [1] * 20
    assert sample.stamp_us.tolist() == [100]
    assert sample.stamp_arrival_us.tolist() == [110]


@pytest.mark.parametrize(
    ("messages", "lost", "outcome"),
    [
        pytest.param([grpc_message(stamps(1))], "", SHORT, id="a token is missing"),
        pytest.param([], "", SHORT, id="nothing came"),
        pytest.param([grpc_message(stamps(1, 2, 3))], "", WRONG, id="a token too many"),
        pytest.param([grpc_message(stamps(1, 1))], "", WRONG, id="a token twice"),
        pytest.param([grpc_message(stamps(1)), grpc_message(error="no")], "", REFUSED, id="error"),
        pytest.param([grpc_message(stamps(1))], "reset", LOST, id="connection lost"),
    ],
)
def test_streams_that_were_not_delivered(messages, lost, outcome, monkeypatch):
    made = record(*((10, message) for message in messages), monkeypatch=monkeypatch)
    made.lost = lost
    assert sample_of(made, num_tokens=2, chars_per_token=16).outcome == outcome


@pytest.mark.parametrize(
    ("texts", "outcome"),
    [
        pytest.param([stamps(1), stamps(1, 2)], OK, id="more and more"),
        pytest.param([stamps(1), stamps(1), stamps(1, 2), ""], OK, id="some without news"),
        pytest.param([stamps(1), stamps(2, 3)], WRONG, id="another text"),
        pytest.param([stamps(1), stamps(2)], WRONG, id="an increment"),
        pytest.param([stamps(1, 2), stamps(1)], WRONG, id="less again"),
    ],
)
def test_a_whole_text_begins_with_the_one_before(texts, outcome, monkeypatch):
    arrivals = [(10, grpc_message(text)) for text in texts]
    made = record(*arrivals, cumulative=True, monkeypatch=monkeypatch)
    assert sample_of(made, num_tokens=2, chars_per_token=16).outcome == outcome


# Measures


def save(path, opened_us, chunk_us, chunk_tokens, outcome=0, more_stamps_us=()):
    np.savez(
        path,
        outcome=np.array([outcome]),
        detail=np.array([""]),
        opened_us=np.array([opened_us]),
        ended_us=np.array([chunk_us[-1]]),
        num_chunks=np.array([len(chunk_us)]),
        num_stamps=np.array([1 + len(more_stamps_us)]),
        chunk_us=np.array(chunk_us),
        chunk_tokens=np.array(chunk_tokens),
        stamp_us=np.array([chunk_us[0] - 3000, *more_stamps_us]),
        stamp_arrival_us=np.array([chunk_us[0], *(stamp_us + 3000 for stamp_us in more_stamps_us)]),
    )
    return path


def test_measures_of_all_clients_together(tmp_path):
    samples = [
        save(tmp_path / "0.npz", 0, [10_000, 500_000], [1, 99]),
        save(tmp_path / "1.npz", 100_000, [130_000, 200_000, 1_000_000], [1, 1, 98], 1, more_stamps_us=[900_000]),
    ]
    mib = {"rss": 20.0, "anon": 10.0}
    used = Used(stub_cpu_s=0.2, server_cpu_s=0.4, client_cpu_s=0.6, stub_mib=mib, server_mib=mib)
    case = Case(name="x", num_streams=2, num_tokens=100, systems=(), rate=200, open_s=0.3)
    measures = measure(case, samples, used)
    assert measures.total_s == pytest.approx(1.0)
    assert measures.tokens_per_s == pytest.approx(200)
    assert measures.over_ideal == pytest.approx(1.0 / 0.8)
    assert measures.ttft_ms == pytest.approx(20)
    assert measures.lag_ms == pytest.approx(3)
    assert (measures.chunks_min, measures.chunks_median) == (2, 2.5)
    assert measures.live == 1  # of none and two
    assert (measures.stub_cpu, measures.client_cpu) == (pytest.approx(1000), pytest.approx(3000))
    assert measures.undelivered == 1


def test_medians():
    runs = [Measures(tokens_per_s=speed) for speed in (3, 1, 2)]
    assert medians(runs).tokens_per_s == 2
    assert math.isnan(medians(runs).lag_ms)


def test_a_round_that_delivers_all_makes_up_for_none():
    assert medians([Measures(undelivered=number) for number in (0, 3, 0)]).undelivered == 3


# The table


BESIDE = Target(system="ours", measure="tokens_per_s", at_least=20, versus="other")
ALONE = Target(system="ours", measure="lag_ms", at_most=2)
COMPARED = Case(name="x", num_streams=1, num_tokens=1, systems=(), targets=(BESIDE, ALONE))


def test_targets_with_their_verdicts():
    ours, other = Measures(tokens_per_s=100, lag_ms=2.5), Measures(tokens_per_s=4)
    assert table.verdicts(COMPARED, {"ours": ours, "other": other}) == [
        ("ours: tokens_per_s / other's is 25, target at least 20: met", True),
        ("ours: lag_ms is 2.5, target at most 2: NOT MET", False),
    ]


def test_a_target_of_a_system_that_did_not_run_is_not_measured():
    assert table.verdicts(COMPARED, {"ours": Measures(lag_ms=1)}) == [
        ("ours: tokens_per_s / other's, target at least 20: not measured", None),
        ("ours: lag_ms is 1, target at most 2: met", True),
    ]
    assert [met for _, met in table.verdicts(COMPARED, {"other": Measures()})] == [None, None]


def test_who_did_not_deliver_is_nobody_to_compare_with():
    measured = {"ours": Measures(tokens_per_s=100), "other": Measures(tokens_per_s=4, undelivered=1)}
    line, met = table.verdicts(COMPARED, measured)[0]
    assert (line.partition(": NOT MET")[2], met) == (", for other did not deliver all", False)


def test_a_measure_that_is_not_there_meets_no_target():
    target = Target(system="a", measure="lag_ms", at_most=2)
    case = Case(name="x", num_streams=1, num_tokens=1, systems=(), targets=(target,))
    assert [met for _, met in table.verdicts(case, {"a": Measures()})] == [False]


def test_rows_are_as_wide_as_their_head():
    for measures in (Measures(), Measures(tokens_per_s=123_456, lag_ms=1.5, undelivered=3)):
        assert len(table.row("ours", measures)) == len(table.head())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_cases_name_what_there_is(case):
    assert set(case.systems) <= set(SYSTEMS)
    assert {target.system for target in case.targets} <= set(case.systems)
    assert {target.versus for target in case.targets if target.versus} <= set(case.systems)
    assert {target.measure for target in case.targets} <= set(vars(Measures()))
    assert all((target.at_least is None) is not (target.at_most is None) for target in case.targets)


# The script


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        pytest.param(["--rounds", "0"], "--rounds is to be at least 1", id="no rounds"),
        pytest.param(["--clients", "0"], "--clients is to be at least 1", id="no clients"),
        pytest.param(["--system", "peer-10"], "--system peer-10 takes --peer", id="no peer"),
        pytest.param(["--peer", "nowhere"], "--peer nowhere has no config.pbtxt", id="peer that is no model"),
        pytest.param(
            ["--case", "one", "--case", "flat-2000", "--system", "engine"],
            "no --system given is one of the systems of: one",
            id="case without a system",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(arguments, problem, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["streams.py", *arguments])
    with pytest.raises(SystemExit) as exit_:
        streams.main()
    assert exit_.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: {problem}\n")


@pytest.mark.parametrize(
    ("system", "lag_ms", "code"),
    [
        pytest.param("ours", 1, 0, id="met"),
        pytest.param("ours", 3, 1, id="not met"),
        pytest.param("minimal-delta", 1, 1, id="none measured"),
    ],
)
def test_the_exit_code(system, lag_ms, code, monkeypatch, tmp_path):
    output = str(tmp_path / "output")
    monkeypatch.setattr(sys, "argv", ["streams.py", "--case", "one", "--system", system, "--output", output])
    monkeypatch.setattr(streams, "run", lambda *_, **__: Measures(lag_ms=lag_ms, undelivered=0))
    assert streams.main() == code


def test_a_child_that_dies_is_told_of(tmp_path, capfd):
    case = Case(name="x", num_streams=1, num_tokens=1, systems=(), rate=-1)
    with pytest.raises(SystemExit, match="a child process failed"):
        run(ENGINE, case, tmp_path / "run", num_clients=1, peer=None)
    assert "ConfigError" in capfd.readouterr().err


def test_an_engine_that_fails_is_told_of(monkeypatch):
    class FailingEngine:
        def __init__(self, config): ...

        def start(self): ...

        def stop(self): ...

        def submit(self, request, sink):
            sink.on_steps([(request, Step(error=EngineError("no room")))])

    monkeypatch.setattr(serving, "SimulatedEngine", FailingEngine)
    with pytest.raises(EngineError, match="no room"):
        serving.consume_engine(CASES["flat-2000"], None)
