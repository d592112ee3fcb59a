"""A fleet over real sockets whose servers die, each of its own or of a request."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from support.raw_triton import RawTriton, Script, Wire, answer, event, gateway_before, refusal
from support.waiting import wait_for

ANSWER = answer(event(text_output="Hello"), event(finish_reason="stop", num_output_tokens=1))
STOPPING = refusal(503, "[E_UNAVAILABLE] the server is exiting; send the request to another one")
ENGINE_DIED = refusal(503, "[E_UNAVAILABLE] CUDA error: an illegal memory access")


@pytest.fixture
def tritons() -> Iterator[list[RawTriton]]:
    with ExitStack() as stack:
        tritons = [stack.enter_context(RawTriton().serving()) for _ in range(4)]
        for triton in tritons:
            triton.script = ANSWER
        yield tritons


def ask(address: str, prompt: str = "Hi", **fields: object) -> httpx.Response:
    return httpx.post(f"{address}/v1/completions", json={"prompt": prompt, **fields}, timeout=60)


def num_up(address: str) -> int:
    [model] = httpx.get(f"{address}/fleet").json()["models"]
    return sum(server["state"] == "up" for server in model["servers"])


def dying(triton: RawTriton, of: str = "poison") -> Script:
    def die(wire: Wire) -> None:
        if of in str(triton.asked[-1]):
            triton.die()
            wire.close()
        else:
            ANSWER(wire)

    return die


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_kills_servers_takes_two_at_most(tritons: list[RawTriton], stream: bool) -> None:
    for triton in tritons:
        triton.script = dying(triton)
    with gateway_before(*tritons) as address:
        wait_for(lambda: num_up(address) == 4)
        ask(address)  # so that one has a connection that was used

        refused = ask(address, "poison", stream=stream)

        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert sum("poison" in str(triton.asked) for triton in tritons) == 2
        assert num_up(address) == 2
        assert all(ask(address, f"question {number}").status_code == 200 for number in range(8))


def test_a_request_that_kills_engines_takes_two_at_most(tritons: list[RawTriton]) -> None:
    for triton in tritons:
        triton.script = ENGINE_DIED
    with gateway_before(*tritons) as address:
        assert ask(address).status_code == 503
    assert sum(len(triton.asked) for triton in tritons) == 2


def test_servers_that_are_being_stopped_have_not_died(tritons: list[RawTriton]) -> None:
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


def test_a_server_that_dies_loses_nothing_that_had_not_begun(tritons: list[RawTriton]) -> None:
    with gateway_before(*tritons) as address:
        for triton in tritons[:3]:
            triton.clear()
            triton.script = dying(triton, of="question")
            for number in itertools.count():
                assert ask(address, f"question {number}").json()["choices"][0]["text"] == "Hello"
                if triton.asked:
                    break
        assert num_up(address) == 1
