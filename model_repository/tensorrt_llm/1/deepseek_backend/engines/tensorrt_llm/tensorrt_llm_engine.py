"""TensorRT-LLM's PyTorch backend through its LLM API: the production engine.

Threads. The loop thread builds the LLM and runs its asyncio loop; it owns every request and makes every call to the
sink, but for refusals when it is gone. Other threads only leave calls for it. Prompts are tokenised in a small pool, so
that a long one holds up no token.

Cost. TensorRT-LLM hands a reader all the responses that wait for it without a turn of the loop, and wakes the loop once
for those of an iteration. Reading one only marks its request; a step is made once a turn, of all that was read since
the last. So the less often the loop gets to run, the more tokens a step has. On the stand-in with 256 requests of 2,000
tokens, at 1.0 to 1.4 tokens a step, a token takes 5.3 us of CPU; the stand-in and a loop that makes an object of every
response take 5.0 (tests/bench/llm_api.py; of 200 tokens each, 6.4 and 5.4). Of tokens that were waiting by the thousand
one takes about 1.5 us, from its response to its step.

A stop token ends a request uncounted: unlike the other engines' steps, TensorRT-LLM's have it neither in `token_ids`
nor in `logprobs`. An end token is counted everywhere.

tensorrt_llm is imported in `start`, after the container's faults are worked around; the record in release.yaml says
what they are, and which sampling fields the release really honours.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from deepseek_backend.config import BackendConfig
from deepseek_backend.engines.base import (
    Capabilities,
    EngineHealth,
    EngineStats,
    Step,
    StepSink,
    group_by_sink,
    require,
)
from deepseek_backend.engines.generate_request import GenerateRequest, Messages
from deepseek_backend.engines.prompting import check_prompt_length
from deepseek_backend.engines.tensorrt_llm.faults import Faults, cause_of_death, worker_refusal
from deepseek_backend.engines.tensorrt_llm.iteration_stats import IterationStats
from deepseek_backend.engines.tensorrt_llm.loading import (
    import_tensorrt_llm,
    make_capabilities,
    make_llm,
    max_prompt_bytes,
    max_prompt_tokens,
    max_seq_len,
    resolved_llm_args,
    shut_down,
    version_mismatch_allowed,
)
from deepseek_backend.engines.tensorrt_llm.loop_thread import LoopThread
from deepseek_backend.engines.tensorrt_llm.output_increments import OutputIncrements
from deepseek_backend.engines.tensorrt_llm.prompts import PromptTokenizer
from deepseek_backend.engines.tensorrt_llm.ranks import forget_launcher, lead_or_work, world_size
from deepseek_backend.engines.tensorrt_llm.requested_logprobs import num_logprobs
from deepseek_backend.engines.tensorrt_llm.translation import (
    guide,
    refuse_conflicts,
    sampling_params,
)
from deepseek_backend.errors import BackendError, ConfigError, EngineError, RequestError, UnavailableError, describe
from deepseek_backend.release import SamplerSupport, read_release
from deepseek_backend.workarounds import apply_quirks

logger = logging.getLogger(__name__)


NUM_TOKENIZER_THREADS = 4
STATS_PERIOD_S = 1.0
MAX_TURN_S = 0.005
"""A turn of the loop that takes longer, for many responses were waiting, delivers also in its midst: with 3,000 tokens
of each of 256 requests waiting the median one comes after 0.5 s, not 0.8 s."""
ABORT_TIMEOUT_S = 5.0
"""How long the engine has to end a request that is aborted, before it is ended here."""


@dataclass(eq=False)
class _Open:
    """A request that has not had its last step. Owned by the loop thread."""

    request: GenerateRequest
    sink: StepSink
    task: asyncio.Task[None] | None = None
    output: Any = None
    """The RequestOutput; None until the prompt is tokenised, as `increments` is."""
    increments: OutputIncrements | None = None
    has_moved: bool = False
    """Something was read of `output` and not taken from `increments`: it is in `_moved`."""
    deadline: asyncio.TimerHandle | None = None
    """Set when it is aborted: `_give_up`."""
    num_faults: int = 0
    """Faults.count when it was last known to be well."""
    num_input_tokens: int = 0

    @property
    def num_tokens_sent(self) -> int:
        return self.increments.num_tokens_sent if self.increments is not None else 0


@dataclass(frozen=True, kw_only=True)
class _Loaded:
    """What `start` found out."""

    support: SamplerSupport
    tokenizer: PromptTokenizer
    capabilities: Capabilities
    max_prompt_tokens: int


class TensorRTLLMEngine:
    """An `Engine` over tensorrt_llm.LLM."""

    def __init__(self, config: BackendConfig) -> None:
        self._config = config
        self._allow_version_mismatch = version_mismatch_allowed(config.engine_options)
        self._loaded: _Loaded | None = None
        self._load_seconds: dict[str, float] = {}
        self._llm: Any = None
        self._llmapi: Any = None
        """The module tensorrt_llm.llmapi."""
        self._tokenizers = ThreadPoolExecutor(NUM_TOKENIZER_THREADS, thread_name_prefix="tokenizer")
        self._loop = LoopThread("tensorrt_llm")
        self._stopping = threading.Lock()
        # One call of a sink at a time. Reentrant: a sink may submit, which may be refused at once.
        self._delivery = threading.RLock()
        # The loop thread's own, as far as writing goes.
        self._fatal = ""
        """Why the engine is dead, in one line. Set once."""
        self._faults = Faults()
        self._open: dict[str, _Open] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._moved: list[_Open] = []
        """Requests whose outputs have grown."""
        self._moved_since = 0.0
        self._pending: list[tuple[_Open, Step]] = []
        """Steps that were made and not delivered."""
        self._flush_is_due = False
        """It is scheduled."""
        self._iterations = IterationStats()

    def start(self) -> None:
        try:
            self._start()
        except BaseException as error:  # also Ctrl-C: the LLM may have loaded, and holds the GPUs
            self.stop()
            if isinstance(error, Exception) and not isinstance(error, BackendError | ConfigError):
                raise EngineError(f"TensorRT-LLM can't serve {self._config.model}: {describe(error)}") from error
            raise

    def _start(self) -> None:
        release = read_release(self._config.version_dir)
        apply_quirks(release.record)
        mpi = release.record["mpi"]
        on_every_rank = world_size(os.environ, mpi) > 1
        if not on_every_rank:
            forget_launcher(os.environ, mpi)
        llm_args = resolved_llm_args(self._config, os.environ, release)
        longest = max_seq_len(llm_args)
        support = release.sampler_support(llm_args)
        with self._phase("import"):
            package = import_tensorrt_llm(release, self._allow_version_mismatch)
            self._llmapi = importlib.import_module("tensorrt_llm.llmapi")
        objects = lead_or_work(mpi, llm_args) if on_every_rank else {}
        with self._phase("load"):
            # In the loop thread, for the LLM looks for its thread's event loop.
            self._loop.start(lambda: self._load(package, llm_args, objects))
        logger.info("TensorRT-LLM %s has loaded %s", package.__version__, self._config.model)
        if llm_args.get("enable_iter_perf_stats"):
            self._loop.call(lambda: self._keep(self._watch_iterations()))
        tokenizer = PromptTokenizer(self._llm.tokenizer)
        self._loaded = _Loaded(
            support=support,
            tokenizer=tokenizer,
            capabilities=make_capabilities(
                longest, support, tokenizer.bos_token, max_prompt_bytes(self._llm.tokenizer, longest)
            ),
            max_prompt_tokens=max_prompt_tokens(llm_args, release, longest),
        )

    def _load(self, package: Any, llm_args: Mapping[str, Any], objects: Mapping[str, Any]) -> None:
        try:
            self._llm = make_llm(package, llm_args, objects)
        except BaseException as error:  # of any kind, also SystemExit
            logger.debug("loading failed", exc_info=error)
            raise EngineError(f"TensorRT-LLM can't load {self._config.model}: {describe(error)}") from error

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self._load_seconds[name] = time.monotonic() - started

    @property
    def capabilities(self) -> Capabilities:
        return self._known.capabilities

    @property
    def _known(self) -> _Loaded:
        loaded: _Loaded = require(self._loaded, "the engine is used before start()")
        return loaded

    @property
    def load_seconds(self) -> Mapping[str, float]:
        return self._load_seconds

    def render_chat(self, messages: Messages, template_kwargs: Mapping[str, Any]) -> str:
        return self._known.tokenizer.render_chat(messages, template_kwargs)

    def submit(self, request: GenerateRequest, sink: StepSink) -> None:
        require(self._loaded, "submit() before start()")
        if not self._loop.call(self._accept, request, sink):
            with self._delivery:
                sink.on_steps([(request, Step(error=UnavailableError("the engine is stopped")))])

    def abort(self, request_id: str) -> None:
        self._loop.call(self._abort, request_id)

    def health(self) -> EngineHealth:
        if not self._loop.running:
            return EngineHealth(alive=False, reason="the engine is not running")
        reason = self._fatal
        if not reason and (reason := cause_of_death(self._llm)):
            self._loop.call(self._fail, reason)
        return EngineHealth(alive=not reason, reason=reason)

    def stats(self) -> EngineStats:
        """Blocks and draft tokens are known with the LLM argument enable_iter_perf_stats only."""
        requests, iterations = list(self._open.values()), self._iterations
        num_submitted = sum(1 for entry in requests if entry.output is not None)
        num_running = max(0, num_submitted - iterations.num_queued)
        return EngineStats(
            num_running=num_running,
            num_waiting=len(requests) - num_running,
            kv_blocks_used=iterations.kv_blocks_used,
            kv_blocks_total=iterations.kv_blocks_total,
            num_draft_tokens=iterations.num_draft_tokens,
            num_accepted_draft_tokens=iterations.num_accepted_draft_tokens,
            extra=iterations.extra,
        )

    def stop(self) -> None:
        with self._stopping:  # who comes second waits for the first
            if not self._loop.running:
                return
            try:
                self._loop.run(self._end_requests, timeout_s=2 * ABORT_TIMEOUT_S)
            except Exception:  # whatever it was, the GPUs have to be given back
                logger.exception("the open requests can't be ended")
            finally:
                self._tokenizers.shutdown(wait=False, cancel_futures=True)
                shut_down(self._llm)
                self._loop.stop()

    # Below, everything runs on the loop thread.

    def _accept(self, request: GenerateRequest, sink: StepSink) -> None:
        entry = _Open(request, sink)
        self._open[request.request_id] = entry
        if self._fatal:
            self._finish(entry, Step(error=UnavailableError(self._fatal)))
        else:
            entry.task = self._keep(self._serve(entry))

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task for `work`, held until it is done: the loop itself holds none."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _watch_iterations(self) -> None:
        try:
            while True:
                async for row in self._llm.get_stats_async(timeout=STATS_PERIOD_S):
                    self._iterations.add(row)
                await asyncio.sleep(STATS_PERIOD_S)
        except Exception:  # an interface that upstream calls a prototype: requests are served without it
            logger.exception("TensorRT-LLM's iteration statistics can't be read; what they fed stays as it is")

    async def _serve(self, entry: _Open) -> None:
        """One request from its prompt to its last step."""
        try:
            await self._generate(entry)
        except Exception as error:  # of this request: the others go on unless the engine is gone
            self._end_with(entry, error)
            return
        self._finish(entry, Step(error=EngineError("TensorRT-LLM ended the request without a finish reason")))

    def _end_with(self, entry: _Open, error: Exception) -> None:
        """Raises nothing, whatever the judging of `error` runs into: others wait for their steps of the same turn."""
        reason = ""
        try:
            self._finish(entry, self._last_step_for(entry, error))
            reason = self._beyond_use(entry, error)
        except Exception:  # of a TensorRT-LLM that has gone half way, for instance
            logger.exception("what the failure of the request %s means can't be found out", entry.request.request_id)
            self._finish(entry, Step(error=EngineError(f"TensorRT-LLM failed: {describe(error)}")))
        if reason:
            self._fail(reason)
        else:
            self._abort_output(entry)  # the fault may be in what was read; the engine would go on writing

    async def _generate(self, entry: _Open) -> None:
        request = entry.request
        params = self._sampling_params(request)
        encode = self._known.tokenizer.prompt_token_ids
        token_ids = await asyncio.get_running_loop().run_in_executor(self._tokenizers, encode, request)
        entry.num_input_tokens = len(token_ids)
        params["max_tokens"] = self._room(request, len(token_ids))
        if entry.deadline is not None:
            self._finish(entry, Step(finish_reason="cancelled"))
            return
        entry.num_faults = self._faults.count
        # A stream also for requests that are answered at once: stop strings have to be seen when they come, and a
        # request that is cut short still has its text so far.
        with self._refusals():
            entry.output = self._llm.generate_async(
                inputs=token_ids, sampling_params=self._llmapi.SamplingParams(**params), streaming=True
            )
        entry.increments = OutputIncrements(request, entry.output, self._known.tokenizer)
        async for _ in entry.output:  # the same object every time, and without a turn of the loop while there are more
            if not entry.has_moved:
                self._has_moved(entry)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Around what judges a request at once. The same exceptions later are TensorRT-LLM's own trouble.

        :raises RequestError:
        """
        try:
            yield
        except (ValueError, self._llmapi.RequestError) as error:
            raise RequestError(f"TensorRT-LLM refused the request: {describe(error)}") from error

    def _sampling_params(self, request: GenerateRequest) -> dict[str, Any]:
        """:raises RequestError: for what this release's sampler does not do with these values, or together."""
        support, sampling = self._known.support, request.sampling
        refuse_conflicts(sampling, support.conflicts)
        params = sampling_params(request, seeded="seed" in support.fields)
        if (most := num_logprobs(sampling, support.logprobs)) is not None:
            params["logprobs"] = most
        if guided := guide(sampling):
            with self._refusals():
                params["guided_decoding"] = self._llmapi.GuidedDecodingParams(**guided)
        return params

    def _room(self, request: GenerateRequest, num_input_tokens: int) -> int:
        """max_tokens, cut to what the context leaves."""
        check_prompt_length(num_input_tokens, self._known.max_prompt_tokens, limit="max_seq_len or max_num_tokens")
        return min(request.max_tokens, self.capabilities.max_seq_len - num_input_tokens)

    def _has_moved(self, entry: _Open) -> None:
        """Have the flush take a step from `entry`, with all that will have been read of it by then."""
        now = time.monotonic()
        if not self._moved:
            self._moved_since = now
        elif now - self._moved_since > MAX_TURN_S:
            self._flush()
            self._moved_since = now
        entry.has_moved = True
        self._moved.append(entry)
        self._flush_soon()

    def _take(self, entry: _Open, *, cut_short: bool) -> None:
        """The step for what was read of `entry` since the last one. Raises nothing: who fails is ended alone."""
        entry.has_moved = False
        if self._open.get(entry.request.request_id) is not entry:
            return  # it has had its last step: the engine died while its task was reading on
        try:
            increments: OutputIncrements = require(entry.increments, "a request has moved before it was submitted")
            step = increments.take(cut_short=cut_short)
        except Exception as error:  # what was read makes no sense: as if the reading had failed
            self._end_with(entry, error)
            if entry.task is not None and entry.task is not asyncio.current_task():
                entry.task.cancel()
            return
        if step.token_ids:
            self._faults.token_came()
            entry.num_faults = self._faults.count
        if step.finish_reason is not None:
            self._finish(entry, step)
        elif step.text or step.token_ids:
            self._deliver(entry, step)

    def _finish(self, entry: _Open, step: Step) -> None:
        """The one place that ends a request; the second end of a request is dropped.

        What was read before goes first, and may be the end.
        """
        if entry.has_moved:
            self._take(entry, cut_short=True)
        if self._open.pop(entry.request.request_id, None) is not None:
            if entry.deadline is not None:
                entry.deadline.cancel()
            self._deliver(entry, step)

    def _deliver(self, entry: _Open, step: Step) -> None:
        step.num_input_tokens = entry.num_input_tokens
        self._pending.append((entry, step))
        self._flush_soon()

    def _flush_soon(self) -> None:
        """Flush once every task that is ready has run, so that all of an iteration's steps leave together."""
        if not self._flush_is_due:
            self._flush_is_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        moved, self._moved = self._moved, []
        try:
            for entry in moved:
                if entry.has_moved:
                    self._take(entry, cut_short=entry.deadline is not None)
        finally:
            self._flush_is_due = False
        pending, self._pending = self._pending, []
        with self._delivery:
            for sink, steps in group_by_sink(pending):
                try:
                    sink.on_steps(steps)
                except Exception:  # a fault of the receiver must not end the loop that serves everybody
                    logger.exception("the receiver of %d steps failed", len(steps))

    def _abort(self, request_id: str) -> None:
        entry = self._open.get(request_id)
        if entry is None or entry.deadline is not None:
            return
        entry.deadline = asyncio.get_running_loop().call_later(ABORT_TIMEOUT_S, self._give_up, entry)
        self._abort_output(entry)

    def _abort_output(self, entry: _Open) -> None:
        if entry.output is None:
            return
        try:
            if not entry.output.finished:
                entry.output.abort()
        except Exception:  # somebody else's, and the request has its end also without it
            logger.exception("TensorRT-LLM can't abort the request %s", entry.request.request_id)

    def _give_up(self, entry: _Open) -> None:
        """End an aborted request in the engine's place: of one that waits in its queue it never says a word."""
        self._finish(entry, Step(finish_reason="cancelled"))
        if entry.task is not None:
            entry.task.cancel()

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
        """Abort what runs, and wait until it has ended."""
        self._fatal = self._fatal or "the engine is stopping"
        tasks = [entry.task for entry in self._open.values() if entry.task is not None]
        for request_id in list(self._open):
            self._abort(request_id)
        await asyncio.gather(*tasks, return_exceptions=True)
        others = list(self._tasks)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _last_step_for(self, entry: _Open, error: Exception) -> Step:
        wants_logprobs = entry.request.sampling.logprobs is not None
        if entry.deadline is not None and wants_logprobs and isinstance(error, AssertionError):
            # From 1.2 on TensorRT-LLM asserts things of logprobs that do not hold when an abort has cut them short.
            return Step(finish_reason="cancelled")
        return Step(error=self._as_backend_error(entry, error))

    def _as_backend_error(self, entry: _Open, error: Exception) -> BackendError:
        if isinstance(error, BackendError):
            return error
        if reason := cause_of_death(self._llm):
            return UnavailableError(f"{reason}: {describe(error)}")
        if isinstance(error, self._llmapi.RequestError) and (refusal := self._worker_refusal(entry, error)):
            return refusal
        logger.error("a request failed in TensorRT-LLM", exc_info=error)
        return EngineError(f"TensorRT-LLM failed: {describe(error)}")

    def _worker_refusal(self, entry: _Open, error: Exception) -> RequestError | None:
        return worker_refusal(str(error), guided=bool(guide(entry.request.sampling)))

    def _beyond_use(self, entry: _Open, error: Exception) -> str:
        """Why the engine is, after `error` has ended `entry`; "" while it is not."""
        if reason := cause_of_death(self._llm):
            return f"{reason}: {describe(error)}"
        if not isinstance(error, self._llmapi.RequestError) or self._worker_refusal(entry, error):
            return ""  # the reader's trouble, or the client's
        if entry.num_tokens_sent == 0 and guide(entry.request.sampling):
            return ""  # possibly the guide's: no guide, however often it is sent, may end the server
        return self._faults.add(" ".join(str(error).split()), entry.num_faults)
