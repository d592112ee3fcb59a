"""TensorRT-LLM's PyTorch backend through its LLM API: the production engine.

Threads. The loop thread builds the LLM and runs its asyncio loop; it owns every request and makes every call to the
sink. Other threads only leave something for it with `call_soon_threadsafe`. Prompts are tokenised in a small pool, so
that a long one holds up no token.

tensorrt_llm is imported in `start`, after the container's faults are worked around; the record in release.yaml says
what they are, and which sampling fields the release really honours.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from deepseek_backend.config import BackendConfig
from deepseek_backend.contract import ErrorCode
from deepseek_backend.engines.base import Capabilities, EngineHealth, EngineStats, Step, StepSink, require
from deepseek_backend.engines.tensorrt_llm.loading import (
    forget_launcher,
    import_tensorrt_llm,
    make_capabilities,
    make_llm,
    max_prompt_tokens,
    resolved_llm_args,
    shut_down,
    version_mismatch_allowed,
)
from deepseek_backend.engines.tensorrt_llm.translation import complete_text, finish_reason, sampling_params
from deepseek_backend.errors import BackendError, EngineError, RequestError, UnavailableError, one_line
from deepseek_backend.quirks import apply_quirks
from deepseek_backend.release import EngineRelease, read_release
from deepseek_backend.request import GenerateRequest

logger = logging.getLogger(__name__)


NUM_TOKENIZER_THREADS = 4
ABORT_TIMEOUT_S = 5.0
"""How long `stop` waits for the engine to confirm its aborts before it answers in its place."""


@dataclass(eq=False)
class _Open:
    """A request that has not had its last step. Owned by the loop thread."""

    request: GenerateRequest
    sink: StepSink
    output: Any = None
    """The RequestOutput; None until the prompt is tokenised."""
    aborted: bool = False
    num_input_tokens: int = 0
    num_tokens_sent: int = 0
    num_chars_sent: int = 0


@dataclass
class _Pending:
    """Steps of one loop iteration for one sink."""

    sink: StepSink
    steps: list[tuple[GenerateRequest, Step]] = field(default_factory=list)


class TensorRTLLMEngine:
    """An `Engine` over tensorrt_llm.LLM."""

    def __init__(self, config: BackendConfig) -> None:
        self._config = config
        self._allow_version_mismatch = version_mismatch_allowed(config.engine_options)
        self._release: EngineRelease | None = None
        self._capabilities: Capabilities | None = None
        self._max_prompt_tokens = 0
        self._llm: Any = None
        self._sampling_params_class: Any = None
        self._request_error_class: type[Exception] = RequestError
        self._tokenizers = ThreadPoolExecutor(NUM_TOKENIZER_THREADS, thread_name_prefix="tokenizer")
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fatal = ""
        """Why the engine is dead, in one line. Written by the loop thread, once."""
        self._open: dict[str, _Open] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._pending: dict[int, _Pending] = {}
        self._seeded = False
        """The sampler takes a seed, and without one draws the same numbers for every request."""

    def start(self) -> None:
        release = read_release(self._config.version_dir)
        apply_quirks(release.record)
        forget_launcher(os.environ, release.record["mpi"])
        package = import_tensorrt_llm(release, self._allow_version_mismatch)
        llm_args = resolved_llm_args(self._config)
        support = release.sampler_support(llm_args)
        self._release = release
        self._seeded = "seed" in support.fields
        self._capabilities = make_capabilities(llm_args, support)
        self._max_prompt_tokens = max_prompt_tokens(llm_args, release, self._capabilities.max_seq_len)
        self._sampling_params_class = package.SamplingParams
        self._request_error_class = importlib.import_module("tensorrt_llm.llmapi").RequestError
        self._start_loop(package, llm_args)

    def _start_loop(self, package: Any, llm_args: Mapping[str, Any]) -> None:
        loaded: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(package, llm_args, loaded), name="tensorrt_llm")
        self._thread.start()
        try:
            loaded.result()
        except EngineError:
            self._thread.join()
            self._thread = None
            raise
        logger.info("TensorRT-LLM %s has loaded %s", package.__version__, self._config.model)

    def _run(self, package: Any, llm_args: Mapping[str, Any], loaded: Future[None]) -> None:
        """The loop thread. The LLM is made here, for it looks for this thread's event loop."""
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            self._llm = make_llm(package, llm_args)
        except BaseException as error:  # of any kind, also SystemExit: `start` waits for it and raises it
            loop.close()
            logger.debug("loading failed", exc_info=error)
            loaded.set_exception(EngineError(f"TensorRT-LLM can't load {self._config.model}: {one_line(error)}"))
            return
        self._loop = loop
        loaded.set_result(None)
        loop.run_forever()
        loop.close()

    @property
    def capabilities(self) -> Capabilities:
        capabilities: Capabilities = require(self._capabilities, "capabilities are known after start()")
        return capabilities

    def submit(self, request: GenerateRequest, sink: StepSink) -> None:
        require(self._loop, "submit() before start()")
        if not self._call(self._accept, request, sink):
            sink.on_steps([(request, Step(error=UnavailableError("the engine is stopped")))])

    def abort(self, request_id: str) -> None:
        self._call(self._abort, request_id)

    def health(self) -> EngineHealth:
        if self._loop is None or self._loop.is_closed():
            return EngineHealth(alive=False, reason="the engine is not running")
        reason = self._fatal
        if not reason and self._executor_is_gone():
            reason = "TensorRT-LLM's executor has shut down"
            self._call(self._fail, reason)
        return EngineHealth(alive=not reason, reason=reason)

    def _call(self, function: Callable[..., None], *args: Any) -> bool:
        """Have the loop thread call `function`; False when there is no loop any more."""
        if self._loop is None:
            return False
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed
            return False
        return True

    def stats(self) -> EngineStats:
        requests = list(self._open.values())
        num_running = sum(1 for entry in requests if entry.output is not None)
        return EngineStats(num_running=num_running, num_waiting=len(requests) - num_running)

    def stop(self) -> None:
        if self._thread is None or self._loop is None:
            return
        asyncio.run_coroutine_threadsafe(self._end_requests(), self._loop).result()
        self._tokenizers.shutdown(wait=False, cancel_futures=True)
        shut_down(self._llm)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._thread = None

    # Below, everything runs on the loop thread, but for _encode.

    def _accept(self, request: GenerateRequest, sink: StepSink) -> None:
        entry = _Open(request, sink)
        self._open[request.request_id] = entry
        if self._fatal:
            self._finish(entry, Step(error=UnavailableError(self._fatal)))
            return
        task = asyncio.get_running_loop().create_task(self._serve(entry))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, entry: _Open) -> None:
        """One request from its prompt to its last step."""
        try:
            await self._generate(entry)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # of this request: the others go on unless the engine is gone
            self._finish(entry, Step(error=self._as_backend_error(error)))
            if self._executor_is_gone():
                self._fail(f"TensorRT-LLM's executor has shut down: {one_line(error)}")
            return
        self._finish(entry, Step(error=EngineError("TensorRT-LLM ended the request without a finish reason")))

    async def _generate(self, entry: _Open) -> None:
        request = entry.request
        token_ids = await asyncio.get_running_loop().run_in_executor(self._tokenizers, self._encode, request)
        entry.num_input_tokens = len(token_ids)
        max_tokens = self._room(request, len(token_ids))
        if entry.aborted:
            self._finish(entry, Step(finish_reason="cancelled"))
            return
        params = sampling_params(request, max_tokens=max_tokens, seeded=self._seeded)
        # A stream also for requests that are answered at once: stop strings have to be seen when they come, and a
        # request that is cut short still has its text so far.
        entry.output = self._llm.generate_async(
            inputs=token_ids, sampling_params=self._sampling_params_class(**params), streaming=True
        )
        async for _ in entry.output:  # the same object every time
            self._push(entry)

    def _encode(self, request: GenerateRequest) -> list[int]:
        """Token ids of the prompt. Runs in the pool."""
        add_special_tokens = request.sampling.add_special_tokens is not False
        return list(self._llm.tokenizer.encode(request.prompt, add_special_tokens=add_special_tokens))

    def _room(self, request: GenerateRequest, num_input_tokens: int) -> int:
        """max_tokens, cut to what the context leaves."""
        if num_input_tokens == 0:
            raise RequestError("text_input: expected a prompt of at least one token, got none")
        if num_input_tokens > self._max_prompt_tokens:
            raise RequestError(
                f"text_input: the prompt has {num_input_tokens:,} tokens, the most this model takes is "
                f"{self._max_prompt_tokens:,}",
                code=ErrorCode.PROMPT_TOO_LONG,
            )
        return min(request.max_tokens, self.capabilities.max_seq_len - num_input_tokens)

    def _push(self, entry: _Open) -> None:
        """A step with what the output has and the sink has not.

        Counted from what was sent, not taken from text_diff: that one starts after the stand-in for an incomplete
        character, and would lose the character when it is completed.
        """
        output = entry.output.outputs[0]
        reason = output.finish_reason
        text = complete_text(output.text, entry.num_chars_sent, final=reason is not None)
        token_ids = output.token_ids[entry.num_tokens_sent :]
        entry.num_chars_sent += len(text)
        entry.num_tokens_sent += len(token_ids)
        if reason is not None:
            step = Step(text=text, token_ids=token_ids, finish_reason=finish_reason(reason))
            step.stop_reason = output.stop_reason
            self._finish(entry, step)
        elif text or token_ids:
            self._deliver(entry, Step(text=text, token_ids=token_ids))

    def _finish(self, entry: _Open, step: Step) -> None:
        """The one place that ends a request; the second end of a request is dropped."""
        if self._open.pop(entry.request.request_id, None) is not None:
            self._deliver(entry, step)

    def _deliver(self, entry: _Open, step: Step) -> None:
        """Keep `step` until every task that is ready has run, so that all of an iteration's steps leave together."""
        step.num_input_tokens = entry.num_input_tokens
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        pending = self._pending.setdefault(id(entry.sink), _Pending(entry.sink))
        pending.steps.append((entry.request, step))

    def _flush(self) -> None:
        batches, self._pending = list(self._pending.values()), {}
        for batch in batches:
            try:
                batch.sink.on_steps(batch.steps)
            except Exception:  # a fault of the receiver must not end the loop that serves everybody
                logger.exception("the receiver of %d steps failed", len(batch.steps))

    def _abort(self, request_id: str) -> None:
        entry = self._open.get(request_id)
        if entry is None or entry.aborted:
            return
        entry.aborted = True
        if entry.output is not None:
            entry.output.abort()

    def _fail(self, reason: str) -> None:
        """The engine is dead: answer everyone, and say so from now on."""
        if self._fatal:
            return
        self._fatal = reason
        logger.critical("%s; answering %d open requests with UNAVAILABLE", reason, len(self._open))
        for entry in list(self._open.values()):
            self._finish(entry, Step(error=UnavailableError(reason)))
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    async def _end_requests(self) -> None:
        """Abort what runs; what the engine doesn't end in time is ended here."""
        self._fatal = self._fatal or "the engine is stopping"
        for request_id in list(self._open):
            self._abort(request_id)
        tasks = list(self._tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=ABORT_TIMEOUT_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for entry in list(self._open.values()):
            self._finish(entry, Step(finish_reason="cancelled"))
        await asyncio.sleep(0)  # the flush was scheduled before this

    def _executor_is_gone(self) -> bool:
        """LLM has no public word for it before 1.3; generate_async itself asks this."""
        executor = getattr(self._llm, "_executor", None)
        return executor is not None and bool(executor.is_shutdown())

    def _as_backend_error(self, error: Exception) -> BackendError:
        if isinstance(error, BackendError):
            return error
        if isinstance(error, (ValueError, self._request_error_class)):
            return RequestError(f"TensorRT-LLM refused the request: {one_line(error)}")
        if self._executor_is_gone():
            return UnavailableError(f"TensorRT-LLM's executor has shut down: {one_line(error)}")
        logger.error("a request failed in TensorRT-LLM", exc_info=error)
        return EngineError(f"TensorRT-LLM failed: {one_line(error)}")
