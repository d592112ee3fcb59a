"""A fleet over real sockets whose servers die, each of its own or of a request."""

import itertools
import multiprocessing
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from threading import Barrier

import httpx
import pytest

from deepseek_triton_tools.gateway.fleet import fleet_member
from support.raw_triton import INFO, RawTriton, answer, event, gateway_before, refusal
from support.waiting import PATIENCE_S, wait_for

ANSWER = answer(event(text_output="Hello"), event(finish_reason="stop", num_output_tokens=1))
STOPPING = refusal(503, "[E_UNAVAILABLE] the server is exiting; send the request to another one")
ENGINE_DIED = refusal(503, "[E_UNAVAILABLE] CUDA error: an illegal memory access")


@pytest.fixture
def tritons():
    with ExitStack() as stack:
        tritons = [stack.enter_context(RawTriton().serving()) for _ in range(4)]
        for triton in tritons:
            triton.script = ANSWER
        yield tritons


def ask(address, prompt="Hi", **fields):
    return httpx.post(f"{address}/v1/completions", json={"prompt": prompt, **fields}, timeout=60)


def servers(address):
    [model] = httpx.get(f"{address}/fleet").json()["models"]
    return model["servers"]


def num_up(address):
    return sum(server["state"] == "up" for server in servers(address))


def dying(triton, of="poison"):
    def die(wire):
        if of in str(triton.asked[-1]):
            triton.die()
            wire.close()
        else:
            ANSWER(wire)

    return die


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_kills_servers_takes_two_at_most(tritons, stream, caplog):
    for triton in tritons:
        triton.script = dying(triton)
    with gateway_before(*tritons) as address:
        wait_for(lambda: num_up(address) == 4)
        ask(address)  # so that one has a connection that was used

        refused = ask(address, "poison", stream=stream)

        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "2 have died with it, so no more are asked" in caplog.text
        assert sum("poison" in str(triton.asked) for triton in tritons) == 2
        assert num_up(address) == 2
        assert all(ask(address, f"question {number}").status_code == 200 for number in range(8))


@pytest.mark.slow
def test_a_request_that_kills_engines_takes_two_at_most(tritons):
    for triton in tritons:
        triton.script = ENGINE_DIED
    with gateway_before(*tritons) as address:
        assert ask(address).status_code == 503
    assert sum(len(triton.asked) for triton in tritons) == 2


@pytest.mark.slow
def test_servers_that_are_being_stopped_have_not_died(tritons):
    """A third one is asked. Each prompt has an order of servers of its own, and some have these two before it."""
    for stopping in tritons[:2]:
        stopping.script = STOPPING
    with gateway_before(*tritons[:3]) as address:
        for number in itertools.count():
            wait_for(lambda: num_up(address) == 3)
            prompt = f"question {number}"
            assert ask(address, prompt).json()["choices"][0]["text"] == "Hello"
            if all(prompt in str(triton.asked) for triton in tritons[:2]):
                break


@pytest.mark.slow
def test_a_server_that_dies_loses_nothing_that_had_not_begun(tritons):
    with gateway_before(*tritons) as address:
        for triton in tritons[:3]:
            triton.clear()
            triton.script = dying(triton, of="question")
            for number in itertools.count():
                assert ask(address, f"question {number}").json()["choices"][0]["text"] == "Hello"
                if triton.asked:
                    break
        assert num_up(address) == 1


# --- Context servers ---


@pytest.fixture
def pairs(tritons):
    """The first two are for contexts."""
    for triton in tritons:
        triton.info = {**INFO, "fields": {"request_type": ""}}
    return tritons


def requests(triton):
    """Those that are no canaries."""
    return [request for request in triton.asked if not request["id"].startswith("canary-")]


@pytest.mark.slow
def test_a_request_is_refused_while_all_context_servers_are_full(pairs):
    full = refusal(503, "[E_OVERLOADED] 256 requests are waiting")
    for context in pairs[:2]:
        context.script = full
    with gateway_before(*pairs[2:], contexts=tuple(pairs[:2])) as address:
        refused = ask(address, "a question")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
    assert [len(requests(triton)) for triton in pairs] == [1, 1, 0, 0]


@pytest.mark.slow
def test_generation_servers_do_all_of_a_request_while_no_context_server_is_up(pairs):
    with gateway_before(*pairs[2:], contexts=tuple(pairs[:2])) as address:
        for context in pairs[:2]:
            context.die()
        for number in range(4):
            assert ask(address, f"question {number}").json()["choices"][0]["text"] == "Hello"
    assert all("request_type" not in request for triton in pairs[2:] for request in requests(triton))


@pytest.mark.slow
def test_a_request_that_kills_context_servers_kills_no_generation_server(pairs, caplog):
    for triton in pairs:
        triton.script = dying(triton)
    with gateway_before(*pairs[2:], contexts=tuple(pairs[:2])) as address:
        assert ask(address, "poison").status_code == 503
        assert num_up(address) == 2
    assert "2 have died with it, so no more are asked" in caplog.text


# --- Servers that freeze ---


def serve_until_told(pipe):
    """A server whose answers begin where the prompt says so, and never end. Tells its URL, and each request."""

    def begin(wire):
        if "begin" in str(triton.asked[-1]):
            wire.head()
            wire.chunk(event(text_output="Hel"))
        pipe.send("asked")
        wire.wait_for_stop()

    with RawTriton().serving() as triton:
        triton.script = begin
        pipe.send(triton.url)
        pipe.recv()


class FrozenTriton(RawTriton):
    """In a process of its own, which `freeze` stops. From then on checks wait for a short time only."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.monkeypatch = monkeypatch

    @contextmanager
    def running(self):
        self.pipe, theirs = multiprocessing.get_context("spawn").Pipe()
        self.process = multiprocessing.get_context("spawn").Process(target=serve_until_told, args=(theirs,))
        self.process.start()
        self.url = self.pipe.recv()
        try:
            yield self
        finally:
            self.process.kill()
            self.process.join()

    def freeze(self):
        """With the request that it has got."""
        assert self.pipe.recv() == "asked"
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)
        self.monkeypatch.setattr(fleet_member, "_ANSWER_S", 0.5)


@pytest.fixture
def frozen(monkeypatch):
    monkeypatch.setattr(fleet_member, "CHECK_PERIOD_S", 0.1)
    with FrozenTriton(monkeypatch).running() as frozen:
        yield frozen


@pytest.mark.slow
def test_a_request_that_a_frozen_server_has_not_begun_goes_to_another(frozen, tritons):
    with gateway_before(frozen, tritons[0]) as address, ThreadPoolExecutor(1) as pool:
        wait_for(lambda: num_up(address) == 2)
        for number in itertools.count():
            asking = pool.submit(ask, address, f"question {number}")
            wait_for(lambda asking=asking: asking.done() or frozen.pipe.poll())
            if not asking.done():
                break
        frozen.freeze()
        assert asking.result().json()["choices"][0]["text"] == "Hello"
        assert f"question {number}" in str(tritons[0].asked[-1])


@pytest.mark.slow
def test_a_stream_that_a_frozen_server_has_begun_ends_with_one_error(frozen):
    with gateway_before(frozen) as address:
        body = {"prompt": "begin", "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as response:
            lines = filter(None, response.iter_lines())
            assert '"Hel"' in next(lines)
            frozen.freeze()
            [error] = lines
        assert '"code":"bad_gateway"' in error


@pytest.mark.slow
def test_a_frozen_server_that_has_left_the_list_is_watched_too(frozen, tritons, tmp_path):
    listed = tmp_path / "servers"
    listed.write_text(frozen.url)
    with gateway_before(urls=(f"file:{listed}",)) as address, ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask, address)
        assert frozen.pipe.poll(PATIENCE_S)
        listed.write_text(tritons[0].url)
        wait_for(lambda: (tritons[0].url, "up") in [(server["url"], server["state"]) for server in servers(address)])
        assert [server["url"] for server in servers(address) if server["leaving"]] == [frozen.url]
        frozen.freeze()
        assert asking.result().json()["choices"][0]["text"] == "Hello"


def in_pieces(triton, wire, turn):
    wire.head()
    for _ in range(fleet_member._SILENT_CHECKS + 2):
        wire.chunk(event(text_output="x"))
        wait_for(lambda before=triton.num_unanswered: triton.num_unanswered > before)
    wire.chunk(event(finish_reason="stop"))
    wire.chunk(b"")


def whole_in_turn(triton, wire, turn):
    wait_for(lambda: triton.num_unanswered >= turn)
    answer(event(text_output="xxxxx"), event(finish_reason="stop"))(wire)


@pytest.mark.slow
@pytest.mark.parametrize("script", [in_pieces, whole_in_turn])
def test_an_answer_that_comes_tells_that_the_server_is_not_frozen(tritons, monkeypatch, script):
    """Its checks stay without an answer, as those of a server with too much to do."""
    monkeypatch.setattr(fleet_member, "CHECK_PERIOD_S", 0.1)
    num_requests = fleet_member._SILENT_CHECKS + 2
    [triton, *_] = tritons

    def be_deaf():
        triton.deaf = True
        monkeypatch.setattr(fleet_member, "_ANSWER_S", 0.2)

    all_asked = Barrier(num_requests, be_deaf, PATIENCE_S)

    def slowly(wire):
        script(triton, wire, all_asked.wait() + 1)

    triton.script = slowly
    with gateway_before(triton) as address, ThreadPoolExecutor(num_requests) as pool:
        for response in pool.map(ask, [address] * num_requests):
            assert response.json()["choices"][0]["text"] == "xxxxx"
