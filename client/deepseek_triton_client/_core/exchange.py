"""One request under way: from its first response to its end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from deepseek_triton_client._core.checked_request import Request
from deepseek_triton_client._core.exceptions import Cancelled, DeadlineExceeded, DeepseekTritonError, ServerUnavailable
from deepseek_triton_client._core.response_reader import ResponseReader
from deepseek_triton_client._core.results import Answer, Chunk, Completion, PerfMetrics, TokenLogprobs
from deepseek_triton_client._core.runtime import Watchdog
from deepseek_triton_client._core.transport import ResponseStream


class Exchange:
    """`next` until it gives None, then `completion`; `close` in any case. One thread or task at a time."""

    def __init__(
        self,
        request: Request,
        *,
        url: str,
        responses: ResponseStream,
        reader: ResponseReader,
        watchdog: Watchdog,
        started: float,
        on_lost: Callable[[], None],
    ) -> None:
        """`on_lost` is called where the server turns out to be unavailable."""
        self.request = request
        self.url = url
        self._responses = responses
        self._reader = reader
        self._watchdog = watchdog
        self._started = started
        self._on_lost = on_lost
        self._pending: deque[Chunk] = deque()
        self._answers: dict[int, _Gathered] = {}
        self._last: Chunk | None = None
        self._num_received = 0
        self._first_s = self._last_s = 0.0
        self._ended = False
        self._closed = False

    async def begin(self) -> None:
        """Sends the request and waits for the first response. What it raises has cost the server nothing more."""
        await self._receive()

    async def next(self) -> Chunk | None:
        """What is new; None at the end, which is then a complete one."""
        while not self._pending:
            if self._ended:
                return None
            if self._closed:
                raise self._own(Cancelled("the stream was closed before its end"))
            await self._receive()
        return self._pending.popleft()

    async def close(self) -> None:
        """Cancels the request unless it has ended. May be called again, and is to be where it was interrupted."""
        self._closed = True
        await let_go(self._watchdog, self._responses)

    def text(self, index: int = 0) -> str:
        """Of one answer, so far."""
        gathered = self._answers.get(index)
        return "".join(gathered.text) if gathered else ""

    def reasoning(self, index: int = 0) -> str:
        gathered = self._answers.get(index)
        return "".join(gathered.reasoning) if gathered else ""

    def completion(self) -> Completion:
        """After the end."""
        last = self._last
        counts = [each.num_output_tokens for each in self._answers.values() if each.num_output_tokens is not None]
        return Completion(
            answers=tuple(gathered.answer() for _, gathered in sorted(self._answers.items())) or (Answer(text=""),),
            num_input_tokens=last.num_input_tokens if last else None,
            num_output_tokens=sum(counts) if counts else None,
            num_cached_tokens=last.num_cached_tokens if last else None,
            perf_metrics=self._perf_metrics(),
            request_id=self.request.request_id,
            url=self.url,
            time_to_first_token_s=self._first_s if self._num_received > 1 else None,
            total_s=self._last_s,
        )

    def _perf_metrics(self) -> PerfMetrics | None:
        found = [each.perf_metrics for each in self._answers.values() if each.perf_metrics is not None]
        return found[-1] if found else None

    async def _receive(self) -> None:
        """The next response's chunks, or the end."""
        self._watchdog.expect(first=not self._num_received)
        try:
            outputs = await self._responses.receive()
            self._raise_if_expired(None)
        except DeepseekTritonError as exc:
            if self._reader.finished:  # every answer is complete: what follows can't spoil it
                outputs = None
            else:
                await self.close()
                self._raise_if_expired(exc)
                if isinstance(exc, ServerUnavailable):
                    self._on_lost()
                raise self._own(exc) from exc.__cause__
        self._watchdog.relax()
        try:
            if outputs is None:
                chunks = self._reader.end()
                self._ended = True
            else:
                chunks = self._reader.chunks(outputs)
        except DeepseekTritonError as exc:
            await self.close()
            raise self._own(exc) from exc.__cause__
        if self._ended:
            await self.close()
        if outputs is not None:
            self._num_received += 1
        for chunk in chunks:
            self._note(chunk)

    def _note(self, chunk: Chunk) -> None:
        self._last_s = time.monotonic() - self._started
        if not self._first_s:
            self._first_s = self._last_s
        if chunk.index not in self._answers:
            self._answers[chunk.index] = _Gathered()
        self._answers[chunk.index].add(chunk)
        self._last = chunk
        self._pending.append(chunk)

    def _own(self, error: DeepseekTritonError) -> DeepseekTritonError:
        """Says whose it is. After the first response the request was worked on, whatever the error says."""
        error.request_id = self.request.request_id
        error.url = self.url
        error.unprocessed = error.unprocessed and not self._num_received
        return error

    def _raise_if_expired(self, cause: Exception | None) -> None:
        limit = self._watchdog.expired
        if limit is not None and not self._reader.finished:
            seconds = getattr(self.request.timeouts, limit)
            raise self._own(DeadlineExceeded(f"timeouts.{limit} of {seconds:g} s ran out")) from cause


async def let_go(watchdog: Watchdog, responses: ResponseStream) -> None:
    """The end of a request's time limits, and of what it holds of the network."""
    try:
        watchdog.stop()  # first: an interrupt must not hit a connection that serves the next request
    except BaseException:
        responses.interrupt()  # so it serves none
        raise
    finally:
        await responses.close()


@dataclass(slots=True)
class _Gathered:
    """The chunks of one answer, put together."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | None = None
    num_output_tokens: int | None = None
    output_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    perf_metrics: PerfMetrics | None = None

    def add(self, chunk: Chunk) -> None:
        self.text.append(chunk.text)
        if chunk.reasoning:
            self.reasoning.append(chunk.reasoning)
        if chunk.num_output_tokens is not None:
            self.num_output_tokens = (self.num_output_tokens or 0) + chunk.num_output_tokens
        if chunk.output_ids:
            self.output_ids.extend(chunk.output_ids)
        if chunk.cumulative_logprob is not None:
            self.cumulative_logprob = chunk.cumulative_logprob
        if chunk.logprobs:
            self.logprobs.extend(chunk.logprobs)
        if chunk.prompt_logprobs:
            self.prompt_logprobs.extend(chunk.prompt_logprobs)
        if chunk.finish_reason is not None:
            self.finish_reason, self.stop_reason = chunk.finish_reason, chunk.stop_reason
        if chunk.perf_metrics is not None:
            self.perf_metrics = chunk.perf_metrics

    def answer(self) -> Answer:
        return Answer(
            text="".join(self.text),
            reasoning="".join(self.reasoning),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            num_output_tokens=self.num_output_tokens,
            output_ids=tuple(self.output_ids),
            cumulative_logprob=self.cumulative_logprob,
            logprobs=tuple(self.logprobs),
            prompt_logprobs=tuple(self.prompt_logprobs),
        )
