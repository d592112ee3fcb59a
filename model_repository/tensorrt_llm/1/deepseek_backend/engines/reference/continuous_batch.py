"""Iteration-level batching: requests join the batch when there is room, and leave it when they have ended.

An iteration decodes one token of every running request in one forward pass. Then it prefills waiting requests: the
highest priority first, and the oldest first among equals. Only the engine's thread uses the batch.
"""

import logging
import time
from bisect import insort
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from deepseek_backend.engines.base import FinishReason, PerfMetrics, Step, StepSink, TokenLogprobs
from deepseek_backend.engines.detokenizer import Detokenizer
from deepseek_backend.engines.generate_request import GenerateRequest
from deepseek_backend.engines.prompting import check_ids, check_prompt_length, prompt_token_ids
from deepseek_backend.engines.reference.checkpoint_loading import LoadedCheckpoint
from deepseek_backend.engines.reference.deepseek_model import ModelRunner
from deepseek_backend.engines.reference.guides import Guides
from deepseek_backend.engines.reference.token_sampling import (
    TokenSampler,
    prompt_logprobs,
    sample_tokens,
    spellings,
    token_logprobs,
)
from deepseek_backend.errors import BackendError, EngineError, RequestError, describe

logger = logging.getLogger(__name__)

PREFILL_TOKENS = 2048
"""Prompt tokens that an iteration prefills before the running requests get their next token; at least one prompt."""


class BatchedGeneration:
    """An open request. It is made in the caller's thread; from then on the engine's thread owns it."""

    sampler: TokenSampler
    """Set by `make_sampler`."""

    def __init__(
        self, request: GenerateRequest, sink: StepSink, checkpoint: LoadedCheckpoint, guides: Guides, max_seq_len: int
    ) -> None:
        """Make the request. This needs the tokenizer only, not the model.

        :raises RequestError: when the prompt can't be served.
        """
        self._arrived_ns = time.monotonic_ns()
        sampling = request.sampling
        self.request = request
        self.sink = sink
        self.prompt_ids = prompt_token_ids(request, checkpoint.encode, checkpoint.vocab_size)
        check_prompt_length(len(self.prompt_ids), max_seq_len - 1, limit="engine_options.max_seq_len")
        check_ids(sampling.logit_bias or (), checkpoint.vocab_size, field="logit_bias")
        self.last_token_id = -1
        self.num_generated = 0
        self.scheduled_ns = 0
        """Time at which its prefill began, by time.monotonic_ns(); 0 before."""
        self._first_token_ns = self._last_token_ns = 0
        self._max_tokens = min(request.max_tokens, max_seq_len - len(self.prompt_ids))
        self._eos_token_ids = frozenset() if sampling.ignore_eos else checkpoint.eos_token_ids
        self._detokenizer = Detokenizer(
            checkpoint.tokenizer, skip_special_tokens=sampling.skip_special_tokens is not False
        )
        self._bad_sequences = spellings(checkpoint.tokenizer, sampling.bad)
        self._guide = guides.of(sampling)
        self._checkpoint = checkpoint

    def make_sampler(self) -> None:
        """Make the arrays that sampling needs. The engine's thread calls it before the prefill."""
        sampling, checkpoint = self.request.sampling, self._checkpoint
        self.sampler = TokenSampler(
            sampling,
            prompt_ids=self.prompt_ids,
            end_ids=checkpoint.eos_token_ids.union(sampling.stop_token_ids),
            bad_sequences=self._bad_sequences,
            guide=self._guide,
            vocab_size=checkpoint.vocab_size,
        )

    def advance(self, token_id: int) -> Step:
        """Return the step of a generated token. A token that ends the text is counted, but shown only on request."""
        self.last_token_id = token_id
        self.num_generated += 1
        if self._guide is not None and (failure := self._guide.failure):
            return self.step(error=RequestError(failure))
        if self.request.sampling.return_perf_metrics:
            self._last_token_ns = time.monotonic_ns()
            self._first_token_ns = self._first_token_ns or self._last_token_ns
        finish_reason: FinishReason | None = None
        stop_reason = None
        if token_id in self._eos_token_ids:
            finish_reason = "stop"
        elif token_id in self.request.sampling.stop_token_ids:
            finish_reason, stop_reason = "stop", token_id
        elif self.num_generated >= self._max_tokens:
            finish_reason = "length"
        is_shown = stop_reason is not None and self.request.sampling.include_stop_str_in_output
        text = self._detokenizer.add(token_id) if finish_reason != "stop" or is_shown else ""
        if finish_reason is not None:
            text += self._detokenizer.flush()
        return self.step(text=text, token_ids=(token_id,), finish_reason=finish_reason, stop_reason=stop_reason)

    def step(
        self,
        *,
        text: str = "",
        token_ids: Sequence[int] = (),
        finish_reason: FinishReason | None = None,
        stop_reason: int | None = None,
        error: BackendError | None = None,
    ) -> Step:
        has_metrics = finish_reason is not None and self.request.sampling.return_perf_metrics
        return Step(
            text=text,
            token_ids=token_ids,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_input_tokens=len(self.prompt_ids),
            error=error,
            perf_metrics=self._perf_metrics() if has_metrics else None,
        )

    def _perf_metrics(self) -> PerfMetrics:
        """Return the metrics. A KV block is one token, and no cache is shared between requests."""
        # The last token never enters the cache, because the model does not see it.
        num_cached = len(self.prompt_ids) + self.num_generated - 1 if self.num_generated else 0
        return PerfMetrics(
            kv_cache_missed_block=len(self.prompt_ids) if self.num_generated else 0,
            kv_cache_alloc_new_blocks=num_cached,
            kv_cache_alloc_total_blocks=num_cached,
            arrival_time_ns=self._arrived_ns,
            first_scheduled_time_ns=self.scheduled_ns,
            first_token_time_ns=self._first_token_ns,
            last_token_time_ns=self._last_token_ns,
        )


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
        for generation in generations:
            insort(self._waiting, generation, key=lambda one: -one.request.priority)

    def iterate(self) -> None:
        """Decode a token of all running requests, then prefill waiting ones."""
        if self._running:
            hidden = self._runner.decode([generation.last_token_id for generation in self._running])
            token_ids, logprobs = self._choose(self._runner.logits(hidden), self._running)
            # From the last row down: removing a row moves the last one into its place, and that one has been handled
            # by then.
            for row in reversed(range(len(token_ids))):
                self._advance(row, token_ids[row], logprobs.get(row))
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

    def _start(self) -> None:
        """Start the next waiting request. It stays in the queue until it runs, so that `close` always finds it."""
        generation = self._waiting[0]
        try:
            generation.make_sampler()
        except Exception as error:
            # Probably there is no memory for this request's penalties.
            logger.exception("a request can't be started")
            step = generation.step(error=EngineError(f"the request can't be started: {describe(error)}"))
            self.steps.append((self._waiting.pop(0), step))
            return
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
        if step.finish_reason is not None or step.error is not None:
            self._remove(row)
        self.steps.append((generation, step))
        return step

    def _remove(self, row: int) -> None:
        self._runner.remove(row)
        self._running[row] = self._running[-1]
        self._running.pop()
