"""Whose fault it is when a request fails in TensorRT-LLM, and when the engine is beyond use.

An exception of the forward pass or the sampler reaches every request that runs, as a RequestError with its text, and
the engine goes on as if nothing had been. A worker's refusal of one request comes the same way.
"""

from __future__ import annotations

from typing import Any

from deepseek_backend.contract import ErrorCode
from deepseek_backend.errors import RequestError, describe

MAX_FAULTS_IN_A_ROW = 3
"""So many, without a token between them, are an engine that will not recover."""

_LASTING = ("an illegal memory access", "device-side assert", "unspecified launch failure", "misaligned address")
"""CUDA's words for errors after which nothing works in that process."""
_TOO_LONG = "`default_max_tokens`"
"""tensorrt_llm/executor/base_worker.py, _deduce_max_tokens: the workers may have cut max_seq_len to their memory."""
_BAD_GUIDE = "Guided decoding error"
"""tensorrt_llm/_torch/pyexecutor/guided_decoder.py: it fails the one request whose guide it can't compile."""


def worker_refusal(message: str, *, guided: bool) -> RequestError | None:
    """The client's fault, where a worker's words are known to say so."""
    if _TOO_LONG in message:
        return RequestError(f"the prompt is too long for this model: {message}", code=ErrorCode.PROMPT_TOO_LONG)
    if guided and message.startswith(_BAD_GUIDE):
        return RequestError(f"TensorRT-LLM refused the guide: {message}")
    return None


def cause_of_death(llm: Any) -> str:
    """Why nothing more can come of the engine; "" while it is well. LLM has no public word for it before 1.3."""
    executor = getattr(llm, "_executor", None)
    if executor is None:
        return ""
    if executor.is_shutdown():  # generate_async itself asks this
        return "TensorRT-LLM's executor has shut down"
    # The workers' main functions: one that is over is a worker that has ended, whatever the executor believes. Under
    # trtllm-llmapi-launch there may be none to look at.
    for future in getattr(executor, "mpi_futures", ()):
        if future.done():
            cause = None if future.cancelled() else future.exception()
            return "a worker of TensorRT-LLM has ended" + (f": {describe(cause)}" if cause else "")
    return ""


class Faults:
    """Counts the engine's faults. One fails every request that runs, and still is one: another is only what fails a
    request begun, or seen to go on, after it."""

    def __init__(self) -> None:
        self.count = 0
        """Of all time. A request remembers it from when it was last known to be well."""
        self._in_a_row = 0

    def token_came(self) -> None:
        self._in_a_row = 0

    def add(self, message: str, count_before: int) -> str:
        """Why the engine is beyond use, after a request has failed with `message`; "" while it is not."""
        if count_before == self.count:
            self.count += 1
            self._in_a_row += 1
        if any(words in message for words in _LASTING):
            return f"the GPU has failed: {message}"
        if self._in_a_row >= MAX_FAULTS_IN_A_ROW:
            return f"TensorRT-LLM has failed {self._in_a_row} times in a row, with no token between: {message}"
        return ""
