"""Requests that two servers share, against a cluster that knows which KV caches are held."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_triton_tools.gateway.fleet import fleet_member, shared_generation
from deepseek_triton_tools.gateway.fleet.fleet import Fleet
from deepseek_triton_tools.gateway.fleet.server_sources import parse_source
from deepseek_triton_tools.gateway.fleet.shared_generation import is_shareable
from deepseek_triton_tools.gateway.triton.call import Call, Part, UpstreamError

CONTEXT = ["http://c0:8000", "http://c1:8000"]
GENERATION = ["http://g0:8000", "http://g1:8000"]
TEXT = "The quick brown fox jumps over the lazy dog."
REASONING = "Hm, a fox."
REFUSED = UpstreamError("connection refused", unprocessed=True)
LOST = UpstreamError("the connection was lost", unprocessed=True, died=True)
OVERLOADED = UpstreamError("full", code="E_OVERLOADED", unprocessed=True)
CONTEXT_LOST = UpstreamError("the KV cache is gone", code="E_CONTEXT_LOST")
INVALID = UpstreamError("top_p", code="E_INVALID_ARGUMENT")

ON_THE_WAY = {"is full": OVERLOADED, "dies": LOST}
"""What comes of a request that has been sent, when the client has left already."""

CONTEXT_FATES = ("well", "well", "refuses", "dies", "is full", "dies after answering")
GENERATION_FATES = ("well", "well", "refuses", "dies", "dies after the first token", "dies late", "is full")


class Cluster:
    """Servers of both roles. Each request takes the next fate of its role, and the last one is for all that follow."""

    def __init__(
        self,
        context_fates: tuple[str, ...] = ("well",),
        generation_fates: tuple[str, ...] = ("well",),
        cuts: tuple[int, ...] = (5, 9, 30),
        first: str = "The",
    ) -> None:
        self.fates = {"context": list(context_fates), "generation": list(generation_fates)}
        self.cuts = cuts
        self.first = first
        self.held: set[str] = set()
        self.asked: list[tuple[str, str]] = []
        """(first letter of the server's name, request_type)"""
        self.abilities = {"request_type": ""}
        self.canaries = 0
        self.stuck: set[str] = set()
        """URLs of servers that answer no canary."""
        self.refuses_canaries = False
        """What stuck servers do, else they are silent."""
        self.checks = 0
        self.deaths = 0
        self.releases_kill = False
        self.metrics = b""
        self.on_metrics: Callable[[], None] = lambda: None
        self._number = 0

    def fate(self, role: str) -> str:
        fates = self.fates[role]
        fate = fates.pop(0) if len(fates) > 1 else fates[0]
        self.deaths += fate.startswith("dies")
        return fate

    def hold(self) -> str:
        self._number += 1
        self.held.add(str(self._number))
        return str(self._number)


class ClusterServer:
    """A connection to one server of the cluster."""

    def __init__(self, url: str, cluster: Cluster) -> None:
        self.url, self.cluster = url, cluster

    async def generate(self, call: Call) -> AsyncGenerator[list[Part], None]:
        if call.request_id.startswith("canary-"):
            self.cluster.canaries += 1
            while self.url in self.cluster.stuck:
                if self.cluster.refuses_canaries:
                    raise OVERLOADED
                await asyncio.sleep(3600)
            return
        request_type = str(call.inputs.get("request_type", ""))
        self.cluster.asked.append((self.url[7], request_type))
        await asyncio.sleep(0)  # it connects
        call.sent.append(self.url)
        answer = self._context(call) if request_type == "context_only" else self._generation(call, request_type)
        async with aclosing(answer):
            async for parts in answer:
                yield parts

    async def _context(self, call: Call) -> AsyncGenerator[list[Part], None]:
        assert self.url in CONTEXT
        fate = self.cluster.fate("context")
        await asyncio.sleep(0)
        fail(fate)
        held = self.cluster.hold()
        try:
            yield [
                Part(text=self.cluster.first, num_output_tokens=1, finish_reason="length", context_phase_params=held)
            ]
        except GeneratorExit:
            raise
        if fate == "dies after answering":
            self.cluster.held.discard(held)
            raise LOST

    async def _generation(self, call: Call, request_type: str) -> AsyncGenerator[list[Part], None]:
        assert self.url in GENERATION
        held = str(call.inputs.get("context_phase_params", ""))
        is_release = call.request_id.endswith("-release")
        if is_release and self.cluster.releases_kill:
            self.cluster.deaths += 1
            raise LOST
        fate = "well" if is_release else self.cluster.fate("generation")
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            if fate in ON_THE_WAY:
                assert call.late is not None
                call.late([], ON_THE_WAY[fate])
            else:
                self.cluster.held.discard(held)  # an engine fetches the KV cache of an aborted request too
            raise
        fail(fate)
        try:
            yield [Part(text=self.cluster.first, num_output_tokens=1)]
        except GeneratorExit:
            self.cluster.held.discard(held)  # an engine fetches the KV cache of an aborted request too
            raise
        if fate == "dies after the first token":
            raise LOST
        if fate == "hangs after the first token":
            await asyncio.sleep(3600)
        if request_type == "generation_only":
            if held not in self.cluster.held:
                raise CONTEXT_LOST
            self.cluster.held.discard(held)
        for text in self._rest():
            await asyncio.sleep(0)
            yield [Part(text=text, num_output_tokens=1)]
            if fate == "dies late":
                raise LOST
        yield [Part(finish_reason="stop", num_input_tokens=7)]

    def _rest(self) -> Iterator[str]:
        begin = len(self.cluster.first)
        for cut in sorted(cut for cut in self.cluster.cuts if cut > begin):
            yield TEXT[begin:cut]
            begin = min(cut, len(TEXT))
        yield TEXT[begin:]

    async def ask(self, call: Call) -> dict[str, object]:
        info = {"name": "r1", "checkpoint": "/r1", "fields": self.cluster.abilities}
        return {"model_info": json.dumps(info)}

    async def get(self, path: str) -> tuple[int, bytes]:
        if path != "/metrics":
            self.cluster.checks += 1
            return 200, b""
        self.cluster.on_metrics()
        return 200, self.cluster.metrics

    def heard(self) -> bool:
        return False

    def abandon(self, reason: str) -> None: ...

    def keep_idle(self, keep: bool) -> None: ...

    async def close(self) -> None: ...


def fail(fate: str) -> None:
    errors = {"refuses": REFUSED, "dies": LOST, "is full": OVERLOADED, "is wrong": INVALID}
    if fate in errors:
        raise errors[fate]


@pytest.fixture(autouse=True)
def quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_generation, "_RELEASE_PAUSE_S", 0.001)
    monkeypatch.setattr(fleet_member, "CHECK_PERIOD_S", 0.01)
    monkeypatch.setattr(fleet_member, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(fleet_member, "_LONGEST_PAUSE_S", 0.001)


def run(
    cluster: Cluster,
    body: Callable[[Fleet], Coroutine[Any, Any, None]],
    *,
    context: list[str] = CONTEXT,
    **given_settings: Any,
) -> None:
    async def in_loop() -> None:
        fleet = Fleet(
            [parse_source(url) for url in GENERATION],
            "tensorrt_llm",
            connect=lambda url: ClusterServer(url, cluster),
            rng=random.Random(1),
            context_sources=[parse_source(url) for url in context],
            **given_settings,
        )
        await fleet.start()
        try:
            await body(fleet)
        finally:
            await fleet.close()

    asyncio.run(in_loop())


async def answer_of(fleet: Fleet, call: Call, leave_after: int | None = None) -> tuple[str, list[Part]]:
    parts: list[Part] = []
    async with aclosing(fleet.generate(call)) as answer:
        async for several in answer:
            parts += several
            if leave_after is not None and len(parts) >= leave_after:
                break
    return "".join(part.text for part in parts), parts


async def settled(cluster: Cluster) -> None:
    """Wait until nothing is held any more."""
    for _ in range(2_000):
        if not cluster.held:
            return
        await asyncio.sleep(0.001)


def asked(**inputs: object) -> Call:
    return Call({"text_input": "What jumps?" * 9, **inputs}, "id-1", tried=[], context_tried=[])


def test_the_first_token_comes_at_once_and_only_once() -> None:
    cluster = Cluster()

    async def body(fleet: Fleet) -> None:
        call = asked()
        text, parts = await answer_of(fleet, call)
        assert text == TEXT
        assert (parts[0].text, parts[0].finish_reason, parts[0].context_phase_params) == ("The", "", "")
        assert [part.finish_reason for part in parts if part.finish_reason] == ["stop"]
        assert sum(part.num_output_tokens for part in parts) == len([*ClusterServer("", cluster)._rest()]) + 1
        assert call.context_tried[0] in CONTEXT
        assert call.tried[0] in GENERATION

    run(cluster, body)
    assert cluster.asked == [("c", "context_only"), ("g", "generation_only")]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(CONTEXT_FATES), min_size=1, max_size=3).map(lambda fates: (*fates, "well")),
    st.lists(st.sampled_from(GENERATION_FATES), min_size=1, max_size=3).map(lambda fates: (*fates, "well")),
    st.lists(st.integers(0, len(TEXT)), max_size=4).map(tuple),
    st.sampled_from(["", "T", "The"]),
    st.none() | st.integers(1, 5),
)
def test_whatever_dies_there_is_one_end_and_no_kv_cache_is_held(
    context_fates: tuple[str, ...],
    generation_fates: tuple[str, ...],
    cuts: tuple[int, ...],
    first: str,
    leave_after: int | None,
) -> None:
    cluster = Cluster(context_fates, generation_fates, cuts, first)

    async def body(fleet: Fleet) -> None:
        for _ in range(3):
            try:
                text, parts = await answer_of(fleet, asked(), leave_after)
            except UpstreamError:
                continue
            assert TEXT.startswith(text)
            if leave_after is None:
                assert text == TEXT
                assert [part.finish_reason for part in parts if part.finish_reason] == ["stop"]
        await settled(cluster)

    run(cluster, body)
    assert cluster.held == set()


@pytest.mark.parametrize("fate", ["refuses", "dies", "dies after the first token"])
def test_a_generation_server_that_dies_before_anything_new_costs_the_client_nothing(fate: str) -> None:
    cluster = Cluster(generation_fates=(fate, "well"))

    async def body(fleet: Fleet) -> None:
        assert (await answer_of(fleet, asked()))[0] == TEXT
        await settled(cluster)

    run(cluster, body)
    assert cluster.held == set()


@pytest.mark.parametrize(
    ("context_fates", "generation_fates"),
    [
        (("dies",), ("dies",)),
        (("dies", "well"), ("dies",)),
        (("well",), ("dies",)),
        (("well",), ("dies after the first token",)),
        (("dies", "refuses"), ("dies",)),
    ],
)
@pytest.mark.parametrize("releases_kill", [False, True])
def test_a_request_takes_two_servers_down_at_most_whatever_their_roles(
    context_fates: tuple[str, ...], generation_fates: tuple[str, ...], releases_kill: bool
) -> None:
    cluster = Cluster(context_fates, generation_fates)
    cluster.releases_kill = releases_kill

    async def body(fleet: Fleet) -> None:
        with pytest.raises(UpstreamError):
            await answer_of(fleet, asked())

    run(cluster, body)
    assert 2 <= cluster.deaths <= 2 + releases_kill  # a held KV cache is worth the risk of one more
    assert releases_kill or not cluster.held


@pytest.mark.parametrize("leave_after", [1, 2])
def test_a_gateway_that_is_stopped_leaves_no_kv_cache_behind(leave_after: int) -> None:
    cluster = Cluster()

    async def body(fleet: Fleet) -> None:
        await answer_of(fleet, asked(), leave_after)

    run(cluster, body)
    assert cluster.held == set()


def test_a_client_that_leaves_before_a_refusal_has_come_leaves_no_kv_cache_behind() -> None:
    cluster = Cluster(generation_fates=("is full", "well"))

    async def body(fleet: Fleet) -> None:
        task = asyncio.create_task(answer_of(fleet, asked()))
        while "generation_only" not in [kind for _, kind in cluster.asked]:
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # it has been sent
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    run(cluster, body)
    assert cluster.held == set()


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(["well", "dies", "is full"]), min_size=1, max_size=2).map(lambda fates: (*fates, "well")),
    st.integers(0, 40),
)
def test_a_client_that_leaves_at_any_moment_leaves_no_kv_cache_behind(
    generation_fates: tuple[str, ...], turns: int
) -> None:
    """`turns`: of the event loop, until it leaves."""
    cluster = Cluster(generation_fates=generation_fates)

    async def body(fleet: Fleet) -> None:
        task = asyncio.create_task(answer_of(fleet, asked()))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await settled(cluster)

    run(cluster, body)
    assert cluster.held == set()


def test_a_lost_kv_cache_is_computed_again_with_the_same_first_token() -> None:
    cluster = Cluster(("dies after answering", "well"))

    async def body(fleet: Fleet) -> None:
        assert (await answer_of(fleet, asked()))[0] == TEXT

    run(cluster, body)
    assert [kind for _, kind in cluster.asked] == ["context_only", "generation_only", "context_and_generation"]


@pytest.mark.parametrize("fate", ["is wrong", "is full"])
def test_a_generation_server_that_refuses_leaves_no_kv_cache_behind(fate: str) -> None:
    cluster = Cluster(generation_fates=(fate, fate, fate, "well"))

    async def body(fleet: Fleet) -> None:
        with pytest.raises(UpstreamError):
            await answer_of(fleet, asked())
        await settled(cluster)

    run(cluster, body)
    assert cluster.held == set()
    assert "context_and_generation" not in [kind for _, kind in cluster.asked]


def test_without_a_context_server_a_generation_server_does_all_of_it() -> None:
    cluster = Cluster(("refuses",))

    async def body(fleet: Fleet) -> None:
        assert (await answer_of(fleet, asked()))[0] == TEXT

    run(cluster, body)
    assert cluster.asked[-1] == ("g", "")


@pytest.mark.parametrize(("fate", "error"), [("is full", OVERLOADED), ("is wrong", INVALID)])
def test_a_refusal_of_the_request_itself_is_the_client_s(fate: str, error: UpstreamError) -> None:
    cluster = Cluster((fate,))

    async def body(fleet: Fleet) -> None:
        with pytest.raises(UpstreamError) as raised:
            await answer_of(fleet, asked())
        assert raised.value.code == error.code

    run(cluster, body)
    assert all(server == "c" for server, _ in cluster.asked)


@pytest.mark.parametrize(
    "inputs",
    [
        {"sampling_parameters": '{"n": 2}'},
        {"sampling_parameters": '{"best_of": 3}'},
        {"sampling_parameters": '{"logprobs": 0}'},
        {"sampling_parameters": '{"prompt_logprobs": 1}'},
        {"return_logprobs": True},
        {"text_input": ["a" * 99, "b" * 99]},
        {"task": "tokenize"},
        {"request_type": "context_and_generation"},
        {"sampling_parameters": "{"},
        {"sampling_parameters": '{"guided_json": {"type": "object"}}'},
        {"tools": '[{"type": "function", "function": {"name": "f", "strict": true}}]'},
        {"text_input": "short"},
    ],
)
def test_what_two_servers_cant_share_goes_to_one(inputs: dict[str, object]) -> None:
    assert not is_shareable(asked(**inputs), local_prefill_tokens=10)
    assert is_shareable(asked(), local_prefill_tokens=10)


def test_servers_that_cant_share_are_left_out_by_name() -> None:
    cluster = Cluster()
    cluster.abilities = {"request_type": "this engine does whole requests only"}

    async def body(fleet: Fleet) -> None:
        reasons = {server.reason for server in fleet.servers()}
        assert reasons == {"It can't share requests with another server: this engine does whole requests only"}

    run(cluster, body)


@pytest.mark.parametrize("refuses_canaries", [False, True])
@pytest.mark.parametrize(("stuck", "others"), [(GENERATION, CONTEXT), (CONTEXT, GENERATION)])
def test_a_stuck_engine_that_says_it_is_ready_is_down(
    monkeypatch: pytest.MonkeyPatch, stuck: list[str], others: list[str], refuses_canaries: bool
) -> None:
    monkeypatch.setattr(fleet_member, "_CANARY_PERIOD_S", 0.0)
    monkeypatch.setattr(fleet_member, "_CANARY_S", 0.02)
    monkeypatch.setattr(fleet_member, "_AVOIDED_S", 0.001)
    cluster = Cluster()

    async def body(fleet: Fleet) -> None:
        async def until(state: str) -> None:
            while {server.state for server in fleet.servers() if server.url in stuck} != {state}:
                await asyncio.sleep(0.005)

        await asyncio.wait_for(until("up"), 60)
        cluster.stuck, cluster.refuses_canaries = set(stuck), refuses_canaries
        await asyncio.wait_for(until("down"), 60)
        assert {server.state for server in fleet.servers() if server.url in others} == {"up"}
        reasons = {server.reason for server in fleet.servers() if server.url in stuck}
        assert reasons == {"no token within 0.02 s, though it says that it is ready"}
        if stuck == CONTEXT:
            assert (await answer_of(fleet, asked()))[0] == TEXT
            assert cluster.asked == [("g", "")]
        cluster.stuck = set()
        await asyncio.wait_for(until("up"), 60)

    run(cluster, body)


def test_a_server_that_is_busy_when_it_is_found_takes_requests() -> None:
    """Its canary waits behind the requests of others."""
    cluster = Cluster()
    cluster.stuck = {*CONTEXT, *GENERATION}

    async def body(fleet: Fleet) -> None:
        assert {server.state for server in fleet.servers()} == {"up"}
        while cluster.canaries < 4:
            await asyncio.sleep(0.001)
        assert (await answer_of(fleet, asked()))[0] == TEXT
        assert {server.state for server in fleet.servers()} == {"up"}

    run(cluster, body)


@pytest.mark.parametrize(("fate", "state"), [("well", "up"), ("hangs after the first token", "down")])
def test_answers_show_that_a_server_works_and_first_tokens_do_not(
    monkeypatch: pytest.MonkeyPatch, fate: str, state: str
) -> None:
    """No canary comes back, and ten seconds of the clock lie between the requests."""
    ahead = [0]
    monkeypatch.setattr(fleet_member, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0]))
    cluster = Cluster(generation_fates=(fate,))
    cluster.stuck = {*CONTEXT, *GENERATION}

    async def body(fleet: Fleet) -> None:
        def states() -> set[str]:
            return {server.state for server in fleet.servers() if server.role == "generation"}

        tasks = []
        while ahead[0] < 300 and states() != {"down"}:
            ahead[0] += 10
            tasks += [asyncio.create_task(answer_of(fleet, asked())) for _ in range(16)]
            enough = cluster.checks + 16
            while cluster.checks < enough and states() != {"down"}:
                await asyncio.sleep(0.001)
        assert states() == {state}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(cluster, body)


METRIC = 'deepseek_triton_%s{model="tensorrt_llm",version="1"} %d\n'


@pytest.mark.parametrize(
    ("metric", "working"),
    [("inter_token_latency_seconds_count", "generation"), ("time_to_first_token_seconds_count", "context")],
)
def test_a_server_whose_metrics_show_work_is_not_stuck(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, metric: str, working: str
) -> None:
    """Each look at the metrics takes ten seconds of the clock, and no canary comes back."""
    ahead = [0]
    monkeypatch.setattr(fleet_member, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0]))
    cluster = Cluster()
    cluster.stuck = {*CONTEXT, *GENERATION}

    def look() -> None:
        ahead[0] += 10
        cluster.metrics = (METRIC % (metric, ahead[0])).encode()

    cluster.on_metrics = look

    async def body(fleet: Fleet) -> None:
        while {server.state for server in fleet.servers() if server.role != working} != {"down"} or ahead[0] < 1_000:
            await asyncio.sleep(0.001)
        assert {server.state for server in fleet.servers() if server.role == working} == {"up"}
        assert not any(f"http://{working[0]}{number} is down" in caplog.text for number in range(2))

    run(cluster, body, metrics_port=8002)


def test_a_context_server_that_is_full_of_held_kv_caches_is_asked_last() -> None:
    cluster = Cluster()
    cluster.metrics = (METRIC % ("engine_waiting_requests", 3) + METRIC % ("engine_running_requests", 0)).encode()

    async def body(fleet: Fleet) -> None:
        assert {(server.role, server.avoided) for server in fleet.servers()} == {
            ("context", True),
            ("generation", False),
        }
        assert (await answer_of(fleet, asked()))[0] == TEXT

    run(cluster, body, metrics_port=8002)
