"""Rounds of requests of one shape, each sent at once, until the server answers them in a steady time.

A shape is a number of requests at once and of prompt tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import yaml

from deepseek_triton_build.arithmetic import shapes_for_llm_args
from deepseek_triton_build.text import parse_yaml
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
from deepseek_triton_tools.tool_errors import RepositoryError

# The shapes where nothing says what the server takes: every server takes them, and they leave room for other users.
MODEST_BATCH_SIZES = (1, 4, 8)
MODEST_INPUT_LENGTHS = (128, 1024)
# Two rounds that differ by less than this share count as equal, as in the backend's own engine_warmup.py. That one
# compares whole rounds only, because there is no network between it and the engine. Here the time to the first token,
# the step time and the time of the whole answer are compared, and differences that no user notices are larger.
_STEADY = 0.1
# A difference in waiting that no user notices, though it may be a large share of a very short wait.
_UNNOTICED_S = 0.02
_UNNOTICED_STEP_S = 0.001
# Requests at once over HTTP. Triton 2.51's frontend tears streams when some 600 end at once (docs/tritonserver.md).
MOST_OVER_HTTP = 256
_FULL_ROUNDS = 4
"""Rounds of a shape that the server may refuse entirely as too many requests, before the shape is left out."""
# Pauses after the server has refused requests as too many: other users need the room.
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 8.0
# The client accepts no limit of more than some weeks.
_LONGEST_ROUND_S = 86_400.0

# Token ids of plain text in DeepSeek's models, whose special tokens are 0 to 2 and 128,000 and above.
_MANY_IDS = range(3, 100_000)
# Token ids for smaller vocabularies: every vocabulary that encodes bytes has at least these.
_FEW_IDS = range(3, 256)
# Each word is one token, with the space before it, in any vocabulary made from English text.
_WORDS = (  # noqa: SIM905 - a list of so many literals is harder to read
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city name team minute idea body back parent face others level door"
).split()
# Errors that say only what the server takes, and not that it failed.
_SHAPE_ERRORS = (InvalidRequest, DeadlineExceeded, Overloaded)
# Without a code, these errors come from models that are not ours and have no codes, or from a front end that tears
# streams. The server's readiness then tells whether the request or the server was at fault.
_DOUBTFUL_ERRORS = (ServerError, ProtocolError)


@dataclass(frozen=True)
class Shape:
    num_requests: int
    """Requests that are open at once."""
    num_input_tokens: int
    """Prompt tokens of each request."""

    def __str__(self) -> str:
        return f"{self.num_requests} x {self.num_input_tokens:,}"


@dataclass(frozen=True)
class PlannedShapes:
    shapes: tuple[Shape, ...]
    """The shapes in the order in which they are sent."""
    source: str
    """The origin of the numbers, for people."""


def planned_shapes(
    model_name: str,
    *,
    repository: Path | None = None,
    batch_sizes: tuple[int, ...] | None = None,
    input_lengths: tuple[int, ...] | None = None,
) -> PlannedShapes:
    """The shapes by `batch_sizes` and `input_lengths` where these are given, else by the model's repository.

    :raises RepositoryError: when the repository has no such model, or its model.yaml can't be read.
    """
    if batch_sizes and input_lengths:
        return PlannedShapes(_combinations(batch_sizes, input_lengths), "--batch-sizes and --input-lengths")
    known = _MODEST if repository is None else _repository_shapes(repository, model_name)
    if batch_sizes:
        lengths = sorted({shape.num_input_tokens for shape in known.shapes})
        return PlannedShapes(_combinations(batch_sizes, lengths), f"--batch-sizes; the lengths: {known.source}")
    if input_lengths:
        sizes = sorted({shape.num_requests for shape in known.shapes})
        return PlannedShapes(_combinations(sizes, input_lengths), f"--input-lengths; the batch sizes: {known.source}")
    return known


def _combinations(batch_sizes: Iterable[int], input_lengths: Iterable[int]) -> tuple[Shape, ...]:
    return tuple(dict.fromkeys(Shape(size, length) for length, size in product(input_lengths, batch_sizes)))


_MODEST = PlannedShapes(
    _combinations(MODEST_BATCH_SIZES, MODEST_INPUT_LENGTHS),
    # Triton's metadata does not help: our config.pbtxt says max_batch_size 0, because the engine batches. The engine's
    # limits are in model.yaml only.
    "a modest choice, because Triton does not tell the engine's limits: give the repository, or --batch-sizes and "
    "--input-lengths",
)


def _repository_shapes(repository: Path, model_name: str) -> PlannedShapes:
    versions = [path for path in repository.glob(f"{model_name}/*/model.yaml") if path.parent.name.isdecimal()]
    if not versions:
        raise RepositoryError(
            f"expected {repository}/{model_name}/VERSION/model.yaml, found none: give the server's model repository, "
            "and --model where the model has another name"
        )
    # Triton serves the highest version unless it is told otherwise.
    path = max(versions, key=lambda path: int(path.parent.name))
    try:
        document = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RepositoryError(f"{path} can't be read: {' '.join(str(error).split())}") from error
    if not isinstance(document, Mapping):
        raise RepositoryError(f"{path}: expected a mapping of LLM arguments, got {type(document).__name__}")
    ours = document.get("triton_config")
    ours = ours if isinstance(ours, Mapping) else {}
    warmup = ours.get("warmup")
    if isinstance(warmup, Mapping) and warmup.get("shapes"):
        return PlannedShapes(_warmup_shapes(warmup["shapes"], path), f"triton_config.warmup of {path}")
    if ours.get("engine", "tensorrt_llm") != "tensorrt_llm":  # other engines' limits are not in the LLM arguments
        return PlannedShapes(_MODEST.shapes, f"a modest choice, because {path} has no triton_config.warmup.shapes")
    pairs = shapes_for_llm_args({key: value for key, value in document.items() if key != "triton_config"})
    return PlannedShapes(tuple(Shape(*pair) for pair in pairs), f"the LLM arguments of {path}")


def _warmup_shapes(shapes: Any, path: Path) -> tuple[Shape, ...]:
    def is_pair(value: Any) -> bool:
        return isinstance(value, list) and len(value) == 2 and all(type(each) is int and each > 0 for each in value)

    listed = shapes if isinstance(shapes, list) else [shapes]
    if wrong := [shape for shape in listed if not is_pair(shape)]:
        raise RepositoryError(
            f"{path}: triton_config.warmup.shapes: expected pairs [requests at once, prompt tokens] of whole numbers "
            f"from 1, got {', '.join(map(repr, wrong[:3]))}"
        )
    return tuple(dict.fromkeys(Shape(*pair) for pair in listed))


@dataclass(frozen=True, kw_only=True)
class Round:
    """The measurements of one round. Each time is the median over the answers."""

    num_requests: int
    """Requests that were answered."""
    num_refused: int
    """Requests that the server refused as too many."""
    ttft_s: float
    step_s: float | None
    """Time between two chunks of an answer, the median over all chunks. None where each answer came as one chunk."""
    answer_s: float
    """Time of a whole answer, from sending the request to the last token."""


Status = Literal["steady", "not steady", "left out", "not reached"]
"""Of a shape. "not reached": the time limit was over before its first round had ended."""


@dataclass(frozen=True, kw_only=True)
class ShapeResult:
    shape: Shape
    status: Status
    rounds: tuple[Round, ...] = ()
    reason: str = ""
    """The reason why the shape is not steady or was left out, in one line."""

    @property
    def comparable(self) -> list[Round]:
        """The rounds with as many requests as the last one; the server may have taken fewer than the shape has."""
        return [each for each in self.rounds if each.num_requests == self.rounds[-1].num_requests]

    @property
    def can_be_compared(self) -> bool:
        return len(self.comparable) > 1

    @property
    def spared_s(self) -> float:
        """Seconds that the first user would have waited longer than a later user; 0 where nobody would notice."""
        if not self.rounds:
            return 0.0
        first_s, last_s = self.comparable[0].answer_s, self.rounds[-1].answer_s
        return 0.0 if _is_alike(first_s, last_s, _UNNOTICED_S) else max(0.0, first_s - last_s)


class ServerFailure(Exception):
    """The server failed at a correct request, or is gone. `error` is the client's error."""

    def __init__(self, error: DeepseekTritonError, shape: Shape) -> None:
        super().__init__(f"at {shape} prompt tokens: {error}")
        self.error = error


@dataclass(frozen=True)
class RequestStyle:
    """One way of writing the requests."""

    prompt: Callable[[int], str | list[int]]
    """Makes a prompt of a given number of tokens. No two prompts are equal, so the KV cache never holds one already."""
    fields: Mapping[str, Any]


def request_styles(metadata: ModelMetadata, max_tokens: int) -> list[RequestStyle]:
    """The styles that a model of these inputs may take. Where the server refuses the first one, the next is tried."""

    def ids_from(vocabulary: Sequence[int]) -> Callable[[int], list[int]]:
        return lambda num_tokens: random.choices(vocabulary, k=num_tokens)

    def words(num_tokens: int) -> str:
        return " ".join(random.choices(_WORDS, k=num_tokens))

    names = {each.name for each in metadata.inputs}
    fields: dict[str, Any] = {"max_tokens": max_tokens}
    if "stream_mode" in names:  # a model of ours
        # Without stream_interval, tokens that leave together would look like one step.
        fields |= {"ignore_eos": True, "stream_interval": 1}
        return [RequestStyle(ids_from(vocabulary), fields) for vocabulary in (_MANY_IDS, _FEW_IDS)]
    plain = RequestStyle(words, fields)
    is_vllm = "sampling_parameters" in names  # see the client's _dialect.py
    return [RequestStyle(words, {**fields, "ignore_eos": True}), plain] if is_vllm else [plain]


@dataclass(frozen=True)
class _Answer:
    ttft_s: float
    gaps_s: list[float]
    """Times between its chunks."""
    total_s: float


@dataclass
class Rounds:
    """Warms the shapes of one warm-up, one after the other."""

    client: AsyncClient
    styles: list[RequestStyle]
    """The styles that may still work. The first one is in use; a style that the server refuses is removed."""
    max_rounds: int
    end: float
    """Time when the last request must have ended, by time.monotonic()."""
    observe: Callable[[Shape, Round], None]
    most_at_once: int | None = None
    """Requests that the server took at once when it refused more. None: it has not refused any as too many."""
    _answered: set[Shape] = field(default_factory=set)
    """Shapes that have been answered, with the number of requests that the server really took."""

    @property
    def left_s(self) -> float:
        return self.end - time.monotonic()

    async def warm(self, shape: Shape) -> ShapeResult:
        """Send rounds of `shape`. No request is open when this returns or raises.

        :raises ServerFailure: when the server itself has failed.
        """
        if shape.num_requests > MOST_OVER_HTTP and self.client.url.startswith("http"):
            reason = f"over HTTP no more than {MOST_OVER_HTTP} are sent at once: give the server as grpc://"
            return ShapeResult(shape=shape, status="left out", reason=reason)
        num_requests = min(shape.num_requests, self.most_at_once or shape.num_requests)
        if replace(shape, num_requests=num_requests) in self._answered:
            reason = f"the server takes no more than {num_requests} at once, and that many have been sent already"
            return ShapeResult(shape=shape, status="left out", reason=reason)
        rounds: list[Round] = []
        status, reason = await self._send_rounds(shape, num_requests, rounds)
        if rounds:
            self._answered.add(replace(shape, num_requests=rounds[-1].num_requests))
        return ShapeResult(shape=shape, status=status, rounds=tuple(rounds), reason=reason)

    async def _send_rounds(self, shape: Shape, num_requests: int, rounds: list[Round]) -> tuple[Status, str]:
        """Add to `rounds` until the shape's status is known; return it with its reason."""
        num_full = 0  # rounds in a row in which the server refused every request as too many
        while len(rounds) < self.max_rounds:
            if self.left_s <= 0:
                return _out_of_time(rounds)
            outcomes = await self._send(num_requests, shape.num_input_tokens)
            answers = [each for each in outcomes if isinstance(each, _Answer)]
            errors = [each for each in outcomes if not isinstance(each, _Answer)]
            refusals = [error for error in errors if isinstance(error, Overloaded)]
            if ending := await self._ending(errors, shape, rounds):
                if not rounds and self._try_next_style(errors):
                    continue
                return ending
            if answers:
                rounds.append(_measured(answers, len(refusals)))
                self.observe(shape, rounds[-1])
            if refusals:
                num_full = 0 if answers else num_full + 1
                if num_full == _FULL_ROUNDS:
                    return "left out", str(refusals[0])
                # Fewer from now on, after a pause: the server has other users too.
                num_requests = self.most_at_once = max(1, len(answers))
                await asyncio.sleep(min(_FIRST_PAUSE_S * 2**num_full, _LONGEST_PAUSE_S, max(self.left_s, 0)))
            elif is_steady(rounds):
                return "steady", ""
        return "not steady", f"its last rounds still differ, after {len(rounds)}"

    async def _ending(
        self, errors: Sequence[DeepseekTritonError], shape: Shape, rounds: Sequence[Round]
    ) -> tuple[Status, str] | None:
        """The shape's status that follows from the errors of a round; None where the rounds go on.

        :raises ServerFailure: when the server itself has failed.
        """
        serious = [each for each in errors if not isinstance(each, _SHAPE_ERRORS) or isinstance(each, ModelNotFound)]
        fatal = [each for each in serious if each.code or not isinstance(each, _DOUBTFUL_ERRORS)]
        if serious and not fatal:
            try:
                is_ready = await self.client.ready()
            except DeepseekTritonError:
                is_ready = False
            fatal = [] if is_ready else serious
        if fatal:
            raise ServerFailure(fatal[0], shape) from fatal[0]
        if reasons := [*serious, *(error for error in errors if isinstance(error, InvalidRequest))]:
            return "left out", str(reasons[0])
        return _out_of_time(rounds) if any(isinstance(error, DeadlineExceeded) for error in errors) else None

    def _try_next_style(self, errors: Sequence[DeepseekTritonError]) -> bool:
        """Use the next style from now on, if the style may be the reason why nothing has been answered yet.

        :param errors: the errors of a round without an answer.
        """
        is_about_style = all(
            error.code in (None, "E_INVALID_ARGUMENT") and not isinstance(error, ProtocolError) for error in errors
        )
        if self._answered or not is_about_style or len(self.styles) == 1:
            return False
        del self.styles[0]
        return self.left_s > 0

    async def _send(self, num_requests: int, num_input_tokens: int) -> list[_Answer | DeepseekTritonError]:
        """Send a round of requests at once. Each ends before the time limit. An error that is not the client's, or a
        cancellation, ends all of them."""
        limits, prompt = Timeouts(total=min(max(self.left_s, 0.001), _LONGEST_ROUND_S)), self.styles[0].prompt
        prompts = [prompt(num_input_tokens) for _ in range(num_requests)]
        tasks = [asyncio.ensure_future(self._request(each, limits)) for each in prompts]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            # This closes their streams, so the server cancels the requests.
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _request(self, prompt: str | list[int], limits: Timeouts) -> _Answer | DeepseekTritonError:
        started = time.perf_counter()
        moments: list[float] = []
        try:
            async with self.client.stream(prompt, timeouts=limits, **self.styles[0].fields) as stream:
                async for chunk in stream:
                    moments.append(time.perf_counter())
                    if chunk.finish_reason == "cancelled":
                        return Cancelled("the server ended the answer: it is stopping")
        except DeepseekTritonError as error:
            return error
        moments = moments or [time.perf_counter()]
        gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
        return _Answer(moments[0] - started, gaps, moments[-1] - started)


def _out_of_time(rounds: Sequence[Round]) -> tuple[Status, str]:
    if not rounds:
        return "not reached", "the time limit was over before its first round had ended"
    return "not steady", f"the time limit was over after {len(rounds)} rounds"


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
    """Whether the last two rounds took about the same time.

    The whole answer is compared too, because kernels that are compiled in the middle of an answer change neither the
    time to the first token nor the median step.
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
