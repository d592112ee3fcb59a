"""What TensorRT-LLM's failures mean (the client, one request or the whole engine is at fault), and its statistics.

An exception of the forward pass or the sampler reaches every running request as a RequestError with its text, and the
engine goes on. A worker's refusal of a single request comes in the same form.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deepseek_backend.contract import ErrorCode
from deepseek_backend.errors import BackendError, ContextLostError, RequestError, describe

MAX_FAULTS_IN_A_ROW = 3
"""Number of faults without a token in between, after which the engine will not recover."""

_LASTING = ("an illegal memory access", "device-side assert", "unspecified launch failure", "misaligned address")
"""Messages of CUDA errors after which nothing works in that process."""
_TOO_LONG = "`default_max_tokens`"
"""Part of a message of tensorrt_llm/executor/base_worker.py, _deduce_max_tokens: the workers may have cut max_seq_len
to their memory."""
_BAD_GUIDE = "Guided decoding error"
"""Beginning of a message of tensorrt_llm/_torch/pyexecutor/guided_decoder.py, which fails the one request whose guide
it can't compile."""
_TRANSFER_FAILED = "kv cache transfer"
"""Part of the messages "Error in kv cache transfer for generation requests" of tensorrt_llm/_torch/pyexecutor/
py_executor.py, and of later ones; in any case. They fail only the requests whose transfer failed or timed out."""


def worker_refusal(message: str, *, guided: bool, shared: bool) -> BackendError | None:
    """Return the error of a request, if the worker's message is known to concern that request alone.

    :param guided: the request has a guide.
    :param shared: another server computes a part of the request.
    """
    if shared and _TRANSFER_FAILED in message.lower():
        return ContextLostError(f"TensorRT-LLM could not hand the KV cache over: {message}")
    if _TOO_LONG in message:
        return RequestError(f"the prompt is too long for this model: {message}", code=ErrorCode.PROMPT_TOO_LONG)
    if guided and message.startswith(_BAD_GUIDE):
        return RequestError(f"TensorRT-LLM refused the guide: {message}")
    return None


def cause_of_death(llm: Any) -> str:
    """Return why the engine is dead; "" while it is alive. Before 1.3, LLM has no public method for it."""
    executor = getattr(llm, "_executor", None)
    if executor is None:
        return ""
    if executor.is_shutdown():  # generate_async itself asks this
        return "TensorRT-LLM's executor has shut down"
    # Futures of the workers' main functions: one that is done means that its worker has ended, whatever the executor
    # believes. Under trtllm-llmapi-launch there may be none.
    for future in getattr(executor, "mpi_futures", ()):
        if future.done():
            cause = None if future.cancelled() else future.exception()
            return "a worker of TensorRT-LLM has ended" + (f": {describe(cause)}" if cause else "")
    return ""


class Faults:
    """Counts the engine's faults.

    A fault fails every running request, but counts once. A further one counts only if it fails a request that began, or
    got a token, after the fault before.
    """

    def __init__(self) -> None:
        self.count = 0
        """Number of faults so far. A request remembers the number at its start and at each of its tokens."""
        self._in_a_row = 0

    def token_came(self) -> None:
        self._in_a_row = 0

    def add(self, message: str, count_before: int) -> str:
        """Count a fault; return why the engine is beyond use, or "".

        :param message: error with which a request has failed.
        :param count_before: `count` when that request was last known to be well.
        """
        if count_before == self.count:
            self.count += 1
            self._in_a_row += 1
        if any(part in message for part in _LASTING):
            return f"the GPU has failed: {message}"
        if self._in_a_row >= MAX_FAULTS_IN_A_ROW:
            return f"TensorRT-LLM has failed {self._in_a_row} times in a row, with no token between: {message}"
        return ""


@dataclass(slots=True)
class IterationStats:
    """Numbers of the latest iteration, and sums over all iterations; all zero before the first."""

    num_queued: int = 0
    """Number of requests that the engine holds and has not scheduled."""
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    tokens_per_block: int = 0
    num_draft_tokens: int = 0
    """Sum over all iterations."""
    num_accepted_draft_tokens: int = 0
    """Sum over all iterations."""
    worked_at_s: float = 0.0
    """Time at which an iteration with requests was last reported, by time.monotonic()."""
    extra: dict[str, float] = field(default_factory=dict)

    def add(self, row: Mapping[str, Any] | str | bytes) -> None:
        """Add one iteration, as a mapping or its JSON. Sections may be missing or null."""
        values = row if isinstance(row, Mapping) else json.loads(row)
        cache = values.get("kvCacheStats") or {}
        drafts = values.get("specDecodingStats") or {}
        if _whole(values, "numActiveRequests"):
            self.worked_at_s = time.monotonic()
        self.num_queued = _whole(values, "numQueuedRequests")
        self.kv_blocks_used = _whole(cache, "usedNumBlocks")
        self.kv_blocks_total = _whole(cache, "maxNumBlocks")
        self.tokens_per_block = _whole(cache, "tokensPerBlock")
        self.num_draft_tokens += _whole(drafts, "numDraftTokens")
        self.num_accepted_draft_tokens += _whole(drafts, "numAcceptedTokens")
        self.extra = {
            "iteration_ms": float(values.get("iterLatencyMS") or 0.0),
            "kv_blocks_reused": float(cache.get("reusedBlocks") or 0),
            "kv_blocks_missed": float(cache.get("missedBlocks") or 0),
        }


def _whole(values: Mapping[str, Any], name: str) -> int:
    return int(values.get(name) or 0)
