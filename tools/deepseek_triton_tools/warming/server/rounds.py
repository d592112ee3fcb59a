"""Rounds of requests that are all sent at once, of one shape, until a server answers them in a steady time."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeGuard, TypeVar

from deepseek_triton_client import (
    AsyncClient,
    Cancelled,
    DeadlineExceeded,
    DeepseekTritonError,
    InvalidRequest,
    ModelMetadata,
    ModelNotFound,
    Overloaded,
    ProtocolError,
    ServerError,
    Timeouts,
)
from deepseek_triton_tools.warming.server.shapes import Shape

T = TypeVar("T")

_STEADY = 0.1
"""Two rounds that differ by less than this share are as good as the same: the backend's own share (its warmup.py). That
one looks at the whole round alone, for it has no network between it and the engine; here the first token, the steps and
the whole answer have to agree, and what no user sees is more."""
_UNNOTICED_S = 0.02
"""A difference in waiting that no user sees, though it may be much of a very short wait."""
_UNNOTICED_STEP_S = 0.001
MOST_OVER_HTTP = 256
"""At once. Triton 2.51's HTTP front end tears streams when some 600 and more end at once (docs/tritonserver.md)."""
_FULL_ROUNDS = 4
"""So often a server may refuse all requests of a shape as too many before the shape is left out."""
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 8.0
"""After a refusal: others need the room."""

_LONGEST_ROUND_S = 86_400.0
"""The client's own limits go no further than some weeks."""

_MANY_IDS = range(3, 100_000)
"""Plain text for DeepSeek's models: their special tokens are 0 to 2 and from 128,000 on."""
_FEW_IDS = range(3, 256)
"""For smaller vocabularies: every one that goes by bytes has as many."""
_WORDS = (  # noqa: SIM905 - a list of so many literals is harder to read
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city name team minute idea body back parent face others level door"
).split()
"""Each is one token, with the space before it, in any vocabulary made of English."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """What was measured of requests that were sent at once. Of a time, the median over the answers."""

    num_requests: int
    """That were answered."""
    num_refused: int
    """As too many."""
    ttft_s: float
    step_s: float | None
    """Between two chunks of an answer, over all of them; None where each came as one."""
    answer_s: float
    """From the first to the last token's arrival at the user, waiting for the first included."""


Status = Literal["steady", "not steady", "left out", "not reached"]


@dataclass(frozen=True, kw_only=True)
class ShapeResult:
    shape: Shape
    status: Status
    """"not reached": the time was over before."""
    rounds: tuple[Round, ...] = ()
    reason: str = ""
    """Why it is not steady or left out, in one line."""

    @property
    def num_requests(self) -> int:
        """At once in the last round; fewer than the shape says where the server did not take more."""
        return self.rounds[-1].num_requests if self.rounds else 0

    @property
    def first(self) -> Round:
        """The first round of as many requests as the last one has; there are rounds."""
        return next(each for each in self.rounds if each.num_requests == self.num_requests)

    @property
    def can_be_compared(self) -> bool:
        """Whether there are two rounds of as many requests as the last one has."""
        return sum(each.num_requests == self.num_requests for each in self.rounds) > 1

    @property
    def spared_s(self) -> float:
        """What a first user would have waited longer for an answer than a later one; 0 where nobody would notice."""
        if not self.rounds:
            return 0.0
        first_s, last_s = self.first.answer_s, self.rounds[-1].answer_s
        return 0.0 if _is_alike(first_s, last_s, _UNNOTICED_S) else max(0.0, first_s - last_s)


class ServerFailure(Exception):
    """The server failed at a request that was right, or is gone. `error` is what the client says of it."""

    def __init__(self, error: DeepseekTritonError, shape: Shape) -> None:
        super().__init__(f"at {shape} prompt tokens: {error}")
        self.error = error


@dataclass(frozen=True)
class AskingTogether:
    """How this server is asked, by what its model takes."""

    prompt: Callable[[int], str | list[int]]
    """Of so many tokens; never the same twice, so that nothing of it is in the KV cache."""
    fields: dict[str, Any]
    otherwise: AskingTogether | None = None
    """Where the server refuses that."""

    @classmethod
    def of(cls, metadata: ModelMetadata, max_tokens: int) -> AskingTogether:
        names = {each.name for each in metadata.inputs}
        is_ours = "stream_mode" in names
        fields: dict[str, Any] = {"max_tokens": max_tokens}
        if is_ours:
            # Or tokens that leave together would look like one step.
            fields |= {"ignore_eos": True, "stream_interval": 1}
            return cls(_random_ids(_MANY_IDS), fields, cls(_random_ids(_FEW_IDS), fields))
        plain = cls(_random_words, fields)
        is_vllm = "sampling_parameters" in names  # see the client's _dialect.py
        return cls(_random_words, {**fields, "ignore_eos": True}, plain) if is_vllm else plain


def _random_ids(vocabulary: Sequence[int]) -> Callable[[int], list[int]]:
    return lambda num_tokens: random.choices(vocabulary, k=num_tokens)


def _random_words(num_tokens: int) -> str:
    """Of about so many tokens."""
    return " ".join(random.choices(_WORDS, k=num_tokens))


@dataclass
class Rounds:
    """All shapes of one warm-up, one after the other."""

    client: AsyncClient
    asking: AskingTogether
    max_rounds: int
    end: float
    """By time.monotonic(): no request is open after it."""
    observe: Callable[[Shape, Round], None]
    most_at_once: int | None = None
    """What the server took at once, once it has refused more."""
    _done: set[Shape] = field(default_factory=set)

    async def warm(self, shape: Shape) -> ShapeResult:
        """:raises ServerFailure: and nothing is open any more."""
        if shape.num_requests > MOST_OVER_HTTP and self.client.url.startswith("http"):
            reason = f"over HTTP no more than {MOST_OVER_HTTP} are asked at once: give the server as grpc://"
            return ShapeResult(shape=shape, status="left out", reason=reason)
        num_requests = min(shape.num_requests, self.most_at_once or shape.num_requests)
        if replace(shape, num_requests=num_requests) in self._done:
            reason = f"the server did not take more than {num_requests} at once, and so many have been sent"
            return ShapeResult(shape=shape, status="left out", reason=reason)
        result = await _Shape(self, shape, num_requests).warm()
        if result.rounds:
            self._done.add(replace(shape, num_requests=result.num_requests))
        return result

    @property
    def has_answered(self) -> bool:
        return bool(self._done)

    @property
    def left_s(self) -> float:
        return self.end - time.monotonic()

    async def send(self, num_requests: int, num_input_tokens: int) -> list[_Answer | DeepseekTritonError]:
        """So many at once; each ends before the time does."""
        limits = Timeouts(total=min(max(self.left_s, 0.001), _LONGEST_ROUND_S))
        return await _all_of([self._answer(self.asking.prompt(num_input_tokens), limits) for _ in range(num_requests)])

    async def _answer(self, prompt: str | list[int], limits: Timeouts) -> _Answer:
        started = time.perf_counter()
        moments: list[float] = []
        async with self.client.stream(prompt, timeouts=limits, **self.asking.fields) as stream:
            async for chunk in stream:
                moments.append(time.perf_counter())
                if chunk.finish_reason == "cancelled":
                    raise Cancelled("the server ended the answer: it is stopping")
        moments = moments or [time.perf_counter()]
        gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
        return _Answer(moments[0] - started, gaps, moments[-1] - started)


_OF_THE_SHAPE = (InvalidRequest, DeadlineExceeded, Overloaded)
"""Errors that say nothing of the server but what it takes."""
_IN_DOUBT = (ServerError, ProtocolError)
"""Without a code: of models of others, which have none, or of a front end that tears streams. Whether it was the
request's fault, the server's health says."""


class _Shape:
    """The rounds of one shape."""

    def __init__(self, rounds: Rounds, shape: Shape, num_requests: int) -> None:
        self._of = rounds
        self._shape = shape
        self._num_requests = num_requests
        self._rounds: list[Round] = []
        self._num_full = 0
        """Rounds of which nobody was let in."""

    async def warm(self) -> ShapeResult:
        while len(self._rounds) < self._of.max_rounds:
            if self._of.left_s <= 0:
                return self._out_of_time()
            outcomes = await self._of.send(self._num_requests, self._shape.num_input_tokens)
            answers = [each for each in outcomes if isinstance(each, _Answer)]
            errors = [each for each in outcomes if not isinstance(each, _Answer)]
            refused = [error for error in errors if isinstance(error, Overloaded)]
            if ended := await self._verdict(errors):
                if self._may_ask_otherwise(errors):
                    continue
                return ended
            if answers:
                self._rounds.append(_measured(answers, len(refused)))
                self._of.observe(self._shape, self._rounds[-1])
            if refused:
                if not answers and self._num_full == _FULL_ROUNDS - 1:
                    return self._result("left out", str(refused[0]))
                await self._make_room(len(answers))
            elif is_steady(self._rounds):
                return self._result("steady")
        return self._result("not steady", f"its last rounds still differ, after {len(self._rounds)}")

    def _may_ask_otherwise(self, errors: Sequence[DeepseekTritonError]) -> bool:
        """Whether it may be for the way of asking that nothing has been answered yet; it is another one from now on."""
        otherwise = self._of.asking.otherwise
        is_about_it = all(
            error.code in (None, "E_INVALID_ARGUMENT") and not isinstance(error, ProtocolError) for error in errors
        )
        if otherwise is None or self._rounds or self._of.has_answered or not is_about_it:
            return False
        self._of.asking = otherwise
        return self._of.left_s > 0

    async def _verdict(self, errors: Sequence[DeepseekTritonError]) -> ShapeResult | None:
        """What the errors of a round mean for the shape; None where it goes on."""
        serious = [each for each in errors if not isinstance(each, _OF_THE_SHAPE) or isinstance(each, ModelNotFound)]
        fatal = [each for each in serious if each.code or not isinstance(each, _IN_DOUBT)]
        if serious and not fatal and not await self._is_ready():
            fatal = serious
        if fatal:
            raise ServerFailure(fatal[0], self._shape) from fatal[0]
        if serious:
            return self._result("left out", str(serious[0]))
        for error in errors:
            if isinstance(error, InvalidRequest):
                return self._result("left out", str(error))
        return self._out_of_time() if any(isinstance(error, DeadlineExceeded) for error in errors) else None

    async def _is_ready(self) -> bool:
        try:
            return await self._of.client.ready()
        except DeepseekTritonError:
            return False

    async def _make_room(self, num_answered: int) -> None:
        """Others are there too: fewer at once from now on, and not before a while."""
        self._num_full = 0 if num_answered else self._num_full + 1
        self._num_requests = self._of.most_at_once = max(1, num_answered)
        pause_s = min(_FIRST_PAUSE_S * 2**self._num_full, _LONGEST_PAUSE_S, max(self._of.left_s, 0))
        await asyncio.sleep(pause_s)

    def _out_of_time(self) -> ShapeResult:
        if not self._rounds:
            return self._result("not reached", "the time was over before its first round had ended")
        return self._result("not steady", f"the time was over after {len(self._rounds)} of its rounds")

    def _result(self, status: Status, reason: str = "") -> ShapeResult:
        return ShapeResult(shape=self._shape, status=status, rounds=tuple(self._rounds), reason=reason)


@dataclass(frozen=True)
class _Answer:
    ttft_s: float
    gaps_s: list[float]
    """Between its chunks."""
    total_s: float


def _measured(answers: Sequence[_Answer], num_refused: int) -> Round:
    gaps = [gap for answer in answers for gap in answer.gaps_s]
    return Round(
        num_requests=len(answers),
        num_refused=num_refused,
        ttft_s=statistics.median(answer.ttft_s for answer in answers),
        step_s=statistics.median(gaps) if gaps else None,
        answer_s=statistics.median(answer.total_s for answer in answers),
    )


def is_steady(rounds: Sequence[Round]) -> bool:
    """Whether the last two are as good as the same.

    The whole answer is compared too: kernels that are compiled in the middle of one leave the first token and the
    median step as they are.
    """
    if len(rounds) < 2:
        return False
    before, last = rounds[-2:]
    if before.num_refused or last.num_refused or before.num_requests != last.num_requests:
        return False
    return (
        _is_alike(before.ttft_s, last.ttft_s, _UNNOTICED_S)
        and _is_alike(before.answer_s, last.answer_s, _UNNOTICED_S)
        and _is_alike(before.step_s or 0.0, last.step_s or 0.0, _UNNOTICED_STEP_S)
    )


def _is_alike(one_s: float, other_s: float, unnoticed_s: float) -> bool:
    return abs(one_s - other_s) < max(_STEADY * max(one_s, other_s), unnoticed_s)


async def _all_of(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T | DeepseekTritonError]:
    """What each returns, or raises of the client's errors; whatever else is raised or cancels this ends them all."""
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # their streams are closed, so the server ends them too
    unexpected = [each for each in outcomes if isinstance(each, BaseException) and not _is_clients(each)]
    if unexpected:
        raise unexpected[0]
    return [each for each in outcomes if _is_clients(each) or not isinstance(each, BaseException)]


def _is_clients(outcome: object) -> TypeGuard[DeepseekTritonError]:
    return isinstance(outcome, DeepseekTritonError)
