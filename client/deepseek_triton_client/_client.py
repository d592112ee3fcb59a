"""The blocking client, and the base classes that both clients share."""

from collections.abc import AsyncIterable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Literal, TypeVar, overload

from deepseek_triton_client._blocking_runtime import BlockingRuntime, run
from deepseek_triton_client._core.calls import Calls
from deepseek_triton_client._core.checked_request import (
    BatchItem,
    Messages,
    Prompt,
    Request,
    batch_request,
    chat_request,
    describe_request,
    detokenize_request,
    prompt_request,
    tokenize_request,
)
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
from deepseek_triton_client._core.interfaces import Runtime
from deepseek_triton_client._core.response_reader import read_model_info
from deepseek_triton_client._core.results import Chunk, Completion, Metrics, ModelMetadata, Readiness
from deepseek_triton_client._core.sampling_params import JOINED_BY_GATEWAY, SamplingParams

_NO_PARAMS = SamplingParams()

StreamT = TypeVar("StreamT", bound="BaseStream")


class BaseStream:
    """Identity and progress of a stream: everything in it that does not wait."""

    def __init__(self, calls: Calls, request: Request) -> None:
        self._calls = calls
        self._request = request
        self._exchange: Exchange | None = None

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def url(self) -> str:
        """URL of the server that answers."""
        return self._opened().url

    @property
    def text(self) -> str:
        """The text so far; that of the first answer if the request asked for several."""
        return self._opened().text()

    @property
    def reasoning(self) -> str:
        """The reasoning so far; that of the first answer if the request asked for several."""
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
    """One answer, read chunk by chunk while it is generated. Iterate once and from one thread; `completion` reads the
    rest. Any error of the package can come between two chunks; it ends the stream."""

    def __enter__(self) -> "Stream":
        self._exchange = run(self._calls.open(self._unopened()))
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        chunk = run(self._opened().next())
        if chunk is None:
            raise StopIteration
        return chunk

    def completion(self) -> Completion:
        """The whole answer, including the chunks that were taken already. Raises what reading it raises."""
        for _ in self:
            pass
        return self._opened().completion()

    def close(self) -> None:
        """Cancel the request unless it has ended. May be called again."""
        if self._exchange is not None:
            run(self._exchange.close())


class BaseClient(Generic[StreamT]):
    """Settings, and requests made of a call's arguments: everything in a client that does not wait."""

    _batch_types: tuple[type, ...] = (Iterable,)
    _new_runtime: Callable[[], Runtime]
    _new_stream: Callable[[Calls, Request], StreamT]

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
        context_urls: object = None,
    ) -> None:
        if context_urls:
            raise InvalidRequest(f"context_urls: {JOINED_BY_GATEWAY}")
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
        self._open_calls: Calls | None = Calls(self._settings, self._new_runtime())

    @property
    def url(self) -> str:
        """URL of the first server."""
        return str(self._settings.endpoints[0])

    @property
    def model_name(self) -> str:
        return self._settings.model_name

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeouts: Timeouts | None = None,
        **fields: Any,
    ) -> StreamT:
        """Return the answer as a stream: `with client.stream(...) as stream:`, then iterate over its chunks. With
        AsyncClient these are `async with` and `async for`.

        Entering the block sends the request and returns with the first response; leaving it early cancels the request
        on the server. The arguments are those of `generate`, and all limits of `timeouts` apply.
        """
        request = self._request(prompt_request, prompt, params, fields, timeouts, request_id, streaming=True)
        return self._new_stream(self._calls, request)

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeouts: Timeouts | None = None,
        **fields: Any,
    ) -> StreamT:
        """Return the answer of `chat` as a stream; see `stream`."""
        request = self._request(chat_request, messages, params, fields, timeouts, request_id, streaming=True)
        return self._new_stream(self._calls, request)

    def __repr__(self) -> str:
        urls = ", ".join(repr(str(endpoint)) for endpoint in self._settings.endpoints)
        return f"{type(self).__name__}({urls}, model_name={self.model_name!r})"

    @property
    def _calls(self) -> Calls:
        if self._open_calls is None:
            raise RuntimeError("the client is closed")
        return self._open_calls

    def _request(
        self,
        make: Callable[..., Request],
        content: Prompt | Messages,
        params: SamplingParams | None,
        fields: Mapping[str, Any],
        timeouts: Timeouts | None,
        request_id: str | None,
        *,
        streaming: bool,
    ) -> Request:
        return make(
            content,
            params=_merged(params, fields),
            timeouts=self._limits(timeouts, streaming=streaming),
            streaming=streaming,
            request_id=request_id,
        )

    def _detokenize_request(
        self, token_ids: Sequence[int], skip_special_tokens: bool, timeouts: Timeouts | None
    ) -> Request:
        fields = {"skip_special_tokens": skip_special_tokens}
        return self._request(detokenize_request, token_ids, None, fields, timeouts, None, streaming=False)

    def _describe_request(self) -> Request:
        limits = self._whole_answer_timeouts
        return describe_request(params=_NO_PARAMS, timeouts=limits, streaming=False, request_id=None)

    def _batch(
        self,
        requests: Iterable[BatchItem] | AsyncIterable[BatchItem],
        params: SamplingParams | None,
        fields: Mapping[str, Any],
        timeouts: Timeouts | None,
        concurrency: int,
    ) -> Callable[[BatchItem], Request]:
        """Return the function that makes a request of each item. Raises InvalidRequest for mistakes about all items."""
        if isinstance(requests, (str, bytes, Mapping)) or not isinstance(requests, self._batch_types):
            raise InvalidRequest(
                f"requests: expected a list or another iterable of requests, got {type(requests).__name__}"
            )
        if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
            raise InvalidRequest(f"concurrency: expected an integer of at least 1, got {concurrency!r}")
        shared = _merged(params, fields)
        limits = self._limits(timeouts, streaming=False)
        return partial(batch_request, params=shared, timeouts=limits)

    def _limits(self, timeouts: Timeouts | None, *, streaming: bool) -> Timeouts:
        if timeouts is None:
            return self._settings.timeouts if streaming else self._whole_answer_timeouts
        for problem in setting_problems("timeouts", timeouts):
            raise InvalidRequest(problem)
        return timeouts if streaming else timeouts.for_whole_answers()


def _merged(params: SamplingParams | None, fields: Mapping[str, Any]) -> SamplingParams:
    """Raises InvalidRequest."""
    if params is None:
        params = _NO_PARAMS
    elif not isinstance(params, SamplingParams):
        given = type(params).__name__
        raise InvalidRequest(f"params: expected SamplingParams, got {given}; give fields by name: **{{...}}")
    return params.merged(fields)


class Client(BaseClient[Stream]):
    """Generates text with one model on one or several Triton servers. Its methods block.

    `url` is "http://host:port", "grpc://host:port", https:// or grpcs://; "host:port" alone is HTTP, and a missing port
    is Triton's own. With several URLs, `balance` "failover" uses the first server that works, "round_robin" uses each
    in turn. With an empty `model_version` the server chooses the version. `token` is sent as a bearer token; a function
    is called for a token before each request. `stream_mode` says how a model of others streams, if not as usual.
    `metrics_url` is, unless given, beside /v1, or at port 8002 beside 8000 and 8001 only. Nothing is sent
    before the first call. Threads may share a client.

    Every method raises only errors of this package (`DeepseekTritonError`); a closed client raises RuntimeError.
    """

    _new_runtime = BlockingRuntime
    _new_stream = Stream

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeouts: Timeouts | None = None,
        **fields: Any,
    ) -> Completion:
        """Return the whole answer to a text or to token ids.

        `fields` are fields of SamplingParams by name, and win over those of `params`. `timeouts` replaces the client's
        time limits for this request; only `connect` and `total` apply here. An exception that interrupts the call, such
        as KeyboardInterrupt, cancels the request on the server.
        """
        request = self._request(prompt_request, prompt, params, fields, timeouts, request_id, streaming=False)
        return run(self._calls.generate(request))

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeouts: Timeouts | None = None,
        **fields: Any,
    ) -> Completion:
        """Return the answer to a conversation, which the server renders with the checkpoint's own chat template.

        The reasoning is kept apart, in `Completion.reasoning`, unless `separate_reasoning` is False.
        `chat_template_kwargs={"thinking": True}` switches reasoning on in models that can do without. All other
        arguments are those of `generate`.
        """
        request = self._request(chat_request, messages, params, fields, timeouts, request_id, streaming=False)
        return run(self._calls.generate(request))

    def tokenize(
        self,
        content: str | Messages,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeouts: Timeouts | None = None,
        **fields: Any,
    ) -> tuple[int, ...]:
        """Return the token ids of a text, or of a conversation as the server would render it for `chat`.

        Of the fields `add_special_tokens`, `truncate_prompt_tokens`, `chat_template_kwargs` and `tools` count. Nothing
        is generated, so the answer does not wait for other requests.
        """
        request = self._request(tokenize_request, content, params, fields, timeouts, request_id, streaming=False)
        return run(self._calls.generate(request)).answers[0].output_ids

    def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, timeouts: Timeouts | None = None
    ) -> str:
        """Return the text of token ids; U+FFFD stands for a part of a character."""
        return run(self._calls.generate(self._detokenize_request(token_ids, skip_special_tokens, timeouts))).text

    def model_info(self) -> dict[str, Any]:
        """Return what the server says of its model: name, limits, supported fields and more. docs/contract.md lists
        the keys. Triton's own description is `metadata`."""
        return read_model_info(run(self._calls.generate(self._describe_request())).text)

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
        """Yield the answers to many requests in their order; at most `concurrency` requests are active at a time.

        A request is a prompt, or a mapping of the arguments of `generate` (with "messages", of `chat`); these win over
        the arguments given here. `requests` is read only as fast as answers are taken. The first error ends the batch;
        with `return_errors` the error stands in place of its answer instead. Leaving the loop cancels the active
        requests.
        """
        from deepseek_triton_client._batches import answers_in_background  # here, because it needs asyncio

        _ = self._calls  # a closed client raises here, and not with the first answer
        make_request = self._batch(requests, params, fields, timeouts, concurrency)
        return answers_in_background(
            self._settings, requests, make_request, concurrency=concurrency, return_errors=return_errors
        )

    def cancel(self, request_id: str) -> None:
        """End the active request with this id, whichever client sent it; its finish_reason is then "cancelled". Raises
        InvalidRequest if no server has such a request."""
        run(self._calls.cancel(request_id))

    def ready(self) -> bool:
        """Tell whether a server can answer now and in time. Raises ModelNotFound for OpenAI's API, if it has no /v1."""
        return run(self._calls.ready())

    def readiness(self) -> tuple[Readiness, ...]:
        """Tell how far each server is now, in the order of the URLs; one that can't be reached is "unreachable"."""
        return run(self._calls.readiness())

    def wait_until_ready(
        self, timeout_s: float | None = None, on_progress: Callable[[Readiness], None] | None = None
    ) -> None:
        """Wait until a server is ready, asking once a second; `timeout_s` None waits for ever. Raises DeadlineExceeded,
        and ModelNotFound when all servers are up and have no such model, not even in their repositories.

        Loading DeepSeek from cold storage takes from minutes to an hour. `on_progress` is called with each state seen.
        """
        run(self._calls.wait_until_ready(timeout_s, on_progress))

    def metadata(self) -> ModelMetadata:
        """Return what Triton says about the model. Raises ModelNotFound if Triton has no such model."""
        return run(self._calls.metadata())

    def metrics(self) -> Metrics:
        """Return the metrics at `metrics_url`, or the first server's: beside /v1, or at 8002 beside 8000 and 8001."""
        return run(self._calls.metrics())

    def close(self) -> None:
        """Close the connections; streams that are still open break. May be called again."""
        if self._open_calls is not None:
            calls, self._open_calls = self._open_calls, None
            run(calls.close())

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
