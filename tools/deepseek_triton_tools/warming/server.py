"""`deepseek-triton warm server`: a server that is warm before its first user.

It waits for the server, then sends rounds of requests in each shape that users will send, until the answers take a
steady time. Whatever is compiled, captured or tuned on first use has been by then. The server may have users already,
so no more requests are open than one shape has, and a server that is full gets fewer requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from deepseek_triton_client import AsyncClient, ProtocolError, Retries
from deepseek_triton_tools.host.processes import allow_open_files
from deepseek_triton_tools.host.readiness_notice import ReadyFile, notify
from deepseek_triton_tools.host.stop_signals import Stop
from deepseek_triton_tools.server.waiting import LogFollower, Waiting, load_phases, wait_for_server
from deepseek_triton_tools.terminal.output_streams import print_json, to_reader
from deepseek_triton_tools.terminal.status_line import StatusLine
from deepseek_triton_tools.terminal.tables import Table, paragraph, show
from deepseek_triton_tools.tool_errors import ServerFailedError, ToolError
from deepseek_triton_tools.warming.server_rounds import (
    Round,
    Rounds,
    ServerFailure,
    Shape,
    ShapeResult,
    planned_shapes,
    request_styles,
)

SCHEMA = "deepseek-triton/warm-server/1"
_NOT_STEADY = 3
_PLAIN_PROGRESS_S = 10.0
_SPARE_FILES = 64
"""Files that are open beside the connections of the requests."""
# The metrics of a server on one of these ports are on port 8002; for other ports the metrics port is unknown.
_USUAL_PORTS = (8000, 8001)
_PORTS_FIX = (
    "give its HTTP port (8000 as a rule) as http://, or its gRPC port (8001) as grpc://; 8002 has the metrics alone"
)


@dataclass(frozen=True, kw_only=True)
class ServerWarmOptions:
    """The server to warm, the shapes, and the limits."""

    client: Callable[..., AsyncClient]
    """Makes the client, in the event loop. Called with `metrics_url=` and `retries=`: refusals are handled here."""
    repository: Path | None = None
    """The server's model repository, whose model.yaml gives the shapes."""
    batch_sizes: tuple[int, ...] | None = None
    """Numbers of requests at once, instead of the repository's."""
    input_lengths: tuple[int, ...] | None = None
    """Numbers of prompt tokens, instead of the repository's."""
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
    """None: port 8002 of a server on its usual ports."""
    ready_file: Path | None = None
    """Written at the end, with the document that --json prints. A file of an earlier run is removed at the start."""
    as_json: bool = False


@dataclass(kw_only=True)
class ServerWarmResult:
    """The result so far: a signal may end a warm-up at any point."""

    url: str = ""
    model: str = ""
    waited_s: float = 0.0
    """Seconds until the server was ready."""
    phases_s: Mapping[str, float] = field(default_factory=dict)
    """Phase of the wait -> its seconds, as seen from here."""
    load_s: Mapping[str, float] = field(default_factory=dict)
    """Phase of the load -> its seconds, as the server itself measured them; empty where it does not publish them."""
    shapes_from: str = ""
    results: list[ShapeResult] = field(default_factory=list)
    """Of the shapes that are finished."""
    warmed_s: float = 0.0
    """Seconds from the server's readiness to the end of the last round."""
    was_stopped: bool = False

    @property
    def is_steady(self) -> bool:
        """Whether every shape that the server takes is steady, and there is one."""
        statuses = {result.status for result in self.results}
        return not self.was_stopped and "steady" in statuses and statuses <= {"steady", "left out"}

    @property
    def worst(self) -> ShapeResult | None:
        """The shape whose first user is spared the longest wait; None where nobody is spared anything."""
        spared = [result for result in self.results if result.spared_s > 0]
        return max(spared, key=lambda result: result.spared_s, default=None)

    @property
    def spared_s(self) -> float:
        """Seconds that first users are spared, over all shapes."""
        return sum(result.spared_s for result in self.results)


def warm_server(options: ServerWarmOptions) -> int:
    """Warm the server and print the result. Call it in the main thread.

    Returns the exit code: 0 the server is steady; 3 it is not steady within the limits; 130 after SIGINT and 143 after
    SIGTERM. After a signal the open requests are cancelled, and the shapes that were finished are printed.

    :raises ToolError: when the server is not ready in time, has no such model, fails, or takes none of the shapes, or
        when a file that was given can't be used.
    :raises deepseek_triton_client.DeepseekTritonError: when the server refuses the client whatever it sends.
    """
    ready_file = ReadyFile(options.ready_file)
    line = StatusLine(_PLAIN_PROGRESS_S)
    result = ServerWarmResult()
    try:
        with Stop() as stop:
            asyncio.run(_until_stopped(_warm(options, line, result), stop))
    except asyncio.CancelledError:
        line.say("interrupted: what was open is cancelled")
        line.clear()
        result.was_stopped = True
        _print(result, options)
        return stop.exit_code
    finally:
        line.clear()
    # The ready file is written even where the server is not steady. Everything was tried, and keeping the server from
    # its users would not help them.
    ready_file.write(document(result))
    notify(READY="1", STATUS=summary(result))
    _print(result, options)
    return 0 if result.is_steady else _NOT_STEADY


async def _until_stopped(work: Coroutine[Any, Any, None], stop: Stop) -> None:
    """Run `work`. A signal cancels it, and asyncio.CancelledError is raised when the open requests have ended."""
    task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
    stop.forward = lambda _: loop.call_soon_threadsafe(task.cancel)
    if stop.event.is_set():  # the signal came before `forward` was set
        task.cancel()
    try:
        await task
    finally:
        stop.forward = None


async def _warm(options: ServerWarmOptions, line: StatusLine, result: ServerWarmResult) -> None:
    """Wait for the server, then warm it.

    :raises ToolError: as `warm_server` does.
    """
    began = time.monotonic()
    async with options.client(retries=Retries(attempts=1), metrics_url=options.metrics_url) as client:
        result.url, result.model = client.url, client.model_name
        planned = planned_shapes(
            client.model_name,
            repository=options.repository,
            batch_sizes=options.batch_sizes,
            input_lengths=options.input_lengths,
        )
        result.shapes_from = planned.source
        log = None if options.log is None else LogFollower(options.log)
        waiting = Waiting(client.model_name, line, log)
        result.phases_s = waiting.seconds
        try:
            try:
                await wait_for_server(client, waiting, options.wait_s)
            finally:
                result.waited_s = time.monotonic() - began
            styles = request_styles(await client.metadata(), options.max_tokens)
        except ProtocolError as error:
            raise ServerFailedError(f"{client.url} does not answer as Triton: {error}; {_PORTS_FIX}") from error
        waited = duration(result.waited_s)
        line.say(f"{client.url} is ready after {waited}; {len(planned.shapes)} shapes: {planned.source}")
        ready_at = began + result.waited_s
        try:
            await _warm_shapes(
                Rounds(client, styles, options.max_rounds, ready_at + options.limit_s, partial(_show_round, line)),
                planned.shapes,
                result.results,
                line,
            )
        except ServerFailure as failure:
            words = "" if log is None else await log.last_error(client.model_name)
            cause = f"; its log says: {words}" if words else ""
            raise ServerFailedError(f"the server failed {failure}{cause}") from failure.error
        finally:
            result.warmed_s = time.monotonic() - ready_at
        if options.metrics_url is not None or urlsplit(client.url).port in _USUAL_PORTS:
            result.load_s = await load_phases(client, client.model_name)


async def _warm_shapes(rounds: Rounds, shapes: Sequence[Shape], results: list[ShapeResult], line: StatusLine) -> None:
    """Add to `results` one after the other.

    :raises ToolError: when the server takes none of the shapes, for another reason than being full.
    """
    allow_open_files(max(shape.num_requests for shape in shapes) + _SPARE_FILES)
    for shape in shapes:
        results.append(result := await rounds.warm(shape))
        if result.reason:
            line.say(f"{shape} prompt tokens: {result.status}: {result.reason}")
    first = results[0]
    if all(result.status == "left out" for result in results) and rounds.most_at_once is None:
        raise ToolError(f"the server takes none of the shapes; {first.shape} prompt tokens: {first.reason}")


def _show_round(line: StatusLine, shape: Shape, done: Round) -> None:
    step = "" if done.step_s is None else f", a step {duration(done.step_s)}"
    refused = f"; {done.num_refused} refused as too many" if done.num_refused else ""
    line.show(lambda: f"{shape} prompt tokens: first token after {duration(done.ttft_s)}{step}{refused}")


def document(result: ServerWarmResult) -> dict[str, Any]:
    """The document of --json and of the ready file."""
    worst = result.worst
    return {
        "schema": SCHEMA,
        "ok": result.is_steady,
        "was_stopped": result.was_stopped,
        "url": result.url,
        "model": result.model,
        "waited_s": result.waited_s,
        "phases_s": dict(result.phases_s),
        "load_s": dict(result.load_s),
        "shapes_from": result.shapes_from,
        "shapes": [
            {
                **asdict(each.shape),
                "status": each.status,
                "reason": each.reason,
                "spared_s": each.spared_s,
                "rounds": [asdict(done) for done in each.rounds],
            }
            for each in result.results
        ],
        "warmed_s": result.warmed_s,
        "spared": {
            "total_s": result.spared_s,
            "worst_s": worst.spared_s if worst else 0.0,
            "worst_shape": asdict(worst.shape) if worst else None,
        },
    }


def _print(result: ServerWarmResult, options: ServerWarmOptions) -> None:
    with to_reader():
        if options.as_json:
            print_json(document(result))
        elif result.results or not result.was_stopped:
            _show(result)


def _show(result: ServerWarmResult) -> None:
    phases = f" ({_phases(result.phases_s)})" if result.phases_s else ""
    print(paragraph(f"{result.model} on {result.url} was ready after {duration(result.waited_s)}{phases}", ""))
    if result.load_s:
        print(paragraph(f"its load, as measured by the server: {_phases(result.load_s)}"))
    print()
    headings = ("at once", "prompt", "rounds", "first TTFT", "TTFT", "first step", "step", "spared", "now")
    rows = [_row(each) for each in result.results]
    show(Table(title=f"Shapes, from {result.shapes_from}", headings=headings, rows=rows, is_grid=True))
    for each in result.results:
        if each.reason:
            print(paragraph(f"{each.shape}: {each.status}: {each.reason}", ""))
    print(paragraph(summary(result), ""))


def _phases(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {duration(each)}" for name, each in seconds.items())


def _row(result: ShapeResult) -> tuple[str, ...]:
    at_once, prompt = str(result.shape.num_requests), f"{result.shape.num_input_tokens:,}"
    if not result.rounds:
        return (at_once, prompt, "0", *("-",) * 5, result.status)
    first, last = result.comparable[0], result.rounds[-1]
    if last.num_requests != result.shape.num_requests:
        at_once = f"{last.num_requests} of {at_once}"
    steps = ("-" if each.step_s is None else duration(each.step_s) for each in (first, last))
    times = (duration(first.ttft_s), duration(last.ttft_s), *steps, duration(result.spared_s))
    return (at_once, prompt, str(len(result.rounds)), *times, result.status)


def summary(result: ServerWarmResult) -> str:
    """The result in one line."""
    state = "stopped" if result.was_stopped else "steady" if result.is_steady else "not steady"
    number = len(result.results)
    taken = [each for each in result.results if each.status != "left out"]
    if (worst := result.worst) is not None:
        spared = (
            f"the first users are spared {duration(worst.spared_s)} at worst ({worst.shape} prompt tokens), "
            f"{duration(result.spared_s)} over all shapes"
        )
    elif taken and not result.was_stopped and all(each.can_be_compared for each in taken):
        spared = "its first users waited no longer than later ones will"
    else:
        spared = f"{sum(each.can_be_compared for each in result.results)} of {number} shapes have two rounds to compare"
    others = f"; {number - len(taken)} of {number} shapes were left out" if len(taken) < number else ""
    return f"{state} after {duration(result.warmed_s)}: {spared}{others}"


def duration(seconds: float) -> str:
    """The time with its unit: 8.3 ms, 120 ms, 2.5 s, 3:20 min, 1:00:05 h."""
    if seconds < 0.00995:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d} h" if hours else f"{minutes}:{rest:02d} min"
