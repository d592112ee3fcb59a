"""The fleet against scripted servers: who is asked, who is asked next, and what is left afterwards."""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from deepseek_triton_tools.gateway.fleet import fleet as fleet_module
from deepseek_triton_tools.gateway.fleet import fleet_member
from deepseek_triton_tools.gateway.fleet.affinity import rendezvous_score
from deepseek_triton_tools.gateway.fleet.fleet import Fleet
from deepseek_triton_tools.gateway.fleet.server_sources import ServerAddress, SourceError, parse_source
from deepseek_triton_tools.gateway.triton.call import Call, Part, UpstreamError

URLS = [f"http://server-{number}:8000" for number in range(3)]
REFUSED = UpstreamError("connection refused", unprocessed=True)
LOST = UpstreamError("the connection was lost", unprocessed=True)
OVERLOADED = UpstreamError("[E_OVERLOADED] full", code="E_OVERLOADED", unprocessed=True, retry_after_s=7)
STOPPING = UpstreamError("[E_UNAVAILABLE] the model is being stopped", code="E_UNAVAILABLE", unprocessed=True)
INVALID = UpstreamError("[E_INVALID_ARGUMENT] top_p", code="E_INVALID_ARGUMENT")
TRITONS = UpstreamError("unexpected inference input 'x'")

Answer = list[str | UpstreamError | asyncio.Event]


class ScriptedServer:
    """Gives the answers of its list, one to each request, and its own name when there is none left."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.ready = True
        self.silent = False
        self.hung = False
        self.num_checks = 0
        self.num_abandoned = 0
        self.keeps_idle = True
        self.refusing = False
        self.broken = False
        self.model = "deepseek-r1"
        self.metrics = b""
        self.answers: list[Answer] = []
        self.asked: list[str] = []
        self.running = 0
        self.closed = 0

    async def generate(self, call: Call) -> AsyncGenerator[list[Part], None]:
        self.asked.append(call.request_id)
        self.running += 1
        try:
            for step in self.answers.pop(0) if self.answers else [self.url]:
                if isinstance(step, UpstreamError):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    yield [Part(text=step)]
        finally:
            self.running -= 1

    async def ask(self, call: Call) -> dict[str, object]:
        if call.inputs.get("task") == "describe":
            return {"model_info": json.dumps({"name": self.model, "checkpoint": f"/of/{self.url[-6]}/r1"})}
        return {"text_output": "".join([part.text async for parts in self.generate(call) for part in parts])}

    async def get(self, path: str) -> tuple[int, bytes]:
        if self.broken:
            raise ZeroDivisionError(path)
        self.num_checks += 1
        if self.silent or (self.hung and path.endswith("tensorrt_llm/ready")):
            await asyncio.sleep(3600)
        if self.refusing:
            raise UpstreamError("refused", unprocessed=True)
        if path == "/metrics":
            return 200, self.metrics
        return (200 if self.ready else 400), b""

    def heard(self) -> bool:
        return False

    def abandon(self, reason: str) -> None:
        self.num_abandoned += 1

    def keep_idle(self, keep: bool) -> None:
        self.keeps_idle = keep

    async def close(self) -> None:
        self.closed += 1


@pytest.fixture
def servers() -> dict[str, ScriptedServer]:
    class Servers(defaultdict[str, ScriptedServer]):
        def __missing__(self, url: str) -> ScriptedServer:
            return self.setdefault(url, ScriptedServer(url))

    return Servers()


@pytest.fixture(autouse=True)
def quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_member, "CHECK_PERIOD_S", 0.02)
    monkeypatch.setattr(fleet_member, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(fleet_member, "_LONGEST_PAUSE_S", 0.02)
    monkeypatch.setattr(fleet_member, "_ANSWER_S", 0.05)


Servers = dict[str, ScriptedServer]


def run(
    servers: Servers, body: Callable[[Fleet], Coroutine[Any, Any, None]], urls: list[str] = URLS, **settings: Any
) -> None:
    async def in_loop() -> None:
        fleet = Fleet(
            [parse_source(url) for url in urls],
            "tensorrt_llm",
            connect=lambda url: servers[url],
            rng=random.Random(1),
            **settings,
        )
        await fleet.start()
        try:
            await body(fleet)
            assert [server.running for server in servers.values()] == [0] * len(servers)
            assert all(server.own.sequences == server.own.tokens == 0 for server in fleet.servers())
        finally:
            await fleet.close()
        assert len(asyncio.all_tasks()) == 1
        assert all(server.closed for server in servers.values())

    asyncio.run(in_loop())


async def until(holds: Callable[[], object]) -> None:
    for _ in range(2_000):
        if holds():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come about")


def call(name: str = "job-1", **fields: Any) -> Call:
    return Call({"text_input": "x" * 40, "sampling_parameters": '{"max_tokens": 10}'}, name, **fields)


async def answer(fleet: Fleet, asked: Call) -> str:
    return "".join([part.text async for parts in fleet.generate(asked) for part in parts])


def states(fleet: Fleet) -> dict[str, str]:
    return {server.url: server.state for server in fleet.servers()}


# --- Trying another server ---


@pytest.mark.parametrize("error", [REFUSED, LOST, OVERLOADED, STOPPING], ids=["refused", "lost", "full", "stopping"])
@pytest.mark.parametrize("verb", ["generate", "ask"])
def test_another_server_answers_where_one_refuses(servers: Servers, error: UpstreamError, verb: str) -> None:
    async def body(fleet: Fleet) -> None:
        for url in URLS[:2]:
            servers[url].answers = [[error]]
        for number in range(12):
            asked = call(f"job-{number}")
            if verb == "generate":
                assert await answer(fleet, asked) == asked.tried[-1]
            else:
                assert (await fleet.ask(asked))["text_output"] == asked.tried[-1]
            assert len(set(asked.tried)) == len(asked.tried)

    run(servers, body)
    everything = [name for server in servers.values() for name in server.asked]
    assert len(everything) == 14
    assert len(set(everything)) == 12


@pytest.mark.parametrize("error", [REFUSED, LOST, OVERLOADED, STOPPING, INVALID])
def test_an_answer_that_has_begun_is_not_begun_again(servers: Servers, error: UpstreamError) -> None:
    async def body(fleet: Fleet) -> None:
        for url in URLS:
            servers[url].answers = [["the beginning", error]]
        async with aclosing(fleet.generate(call())) as parts:
            assert (await anext(parts))[0].text == "the beginning"
            with pytest.raises(UpstreamError) as caught:
                await anext(parts)
            assert caught.value is error

    run(servers, body)
    assert sum(len(server.asked) for server in servers.values()) == 1


@pytest.mark.parametrize("error", [INVALID, TRITONS])
def test_a_wrong_request_is_asked_once(servers: Servers, error: UpstreamError) -> None:
    async def body(fleet: Fleet) -> None:
        for url in URLS:
            servers[url].answers = [[error]] * 3
        for verb in (lambda: answer(fleet, call()), lambda: fleet.ask(call())):
            with pytest.raises(UpstreamError) as caught:
                await verb()
            assert caught.value is error
        assert set(states(fleet).values()) == {"up"}

    run(servers, body)
    assert sum(len(server.asked) for server in servers.values()) == 2


def test_each_server_is_asked_once_and_three_at_most(servers: Servers) -> None:
    urls = [f"http://server-{number}:8000" for number in range(6)]

    async def body(fleet: Fleet) -> None:
        for url in urls:
            servers[url].answers = [[OVERLOADED]] * 9
        asked = call()
        with pytest.raises(UpstreamError) as caught:
            await answer(fleet, asked)
        assert len(set(asked.tried)) == len(asked.tried) == 3
        assert (caught.value.code, caught.value.retry_after_s) == ("E_OVERLOADED", 7)

    run(servers, body, urls)


def test_one_that_is_full_is_a_better_answer_than_one_that_is_away(servers: Servers) -> None:
    async def body(fleet: Fleet) -> None:
        servers[URLS[0]].answers = [[OVERLOADED]]
        for url in URLS[1:]:
            servers[url].answers = [[REFUSED]]
        with pytest.raises(UpstreamError, match="full") as caught:
            await answer(fleet, call())
        assert caught.value.retry_after_s == 7

    run(servers, body)


def test_a_full_server_is_avoided_but_asked_when_all_are_full(servers: Servers) -> None:
    async def body(fleet: Fleet) -> None:
        servers[URLS[0]].answers = [[OVERLOADED]]
        while not servers[URLS[0]].asked:
            await answer(fleet, call())
        assert [server.avoided for server in fleet.servers()] == [True, False, False]
        for _ in range(20):
            await answer(fleet, call())
        assert len(servers[URLS[0]].asked) == 1
        for url in URLS[1:]:
            servers[url].answers = [[OVERLOADED]]
        assert await answer(fleet, call()) == URLS[0]

    run(servers, body)


def test_a_client_that_leaves_stops_the_work_before_and_after_the_first_response(servers: Servers) -> None:
    async def body(fleet: Fleet) -> None:
        held = asyncio.Event()
        servers[URLS[0]].answers = [[held], ["begun", held]]
        task = asyncio.create_task(answer(fleet, call()))
        await until(lambda: servers[URLS[0]].running)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with aclosing(fleet.generate(call())) as parts:
            await anext(parts)
            assert servers[URLS[0]].running == 1

    run(servers, body, URLS[:1])


def test_a_client_leaves_while_the_second_server_is_asked(servers: Servers) -> None:
    async def body(fleet: Fleet) -> None:
        held = asyncio.Event()
        affinity = next(key for key in map(str.encode, "abcdef") if _nearest(key) == URLS[0])
        servers[URLS[0]].answers = [[REFUSED]]
        servers[URLS[1]].answers = [[held]]
        task = asyncio.create_task(answer(fleet, asked := call(affinity=affinity)))
        await until(lambda: servers[URLS[1]].running)
        assert asked.tried == URLS[:2]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(servers, body, URLS[:2])


def _nearest(affinity: bytes) -> str:
    return min(URLS[:2], key=lambda url: rendezvous_score(affinity, url))


# --- Health ---


def test_a_server_is_back_when_it_is_ready_again(servers: Servers) -> None:
    async def body(fleet: Fleet) -> None:
        servers[URLS[0]].ready = False
        await until(lambda: states(fleet)[URLS[0]] == "down")
        for _ in range(20):
            assert await answer(fleet, call()) in URLS[1:]
        assert [servers[url].keeps_idle for url in URLS] == [False, True, True]
        servers[URLS[0]].ready = True
        await until(lambda: states(fleet)[URLS[0]] == "up")
        assert servers[URLS[0]].keeps_idle

    run(servers, body)


@pytest.mark.parametrize("fault", ["silent", "refusing", "broken"])
def test_a_server_whose_check_fails_is_down_and_is_checked_again(servers: Servers, fault: str) -> None:
    async def body(fleet: Fleet) -> None:
        setattr(servers[URLS[0]], fault, True)
        await until(lambda: states(fleet) == {URLS[0]: "down"})
        setattr(servers[URLS[0]], fault, False)
        await until(lambda: states(fleet) == {URLS[0]: "up"})

    run(servers, body, URLS[:1])


def test_a_server_that_answers_any_of_a_check_is_not_frozen(servers: Servers) -> None:
    async def body(fleet: Fleet) -> None:
        servers[URLS[0]].hung = servers[URLS[1]].silent = True
        await until(lambda: servers[URLS[1]].num_abandoned)
        checks = servers[URLS[0]].num_checks
        await until(lambda: servers[URLS[0]].num_checks > checks + 4 * fleet_member._SILENT_CHECKS)
        assert states(fleet) == {URLS[0]: "down", URLS[1]: "down"}
        assert servers[URLS[0]].num_abandoned == 0

    run(servers, body, URLS[:2])


def test_a_failed_request_takes_its_server_out_at_once(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_member, "_FIRST_PAUSE_S", 3600.0)
    monkeypatch.setattr(fleet_member, "_LONGEST_PAUSE_S", 3600.0)

    async def body(fleet: Fleet) -> None:
        servers[URLS[0]].answers = [[STOPPING]]
        while not servers[URLS[0]].asked:
            await answer(fleet, call())
        assert states(fleet) == {URLS[0]: "down", URLS[1]: "up", URLS[2]: "up"}

    run(servers, body)


def test_nobody_is_up(servers: Servers) -> None:
    for url in URLS:
        servers[url].ready = False

    async def body(fleet: Fleet) -> None:
        assert set(states(fleet).values()) == {"down"}
        with pytest.raises(UpstreamError, match="0 of 3 are up") as caught:
            await answer(fleet, call())
        assert caught.value.code == "E_UNAVAILABLE"
        assert caught.value.retry_after_s is not None
        assert caught.value.retry_after_s >= 1

    run(servers, body)


def test_a_server_with_another_model_is_left_out(servers: Servers) -> None:
    async def body(fleet: Fleet) -> None:
        servers[URLS[2]].ready = False
        await until(lambda: states(fleet)[URLS[2]] == "down")
        servers[URLS[2]].model, servers[URLS[2]].ready = "deepseek-v3", True
        await until(lambda: states(fleet)[URLS[2]] == "left out")
        assert "deepseek-v3" in fleet.servers()[2].reason
        for _ in range(20):
            assert await answer(fleet, call()) in URLS[:2]
        servers[URLS[2]].model = "deepseek-r1"
        await until(lambda: states(fleet)[URLS[2]] == "up")

    run(servers, body)


def test_a_fleet_whose_servers_all_went_may_come_back_with_another_model(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "MODEL_KEPT_S", 0.01)

    async def body(fleet: Fleet) -> None:
        assert "deepseek-r1" in fleet.model_info
        for server in servers.values():
            server.ready = False
        await until(lambda: set(states(fleet).values()) == {"down"})
        await asyncio.sleep(0.02)
        for server in servers.values():
            server.ready, server.model = True, "deepseek-v3"
        await until(lambda: set(states(fleet).values()) == {"up"})
        assert "deepseek-v3" in fleet.model_info

    run(servers, body)


def test_a_server_with_another_model_does_not_take_over_in_a_bad_moment(servers: Servers) -> None:
    async def body(fleet: Fleet) -> None:
        servers[URLS[1]].ready = False
        await until(lambda: states(fleet)[URLS[1]] == "down")
        servers[URLS[0]].ready = False
        await until(lambda: states(fleet)[URLS[0]] == "down")
        servers[URLS[1]].ready, servers[URLS[1]].model = True, "deepseek-v3"
        await until(lambda: states(fleet)[URLS[1]] == "left out")
        servers[URLS[0]].ready = True
        await until(lambda: states(fleet) == {URLS[0]: "up", URLS[1]: "left out"})

    run(servers, body, URLS[:2])


def test_the_only_server_may_come_back_with_another_model(servers: Servers) -> None:
    async def body(fleet: Fleet) -> None:
        servers[URLS[0]].ready = False
        await until(lambda: states(fleet) == {URLS[0]: "down"})
        servers[URLS[0]].ready, servers[URLS[0]].model = True, "deepseek-v3"
        await until(lambda: states(fleet) == {URLS[0]: "up"})
        assert "deepseek-v3" in fleet.model_info

    run(servers, body, URLS[:1])


def test_a_lost_connection_is_followed_by_a_check(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_member, "CHECK_PERIOD_S", 3600.0)

    async def body(fleet: Fleet) -> None:
        servers[URLS[0]].ready = False
        servers[URLS[0]].answers = [["begun", LOST]]
        assert states(fleet) == {URLS[0]: "up"}
        with pytest.raises(UpstreamError):
            await answer(fleet, call())
        await until(lambda: states(fleet) == {URLS[0]: "down"})

    run(servers, body, URLS[:1])


def test_pauses_grow_while_a_server_is_down(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_member, "_FIRST_PAUSE_S", 0.2)
    monkeypatch.setattr(fleet_member, "_LONGEST_PAUSE_S", 3600.0)

    async def body(fleet: Fleet) -> None:
        async def refusal() -> float:
            with pytest.raises(UpstreamError) as caught:
                await answer(fleet, call())
            return caught.value.retry_after_s or 0.0

        servers[URLS[0]].ready = False
        await until(lambda: states(fleet) == {URLS[0]: "down"})
        while await refusal() <= 1.0:
            assert fleet.servers()[0].failures < 10
            await asyncio.sleep(0.05)

    run(servers, body, URLS[:1])


def test_only_an_answer_ends_the_growth_of_pauses(servers: Servers) -> None:
    """A server whose checks succeed and whose requests fail is asked less and less."""

    async def body(fleet: Fleet) -> None:
        servers[URLS[0]].answers = [[STOPPING], [STOPPING], ["an answer"]]
        for failures in (1, 2):
            with pytest.raises(UpstreamError):
                await answer(fleet, call())
            assert fleet.servers()[0].failures == failures
            await until(lambda: states(fleet) == {URLS[0]: "up"})
        await answer(fleet, call())
        assert fleet.servers()[0].failures == 0

    run(servers, body, URLS[:1])


# --- Load ---


def metrics(sequences: int, tokens: int, model: str = "tensorrt_llm") -> bytes:
    labels = f'{{model="{model}",version="1"}}'
    lines = (
        "# HELP deepseek_triton_inflight_sequences text",
        f"deepseek_triton_inflight_sequences{labels} {sequences}",
        f"deepseek_triton_inflight_tokens{labels} {tokens}",
    )
    return "\n".join(lines).encode()


def test_work_of_other_gateways_counts(servers: Servers) -> None:
    for port, sequences in ((8002, 9), (9000, 1)):
        servers[f"http://server-{port}:{port}"].metrics = metrics(sequences, 90)

    async def body(fleet: Fleet) -> None:
        await until(lambda: all(server.others.sequences for server in fleet.servers()))
        assert [tuple(server.others) for server in fleet.servers()] == [(9, 90), (1, 90)]
        assert {await answer(fleet, call()) for _ in range(20)} == {"http://server-9000:8000"}

    run(servers, body, ["http://server-8002:8000", "http://server-9000:8000#metrics=9000"], metrics_port=8002)


def test_the_metrics_tell_of_a_dead_engine(servers: Servers) -> None:
    """Triton before 26.03 says that the model is ready all the same."""

    dead = metrics(0, 0).replace(b"inflight_sequences", b"ready")
    servers["http://server-0:8002"].metrics = dead.replace(b"} 0", b"} 1")

    async def body(fleet: Fleet) -> None:
        servers["http://server-0:8002"].metrics = dead
        await until(lambda: states(fleet)[URLS[0]] == "down")
        servers["http://server-0:8002"].metrics = dead.replace(b"} 0", b"} 1")
        await until(lambda: states(fleet)[URLS[0]] == "up")

    run(servers, body, URLS[:1], metrics_port=8002)


@pytest.mark.parametrize("text", [b"", b"<html>", metrics(9, 90, "another"), metrics(9, 90).replace(b" 9", b" NaN")])
def test_without_metrics_only_the_own_work_counts(servers: Servers, text: bytes) -> None:
    servers["http://server-0:8002"].metrics = text

    async def body(fleet: Fleet) -> None:
        held = asyncio.Event()
        servers[URLS[0]].answers = [["begun", held]]
        task = asyncio.create_task(answer(fleet, call()))
        await until(lambda: servers[URLS[0]].running)
        assert [(tuple(server.own), tuple(server.others)) for server in fleet.servers()] == [((1, 20), (0, 0))]
        held.set()
        await task

    run(servers, body, URLS[:1], metrics_port=8002)


# --- Servers that come and go ---


class ChangingSource:
    name = "changing"
    period_s: float | None = 0.01

    def __init__(self, *urls: str) -> None:
        self.urls: list[str] | Exception = list(urls)
        self.num_reads = 0

    async def read(self) -> list[ServerAddress]:
        self.num_reads += 1
        if isinstance(self.urls, Exception):
            raise self.urls
        return [ServerAddress(url) for url in self.urls]


def test_servers_join_and_leave(servers: Servers, caplog: pytest.LogCaptureFixture) -> None:
    source = ChangingSource(*URLS[:2])

    async def in_loop() -> None:
        fleet = Fleet([source, parse_source(URLS[0])], "tensorrt_llm", connect=lambda url: servers[url])
        await fleet.start()
        assert states(fleet) == {URLS[0]: "up", URLS[1]: "up"}

        for error in (SourceError("half a file"), RuntimeError("can't start new thread")):
            source.urls = error
            before = source.num_reads
            await until(lambda before=before: source.num_reads > before + 3)
            assert caplog.text.count(str(error)) == 1
            assert states(fleet) == {URLS[0]: "up", URLS[1]: "up"}

        source.urls = [*URLS]
        await until(lambda: states(fleet).get(URLS[2]) == "up")

        held = asyncio.Event()
        servers[URLS[1]].answers = [["begun", held, "and ended"]]
        tasks = []
        while not servers[URLS[1]].running:
            tasks.append(asyncio.create_task(answer(fleet, call())))
            await asyncio.sleep(0.01)
        source.urls = [URLS[2]]
        await until(lambda: fleet.servers()[-1].leaving)
        assert [server.url for server in fleet.servers() if not server.leaving] == [URLS[0], URLS[2]]
        for _ in range(20):
            assert await answer(fleet, call()) in (URLS[0], URLS[2])
        assert not servers[URLS[1]].closed

        held.set()
        assert "begunand ended" in await asyncio.gather(*tasks)
        await until(lambda: servers[URLS[1]].closed)
        assert set(states(fleet)) == {URLS[0], URLS[2]}

        await fleet.close()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(in_loop())


def test_a_server_leaves_and_comes_back_while_it_finishes(servers: Servers) -> None:
    source = ChangingSource(URLS[0])

    async def in_loop() -> None:
        fleet = Fleet([source], "tensorrt_llm", connect=lambda url: servers[url])
        await fleet.start()
        held = asyncio.Event()
        servers[URLS[0]].answers = [["begun", held]]
        task = asyncio.create_task(answer(fleet, call()))
        await until(lambda: servers[URLS[0]].running)
        source.urls = [URLS[1]]
        await until(lambda: states(fleet).get(URLS[1]) == "up")
        source.urls = [URLS[0]]
        await until(lambda: len(fleet.servers()) == 3 or states(fleet).keys() == {URLS[0]})
        await until(lambda: fleet.servers()[0].state == "up")
        assert await answer(fleet, call()) == URLS[0]
        held.set()
        assert await task == "begun"
        await fleet.close()

    asyncio.run(in_loop())
