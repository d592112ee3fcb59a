"""A few hundred bad inputs over a real server and a real gateway, and the inputs themselves."""

import json
from collections import Counter
from pathlib import Path

import pytest
from tritonclient.grpc import service_pb2 as pb

from reliability.bad_answers import judged, judged_stream
from reliability.bad_input import History, main
from reliability.bad_requests import BadInput, expensive, make


@pytest.mark.slow
@pytest.mark.parametrize("inputs", [100, pytest.param(5000, marks=pytest.mark.nightly)])
def test_a_run_has_no_violation(tmp_path: Path, inputs: int) -> None:
    assert main(["--inputs", str(inputs), "--seed", "7", "--no-expensive", "--out", str(tmp_path / "out")]) == 0
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["violations"] == []
    assert summary["inputs"] == inputs
    assert sum(sum(outcomes.values()) for outcomes in summary["outcomes"].values()) == inputs
    assert {"HTTP", "HTTP stream", "gRPC", "gateway"} <= summary["canaries"].keys()


@pytest.mark.slow
def test_the_number_and_the_seed_decide_an_input() -> None:
    first = [make(number, 3) for number in range(200)]
    assert first == [make(number, 3) for number in range(200)]
    assert first != [make(number, 4) for number in range(200)]
    kinds = Counter(given.kind for given in first)
    assert len(kinds) == 9
    assert {given.where for given in first} == {"server", "gateway", "grpc"}


@pytest.mark.nightly  # making them takes long, too
def test_an_expensive_input_comes_once_to_each_place() -> None:
    names = [(given.kind, given.where) for given in expensive()]
    assert len(names) == len(set(names))


ONE = {"text_output": "a", "finish_reason": "stop", "sequence_index": 0}
OPEN = {**ONE, "finish_reason": "None"}
CHOICE = {"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}
REFUSED = {"error": "[E_INVALID_ARGUMENT] x: expected y"}


def http(*documents: object, status: int = 200, done: bool = False, stream: bool = True) -> bytes:
    kind = "text/event-stream" if stream else "application/json"
    texts = [json.dumps(document) for document in documents] + (["[DONE]"] if done else [])
    body = "".join(f"data: {text}\n\n" for text in texts) if stream else "".join(texts)
    return f"HTTP/1.1 {status} x\r\nContent-Type: {kind}\r\n\r\n{body}".encode()


V = "VIOLATION"
ANSWERS = [
    ("server", http(OPEN, ONE), "answered"),
    ("server", http(REFUSED), "refused: E_INVALID_ARGUMENT"),
    ("server", http(OPEN, REFUSED), "refused: E_INVALID_ARGUMENT"),
    ("server", http(ONE, ONE), V),
    ("server", http(ONE, REFUSED), V),
    ("server", http(OPEN), V),
    ("server", http({**ONE, "sequence_index": 1}, OPEN), V),
    ("server", http(), V),
    ("server", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{", V),
    ("server", http({"error": "[E_INTERNAL] x"}, status=500, stream=False), V),
    ("server", http(status=400, stream=False), "refused by tritonserver"),
    ("gateway", http(CHOICE, done=True), "answered"),
    ("gateway", http(CHOICE, stream=False), "answered"),
    ("gateway", http(CHOICE), V),
    ("gateway", http({"choices": [{"index": 0, "finish_reason": None}]}, done=True), V),
    ("gateway", http({"type": "response.created"}), V),
    ("gateway", http({"type": "response.created"}, {"type": "response.completed"}), "answered"),
    ("gateway", b"HTTP/1.1 500 x\r\nContent-Type: text/plain\r\n\r\nInternal Server Error", V),
    ("gateway", b"HTTP/1.1 400 x\r\nContent-Type: text/plain\r\n\r\nInvalid", "refused before the model"),
    ("gateway", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{", V),
    ("gateway", http({"error": {"code": "unavailable"}}, status=503, stream=False), V),
    ("gateway", http({"error": {"code": "overloaded"}}, status=503, stream=False), "overloaded"),
    ("gateway", http({"error": {"code": "x"}}, status=400, stream=False), "refused by the gateway: 400"),
]


def test_an_answer_has_one_end_and_no_error_of_ours() -> None:
    found = [(where, answer, judged(BadInput("x", where, b"{}"), answer)) for where, answer, _ in ANSWERS]
    assert [row for row, (*_, outcome) in zip(found, ANSWERS, strict=True) if not row[2].startswith(outcome)] == []


SAID = "[E_INVALID_ARGUMENT] x"
STREAMS: dict[tuple[bytes | str, ...], str] = {
    (b"stop",): "answered",
    (b"None", b"stop"): "answered",
    (b"None",): V,
    (b"stop", b"stop"): V,
    (SAID,): "refused: E_INVALID_ARGUMENT",
    (b"stop", SAID): V,
    (SAID, SAID): V,
    (): V,
}


def message(part: bytes | str) -> pb.ModelStreamInferResponse:
    """Of an error, or of a finish reason."""
    made = pb.ModelStreamInferResponse()
    if isinstance(part, str):
        made.error_message = part
        return made
    for name, text in (("text_output", b"a"), ("finish_reason", part)):
        made.infer_response.outputs.add(name=name, datatype="BYTES", shape=[1])
        made.infer_response.raw_output_contents.append(len(text).to_bytes(4, "little") + text)
    return made


def test_a_stream_has_one_end() -> None:
    found = {parts: judged_stream(BadInput("x", "grpc", b""), list(map(message, parts))) for parts in STREAMS}
    assert {parts: said for parts, said in found.items() if not said.startswith(STREAMS[parts])} == {}


def test_an_outcome_that_none_may_have_is_kept_with_its_input() -> None:
    history = History()
    given = BadInput("server: JSON", "server", b"GET /")
    history.add(5, given, "refused: E_INVALID_ARGUMENT")
    history.add(6, given, "VIOLATION: no end")
    assert history.outcomes == {("server: JSON", "refused"): 1, ("server: JSON", "VIOLATION"): 1}
    assert history.violations == [{"what": "input 6 (server: JSON): no end", "input": "b'GET /'"}]
