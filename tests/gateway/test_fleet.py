"""The fleet against scripted servers: who is asked, who is asked next, and what is left afterwards."""

import asyncio
import json
import random
import re
import time
from collections import defaultdict
from contextlib import aclosing, asynccontextmanager

import pytest

from deepseek_triton_tools.gateway import fleet as fleet_module
from deepseek_triton_tools.gateway import fleet_member, model_front
from deepseek_triton_tools.gateway.fleet import Fleet, rendezvous_score
from deepseek_triton_tools.gateway.settings import ServerAddress, SourceError, parse_source
from deepseek_triton_tools.gateway.triton_call import Call, Load, Part, UpstreamError

URLS = A, B, C = [f"http://server-{number}:8000" for number in range(3)]
METRICS_OF_A = "http://server-0:8002"
REFUSED = UpstreamError("connection refused", unprocessed=True)
LOST = UpstreamError("the connection was lost", unprocessed=True)
DIED = UpstreamError("[E_UNAVAILABLE] CUDA error", code="E_UNAVAILABLE", unprocessed=True, died=True)
OVERLOADED = UpstreamError("[E_OVERLOADED] full", code="E_OVERLOADED", unprocessed=True, retry_after_s=7)
STOPPING = UpstreamError("[E_UNAVAILABLE] the model is being stopped", code="E_UNAVAILABLE", unprocessed=True)
INVALID = UpstreamError("[E_INVALID_ARGUMENT] top_p", code="E_INVALID_ARGUMENT")
TRITONS = UpstreamError("unexpected inference input 'x'")


class ScriptedServer:
    """Gives the answers of its list, one to each request, and its own name when there is none left.

    An answer is a list of texts, errors, and events to wait for.
    """

    def __init__(self, url):
        self.url = url
        self.ready = self.keeps_idle = True
        self.silent = self.hung = self.refusing = self.broken = False
        self.num_checks = self.num_abandoned = self.running = self.closed = 0
        self.told = {"name": "deepseek-r1", "max_seq_len": 4096}
        self.metrics = b""
        self.answers = []
        self.asked = []

    async def generate(self, call):
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

    async def ask(self, call):
        if call.inputs.get("task") == "describe":
            return {"model_info": json.dumps({"checkpoint": f"/of/{self.url[-6]}/r1", **self.told})}
        return {"text_output": "".join([part.text async for parts in self.generate(call) for part in parts])}

    async def get(self, path, *, fresh=False):
        if self.broken:
            raise ZeroDivisionError(path)
        self.num_checks += 1
        if self.silent or (self.hung and path.endswith("tensorrt_llm/ready")):
            await asyncio.sleep(3600)
        if self.refusing:
            raise REFUSED
        return (200, self.metrics) if path == "/metrics" else (200 if self.ready is True else self.ready or 400, b"")

    def heard(self):
        return False

    def abandon(self, reason):
        self.num_abandoned += 1

    def keep_idle(self, keep):
        self.keeps_idle = keep

    async def close(self):
        self.closed += 1


@pytest.fixture
def servers():
    class Servers(defaultdict):
        def __missing__(self, url):
            return self.setdefault(url, ScriptedServer(url))

    return Servers()


@pytest.fixture(autouse=True)
def quick_checks(monkeypatch):
    for name, seconds in {"CHECK_PERIOD_S": 0.02, "_FIRST_PAUSE_S": 0.01, "_LONGEST_PAUSE_S": 0.02}.items():
        monkeypatch.setattr(fleet_member, name, seconds)
    monkeypatch.setattr(fleet_member, "_ANSWER_S", 0.05)


@asynccontextmanager
async def fleet_of(servers, sources=URLS, **settings):
    """A fleet that has started. Nothing of it is left in the end."""
    sources = [parse_source(source) if isinstance(source, str) else source for source in sources]
    fleet = Fleet(sources, "tensorrt_llm", connect=lambda url: servers[url], rng=random.Random(1), **settings)
    await fleet.start()
    try:
        yield fleet
        assert [server.running for server in servers.values()] == [0] * len(servers)
        assert all(server.own.sequences == server.own.tokens == 0 for server in fleet.servers())
    finally:
        await fleet.close()
    assert len(asyncio.all_tasks()) == 1
    assert all(server.closed for server in servers.values())


async def until(holds):
    for _ in range(2_000):
        if holds():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come about")


def call(name="job-1", **fields):
    return Call({"text_input": "x" * 40, "sampling_parameters": '{"max_tokens": 10}'}, name, **fields)


async def answer(fleet, asked=None):
    return "".join([part.text async for parts in fleet.generate(asked or call()) for part in parts])


async def error_of(answering):
    with pytest.raises(UpstreamError) as caught:
        await answering
    return caught.value


def states(fleet):
    return {server.url: server.state for server in fleet.servers()}


async def until_state(fleet, url, state):
    await until(lambda: states(fleet).get(url) == state)


# --- Trying another server ---


@pytest.mark.parametrize("error", [REFUSED, LOST, OVERLOADED, STOPPING], ids=["refused", "lost", "full", "stopping"])
async def test_another_server_answers_where_one_refuses(servers, error):
    for verb in ("generate", "ask"):
        async with fleet_of(servers) as fleet:
            servers[A].answers, servers[B].answers = [[error]], [[error]]
            for number in range(12):
                asked = call(f"{verb}-{number}")
                told = await answer(fleet, asked) if verb == "generate" else (await fleet.ask(asked))["text_output"]
                assert told == asked.tried[-1]
                assert len(set(asked.tried)) == len(asked.tried)
    everything = [name for server in servers.values() for name in server.asked]
    assert (len(everything), len(set(everything))) == (28, 24)


async def test_an_answer_that_has_begun_is_not_begun_again(servers):
    errors = [REFUSED, LOST, OVERLOADED, STOPPING, INVALID]
    async with fleet_of(servers) as fleet:
        for error in errors:
            for url in URLS:
                servers[url].answers = [["the beginning", error]]
            async with aclosing(fleet.generate(call())) as parts:
                assert (await anext(parts))[0].text == "the beginning"
                assert await error_of(anext(parts)) is error
            await until(lambda: set(states(fleet).values()) == {"up"})
    assert sum(len(server.asked) for server in servers.values()) == len(errors)


async def test_each_server_is_asked_once_and_three_at_most_or_two_that_die_of_it(servers):
    urls = [f"http://server-{number}:8000" for number in range(6)]
    for refused, most in ((OVERLOADED, 3), (STOPPING, 3), (DIED, 2)):
        async with fleet_of(servers, urls) as fleet:
            for url in urls:
                servers[url].answers = [[refused]] * 9
            error = await error_of(answer(fleet, asked := call()))
            assert len(set(asked.tried)) == len(asked.tried) == most
            assert (error.code, bool(error.retry_after_s)) == (refused.code, True)


async def test_which_error_comes_out(servers):
    """A wrong request is asked once. One server that is full is a better answer than one that is away."""
    async with fleet_of(servers) as fleet:
        for error in (INVALID, TRITONS):
            for url in URLS:
                servers[url].answers = [[error]] * 2
            assert await error_of(answer(fleet)) is error
            assert await error_of(fleet.ask(call())) is error
        assert set(states(fleet).values()) == {"up"}
        assert sum(len(server.asked) for server in servers.values()) == 4
        servers[A].answers, servers[B].answers, servers[C].answers = [[OVERLOADED]], [[REFUSED]], [[REFUSED]]
        error = await error_of(answer(fleet))
        assert (error.code, error.retry_after_s) == ("E_OVERLOADED", 7)
        for url in URLS:
            servers[url].ready = False
        await until(lambda: set(states(fleet).values()) == {"down"})
        error = await error_of(answer(fleet))
        assert ("0 of 3 are up" in str(error), error.code) == (True, "E_UNAVAILABLE")
        assert error.retry_after_s >= 1


async def test_a_full_server_is_avoided_but_asked_when_all_are_full(servers):
    async with fleet_of(servers) as fleet:
        servers[A].answers = [[OVERLOADED]]
        while not servers[A].asked:
            await answer(fleet)
        assert [server.avoided for server in fleet.servers()] == [True, False, False]
        for _ in range(20):
            await answer(fleet)
        assert len(servers[A].asked) == 1
        servers[B].answers, servers[C].answers = [[OVERLOADED]], [[OVERLOADED]]
        assert await answer(fleet) == A


async def test_a_client_that_leaves_stops_the_work_before_and_after_the_first_response(servers):
    async with fleet_of(servers, [A]) as fleet:
        held = asyncio.Event()
        servers[A].answers = [[held], ["begun", held]]
        task = asyncio.create_task(answer(fleet))
        await until(lambda: servers[A].running)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with aclosing(fleet.generate(call())) as parts:
            await anext(parts)
            assert servers[A].running == 1


async def test_a_client_leaves_while_the_second_server_is_asked(servers):
    async with fleet_of(servers, [A, B]) as fleet:
        nearest = (key for key in map(str.encode, "abcdef") if rendezvous_score(key, A) < rendezvous_score(key, B))
        servers[A].answers, servers[B].answers = [[REFUSED]], [[asyncio.Event()]]
        task = asyncio.create_task(answer(fleet, asked := call(affinity=next(nearest))))
        await until(lambda: servers[B].running)
        assert asked.tried == [A, B]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


# --- Health ---


async def test_a_server_is_back_when_it_is_ready_again(servers):
    async with fleet_of(servers) as fleet:
        servers[A].ready = False
        await until_state(fleet, A, "down")
        for _ in range(20):
            assert await answer(fleet) in (B, C)
        assert [servers[url].keeps_idle for url in URLS] == [False, True, True]
        servers[A].ready = True
        await until_state(fleet, A, "up")
        assert servers[A].keeps_idle


async def test_a_server_whose_check_fails_is_down_and_is_checked_again(servers):
    async with fleet_of(servers, [A]) as fleet:
        for fault in ("silent", "refusing", "broken"):
            setattr(servers[A], fault, True)
            await until_state(fleet, A, "down")
            setattr(servers[A], fault, False)
            await until_state(fleet, A, "up")


@pytest.mark.slow
async def test_a_server_that_answers_any_of_a_check_is_not_frozen(servers):
    async with fleet_of(servers, [A, B]) as fleet:
        servers[A].hung = servers[B].silent = True
        await until(lambda: servers[B].num_abandoned)
        checks = servers[A].num_checks
        await until(lambda: servers[A].num_checks > checks + 4 * fleet_member._SILENT_CHECKS)
        assert states(fleet) == {A: "down", B: "down"}
        assert servers[A].num_abandoned == 0


async def test_a_failed_request_takes_its_server_out_at_once(servers, monkeypatch):
    monkeypatch.setattr(fleet_member, "_FIRST_PAUSE_S", 3600.0)
    monkeypatch.setattr(fleet_member, "_LONGEST_PAUSE_S", 3600.0)
    async with fleet_of(servers) as fleet:
        servers[A].answers = [[STOPPING]]
        while not servers[A].asked:
            await answer(fleet)
        assert states(fleet) == {A: "down", B: "up", C: "up"}


async def test_a_server_with_another_model_is_left_out_and_another_length_is_told(servers, caplog):
    async with fleet_of(servers) as fleet:
        servers[C].ready = False
        await until_state(fleet, C, "down")
        servers[C].told, servers[C].ready = {"name": "deepseek-v3"}, True
        await until_state(fleet, C, "left out")
        assert "deepseek-v3" in fleet.servers()[2].reason
        for _ in range(20):
            assert await answer(fleet) in (A, B)
        for facts, word in (({"tool_form": "dsml"}, "dsml"), ({"simulation": {"speed": 1.0}}, "simulated")):
            servers[C].told = {"name": "deepseek-r1", **facts}
            await until(lambda word=word: word in fleet.servers()[2].reason)
        servers[C].told = {"name": "deepseek-r1", "max_seq_len": 512}
        await until_state(fleet, C, "up")
        assert "512" in fleet.model_info  # the smallest of those that are up
        assert re.search(rf"{C}.* 512.* 4096", caplog.text)
        servers[C].ready = False
        await until(lambda: "4096" in fleet.model_info)


@pytest.mark.parametrize(("urls", "kept_s"), [(URLS, 0.01), ([A], 3600.0)], ids=["after some time", "alone"])
async def test_servers_that_all_went_may_come_back_with_another_model(servers, monkeypatch, urls, kept_s):
    monkeypatch.setattr(fleet_module, "MODEL_KEPT_S", kept_s)
    async with fleet_of(servers, urls) as fleet:
        assert "deepseek-r1" in fleet.model_info
        for server in servers.values():
            server.ready = False
        await until(lambda: set(states(fleet).values()) == {"down"})
        await asyncio.sleep(0.02)
        for server in servers.values():
            server.ready, server.told = True, {"name": "deepseek-v3"}
        await until(lambda: set(states(fleet).values()) == {"up"})
        assert "deepseek-v3" in fleet.model_info


@pytest.mark.parametrize("begins", [True, False], ids=["start", "all back"])
async def test_most_servers_decide_and_a_silent_one_is_not_waited_for(servers, monkeypatch, begins):
    monkeypatch.setattr(fleet_module, "MODEL_KEPT_S", 0.01)
    servers[A].told, servers[C].silent = {"name": "deepseek-v3"}, True
    for server in servers.values():
        server.ready = begins
    async with fleet_of(servers, [*URLS, D := "http://server-3:8000"]) as fleet:
        for server in servers.values():
            server.ready = True
        await until(lambda: states(fleet) == {A: "left out", B: "up", C: "down", D: "up"})


async def test_a_server_with_another_model_does_not_take_over_in_a_bad_moment(servers):
    async with fleet_of(servers, [A, B]) as fleet:
        servers[B].ready = False
        await until_state(fleet, B, "down")
        servers[A].ready = False
        await until_state(fleet, A, "down")
        servers[B].ready, servers[B].told = True, {"name": "deepseek-v3"}
        await until_state(fleet, B, "left out")
        servers[A].ready = True
        await until(lambda: states(fleet) == {A: "up", B: "left out"})


async def test_workers_have_the_model_of_the_one_that_was_first(servers, tmp_path):
    servers[A].ready, servers[B].told = False, {"name": "deepseek-v3"}
    async with fleet_of(servers, [A, B], shared_folder=tmp_path) as fleet:
        await until_state(fleet, B, "up")
        (tmp_path / "model-0").write_text("{")  # by one that was killed
        await until(lambda: (tmp_path / "model-0").stat().st_size > 1)
    servers[A].ready = True
    async with fleet_of(servers, [A, B], shared_folder=tmp_path) as fleet:
        await until(lambda: states(fleet) == {A: "left out", B: "up"})
        # The others have gone on with A, while this worker did not run.
        (tmp_path / "model-0").write_text(json.dumps({A: [time.monotonic(), fleet.members[A].identity]}))
        await until(lambda: states(fleet) == {A: "up", B: "left out"})


async def test_a_lost_connection_is_followed_by_a_check(servers, monkeypatch):
    monkeypatch.setattr(fleet_member, "CHECK_PERIOD_S", 3600.0)
    async with fleet_of(servers, [A]) as fleet:
        servers[A].ready = 403
        servers[A].answers = [["begun", LOST]]
        assert states(fleet) == {A: "up"}
        await error_of(answer(fleet))
        await until_state(fleet, A, "down")
        assert "--upstream-header" in fleet.servers()[0].reason


@pytest.mark.slow
async def test_pauses_grow_while_a_server_is_down(servers, monkeypatch):
    monkeypatch.setattr(fleet_member, "_FIRST_PAUSE_S", 0.2)
    monkeypatch.setattr(fleet_member, "_LONGEST_PAUSE_S", 3600.0)
    async with fleet_of(servers, [A]) as fleet:
        servers[A].ready = False
        await until_state(fleet, A, "down")
        while ((await error_of(answer(fleet))).retry_after_s or 0.0) <= 1.0:
            assert fleet.servers()[0].failures < 10
            await asyncio.sleep(0.05)


async def test_only_an_answer_ends_the_growth_of_pauses(servers):
    """A server whose checks succeed and whose requests fail is asked less and less."""
    async with fleet_of(servers, [A]) as fleet:
        servers[A].answers = [[STOPPING], [STOPPING], ["an answer"]]
        for failures in (1, 2):
            await error_of(answer(fleet))
            assert fleet.servers()[0].failures == failures
            await until_state(fleet, A, "up")
        await answer(fleet)
        assert fleet.servers()[0].failures == 0


# --- Load ---


def metrics(sequences, tokens, model="tensorrt_llm"):
    values = {"sequences": sequences, "tokens": tokens}.items()
    lines = [f'deepseek_triton_inflight_{name}{{model="{model}",version="1"}} {value}' for name, value in values]
    return "\n".join(["# HELP deepseek_triton_inflight_sequences text", *lines]).encode()


async def test_work_of_other_gateways_counts(servers, monkeypatch):
    """Not while another server, of any model, has its metrics at the same address."""
    there = ChangingSource("http://host:8001 8002")
    monkeypatch.setattr(model_front, "_LOOK_S", 0.01)
    monkeypatch.setattr(fleet_module, "parse_source", lambda text: parse_source(text) if text else there)
    monkeypatch.setattr(fleet_module, "TritonServer", lambda url, *_, **__: servers[url])
    for port, sequences in ((8002, 9), (9000, 1)):
        servers[f"http://host:{port}"].metrics = metrics(sequences, 90)
    models = [fleet_module.ModelSettings(urls, "") for urls in (("http://host:8000", ""), ("http://host:8000",))]
    state = model_front.GatewayState(fleet_module.GatewaySettings(models))
    await state.start()
    told = [server for model in state.models for server in model.fleet.members.values()]
    await until(lambda: all(member.snapshot().no_metrics for member in told))
    assert {tuple(member.snapshot().others) for member in told} == {(0, 0)}
    there.urls = ["http://host:8001"]  # not Triton's port for HTTP, so nobody knows
    await until(lambda: [bool(member.snapshot().no_metrics) for member in told] == [False, True, False])
    there.urls = ["http://host:8001 9000"]
    await until(lambda: [tuple(member.snapshot().others) for member in told] == [(9, 90), (1, 90), (9, 90)])
    assert {await answer(state.models[0].fleet) for _ in range(20)} == {"http://host:8001"}
    await state.close()


async def test_what_has_ended_since_the_last_look_is_not_of_others(servers, monkeypatch):
    monkeypatch.setattr(fleet_member, "CHECK_PERIOD_S", 3600.0)
    servers[METRICS_OF_A].metrics = metrics(3, 30)
    async with fleet_of(servers, [A], metrics_port=8002) as fleet:
        with (member := fleet.members[A]).working(Load(2, 20)):
            pass
        for others in (Load(1, 10), Load(3, 30)):
            await member._read_metrics()
            assert member.snapshot().others == others


async def test_the_metrics_tell_of_a_dead_engine(servers):
    """Triton before 26.03 says that the model is ready all the same."""
    dead = metrics(9, 90) + b"\n" + metrics(0, 0).replace(b"inflight_sequences", b"ready")
    alive = dead.replace(b"} 0", b"} 1")
    servers[METRICS_OF_A].metrics = alive
    async with fleet_of(servers, [A], metrics_port=8002) as fleet:
        for told, state in ((dead, "down"), (alive, "up")):
            servers[METRICS_OF_A].metrics = told
            await until_state(fleet, A, state)
            assert fleet.servers()[0].others.sequences == (9 if state == "up" else 0)


async def test_without_metrics_only_the_own_work_counts(servers, monkeypatch, caplog):
    monkeypatch.setattr(fleet_member, "_NO_METRICS_PAUSE_S", 0.02)
    texts = (None, b"", b"<html>", metrics(9, 90, "another"), metrics(9, 90).replace(b" 9", b" NaN"))
    for number, text in enumerate(texts, 1):
        servers[METRICS_OF_A].metrics, servers[METRICS_OF_A].refusing = text or b"", text is None
        async with fleet_of(servers, [A], metrics_port=8002) as fleet:
            held = asyncio.Event()
            servers[A].answers = [["begun", held]]
            task = asyncio.create_task(answer(fleet))
            await until(lambda: servers[A].running and fleet.servers()[0].no_metrics)
            assert [(tuple(server.own), tuple(server.others)) for server in fleet.servers()] == [((1, 20), (0, 0))]
            # Of the same request: the server counts its tokens, and the gateway estimates them.
            servers[METRICS_OF_A].metrics, servers[METRICS_OF_A].refusing = metrics(1, 29), False
            await until(lambda: not fleet.servers()[0].no_metrics)
            assert tuple(fleet.servers()[0].others) == (0, 0)
            assert [record.levelname for record in caplog.records].count("WARNING") == number
            held.set()
            await task


# --- Servers that come and go ---


class ChangingSource:
    name = "changing"
    period_s = 0.01

    def __init__(self, *urls):
        self.urls = urls
        self.num_reads = 0

    async def read(self):
        self.num_reads += 1
        if isinstance(self.urls, Exception):
            raise self.urls
        return [ServerAddress(*url.split()) for url in self.urls]


async def test_servers_join_and_leave(servers, caplog):
    source = ChangingSource(A, B)
    async with fleet_of(servers, [source, A]) as fleet:
        assert states(fleet) == {A: "up", B: "up"}
        for error in (SourceError("half a file"), RuntimeError("can't start new thread")):
            source.urls = error
            await until(lambda before=source.num_reads: source.num_reads > before + 3)
            assert caplog.text.count(str(error)) == 1
            assert states(fleet) == {A: "up", B: "up"}

        source.urls = URLS
        await until_state(fleet, C, "up")
        held = asyncio.Event()
        servers[B].answers = [["begun", held, "and ended"]]
        tasks = []
        while not servers[B].running:
            tasks.append(asyncio.create_task(answer(fleet)))
            await asyncio.sleep(0.01)
        source.urls = [C]
        await until(lambda: fleet.servers()[-1].leaving)
        assert [server.url for server in fleet.servers() if not server.leaving] == [A, C]
        for _ in range(20):
            assert await answer(fleet) in (A, C)
        assert not servers[B].closed
        held.set()
        assert "begunand ended" in await asyncio.gather(*tasks)
        await until(lambda: servers[B].closed)
        assert set(states(fleet)) == {A, C}


async def test_a_list_that_is_wrong_from_the_start_is_told_once(servers, caplog):
    (source := ChangingSource()).urls = SourceError("no list")
    async with fleet_of(servers, [source]) as fleet:
        await until(lambda: source.num_reads > 3)
        assert (caplog.text.count("no list"), fleet.no_servers) == (1, "no list")
        source.urls = [A]
        await until(lambda: not fleet.no_servers)


async def test_a_server_leaves_and_comes_back_while_it_finishes(servers):
    source = ChangingSource(A)
    async with fleet_of(servers, [source]) as fleet:
        held = asyncio.Event()
        servers[A].answers = [["begun", held]]
        task = asyncio.create_task(answer(fleet))
        await until(lambda: servers[A].running)
        source.urls = [B]
        await until_state(fleet, B, "up")
        source.urls = [A]
        await until(lambda: len(fleet.servers()) == 3 or states(fleet).keys() == {A})
        await until(lambda: fleet.servers()[0].state == "up")
        assert await answer(fleet) == A
        held.set()
        assert await task == "begun"
