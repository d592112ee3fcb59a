"""Retries, failover and time limits, with scripted transports, on threads and on an event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import pytest

from deepseek_triton_client import (
    AccessDenied,
    Cancelled,
    DeadlineExceeded,
    DeepseekTritonError,
    InvalidRequest,
    ModelMetadata,
    ModelNotFound,
    Overloaded,
    ProtocolError,
    Readiness,
    Retries,
    SamplingParams,
    ServerError,
    ServerUnavailable,
    TensorMetadata,
    Timeouts,
)
from deepseek_triton_client._asyncio_runtime import AsyncioRuntime
from deepseek_triton_client._blocking_runtime import BlockingRuntime, run
from deepseek_triton_client._core import server_group
from deepseek_triton_client._core.calls import Calls
from deepseek_triton_client._core.checked_request import Request, prompt_request
from deepseek_triton_client._core.client_settings import Endpoint, Settings
from deepseek_triton_client._core.runtime import RuntimeEvent
from deepseek_triton_client._core.transport import Input, Outputs
from deepseek_triton_client._core.watchdog import NO_WATCHDOG

OURS = ModelMetadata(
    name="tensorrt_llm",
    versions=("1",),
    platform="python",
    inputs=tuple(
        TensorMetadata(name, datatype, (-1,))
        for name, datatype in (
            ("text_input", "BYTES"),
            ("streaming", "BOOL"),
            ("stop", "BOOL"),
            ("stream_mode", "BYTES"),
            ("sampling_param_max_tokens", "INT32"),
        )
    ),
    outputs=(TensorMetadata("text_output", "BYTES", (-1,)),),
)
FIRST = {"text_output": "Hel"}
LAST = {"text_output": "lo", "finish_reason": "stop", "num_input_tokens": 3, "num_output_tokens": 2}
ANSWER = (FIRST, LAST)

FULL = Overloaded("full", code="E_OVERLOADED", unprocessed=True)
GOING = ServerUnavailable("stopping", code="E_UNAVAILABLE", unprocessed=True)
NOBODY = ServerUnavailable("connection refused", unprocessed=True)
LOST = ServerUnavailable("connection lost")
WRONG = InvalidRequest("no", code="E_INVALID_ARGUMENT")

Step = Outputs | DeepseekTritonError | str
"""What `receive` returns or raises; "wait" waits for the interrupt."""


class FakeStream:
    def __init__(self, server: FakeServer, steps: Sequence[Step]) -> None:
        self.server = server
        self.steps = list(steps)
        self.is_closed = False
        self.interrupted = threading.Event()

    async def receive(self) -> Outputs | None:
        if not self.steps:
            return None
        step = self.steps.pop(0)
        if step == "wait":
            await self.server.wait(self.interrupted)
            raise ServerUnavailable("shut down")
        if isinstance(step, DeepseekTritonError):
            raise type(step)(step.message, code=step.code, unprocessed=step.unprocessed)
        assert not isinstance(step, str)
        return step

    def interrupt(self) -> None:
        self.interrupted.set()

    async def close(self) -> None:
        self.is_closed = True


class FakeServer:
    """A scripted transport. Each request takes the next of `scripts`; the last one is used again and again."""

    always_streams = False

    def __init__(self, *scripts: Sequence[Step]) -> None:
        self.scripts = list(scripts or [ANSWER])
        self.streams: list[FakeStream] = []
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.connect_limits: list[float | None] = []
        self.metadata_steps: list[ModelMetadata | BaseException] = [OURS]
        self.num_metadata = 0
        self.metadata_may_end: Callable[[], bool] = lambda: True
        self.ready_limits: list[float | None] = []
        self.states: list[bool | DeepseekTritonError] = [True]
        self.wait: Callable[[threading.Event], Coroutine[Any, Any, None]] = wait_on_thread
        self.pause: Callable[[], Coroutine[Any, Any, None]] = pause_thread

    def open(self, request_id: str, inputs: Sequence[Input], *, connect_s: float | None) -> FakeStream:
        self.requests.append((request_id, {each.name: each.values for each in inputs}))
        self.connect_limits.append(connect_s)
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        self.streams.append(FakeStream(self, script))
        return self.streams[-1]

    async def server_ready(self, timeout_s: float | None) -> bool:
        self.ready_limits.append(timeout_s)
        return self._state()

    async def model_ready(self, timeout_s: float | None) -> bool:
        self.ready_limits.append(timeout_s)
        return self._state(last=True)

    def _state(self, *, last: bool = False) -> bool:
        state = self.states.pop(0) if last and len(self.states) > 1 else self.states[0]
        if isinstance(state, DeepseekTritonError):
            raise state
        return state

    async def metadata(self, timeout_s: float | None) -> ModelMetadata:
        self.num_metadata += 1
        self.connect_limits.append(timeout_s)
        step = self.metadata_steps.pop(0) if len(self.metadata_steps) > 1 else self.metadata_steps[0]
        for _ in range(10_000):  # in the end also where nobody does what is waited for
            if self.metadata_may_end():
                break
            await self.pause()
        if isinstance(step, DeepseekTritonError):
            raise type(step)(step.message, unprocessed=step.unprocessed)
        if isinstance(step, BaseException):
            raise step
        return step

    async def metrics(self, url: str, timeout_s: float | None) -> str:
        return f'asked{{url="{url}"}} 1\n'

    async def close(self) -> None:
        self.closed = True


async def wait_on_thread(event: threading.Event) -> None:
    assert event.wait(30)


async def pause_thread() -> None:
    time.sleep(0.001)


async def pause_task() -> None:
    await asyncio.sleep(0.001)


async def wait_in_loop(event: threading.Event) -> None:
    while not event.is_set():
        await asyncio.sleep(0.001)


class CountedEvent:
    """An event that counts the callers that wait for it."""

    def __init__(self, event: RuntimeEvent, world: World) -> None:
        self._event = event
        self._world = world
        self.set = event.set

    async def wait(self, timeout_s: float | None) -> bool:
        self._world.num_waiting += 1
        try:
            return await self._event.wait(timeout_s)
        finally:
            self._world.num_waiting -= 1


class World:
    """The servers of one client, on one of the two runtimes."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.servers: dict[str, FakeServer] = {}
        self.sleeps: list[float] = []
        self.num_waiting = 0

    def calls(self, *servers: FakeServer, **settings: Any) -> Calls:
        endpoints = tuple(Endpoint("http", f"s{number}", 8000) for number in range(len(servers)))
        self.servers = {str(endpoint): server for endpoint, server in zip(endpoints, servers, strict=True)}
        for server in servers:
            server.wait = wait_on_thread if self.kind == "blocking" else wait_in_loop
            server.pause = pause_thread if self.kind == "blocking" else pause_task
        world = self

        class Runtime(BlockingRuntime if self.kind == "blocking" else AsyncioRuntime):  # type: ignore[misc]
            async def sleep(self, seconds: float) -> None:
                world.sleeps.append(seconds)

            def event(self) -> CountedEvent:
                return CountedEvent(super().event(), world)

            def transport(self, endpoint: Endpoint, settings: Settings) -> FakeServer:
                return world.servers[str(endpoint)]

        return Calls(Settings(endpoints=endpoints, model_name="tensorrt_llm", **settings), Runtime())

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return run(coroutine) if self.kind == "blocking" else asyncio.run(coroutine)

    def together(self, *coroutines: Coroutine[Any, Any, Any]) -> list[Any]:
        """The results or errors of all calls."""
        if self.kind == "asyncio":

            async def gathered() -> list[Any]:
                return await asyncio.gather(*coroutines, return_exceptions=True)

            return asyncio.run(gathered())
        outcomes: list[Any] = [None] * len(coroutines)

        def one(number: int, coroutine: Coroutine[Any, Any, Any]) -> None:
            try:
                outcomes[number] = run(coroutine)
            except BaseException as exc:
                outcomes[number] = exc

        threads = [threading.Thread(target=one, args=each) for each in enumerate(coroutines)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return outcomes


@pytest.fixture(params=["blocking", "asyncio"])
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param)


def request(streaming: bool = True, timeouts: Mapping[str, float] | None = None, request_id: str = "r1") -> Request:
    limits = Timeouts(**(timeouts or {}))
    params = SamplingParams(max_tokens=5)
    return prompt_request("hi", params=params, timeouts=limits, streaming=streaming, request_id=request_id)


def test_the_answer_is_put_together(world):
    server = FakeServer()

    completion = world.run(world.calls(server).generate(request()))

    assert (completion.text, completion.finish_reason, completion.request_id) == ("Hello", "stop", "r1")
    assert (completion.num_input_tokens, completion.num_output_tokens) == (3, 2)
    assert completion.url == "http://s0:8000"
    assert 0 < completion.time_to_first_token_s <= completion.total_s
    assert [stream.is_closed for stream in server.streams] == [True]


def test_metadata_is_read_once(world):
    server = FakeServer()
    calls = world.calls(server)

    async def three() -> None:
        for _ in range(3):
            await calls.generate(request())

    world.run(three())

    assert (server.num_metadata, len(server.requests)) == (1, 3)


@pytest.mark.parametrize("refusal", [FULL, GOING, NOBODY], ids=["overloaded", "going", "refused"])
def test_what_was_refused_before_anything_was_generated_is_sent_again(world, refusal):
    server = FakeServer([refusal], [refusal], ANSWER)

    completion = world.run(world.calls(server).generate(request()))

    assert completion.text == "Hello"
    assert len(server.requests) == 3
    assert [stream.is_closed for stream in server.streams] == [True] * 3


def test_waits_grow_at_random_and_are_bounded(world):
    """The delays have full jitter: they lie between nothing and a bound that doubles."""
    calls = world.calls(FakeServer([FULL]), retries=Retries(attempts=8, initial_s=0.5, max_s=4))

    with pytest.raises(Overloaded):
        world.run(calls.generate(request()))

    bounds = [0.5, 1, 2, 4, 4, 4, 4]
    assert len(world.sleeps) == len(bounds)
    assert all(0 <= slept <= bound for slept, bound in zip(world.sleeps, bounds, strict=True))
    assert len(set(world.sleeps)) > 1


def test_attempts_are_bounded_and_the_last_error_comes_out(world):
    server = FakeServer([FULL])

    with pytest.raises(Overloaded, match=r"\[E_OVERLOADED\] full") as caught:
        world.run(world.calls(server, retries=Retries(attempts=3)).generate(request()))

    assert len(server.requests) == 3
    assert (caught.value.request_id, caught.value.url, caught.value.unprocessed) == ("r1", "http://s0:8000", True)


def test_one_attempt_never_tries_again(world):
    server = FakeServer([FULL], ANSWER)

    with pytest.raises(Overloaded):
        world.run(world.calls(server, retries=Retries(attempts=1)).generate(request()))

    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "error",
    [LOST, WRONG, ServerError("bug", code="E_INTERNAL"), ProtocolError("?"), AccessDenied("no"), Cancelled("c")],
    ids=lambda error: type(error).__name__,
)
def test_other_errors_are_not_tried_again(world, error):
    server = FakeServer([error], ANSWER)

    with pytest.raises(type(error)) as caught:
        world.run(world.calls(server).generate(request()))

    assert len(server.requests) == 1
    assert (caught.value.request_id, caught.value.url) == ("r1", "http://s0:8000")
    assert server.streams[0].is_closed


@pytest.mark.parametrize("error", [FULL, GOING, NOBODY])
def test_nothing_is_tried_again_after_the_first_response(world, error):
    server = FakeServer([FIRST, error], ANSWER)

    with pytest.raises(type(error)) as caught:
        world.run(world.calls(server).generate(request()))

    assert len(server.requests) == 1
    assert caught.value.unprocessed is False


def test_another_server_is_tried_at_once(world):
    servers = FakeServer([NOBODY]), FakeServer([FULL]), FakeServer()

    completion = world.run(world.calls(*servers).generate(request()))

    assert completion.url == "http://s2:8000"
    assert [len(server.requests) for server in servers] == [1, 1, 1]
    assert world.sleeps == []


def test_with_one_attempt_each_server_is_still_tried(world):
    servers = FakeServer([NOBODY]), FakeServer()

    assert world.run(world.calls(*servers, retries=Retries(attempts=1)).generate(request())).text == "Hello"


def test_a_server_that_could_not_be_reached_is_tried_last_for_a_while(world, monkeypatch):
    servers = FakeServer([NOBODY], ANSWER), FakeServer()
    calls = world.calls(*servers)

    async def urls(number: int) -> list[str]:
        return [(await calls.generate(request())).url for _ in range(number)]

    assert world.run(urls(3)) == ["http://s1:8000"] * 3
    assert len(servers[0].requests) == 1
    monkeypatch.setattr(server_group, "_COOL_DOWN_S", 0.0)
    assert world.run(urls(1)) == ["http://s0:8000"]


def test_a_server_lost_in_mid_answer_is_tried_last_for_a_while(world):
    servers = FakeServer([FIRST, LOST], ANSWER), FakeServer()
    calls = world.calls(*servers)

    async def two() -> str:
        with pytest.raises(ServerUnavailable):
            await calls.generate(request())
        return (await calls.generate(request())).url

    assert world.run(two()) == "http://s1:8000"


def test_a_server_whose_answer_took_too_long_is_asked_first_again(world):
    servers = FakeServer([FIRST, "wait"], ANSWER), FakeServer()
    calls = world.calls(*servers)

    async def two() -> str:
        with pytest.raises(DeadlineExceeded):
            await calls.generate(request(timeouts={"between_tokens": 0.05}))
        return (await calls.generate(request())).url

    assert world.run(two()) == "http://s0:8000"


def test_a_refusal_is_not_lost_behind_a_server_that_is_gone(world):
    server = FakeServer([GOING], [NOBODY])

    with pytest.raises(ServerUnavailable, match="connection refused") as caught:
        world.run(world.calls(server).generate(request()))

    assert caught.value.code is None
    assert getattr(caught.value.__cause__, "code", None) == "E_UNAVAILABLE"


def test_an_overloaded_server_is_asked_first_again(world):
    servers = FakeServer([FULL], ANSWER), FakeServer()
    calls = world.calls(*servers)

    async def urls() -> list[str]:
        return [(await calls.generate(request())).url for _ in range(2)]

    assert world.run(urls()) == ["http://s1:8000", "http://s0:8000"]


def test_round_robin_takes_each_server_in_turn(world):
    servers = FakeServer(), FakeServer(), FakeServer()
    calls = world.calls(*servers, balance="round_robin")

    async def six() -> None:
        for _ in range(6):
            await calls.generate(request())

    world.run(six())

    assert [len(server.requests) for server in servers] == [2, 2, 2]


def test_metadata_that_could_not_be_read_is_tried_again_too(world):
    server = FakeServer()
    server.metadata_steps = [NOBODY, OURS]

    assert world.run(world.calls(server).generate(request())).text == "Hello"


def test_a_model_that_is_not_there_is_said_at_once(world):
    server = FakeServer()
    server.metadata_steps = [ModelNotFound("Request for unknown model")]

    with pytest.raises(ModelNotFound) as caught:
        world.run(world.calls(server).generate(request()))

    assert (caught.value.request_id, caught.value.url) == ("r1", "http://s0:8000")
    assert server.num_metadata == 1


def test_who_waits_for_metadata_shares_its_failure(world):
    server = FakeServer()
    server.metadata_steps = [NOBODY]
    server.metadata_may_end = lambda: world.num_waiting == 3
    calls = world.calls(server, retries=Retries(attempts=1))

    errors = world.together(*(calls.generate(request(request_id=f"r{number}")) for number in range(4)))

    assert server.num_metadata == 1
    assert all(isinstance(error, ServerUnavailable) and error.unprocessed for error in errors)
    assert sorted(error.request_id for error in errors) == ["r0", "r1", "r2", "r3"]


def test_who_comes_after_a_failure_asks_again(world):
    server = FakeServer()
    server.metadata_steps = [NOBODY, OURS]
    calls = world.calls(server, retries=Retries(attempts=1))

    async def two() -> str:
        with pytest.raises(ServerUnavailable):
            await calls.generate(request())
        return (await calls.generate(request())).text

    assert world.run(two()) == "Hello"


def test_a_failure_within_less_time_is_not_shared(world):
    """A caller with more time than the one that read the metadata may still get an answer."""
    server = FakeServer()
    server.metadata_steps = [NOBODY, OURS]
    server.metadata_may_end = lambda: server.num_metadata > 1 or world.num_waiting == 1
    calls = world.calls(server, retries=Retries(attempts=1))
    hasty, patient = request(timeouts={"connect": 20.0}), request(timeouts={"connect": 40.0})

    async def later() -> str:
        while not server.num_metadata:
            await server.pause()
        return (await calls.generate(patient)).text

    error, text = world.together(calls.generate(hasty), later())

    assert isinstance(error, ServerUnavailable)
    assert (text, server.num_metadata) == ("Hello", 2)


def test_metadata_whose_reader_left_is_read_by_the_next(world):
    server = FakeServer()
    left = KeyboardInterrupt() if world.kind == "blocking" else asyncio.CancelledError()
    server.metadata_steps = [left, OURS]
    server.metadata_may_end = lambda: server.num_metadata > 1 or world.num_waiting == 2
    calls = world.calls(server, retries=Retries(attempts=1))

    outcomes = world.together(*(calls.generate(request()) for _ in range(3)))

    assert server.num_metadata == 2
    assert sum(isinstance(outcome, type(left)) for outcome in outcomes) == 1
    assert [outcome.text for outcome in outcomes if not isinstance(outcome, type(left))] == ["Hello"] * 2


@pytest.mark.parametrize(("limit", "error"), [("connect", ServerUnavailable), ("total", DeadlineExceeded)])
def test_waiting_for_anothers_metadata_keeps_to_ones_own_limits(world, limit, error):
    server = FakeServer()
    ended: list[object] = []
    server.metadata_may_end = lambda: bool(ended)
    calls = world.calls(server, retries=Retries(attempts=1))

    async def later() -> None:
        while not server.num_metadata:
            await server.pause()
        try:
            await calls.generate(request(timeouts={limit: 0.05}))
        finally:
            ended.append(None)

    completion, raised = world.together(calls.generate(request()), later())

    assert completion.text == "Hello"
    assert isinstance(raised, error)
    assert server.num_metadata == 1


def test_a_server_that_fails_meanwhile_still_gives_its_dialect(world):
    """Another thread may reset the metadata at any time; here it does so at the worst moment."""

    class Forgetful(server_group.ServerState):
        @property
        def _dialect(self):
            found, self._kept = self._kept, None
            return found

        @_dialect.setter
        def _dialect(self, dialect):
            self._kept = dialect

    calls = world.calls(FakeServer())
    server = Forgetful(calls._servers.all[0].endpoint, calls._settings, calls._runtime)

    assert world.run(server.dialect(lambda: 1.0)) is not None
    assert world.run(server.dialect(lambda: 1.0)) is not None


def test_a_server_that_was_away_is_asked_again_what_its_model_is(world):
    server = FakeServer(ANSWER, [NOBODY], ANSWER)
    calls = world.calls(server)

    async def two() -> None:
        await calls.generate(request())
        await calls.generate(request())

    world.run(two())

    assert server.num_metadata == 2


@pytest.mark.parametrize(
    ("limit", "script"),
    [
        ("first_token", ["wait"]),
        ("total", ["wait"]),
        ("total", [FIRST, "wait"]),
        ("between_tokens", [FIRST, "wait"]),
    ],
)
def test_limits(world, limit, script):
    server = FakeServer(script)

    with pytest.raises(DeadlineExceeded, match=rf"timeouts\.{limit} of 0\.05 s ran out") as caught:
        world.run(world.calls(server).generate(request(timeouts={limit: 0.05})))

    assert (caught.value.request_id, caught.value.url, caught.value.code) == ("r1", "http://s0:8000", None)
    assert server.streams[0].is_closed


def test_limits_that_hold_are_not_noticed(world):
    limits = {"first_token": 30.0, "between_tokens": 30.0, "total": 30.0}

    assert world.run(world.calls(FakeServer()).generate(request(timeouts=limits))).text == "Hello"


def test_a_complete_answer_is_not_spoilt_by_what_follows(world):
    """The connection may break, or stall, between the last response and the end of the stream."""
    for after in (LOST, "wait"):
        server = FakeServer([FIRST, LAST, after])
        completion = world.run(world.calls(server).generate(request(timeouts={"total": 0.2})))
        assert completion.text == "Hello"


def test_connecting_is_limited_by_whichever_limit_comes_first(world):
    server = FakeServer()

    world.run(world.calls(server).generate(request(timeouts={"connect": 50.0, "total": 3.0})))

    assert all(0 < limit <= 3 for limit in server.connect_limits)


def test_no_wait_goes_beyond_the_limit(world):
    """The client does not wait for an answer that would come too late."""
    calls = world.calls(FakeServer([FULL]), retries=Retries(attempts=50, initial_s=1000, max_s=1000))

    with pytest.raises(Overloaded):
        world.run(calls.generate(request(timeouts={"total": 0.5})))

    assert sum(world.sleeps) < 0.5


def test_closing_in_the_middle_ends_the_stream(world):
    server = FakeServer(ANSWER)
    calls = world.calls(server)

    async def left() -> None:
        exchange = await calls.open(request())
        await exchange.next()
        await exchange.close()
        await exchange.close()
        with pytest.raises(Cancelled, match="closed before its end"):
            await exchange.next()

    world.run(left())

    assert server.streams[0].is_closed


def test_a_connection_whose_watchdog_may_still_bite_serves_nobody_else(world, monkeypatch):
    """KeyboardInterrupt may come while the watchdog is being stopped."""
    server = FakeServer(ANSWER)
    calls = world.calls(server)
    stops = [KeyboardInterrupt()]

    class Stubborn(type(NO_WATCHDOG)):
        def stop(self) -> None:
            if stops:
                raise stops.pop()

    monkeypatch.setattr(calls._runtime, "watchdog", lambda deadlines, interrupt: Stubborn(), raising=False)

    async def left() -> None:
        exchange = await calls.open(request())
        try:
            await exchange.close()
        except KeyboardInterrupt:
            assert server.streams[0].interrupted.is_set()
            assert server.streams[0].is_closed
            server.streams[0].is_closed = False
        await exchange.close()

    world.run(left())

    assert server.streams[0].is_closed


def test_an_interrupt_while_the_request_begins_ends_it(world):
    server = FakeServer(ANSWER)
    calls = world.calls(server)

    async def interrupted(self: FakeStream) -> None:
        raise KeyboardInterrupt

    async def opened() -> None:
        with pytest.raises(KeyboardInterrupt):
            await calls.open(request(timeouts={"total": 30.0}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeStream, "receive", interrupted)
        world.run(opened())

    assert server.streams[0].is_closed


def test_an_empty_stream_is_no_answer(world):
    with pytest.raises(ProtocolError) as caught:
        world.run(world.calls(FakeServer([])).generate(request()))

    assert caught.value.request_id == "r1"


def test_cancel_asks_one_server_after_the_other(world):
    servers = FakeServer([WRONG]), FakeServer([])
    calls = world.calls(*servers)

    world.run(calls.cancel("r9"))

    assert [sent for server in servers for sent in server.requests] == [("r9", {"stop": (True,)})] * 2


def test_cancel_says_that_nobody_has_the_request(world):
    with pytest.raises(InvalidRequest) as caught:
        world.run(world.calls(FakeServer([WRONG]), FakeServer([WRONG])).cancel("r9"))

    assert caught.value.request_id == "r9"


def test_readiness_is_told_step_by_step(world):
    server = FakeServer()
    server.states = [NOBODY]
    told: list[Readiness] = []
    calls = world.calls(server)

    def progress(readiness: Readiness) -> None:
        told.append(readiness)
        server.states = [False] if len(told) == 1 else [True]

    world.run(calls.wait_until_ready(None, progress))

    assert [each.state for each in told] == ["unreachable", "starting", "ready"]
    assert "connection refused" in str(told[0])
    assert len(world.sleeps) == 2


def test_waiting_for_readiness_ends_in_time(world):
    server = FakeServer()
    server.states = [False]

    with pytest.raises(DeadlineExceeded, match="not ready after 0 s: http://s0:8000 is starting"):
        world.run(world.calls(server).wait_until_ready(0, None))


def test_waiting_for_readiness_shares_its_time_among_the_servers(world):
    """A silent server must not take the time of the others."""
    servers = FakeServer(), FakeServer()
    for server in servers:
        server.states = [False]

    def progress(readiness: Readiness) -> None:
        servers[1].states = [True]

    world.run(world.calls(*servers, timeouts=Timeouts(connect=50.0)).wait_until_ready(8.0, progress))

    assert [len(server.ready_limits) for server in servers] == [1, 2]
    assert 0 < servers[0].ready_limits[0] <= 4.0
    assert all(0 < limit <= 8.0 for limit in servers[1].ready_limits)


def test_waiting_for_readiness_keeps_to_the_limit_for_connecting(world):
    server = FakeServer()

    world.run(world.calls(server, timeouts=Timeouts(connect=0.5)).wait_until_ready(None, None))

    assert server.ready_limits == [0.5, 0.5]


def test_one_ready_server_is_enough(world):
    away, there = FakeServer(), FakeServer()
    away.states = [NOBODY]
    calls = world.calls(away, there)

    assert world.run(calls.ready()) is True
    there.states = [NOBODY]
    assert world.run(calls.ready()) is False


def test_how_far_each_server_is(world):
    away, there = FakeServer(), FakeServer()
    away.states = [NOBODY]

    assert [each.state for each in world.run(world.calls(away, there).readiness())] == ["unreachable", "ready"]


def test_metrics_come_from_tritons_own_port_unless_said_otherwise(world):
    assert world.run(world.calls(FakeServer()).metrics()).value("asked", url="http://s0:8002/metrics") == 1
    elsewhere = world.calls(FakeServer(), metrics_url="http://gateway:9000/m")
    assert world.run(elsewhere.metrics()).value("asked", url="http://gateway:9000/m") == 1


def test_metadata_comes_from_a_server_that_answers(world):
    away = FakeServer()
    away.metadata_steps = [NOBODY]

    assert world.run(world.calls(away, FakeServer()).metadata()) == OURS
