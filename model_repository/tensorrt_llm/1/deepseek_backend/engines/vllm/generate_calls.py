"""vLLM's public way, AsyncLLM.generate(): for a vLLM whose own objects are not those of the version record."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from deepseek_backend.engines.base import Step
from deepseek_backend.engines.vllm.open_answer import Deliver, OpenAnswer
from deepseek_backend.engines.vllm.vllm_logprobs import Text, mapped_logprobs
from deepseek_backend.errors import EngineError, describe

WATCH_PERIOD_S = 0.5
"""How often `read` asks whether the engine core is dead."""


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
                    self._note(entry, step)

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

    def _note(self, entry: OpenAnswer, step: Step) -> None:
        """Deliver the step after every task that is ready, so that all steps of an iteration leave together."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self.flush)
        self._pending.append((entry, step))
