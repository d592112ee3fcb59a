"""One active request: from sending it to the end of its answer."""

import time
from collections import defaultdict, deque
from dataclasses import dataclass, field, fields, replace

from deepseek_triton_client._core.checked_request import Request
from deepseek_triton_client._core.exceptions import Cancelled, DeadlineExceeded, DeepseekTritonError, ServerUnavailable
from deepseek_triton_client._core.interfaces import ResponseStream, Watchdog
from deepseek_triton_client._core.response_reader import ResponseReader
from deepseek_triton_client._core.results import Answer, Chunk, Completion, PerfMetrics, TokenLogprobs
from deepseek_triton_client._core.server_group import ServerState


class Exchange:
    """One request to one server, and its answer so far. Used by one thread or task at a time. Call `begin`, then `next`
    until it returns None, then `completion`; call `close` in any case."""

    def __init__(
        self,
        request: Request,
        *,
        server: ServerState,
        responses: ResponseStream,
        reader: ResponseReader,
        watchdog: Watchdog,
        started: float,
    ) -> None:
        """`started`: the moment of the call by time.monotonic()."""
        self.request = request
        self._server = server
        self._responses = responses
        self._reader = reader
        self._watchdog = watchdog
        self._started = started
        self._pending: deque[Chunk] = deque()
        self._answers: dict[int, _PartialAnswer] = defaultdict(_PartialAnswer)
        self._last: Chunk | None = None
        self._num_received = 0
        self._first_s = self._last_s = 0.0
        self._ended = False
        self._closed = False

    @property
    def url(self) -> str:
        """URL of the server that answers."""
        return self._server.url

    async def begin(self) -> None:
        """Send the request and wait for the first response. If it raises, the request is closed already."""
        await self._receive()

    async def next(self) -> Chunk | None:
        """Return the next chunk; None at the end of a complete answer."""
        while not self._ended and (not self._pending or self._lacks_counts()):
            if self._closed:
                raise self._for_this_request(Cancelled("the stream was closed before its end"))
            await self._receive()
        return self._pending.popleft() if self._pending else None

    async def close(self) -> None:
        """Cancel the request unless it has ended. May be called again, and has to be after an interrupted call."""
        self._closed = True
        await end_request(self._watchdog, self._responses)

    def text(self, index: int = 0) -> str:
        """The text of one answer so far."""
        answer = self._answers.get(index)
        return "".join(answer.text) if answer else ""

    def reasoning(self, index: int = 0) -> str:
        answer = self._answers.get(index)
        return "".join(answer.reasoning) if answer else ""

    def completion(self) -> Completion:
        """Return the whole answer. To be called after the end."""
        last, answers = self._last, self._answers.values()
        counts = [each.num_output_tokens for each in answers if each.num_output_tokens is not None]
        metrics = [each.perf_metrics for each in answers if each.perf_metrics is not None]
        reasoning = [each.num_reasoning_tokens for each in answers if each.num_reasoning_tokens is not None]
        counted = len(counts) == len(answers)  # OpenAI's usage is that of all together
        return Completion(
            answers=tuple(each.answer(counted) for _, each in sorted(self._answers.items())) or (Answer(text=""),),
            num_input_tokens=last.num_input_tokens if last else None,
            num_output_tokens=sum(counts) if counts else None,
            num_cached_tokens=last.num_cached_tokens if last else None,
            num_reasoning_tokens=sum(reasoning) if reasoning else None,
            perf_metrics=metrics[-1] if metrics else None,
            request_id=self.request.request_id,
            url=self.url,
            time_to_first_token_s=self._first_s if self._num_received > 1 else None,
            total_s=self._last_s,
        )

    async def _receive(self) -> None:
        """Wait for the next response and note its chunks, or the end."""
        self._watchdog.expect(first=not self._num_received)
        try:
            outputs = await self._responses.receive()
            self._raise_if_expired(None)
        except DeepseekTritonError as exc:
            if self._reader.finished:  # every answer is complete, and a later error can't change that
                outputs = None
            else:
                await self.close()
                self._raise_if_expired(exc)
                if isinstance(exc, ServerUnavailable):
                    self._server.failed()
                raise self._for_this_request(exc) from exc.__cause__
        self._watchdog.relax()
        try:
            chunks = self._reader.end() if outputs is None else self._reader.chunks(outputs)
        except DeepseekTritonError as exc:
            # The answer isn't what was asked for, so nothing that comes on its connection is to be trusted any more.
            self._responses.interrupt()
            await self.close()
            raise self._for_this_request(exc) from exc.__cause__
        if outputs is None:
            self._ended = True
            await self.close()
        else:
            self._num_received += 1
        for chunk in chunks:
            self._add(chunk)

    def _add(self, chunk: Chunk) -> None:
        self._last_s = time.monotonic() - self._started
        self._first_s = self._first_s or self._last_s
        self._answers[chunk.index].add(chunk)
        self._last = chunk
        if self._lacks_counts() and not (chunk.finish_reason or chunk.text or chunk.reasoning):
            counts = {each.name: getattr(chunk, each.name) for each in fields(chunk) if each.name.startswith("num_")}
            chunk = replace(self._pending.pop(), **counts)
        self._pending.append(chunk)

    def _lacks_counts(self) -> bool:
        """Tell whether the last chunk waits for its counts, which OpenAI's API sends behind the end, if at all."""
        return bool(self._pending) and self._reader.finished and self._pending[-1].num_output_tokens is None

    def _for_this_request(self, error: DeepseekTritonError) -> DeepseekTritonError:
        """Add this request's id and URL to the error. After its first response a request counts as processed."""
        error.request_id = self.request.request_id
        error.url = self.url
        error.unprocessed = error.unprocessed and not self._num_received
        return error

    def _raise_if_expired(self, cause: Exception | None) -> None:
        limit = self._watchdog.expired
        if limit is not None and not self._reader.finished:
            seconds = getattr(self.request.timeouts, limit)
            raise self._for_this_request(DeadlineExceeded(f"timeouts.{limit} of {seconds:g} s ran out")) from cause


async def end_request(watchdog: Watchdog, responses: ResponseStream) -> None:
    """End the time limits of a request, then its use of the network."""
    try:
        watchdog.stop()  # First, because the watchdog must not interrupt a connection that serves the next request
    except BaseException:
        responses.interrupt()  # so that the connection serves no other request
        raise
    finally:
        await responses.close()


@dataclass(slots=True)
class _PartialAnswer:
    """The chunks of one answer, put together so far."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | None = None
    num_output_tokens: int | None = None
    num_reasoning_tokens: int | None = None
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
        if chunk.num_reasoning_tokens is not None:
            self.num_reasoning_tokens = chunk.num_reasoning_tokens
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

    def answer(self, counted: bool) -> Answer:
        return Answer(
            text="".join(self.text),
            reasoning="".join(self.reasoning),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            num_output_tokens=self.num_output_tokens if counted else None,
            num_reasoning_tokens=self.num_reasoning_tokens if counted else None,
            output_ids=tuple(self.output_ids),
            cumulative_logprob=self.cumulative_logprob,
            logprobs=tuple(self.logprobs),
            prompt_logprobs=tuple(self.prompt_logprobs),
        )
