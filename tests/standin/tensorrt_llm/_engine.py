"""The engine behind LLM: a thread that gives every request of its batch some tokens in each iteration."""

from __future__ import annotations

import asyncio
import collections
import os
import queue
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

from tensorrt_llm._answers import Logprob, answer, logprobs
from tensorrt_llm._kv_transfer import KvSender, TransferError, receive
from tensorrt_llm._record import RECORD
from tensorrt_llm.tokenizer import EOS

TOKENS_PER_BLOCK = 32
TOTAL_BLOCKS = 1000
_POLL_S = 0.01


class Response(NamedTuple):
    """The result of one or more iterations for a request."""

    token_ids: Iterable[int] = ()
    logprobs: Iterable[dict[int, Logprob]] = ()
    """Log-probabilities, with those of a stop token, which is not among the token ids."""
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: Exception | str | None = None
    """Error. A text stands for a failure in a worker; the reader makes a RequestError of it."""
    cached_tokens: int = 0
    perf_metrics: Any = None
    disaggregated_params: Any = None


class EngineDiedError(RuntimeError):
    """Error of a request when the engine dies."""


class Responses:
    """A request's responses on their way to the loop that reads them, like llmapi/utils.py's AsyncQueue.

    Every response stays separate, and the loop is woken once an iteration for all requests together.
    """

    def __init__(self, loop):
        self.loop = loop
        self._waiting = collections.deque()
        self._event = asyncio.Event()

    def __len__(self):
        return len(self._waiting)

    def __getitem__(self, index):
        return self._waiting[index]

    def put(self, response):
        """Add a response, in the engine's thread, without waking the reader."""
        self._waiting.append(response)

    def notify(self):
        """Wake the reader, in the loop, unless it has read everything in the meantime."""
        if self._waiting:
            self._event.set()

    async def get(self):
        """Return the next response; suspend only while there is none."""
        while not self._waiting:
            await self._event.wait()
        response = self._waiting.popleft()
        if not self._waiting:
            self._event.clear()
        return response

    def get_blocking(self, timeout):
        """Return the next response.

        :raises queue.Empty: after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._waiting:
            if deadline is not None and time.monotonic() > deadline:
                raise queue.Empty
            time.sleep(_POLL_S)
        return self._waiting.popleft()


def notify_many(responses):
    """Wake the loop once for all of them. There is only one loop, and it may be closed."""
    queues = list(responses)
    if queues and not queues[0].loop.is_closed():
        queues[0].loop.call_soon_threadsafe(_notify, queues)


def _notify(queues):
    for responses in queues:
        responses.notify()


class Sequence:
    """One request in the batch."""

    def __init__(self, prompt_token_ids, params, stream_interval, sampler, responses):
        self.opaque_state = None
        """Where the KV cache of a generation_only request is."""
        self.hold = None
        """Of a context_only request: holds KV blocks, and returns DisaggregatedParams, but for the tokens."""
        self.responses = responses
        self.aborted = threading.Event()
        self.kills = any(getattr(params, name) is not None for name in sampler.fatal)
        """Whether its first step fails every running request."""
        self.num_blocks = -(-len(prompt_token_ids) // TOKENS_PER_BLOCK)
        self._params = params
        self._sampler = sampler
        self._stream_interval = stream_interval
        """Number of iterations per response; None for a single response at the end."""
        self._stops = set() if params.ignore_eos else set(params.stop_token_ids or ())
        self._ends = self._stops if params.ignore_eos else self._stops | {EOS}
        self._max_tokens = params.max_tokens
        self._min_tokens = params.min_tokens or 0
        self._answer = answer(prompt_token_ids, params)
        self._cached_tokens = (self.num_blocks - 1) * TOKENS_PER_BLOCK
        self._times = [time.monotonic()] * 4
        self._num_tokens = 0
        self._num_iterations = 0
        self._unsent = []
        self._unsent_logprobs = []

    def go_on(self, opaque_state, tokens):
        """Begin with the context side's tokens. Nothing looks whether they end the answer."""
        self.opaque_state = opaque_state
        for _ in tokens:
            next(self._answer)
        self._num_tokens = len(tokens)
        if RECORD["disaggregated_params"]["repeats_first_token"]["value"]:
            self._unsent += tokens

    def step(self, now, num_tokens):
        """Put one iteration's tokens into a response; return whether the sequence has ended."""
        if self.aborted.is_set():
            self._respond("cancelled", None)
            return True
        for _ in range(num_tokens):
            if self._add_token(now):
                return True
        self._num_iterations += 1
        if self._stream_interval and self._num_iterations % self._stream_interval == 0:
            self._respond(None, None)
        return False

    def _add_token(self, now):
        """Make the last response if the sequence has ended; return whether it has."""
        token = next(self._answer)
        if token in self._ends:
            while self._num_tokens < self._min_tokens and (token == EOS or token in self._stops):
                token = next(self._answer)
        if self.hold is not None and token not in self._ends - self._stops:
            self._hand_over(token, self.hold(self.num_blocks))
            return True
        if self._params.logprobs:
            self._unsent_logprobs.append(logprobs(token, self._params, self._sampler.logprobs["of"]))
        if token in self._stops:
            if self._params.include_stop_str_in_output:
                self._unsent.append(token)
            self._respond("stop", token)
            return True
        self._unsent.append(token)
        self._num_tokens += 1
        if self._num_tokens == 1:
            self._times[2] = now
        self._times[3] = now
        if token in self._ends or self._num_tokens >= self._max_tokens:
            self._respond("stop" if token in self._ends else "length", None)
            return True
        return False

    def _hand_over(self, token, kept):
        """End a context_only request. The check for stop tokens comes after the one for max_tokens, which is 1."""
        kept.first_gen_tokens = [token]
        reason = "length" if kept.ctx_request_id % 2 else "not_finished"  # there are both
        self.responses.put(Response([token], (), reason, None, None, self._cached_tokens, None, kept))

    def _respond(self, finish_reason, stop_reason):
        metrics = self._perf_metrics() if finish_reason and self._params.return_perf_metrics else None
        unsent = self._unsent, self._unsent_logprobs
        self.responses.put(Response(*unsent, finish_reason, stop_reason, None, self._cached_tokens, metrics))
        self._unsent, self._unsent_logprobs = [], []

    def _perf_metrics(self):
        """Return the bindings' RequestPerfMetrics; all blocks of the prompt but the last were in the cache."""
        names = ("arrival_time", "first_scheduled_time", "first_token_time", "last_token_time")
        times = {name: timedelta(seconds=at) for name, at in zip(names, self._times, strict=True)}
        reused = self.num_blocks - 1
        blocks = {"num_total_allocated_blocks": self.num_blocks, "num_new_allocated_blocks": 1}
        found = {"num_reused_blocks": reused, "num_missed_blocks": 1, "kv_cache_hit_rate": reused / self.num_blocks}
        drafts = {"acceptance_rate": 0.0, "total_accepted_draft_tokens": 0, "total_draft_tokens": 0}
        return SimpleNamespace(
            timing_metrics=SimpleNamespace(**times),
            kv_cache_metrics=SimpleNamespace(**blocks, **found),
            speculative_decoding=SimpleNamespace(**drafts),
        )

    def fail(self, error):
        self.responses.put(Response(error=error))


class Engine:
    """The engine. LLM.generate_async calls `is_shutdown` before every request."""

    def __init__(self, tokens_per_iteration, max_batch_size, *, keeps_statistics):
        self.mpi_futures = [Future()]
        """Futures of the workers' main functions, which end when a worker ends."""
        self.iterations = queue.SimpleQueue()
        self.fault = ""
        """Error of every iteration while it is set: it fails the requests in the batch, but not the engine."""
        self._max_batch_size = max_batch_size
        self._keeps_statistics = keeps_statistics
        self._waiting = []
        self._tokens_per_iteration = tokens_per_iteration
        rate = float(os.environ.get("STANDIN_TOKENS_PER_S", "0"))
        self._iteration_s = tokens_per_iteration / rate if rate else 0.0
        self._tokens_left = int(os.environ.get("STANDIN_FAIL_AFTER", "-1"))
        self._arrived = queue.SimpleQueue()
        self._stopped = threading.Event()
        self.kv_sender = KvSender(self._report)
        self._thread = threading.Thread(target=self._run, name="standin-engine", daemon=True)
        self._thread.start()

    def submit(self, sequence):
        if sequence.opaque_state is None:
            self._arrived.put(sequence)
        else:
            threading.Thread(target=self._fetch, args=(sequence, sequence.opaque_state), daemon=True).start()

    def _fetch(self, sequence, opaque_state):
        try:
            receive(opaque_state, sequence.aborted)
        except TransferError:
            self._end([sequence], "Error in kv cache transfer for generation requests")
        else:
            self._arrived.put(sequence)

    def is_shutdown(self):
        return self._stopped.is_set()

    def shutdown(self):
        self._stopped.set()
        self._arrived.put(None)
        self._thread.join()
        self.kv_sender.close()

    def _run(self):
        batch = []
        due = 0.0
        while not self._stopped.is_set():
            self._waiting += self._arrivals(wait=not batch and not self._waiting)
            batch = self._iterate(self._filled_up(batch))
            if batch and self._iteration_s:
                due = max(due + self._iteration_s, time.monotonic())
                self._stopped.wait(due - time.monotonic())
            else:
                time.sleep(0)  # TensorRT-LLM is another process, so that the loop must not wait for this thread's GIL
        rest = batch + self._waiting + self._arrivals(wait=False)
        self._end(rest, EngineDiedError("the executor was shut down"))

    def _filled_up(self, batch):
        """Fill the batch with waiting requests. A request aborted while it waits is dropped without a response."""
        room = self._max_batch_size - len(batch)
        batch = batch + self._waiting[:room]
        self._waiting = [sequence for sequence in self._waiting[room:] if not sequence.aborted.is_set()]
        return batch

    def _arrivals(self, *, wait):
        arrived = []
        try:
            while True:
                arrived.append(self._arrived.get(block=wait and not arrived))
        except queue.Empty:
            return [sequence for sequence in arrived if sequence is not None]

    def _iterate(self, batch):
        """Run one iteration; return the sequences that go on. The readers are woken when all have had their tokens."""
        fault = "an assertion failed in the sampler" if any(sequence.kills for sequence in batch) else self.fault
        if fault:
            self._end(batch, fault)
            return []
        going_on, now = [], time.monotonic()
        for sequence in batch:
            if self._died():
                return batch
            if not sequence.step(now, self._tokens_per_iteration):
                going_on.append(sequence)
        self._report(len(batch), going_on)
        notify_many(sequence.responses for sequence in batch)
        return going_on

    def _report(self, num_active=0, going_on=()):
        """Add an iteration to the statistics. Ended requests have no KV blocks, unless these are held."""
        if self._keeps_statistics:
            num_blocks = sum([sequence.num_blocks for sequence in going_on]) + self.kv_sender.num_blocks
            self.iterations.put(self._statistics(num_active, num_blocks))

    def _statistics(self, num_active, num_blocks):
        drafts = num_active * (self._tokens_per_iteration - 1)
        used = {"usedNumBlocks": num_blocks, "reusedBlocks": 0, "missedBlocks": num_blocks}
        return {
            "iterLatencyMS": self._iteration_s * 1000,
            "numActiveRequests": num_active,
            "numQueuedRequests": len(self._waiting),
            "kvCacheStats": {"maxNumBlocks": TOTAL_BLOCKS, "tokensPerBlock": TOKENS_PER_BLOCK, **used},
            "specDecodingStats": {"numDraftTokens": drafts, "numAcceptedTokens": drafts} if drafts else None,
        }

    def _end(self, sequences, error):
        for sequence in sequences:
            sequence.fail(error)
        notify_many(sequence.responses for sequence in sequences)

    def _died(self):
        if self._tokens_left < 0:
            return False
        self._tokens_left -= 1
        if self._tokens_left < 0:
            self._tokens_left = 0
            self._stopped.set()
        return self._stopped.is_set()
