"""Requests that two servers share, against a cluster that knows which KV caches are held."""

import asyncio
import json
import random
import time
from contextlib import aclosing, asynccontextmanager
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_triton_tools.gateway import fleet_member, shared_generation
from deepseek_triton_tools.gateway.fleet import Fleet
from deepseek_triton_tools.gateway.settings import parse_source
from deepseek_triton_tools.gateway.shared_generation import is_shareable
from deepseek_triton_tools.gateway.triton_call import Call, Part, UpstreamError

CONTEXT = ["http://c0:8000", "http://c1:8000"]
GENERATION = ["http://g0:8000", "http://g1:8000"]
TEXT = "The quick brown fox jumps over the lazy dog."
REFUSED = UpstreamError("connection refused", unprocessed=True)
LOST = UpstreamError("the connection was lost", unprocessed=True, died=True)
OVERLOADED = UpstreamError("full", code="E_OVERLOADED", unprocessed=True)
CONTEXT_LOST = UpstreamError("the KV cache is gone", code="E_CONTEXT_LOST")
INVALID = UpstreamError("top_p", code="E_INVALID_ARGUMENT")
ERRORS = {"refuses": REFUSED, "dies": LOST, "is full": OVERLOADED, "is wrong": INVALID}
ON_THE_WAY = {"is full": OVERLOADED, "dies": LOST}
"""What comes of a request that has been sent, when the client has left already."""
CONTEXT_FATES = ("well", "well", "refuses", "dies", "is full", "dies after answering")
GENERATION_FATES = ("well", "well", "refuses", "dies", "dies after the first token", "dies late", "is full")


class Cluster:
    """Servers of both roles. Each request takes the next fate of its role, and the last one is for all that follow.

    asked: (first letter of the server's name, request_type), without releases. stuck: URLs of servers that answer no
    canary: they refuse it, or are silent.
    """

    def __init__(self, context_fates=("well",), generation_fates=("well",), cuts=(5, 9, 30), first="The"):
        self.fates = {"context": list(context_fates), "generation": list(generation_fates)}
        self.cuts = cuts
        self.first = first
        self.held = set()
        self.asked = []
        self.abilities = {"request_type": ""}
        self.stuck = set()
        self.refuses_canaries = self.releases_kill = False
        self.canaries = self.checks = self.deaths = self._number = 0
        self.metrics = b""
        self.on_metrics = lambda: None

    @property
    def kinds(self):
        return [kind for _, kind in self.asked]

    def fate(self, role):
        fates = self.fates[role]
        fate = fates.pop(0) if len(fates) > 1 else fates[0]
        self.deaths += fate.startswith("dies")
        return fate

    def hold(self):
        self._number += 1
        self.held.add(str(self._number))
        return str(self._number)

    def rest(self):
        """The answer's pieces after the first token."""
        begin = len(self.first)
        for cut in sorted(cut for cut in self.cuts if cut > begin):
            yield TEXT[begin:cut]
            begin = min(cut, len(TEXT))
        yield TEXT[begin:]


class ClusterServer:
    """A connection to one server of the cluster."""

    def __init__(self, url, cluster):
        self.url, self.cluster = url, cluster

    async def generate(self, call):
        if call.request_id.startswith("canary-"):
            self.cluster.canaries += 1
            while self.url in self.cluster.stuck:
                if self.cluster.refuses_canaries:
                    raise OVERLOADED
                await asyncio.sleep(3600)
            return
        request_type = str(call.inputs.get("request_type", ""))
        if not call.request_id.endswith("-release"):
            self.cluster.asked.append((self.url[7], request_type))
        await asyncio.sleep(0)  # it connects
        call.sent.append(self.url)
        answer = self._context() if request_type == "context_only" else self._generation(call, request_type)
        async with aclosing(answer):
            async for parts in answer:
                yield parts

    async def _context(self):
        assert self.url in CONTEXT
        fate = self.cluster.fate("context")
        await asyncio.sleep(0)
        if fate in ERRORS:
            raise ERRORS[fate]
        held = self.cluster.hold()
        yield [Part(text=self.cluster.first, num_output_tokens=1, finish_reason="length", context_phase_params=held)]
        if fate == "dies after answering":
            self.cluster.held.discard(held)
            raise LOST

    async def _generation(self, call, request_type):
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
                call.late([], ON_THE_WAY[fate])
            else:
                self.cluster.held.discard(held)  # an engine fetches the KV cache of an aborted request too
            raise
        if fate in ERRORS:
            raise ERRORS[fate]
        try:
            yield [Part(text=self.cluster.first, num_output_tokens=1)]
        except GeneratorExit:
            self.cluster.held.discard(held)
            raise
        if fate == "dies after the first token":
            raise LOST
        if fate == "hangs after the first token":
            await asyncio.sleep(3600)
        if request_type == "generation_only":
            if held not in self.cluster.held:
                raise CONTEXT_LOST
            self.cluster.held.discard(held)
        for text in self.cluster.rest():
            await asyncio.sleep(0)
            yield [Part(text=text, num_output_tokens=1)]
            if fate == "dies late":
                raise LOST
        yield [Part(finish_reason="stop", num_input_tokens=7)]

    async def ask(self, call):
        return {"model_info": json.dumps({"name": "r1", "checkpoint": "/r1", "fields": self.cluster.abilities})}

    async def get(self, path, *, fresh=False):
        if path != "/metrics":
            self.cluster.checks += 1
            return 200, b""
        self.cluster.on_metrics()
        return 200, self.cluster.metrics

    def heard(self):
        return False

    def abandon(self, reason): ...

    def keep_idle(self, keep): ...

    async def close(self): ...


@pytest.fixture(autouse=True)
def quick_checks(monkeypatch):
    monkeypatch.setattr(shared_generation, "_RELEASE_PAUSE_S", 0.001)
    for name, seconds in {"CHECK_PERIOD_S": 0.01, "_FIRST_PAUSE_S": 0.001, "_LONGEST_PAUSE_S": 0.001}.items():
        monkeypatch.setattr(fleet_member, name, seconds)


@pytest.fixture
def clock(monkeypatch):
    """How many seconds the fleet's clock is ahead."""
    ahead = [0]
    monkeypatch.setattr(fleet_member, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0]))
    return ahead


@asynccontextmanager
async def fleet_of(cluster, **given_settings):
    fleet = Fleet(
        [parse_source(url) for url in GENERATION],
        "tensorrt_llm",
        connect=lambda url: ClusterServer(url, cluster),
        rng=random.Random(1),
        context_sources=[parse_source(url) for url in CONTEXT],
        **given_settings,
    )
    await fleet.start()
    try:
        yield fleet
    finally:
        await fleet.close()


def asked(**inputs):
    return Call({"text_input": "What jumps?" * 9, **inputs}, "id-1", tried=[], context_tried=[])


async def answer_of(fleet, call=None, leave_after=None):
    """The text and the parts. leave_after: the client leaves after so many parts."""
    parts = []
    async with aclosing(fleet.generate(call or asked())) as answer:
        async for several in answer:
            parts += several
            if leave_after is not None and len(parts) >= leave_after:
                break
    return "".join(part.text for part in parts), parts


async def refusal_of(fleet):
    with pytest.raises(UpstreamError) as raised:
        await answer_of(fleet)
    return raised.value


async def settled(cluster):
    """Wait until nothing is held any more."""
    for _ in range(2_000):
        if not cluster.held:
            return
        await asyncio.sleep(0.001)


def states(fleet, which=lambda server: True):
    return {server.state for server in fleet.servers() if which(server)}


async def test_the_first_token_comes_at_once_and_only_once():
    cluster = Cluster()
    async with fleet_of(cluster) as fleet:
        text, parts = await answer_of(fleet)
        assert text == TEXT
        assert (parts[0].text, parts[0].finish_reason, parts[0].context_phase_params) == ("The", "", "")
        assert [part.finish_reason for part in parts if part.finish_reason] == ["stop"]
        assert sum(part.num_output_tokens for part in parts) == len([*cluster.rest()]) + 1
    assert cluster.asked == [("c", "context_only"), ("g", "generation_only")]


def fates(some):
    return st.lists(st.sampled_from(some), min_size=1, max_size=3).map(lambda fates: (*fates, "well"))


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    fates(CONTEXT_FATES),
    fates(GENERATION_FATES),
    st.lists(st.integers(0, len(TEXT)), max_size=4).map(tuple),
    st.sampled_from(["", "T", "The"]),
    st.none() | st.integers(1, 5),
)
def test_whatever_dies_there_is_one_end_and_no_kv_cache_is_held(context, generation, cuts, first, leave_after):
    cluster = Cluster(context, generation, cuts, first)

    async def body():
        async with fleet_of(cluster) as fleet:
            for _ in range(3):
                try:
                    text, parts = await answer_of(fleet, leave_after=leave_after)
                except UpstreamError:
                    continue
                assert TEXT.startswith(text)
                if leave_after is None:
                    assert text == TEXT
                    assert [part.finish_reason for part in parts if part.finish_reason] == ["stop"]
            await settled(cluster)

    asyncio.run(body())
    assert cluster.held == set()


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(fates(["well", "dies", "is full"]), st.integers(0, 40))
def test_a_client_that_leaves_at_any_moment_leaves_no_kv_cache_behind(generation, turns):
    """`turns`: of the event loop, until it leaves."""
    cluster = Cluster(generation_fates=generation)

    async def body():
        async with fleet_of(cluster) as fleet:
            task = asyncio.create_task(answer_of(fleet))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            await settled(cluster)

    asyncio.run(body())
    assert cluster.held == set()


@pytest.mark.parametrize("releases_kill", [False, True])
async def test_a_request_takes_two_servers_down_at_most_whatever_their_roles(releases_kill):
    for context, generation in (
        (("dies",), ("dies",)),
        (("dies", "well"), ("dies",)),
        (("well",), ("dies",)),
        (("well",), ("dies after the first token",)),
        (("dies", "refuses"), ("dies",)),
    ):
        cluster = Cluster(context, generation)
        cluster.releases_kill = releases_kill
        async with fleet_of(cluster) as fleet:
            await refusal_of(fleet)
        assert 2 <= cluster.deaths <= 2 + releases_kill  # a held KV cache is worth the risk of one more
        assert releases_kill or not cluster.held


async def test_a_gateway_that_is_stopped_leaves_no_kv_cache_behind():
    for leave_after in (1, 2):
        cluster = Cluster()
        async with fleet_of(cluster) as fleet:
            await answer_of(fleet, leave_after=leave_after)
        assert cluster.held == set()


async def test_a_client_that_leaves_before_a_refusal_has_come_leaves_no_kv_cache_behind():
    cluster = Cluster(generation_fates=("is full", "well"))
    async with fleet_of(cluster) as fleet:
        task = asyncio.create_task(answer_of(fleet))
        while "generation_only" not in cluster.kinds:
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # it has been sent
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
    assert cluster.held == set()


CONTEXT_ONCE, GENERATION_ONCE = ["c context_only"], ["g generation_only"]
SHARED = CONTEXT_ONCE + GENERATION_ONCE
AGAIN = [*SHARED, "g context_and_generation"]
FATES = [
    (("well",), ("refuses", "well"), "", SHARED + GENERATION_ONCE),
    (("well",), ("dies", "well"), "", SHARED + GENERATION_ONCE),
    (("well",), ("dies after the first token", "well"), "", AGAIN),
    (("dies after answering", "well"), ("well",), "", AGAIN),
    (("well",), ("is wrong", "is wrong", "is wrong", "well"), "E_INVALID_ARGUMENT", SHARED),
    (("well",), ("is full", "is full", "is full", "well"), "E_OVERLOADED", SHARED + GENERATION_ONCE),
    (("refuses",), ("well",), "", [*CONTEXT_ONCE * 2, "g"]),
    (("is full",), ("well",), "E_OVERLOADED", CONTEXT_ONCE * 2),
    (("is wrong",), ("well",), "E_INVALID_ARGUMENT", CONTEXT_ONCE),
]
"""(of the context servers, of the generation servers, the code of the client's error, who is asked for what)"""


async def test_what_the_servers_do_is_the_answer_or_one_error_and_no_kv_cache_is_held():
    found = []
    for context, generation, *_ in FATES:
        cluster, call = Cluster(context, generation), asked()
        async with fleet_of(cluster) as fleet:
            try:
                assert (await answer_of(fleet, call))[0] == TEXT
                code = ""
            except UpstreamError as error:
                code = error.code
            asked_for = [f"{server} {kind}".strip() for server, kind in cluster.asked]
            await settled(cluster)
        assert cluster.held == set()
        # As the access log has it, none of the context servers where a generation server did all.
        assert [url[7] for url in call.context_tried + call.tried] == [server for server, _ in cluster.asked]
        assert bool(call.context_tried) == (asked_for[-1] != "g")
        found.append((context, generation, code, asked_for))
    assert found == FATES


def test_what_two_servers_cant_share_goes_to_one():
    assert is_shareable(asked(), local_prefill_tokens=10)
    table = (
        {"sampling_parameters": '{"n": 2}'},
        {"sampling_parameters": '{"best_of": 3}'},
        {"sampling_parameters": '{"logprobs": 0}'},
        {"sampling_parameters": '{"prompt_logprobs": 1}'},
        {"return_logprobs": True},
        {"task": "tokenize"},
        {"request_type": "context_and_generation"},
        {"sampling_parameters": "{"},
        {"sampling_parameters": '{"guided_json": {"type": "object"}}'},
        {"tools": '[{"type": "function", "function": {"name": "f", "strict": true}}]'},
        {"text_input": "short"},
    )
    assert [inputs for inputs in table if is_shareable(asked(**inputs), local_prefill_tokens=10)] == []


async def test_servers_that_cant_share_are_left_out_by_name():
    cluster = Cluster()
    cluster.abilities = {"request_type": "this engine does whole requests only"}
    async with fleet_of(cluster) as fleet:
        assert fleet.unavailable().told.endswith("0 of 2 are up")  # and none of them loads
        assert all("this engine does whole requests only" in server.reason for server in fleet.servers())


@pytest.mark.parametrize("refuses_canaries", [False, True])
@pytest.mark.parametrize("stuck", [GENERATION, CONTEXT])
async def test_a_stuck_engine_that_says_it_is_ready_is_down(monkeypatch, stuck, refuses_canaries):
    for name, seconds in {"_CANARY_PERIOD_S": 0.0, "_CANARY_S": 0.02, "_AVOIDED_S": 0.001}.items():
        monkeypatch.setattr(fleet_member, name, seconds)
    cluster = Cluster()
    async with fleet_of(cluster) as fleet:

        async def until(state):
            while states(fleet, lambda server: server.url in stuck) != {state}:
                await asyncio.sleep(0.005)

        await asyncio.wait_for(until("up"), 60)
        cluster.stuck, cluster.refuses_canaries = set(stuck), refuses_canaries
        await asyncio.wait_for(until("down"), 60)
        assert states(fleet, lambda server: server.url not in stuck) == {"up"}
        assert all("no token within 0.02 s" in one.reason for one in fleet.servers() if one.url in stuck)
        if stuck == CONTEXT:
            assert (await answer_of(fleet))[0] == TEXT
            assert cluster.asked == [("g", "")]
        cluster.stuck = set()
        await asyncio.wait_for(until("up"), 60)


async def test_a_server_that_is_busy_when_it_is_found_takes_requests():
    """Its canary waits behind the requests of others."""
    cluster = Cluster()
    cluster.stuck = {*CONTEXT, *GENERATION}
    async with fleet_of(cluster) as fleet:
        assert states(fleet) == {"up"}
        while cluster.canaries < 4:
            await asyncio.sleep(0.001)
        assert (await answer_of(fleet))[0] == TEXT
        assert states(fleet) == {"up"}


@pytest.mark.slow
@pytest.mark.parametrize(("fate", "state"), [("well", "up"), ("hangs after the first token", "down")])
async def test_answers_show_that_a_server_works_and_first_tokens_do_not(clock, fate, state):
    """No canary comes back, and ten seconds of the clock lie between the requests."""
    cluster = Cluster(generation_fates=(fate,))
    cluster.stuck = {*CONTEXT, *GENERATION}
    async with fleet_of(cluster) as fleet:

        def of_generation():
            return states(fleet, lambda server: server.role == "generation")

        tasks = []
        while clock[0] < 300 and of_generation() != {"down"}:
            clock[0] += 10
            tasks += [asyncio.create_task(answer_of(fleet)) for _ in range(16)]
            enough = cluster.checks + 16
            while cluster.checks < enough and of_generation() != {"down"}:
                await asyncio.sleep(0.001)
        assert of_generation() == {state}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


METRIC = 'deepseek_triton_%s{model="tensorrt_llm",version="1"} %d\n'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("metric", "working"),
    [("inter_token_latency_seconds_count", "generation"), ("time_to_first_token_seconds_count", "context")],
)
async def test_a_server_whose_metrics_show_work_is_not_stuck(clock, caplog, metric, working):
    """Each look at the metrics takes ten seconds of the clock, and no canary comes back."""
    cluster = Cluster()
    cluster.stuck = {*CONTEXT, *GENERATION}

    def look():
        clock[0] += 10
        cluster.metrics = (METRIC % (metric, clock[0])).encode()

    cluster.on_metrics = look
    async with fleet_of(cluster, metrics_port=8002) as fleet:
        while states(fleet, lambda server: server.role != working) != {"down"} or clock[0] < 1_000:
            await asyncio.sleep(0.001)
        assert states(fleet, lambda server: server.role == working) == {"up"}
        assert not any(f"http://{working[0]}{number} is down" in caplog.text for number in range(2))


async def test_a_context_server_that_is_full_of_held_kv_caches_is_asked_last(monkeypatch):
    monkeypatch.setattr(fleet_member, "CHECK_PERIOD_S", 3600)  # what one check tells holds for two periods
    cluster = Cluster()
    cluster.metrics = (METRIC % ("engine_waiting_requests", 3) + METRIC % ("engine_running_requests", 0)).encode()
    async with fleet_of(cluster, metrics_port=8002) as fleet:
        roles = {(server.role, server.avoided) for server in fleet.servers()}
        assert roles == {("context", True), ("generation", False)}
        assert (await answer_of(fleet))[0] == TEXT
