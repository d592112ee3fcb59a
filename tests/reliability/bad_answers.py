"""Judges the answers to bad_input.py's requests: each has one end, and no error is ours to have prevented."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench._load import strings
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from reliability.bad_requests import BadInput

_CODED = re.compile(r"\[(E_[A-Z_]+)\]")
_OURS_FAILED = re.compile(r"Failed to process the request|Stub process|Traceback|is not healthy|E_INTERNAL")
_NO_REASONS = (b"task", b"return_finish_reason")
"""Of a request whose answer may have no finish_reason: tasks generate nothing, and the other one may turn it off."""
_RESPONSE_ENDS = ("response.completed", "response.incomplete", "response.failed")
_OVERLOADED = "overloaded"


@dataclass(frozen=True)
class Answer:
    """An HTTP answer, taken apart."""

    status: int
    is_stream: bool
    documents: list[Any] = field(default_factory=list)
    """The JSON of the body, or of its events."""
    is_done: bool = False
    """Whether the stream ended with [DONE]."""
    problem: str = ""
    """Why the body can't be read."""


def parsed(answer: bytes) -> Answer:
    """Take an answer apart. Raises ValueError and LookupError where it has no head."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    if status == 100:
        return parsed(body)
    is_stream = b"content-type: text/event-stream" in head.lower()
    try:
        if b"transfer-encoding: chunked" in head.lower():
            body = _dechunked(body)
        if not is_stream and not body.startswith((b"data:", b":")):
            return Answer(status, False, [json.loads(body)] if body.strip() else [])
        events = [event.strip() for event in body.split(b"\n\n")]
        data = [event.removeprefix(b"data:").strip() for event in events if event.startswith(b"data:")]
        documents = [json.loads(event) for event in data if event != b"[DONE]"]
        return Answer(status, True, documents, is_done=data[-1:] == [b"[DONE]"])
    except (ValueError, IndexError, RecursionError) as error:
        return Answer(status, is_stream, problem=repr(error))


def _dechunked(data: bytes) -> bytes:
    """Raises ValueError where the last chunk is missing."""
    found: list[bytes] = []
    at = 0
    while True:
        end = data.find(b"\r\n", at, at + 64)
        if end < 0:
            raise ValueError("the response has no end")
        size = int(data[at:end], 16)
        if not size:
            return b"".join(found)
        found.append(data[end + 2 : end + 2 + size])
        at = end + 4 + size


def judged(given: BadInput, answer: bytes) -> str:
    """Return how the answer ended the request. One that none may have begins with VIOLATION."""
    try:
        read = parsed(answer)
    except (ValueError, LookupError):
        said = f"no HTTP came: {answer[:200]!r}"
        return f"VIOLATION: {said}" if given.whole else "answered to a broken request"
    errors = [document["error"] for document in read.documents if isinstance(document, dict) and document.get("error")]
    if given.where == "gateway" and (refused := _refused_by_gateway(read, errors)):
        return refused
    if read.problem:
        if read.status == 200 and given.whole:
            return f"VIOLATION: it can't be read: {read.problem} {answer[:200]!r} ... {answer[-200:]!r}"
        return f"refused before the model: {read.status}" if read.status != 200 else "answered to a broken request"
    if given.where == "gateway":
        problem = _gateway_problem(read)
        return f"VIOLATION: {problem}: {answer[-300:]!r}" if problem else "answered"
    if errors and len(errors) == len(read.documents) == 1:
        return judged_error(str(errors[0]))
    if read.status != 200:
        return f"refused by tritonserver: {read.status} {answer[:100]!r}"
    if problem := ends_problem(read.documents, errors, given):
        return f"VIOLATION: {problem}: {answer[-300:]!r}"
    return judged_error(str(errors[0])) if errors else "answered"


def ends_problem(documents: Sequence[Any], errors: Sequence[Any], given: BadInput) -> str:
    """Return what is wrong with the ends of a server's responses: each sequence has one, or an error ends what is
    left. "" for nothing. After a request that is not whole the client has closed its side, which may end the answer."""
    ends: Counter[int] = Counter()
    seen: set[int] = set()
    for document in documents:
        reasons = _listed(document.get("finish_reason", []))
        indices = _listed(document.get("sequence_index", list(range(len(_listed(document.get("text_output", [])))))))
        seen.update(indices)
        ends.update(index for index, reason in zip(indices, reasons, strict=False) if reason != "None")
    if max(ends.values(), default=0) > 1:
        return f"several ends: {dict(ends)}"
    if len(errors) > 1:
        return f"{len(errors)} errors"
    if errors:
        return "an end and an error" if ends and set(ends) == seen else ""
    if not given.whole:
        return ""
    if not documents:
        return "there is no response"
    has_reasons = not any(word in given.data for word in _NO_REASONS)
    return f"sequences {sorted(seen - set(ends))} have no end" if has_reasons and (not ends or seen - set(ends)) else ""


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _refused_by_gateway(read: Answer, errors: Sequence[Any]) -> str:
    """Return how a gateway's answer refuses; "" where it does not, or not that way."""
    said = json.dumps(errors)[:300] or read.problem
    if read.status == 429:
        return _OVERLOADED
    if read.status >= 500:
        is_busy = any(isinstance(error, dict) and error.get("code") == "overloaded" for error in errors)
        return _OVERLOADED if read.status == 503 and is_busy else f"VIOLATION: HTTP {read.status}: {said}"
    if any(isinstance(error, dict) and error.get("code") in ("internal_error", "bad_gateway") for error in errors):
        return f"VIOLATION: HTTP {read.status}: {said}"
    if read.status == 200 and len(errors) > 1:
        return f"VIOLATION: several errors: {said}"
    if read.status != 200 and not read.problem:
        return f"refused by the gateway: {read.status}"
    return "refused by the gateway: in its stream" if errors else ""


def _gateway_problem(read: Answer) -> str:
    """Return what is wrong with the end of a gateway's answer; "" for nothing."""
    if not read.documents:
        return "an empty answer"
    if any("type" in document for document in read.documents):
        ends = [document["type"] for document in read.documents if document.get("type") in _RESPONSE_ENDS]
        return "" if len(ends) == 1 else f"ends {ends}"
    if read.is_stream and not read.is_done:
        return "no [DONE]"
    ends = Counter(
        choice["index"]
        for document in read.documents
        for choice in document.get("choices", ())
        if choice["finish_reason"] is not None
    )
    seen = {choice["index"] for document in read.documents for choice in document.get("choices", ())}
    return "" if set(ends) == seen and max(ends.values(), default=1) == 1 else f"ends of choices {dict(ends)} of {seen}"


def judged_stream(given: BadInput, messages: Sequence[Any]) -> str:
    """Judge the messages of a gRPC stream."""
    if not messages:
        return "VIOLATION: a stream without a response" if _is_message(given.data) else "closed: it is no message"
    errors = [message.error_message for message in messages if message.error_message]
    finals = sum(
        message.infer_response.parameters["triton_final_response"].bool_param
        for message in messages
        if not message.error_message  # an error is a final response too
    )
    if len(errors) + finals > 1:
        return f"VIOLATION: {finals} final responses, {len(errors)} errors: {errors[:3]}"
    documents: list[Any] = [
        {"error": message.error_message} if message.error_message else _outputs(message.infer_response)
        for message in messages
    ]
    documents = [document for document in documents if document]
    if problem := ends_problem(documents, errors, given):
        return f"VIOLATION: {problem}: {documents[-2:]}"[:600]
    return judged_error(errors[0]) if errors else "answered"


def _outputs(response: Any) -> dict[str, Any]:
    """Return what tells the ends of a response."""
    found: dict[str, Any] = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if output.name in ("text_output", "finish_reason"):
            found[output.name] = [value.decode(errors="replace") for value in strings(raw)]
        elif output.name == "sequence_index":
            found[output.name] = [int.from_bytes(raw[at : at + 4], "little") for at in range(0, len(raw), 4)]
        else:
            found[output.name] = []
    return found


def judged_error(message: str, *, code: str = "") -> str:
    """Judge an error of the server, or of gRPC with a status."""
    if _OURS_FAILED.search(message):
        return f"VIOLATION: {message}"
    if coded := _CODED.match(message):
        return f"refused: {coded[1]}"
    if code in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "UNKNOWN"):
        return f"VIOLATION: gRPC {code}: {message}"
    return f"refused by tritonserver: {message}"


def _is_message(data: bytes) -> bool:
    try:
        pb.ModelInferRequest.FromString(data)
    except DecodeError:
        return False
    return True
