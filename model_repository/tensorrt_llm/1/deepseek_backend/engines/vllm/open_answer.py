"""A request of the vLLM engine that has not had its last step, and what its two ways to vLLM have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from deepseek_backend.engines.base import Step, StepSink
from deepseek_backend.engines.generate_request import GenerateRequest
from deepseek_backend.engines.vllm.growing_answer import GrowingAnswer


@dataclass(eq=False)
class OpenAnswer:
    """The loop thread owns it."""

    request: GenerateRequest
    sink: StepSink
    arrived_s: float
    """Time at which the engine got it, by time.monotonic()."""
    answer: GrowingAnswer | None = None
    """None until the prompt is tokenised."""
    rank: int | None = None
    """Its rank of data parallelism; None where vLLM chooses."""
    core_id: str = ""
    """Id of the request in vLLM's engine core; "" before it is there."""
    task: asyncio.Task[None] | None = None
    """Submits it; by vLLM's public way it also reads the answer."""
    is_open: bool = True
    """False from its last step on."""


Deliver = Callable[[Sequence[tuple[OpenAnswer, Step]]], None]
"""Takes the steps of an iteration; those of requests that are no longer open are dropped."""


class RequestPath(Protocol):
    """A way to vLLM's engine core."""

    @property
    def worked_at_s(self) -> float:
        """Time at which the last output came, by time.monotonic(); 0 before the first."""

    def prepare(self, entry: OpenAnswer, prompt: dict[str, Any], params: Any, priority: int) -> Any:
        """Return what `submit` sends. Any thread may call it; it raises what vLLM raises for a request it refuses."""

    async def submit(self, entry: OpenAnswer, prepared: Any) -> None:
        """Send a request. Its steps follow."""

    def flush(self) -> None:
        """Deliver the steps that wait for others of their iteration."""

    async def abort(self, entries: Sequence[OpenAnswer]) -> None:
        """Have vLLM drop requests that have had their last step."""

    async def read(self) -> None:
        """Read outputs until vLLM's engine core is dead, and raise why."""
