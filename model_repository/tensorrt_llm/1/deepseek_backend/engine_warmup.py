"""Sends requests of the backend's own between the engine's load and READY, so that no user's request is the first.

An engine compiles kernels, tunes them and allocates memory when a batch or a prompt of a new size comes for the first
time. Each shape of `triton_config.warmup` is sent until its time is steady. The steps go to a sink of this module: the
service, admission and the counters of requests don't see them.
"""

import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deepseek_backend.config import WarmupConfig
from deepseek_backend.engines.base import Engine, Step
from deepseek_backend.engines.generate_request import GenerateRequest, SamplingParams
from deepseek_backend.errors import BackendError, EngineError, RequestError, describe

logger = logging.getLogger(__name__)

STEADY = 0.1
"""A shape is steady when two rounds in a row differ by less than this share of the longer one. `warm server`
(warming/server.py) has the same share and compares the first token and the steps too: over a network the total
hides a stall; here a round is whole iterations."""
STEADY_S = 0.005
"""A shape is also steady when they differ by fewer seconds than this: in so short a round it is chance. There is no
network here, so it is less than for `warm server`."""
CHECK_S = 0.1
"""Seconds between two checks of a round under way: engine, exit, time."""
ABORT_S = 6.0
"""Seconds in which the engine has to end aborted requests; TensorRT-LLM's adapter allows 5 s (its ABORT_TIMEOUT_S)."""
CHECK_EVERY = 256
"""Requests made or submitted between two such checks; submitting one takes a tenth of a millisecond and more."""
# Ordinary token ids of DeepSeek: three special ones are below, the others from 128,000 on.
_MANY_IDS = range(3, 100_000)
# Token ids for smaller vocabularies: any byte-level vocabulary has this many.
_FEW_IDS = range(3, 256)
_USERS_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
"""The fields of default_sampling that decide which sampling kernels run."""

Shape = tuple[int, int]
"""(requests sent at once, prompt tokens of each)"""


def warm_up(
    engine: Engine,
    config: WarmupConfig,
    *,
    default_sampling: Mapping[str, Any],
    is_exiting: Callable[[], bool],
    hang_s: float,
) -> float:
    """Send every shape until it is steady, and return the seconds that took.

    With a healthy engine it ends within max_s, ABORT_S and one short request; with an engine that hangs, within hang_s
    and ABORT_S more. A shape that fails is only a warning. So is reaching max_s, if one short request is answered after
    it. When the server exits, the warm-up stops.

    :param hang_s: seconds without an answer to the short request after which the engine counts as hanging.
    :raises EngineError: when the engine dies, hangs, or fails at the short request too.
    """
    began = time.monotonic()
    warmup = _Warmup(engine, config, default_sampling, is_exiting, until_s=began + config.max_s, hang_s=hang_s)
    ended = warmup.run()
    seconds = time.monotonic() - began
    summary = "warm-up: %d of %d shapes in %.1f s, of which first users are spared %.1f s%s"
    level = logging.WARNING if ended else logging.INFO
    logger.log(level, summary, warmup.num_warm, len(config.shapes), seconds, warmup.spared_s, ended and f"; {ended}")
    return seconds


class _Ended(Exception):
    """Nothing more has to be sent; the text says why."""


class _OutOfTime(_Ended):
    """Nothing more may be sent, because the time is over."""


class _Ends:
    """The sink of one round. It knows which requests have not had their last step, and the errors of the others."""

    def __init__(self) -> None:
        self.errors: list[BackendError] = []
        self._open: set[str] = set()
        self._changed = threading.Condition()

    def expect(self, request: GenerateRequest) -> None:
        """Count `request` as open. Call this before the request is submitted."""
        with self._changed:
            self._open.add(request.request_id)

    def on_steps(self, steps: Sequence[tuple[GenerateRequest, Step]]) -> None:
        last = [(request, step) for request, step in steps if step.finish_reason is not None or step.error is not None]
        with self._changed:
            self._open.difference_update(request.request_id for request, _ in last)
            self.errors += [step.error for _, step in last if step.error is not None]
            if not self._open:
                self._changed.notify_all()

    def open(self) -> list[str]:
        with self._changed:
            return list(self._open)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all requests have ended; false when they have not in `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, timeout_s)


class _Warmup:
    def __init__(
        self,
        engine: Engine,
        config: WarmupConfig,
        default_sampling: Mapping[str, Any],
        is_exiting: Callable[[], bool],
        *,
        until_s: float,
        hang_s: float,
    ) -> None:
        self.num_warm = 0
        """Shapes that were sent and did not fail."""
        self.spared_s = 0.0
        """Seconds by which their first rounds were longer than their last."""
        self._engine = engine
        self._config = config
        self._is_exiting = is_exiting
        self._until_s = until_s
        self._hang_s = hang_s
        self._ids = _MANY_IDS
        self._numbers = itertools.count(1)
        self._random = random.Random()
        fields = engine.capabilities.sampling_fields
        self._sampling = {name: default_sampling[name] for name in _USERS_SAMPLING if name in default_sampling}
        self._sampling |= {"ignore_eos": True, "min_tokens": config.max_tokens}
        self._sampling = {name: value for name, value in self._sampling.items() if name in fields}
        # ignore_eos is enough by itself, and min_tokens may use other kernels than users' requests.
        if "ignore_eos" in self._sampling:
            self._sampling.pop("min_tokens", None)

    def run(self) -> str:
        """Warm every shape. Return why that was ended early, or ""."""
        try:
            for number, shape in enumerate(self._config.shapes, start=1):
                self._warm(number, shape)
        except _Ended as ended:
            return str(ended)
        return ""

    def _warm(self, number: int, shape: Shape) -> None:
        """Send one shape until it is steady or fails."""
        most = self._engine.capabilities.max_seq_len
        if shape[1] >= most:
            logger.warning("warm-up: left out %s: max_seq_len is %d", _shape_text(shape), most)
            return
        rounds: list[float] = []
        while len(rounds) < self._config.max_rounds and not _is_steady(rounds):
            try:
                seconds, error = self._round(shape, self._until_s)
            except _OutOfTime:
                self._prove_alive()  # the requests that were aborted may be slow, or the engine may hang
                raise
            if error is not None:
                logger.warning("warm-up: %s failed, and users' requests may: %s", _shape_text(shape), error)
                if not isinstance(error, RequestError):
                    self._prove_alive()
                return
            rounds.append(seconds)
        self.num_warm += 1
        spared_s = max(0.0, rounds[0] - rounds[-1])
        self.spared_s += spared_s
        steady = "steady" if _is_steady(rounds) else "not steady,"
        after = f"{steady} {rounds[-1]:.3f} s after {len(rounds)} rounds"
        text = f"first {rounds[0]:.3f} s, {after}; the first user is spared {spared_s:.3f} s"
        logger.info("warm-up %d of %d: %s: %s", number, len(self._config.shapes), _shape_text(shape), text)

    def _prove_alive(self) -> None:
        """Have one short request answered, whatever time is left of max_s.

        TensorRT-LLM's adapter takes an engine for dead after a few faults with no token between them (its faults.py).
        Several shapes that don't fit must not look like that, nor leave faults behind that count against the first
        users' requests.

        :raises EngineError: when the request fails too, or no answer comes.
        """
        shape = (1, min(length for _, length in self._config.shapes))
        try:
            _, error = self._round(shape, time.monotonic() + self._hang_s)
        except _OutOfTime:
            raise EngineError(f"the engine hangs: {_shape_text(shape)} had no answer in {self._hang_s:g} s") from None
        if error is not None and not isinstance(error, RequestError):  # a refusal is an answer too
            raise EngineError(f"the engine failed in the warm-up, and at {_shape_text(shape)} after it: {error}")

    def _round(self, shape: Shape, until_s: float) -> tuple[float, BackendError | None]:
        """Send the shape; return the seconds it took and its first error, if any."""
        seconds, error = self._send(shape, until_s)
        if isinstance(error, RequestError) and str(error).startswith("input_ids") and self._ids != _FEW_IDS:
            self._ids = _FEW_IDS
            seconds, error = self._send(shape, until_s)
        return seconds, error

    def _send(self, shape: Shape, until_s: float) -> tuple[float, BackendError | None]:
        """Send the shape's requests at once and wait for their ends; after an error send no more of them.

        :raises _Ended: when time is up, or the server exits.
        :raises EngineError: when the engine is dead.
        """
        # All are made before any is submitted: making them in between would spread them over several batches. Each has
        # tokens of its own, so that no KV blocks of another are found again.
        requests = []
        for number in range(shape[0]):
            if number % CHECK_EVERY == 0:
                self._check(until_s)
            requests.append(
                GenerateRequest(
                    request_id=f"warmup-{next(self._numbers)}",
                    prompt="",
                    prompt_token_ids=tuple(self._random.choices(self._ids, k=shape[1])),
                    sampling=SamplingParams.of(self._sampling),
                    max_tokens=self._config.max_tokens,
                )
            )
        ends = _Ends()
        began = time.monotonic()
        try:
            for number, request in enumerate(requests, start=1):
                if ends.errors:
                    break
                ends.expect(request)
                self._engine.submit(request, ends)
                if number % CHECK_EVERY == 0:
                    self._check(until_s)
            while not ends.wait(CHECK_S):
                self._check(until_s)
        except (_Ended, EngineError):
            self._abort(ends)
            raise
        except Exception as error:
            # An engine that breaks its protocol; the shape has failed.
            self._abort(ends)
            ends.errors.insert(0, EngineError(describe(error)))
        seconds = time.monotonic() - began
        self._check_engine()
        return seconds, next(iter(ends.errors), None)

    def _check(self, until_s: float) -> None:
        """:raises _Ended: when time is up, or the server exits.
        :raises EngineError: when the engine is dead.
        """
        self._check_engine()
        if self._is_exiting():
            raise _Ended("the server is exiting")
        if time.monotonic() >= until_s:
            raise _OutOfTime(f"ended after max_s, {self._config.max_s:g} s")

    def _check_engine(self) -> None:
        health = self._engine.health()
        if not health.alive:
            raise EngineError(f"the engine died while it was warmed up: {health.reason}")

    def _abort(self, ends: _Ends) -> None:
        for request_id in ends.open():
            self._engine.abort(request_id)
        if not ends.wait(ABORT_S):
            logger.warning("warm-up: the engine has not ended %d aborted requests", len(ends.open()))


def _is_steady(rounds: Sequence[float]) -> bool:
    if len(rounds) < 2:
        return False
    before, last = rounds[-2:]
    return abs(last - before) < max(STEADY * max(before, last), STEADY_S)


def _shape_text(shape: Shape) -> str:
    batch, length = shape
    return f"{batch:,} request{'s' * (batch > 1)} of {length:,} token{'s' * (length > 1)}"
