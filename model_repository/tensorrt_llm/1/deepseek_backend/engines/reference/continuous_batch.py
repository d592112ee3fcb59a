"""Iteration-level batching: requests join the batch when there is room, and leave it when they have ended.

An iteration decodes one token of every running request in one forward pass. Then it prefills waiting requests: the
highest priority first, and the oldest first among equals. Only the engine's thread uses the batch.
"""

from __future__ import annotations

import logging
import time
from bisect import insort
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from deepseek_backend.engines.base import Step, TokenLogprobs
from deepseek_backend.engines.reference.batched_generation import BatchedGeneration
from deepseek_backend.engines.reference.model_runner import ModelRunner
from deepseek_backend.engines.reference.token_logprobs import prompt_logprobs, token_logprobs
from deepseek_backend.engines.reference.token_sampling import sample_tokens
from deepseek_backend.errors import EngineError, describe

logger = logging.getLogger(__name__)

PREFILL_TOKENS = 2048
"""Prompt tokens that an iteration prefills before the running requests get their next token; at least one prompt."""


class ContinuousBatch:
    """The waiting and the running requests of one model. Their steps are collected in `steps`."""

    def __init__(self, runner: ModelRunner, tokenizer: Tokenizer, max_num_seqs: int) -> None:
        self._runner = runner
        self._tokenizer = tokenizer
        self._max_num_seqs = max_num_seqs
        self._waiting: list[BatchedGeneration] = []  # in the order in which they will start
        self._running: list[BatchedGeneration] = []  # in the order of the runner's rows
        self.steps: list[tuple[BatchedGeneration, Step]] = []
        """Steps that are not delivered yet. They are kept here, so that an exception does not lose those made before
        it."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_cached_tokens(self) -> int:
        return sum(self._runner.lengths)

    def add(self, generations: Iterable[BatchedGeneration]) -> None:
        """Add requests to the queue."""
        for generation in generations:
            insort(self._waiting, generation, key=lambda one: -one.request.priority)

    def iterate(self) -> None:
        """Decode a token of all running requests, then prefill waiting ones."""
        if self._running:
            self._decode()
        num_tokens = 0
        while self._waiting and len(self._running) < self._max_num_seqs:
            num_tokens += len(self._waiting[0].prompt_ids)
            if num_tokens > max(PREFILL_TOKENS, len(self._waiting[0].prompt_ids)):
                break
            self._start()

    def cancel(self, request_ids: set[str]) -> None:
        """End the open requests among `request_ids`. The bytes of an incomplete character are dropped."""
        dropped = [generation for generation in self._waiting if generation.request.request_id in request_ids]
        self._waiting = [one for one in self._waiting if one.request.request_id not in request_ids]
        for row in reversed(range(len(self._running))):
            if self._running[row].request.request_id in request_ids:
                dropped.append(self._running[row])
                self._remove(row)
        self.steps += [(generation, generation.step(finish_reason="cancelled")) for generation in dropped]

    def close(self) -> list[BatchedGeneration]:
        """Remove all open requests, and return them."""
        generations = [*self._running, *self._waiting]
        self._running, self._waiting = [], []
        return generations

    def _decode(self) -> None:
        hidden = self._runner.decode([generation.last_token_id for generation in self._running])
        token_ids, logprobs = self._choose(self._runner.logits(hidden), self._running)
        # From the last row down: removing a row moves the last one into its place, and that one has been handled by
        # then.
        for row in reversed(range(len(token_ids))):
            self._advance(row, token_ids[row], logprobs.get(row))

    def _start(self) -> None:
        """Start the next waiting request. It stays in the queue until it runs, so that `close` always finds it."""
        generation = self._waiting[0]
        try:
            generation.make_sampler()
        except Exception as error:  # probably there is no memory for this request's penalties
            logger.exception("a request can't be started")
            step = generation.step(error=EngineError(f"the request can't be started: {describe(error)}"))
            self.steps.append((self._waiting.pop(0), step))
        else:
            self._prefill(generation)

    def _prefill(self, generation: BatchedGeneration) -> None:
        generation.scheduled_ns = time.monotonic_ns()
        hidden = self._runner.prefill(generation.prompt_ids)
        prompt_entries: Sequence[TokenLogprobs | None] = ()
        if (number := generation.request.sampling.prompt_logprobs) is not None:
            prompt_entries = prompt_logprobs(
                hidden, self._runner.logits, generation.prompt_ids, number, self._tokenizer
            )
        token_ids, logprobs = self._choose(self._runner.logits(hidden[-1:]), [generation])
        self._running.append(self._waiting.pop(0))
        step = self._advance(len(self._running) - 1, token_ids[0], logprobs.get(0))
        step.prompt_logprobs = prompt_entries

    def _choose(
        self, logits: npt.NDArray[np.float32], generations: Sequence[BatchedGeneration]
    ) -> tuple[list[int], Mapping[int, TokenLogprobs]]:
        """Return the next token of each row of `logits`, and the log-probabilities of the rows that request them."""
        requested = {row: n for row, one in enumerate(generations) if (n := one.request.sampling.logprobs) is not None}
        # A copy, made before sampling changes the logits.
        raw = logits[list(requested)] if requested else None
        token_ids = sample_tokens(logits, [generation.sampler for generation in generations])
        if raw is None:
            return token_ids, {}
        entries = token_logprobs(raw, [token_ids[row] for row in requested], list(requested.values()), self._tokenizer)
        return token_ids, dict(zip(requested, entries, strict=True))

    def _advance(self, row: int, token_id: int, logprobs: TokenLogprobs | None) -> Step:
        generation = self._running[row]
        step = generation.advance(token_id)
        if logprobs is not None:
            step.logprobs = (logprobs,)
        if step.finish_reason is not None:
            self._remove(row)
        self.steps.append((generation, step))
        return step

    def _remove(self, row: int) -> None:
        self._runner.remove(row)
        self._running[row] = self._running[-1]
        self._running.pop()
