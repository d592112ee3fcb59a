"""The engine behind LLM: a thread that gives every request of its batch some tokens in each iteration."""

from __future__ import annotations

import itertools
import os
import queue
import random
import threading
import zlib
from collections.abc import Iterator
from typing import Any

from tensorrt_llm.tokenizer import EOS, StandinTokenizer

PHRASE = "深く考える 🙂 naïve façade, 推理完成。"
"""What every answer says over and over; its tokens end inside characters most of the time."""

Response = tuple[list[int], str | None, int | None, Exception | None]
"""New token ids, finish reason, stop reason, error."""


class EngineDiedError(RuntimeError):
    """What a request gets when the engine goes."""


class Sequence:
    """One request in the batch."""

    def __init__(self, prompt_token_ids: list[int], params: Any, stream_interval: int | None) -> None:
        self.responses: queue.SimpleQueue[Response] = queue.SimpleQueue()
        self.notify: Any = lambda: None
        """Called after responses were put, from the engine's thread."""
        self.aborted = threading.Event()
        self._params = params
        self._stream_interval = stream_interval
        """None: one response at the end."""
        self._stops = set(params.stop_token_ids or ())
        self._answer = _answer(prompt_token_ids, params)
        self._num_tokens = 0
        self._unsent: list[int] = []

    def step(self) -> bool:
        """One more token. True when the sequence is over."""
        if self.aborted.is_set():
            self._respond("cancelled", None)
            return True
        token = self._next_token()
        if token in self._stops:
            if self._params.include_stop_str_in_output:
                self._unsent.append(token)
            self._respond("stop", token)
            return True
        self._unsent.append(token)
        self._num_tokens += 1
        if token == EOS and not self._params.ignore_eos:
            self._respond("stop", None)
            return True
        if self._num_tokens >= self._params.max_tokens:
            self._respond("length", None)
            return True
        if self._stream_interval and self._num_tokens % self._stream_interval == 0:
            self._respond(None, None)
        return False

    def _next_token(self) -> int:
        token = next(self._answer)
        too_early = self._num_tokens < (self._params.min_tokens or 0)
        while too_early and (token == EOS or token in self._stops):
            token = next(self._answer)
        return token

    def _respond(self, finish_reason: str | None, stop_reason: int | None) -> None:
        self.responses.put((self._unsent, finish_reason, stop_reason, None))
        self._unsent = []

    def fail(self, error: Exception) -> None:
        self.responses.put(([], None, None, error))


def _answer(prompt_token_ids: list[int], params: Any) -> Iterator[int]:
    """The tokens, without end: the phrase, turned by the prompt and, when sampling, by the seed; EOS once in it."""
    digest = zlib.crc32(bytes(token % 256 for token in prompt_token_ids))
    words = PHRASE.split(" ")
    turn = digest % len(words)
    if not params._greedy_decoding:
        turn += 1 + (random.randrange(1 << 32) if params.seed is None else params.seed) % (len(words) - 1)
    text = " ".join(words[turn % len(words) :] + words[: turn % len(words)]) + " "
    tokens = StandinTokenizer().encode(text, add_special_tokens=False)
    length = 40 + digest % 40
    endless = itertools.cycle(tokens)
    yield from itertools.islice(endless, length)
    yield EOS
    yield from endless


class Engine:
    """`is_shutdown` is what LLM.generate_async asks before every request."""

    def __init__(self, tokens_per_iteration: int) -> None:
        self._tokens_per_iteration = tokens_per_iteration
        rate = float(os.environ.get("STANDIN_TOKENS_PER_S", "0"))
        self._iteration_s = tokens_per_iteration / rate if rate else 0.0
        self._tokens_left = int(os.environ.get("STANDIN_FAIL_AFTER", "-1"))
        self._arrived: queue.SimpleQueue[Sequence | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="standin-engine", daemon=True)
        self._thread.start()

    def submit(self, sequence: Sequence) -> None:
        self._arrived.put(sequence)

    def is_shutdown(self) -> bool:
        return self._stopped.is_set()

    def shutdown(self) -> None:
        self._stopped.set()
        self._arrived.put(None)
        self._thread.join()

    def _run(self) -> None:
        batch: list[Sequence] = []
        while not self._stopped.is_set():
            batch += self._arrivals(wait=not batch)
            batch = self._iterate(batch)
            if batch and self._iteration_s:
                self._stopped.wait(self._iteration_s)
        for sequence in batch + self._arrivals(wait=False):
            sequence.fail(EngineDiedError("the executor was shut down"))
            sequence.notify()

    def _arrivals(self, *, wait: bool) -> list[Sequence]:
        arrived: list[Sequence | None] = []
        try:
            while True:
                arrived.append(self._arrived.get(block=wait and not arrived))
        except queue.Empty:
            return [sequence for sequence in arrived if sequence is not None]

    def _iterate(self, batch: list[Sequence]) -> list[Sequence]:
        """One iteration; the sequences that go on. All are told after all have had their tokens, as a batch ends."""
        going_on = []
        for sequence in batch:
            if self._died():
                return batch
            if not any(sequence.step() for _ in range(self._tokens_per_iteration)):
                going_on.append(sequence)
        for sequence in batch:
            sequence.notify()
        return going_on

    def _died(self) -> bool:
        if self._tokens_left < 0:
            return False
        self._tokens_left -= 1
        if self._tokens_left < 0:
            self._tokens_left = 0
            self._stopped.set()
        return self._stopped.is_set()
