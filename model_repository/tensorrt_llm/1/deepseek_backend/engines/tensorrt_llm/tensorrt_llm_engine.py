"""TensorRT-LLM's PyTorch backend through its LLM API: the production engine.

Whole answers. Where a request wants no steps, TensorRT-LLM is asked for the answer in one response, which costs a
fraction. Its iteration statistics then show that the engine lives, its performance metrics have the time of the first
token, and the response to an abort has the text so far.

Cost. TensorRT-LLM gives a reader all waiting responses without a turn of the loop, and wakes the loop once for the
responses of an iteration. Reading a response only notes that its request has output. Once a turn, a step is made of
everything that was read since the last one. The less often the loop runs, the more tokens a step has. On the stand-in
with 256 requests of 2,000 tokens, at 1.0 to 1.4 tokens a step, a token takes 5.3 us of CPU; the stand-in and a loop
that makes an object of every response take 5.0 (tests/bench/llm_api.py; with 200 tokens each, 6.4 and 5.4). Where
thousands of tokens are waiting, a token takes about 1.5 us from its response to its step.

A stop token that ends a request is not counted: unlike the other engines' steps, TensorRT-LLM's have it neither in
`token_ids` nor in `logprobs`. An end token is counted by every engine.

tensorrt_llm is imported in `start`, after the container's faults are worked around. The record in release.yaml lists
these faults, and the sampling fields that the release really applies.
"""

import asyncio
import importlib
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from deepseek_backend.config import BackendConfig
from deepseek_backend.engines.base import Capabilities, EngineHealth, EngineStats, Step, timed
from deepseek_backend.engines.generate_request import GenerateRequest
from deepseek_backend.engines.loop_engine import LoopEngine, OpenEntry, is_short
from deepseek_backend.engines.prompting import PromptTokenizer, check_prompt_length
from deepseek_backend.engines.tensorrt_llm import outputs, translation
from deepseek_backend.engines.tensorrt_llm.loading import (
    APPLIED_OUTSIDE,
    forget_launcher,
    lead_or_work,
    make_llm,
    max_prompt_tokens,
    max_seq_len,
    resolved_llm_args,
    shut_down,
    world_size,
)
from deepseek_backend.errors import ASK_ANOTHER, BackendError, EngineError, RequestError, UnavailableError, describe
from deepseek_backend.release import SamplerSupport, apply_quirks, read_release

logger = logging.getLogger(__name__)


STATS_PERIOD_S = 1.0
MAX_TURN_S = 0.005
"""Seconds after which a turn of the loop delivers before its end, when many responses were waiting. With 3,000 tokens
of each of 256 requests waiting, the median token comes after 0.5 s instead of 0.8 s."""
ABORT_TIMEOUT_S = 5.0
"""Seconds that TensorRT-LLM gets to end an aborted request, before this engine ends it."""
WHOLE_ABORT_TIMEOUT_S = 2.0
"""The same for an answer that comes whole: its client waits for the text so far. No iteration takes longer."""
FETCH_TIMEOUT_S = 60.0
"""Seconds for which the KV cache of a request that has ended is waited for. TensorRT-LLM's own limit, where it has one,
is kv_transfer_timeout_ms."""


@dataclass(eq=False)
class _Open(OpenEntry):
    output: Any = None
    """The RequestOutput; like `increments`, None until the prompt is tokenised."""
    increments: outputs.OutputIncrements | outputs.ContextAnswer | None = None
    has_output: bool = False
    """Whether `output` has grown since the last step; the request is in `_with_output` then."""
    deadline: asyncio.TimerHandle | None = None
    """Timer of the end that `_abort` waits for; set when the request is aborted."""
    num_faults: int = 0
    """Value of Faults.count when the request was last known to be well."""
    num_input_tokens: int = 0

    @property
    def is_fetching(self) -> bool:
        """Whether a context server may still keep the KV cache. The first response of TensorRT-LLM comes after it."""
        return outputs.fetches(self.request) and (self.output is None or not self.output.outputs[0].token_ids)


class TensorRTLLMEngine(LoopEngine[_Open]):
    """An `Engine` over tensorrt_llm.LLM."""

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config, package="TensorRT-LLM", entry_class=_Open)
        self._support: SamplerSupport
        self._sharing: outputs.SharingSupport
        self._max_prompt_tokens: int
        self._llmapi: Any = None
        """The module tensorrt_llm.llmapi."""
        # Only the loop thread writes the following ones.
        self._faults = translation.Faults()
        self._with_output: list[_Open] = []
        """Requests whose output has grown since their last step."""
        self._with_output_since = 0.0
        """Time at which the first of them was added, by time.monotonic()."""
        self._pending: list[tuple[_Open, Step]] = []
        """Steps that are not delivered yet."""
        self._flush_is_due = False
        """Whether `_flush` is scheduled."""
        self._iterations = translation.IterationStats()
        self._watching: asyncio.Task[None] | None = None
        """The task that reads the iteration statistics, where there are such."""
        self._reports_iterations = True
        """Reading the iteration statistics has not failed."""

    def _start(self) -> None:
        release = read_release(self._config.version_dir)
        apply_quirks(release.record)
        mpi = release.record["mpi"]
        on_every_rank = world_size(os.environ, mpi) > 1
        if not on_every_rank:
            forget_launcher(os.environ, mpi)
        llm_args = resolved_llm_args(self._config, os.environ, release)
        longest = max_seq_len(llm_args)
        self._max_prompt_tokens = max_prompt_tokens(llm_args, release, longest)
        self._support = release.sampler_support(llm_args)
        self._sharing = outputs.sharing_support(release, llm_args)
        with timed(self._load_seconds, "import"):
            container = f"nvcr.io/nvidia/tritonserver:{release.record['containers'][0]}-trtllm-python-py3"
            where = f"it is part of the containers {container}"
            package = self._import("tensorrt_llm", version=release.version, where=where, option="--trtllm")
            self._llmapi = importlib.import_module("tensorrt_llm.llmapi")
        objects = lead_or_work(mpi, llm_args) if on_every_rank else {}
        with timed(self._load_seconds, "load"):
            self._start_loop(partial(make_llm, package, llm_args, objects))
        logger.info("TensorRT-LLM %s has loaded %s", package.__version__, self._config.model)
        if llm_args.get("enable_iter_perf_stats"):
            self._loop.call(self._watch_iterations, bool(llm_args.get("speculative_config")))
        self._tokenizer = PromptTokenizer(self._llm.tokenizer)
        self._capabilities = self._find_out(longest, llm_args, str(package.__version__))

    def _find_out(self, max_seq_len: int, llm_args: Mapping[str, Any], version: str) -> Capabilities:
        """Return what the engine can do."""
        support = self._support
        unsupported = {name: why for name, why in support.unsupported.items() if name not in APPLIED_OUTSIDE}
        if "logprobs" in unsupported:
            unsupported["best_of"] = f"needs logprobs to choose by; {unsupported['logprobs']}"
        else:
            unsupported.pop("best_of", None)
        if self._sharing.refusal:
            unsupported["request_type"] = self._sharing.refusal
        return Capabilities(
            sampling_fields=support.fields | APPLIED_OUTSIDE,
            max_seq_len=max_seq_len,
            max_prompt_bytes=self._tokenizer.max_prompt_bytes(max_seq_len),
            bos_token=self._tokenizer.bos_token,
            version=version,
            # Without statistics, or without the times of its tokens, an answer that comes whole would tell nothing
            # while it is made, and no time to its first token afterwards.
            whole_answers=bool(llm_args.get("enable_iter_perf_stats")) and "return_perf_metrics" in support.fields,
            handover_form=self._sharing.form,
            formats_refused=unsupported.get("guided_structural_tag") or support.formats_refused,
            unsupported=unsupported,
        )

    def health(self) -> EngineHealth:
        if not self._loop.running:
            return EngineHealth(alive=False, reason="the engine is not running")
        reason = self._fatal
        if not reason and (reason := translation.cause_of_death(self._llm)):
            self._loop.call(self._fail, reason)
        return EngineHealth(alive=not reason, reason=reason, worked_at_s=self._iterations.worked_at_s)

    def stats(self) -> EngineStats:
        """Return the numbers; KV blocks and draft tokens only with the LLM argument enable_iter_perf_stats."""
        requests, iterations = list(self._open.values()), self._iterations
        num_submitted = sum(1 for entry in requests if entry.output is not None)
        num_running = max(0, num_submitted - iterations.num_queued)
        return EngineStats(
            num_running=num_running,
            num_waiting=len(requests) - num_running,
            kv_blocks_used=iterations.kv_blocks_used,
            kv_blocks_total=iterations.kv_blocks_total,
            tokens_per_block=iterations.tokens_per_block,
            num_draft_tokens=iterations.num_draft_tokens,
            num_accepted_draft_tokens=iterations.num_accepted_draft_tokens,
            extra=iterations.extra,
        )

    def _shut_down(self) -> None:
        shut_down(self._llm)

    # Everything below runs on the loop thread.

    def _watch_iterations(self, sums_drafts: bool) -> None:
        """`sums_drafts`: every iteration has draft tokens to be added up; else one in a period tells enough."""

        async def watch() -> None:
            try:
                while True:
                    due_s, latest = 0.0, None
                    async for latest in self._llm.get_stats_async(timeout=STATS_PERIOD_S):
                        if sums_drafts or time.monotonic() >= due_s:
                            self._iterations.add(latest)
                            due_s, latest = time.monotonic() + STATS_PERIOD_S, None
                    if latest is not None:
                        self._iterations.add(latest)
                    await asyncio.sleep(STATS_PERIOD_S)
            except Exception:
                # Upstream calls this interface a prototype, and requests are served without it.
                logger.exception("TensorRT-LLM's iteration statistics can't be read; their metrics stay as they are")
                self._reports_iterations = False

        self._watching = self._keep(watch())

    async def _serve(self, entry: _Open) -> None:
        """Serve one request, from its prompt to its last step."""
        try:
            await self._generate(entry)
        except Exception as error:
            # It ends this request; the others go on unless the engine is dead.
            self._end_with(entry, error)
            return
        self._finish(entry, Step(error=EngineError("TensorRT-LLM ended the request without a finish reason")))

    def _end_with(self, entry: _Open, error: Exception) -> None:
        """End a request that has failed. This raises nothing: other requests wait for their steps of the same turn."""
        reason = ""
        try:
            wants_logprobs = entry.request.sampling.logprobs is not None
            if entry.deadline is not None and wants_logprobs and isinstance(error, AssertionError):
                # From 1.2 on TensorRT-LLM has assertions about logprobs that fail when an abort has cut them short.
                self._finish(entry, Step(finish_reason="cancelled"))
            else:
                self._finish(entry, Step(error=self._as_backend_error(entry, error)))
            reason = self._reason_beyond_use(entry, error)
        except Exception:
            # For example of a TensorRT-LLM that is half shut down.
            logger.exception("the failure of the request %s can't be judged", entry.request.request_id)
            self._finish(entry, Step(error=EngineError(f"TensorRT-LLM failed: {describe(error)}")))
        if reason:
            self._fail(reason)
        else:
            self._abort_output(entry)  # the fault may be on this side, and the engine would go on generating

    async def _generate(self, entry: _Open) -> None:
        request = entry.request
        params = self._sampling_params(request)
        encode = self._tokenizer.prompt_token_ids
        if is_short(request):
            token_ids = encode(request)
        else:
            token_ids = await asyncio.get_running_loop().run_in_executor(self._tokenizers, encode, request)
        entry.num_input_tokens = len(token_ids)
        max_seq_len = self.capabilities.max_seq_len
        if outputs.fetches(request):  # no iteration has to hold the prompt
            check_prompt_length(len(token_ids), max_seq_len - 1)
        else:
            check_prompt_length(len(token_ids), self._max_prompt_tokens, limit="max_seq_len or max_num_tokens")
        params["max_tokens"] = min(request.max_tokens, max_seq_len - len(token_ids))
        if entry.deadline is not None:
            self._finish(entry, Step(finish_reason="cancelled"))
            return
        entry.num_faults = self._faults.count
        if outputs.is_shared(request):
            self._submit_part(entry, params, token_ids)
        else:
            streaming = request.wants_steps or not self._reports_iterations or bool(translation.guide(request.sampling))
            if not streaming:
                params["return_perf_metrics"] = True  # for the time to the first token
            with self._refusals():
                entry.output = self._llm.generate_async(
                    inputs=token_ids, sampling_params=self._llmapi.SamplingParams(**params), streaming=streaming
                )
            entry.increments = outputs.OutputIncrements(request, entry.output, self._tokenizer, is_whole=not streaming)
        if entry.output is not None:
            async for _ in entry.output:  # always the same object; no turn of the loop while responses are waiting
                if not entry.has_output:
                    self._note_output(entry)

    def _submit_part(self, entry: _Open, params: dict[str, Any], token_ids: list[int]) -> None:
        """Submit this server's part of a shared request, unless the context server has done all of it.

        Where nobody waits for the part any more, it is submitted all the same, to fetch the KV cache.
        """
        request = entry.request
        text = outputs.GrowingText(self._tokenizer, request.sampling)
        handover, begun = request.handover, None
        if handover is not None and self._is_open(entry):
            begun = outputs.first_step(request, handover, text, is_whole=params["max_tokens"] == 1)
            if begun.finish_reason is not None:
                self._finish(entry, begun)
        if not self._is_open(entry):
            if not entry.is_fetching:
                return
            params = {"max_tokens": 1}
        with self._refusals():
            arguments = outputs.part_arguments(request, params, token_ids, self._llmapi)
            entry.output = self._llm.generate_async(**arguments)
        if begun is not None and self._is_open(entry):  # not before: what TensorRT-LLM refuses has no token
            self._deliver(entry, begun)
        if handover is None:
            entry.increments = outputs.ContextAnswer(request, entry.output, text, self._sharing.form, token_ids)
        else:
            entry.increments = outputs.ContinuedAnswer(request, entry.output, text, self._tokenizer, self._sharing)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Turn immediate refusals into RequestErrors. Later the same exceptions mean a failure of TensorRT-LLM."""
        try:
            yield
        except (ValueError, self._llmapi.RequestError) as error:
            raise RequestError(f"TensorRT-LLM refused the request: {describe(error)}") from error

    def _sampling_params(self, request: GenerateRequest) -> dict[str, Any]:
        """Return the keyword arguments of TensorRT-LLM's SamplingParams.

        :raises RequestError: for values or combinations that this release's sampler does not support.
        """
        support, sampling = self._support, request.sampling
        if outputs.is_shared(request):
            self._sharing.check(request)
        translation.refuse_conflicts(sampling, support.conflicts)
        params = translation.sampling_params(request, seeded="seed" in support.fields)
        if (most := translation.num_logprobs(sampling, support.logprobs)) is not None:
            params["logprobs"] = most
        if guided := translation.guide(sampling):
            with self._refusals():
                params["guided_decoding"] = self._llmapi.GuidedDecodingParams(**guided)
        return params

    def _note_output(self, entry: _Open) -> None:
        """Have the next flush take a step from `entry`, with everything read until then."""
        now = time.monotonic()
        if not self._with_output:
            self._with_output_since = now
        elif now - self._with_output_since > MAX_TURN_S:
            self._flush()
            self._with_output_since = now
        entry.has_output = True
        self._with_output.append(entry)
        self._flush_soon()

    def _take(self, entry: _Open, *, cut_short: bool) -> None:
        """Take a step from `entry`, of everything read since the last. Raises nothing: a failure ends this request."""
        entry.has_output = False
        if not self._is_open(entry):  # the engine died while its task went on reading, or it had only to fetch
            if outputs.fetches(entry.request):
                self._abort_output(entry)
            return
        try:
            if entry.increments is None:
                raise RuntimeError("a request has output before it was submitted")
            step = entry.increments.take(cut_short=cut_short)
        except Exception as error:
            # Output that makes no sense counts as a failure to read it.
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
        """End a request. Only this method does it; a second end of a request is dropped.

        Output that was read before is delivered first, and may itself be the end.
        """
        if entry.has_output:
            self._take(entry, cut_short=True)
        if self._open.pop(entry.request.request_id, None) is not None:
            if entry.deadline is not None:
                entry.deadline.cancel()
            self._deliver(entry, step)
            if entry.is_fetching:  # its task goes on until the KV cache has come, or has been waited for long enough

                def leave() -> None:
                    self._abort_output(entry)
                    if entry.task is not None:
                        entry.task.cancel()

                asyncio.get_running_loop().call_later(FETCH_TIMEOUT_S, leave)

    def _is_open(self, entry: _Open) -> bool:
        """Whether the request has not had its last step."""
        return self._open.get(entry.request.request_id) is entry

    def _deliver(self, entry: _Open, step: Step) -> None:
        step.num_input_tokens = entry.num_input_tokens
        self._pending.append((entry, step))
        self._flush_soon()

    def _flush_soon(self) -> None:
        """Schedule the flush after every task that is ready, so that all steps of an iteration leave together."""
        if not self._flush_is_due:
            self._flush_is_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Take the steps of all requests with output, and deliver them."""
        with_output, self._with_output = self._with_output, []
        try:
            for entry in with_output:
                if entry.has_output:
                    self._take(entry, cut_short=entry.deadline is not None)
        finally:
            self._flush_is_due = False
        pending, self._pending = self._pending, []
        self._send(pending)

    def _abort(self, request_id: str) -> None:
        entry = self._open.get(request_id)
        if entry is None or entry.deadline is not None:
            return
        if entry.is_fetching:  # TensorRT-LLM would drop the transfer, and the context server keep the KV cache for ever
            self._finish(entry, Step(finish_reason="cancelled"))
            return

        def give_up() -> None:
            self._finish(entry, Step(finish_reason="cancelled"))
            if entry.task is not None:
                entry.task.cancel()

        # TensorRT-LLM never answers for a request that waits in its queue.
        timeout_s = ABORT_TIMEOUT_S if entry.request.wants_steps else WHOLE_ABORT_TIMEOUT_S
        entry.deadline = asyncio.get_running_loop().call_later(timeout_s, give_up)
        self._abort_output(entry)

    def _abort_output(self, entry: _Open) -> None:
        if entry.output is None:
            return
        try:
            if not entry.output.finished:
                entry.output.abort()
        except Exception:
            # The request is ended by this engine all the same.
            logger.exception("TensorRT-LLM can't abort the request %s", entry.request.request_id)

    def _fail(self, reason: str) -> None:
        """Declare the engine dead: answer every request, and refuse all further ones."""
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
        """Abort every request, and wait until it has ended and has fetched its KV cache."""
        self._fatal = self._fatal or f"the engine is stopping{ASK_ANOTHER}"
        tasks = self._tasks - {self._watching, asyncio.current_task()}
        for request_id in list(self._open):
            self._abort(request_id)
        if tasks:
            await asyncio.wait(tasks, timeout=ABORT_TIMEOUT_S + 1)
        await self._cancel_tasks()

    def _as_backend_error(self, entry: _Open, error: Exception) -> BackendError:
        if isinstance(error, BackendError):
            return error
        if reason := translation.cause_of_death(self._llm):
            return UnavailableError(f"{reason}: {describe(error)}")
        if isinstance(error, self._llmapi.RequestError) and (refusal := self._worker_refusal(entry, error)):
            return refusal
        logger.error("a request failed in TensorRT-LLM", exc_info=error)
        return EngineError(f"TensorRT-LLM failed: {describe(error)}")

    def _worker_refusal(self, entry: _Open, error: Exception) -> BackendError | None:
        request = entry.request
        return translation.worker_refusal(
            str(error), guided=bool(translation.guide(request.sampling)), shared=outputs.is_shared(request)
        )

    def _reason_beyond_use(self, entry: _Open, error: Exception) -> str:
        """Return why the engine is beyond use, after `error` has ended `entry`; "" while it is not."""
        if reason := translation.cause_of_death(self._llm):
            return f"{reason}: {describe(error)}"
        if not isinstance(error, self._llmapi.RequestError) or self._worker_refusal(entry, error):
            return ""  # the fault of this engine or of the client
        has_tokens = entry.increments is not None and entry.increments.num_tokens_sent
        if not has_tokens and translation.guide(entry.request.sampling):
            return ""  # possibly the guide's fault, and no guide may end the server, however often it is sent
        return self._faults.add(" ".join(str(error).split()), entry.num_faults)
