"""The asynchronous client, which has the same methods as the blocking one in `_client`."""

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Literal, overload

from deepseek_triton_client._asyncio_runtime import AsyncioRuntime
from deepseek_triton_client._batches import answers_in_order
from deepseek_triton_client._client import BaseClient, BaseStream
from deepseek_triton_client._core.checked_request import (
    BatchItem,
    Messages,
    Prompt,
    chat_request,
    prompt_request,
    tokenize_request,
)
from deepseek_triton_client._core.client_settings import Timeouts
from deepseek_triton_client._core.exceptions import DeepseekTritonError
from deepseek_triton_client._core.response_reader import read_model_info
from deepseek_triton_client._core.results import Chunk, Completion, Metrics, ModelMetadata, Readiness
from deepseek_triton_client._core.sampling_params import SamplingParams


class AsyncStream(BaseStream):
    """One answer, read with `async for` while it is generated; see `Stream`."""

    async def __aenter__(self) -> "AsyncStream":
        self._exchange = await self._calls.open(self._unopened())
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        chunk = await self._opened().next()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def completion(self) -> Completion:
        """The whole answer, including the chunks that were taken already. Raises what reading it raises."""
        async for _ in self:
            pass
        return self._opened().completion()

    async def close(self) -> None:
        """Cancel the request unless it has ended. May be called again."""
        if self._exchange is not None:
            await self._exchange.close()


class AsyncClient(BaseClient[AsyncStream]):
    """`Client` for asyncio, with the same arguments, results and errors. One event loop at a time uses a client, and
    all its tasks may share it. Cancelling a task that waits here cancels its request on the server."""

    _batch_types = (Iterable, AsyncIterable)
    _new_runtime = AsyncioRuntime
    _new_stream = AsyncStream

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeouts: Timeouts | None = None,
        **fields: Any,
    ) -> Completion:
        """See `Client.generate`."""
        request = self._request(prompt_request, prompt, params, fields, timeouts, request_id, streaming=False)
        return await self._calls.generate(request)

    async def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeouts: Timeouts | None = None,
        **fields: Any,
    ) -> Completion:
        """See `Client.chat`."""
        request = self._request(chat_request, messages, params, fields, timeouts, request_id, streaming=False)
        return await self._calls.generate(request)

    async def tokenize(
        self,
        content: str | Messages,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeouts: Timeouts | None = None,
        **fields: Any,
    ) -> tuple[int, ...]:
        """See `Client.tokenize`."""
        request = self._request(tokenize_request, content, params, fields, timeouts, request_id, streaming=False)
        return (await self._calls.generate(request)).answers[0].output_ids

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, timeouts: Timeouts | None = None
    ) -> str:
        """See `Client.detokenize`."""
        return (await self._calls.generate(self._detokenize_request(token_ids, skip_special_tokens, timeouts))).text

    async def model_info(self) -> dict[str, Any]:
        """See `Client.model_info`."""
        return read_model_info((await self._calls.generate(self._describe_request())).text)

    @overload
    def generate_many(
        self,
        requests: Iterable[BatchItem] | AsyncIterable[BatchItem],
        *,
        concurrency: int = ...,
        params: SamplingParams | None = ...,
        timeouts: Timeouts | None = ...,
        return_errors: Literal[False] = ...,
        **fields: Any,
    ) -> AsyncGenerator[Completion, None]: ...
    @overload
    def generate_many(
        self,
        requests: Iterable[BatchItem] | AsyncIterable[BatchItem],
        *,
        concurrency: int = ...,
        params: SamplingParams | None = ...,
        timeouts: Timeouts | None = ...,
        return_errors: bool,
        **fields: Any,
    ) -> AsyncGenerator[Completion | DeepseekTritonError, None]: ...
    def generate_many(
        self,
        requests: Iterable[BatchItem] | AsyncIterable[BatchItem],
        *,
        concurrency: int = 16,
        params: SamplingParams | None = None,
        timeouts: Timeouts | None = None,
        return_errors: bool = False,
        **fields: Any,
    ) -> AsyncGenerator[Any, None]:
        """See `Client.generate_many`. Wrap it in contextlib.aclosing if you leave the loop early."""
        make_request = self._batch(requests, params, fields, timeouts, concurrency)
        return answers_in_order(
            self._calls, requests, make_request, concurrency=concurrency, return_errors=return_errors
        )

    async def cancel(self, request_id: str) -> None:
        """See `Client.cancel`."""
        await self._calls.cancel(request_id)

    async def ready(self) -> bool:
        """See `Client.ready`."""
        return await self._calls.ready()

    async def readiness(self) -> tuple[Readiness, ...]:
        """See `Client.readiness`."""
        return await self._calls.readiness()

    async def wait_until_ready(
        self, timeout_s: float | None = None, on_progress: Callable[[Readiness], None] | None = None
    ) -> None:
        """See `Client.wait_until_ready`."""
        await self._calls.wait_until_ready(timeout_s, on_progress)

    async def metadata(self) -> ModelMetadata:
        """See `Client.metadata`."""
        return await self._calls.metadata()

    async def metrics(self) -> Metrics:
        """See `Client.metrics`."""
        return await self._calls.metrics()

    async def close(self) -> None:
        """Close the connections; streams that are still open break. May be called again."""
        if self._open_calls is not None:
            calls, self._open_calls = self._open_calls, None
            await calls.close()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
