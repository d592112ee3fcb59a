"""The blocking client, and what both clients share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, overload

from deepseek_triton_client._blocking_runtime import BlockingRuntime, run
from deepseek_triton_client._core.calls import Calls
from deepseek_triton_client._core.checked_request import Messages, Prompt, Request, conversing, listed, prompted
from deepseek_triton_client._core.client_settings import (
    Balance,
    Connection,
    Endpoint,
    Retries,
    Settings,
    StreamMode,
    Timeouts,
    Tls,
    setting_problems,
)
from deepseek_triton_client._core.exceptions import DeepseekTritonError, InvalidRequest
from deepseek_triton_client._core.exchange import Exchange
from deepseek_triton_client._core.prometheus_text import Metrics
from deepseek_triton_client._core.results import Chunk, Completion, ModelMetadata, Readiness
from deepseek_triton_client._core.runtime import Runtime
from deepseek_triton_client._core.sampling_params import SamplingParams

BatchItem = Prompt | Mapping[str, Any]
"""A prompt, or a request by the names of the arguments: {"prompt" or "messages": ..., "max_tokens": ..., ...}."""


class BaseClient(ABC):
    """What does not wait: the settings, and requests made of arguments."""

    _batch_kinds: tuple[type, ...] = (Iterable,)

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        model_name: str = "tensorrt_llm",
        model_version: str = "",
        timeouts: Timeouts | None = None,
        retries: Retries | None = None,
        balance: Balance = "failover",
        tls: Tls | None = None,
        token: str | Callable[[], str] | None = None,
        headers: Mapping[str, str] | None = None,
        connection: Connection | None = None,
        stream_mode: StreamMode | None = None,
        metrics_url: str | None = None,
    ) -> None:
        self._settings = Settings(
            endpoints=Endpoint.parse_all(url),
            model_name=model_name,
            model_version=model_version,
            timeouts=Timeouts() if timeouts is None else timeouts,
            retries=Retries() if retries is None else retries,
            balance=balance,
            tls=Tls() if tls is None else tls,
            token=token,
            headers={} if headers is None else headers,
            connection=Connection() if connection is None else connection,
            stream_mode=stream_mode,
            metrics_url=metrics_url,
        )
        self._whole_answer_timeouts = self._settings.timeouts.for_whole_answers()
        self._open_calls: Calls | None = Calls(self._settings, self._runtime())

    @property
    def url(self) -> str:
        """Of the first server."""
        return str(self._settings.endpoints[0])

    @property
    def model_name(self) -> str:
        return self._settings.model_name

    def __repr__(self) -> str:
        urls = ", ".join(repr(str(endpoint)) for endpoint in self._settings.endpoints)
        return f"{type(self).__name__}({urls}, model_name={self.model_name!r})"

    @abstractmethod
    def _runtime(self) -> Runtime: ...

    @property
    def _calls(self) -> Calls:
        if self._open_calls is None:
            raise RuntimeError("the client is closed")
        return self._open_calls

    def _prompted(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        fields: Mapping[str, Any],
        *,
        streaming: bool,
        timeouts: Timeouts | None = None,
        request_id: str | None = None,
    ) -> Request:
        return prompted(
            prompt,
            params=_merged(params, fields),
            timeouts=self._limits(timeouts, streaming=streaming),
            streaming=streaming,
            request_id=request_id,
        )

    def _conversing(
        self,
        messages: Messages,
        params: SamplingParams | None,
        fields: Mapping[str, Any],
        *,
        streaming: bool,
        timeouts: Timeouts | None = None,
        request_id: str | None = None,
    ) -> Request:
        return conversing(
            messages,
            params=_merged(params, fields),
            timeouts=self._limits(timeouts, streaming=streaming),
            streaming=streaming,
            request_id=request_id,
        )

    def _batch(
        self,
        requests: Iterable[BatchItem] | AsyncIterable[BatchItem],
        params: SamplingParams | None,
        fields: Mapping[str, Any],
        timeouts: Timeouts | None,
        concurrency: int,
    ) -> Callable[[BatchItem], Request]:
        """What makes a request of each of `requests`. Raises InvalidRequest for what is wrong with all of them."""
        if isinstance(requests, (str, bytes, Mapping)) or not isinstance(requests, self._batch_kinds):
            raise InvalidRequest(f"requests: expected several, in a list or the like, got {type(requests).__name__}")
        if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
            raise InvalidRequest(f"concurrency: expected an integer of at least 1, got {concurrency!r}")
        shared = _merged(params, fields)
        limits = self._limits(timeouts, streaming=False)
        return lambda item: _listed(item, shared, limits)

    def _limits(self, timeouts: Timeouts | None, *, streaming: bool) -> Timeouts:
        if timeouts is None:
            return self._settings.timeouts if streaming else self._whole_answer_timeouts
        for problem in setting_problems("timeouts", timeouts):
            raise InvalidRequest(problem)
        return timeouts if streaming else timeouts.for_whole_answers()


_NO_PARAMS = SamplingParams()


def _merged(params: SamplingParams | None, fields: Mapping[str, Any]) -> SamplingParams:
    """Raises InvalidRequest."""
    if params is None:
        params = _NO_PARAMS
    elif not isinstance(params, SamplingParams):
        given = type(params).__name__
        raise InvalidRequest(f"params: expected SamplingParams, got {given}; give fields by name: **{{...}}")
    return params.merged(fields)


def _listed(item: BatchItem, params: SamplingParams, timeouts: Timeouts) -> Request:
    """One of a batch. Raises InvalidRequest."""
    if not isinstance(item, Mapping):
        return prompted(item, params=params, timeouts=timeouts, streaming=False, request_id=None)
    kind, content, request_id, own = listed(item)
    make: Callable[..., Request] = conversing if kind == "messages" else prompted
    return make(content, params=params.merged(own), timeouts=timeouts, streaming=False, request_id=request_id)


class Client(BaseClient):
    """Generates text with one model of one or several Triton servers, and blocks while it does.

    `url` is "http://host:port", "grpc://host:port", https:// or grpcs://; "host:port" is HTTP, and a missing port is
    Triton's own. Of several, `balance` "failover" takes the first that is there, "round_robin" each in turn. An empty
    `model_version` leaves the choice to the server. `token` is sent as a bearer token; a function is asked for it each
    time. `stream_mode` says how a foreign model streams, where it can't be recognised. `metrics_url` is
    "http://host:8002/metrics" unless given. Nothing is sent before the first call. Threads may share a client.

    Every method raises errors of this package's tree (`DeepseekTritonError`) and no other library's; a closed client
    raises RuntimeError.
    """

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeouts: Timeouts | None = None,
        **fields: Any,
    ) -> Completion:
        """The whole answer at once, to a text or to token ids.

        `fields` are fields of SamplingParams by name and win over those of `params`. `timeouts` replaces the client's
        for this request; of them, `connect` and `total` apply. An interrupt cancels the request on the server.
        """
        request = self._prompted(prompt, params, fields, streaming=False, timeouts=timeouts, request_id=request_id)
        return run(self._calls.generate(request))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeouts: Timeouts | None = None,
        **fields: Any,
    ) -> Stream:
        """The answer as it comes: `with client.stream(...) as stream:`, then iterate.

        Entering the block sends the request and returns with the first response; leaving it early cancels the request
        on the server. Arguments are those of `generate`, and all of `timeouts` applies.
        """
        request = self._prompted(prompt, params, fields, streaming=True, timeouts=timeouts, request_id=request_id)
        return Stream(self._calls, request)

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeouts: Timeouts | None = None,
        **fields: Any,
    ) -> Completion:
        """The model's answer to a conversation, rendered with the checkpoint's own chat template.

        The thinking comes apart, in `Completion.reasoning`, unless `separate_reasoning` is False.
        `chat_template_kwargs={"thinking": True}` switches it on where the model can do both. Else as `generate`.
        """
        request = self._conversing(messages, params, fields, streaming=False, timeouts=timeouts, request_id=request_id)
        return run(self._calls.generate(request))

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeouts: Timeouts | None = None,
        **fields: Any,
    ) -> Stream:
        """`chat` as it comes; see `stream`."""
        request = self._conversing(messages, params, fields, streaming=True, timeouts=timeouts, request_id=request_id)
        return Stream(self._calls, request)

    @overload
    def generate_many(
        self,
        requests: Iterable[BatchItem],
        *,
        concurrency: int = ...,
        params: SamplingParams | None = ...,
        timeouts: Timeouts | None = ...,
        return_errors: Literal[False] = ...,
        **fields: Any,
    ) -> Generator[Completion, None, None]: ...
    @overload
    def generate_many(
        self,
        requests: Iterable[BatchItem],
        *,
        concurrency: int = ...,
        params: SamplingParams | None = ...,
        timeouts: Timeouts | None = ...,
        return_errors: bool,
        **fields: Any,
    ) -> Generator[Completion | DeepseekTritonError, None, None]: ...
    def generate_many(
        self,
        requests: Iterable[BatchItem],
        *,
        concurrency: int = 16,
        params: SamplingParams | None = None,
        timeouts: Timeouts | None = None,
        return_errors: bool = False,
        **fields: Any,
    ) -> Generator[Any, None, None]:
        """The answers to many requests, in their order, at most `concurrency` of them under way at a time.

        A request is a prompt or a mapping of `generate`'s arguments (`chat`'s with "messages"), which win over those
        given here. Both sides are lazy: requests are read as answers leave. The first error ends it all; with
        `return_errors` it takes its answer's place instead. Leaving the loop cancels what is under way.
        """
        from deepseek_triton_client._background_batch import in_background  # here, because it needs asyncio

        _ = self._calls  # a closed client says so at once
        make = self._batch(requests, params, fields, timeouts, concurrency)
        return in_background(self._settings, requests, make, concurrency=concurrency, return_errors=return_errors)

    def cancel(self, request_id: str) -> None:
        """Ends the running request of this id, whoever sent it; it then ends with finish_reason "cancelled".

        Raises InvalidRequest where no server has it.
        """
        run(self._calls.cancel(request_id))

    def ready(self) -> bool:
        """Whether a server can answer now. False also where none can be reached or answers in time."""
        return run(self._calls.ready())

    def readiness(self) -> tuple[Readiness, ...]:
        """How far each server is now, in the order of their URLs; what can't be reached is "unreachable"."""
        return run(self._calls.readiness())

    def wait_until_ready(
        self, timeout_s: float | None = None, on_progress: Callable[[Readiness], None] | None = None
    ) -> None:
        """Asks once a second until a server is ready; None waits for ever. Raises DeadlineExceeded.

        A cold DeepSeek takes from minutes to an hour to load. `on_progress` gets each answer.
        """
        run(self._calls.wait_until_ready(timeout_s, on_progress))

    def metadata(self) -> ModelMetadata:
        """What Triton says the model is. Raises ModelNotFound where there is none."""
        return run(self._calls.metadata())

    def metrics(self) -> Metrics:
        """What the server's /metrics says, of `metrics_url` or of port 8002 of the first server."""
        return run(self._calls.metrics())

    def close(self) -> None:
        """Closes the connections; streams still open break. May be called again."""
        if self._open_calls is not None:
            calls, self._open_calls = self._open_calls, None
            run(calls.close())

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _runtime(self) -> Runtime:
        return BlockingRuntime()


class BaseStream:
    """What does not wait: who the stream is, and what it has brought so far."""

    def __init__(self, calls: Calls, request: Request) -> None:
        self._calls = calls
        self._request = request
        self._exchange: Exchange | None = None

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def url(self) -> str:
        """Of the server that answers."""
        return self._opened().url

    @property
    def text(self) -> str:
        """All of it so far; of the first answer, where there are several."""
        return self._opened().text()

    @property
    def reasoning(self) -> str:
        """The thinking so far; of the first answer, where there are several."""
        return self._opened().reasoning()

    def _opened(self) -> Exchange:
        if self._exchange is None:
            raise RuntimeError("the stream is not open: enter its `with` block first")
        return self._exchange

    def _unopened(self) -> Request:
        if self._exchange is not None:
            raise RuntimeError("a stream can be entered only once")
        return self._request


class Stream(BaseStream):
    """One answer as it comes. Iterate for chunks, once and from one thread; `completion()` reads what is left.

    Any error of the package can come between two chunks; it ends the stream.
    """

    def __enter__(self) -> Stream:
        self._exchange = run(self._calls.open(self._unopened()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        chunk = run(self._opened().next())
        if chunk is None:
            raise StopIteration
        return chunk

    def completion(self) -> Completion:
        """The whole answer, chunks already taken included. Raises what reading it raises."""
        for _ in self:
            pass
        return self._opened().completion()

    def close(self) -> None:
        """Cancels the request unless it has ended. May be called again."""
        if self._exchange is not None:
            run(self._exchange.close())
