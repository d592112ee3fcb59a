"""A fake server for the tests of programs that use this client. It needs no tritonserver, no GPU and no other package.

    import pytest
    from deepseek_triton_client import Client, Overloaded
    from deepseek_triton_client.testing import FakeServer, Pause

    @pytest.fixture
    def server():
        with FakeServer() as server:
            yield server

    def test_a_summary_survives_a_full_server(server):
        server.script(Overloaded("full"), ["A short", Pause(0.1), " summary."])
        with Client(server.url) as client:
            assert summarize(client, "a long text") == "A short summary."
        assert server.requests[-1].params.max_tokens == 200

It speaks HTTP on a real socket, as Triton does with the model of deepseek-triton: generate, generate_stream, ready,
metadata and metrics. `Client`, `AsyncClient` and every other HTTP client can talk to it. It does not speak gRPC, and it
does not check the sampling fields that it gets.
"""

import json
import math
import re
import select
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from deepseek_triton_client._core import exceptions
from deepseek_triton_client._core.sampling_params import SAMPLING_FIELDS, SamplingParams

__all__ = ["Answer", "FakeServer", "Item", "Pause", "ReceivedRequest"]


@dataclass(frozen=True)
class Pause:
    """A part of an answer: nothing is sent for this time."""

    seconds: float | None = None
    """None waits until the test sets `FakeServer.release`."""


@dataclass(frozen=True)
class ReceivedRequest:
    """One request to generate text, as it came."""

    path: str
    headers: Mapping[str, str] = field(repr=False)
    """Header names are in lower case."""
    body: Mapping[str, Any]
    """Input name -> value, such as {"text_input": "Why?", "sampling_param_max_tokens": 200, ...}."""

    @property
    def request_id(self) -> str:
        return str(self.body.get("id", ""))

    @property
    def prompt(self) -> str | tuple[int, ...] | None:
        """The text, or the token ids; None for a chat."""
        ids = self.body.get("input_ids")
        return tuple(_listed(ids)) if ids is not None else self.body.get("text_input")

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation of a chat; empty for a prompt."""
        messages: list[dict[str, Any]] = json.loads(self.body.get("messages", "[]"))
        return messages

    @property
    def params(self) -> SamplingParams:
        """The sampling fields that were sent. Among them are those that the client adds by itself, such as n=1."""
        fields: dict[str, Any] = {}
        for each in SAMPLING_FIELDS:
            if each.tensor_name in self.body:
                value = self.body[each.tensor_name]
                fields[each.name] = _listed(value) if each.many else value
        return SamplingParams(**fields)


Item = str | Mapping[str, Any] | Pause | Exception
"""One part of an answer:

    a text                                                  a chunk of the answer
    a mapping, such as {"text_output": "6", "finish_reason": "length"}
                                                            a whole response, by the names of the model's outputs
    Pause(seconds)                                          nothing is sent for this number of seconds
    an error of this package, such as Overloaded("full")    the server's error that makes the client raise it
    an OSError, such as ConnectionResetError()              the connection breaks off
"""

Answer = Item | Sequence[Item] | Callable[[ReceivedRequest], Iterable[Item]]
"""One item, several in a list, or a function that makes them for a request; what the function raises is an item too.

An answer whose last item is not a mapping gets an end: finish_reason "stop" and token counts, one token a chunk.
"""


def repeat_prompt(request: ReceivedRequest) -> Iterator[Item]:
    """Send the prompt, or the text of the last message, back."""
    yield str(request.messages[-1]["content"] if request.messages else request.prompt)


class QuietServer(ThreadingHTTPServer):
    """A thread for each connection. A client that hangs up in the middle leaves no traceback."""

    request_queue_size = 128
    respond: Callable[[Any, bytes], None]

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


class RequestHandler(BaseHTTPRequestHandler):
    """One connection. Reads each request and leaves the response to the server."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # Nagle's algorithm would hold small chunks back
    server: QuietServer

    def do_GET(self) -> None:
        self.server.respond(self, self.rfile.read(int(self.headers.get("content-length", 0))))

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def send_whole(self, status: int, body: bytes, content_type: str = "application/json", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": content_type, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def send_json(self, status: int, document: Mapping[str, Any]) -> None:
        self.send_whole(status, json.dumps(document).encode())

    def start_chunked(self, status: int = 200, content_type: str = "text/event-stream; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def send_chunk(self, data: bytes) -> None:
        """Send one chunk of a chunked body; an empty one ends the body."""
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def send_event(self, document: Mapping[str, Any]) -> None:
        self.send_chunk(b"data: " + json.dumps(document).encode() + b"\n\n")


class LoopbackServer(ABC):
    """An HTTP server on a free port of 127.0.0.1. A subclass says what it answers."""

    server_class = QuietServer
    handler_class = RequestHandler
    scheme = "http"

    def __init__(self) -> None:
        self._server = self.server_class(("127.0.0.1", 0), self.handler_class)
        self._server.respond = self.respond
        self.url = f"{self.scheme}://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    @abstractmethod
    def respond(self, handler: Any, body: bytes) -> None:
        """Answer one request, on the thread of its connection."""

    def close(self) -> None:
        """End the server. Connections that clients still hold get no more answers."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class FakeServer(LoopbackServer):
    """A server with one model. `script` says how the next requests are answered, `answer` how all the others are.
    Tasks, such as `model_info`, take no texts of either, and have answers of their own.

    Use it in a `with` block, or close it. It sees that a client has left at the next chunk, and within a Pause at once.
    """

    def __init__(self, answer: Answer = repeat_prompt, *, model_name: str = "tensorrt_llm") -> None:
        """Without an `answer` the server sends the prompt, or the text of the last message, back."""
        self.answer = answer
        self.model_name = model_name
        self.ready = True
        """False: the model is still loading, and requests are refused with ModelNotReady."""
        self.metrics_text = ""
        """The answer of /metrics, for clients with metrics_url=f"{server.url}/metrics"."""
        self.requests: list[ReceivedRequest] = []
        """All requests for text in the order of arrival. A retry is a request of its own."""
        self.cancelled: list[str] = []
        """The request ids that `Client.cancel` has sent."""
        self.most_at_once = 0
        """Largest number of requests that were being answered at the same time."""
        self.waiting = threading.Event()
        """Set when an answer has come to a Pause() without an end."""
        self.release = threading.Event()
        """To be set by the test: it ends every Pause() without an end."""
        self.client_left = threading.Event()
        """Set when a client has left before the end of its answer."""
        self._scripted: deque[Answer] = deque()
        self._active: list[str] = []
        self._to_cancel: set[str] = set()
        self._lock = threading.Lock()  # of what the connections' threads share
        self._is_closed = False
        super().__init__()

    def __enter__(self) -> "FakeServer":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def script(self, *answers: Answer) -> None:
        """Set the answers of the next requests, one for each. A retry is a request of its own."""
        self._scripted.extend(answers)

    def close(self) -> None:
        self._is_closed = True
        super().close()

    def respond(self, handler: RequestHandler, body: bytes) -> None:
        path = _MODEL_PATH.fullmatch(handler.path)
        verb = path[2] if path and unquote(path[1]) == self.model_name else None
        if handler.path == "/metrics":
            handler.send_whole(200, self.metrics_text.encode(), "text/plain")
        elif handler.path in ("/v2/health/live", "/v2/health/ready"):
            handler.send_json(200, {})
        elif verb is None:
            missing = exceptions.ModelNotFound(f"Request for unknown model: no model is at {handler.path}")
            handler.send_json(*_refusal(missing))
        elif not self.ready:
            handler.send_json(*_refusal(exceptions.ModelNotReady(self.model_name)))
        elif verb == "":
            handler.send_json(200, _metadata(self.model_name))
        elif verb == "ready":
            handler.send_json(200, {})
        else:
            headers = {name.lower(): value for name, value in handler.headers.items()}
            self._generate(handler, ReceivedRequest(handler.path, headers, json.loads(body)))

    def _generate(self, handler: RequestHandler, request: ReceivedRequest) -> None:
        is_cancel = request.body.get("stop") is True
        with self._lock:
            if is_cancel:
                self.cancelled.append(request.request_id)
                is_active = request.request_id in self._active
                answer: Answer = () if is_active else exceptions.InvalidRequest("no such active request")
                if is_active:
                    self._to_cancel.add(request.request_id)
            else:
                wants_text = "task" not in request.body  # a command asks first what the model is
                takes_one = self._scripted and (wants_text or isinstance(self._scripted[0], (Mapping, Exception)))
                answer = self._scripted.popleft() if takes_one else self.answer
                self.requests.append(request)
                self._active.append(request.request_id)
                self.most_at_once = max(self.most_at_once, len(self._active))
        try:
            responses = self._responses(handler, request, _items(answer, request))
            send = _send_stream if request.path.endswith("_stream") else _send_joined
            send(handler, responses)
        except _BrokenOffError:
            handler.close_connection = True
        except OSError:
            handler.close_connection = True
            self.client_left.set()
        finally:
            if not is_cancel:
                with self._lock:
                    self._active.remove(request.request_id)
                    self._to_cancel.discard(request.request_id)

    def _responses(
        self, handler: RequestHandler, request: ReceivedRequest, items: Iterable[Item]
    ) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """The HTTP status and the document of each response. Only the last one can be an error."""
        num_answers = request.params.n or 1
        num_chunks = 0
        finish_reason: str | None = "stop"
        for item in items:
            if isinstance(item, OSError):
                raise _BrokenOffError from item
            if isinstance(item, Exception):
                yield _refusal(item)
                return
            if isinstance(item, Pause):
                self._pause(handler, request.request_id, item.seconds)
            elif isinstance(item, str) and "task" in request.body:
                yield 200, _task_outputs(request, self.model_name)
                return
            elif isinstance(item, str):
                num_chunks += 1
                finish_reason = "stop"
                yield 200, _repeated({"text_output": item}, num_answers)
            else:
                finish_reason = None
                yield 200, item
            if request.request_id in self._to_cancel:
                finish_reason = "cancelled"
                break
        if finish_reason is not None:
            counts = {"num_input_tokens": _num_tokens(request), "num_cached_tokens": 0, "num_output_tokens": num_chunks}
            yield 200, _repeated({"text_output": "", "finish_reason": finish_reason, **counts}, num_answers)

    def _pause(self, handler: RequestHandler, request_id: str, seconds: float | None) -> None:
        """Raises ConnectionResetError when the client leaves meanwhile."""
        end = math.inf if seconds is None else time.monotonic() + seconds
        if seconds is None:
            self.waiting.set()
        arrived = select.poll()
        arrived.register(handler.connection, select.POLLIN)
        while time.monotonic() < end and request_id not in self._to_cancel:
            if seconds is None and self.release.is_set():
                break
            left_ms = min(10.0, (end - time.monotonic()) * 1000)
            if self._is_closed or arrived.poll(left_ms):  # a client that waits sends nothing; its end can be read
                raise ConnectionResetError("the client has left")


class _BrokenOffError(Exception):
    """The answer says that the connection breaks off here."""


def _items(answer: Answer, request: ReceivedRequest) -> Iterator[Item]:
    if isinstance(answer, (str, Mapping, Pause, Exception)):
        yield answer
        return
    try:
        yield from answer(request) if callable(answer) else answer
    except Exception as exc:
        yield exc


def _send_stream(handler: RequestHandler, responses: Iterator[tuple[int, Mapping[str, Any]]]) -> None:
    status, document = next(responses, (200, {}))
    if status != 200:  # an error before the first chunk is the HTTP response itself, as Triton has it
        handler.send_json(status, document)
        return
    handler.start_chunked()
    handler.send_event(document)
    for _, following in responses:
        handler.send_event(following)
    handler.send_chunk(b"")


def _send_joined(handler: RequestHandler, responses: Iterator[tuple[int, Mapping[str, Any]]]) -> None:
    joined: dict[str, Any] = {}
    texts: list[str] | None = None
    for status, document in responses:
        if status != 200:
            handler.send_json(status, document)
            return
        new = _listed(document.get("text_output", ""))
        texts = new if texts is None else [text + more for text, more in zip(texts, new, strict=True)]
        joined.update(document)
    joined["text_output"] = texts[0] if texts and len(texts) == 1 else texts
    handler.send_json(200, joined)


def _refusal(error: Exception) -> tuple[int, Mapping[str, Any]]:
    """The HTTP status and the document that make the client raise `error`."""
    if isinstance(error, exceptions.DeepseekTritonError) and (error.code or type(error) in _REFUSALS):
        status, text = _REFUSALS.get(type(error), (400, "{}"))
        return status, {"error": str(error) if error.code else text.format(error.message)}
    hint = "expected an error that a server can send; to make a limit of Timeouts run out, script a Pause()"
    return 500, {"error": f"[E_INTERNAL] FakeServer: {hint}; got {error!r}"}


# HTTP status and text. Triton answers 400 to every error of a model that comes before the first chunk.
_REFUSALS: dict[type[Exception], tuple[int, str]] = {
    exceptions.InvalidRequest: (400, "[E_INVALID_ARGUMENT] {}"),
    exceptions.Overloaded: (400, "[E_OVERLOADED] {}"),
    exceptions.ServerUnavailable: (400, "[E_UNAVAILABLE] {}"),
    exceptions.Cancelled: (400, "[E_CANCELLED] {}"),
    exceptions.ServerError: (400, "[E_INTERNAL] {}"),
    exceptions.ModelNotFound: (404, "{}"),
    exceptions.ModelNotReady: (400, "Request for unknown model: {} is not at ready state"),
    exceptions.AccessDenied: (401, "{}"),
}

_MODEL_PATH = re.compile(r"/v2/models/([^/]+)(?:/versions/[^/]+)?/?(ready|generate|generate_stream|)")


def _metadata(model_name: str) -> dict[str, Any]:
    """The parts of the metadata of deepseek-triton's model that clients look at."""
    inputs = [("text_input", "BYTES", -1), ("input_ids", "INT32", -1), ("messages", "BYTES", -1)]
    inputs += [("streaming", "BOOL", 1), ("stop", "BOOL", 1), ("stream_mode", "BYTES", 1)]
    inputs += [("return_finish_reason", "BOOL", 1), ("task", "BYTES", 1)]
    inputs += [(each.tensor_name, each.datatype, -1 if each.many else 1) for each in SAMPLING_FIELDS]
    outputs = [(name, "BYTES", -1) for name in ("text_output", "reasoning_output", "finish_reason", "stop_reason")]
    outputs += [(name, "INT32", -1) for name in ("sequence_index", "num_input_tokens", "num_output_tokens")]
    listed = [
        [{"name": name, "datatype": datatype, "shape": [length]} for name, datatype, length in tensors]
        for tensors in (inputs, outputs)
    ]
    return {"name": model_name, "versions": ["1"], "platform": "python", "inputs": listed[0], "outputs": listed[1]}


def _task_outputs(request: ReceivedRequest, model_name: str) -> Mapping[str, Any]:
    """Return one answer to every task that is not scripted. The text of token ids is their numbers."""
    info = json.dumps({"name": model_name, "chat_template": "{{ messages[-1].content }}", "tool_form": None})
    text, ids = " ".join(map(str, _listed(request.body.get("input_ids", [])))), [*range(_num_tokens(request))]
    return {"text_output": text, "output_ids": ids, "model_info": info, "finish_reason": "stop"}


def _num_tokens(request: ReceivedRequest) -> int:
    """Each word of a text counts as one token."""
    prompt = request.prompt
    if prompt is None:
        prompt = " ".join(str(message.get("content")) for message in request.messages)
    return len(prompt.split() if isinstance(prompt, str) else prompt)


def _repeated(outputs: Mapping[str, Any], times: int) -> Mapping[str, Any]:
    """The same response for each of the answers that a request asks for with `n`."""
    return outputs if times == 1 else {name: [value] * times for name, value in outputs.items()}


def _listed(value: Any) -> list[Any]:
    """JSON of the generate extension has no brackets around a single element."""
    return value if isinstance(value, list) else [value]
