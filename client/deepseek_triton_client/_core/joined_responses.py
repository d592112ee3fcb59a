"""A request that a context server and a generation server share, as one stream of responses.

The context server computes the prompt and gives the first text; a generation server goes on from there. Whoever asked
the first has to ask the second, because the context server keeps the prompt's KV cache until then. So both are asked
by a job in the background. It goes on when the caller has left or has got an error: it then asks for one token only.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from deepseek_triton_client._core.checked_request import Request
from deepseek_triton_client._core.client_settings import Retries
from deepseek_triton_client._core.exceptions import (
    CONTEXT_LOST,
    Cancelled,
    DeepseekTritonError,
    Overloaded,
    ServerError,
    ServerUnavailable,
    is_unavailable,
)
from deepseek_triton_client._core.interfaces import NO_WATCHDOG, Deadlines, Outputs, ResponseStream, Runtime, Watchdog
from deepseek_triton_client._core.sampling_params import GUIDES, SamplingParams
from deepseek_triton_client._core.server_group import ServerGroup, ServerState

_LEAVING_S = 60.0
"""Seconds after which a job whose caller has left gives up. A generation server's queue can be as long as this."""

_RELEASE_PAUSE_S = 0.5
"""Seconds until all generation servers are asked again to fetch a KV cache that nobody wants."""

_MOST_DEATHS = 2
"""Servers that may be lost with one request. The second loss tells that the request is the cause, perhaps."""

_TRANSIENT = (ServerUnavailable, Overloaded, ServerError)
"""Errors of a generation server after which another one gets the handover."""


def can_be_shared(request: Request) -> bool:
    """Tell whether two servers can share the request: it wants one answer, without a guide and log-probabilities.
    Strict tools become a guide."""
    params = request.params
    tools = f"{params.tools} {params.chat_template_kwargs}"
    asks_for_logprobs = params.return_logprobs or params.return_cumulative_logprob
    return (
        request.task is None
        and max(params.n or 1, params.best_of or 1) == 1
        and params.logprobs is None
        and params.prompt_logprobs is None
        and not asks_for_logprobs
        # TensorRT-LLM is not known to share a request with a guide.
        and not any(getattr(params, name) for name in GUIDES)
        and '"strict"' not in tools
    )


class JoinedResponses:
    """See `ResponseStream`. The responses are the context server's text, then the generation server's answer without
    that text. `receive` raises an error with `unprocessed` where no context server took the request: `Overloaded` if
    one is full."""

    def __init__(
        self,
        request: Request,
        *,
        contexts: Sequence[ServerState],
        generations: ServerGroup,
        retries: Retries,
        runtime: Runtime,
        stop: Callable[[ServerState, str], Coroutine[Any, Any, None]],
        jobs: set[JoinedResponses],
        started: float,
    ) -> None:
        """`contexts`: at least one, in the order to try them. `stop`: ends the request with this id on a server.
        `jobs`: those whose job runs. `started`: the moment of the call by time.monotonic()."""
        self._request = request
        self._contexts = contexts
        self._generations = generations
        self._retries = retries
        self._runtime = runtime
        self._stop = stop
        self._jobs = jobs
        self._started = started
        self._server = contexts[0]
        self._asked: ResponseStream | None = None  # by the job
        self._asks_context = False
        self._held: str | None = None
        """The handover of a context server that keeps its KV cache for a generation server."""
        self._num_deaths = 0
        self._given = _FirstPart()
        self._ready: deque[Outputs] = deque()
        self._answer: ResponseStream | None = None  # of the generation server, once the job has left it to the caller
        self._error: BaseException | None = None
        self._runs = self._has_begun = self._has_left = self._interrupted = self._out_of_time = False
        self._has_told = False  # the caller something of the answer
        self._limit: Watchdog = NO_WATCHDOG
        self._lock = threading.Lock()  # guards what the job and the caller both change; never held while anything waits
        self._has_text = runtime.event()
        self._is_joined = runtime.event()
        self._is_left = runtime.event()
        self._has_ended = runtime.event()

    @property
    def url(self) -> str:
        """URL of the server that was asked last for the caller."""
        return self._server.url

    def failed(self) -> None:
        """Note that the server which answers has been lost. The job has noted it of the others."""
        if self._answer is not None:
            self._server.failed()

    async def receive(self) -> Outputs | None:
        if not self._has_begun:
            self._has_begun = self._runs = True
            self._jobs.add(self)
            self._runtime.start(self._join())
        if not self._ready and self._answer is None:
            await self._has_text.wait(None)
        if not self._ready and self._answer is None:
            await self._is_joined.wait(None)
        if self._ready:
            return self._ready.popleft()
        if self._answer is not None:
            outputs = await self._answer.receive()
            return None if outputs is None else self._given.left_out(outputs)
        if self._error is not None:
            raise self._error
        if self._interrupted:
            raise Cancelled("the request was cancelled, or the client was closed")
        return None

    def interrupt(self) -> None:
        with self._lock:
            self._interrupted = True
            if self._answer is not None:
                self._answer.interrupt()
        self._has_text.set()
        self._is_joined.set()

    async def close(self) -> None:
        self.leave()
        if self._answer is not None:
            await self._answer.close()

    def leave(self) -> None:
        """Let the job end by itself, with no more than it has to do. May be called again."""
        with self._lock:
            has_left, self._has_left = self._has_left, True
            self._is_left.set()
            if has_left or not self._runs or self._answer is not None:
                return
            deadlines = Deadlines(first_token=None, end=time.monotonic() + _LEAVING_S, between_tokens_s=None)
            self._limit = self._runtime.watchdog(deadlines, self._give_up)
            self._limit.expect(first=True)
            context = self._server if self._asks_context else None
        if context is not None:
            self._runtime.start(self._stop_context(context))

    async def end(self) -> None:
        """Leave, and wait until the job has asked both servers all it has to."""
        self.leave()
        self.interrupt()
        await self._has_ended.wait(_LEAVING_S)

    # The job.

    async def _join(self) -> None:
        try:
            await self._share()
        except BaseException as exc:  # the caller gets it, whatever it is
            self._error = exc
        finally:
            with self._lock:
                self._runs = False
            self._limit.stop()
            self._jobs.discard(self)
            for event in (self._has_text, self._is_joined, self._has_ended):
                event.set()

    async def _share(self) -> None:
        try:
            await self._ask_contexts()
            if self._held is not None:
                await self._ask_generations(self._held)
        except DeepseekTritonError as exc:
            self._error = exc
        if self._held is not None:
            self.leave()
            self._has_text.set()
            self._is_joined.set()
            await self._release(self._held)

    async def _ask_contexts(self) -> None:
        """Ask context servers until one has answered: it hands on `_held`, unless its answer is whole, as that of a
        cancelled request is. Raises the error of one that is full if there is any, else the last one's."""
        request = replace(self._request, request_type="context_only")
        full: Overloaded | None = None
        for server in self._contexts:
            try:
                await self._ask(server, request, self._read_context, is_context=True)
                return
            except DeepseekTritonError as exc:
                error = exc
            if self._has_left or self._has_told:
                raise error
            if isinstance(error, ServerUnavailable) and self._num_deaths < _MOST_DEATHS:
                error.unprocessed = True  # if it was lost with the prompt, the caller has lost nothing
            if not error.unprocessed:
                raise error
            full = error if isinstance(error, Overloaded) else full
        raise full or error

    async def _read_context(self, responses: ResponseStream) -> None:
        try:
            while (outputs := await responses.receive()) is not None:
                self._held = outputs.get("context_phase_params", self._held)
                if self._held is None and outputs.get("finish_reason", "None") != "None":
                    self._ready.append(outputs)
                elif part := _texts(outputs):
                    if self._request.params.return_num_output_tokens and "num_output_tokens" in outputs:
                        part["num_output_tokens"] = outputs["num_output_tokens"]
                    self._given.add(part)
                    self._ready.append({"text_output": "", **part})
                if self._ready:
                    self._has_told = True
                    self._has_text.set()
        except DeepseekTritonError:
            if self._held is None:
                raise

    async def _ask_generations(self, handover: str) -> None:
        """Ask generation servers until one has begun to answer, or the caller has left. Raises the last one's error."""
        request = replace(self._request, request_type="generation_only", context_phase_params=handover)
        for failures in count(1):
            servers = deque(self._generations.in_order())
            while servers:
                if self._has_left:
                    return
                server = servers.popleft()
                try:
                    await self._ask(server, replace(request, params=self._params()), self._read_generation)
                    self._held = None
                    return
                except DeepseekTritonError as exc:
                    exc.unprocessed = False
                    error = exc
                if not isinstance(error, _TRANSIENT) or self._num_deaths >= _MOST_DEATHS:
                    raise error
                if error.code == CONTEXT_LOST and self._held is not None:
                    self._held = None
                    servers.appendleft(server)  # it is well
                    request = replace(request, request_type="context_and_generation")
            if failures >= self._retries.attempts:
                raise error
            await self._is_left.wait(self._retries.delay_s(failures))

    async def _release(self, handover: str) -> None:
        """Have the KV cache fetched that nobody wants. A server that is full, stopping or away is asked again; one that
        fails in another way would fail again."""
        request = Request(
            request_id=f"{self._request.request_id}-release",
            params=SamplingParams(max_tokens=1),
            timeouts=self._request.timeouts,
            streaming=False,
            prompt=".",  # the one to fetch is in the handover
            request_type="generation_only",
            context_phase_params=handover,
        )
        failed: set[ServerState] = set()
        while servers := [server for server in self._generations.in_order() if server not in failed]:
            for server in servers:
                if self._out_of_time or self._num_deaths >= _MOST_DEATHS:
                    return
                try:
                    await self._ask(server, request, self._read_generation)
                    return
                except DeepseekTritonError as exc:
                    if exc.code == CONTEXT_LOST:
                        return
                    if not exc.unprocessed:
                        failed.add(server)
            await self._runtime.sleep(_RELEASE_PAUSE_S)

    def _params(self) -> SamplingParams:
        """The caller's fields, with the time that is left for the answer."""
        params = self._request.params
        if params.timeout_ms is None:
            return params
        spent_ms = int(1000 * (time.monotonic() - self._started))
        return params.merged({"timeout_ms": max(1, params.timeout_ms - spent_ms)})

    async def _read_generation(self, responses: ResponseStream) -> None:
        """Read to the first news, and leave the rest to the caller."""
        self._given.rewind()
        read: list[Outputs] = []
        while (outputs := await responses.receive()) is not None:
            read.append(self._given.left_out(outputs))
            if _texts(read[-1]) or read[-1].get("finish_reason", "None") != "None":
                break
        with self._lock:
            if not self._has_left:
                self._ready.extend(read)
                self._answer, self._asked = responses, None

    async def _ask(
        self,
        server: ServerState,
        request: Request,
        read: Callable[[ResponseStream], Coroutine[Any, Any, None]],
        *,
        is_context: bool = False,
    ) -> None:
        """Ask one server and let `read` take its responses. They are closed unless the caller has them."""
        responses: ResponseStream | None = None
        try:
            with self._lock:
                if not self._has_left:
                    self._server = server
            responses, _ = await server.open(request, lambda: self._request.timeouts.connect)
            with self._lock:
                self._asked, self._asks_context = responses, is_context
                if self._out_of_time or (is_context and self._has_left):
                    raise Cancelled("the request was cancelled, or the client was closed")
            await read(responses)
        except DeepseekTritonError as exc:
            if is_unavailable(exc) and not self._out_of_time:
                server.failed()
                self._num_deaths += not exc.unprocessed
            raise
        finally:
            with self._lock:
                self._asks_context = False
                is_left_to_caller = responses is None or self._answer is responses
                if not is_left_to_caller:
                    self._asked = None
            if responses is not None and not is_left_to_caller:
                await responses.close()

    # For a caller who has left.

    async def _stop_context(self, server: ServerState) -> None:
        """Spare the context server the rest of the prompt. If it has answered meanwhile, the job goes on with that."""
        with suppress(DeepseekTritonError):  # the request has ended, or its server has
            await self._stop(server, self._request.request_id)

    def _give_up(self) -> None:
        with self._lock:
            self._out_of_time = True
            if self._asked is not None:
                self._asked.interrupt()


_TEXTS = ("text_output", "reasoning_output")


def _texts(outputs: Outputs) -> dict[str, Any]:
    return {name: outputs[name] for name in _TEXTS if outputs.get(name)}


@dataclass(slots=True)
class _FirstPart:
    """The part of the answer that the caller has from the context server: characters by output, and tokens."""

    sizes: dict[str, int] = field(default_factory=dict)
    ahead: dict[str, int] = field(default_factory=dict)
    """How much of it the generation server has not sent yet."""

    def add(self, outputs: Outputs) -> None:
        for name, value in outputs.items():
            size = len(value) if isinstance(value, str) else value
            self.sizes[name] = self.sizes.get(name, 0) + size

    def rewind(self) -> None:
        """The next response is the first of a generation server."""
        self.ahead = dict(self.sizes)

    def left_out(self, outputs: Outputs) -> Outputs:
        """Return what the caller does not have yet of a generation server's response."""
        if not any(self.ahead.values()):
            return outputs
        rest = dict(outputs)
        for name, ahead in self.ahead.items():
            value = rest.get(name)
            if isinstance(value, str):
                rest[name] = value[ahead:]
                self.ahead[name] = max(0, ahead - len(value))
            elif isinstance(value, int):
                rest[name] = max(0, value - ahead)
                self.ahead[name] = max(0, ahead - value)
        return rest
