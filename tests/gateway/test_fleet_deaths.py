"""A fleet over real sockets whose servers die, each of its own or of a request."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Barrier, Event

import httpx
import pytest

from deepseek_triton_tools.gateway import fleet_member
from support.raw_triton import INFO, RawTriton, answer, event, gateway_before
from support.waiting import PATIENCE_S, wait_for

ANSWER = answer(event(text_output="Hello"), event(finish_reason="stop", num_output_tokens=1))


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
def test_a_request_that_kills_servers_takes_two_at_most(tritons, caplog):
    for triton in tritons:
        triton.script = dying(triton)
    with gateway_before(*tritons) as address:
        wait_for(lambda: num_up(address) == 4)
        ask(address)  # so that one has a connection that was used

        refused = ask(address, "poison", stream=True)

        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "2 have died with it, so no more are asked" in caplog.text
        assert sum("poison" in str(triton.asked) for triton in tritons) == 2
        assert num_up(address) == 2
        assert all(ask(address, f"question {number}").status_code == 200 for number in range(8))


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


@pytest.mark.slow
def test_generation_servers_do_all_of_a_request_while_no_context_server_is_up(tritons, caplog):
    for triton in tritons:
        triton.info = {**INFO, "fields": {"request_type": ""}}
    with gateway_before(*tritons[2:], contexts=tuple(tritons[:2])) as address:
        for context in tritons[:2]:
            context.die()
        for number in range(4):
            assert ask(address, f"question {number}").json()["choices"][0]["text"] == "Hello"
        wait_for(lambda: "no context server is up" in caplog.text)
    assert caplog.text.count("generation server") == 1
    requests = [request for triton in tritons[2:] for request in triton.asked]
    assert all("request_type" not in request for request in requests if not request["id"].startswith("canary-"))


# --- Servers that freeze ---


class FreezingTriton(RawTriton):
    """Its answers begin where the prompt says so, and never end. Frozen, it answers nothing at all."""

    def __init__(self):
        super().__init__()
        self.got, self.ended = Event(), Event()
        self.is_frozen = False
        self.script = self._begin

    def _begin(self, wire):
        if "begin" in str(self.asked[-1]):
            wire.head()
            wire.chunk(event(text_output="Hel"))
        self.got.set()
        self.ended.wait(PATIENCE_S)

    def respond(self, connection, head, body):
        if self.is_frozen:
            self.ended.wait(PATIENCE_S)
            return False
        return super().respond(connection, head, body)


@pytest.fixture
def frozen(monkeypatch):
    monkeypatch.setattr(fleet_member, "CHECK_PERIOD_S", 0.1)
    with FreezingTriton().serving() as triton:
        yield triton
        triton.ended.set()


@pytest.fixture
def freeze(frozen, monkeypatch):
    """With the request that it has got. From then on checks wait for a short time only."""

    def freeze():
        assert frozen.got.wait(PATIENCE_S)
        frozen.is_frozen = True
        monkeypatch.setattr(fleet_member, "_ANSWER_S", 0.2)

    return freeze


@pytest.mark.slow
def test_a_request_that_a_frozen_server_has_not_begun_goes_to_another(frozen, freeze, tritons):
    with gateway_before(frozen, tritons[0]) as address, ThreadPoolExecutor(1) as pool:
        wait_for(lambda: num_up(address) == 2)
        for number in itertools.count():
            asking = pool.submit(ask, address, f"question {number}")
            wait_for(lambda asking=asking: asking.done() or frozen.got.is_set())
            if not asking.done():
                break
        freeze()
        assert asking.result().json()["choices"][0]["text"] == "Hello"
        assert f"question {number}" in str(tritons[0].asked[-1])


@pytest.mark.slow
def test_a_stream_that_a_frozen_server_has_begun_ends_with_one_error(frozen, freeze):
    with gateway_before(frozen) as address:
        body = {"prompt": "begin", "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as response:
            lines = filter(None, response.iter_lines())
            assert '"Hel"' in next(lines)
            freeze()
            [error] = lines
        assert '"code":"bad_gateway"' in error


@pytest.mark.slow
def test_a_frozen_server_that_has_left_the_list_is_watched_too(frozen, freeze, tritons, tmp_path):
    listed = tmp_path / "servers"
    listed.write_text(frozen.url)
    with gateway_before(urls=(f"file:{listed}",)) as address, ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask, address)
        assert frozen.got.wait(PATIENCE_S)
        listed.write_text(tritons[0].url)
        wait_for(lambda: (tritons[0].url, "up") in [(server["url"], server["state"]) for server in servers(address)])
        assert [server["url"] for server in servers(address) if server["leaving"]] == [frozen.url]
        freeze()
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
