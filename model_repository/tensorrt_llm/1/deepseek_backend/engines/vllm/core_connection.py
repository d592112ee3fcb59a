"""Reads the outputs of vLLM's engine core, an iteration at a time, in place of AsyncLLM's own output handler.

AsyncLLM.generate() runs a task for each request, and makes objects for each token. Here one task makes the steps of an
iteration and delivers them in one call. With 256 streams and a step each 25 ms, a token costs 6.6 to 7.5 us of CPU on
the loop thread, 16.6 to 18.1 through generate() alone, and 25 to 28 through `generate_calls`. Without pauses between
the steps it is 3.4 to 4.0, 9 and 12. (tests/bench/vllm_steps.py, the three by turns; vLLM 0.25.1 on two cores)

Nothing of this is public in vLLM. So it is used only while every name and field is as in the record of the version
(`interfaces` in release.yaml); otherwise `generate_calls` takes its place.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from deepseek_backend.engines.base import Step
from deepseek_backend.engines.vllm.open_answer import Deliver, OpenAnswer
from deepseek_backend.engines.vllm.scheduler_numbers import SchedulerNumbers
from deepseek_backend.engines.vllm.vllm_logprobs import Text, array_logprobs
from deepseek_backend.errors import BackendError, EngineError, describe

logger = logging.getLogger(__name__)

MAX_TURN_S = 0.005
"""Seconds after which other tasks run, when outputs of many iterations are waiting."""


class CoreConnection:
    """A `RequestPath` to the engine core itself."""

    def __init__(
        self,
        llm: Any,
        supported_tasks: Any,
        numbers: SchedulerNumbers,
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
            except Exception as error:  # output that makes no sense ends its own request only
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
