"""What a key's limits count, over real sockets: answers that are left before their end, and several answers at once."""

import re

import httpx
import pytest

from deepseek_triton_tools.gateway.guard import rate_table
from deepseek_triton_tools.gateway.guard.api_keys import new_key
from support.leaving_client import leaving
from support.raw_triton import RawTriton, answer, event, gateway_before
from support.waiting import wait_for

LIMIT = 60_000
PROMPT = "word " * 16_000
"""20,000 tokens by its bytes."""
LAST = event(finish_reason="stop", num_input_tokens=3, num_output_tokens=2)


@pytest.fixture
def triton():
    with RawTriton().serving() as triton:
        yield triton


@pytest.fixture
def client(triton, tmp_path, monkeypatch):
    """Of a key whose budget is not refilled in any time that a test may take."""
    monkeypatch.setattr(rate_table, "_MINUTE_S", 1e9)
    key, line = new_key("ann")
    (tmp_path / "keys").write_text(f"{line} tokens_per_minute={LIMIT}")
    with (
        gateway_before(triton, keys_file=tmp_path / "keys") as address,
        httpx.Client(base_url=address, headers={"Authorization": f"Bearer {key}"}, timeout=60) as client,
    ):
        yield client


def leave(client, triton, path, body, until):
    """Ask, and close the connection when these bytes have come. Returns how many tokens the key has lost by it."""
    headers = {"Authorization": client.headers["authorization"]}
    with leaving(f"{client.base_url}".rstrip("/") + path, body, until=until, headers=headers):
        wait_for(lambda: triton.asked)
    wait_for(lambda: re.search(r"clients_left_total\{.*\} 1.0", client.get("/metrics").text))
    return used(client, triton)


def used(client, triton):
    triton.script = answer(event(output_ids=[1]))
    asked = client.post("/tokenize", json={"prompt": "Hi"})
    return LIMIT - int(asked.headers["x-ratelimit-remaining-tokens"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/responses", {"input": PROMPT}),
    ],
)
def test_a_stream_that_is_left_is_charged_as_far_as_it_came(client, triton, path, prompt):
    def long_answer(wire):
        wire.head()
        counts = {name: 20_000 for name in ("num_output_tokens",) if triton.asked[0].get(f"return_{name}")}
        wire.chunk(event(text_output="Hello", **counts))
        wire.wait_for_stop()
        wire.chunk(b"")

    triton.script = long_answer
    lost = leave(client, triton, path, {**prompt, "stream": True}, b"Hello")
    assert 40_000 <= lost < 40_200


@pytest.mark.slow
def test_an_answer_that_nobody_waits_for_is_charged_with_its_prompt(client, triton):
    def silent(wire):
        wire.wait_for_stop()
        answer(event(error="[E_CANCELLED] the client had gone"))(wire)

    triton.script = silent
    lost = leave(client, triton, "/v1/completions", {"prompt": PROMPT, "max_tokens": 9000}, b"")
    assert 20_000 <= lost < 20_200


@pytest.mark.slow
def test_a_request_that_the_server_refuses_is_free(client, triton):
    triton.script = answer(event(error="[E_OVERLOADED] the queue is full"))
    assert client.post("/v1/completions", json={"prompt": PROMPT}).status_code == 429
    assert used(client, triton) < 100


@pytest.mark.slow
def test_prompts_that_ran_beside_one_that_is_refused_are_charged(client, triton):
    def bad_one_last(wire):
        if next(asked for asked in triton.asked if asked["id"] == wire.request_id)["text_input"] == "bad":
            wait_for(lambda: len(triton.asked) == 3)
            answer(event(error="[E_INVALID_ARGUMENT] text_input: bad"))(wire)
        else:
            wire.wait_for_stop()
            answer(event(error="[E_CANCELLED] stopped"))(wire)

    triton.script = bad_one_last
    asked = client.post("/v1/completions", json={"prompt": [PROMPT, PROMPT, "bad"], "max_tokens": 1000})
    assert asked.status_code == 400
    assert 40_000 <= used(client, triton) < 40_200


@pytest.mark.slow
def test_answers_that_lost_against_the_best_are_charged(client, triton):
    triton.script = answer(event(text_output="x", finish_reason="stop", num_input_tokens=3, num_output_tokens=1000))
    asked = client.post("/v1/completions", json={"prompt": "Hi", "best_of": 40, "n": 1})
    assert asked.json()["usage"]["completion_tokens"] == 1000
    assert 40_000 <= used(client, triton) < 40_200


@pytest.mark.slow
def test_every_answer_of_several_is_reserved(client, triton):
    triton.script = answer(*(event(sequence_index=number, finish_reason="stop") for number in range(3)))
    asked = client.post("/v1/completions", json={"prompt": "Hi", "n": 3, "max_tokens": 10_000})
    assert LIMIT - int(asked.headers["x-ratelimit-remaining-tokens"]) > 30_000
