"""`deepseek-triton warm server`: rounds of requests in each shape that users will send, until their times are steady.

A shape is a number of requests at once and of prompt tokens. Whatever is compiled, captured or tuned on first use has
been by then. The server may have users already, so no more requests are open than one shape has, and a server that is
full gets fewer.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
    Retries,
    ServerError,
    Timeouts,
)
from deepseek_triton_tools.host.lifecycle import ReadyFile, Stop, notify
from deepseek_triton_tools.host.processes import allow_open_files
from deepseek_triton_tools.host.units import about
from deepseek_triton_tools.server.waiting import LogFollower, Waiting, wait_for_server
from deepseek_triton_tools.terminal.output_streams import print_json, to_reader
from deepseek_triton_tools.terminal.status_line import StatusLine
from deepseek_triton_tools.terminal.tables import Table, paragraph, show
from deepseek_triton_tools.tool_errors import RepositoryError, ServerFailedError, ToolError

SCHEMA = "deepseek-triton/warm-server/1"
MODEST_SHAPES = tuple((size, length) for length, size in product((128, 1024), (1, 4, 8)))
"""Shapes that every server takes, and that leave room for other users."""
MOST_OVER_HTTP = 256
"""Requests at once. Triton 2.51's HTTP front end tears streams when some 600 end at once (docs/tritonserver.md)."""
_STEADY = 0.1
"""The share by which two rounds may differ and count as equal, as in the backend's own engine_warmup.py."""
# A difference that no user notices, though it may be a large share of a very short time.
_UNNOTICED_S = 0.02
# After the server has refused requests as too many: other users need the room.
_PAUSE_S = 1.0
_LONGEST_ROUND_S = 86_400.0
"""The client accepts no limit of more than some weeks."""
# Files that are open beside the connections of the requests.
_SPARE_FILES = 64
_IDS = range(3, 256)
"""Token ids of plain text: every vocabulary that encodes bytes has at least these."""
_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")
"""Each is one token, with the space before it, in any vocabulary made from English text."""


@dataclass(frozen=True, kw_only=True)
class ServerWarmOptions:
    client: Callable[..., AsyncClient]
    """Makes the client, in the event loop. Called with `metrics_url=` and `retries=`: refusals are handled here."""
    repository: Path | None = None
    """The server's model repository, whose model.yaml gives the shapes."""
    batch_sizes: tuple[int, ...] | None = None
    input_lengths: tuple[int, ...] | None = None
    max_tokens: int = 16
    """Tokens of each answer."""
    wait_s: float | None = 7200.0
    """Seconds that the server may take to become ready. None: no limit."""
    limit_s: float = 600.0
    """Seconds for the rounds of all shapes together, from the moment when the server is ready."""
    max_rounds: int = 10
    """The most rounds of one shape."""
    log: Path | None = None
    """The server's log, as `serve --log-file` writes it: for the progress of the load, and the cause of a failure."""
    metrics_url: str | None = None
    ready_file: Path | None = None
    """Written at the end, with the document that --json prints. A file of an earlier run is removed at the start."""
    as_json: bool = False


@dataclass(frozen=True)
class Shape:
    num_requests: int
    """Requests that are open at once."""
    num_input_tokens: int
    """Prompt tokens of each request."""

    def __str__(self) -> str:
        return f"{self.num_requests} x {self.num_input_tokens:,} prompt tokens"


@dataclass(frozen=True, kw_only=True)
class Round:
    """The measurements of one round. Each time is the median over the answers."""

    num_requests: int
    """Requests that were answered."""
    num_refused: int
    """Requests that the server refused as too many."""
    ttft_s: float
    answer_s: float
    """Time of a whole answer, from sending the request to the last token."""


@dataclass(kw_only=True)
class ShapeResult:
    shape: Shape
    status: Literal["steady", "not steady", "left out", "not reached"]
    """not reached: the time limit was over before its first round had ended."""
    reason: str = ""
    """The reason why the shape is not steady or was left out, in one line."""
    rounds: list[Round] = field(default_factory=list)


@dataclass(kw_only=True)
class ServerWarmResult:
    """The result so far: a signal may end a warm-up at any point."""

    url: str = ""
    model: str = ""
    waited_s: float = 0.0
    """Seconds until the server was ready."""
    phases_s: Mapping[str, float] = field(default_factory=dict)
    """Phase of the wait -> its seconds, as seen from here."""
    shapes_from: str = ""
    warmed_s: float = 0.0
    """Seconds from the server's readiness to the end of the last round."""
    was_stopped: bool = False
    results: list[ShapeResult] = field(default_factory=list)
    """The results of the shapes that are finished."""

    @property
    def is_steady(self) -> bool:
        """Whether every shape that the server takes is steady, and there is one."""
        statuses = {result.status for result in self.results}
        return not self.was_stopped and "steady" in statuses and statuses <= {"steady", "left out"}

    def summary(self) -> str:
        state = "stopped" if self.was_stopped else "steady" if self.is_steady else "not steady"
        num_steady = sum(result.status == "steady" for result in self.results)
        return f"{state} after {about(self.warmed_s)}: {num_steady} of {len(self.results)} shapes are steady"

    def document(self) -> dict[str, Any]:
        """Return the document of --json and of the ready file."""
        facts = asdict(self)
        shapes = [{**result.pop("shape"), **result} for result in facts.pop("results")]
        return {"schema": SCHEMA, "ok": self.is_steady, **facts, "shapes": shapes}

    def show(self) -> None:
        """Print it for people."""
        phases = ", ".join(f"{name} {about(seconds)}" for name, seconds in self.phases_s.items())
        print(
            paragraph(f"{self.model} on {self.url} was ready after {about(self.waited_s)}: {phases or 'at once'}", "")
        )
        rows = []
        for done in self.results:
            times = [f"{1000 * each.answer_s:,.0f} ms" for each in done.rounds] or ["-"]
            shape = [str(done.shape.num_requests), f"{done.shape.num_input_tokens:,}"]
            rows.append([*shape, str(len(done.rounds)), times[0], times[-1], done.status])
        headings = ("at once", "prompt", "rounds", "first answer", "last answer", "now")
        show(Table(title=f"Shapes, from {self.shapes_from}", headings=headings, rows=rows, is_grid=True))
        print(paragraph(self.summary(), ""))


def warm_server(options: ServerWarmOptions) -> int:
    """Warm the server and print the result. Call it in the main thread.

    Returns the exit code: 0 the server is steady; 3 it is not steady within the limits; 130 after SIGINT and 143 after
    SIGTERM. After a signal the open requests are cancelled, and the shapes that were finished are printed.

    :raises ToolError: when the server is not ready in time, has no such model, fails, or takes none of the shapes, or
        when a file that was given can't be used.
    :raises deepseek_triton_client.DeepseekTritonError: when the server refuses the client whatever it sends.
    """
    ready_file = ReadyFile(options.ready_file)
    line = StatusLine(10.0)
    result = ServerWarmResult()
    try:
        with Stop() as stop:
            asyncio.run(_until_stopped(_warm(options, line, result), stop))
    except asyncio.CancelledError:
        line.say("interrupted: what was open is cancelled")
        result.was_stopped = True
    finally:
        line.clear()
    if not result.was_stopped:
        # Also where the server is not steady: everything was tried, and keeping it from its users would not help them.
        ready_file.write(result.document())
        notify(READY="1", STATUS=result.summary())
    with to_reader():
        if options.as_json:
            print_json(result.document())
        elif result.results:
            result.show()
    return stop.exit_code if result.was_stopped else 0 if result.is_steady else 3


async def _until_stopped(work: Coroutine[Any, Any, None], stop: Stop) -> None:
    """Run `work`. A signal cancels it, and asyncio.CancelledError is raised when the open requests have ended."""
    task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
    stop.pass_on(lambda _: loop.call_soon_threadsafe(task.cancel))
    try:
        await task
    finally:
        stop.pass_on(None)


async def _warm(options: ServerWarmOptions, line: StatusLine, result: ServerWarmResult) -> None:
    """Wait for the server, then warm it.

    :raises ToolError: as `warm_server` does.
    """
    began = time.monotonic()
    async with options.client(retries=Retries(attempts=1), metrics_url=options.metrics_url) as client:
        result.url, result.model = client.url, client.model_name
        shapes, result.shapes_from = planned_shapes(options, client.model_name)
        log = None if options.log is None else LogFollower(options.log)
        waiting = Waiting(client.model_name, line, log)
        result.phases_s = waiting.seconds
        try:
            await wait_for_server(client, waiting, options.wait_s)
            send = make_request(client, await client.metadata(), options.max_tokens)
        finally:
            result.waited_s = time.monotonic() - began
        line.say(f"{client.url} is ready after {about(result.waited_s)}; {len(shapes)} shapes: {result.shapes_from}")
        allow_open_files(max(shape.num_requests for shape in shapes) + _SPARE_FILES)
        rounds = Rounds(client, send, began + result.waited_s + options.limit_s, options.max_rounds, log)
        for shape in shapes:
            line.show(lambda shape=shape: f"sending {shape}")  # type: ignore[misc]
            try:
                result.results.append(done := await rounds.warm(shape))
            finally:
                result.warmed_s = time.monotonic() - began - result.waited_s
            if done.reason:
                line.say(f"{shape}: {done.status}: {done.reason}")
    if all(done.status == "left out" and not done.rounds for done in result.results) and not rounds.was_full:
        raise ToolError(f"the server takes none of the shapes; {shapes[0]}: {result.results[0].reason}")


def planned_shapes(options: ServerWarmOptions, model_name: str) -> tuple[list[Shape], str]:
    """Return the shapes in the order in which they are sent, and where their numbers are from, for people.

    :raises RepositoryError: when the repository has no such model, or its model.yaml can't be read.
    """
    pairs: Sequence[Sequence[int]] = MODEST_SHAPES
    # Our config.pbtxt says max_batch_size 0, because the engine batches: its limits are in model.yaml only.
    source = "a modest choice, because Triton does not tell the engine's limits: give the repository"
    sizes, lengths = options.batch_sizes, options.input_lengths
    if options.repository is not None and not (sizes and lengths):
        pairs, source = _repository_shapes(options.repository, model_name)
    if sizes or lengths:
        left = "" if sizes and lengths else f"; what they leave open: {source}"
        sizes = sizes or tuple(sorted({size for size, _ in pairs}))
        lengths = lengths or tuple(sorted({length for _, length in pairs}))
        pairs = [(size, length) for length, size in product(lengths, sizes)]
        source = f"--batch-sizes and --input-lengths{left}"
    return list(dict.fromkeys(Shape(*pair) for pair in pairs)), source


def _repository_shapes(repository: Path, model_name: str) -> tuple[Sequence[Sequence[int]], str]:
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
        ours = document.pop("triton_config", None) or {}
        if shapes := (ours.get("warmup") or {}).get("shapes"):
            if not all(type(each) is int and each > 0 for size, length in shapes for each in (size, length)):
                raise ValueError("triton_config.warmup.shapes: expected pairs of whole numbers from 1")
            return shapes, f"triton_config.warmup of {path}"
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise RepositoryError(f"{path} can't be read: {' '.join(str(error).split())}") from error
    # The limits of other engines are not in the LLM arguments.
    if ours.get("engine", "tensorrt_llm") != "tensorrt_llm":
        return MODEST_SHAPES, f"a modest choice, because {path} has no triton_config.warmup.shapes"
    return shapes_for_llm_args(document), f"the LLM arguments of {path}"


Send = Callable[[int, float], Coroutine[Any, Any, tuple[float, float] | DeepseekTritonError]]
"""Sends a new prompt of so many tokens, which may take so many seconds. Returns the seconds to the first chunk and of
the whole answer."""


def make_request(client: AsyncClient, metadata: ModelMetadata, max_tokens: int) -> Send:
    """No two prompts are equal, so the KV cache never holds one already. A model of others gets words."""
    is_ours = "stream_mode" in {each.name for each in metadata.inputs}
    fields: dict[str, Any] = {"max_tokens": max_tokens} | ({"ignore_eos": True} if is_ours else {})

    async def send(num_tokens: int, limit_s: float) -> tuple[float, float] | DeepseekTritonError:
        prompt = random.choices(_IDS, k=num_tokens) if is_ours else " ".join(random.choices(_WORDS, k=num_tokens))
        began, first_s = time.perf_counter(), 0.0
        try:
            async with client.stream(prompt, timeouts=Timeouts(total=limit_s), **fields) as stream:
                async for chunk in stream:
                    first_s = first_s or time.perf_counter() - began
                    if chunk.finish_reason in ("cancelled", "timeout"):
                        return Cancelled(f"the server ended the answer: {chunk.finish_reason}")
        except DeepseekTritonError as error:
            return error
        return first_s, time.perf_counter() - began

    return send


@dataclass
class Rounds:
    """Warms the shapes of one warm-up, one after the other."""

    client: AsyncClient
    send: Send
    end: float
    """Time when the last request must have ended, by time.monotonic()."""
    max_rounds: int
    log: LogFollower | None
    was_full: bool = False
    """The server has refused requests as too many."""

    async def warm(self, shape: Shape) -> ShapeResult:
        """Send rounds of `shape` until its status is known. No request is open when this returns or raises.

        :raises ServerFailedError: when the server itself has failed.
        """
        result = ShapeResult(shape=shape, status="left out")
        rounds, num_requests = result.rounds, shape.num_requests
        if num_requests > MOST_OVER_HTTP and self.client.url.startswith("http"):
            result.reason = f"over HTTP no more than {MOST_OVER_HTTP} are sent at once: give the server as grpc://"
            return result
        for _ in range(self.max_rounds):
            limit_s = min(self.end - time.monotonic(), _LONGEST_ROUND_S)
            outcomes = await self._together(num_requests, shape, limit_s) if limit_s > 0 else [DeadlineExceeded("")]
            answers = [each for each in outcomes if not isinstance(each, DeepseekTritonError)]
            errors = [each for each in outcomes if isinstance(each, DeepseekTritonError)]
            refusals = [error for error in errors if isinstance(error, Overloaded)]
            if fault := await self._fault(shape, errors):
                result.status, result.reason = "left out", fault
                return result
            if len(errors) > len(refusals):
                result.status = "not steady" if rounds else "not reached"
                result.reason = f"the time limit was over after {len(rounds)} rounds"
                return result
            if answers:
                ttft_s, answer_s = map(statistics.median, zip(*answers, strict=True))
                rounds.append(
                    Round(num_requests=len(answers), num_refused=len(refusals), ttft_s=ttft_s, answer_s=answer_s)
                )
                result.status, result.reason = "not steady", f"its last rounds still differ, after {len(rounds)}"
            if refusals:
                # Fewer from now on, after a pause: the server has other users too.
                self.was_full, num_requests = True, max(1, len(answers))
                result.reason = str(refusals[0])
                await asyncio.sleep(min(_PAUSE_S, limit_s))
            elif is_steady(rounds):
                result.status, result.reason = "steady", ""
                return result
        return result

    async def _fault(self, shape: Shape, errors: Sequence[DeepseekTritonError]) -> str:
        """Return why the server does not take the shape; "" where no error says so.

        :raises ServerFailedError: when the server itself has failed.
        """
        faults = [error for error in errors if not isinstance(error, DeadlineExceeded | Overloaded)]
        serious = [each for each in faults if not isinstance(each, InvalidRequest) or isinstance(each, ModelNotFound)]
        # Without a code, these errors come from models that are not ours and have no codes, or from a front end that
        # tears streams. The server's readiness then tells whether the request or the server was at fault.
        failures = [error for error in serious if error.code or not isinstance(error, ServerError | ProtocolError)]
        if serious and not failures:
            try:
                failures = [] if await self.client.ready() else serious
            except DeepseekTritonError:
                failures = serious
        if failures:
            words = "" if self.log is None else await self.log.last_error(self.client.model_name)
            cause = f"; its log says: {words}" if words else ""
            raise ServerFailedError(f"the server failed at {shape}: {failures[0]}{cause}") from failures[0]
        return str((serious or faults)[0]) if faults else ""

    async def _together(
        self, num_requests: int, shape: Shape, limit_s: float
    ) -> list[tuple[float, float] | DeepseekTritonError]:
        """Send a round. An error that is not the client's, or a cancellation, ends all of its requests."""
        tasks = [asyncio.ensure_future(self.send(shape.num_input_tokens, limit_s)) for _ in range(num_requests)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            # This closes their streams, so the server cancels the requests.
            await asyncio.gather(*tasks, return_exceptions=True)


def is_steady(rounds: Sequence[Round]) -> bool:
    """Tell whether the last two rounds took about the same time.

    The whole answer is compared too, because kernels that are compiled in the middle of an answer don't change the time
    to the first token.
    """
    if len(rounds) < 2:
        return False
    before, last = rounds[-2:]
    if before.num_refused or last.num_refused or before.num_requests != last.num_requests:
        return False
    pairs = ((before.ttft_s, last.ttft_s), (before.answer_s, last.answer_s))
    return all(abs(one - other) < max(_STEADY * max(one, other), _UNNOTICED_S) for one, other in pairs)
