"""Reads the outputs of vLLM's engine core, an iteration at a time, in place of AsyncLLM's own output handler.

AsyncLLM.generate() runs a task for each request, and makes objects for each token. Here one task makes the steps of an
iteration and delivers them in one call. With 256 streams and a step each 25 ms, a token costs 6.6 to 7.5 us of CPU on
the loop thread, 16.6 to 18.1 through generate() alone, and 25 to 28 through `GenerateCalls`. Without pauses between
the steps it is 3.4 to 4.0, 9 and 12. (tests/bench/vllm_steps.py, the three by turns; vLLM 0.25.1 on two cores)

Nothing of this is public in vLLM. So it is used only while every name and field is as in the record of the version
(`interfaces` in release.yaml); otherwise `GenerateCalls` takes its place.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any

from deepseek_backend.engines.base import EngineStats, Step
from deepseek_backend.engines.vllm.open_answer import Deliver, OpenAnswer, Text, array_logprobs, mapped_logprobs
from deepseek_backend.errors import BackendError, EngineError, describe

logger = logging.getLogger(__name__)

MAX_TURN_S = 0.005
"""Seconds after which other tasks run, when outputs of many iterations are waiting."""
WATCH_PERIOD_S = 0.5
"""How often `read` asks whether the engine core is dead."""


class CoreConnection:
    """A `RequestPath` to the engine core itself."""

    def __init__(
        self,
        llm: Any,
        supported_tasks: Any,
        numbers: "SchedulerNumbers",
        text: Text,
        deliver: Deliver,
        as_backend_error: Callable[[OpenAnswer, Exception], BackendError],
    ) -> None:
        """Take the two parts of `llm` that lead to its engine core.

        :param supported_tasks: of AsyncLLM.get_supported_tasks(), which vLLM checks each request against.
        :param as_backend_error: makes our error of an exception of vLLM's that ends a request.
        """
        self._inputs = llm.input_processor
        self._core = llm.engine_core
        self._supported_tasks = supported_tasks
        self._numbers = numbers
        self._text = text
        self._deliver = deliver
        self._as_backend_error = as_backend_error
        self.worked_at_s = 0.0
        self._entries: dict[str, OpenAnswer] = {}
        """Id in the engine core -> request."""

    def prepare(self, entry: OpenAnswer, prompt: dict[str, Any], params: Any, priority: int) -> Any:
        prepared = self._inputs.process_inputs(
            entry.request.request_id, prompt, params, supported_tasks=self._supported_tasks, priority=priority
        )
        self._inputs.assign_request_id(prepared)
        return prepared

    async def submit(self, entry: OpenAnswer, prepared: Any) -> None:
        prepared.data_parallel_rank = entry.rank
        entry.core_id = prepared.request_id
        self._entries[entry.core_id] = entry
        await self._core.add_request_async(prepared)

    def flush(self) -> None:
        """Nothing waits: an iteration is delivered as soon as it is read."""

    async def abort(self, entries: Sequence[OpenAnswer]) -> None:
        core_ids = [entry.core_id for entry in entries if self._entries.pop(entry.core_id, None)]
        if core_ids:
            await self._core.abort_requests_async(core_ids)

    async def read(self) -> None:
        turn_began_s = time.monotonic()
        while True:
            outputs = await self._core.get_output_async()  # no turn of the loop while outputs are waiting
            self.take(outputs)
            if (now := time.monotonic()) - turn_began_s > MAX_TURN_S:
                await asyncio.sleep(0)
                turn_began_s = now

    def take(self, outputs: Any) -> None:
        """Deliver the steps of one iteration, an EngineCoreOutputs."""
        steps: list[tuple[OpenAnswer, Step]] = []
        at_s = outputs.timestamp
        find = self._entries.get
        for output in outputs.outputs:
            entry = find(output.request_id)
            if entry is None or entry.answer is None:
                continue  # it has been aborted
            try:
                if (
                    output.finish_reason is None
                    and output.new_logprobs is None
                    and output.prefill_stats is None
                    and output.events is None
                ):
                    step = entry.answer.advance(output.new_token_ids, at_s)
                else:
                    step = self._step(entry, output, at_s)
            except Exception as error:
                # Output that makes no sense ends its own request only.
                logger.exception("an output of vLLM can't be read")
                step = Step(error=EngineError(f"an output of vLLM can't be read: {describe(error)}"))
            if step is not None:
                steps.append((entry, step))
        if outputs.scheduler_stats is not None:
            self._numbers.add(outputs.engine_index, outputs.scheduler_stats)
        if outputs.outputs:
            self.worked_at_s = time.monotonic()
        if steps:
            self._deliver(steps)

    def _step(self, entry: OpenAnswer, output: Any, at_s: float) -> Step | None:
        """Return the step of an output that has more than tokens."""
        answer, sampling = entry.answer, entry.request.sampling
        assert answer is not None
        if (error := getattr(output, "error", None)) is not None:  # from 0.33.0 on: the core has refused the request
            del self._entries[entry.core_id]
            return Step(error=self._as_backend_error(entry, error.to_exception()))
        for event in output.events or ():
            if event.type.name == "SCHEDULED":
                answer.scheduled_s = answer.scheduled_s or event.timestamp
        if output.prefill_stats is not None:
            answer.num_cached_tokens = output.prefill_stats.num_cached_tokens
        if (of_prompt := output.new_prompt_logprobs_tensors) is not None:
            answer.prompt_logprobs = [None, *array_logprobs(of_prompt, sampling.prompt_logprobs or 0, self._text)]
        new = output.new_logprobs
        logprobs = () if new is None else array_logprobs(new, sampling.logprobs or 0, self._text)
        if output.finish_reason is None:
            return answer.advance(output.new_token_ids, at_s, logprobs)
        del self._entries[entry.core_id]
        return answer.end(str(output.finish_reason), output.stop_reason, output.new_token_ids, at_s, logprobs)


class GenerateCalls:
    """A `RequestPath` with a call of generate() for each request."""

    def __init__(self, llm: Any, text: Text, deliver: Deliver) -> None:
        self._llm = llm
        self._text = text
        self._deliver = deliver
        self.worked_at_s = 0.0
        self._pending: list[tuple[OpenAnswer, Step]] = []
        """Steps that are not delivered yet."""

    def prepare(self, entry: OpenAnswer, prompt: dict[str, Any], params: Any, priority: int) -> Any:
        return {"prompt": prompt, "sampling_params": params, "priority": priority}

    async def submit(self, entry: OpenAnswer, prepared: Any) -> None:
        answer = self._llm.generate(request_id=entry.request.request_id, data_parallel_rank=entry.rank, **prepared)
        # Closed at once where an output can't be read: vLLM then drops the request.
        async with aclosing(answer) as outputs:
            async for output in outputs:
                try:
                    step = self._step(entry, output)
                except Exception as error:
                    raise EngineError(f"an output of vLLM can't be read: {describe(error)}") from error
                if step is not None:
                    # Delivered after every task that is ready, so that all steps of an iteration leave together.
                    if not self._pending:
                        asyncio.get_running_loop().call_soon(self.flush)
                    self._pending.append((entry, step))

    def flush(self) -> None:
        pending, self._pending = self._pending, []
        self._deliver(pending)

    async def abort(self, entries: Sequence[OpenAnswer]) -> None:
        for entry in entries:
            if entry.task is not None and entry.task is not asyncio.current_task():
                entry.task.cancel()  # generate() then aborts the request in the engine core

    async def read(self) -> None:
        while True:
            await self._llm.check_health()
            await asyncio.sleep(WATCH_PERIOD_S)

    def _step(self, entry: OpenAnswer, output: Any) -> Step | None:
        """Return the step of a RequestOutput with what is new."""
        answer, completion = entry.answer, output.outputs[0]
        assert answer is not None
        answer.num_cached_tokens = output.num_cached_tokens or 0
        at_s = self.worked_at_s = time.monotonic()
        if (times := output.metrics) is not None:
            answer.scheduled_s = getattr(times, "scheduled_ts", 0.0)
            at_s = getattr(times, "last_token_ts", 0.0) or at_s
        if output.prompt_logprobs:
            answer.prompt_logprobs = mapped_logprobs(output.prompt_logprobs, self._text)
        token_ids = list(completion.token_ids)
        logprobs = [row or () for row in mapped_logprobs(completion.logprobs or (), self._text)]
        if completion.finish_reason is None:
            return answer.advance(token_ids, at_s, logprobs)
        return answer.end(completion.finish_reason, completion.stop_reason, token_ids, at_s, logprobs)


class SchedulerNumbers:
    """The latest numbers of each engine core, and sums over all iterations. It is a stat logger of AsyncLLM too."""

    def __init__(self) -> None:
        self._is_readable = True
        self._latest: dict[int, tuple[int, float]] = {}
        """Rank of data parallelism -> its running requests and the used share of its KV cache, at last."""
        self._num_draft_tokens = 0
        self._num_accepted_draft_tokens = 0
        self._prefix_queries = 0
        self._prefix_hits = 0

    def add(self, rank: int, scheduler_stats: Any) -> None:
        """Add the SchedulerStats of one iteration. It raises nothing: that would end vLLM's output handler."""
        if self._is_readable:
            try:
                if (drafts := scheduler_stats.spec_decoding_stats) is not None:
                    self._num_draft_tokens += drafts.num_draft_tokens
                    self._num_accepted_draft_tokens += drafts.num_accepted_tokens
                prefix = scheduler_stats.prefix_cache_stats
                if prefix is not None and prefix.queries:
                    self._prefix_queries += prefix.queries
                    self._prefix_hits += prefix.hits
                self._latest[rank] = (scheduler_stats.num_running_reqs, scheduler_stats.kv_cache_usage)
            except Exception:
                # Requests are served without them.
                logger.exception("vLLM's scheduler statistics can't be read; their metrics stay as they are")
                self._is_readable = False

    def engine_stats(self, *, num_open: int, num_blocks: int, tokens_per_block: int) -> EngineStats:
        """Return the numbers.

        :param num_open: requests that have not had their last step. There is no iteration, and so no report, when the
            last one is aborted.
        :param num_blocks: KV cache blocks of all ranks, which have the same number each.
        :param tokens_per_block: 0 where it is not known, as before the start.
        """
        latest = list(self._latest.values())
        num_running = min(num_open, sum(running for running, _ in latest))
        usage = sum(share for _, share in latest) / len(latest) if latest and num_open else 0.0
        return EngineStats(
            num_running=num_running,
            num_waiting=num_open - num_running,
            kv_blocks_used=round(usage * num_blocks),
            kv_blocks_total=num_blocks,
            tokens_per_block=tokens_per_block,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_draft_tokens=self._num_accepted_draft_tokens,
            extra={
                "prefix_cache_queried_tokens": float(self._prefix_queries),
                "prefix_cache_hit_tokens": float(self._prefix_hits),
            },
        )

    # The rest is what AsyncLLM calls on a stat logger.

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None:
            self.add(engine_idx, scheduler_stats)

    def log(self) -> None: ...

    def log_engine_initialized(self) -> None: ...

    def record_sleep_state(self, *_: Any) -> None: ...


class RankChoice:
    """The number of open requests on each rank; the rank with the fewest gets the next request.

    vLLM before 0.27 goes by what its ranks report. A rank that computes a long prompt reports nothing of what has come
    since, and each report makes vLLM forget what it has sent. So some ranks get many of the requests of one second, and
    all ranks are as slow as the fullest: every iteration is one of all of them.
    """

    def __init__(self, num_ranks: int) -> None:
        """With fewer than two ranks there is nothing to choose."""
        self._num_open = [0] * num_ranks
        self._first = 0
        """The rank that comes first where several have the fewest."""

    def take(self) -> int | None:
        """Return the rank for a request, and count it there; None leaves the choice to vLLM."""
        num_ranks = len(self._num_open)
        if num_ranks < 2:
            return None
        ranks = ((self._first + distance) % num_ranks for distance in range(num_ranks))
        rank = min(ranks, key=self._num_open.__getitem__)
        self._first = (rank + 1) % num_ranks
        self._num_open[rank] += 1
        return rank

    def give_back(self, rank: int | None) -> None:
        """Count a request as ended; `rank` is what `take` returned for it."""
        if rank is not None:
            self._num_open[rank] -= 1
