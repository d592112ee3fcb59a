"""Retries, failover and time limits, with scripted transports, on threads and on an event loop."""

import asyncio
import threading
import time
from copy import copy

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
from deepseek_triton_client._core.checked_request import prompt_request
from deepseek_triton_client._core.client_settings import Endpoint, Settings
from deepseek_triton_client._core.interfaces import NO_WATCHDOG
from support.waiting import PATIENCE_S

INPUTS = {
    "text_input": "BYTES",
    "streaming": "BOOL",
    "stop": "BOOL",
    "stream_mode": "BYTES",
    "sampling_param_max_tokens": "INT32",
}
TENSORS = tuple(TensorMetadata(name, datatype, (-1,)) for name, datatype in INPUTS.items())
OURS = ModelMetadata("tensorrt_llm", ("1",), "python", TENSORS, (TensorMetadata("text_output", "BYTES", (-1,)),))
FIRST = {"text_output": "Hel"}
LAST = {"text_output": "lo", "finish_reason": "stop", "num_input_tokens": 3, "num_output_tokens": 2}
ANSWER = (FIRST, LAST)

FULL = Overloaded("full", code="E_OVERLOADED", unprocessed=True)
GOING = ServerUnavailable("stopping", code="E_UNAVAILABLE", unprocessed=True)
NOBODY = ServerUnavailable("connection refused", unprocessed=True)
LOST = ServerUnavailable("connection lost")
WRONG = InvalidRequest("no", code="E_INVALID_ARGUMENT")

ONCE = Retries(attempts=1)


class FakeStream:
    """Receives or raises what `steps` says; "wait" waits for the interrupt."""

    def __init__(self, server, steps):
        self.server = server
        self.steps = list(steps)
        self.is_closed = False
        self.interrupted = threading.Event()

    async def receive(self):
        if not self.steps:
            return None
        step = self.steps.pop(0)
        if step == "wait":
            while not self.interrupted.is_set():
                await self.server.pause()
            raise ServerUnavailable("shut down")
        if isinstance(step, DeepseekTritonError):
            raise copy(step)
        return step

    def interrupt(self):
        self.interrupted.set()

    async def close(self):
        self.is_closed = True


class FakeServer:
    """A scripted transport. Each request takes the next of `scripts`; the last one is used again and again."""

    always_streams = False

    def __init__(self, *scripts):
        self.scripts = list(scripts or [ANSWER])
        self.streams = []
        self.requests = []
        self.connect_limits = []
        self.metadata_steps = [OURS]
        self.num_metadata = 0
        self.metadata_may_end = lambda: True
        self.ready_limits = []
        self.states = [True]
        self.pause = pause_thread

    def open(self, request_id, inputs, *, connect_s):
        self.requests.append((request_id, {each.name: each.values for each in inputs}))
        self.connect_limits.append(connect_s)
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        self.streams.append(FakeStream(self, script))
        return self.streams[-1]

    async def server_ready(self, timeout_s):
        self.ready_limits.append(timeout_s)
        return self._state()

    async def model_ready(self, timeout_s):
        self.ready_limits.append(timeout_s)
        return self._state(last=True)

    def _state(self, *, last=False):
        state = self.states.pop(0) if last and len(self.states) > 1 else self.states[0]
        if isinstance(state, DeepseekTritonError):
            raise state
        return state

    async def metadata(self, timeout_s):
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

    async def index(self, timeout_s):
        return [{"name": "other"}]

    async def metrics(self, url, timeout_s):
        return f'asked{{url="{url}"}} 1\n'

    async def close(self):
        self.closed = True


async def pause_thread():
    time.sleep(0.001)


async def pause_task():
    await asyncio.sleep(0.001)


class CountedEvent:
    """An event that counts the callers that wait for it."""

    def __init__(self, event, world):
        self._event = event
        self._world = world
        self.set = event.set

    async def wait(self, timeout_s):
        self._world.num_waiting += 1
        try:
            return await self._event.wait(timeout_s)
        finally:
            self._world.num_waiting -= 1


class World:
    """The servers of one client, on one of the two runtimes."""

    def __init__(self, kind):
        self.kind = kind
        self.servers = {}
        self.sleeps = []
        self.num_waiting = 0

    def calls(self, *servers, **settings):
        endpoints = tuple(Endpoint("http", f"s{number}", 8000) for number in range(len(servers)))
        self.servers = {str(endpoint): server for endpoint, server in zip(endpoints, servers, strict=True)}
        for server in servers:
            server.pause = pause_thread if self.kind == "blocking" else pause_task
        world = self

        class Runtime(BlockingRuntime if self.kind == "blocking" else AsyncioRuntime):
            async def sleep(self, seconds):
                world.sleeps.append(seconds)

            def event(self):
                return CountedEvent(super().event(), world)

            def transport(self, endpoint, settings):
                return world.servers[str(endpoint)]

        return Calls(Settings(endpoints=endpoints, model_name="tensorrt_llm", **settings), Runtime())

    def generate(self, calls, **given):
        return self.run(calls.generate(request(**given)))

    def urls(self, calls, number=1):
        """The servers that answered so many requests."""
        return [self.generate(calls).url for _ in range(number)]

    def fails(self, calls, kind, **given):
        with pytest.raises(kind) as caught:
            self.generate(calls, **given)
        return caught.value

    def run(self, coroutine):
        return run(coroutine) if self.kind == "blocking" else asyncio.run(coroutine)

    def together(self, *coroutines):
        """The results or errors of all calls."""
        if self.kind == "asyncio":

            async def gathered():
                return await asyncio.gather(*coroutines, return_exceptions=True)

            return asyncio.run(gathered())
        outcomes = [None] * len(coroutines)

        def one(number, coroutine):
            try:
                outcomes[number] = run(coroutine)
            except BaseException as exc:
                outcomes[number] = exc

        threads = [threading.Thread(target=one, args=each) for each in enumerate(coroutines)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        return outcomes


@pytest.fixture(params=["blocking", "asyncio"])
def world(request):
    return World(request.param)


def request(timeouts=None, request_id="r1"):
    limits, params = Timeouts(**(timeouts or {})), SamplingParams(max_tokens=5)
    return prompt_request("hi", params=params, timeouts=limits, streaming=True, request_id=request_id)


def test_the_answer_is_put_together(world):
    """Metadata is read once."""
    server = FakeServer()
    calls = world.calls(server)

    completion = world.generate(calls, timeouts={"first_token": 30.0, "between_tokens": 30.0, "total": 30.0})

    assert (completion.text, completion.finish_reason, completion.request_id) == ("Hello", "stop", "r1")
    assert (completion.num_input_tokens, completion.num_output_tokens) == (3, 2)
    assert completion.url == "http://s0:8000"
    assert 0 < completion.time_to_first_token_s <= completion.total_s
    assert [stream.is_closed for stream in server.streams] == [True]
    assert world.urls(calls, 2) == ["http://s0:8000"] * 2
    assert (server.num_metadata, len(server.requests)) == (1, 3)


@pytest.mark.parametrize("refusal", [FULL, GOING, NOBODY], ids=["overloaded", "going", "refused"])
def test_what_was_refused_before_anything_was_generated_is_sent_again(world, refusal):
    server = FakeServer([refusal], [refusal], ANSWER, [FIRST, refusal], ANSWER)
    calls = world.calls(server)

    assert world.generate(calls).text == "Hello"
    assert len(server.requests) == 3
    assert world.fails(calls, type(refusal)).unprocessed is False
    assert len(server.requests) == 4
    assert [stream.is_closed for stream in server.streams] == [True] * 4


def test_attempts_are_bounded_and_the_last_error_comes_out(world):
    """The delays have full jitter: they lie between nothing and a bound that doubles."""
    full = copy(FULL)
    full.retry_after_s = 100
    for when_full, *others in ([None], [8, [NOBODY]]):  # which are counted apart
        server = FakeServer(*others, [full])
        retries = Retries(attempts=1 + len(others), attempts_when_full=when_full, initial_s=0.5, max_s=4)
        calls = world.calls(server, retries=retries)

        error = world.fails(calls, Overloaded)

        assert len(server.requests) == (when_full or 1) + len(others)
        assert (str(error), error.request_id, error.url) == ("[E_OVERLOADED] full", "r1", "http://s0:8000")
        assert error.unprocessed
    bounds = [(0, 0.5), (100, 1), (100, 2), *[(100, 4)] * 5]
    assert len(world.sleeps) == len(bounds)
    assert all(after <= slept <= after + bound for slept, (after, bound) in zip(world.sleeps, bounds, strict=True))
    assert len(set(world.sleeps)) > 1


def test_other_errors_are_not_tried_again(world):
    """Nor is a model that is not there. An empty stream is no answer."""
    bug = ServerError("bug", code="E_INTERNAL")
    for error in (LOST, WRONG, bug, ProtocolError("?"), AccessDenied("no"), Cancelled("c"), None):
        server = FakeServer([error] if error else [], ANSWER)
        caught = world.fails(world.calls(server), type(error) if error else ProtocolError)
        assert len(server.requests) == 1
        assert (caught.request_id, caught.url) == ("r1", "http://s0:8000")
        assert server.streams[0].is_closed
    server = FakeServer()
    server.metadata_steps = [ModelNotFound("Request for unknown model")]
    error = world.fails(world.calls(server), ModelNotFound)
    assert (error.request_id, error.url, server.num_metadata) == ("r1", "http://s0:8000", 1)


@pytest.mark.parametrize("attempts", [1, 3])
def test_another_server_is_tried_at_once(world, attempts):
    servers = FakeServer([NOBODY]), FakeServer([FULL], ANSWER), FakeServer()

    calls = world.calls(*servers, retries=Retries(attempts=attempts))
    assert world.urls(calls) == ["http://s2:8000"]

    assert [len(server.requests) for server in servers] == [1, 1, 1]
    assert world.sleeps == []
    assert world.urls(calls) == ["http://s1:8000"]  # the one that was full is asked before the one that was away


def test_a_server_that_could_not_be_reached_is_tried_last_for_a_while(world, monkeypatch):
    servers = FakeServer([NOBODY], ANSWER), FakeServer()
    calls = world.calls(*servers)

    assert world.urls(calls, 3) == ["http://s1:8000"] * 3
    assert len(servers[0].requests) == 1
    monkeypatch.setattr(server_group, "_COOL_DOWN_S", 0.0)
    assert world.urls(calls) == ["http://s0:8000"]
    assert servers[0].num_metadata == 2  # it is asked again what its model is


def test_round_robin_takes_each_server_in_turn(world):
    servers = FakeServer(), FakeServer(), FakeServer()

    world.urls(world.calls(*servers, balance="round_robin"), 6)

    assert [len(server.requests) for server in servers] == [2, 2, 2]


def test_a_refusal_is_not_lost_behind_a_server_that_is_gone(world):
    error = world.fails(world.calls(FakeServer([GOING], [NOBODY])), ServerUnavailable)

    assert (error.message, error.code) == ("connection refused", None)
    assert getattr(error.__cause__, "code", None) == "E_UNAVAILABLE"


@pytest.mark.parametrize(
    ("script", "error", "next_url"),
    [
        ([FIRST, LOST], ServerUnavailable, "http://s1:8000"),
        ([FIRST, "wait"], DeadlineExceeded, "http://s0:8000"),  # it is only slow
    ],
)
def test_a_server_lost_in_mid_answer_is_tried_last_for_a_while(world, script, error, next_url):
    calls = world.calls(FakeServer(script, ANSWER), FakeServer())

    world.fails(calls, error, timeouts={"between_tokens": 0.05})

    assert world.urls(calls) == [next_url]


def test_metadata_that_could_not_be_read_is_tried_again_too(world):
    """With one attempt, by the next caller."""
    for attempts in (3, 1):
        server = FakeServer()
        server.metadata_steps = [NOBODY, OURS]
        calls = world.calls(server, retries=Retries(attempts=attempts))
        if attempts == 1:
            world.fails(calls, ServerUnavailable)
        assert world.generate(calls).text == "Hello"


async def generate_later(calls, server, **limits):
    """Ask when the metadata is being read for somebody else."""
    while not server.num_metadata:
        await server.pause()
    return await calls.generate(request(timeouts=limits))


def test_metadata_whose_reader_left_is_read_by_the_next(world):
    server = FakeServer()
    left = KeyboardInterrupt() if world.kind == "blocking" else asyncio.CancelledError()
    server.metadata_steps = [left, OURS]
    server.metadata_may_end = lambda: server.num_metadata > 1 or world.num_waiting == 2
    calls = world.calls(server, retries=ONCE)

    outcomes = world.together(*(calls.generate(request()) for _ in range(3)))

    assert server.num_metadata == 2
    assert sum(isinstance(outcome, type(left)) for outcome in outcomes) == 1
    assert [outcome.text for outcome in outcomes if not isinstance(outcome, type(left))] == ["Hello"] * 2


def test_metadata_that_can_not_be_read_is_read_once_for_all_who_wait(world):
    server = FakeServer()
    server.metadata_steps = [NOBODY]
    server.metadata_may_end = lambda: world.num_waiting == 2
    calls = world.calls(server, retries=ONCE)

    # Two threads that come at once would both read.
    outcomes = world.together(calls.generate(request()), *(generate_later(calls, server) for _ in range(2)))

    assert [type(outcome) for outcome in outcomes] == [ServerUnavailable] * 3
    assert server.num_metadata == 1


@pytest.mark.parametrize(("limit", "error"), [("connect", ServerUnavailable), ("total", DeadlineExceeded)])
def test_waiting_for_anothers_metadata_keeps_to_ones_own_limits(world, limit, error):
    server = FakeServer()
    ended = []
    server.metadata_may_end = lambda: bool(ended)
    calls = world.calls(server, retries=ONCE)

    async def later():
        try:
            await generate_later(calls, server, **{limit: 0.05})
        finally:
            ended.append(None)

    completion, raised = world.together(calls.generate(request()), later())

    assert completion.text == "Hello"
    assert (type(raised), raised.unprocessed) == (error, True)
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


@pytest.mark.parametrize(
    ("limit", "script"),
    [("first_token", ["wait"]), ("total", ["wait"]), ("total", [FIRST, "wait"]), ("between_tokens", [FIRST, "wait"])],
)
def test_limits(world, limit, script):
    server = FakeServer(script)

    error = world.fails(world.calls(server), DeadlineExceeded, timeouts={limit: 0.05})

    assert error.message == f"timeouts.{limit} of 0.05 s ran out"
    assert (error.request_id, error.url, error.code) == ("r1", "http://s0:8000", None)
    assert server.streams[0].is_closed


def test_a_complete_answer_is_not_spoilt_by_what_follows(world):
    """The connection may break, or stall, between the last response and the end of the stream."""
    for after in (LOST, "wait"):
        calls = world.calls(FakeServer([FIRST, LAST, after]))
        assert world.generate(calls, timeouts={"total": 0.2}).text == "Hello"


def test_no_wait_goes_beyond_the_limit(world):
    """The client does not wait for an answer that would come too late, and connects within what is left."""
    server = FakeServer()
    world.generate(world.calls(server), timeouts={"connect": 50.0, "total": 3.0})
    assert all(0 < limit <= 3 for limit in server.connect_limits)
    calls = world.calls(FakeServer([FULL]), retries=Retries(attempts=50, initial_s=1000, max_s=1000))

    world.fails(calls, Overloaded, timeouts={"total": 0.5})

    assert sum(world.sleeps) < 0.5


def test_closing_in_the_middle_ends_the_stream(world):
    server = FakeServer(ANSWER)
    calls = world.calls(server)

    async def left():
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
        def stop(self):
            if stops:
                raise stops.pop()

    monkeypatch.setattr(calls._runtime, "watchdog", lambda deadlines, interrupt: Stubborn(), raising=False)

    async def left():
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


def test_an_interrupt_while_the_request_begins_ends_it(world, monkeypatch):
    server = FakeServer(ANSWER)
    calls = world.calls(server)

    async def interrupted(self):
        raise KeyboardInterrupt

    async def opened():
        with pytest.raises(KeyboardInterrupt):
            await calls.open(request(timeouts={"total": 30.0}))

    monkeypatch.setattr(FakeStream, "receive", interrupted)
    world.run(opened())

    assert server.streams[0].is_closed


def test_cancel_asks_one_server_after_the_other(world):
    servers = FakeServer([WRONG]), FakeServer([], [WRONG])
    calls = world.calls(*servers)

    world.run(calls.cancel("r9"))
    assert [sent for server in servers for sent in server.requests] == [("r9", {"stop": (True,)})] * 2
    with pytest.raises(InvalidRequest) as caught:
        world.run(calls.cancel("r9"))
    assert caught.value.request_id == "r9"
    for wrong in (None, 5, "", "\ud83d"):
        with pytest.raises(InvalidRequest, match="request_id"):
            world.run(calls.cancel(wrong))
    assert sum(len(server.requests) for server in servers) == 4


def test_readiness_is_told_step_by_step(world):
    server = FakeServer()
    server.states = [NOBODY]
    told = []

    def progress(readiness):
        told.append(readiness)
        server.states = [False] if len(told) == 1 else [True]

    world.run(world.calls(server, timeouts=Timeouts(connect=0.5)).wait_until_ready(None, progress))

    assert [each.state for each in told] == ["unreachable", "starting", "ready"]
    assert "connection refused" in str(told[0])
    assert len(world.sleeps) == 2
    assert set(server.ready_limits) == {0.5}
    for state, why in ((False, "starting$"), (NOBODY, "unreachable .connection refused")):
        server.states = [state]
        with pytest.raises(DeadlineExceeded, match=f"not ready after 0 s: http://s0:8000 is {why}"):
            world.run(world.calls(server).wait_until_ready(0, None))
    with pytest.raises(InvalidRequest, match=r"^timeout_s: "):
        world.run(world.calls(server).wait_until_ready("5", None))


def test_a_missing_model_is_waited_for_while_another_server_may_have_it(world):
    gone, down = FakeServer(), FakeServer()
    gone.metadata_steps, down.states = [ModelNotFound("model 'a' is not found")], [NOBODY]
    for servers, kind in (((gone, down), DeadlineExceeded), ((gone, gone), ModelNotFound)):
        with pytest.raises(kind):
            world.run(world.calls(*servers).wait_until_ready(0, None))


def test_waiting_for_readiness_shares_its_time_among_the_servers(world):
    """A silent server must not take the time of the others."""
    servers = FakeServer(), FakeServer()
    for server in servers:
        server.states = [False]

    def progress(_):
        servers[1].states = [True]

    world.run(world.calls(*servers, timeouts=Timeouts(connect=50.0)).wait_until_ready(8.0, progress))

    assert [len(server.ready_limits) for server in servers] == [1, 2]
    assert 0 < servers[0].ready_limits[0] <= 4.0
    assert all(0 < limit <= 8.0 for limit in servers[1].ready_limits)


def test_one_ready_server_is_enough_and_metrics_are_the_first_ones(world):
    away, there = FakeServer(), FakeServer()
    away.states = away.metadata_steps = [NOBODY]
    calls = world.calls(away, there)

    assert world.run(calls.ready()) is True
    assert [each.state for each in world.run(calls.readiness())] == ["unreachable", "ready"]
    assert world.run(calls.metadata()) == OURS
    there.states = [NOBODY]
    assert world.run(calls.ready()) is False
    assert world.run(calls.metrics()).value("asked", url="http://s0:8002/metrics") == 1
    elsewhere = world.calls(away, metrics_url="http://gateway:9000/m")
    assert world.run(elsewhere.metrics()).value("asked", url="http://gateway:9000/m") == 1
