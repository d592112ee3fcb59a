"""Requests in the form they have on the wire, over HTTP and gRPC, and their responses."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import httpx
import numpy as np
import numpy.typing as npt
import tritonclient.grpc as triton
import tritonclient.http as triton_http

from deepseek_backend.contract import INPUTS, Dtype
from deepseek_triton_tools.server.server_process import ServerProcess
from support.servers import url

MODEL = "tensorrt_llm"
PROMPT = "The capital of France is"
LONG_ANSWER = 4000
"""Number of tokens that take 25 s at the pace of conftest's simulated_server."""

_ANSWER_S = 60
"""Seconds for one answer, only ever reached by a test that fails."""

Array: TypeAlias = npt.NDArray[Any]
Tensors: TypeAlias = Mapping[str, Array]
Fields: TypeAlias = Mapping[str, object]
Parameters: TypeAlias = Mapping[str, str | int | bool | float]


def strings(*values: str) -> Array:
    return np.array([value.encode() for value in values], dtype=np.object_)


def flag(value: bool) -> Array:
    return np.array([value], dtype=np.bool_)


# --- gRPC: streams, for the model is decoupled ---


def grpc_inputs(tensors: Tensors) -> list[Any]:
    return [filled(triton.InferInput, name, array) for name, array in tensors.items()]


def filled(kind: Any, name: str, array: Array) -> Any:
    """A filled InferInput, of tritonclient's gRPC or HTTP module."""
    names = {"O": "BYTES", "S": "BYTES", "b": "BOOL", "i": "INT32", "u": "UINT64", "f": "FP32"}
    tensor = kind(name, list(array.shape), names[array.dtype.kind])
    tensor.set_data_from_numpy(array)
    return tensor


@dataclass(frozen=True, kw_only=True)
class Sent:
    """One request of a gRPC stream."""

    tensors: Tensors
    parameters: Parameters | None = None
    request_id: str = ""
    outputs: Sequence[str] | None = None
    timeout_us: int | None = None
    """The request timeout of Triton's own protocol."""


@dataclass(frozen=True)
class Outcome:
    """The responses and errors of a gRPC stream, in order."""

    results: list[Any]
    errors: list[triton.InferenceServerException]

    def all(self) -> list[Any]:
        for error in self.errors:
            raise error
        return self.results

    def only_error(self) -> str:
        assert self.results == []
        (error,) = self.errors
        message: str = error.message()
        return message


def exchange(server: ServerProcess, *requests: Sent, empty_final: bool = False) -> Outcome:
    """Send all requests on one stream and close it, which waits for the answers, as the samples do."""
    results: list[Any] = []
    errors: list[triton.InferenceServerException] = []

    def receive(result: Any, error: triton.InferenceServerException | None) -> None:
        if error is None:
            results.append(result)
        else:
            errors.append(error)

    with triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        client.start_stream(receive, stream_timeout=120)
        for sent in requests:
            client.async_stream_infer(
                MODEL,
                grpc_inputs(sent.tensors),
                outputs=None if sent.outputs is None else [triton.InferRequestedOutput(name) for name in sent.outputs],
                request_id=sent.request_id,
                timeout=sent.timeout_us,
                parameters=sent.parameters,
                enable_empty_final_response=empty_final,
            )
        client.stop_stream()
    return Outcome(results, errors)


def infer(
    server: ServerProcess,
    scheme: str,
    tensors: Tensors,
    *,
    model: str = MODEL,
    request_id: str = "",
    parameters: Parameters | None = None,
) -> Any:
    """The one response of gRPC's ModelInfer or of HTTP's /infer, by tritonclient's infer()."""
    rest: dict[str, Any] = {"request_id": request_id, "parameters": parameters}
    if scheme == "grpc":
        with triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
            return client.infer(model, grpc_inputs(tensors), client_timeout=_ANSWER_S, **rest)
    inputs = [filled(triton_http.InferInput, name, array) for name, array in tensors.items()]
    with triton_http.InferenceServerClient(f"127.0.0.1:{server.http_port}", network_timeout=_ANSWER_S) as client:
        return client.infer(model, inputs, **rest)


def first(result: Any, output: str) -> str:
    """The first string of an output, read as the samples read it. A missing output is an error."""
    decoded: str = result.as_numpy(output)[0].decode()
    return decoded


def joined(results: Sequence[Any]) -> str:
    return b"".join(result.as_numpy("text_output")[0] for result in results).decode()


def texts_by_id(results: Sequence[Any]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for result in results:
        request_id = result.get_response().id
        texts[request_id] = texts.get(request_id, "") + first(result, "text_output")
    return texts


# --- HTTP: /generate and /generate_stream ---


_NO_TLS = False
"""Loading the certificates anew for each request would take longer than most of the answers."""


def post(
    server: ServerProcess, verb: str, body: Fields, headers: dict[str, str] | None = None, *, model: str = MODEL
) -> httpx.Response:
    address = f"{url(server, 'http')}/v2/models/{model}/{verb}"
    return httpx.post(address, json=body, headers=headers, timeout=60, verify=_NO_TLS)


def answered(server: ServerProcess, prompt: str = PROMPT, *, max_tokens: int = 16) -> dict[str, Any]:
    """The greedy answer to the plainest request."""
    body = {"text_input": prompt, "max_tokens": max_tokens, "temperature": 0}
    answer: dict[str, Any] = post(server, "generate", body).raise_for_status().json()
    return answer


def generated(server: ServerProcess, prompt: str = PROMPT, *, max_tokens: int = 16) -> str:
    return str(answered(server, prompt, max_tokens=max_tokens)["text_output"])


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.text.split("\n"):
        if line:
            assert line.startswith("data: ")
            yield json.loads(line.removeprefix("data: "))


# --- One request, whichever way it goes ---

Chunk: TypeAlias = dict[str, list[Any]]
"""One response: output name -> values."""


@dataclass(frozen=True)
class Way:
    """Protocol of a request, and whether its answer is streamed."""

    scheme: str
    streaming: bool

    def __str__(self) -> str:
        return f"{self.scheme}{' stream' if self.streaming else ''}"


WHOLE = (Way("http", streaming=False), Way("grpc", streaming=False))
STREAMS = (Way("http", streaming=True), Way("grpc", streaming=True))
WAYS = (*WHOLE, *STREAMS)


@dataclass
class Answer:
    """One answer: its chunks joined."""

    text: str = ""
    reasoning: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    prompt_logprobs: list[dict[str, Any] | None] = field(default_factory=list)
    cumulative_logprob: float | None = None
    finish_reason: str = ""
    stop_reason: str | None = None
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class Reply:
    """The responses and errors for one request."""

    chunks: list[Chunk]
    errors: list[str]

    def answers(self) -> list[Answer]:
        """The answers in the order of their indices."""
        assert self.errors == []
        found: dict[int, Answer] = {}
        for chunk in self.chunks:
            _add(chunk, found)
        return [found[index] for index in sorted(found)]

    def answer(self) -> Answer:
        (only,) = self.answers()
        return only

    def refusal(self) -> str:
        """The text of the error, which must be the first response."""
        assert self.chunks == []
        (error,) = self.errors
        return error


def ask(server: ServerProcess, way: Way, body: Fields) -> Reply:
    """Send `body`, in the form of /generate. Over gRPC, keys that are no inputs are sent as request parameters."""
    if way.streaming:
        body = {**body, "streaming": True}
    return _ask_http(server, way, body) if way.scheme == "http" else reply(exchange(server, sent(body)))


def sent(body: Fields, *, timeout_us: int | None = None) -> Sent:
    """The request of a gRPC stream for a body of /generate."""
    request_id = str(body.get("id", ""))
    tensors = {name: _tensor(name, value) for name, value in body.items() if name in _DTYPES}
    parameters: dict[str, Any] = {name: value for name, value in body.items() if name not in {*_DTYPES, "id"}}
    return Sent(tensors=tensors, parameters=parameters, request_id=request_id, timeout_us=timeout_us)


def reply(outcome: Outcome) -> Reply:
    """The reply on a gRPC stream with a single request."""
    return Reply([chunk_of(result) for result in outcome.results], [error.message() for error in outcome.errors])


def chunk_of(result: Any) -> Chunk:
    values = {output.name: result.as_numpy(output.name).tolist() for output in result.get_response().outputs}
    return {
        name: [value.decode() if isinstance(value, bytes) else value for value in of_output]
        for name, of_output in values.items()
    }


_NUMPY: Mapping[Dtype, npt.DTypeLike] = {
    Dtype.STRING: np.object_,
    Dtype.BOOL: np.bool_,
    Dtype.INT32: np.int32,
    Dtype.UINT64: np.uint64,
    Dtype.FP32: np.float32,
}
_DTYPES = {tensor.name: _NUMPY[tensor.dtype] for tensor in INPUTS}


def _tensor(name: str, value: object) -> Array:
    values = value if isinstance(value, list) else [value]
    encoded = [one.encode() if isinstance(one, str) else one for one in values]
    return np.array(encoded, dtype=_DTYPES[name])


def _ask_http(server: ServerProcess, way: Way, body: Fields) -> Reply:
    """Ask over HTTP. An error is an event too, unless Triton refuses the request before the model sees it."""
    response = post(server, "generate_stream" if way.streaming else "generate", body)
    documents = list(events(response)) if response.text.startswith("data: ") else [response.json()]
    chunks = [_from_json(document) for document in documents if "error" not in document]
    return Reply(chunks, [str(document["error"]) for document in documents if "error" in document])


def _from_json(document: Mapping[str, Any]) -> Chunk:
    """Read a response of /generate, which writes an output of one value without brackets."""
    outputs = {name: value for name, value in document.items() if name not in ("model_name", "model_version", "id")}
    return {name: value if isinstance(value, list) else [value] for name, value in outputs.items()}


def _add(chunk: Chunk, answers: dict[int, Answer]) -> None:
    """Add a response to the answers. The ids of several answers follow one another; num_output_tokens divides them."""
    indices = chunk.get("sequence_index", [0])
    ids = chunk.get("output_ids", [])
    for place, index in enumerate(indices):
        answer = answers.setdefault(index, Answer())
        values = {name: of_output[place] for name, of_output in chunk.items() if len(of_output) == len(indices)}
        count = len(ids) if len(indices) == 1 else values.get("num_output_tokens", 0)
        answer.token_ids += ids[:count]
        ids = ids[count:]
        _add_values(values, answer)


def _add_values(values: Fields, answer: Answer) -> None:
    answer.text += str(values["text_output"])
    answer.reasoning += str(values.get("reasoning_output", ""))
    answer.num_output_tokens += int(str(values.get("num_output_tokens", 0)))
    for name in ("logprobs", "prompt_logprobs"):
        getattr(answer, name).extend(json.loads(str(values.get(name, "[]"))))
    if "cumulative_logprob" in values:
        answer.cumulative_logprob = float(str(values["cumulative_logprob"]))
    if values.get("finish_reason", "None") != "None":
        answer.finish_reason = str(values["finish_reason"])
        stop_reason = str(values.get("stop_reason", "None"))
        answer.stop_reason = None if stop_reason == "None" else stop_reason
        for name in ("num_input_tokens", "num_cached_tokens"):
            setattr(answer, name, values[name])
