"""`deepseek-triton warm server`: a server that is warm before its first user.

It waits for the server, then sends rounds of requests in each shape that users will send, until the answers take a
steady time: what is compiled, captured or tuned on first use then is. Other users may be there already: never are more
requests open than one shape has, and a server that is full is asked for less.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from deepseek_triton_client import AsyncClient, ModelMetadata, ProtocolError, Retries
from deepseek_triton_tools.host.readiness_notice import ReadyFile, notify
from deepseek_triton_tools.server.waiting import LogFollower, Waiting, load_phases, wait_for_server
from deepseek_triton_tools.terminal.output_streams import to_reader
from deepseek_triton_tools.terminal.status_line import StatusLine
from deepseek_triton_tools.tool_errors import ServerFailedError, ToolError
from deepseek_triton_tools.warming.server.rounds import AskingTogether, Round, Rounds, ServerFailure, ShapeResult
from deepseek_triton_tools.warming.server.shapes import Shape, planned_shapes
from deepseek_triton_tools.warming.server.warmth import Warmth, document, duration, show_warmth, summary

_NOT_STEADY = 3
_PLAIN_PROGRESS_S = 10.0
_SPARE_FILES = 64
"""Beside a connection for each request."""
_USUAL_PORTS = (8000, 8001)
"""A server on one of these has its metrics on 8002, where the client looks for them; of others nobody knows."""
_PORTS = (
    "give its HTTP port (8000 as a rule) as http://, or its gRPC port (8001) as grpc://; 8002 has the metrics alone"
)


@dataclass(frozen=True, kw_only=True)
class ServerWarmOptions:
    """What server to warm, with what, and for how long."""

    client: Callable[..., AsyncClient]
    """Makes the client of one server. Called in the event loop with `retries=`, for refusals are dealt with here, and
    `metrics_url=`."""
    repository: Path | None = None
    """The server's model repository, whose model.yaml says the shapes."""
    batch_sizes: tuple[int, ...] | None = None
    """Requests at once, instead of what the repository says."""
    input_lengths: tuple[int, ...] | None = None
    """Prompt tokens, instead of what the repository says."""
    max_tokens: int = 16
    """Tokens of each answer."""
    wait_s: float | None = 7200.0
    """For the server to become ready; None: without end."""
    limit_s: float = 600.0
    """For the rounds of all shapes together, from the moment it is ready."""
    max_rounds: int = 10
    """Of one shape, if it is not steady before."""
    log: Path | None = None
    """The server's log, as `serve --log-file` writes it: progress while it loads, and why it failed."""
    metrics_url: str | None = None
    """None: port 8002 of a server on its usual ports."""
    ready_file: Path | None = None
    """Written when all is done, with what --json prints; one of an earlier run is removed at the start."""
    as_json: bool = False


def warm_server(options: ServerWarmOptions) -> int:
    """Warm the server and print how; the exit code: 0 it is steady, 3 it is not within the limits, 130 after SIGINT,
    143 after SIGTERM; then nothing of it is open any more, and what is printed is what was finished.

    Call it in the main thread.

    :raises ToolError: when the server is not there in time, has no such model, fails, or takes none of the shapes, or a
        file is no use.
    :raises deepseek_triton_client.DeepseekTritonError: when the client is refused as such.
    """
    ready_file = ReadyFile(options.ready_file)
    line = StatusLine(_PLAIN_PROGRESS_S)
    warming = _Warming(options, line)
    try:
        asyncio.run(_until_signal(warming.run()))
    except _Interrupted as interrupted:
        line.say("interrupted: what was open is cancelled")
        line.clear()
        _print(warming.warmth(was_stopped=True), options)
        return 128 + interrupted.signum
    finally:
        line.clear()
    warmth = warming.warmth()
    # Also where it is not steady: all was tried, and nobody gains from a server that is kept from its users for it.
    ready_file.write(document(warmth))
    notify(READY="1", STATUS=summary(warmth))
    _print(warmth, options)
    return 0 if warmth.is_steady else _NOT_STEADY


def _print(warmth: Warmth, options: ServerWarmOptions) -> None:
    with to_reader():
        if options.as_json:
            print(json.dumps(document(warmth), indent=2, allow_nan=False))
        elif warmth.results or not warmth.was_stopped:
            show_warmth(warmth)


class _Warming:
    """One run, and what has come of it so far: a signal may end it anywhere."""

    def __init__(self, options: ServerWarmOptions, line: StatusLine) -> None:
        self._options = options
        self._line = line
        self._began = time.monotonic()
        self._url = self._model = self._shapes_from = ""
        self._phases_s: Mapping[str, float] = {}
        self._load_s: Mapping[str, float] = {}
        self._ready_at: float | None = None
        self._results: list[ShapeResult] = []

    async def run(self) -> None:
        """:raises ToolError:"""
        options = self._options
        async with options.client(retries=Retries(attempts=1), metrics_url=options.metrics_url) as client:
            self._url, self._model = client.url, client.model_name
            planned = planned_shapes(
                client.model_name,
                repository=options.repository,
                batch_sizes=options.batch_sizes,
                input_lengths=options.input_lengths,
            )
            self._shapes_from = planned.source
            log = None if options.log is None else LogFollower(options.log)
            try:
                metadata = await self._metadata(client, log)
            except ProtocolError as error:
                raise ServerFailedError(f"{client.url} does not answer as Triton: {error}; {_PORTS}") from error
            waited_s = self.warmth().waited_s
            self._line.say(
                f"{client.url} is ready after {duration(waited_s)}; {len(planned.shapes)} shapes: {planned.source}"
            )
            try:
                await self._warm_shapes(client, planned.shapes, AskingTogether.of(metadata, options.max_tokens))
            except ServerFailure as failure:
                words = await _cause(log, client.model_name)
                raise ServerFailedError(f"the server failed {failure}{words}") from failure.error
            self._load_s = await _load_phases(client, options)

    def warmth(self, *, was_stopped: bool = False) -> Warmth:
        ended = time.monotonic()
        ready_at = ended if self._ready_at is None else self._ready_at
        return Warmth(
            url=self._url,
            model=self._model,
            waited_s=ready_at - self._began,
            phases_s=self._phases_s,
            load_s=self._load_s,
            shapes_from=self._shapes_from,
            results=self._results,
            warmed_s=ended - ready_at,
            was_stopped=was_stopped,
        )

    async def _metadata(self, client: AsyncClient, log: LogFollower | None) -> ModelMetadata:
        """When the server is ready."""
        waiting = Waiting(client.model_name, self._line, log)
        self._phases_s = waiting.seconds
        await wait_for_server(client, waiting, self._options.wait_s)
        self._ready_at = time.monotonic()
        return await client.metadata()

    async def _warm_shapes(self, client: AsyncClient, shapes: Sequence[Shape], asking: AskingTogether) -> None:
        """:raises ToolError: when the server takes none, and not because it is full."""
        assert self._ready_at is not None, "shapes are sent when the server is ready"
        _allow_files(max(shape.num_requests for shape in shapes))
        rounds = Rounds(
            client=client,
            asking=asking,
            max_rounds=self._options.max_rounds,
            end=self._ready_at + self._options.limit_s,
            observe=lambda shape, done: self._line.show(lambda: _round_text(shape, done)),
        )
        for shape in shapes:
            self._results.append(result := await rounds.warm(shape))
            if result.reason:
                self._line.say(f"{shape} prompt tokens: {result.status}: {result.reason}")
        first = self._results[0]
        if all(result.status == "left out" for result in self._results) and rounds.most_at_once is None:
            raise ToolError(f"the server takes none of the shapes; {first.shape} prompt tokens: {first.reason}")


def _round_text(shape: Shape, done: Round) -> str:
    step = "" if done.step_s is None else f", a step {duration(done.step_s)}"
    refused = f"; {done.num_refused} refused as too many" if done.num_refused else ""
    return f"{shape} prompt tokens: first token after {duration(done.ttft_s)}{step}{refused}"


async def _load_phases(client: AsyncClient, options: ServerWarmOptions) -> dict[str, float]:
    if options.metrics_url is None and urlsplit(client.url).port not in _USUAL_PORTS:
        return {}
    return await load_phases(client, client.model_name)


async def _cause(log: LogFollower | None, model_name: str) -> str:
    words = "" if log is None else await log.last_error(model_name)
    return f"; its log says: {words}" if words else ""


def _allow_files(num_requests: int) -> None:
    """Each request over HTTP has a connection of its own, and the usual limit of 1,024 files is for old programs that
    use select(2)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_requests + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class _Interrupted(Exception):
    def __init__(self, signum: int) -> None:
        super().__init__()
        self.signum = signum


async def _until_signal(work: Coroutine[Any, Any, None]) -> None:
    """:raises _Interrupted: after SIGINT or SIGTERM, when what was open has been cancelled."""
    task = asyncio.ensure_future(work)
    caught: list[int] = []

    def stop(signum: int) -> None:
        caught.append(signum)
        task.cancel()

    with _handled(stop):
        try:
            await task
        except asyncio.CancelledError:
            if caught:
                raise _Interrupted(caught[0]) from None
            raise


@contextlib.contextmanager
def _handled(stop: Callable[[int], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    # A shell's background jobs ignore SIGINT: what was ignored stays so.
    taken = [each for each in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(each) != signal.SIG_IGN]
    for signum in taken:
        loop.add_signal_handler(signum, stop, signum)
    try:
        yield
    finally:
        for signum in taken:
            loop.remove_signal_handler(signum)
