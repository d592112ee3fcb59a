"""Many requests at once: in a batch, and of many threads or tasks that share a client; with all kinds of client."""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest

from deepseek_triton_client import DeepseekTritonError, InvalidRequest, Overloaded, Retries, SamplingParams
from deepseek_triton_tools.server.server_process import ServerProcess
from support.client_kinds import ClientKind
from support.waiting import PATIENCE_S
from support.wire import PROMPT, generated

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6}


@cache
def expected(server: ServerProcess, prompt: str, max_tokens: int = 6) -> str:
    return generated(server, prompt, max_tokens=max_tokens)


@pytest.fixture
def client(client_kind: ClientKind, trtllm_server: ServerProcess) -> Iterator[Any]:
    with client_kind.client(trtllm_server) as opened:
        yield opened


def test_answers_come_in_the_order_of_the_requests(trtllm_server, client):
    """Each is shorter than the one before, so the last would come first."""
    requests = [{"prompt": f"p{number}", "max_tokens": 24 - 2 * number} for number in range(12)]
    wanted = [expected(trtllm_server, f"p{number}", 24 - 2 * number) for number in range(12)]

    for concurrency in (4, 64):
        answers = client.generate_many(requests, concurrency=concurrency, temperature=0)
        assert [answer.text for answer in answers] == wanted
    assert list(client.generate_many([])) == []


def test_requests_of_every_kind(trtllm_server, client):
    messages = [{"role": "user", "content": "hi"}]
    requests = [PROMPT, [0, 70, 71], {"messages": messages, "request_id": "job-7"}, {"prompt": PROMPT, "max_tokens": 3}]

    text, ids, chat, short = client.generate_many(requests, params=SamplingParams(**GREEDY))

    assert text.text == expected(trtllm_server, PROMPT)
    assert ids.text == client.generate([0, 70, 71], **GREEDY).text
    assert (chat.text, chat.request_id) == (client.chat(messages, **GREEDY).text, "job-7")
    assert short.num_output_tokens == 3


def test_requests_are_read_as_answers_leave(client):
    """There is no end to them."""
    read = itertools.count()
    answers = client.generate_many((f"p{number}" for number in read), concurrency=2, **GREEDY)

    for _ in range(5):
        assert next(answers).num_output_tokens == 6
    answers.close()

    assert next(read) <= 5 + 2 * 8 + 2


def test_errors_in_place(client):
    requests: list[Any] = [
        "a",
        {"prompt": "b", "top_p": 2.0, "request_id": "job-2"},
        {"prompt": "c", "temprature": 1},
        {"nothing": 1},
        {"prompt": "d", "messages": []},
        7,
        "e",
    ]

    answers = list(client.generate_many(requests, return_errors=True, **GREEDY))

    kinds = [isinstance(answer, DeepseekTritonError) for answer in answers]
    assert kinds == [False, True, True, True, True, True, False]
    assert {type(answer) for answer in answers[1:6]} == {InvalidRequest}
    assert (answers[1].code, answers[1].request_id) == ("E_INVALID_ARGUMENT", "job-2")
    assert "did you mean 'temperature'" in str(answers[2])


def test_the_first_error_ends_it(client):
    answers = client.generate_many(["a", {"prompt": "b", "top_p": 2.0}, "c"], concurrency=1, **GREEDY)

    assert next(answers).num_output_tokens == 6
    with pytest.raises(InvalidRequest, match="top_p"):
        next(answers)
    assert list(answers) == []
    assert _threads() == []


def test_no_more_are_under_way_than_asked_for_and_each_is_tried_again(client_kind, small_server):
    """The server has one place, and refuses whoever comes while it is taken."""
    patient = Retries(attempts=1000, initial_s=0.02, max_s=0.05)
    with client_kind.client(small_server, model_version="1", retries=patient) as client:
        assert len(list(client.generate_many(["x"] * 6, concurrency=3, max_tokens=2))) == 6
    with client_kind.client(small_server, model_version="1", retries=Retries(attempts=1)) as client:
        assert len(list(client.generate_many(["x"] * 8, concurrency=1, max_tokens=2))) == 8
        with pytest.raises(Overloaded):
            list(client.generate_many(["x"] * 6, concurrency=6, max_tokens=40))


@pytest.mark.parametrize("client_kind", [("http", "async"), ("grpc", "async")], ids=" ".join, indirect=True)
def test_an_asynchronous_source(trtllm_server, client):
    async def requests() -> AsyncIterator[str]:
        for number in range(4):
            await asyncio.sleep(0)
            yield f"p{number}"

    answers = client.generate_many(requests(), **GREEDY)

    assert [answer.text for answer in answers] == [expected(trtllm_server, f"p{number}") for number in range(4)]


def _threads() -> list[str]:
    """Those that stay, but for the one of all batches."""
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("deepseek-triton")]
    for thread in ours:
        if thread.name == "deepseek-triton-requests":
            thread.join(PATIENCE_S)
    return [thread.name for thread in ours if thread.is_alive() and thread.name != "deepseek-triton-batches"]


# --- Shared ---


def at_once(client_kind: ClientKind, client: Any, prompts: list[str]) -> list[str]:
    """Each from a thread, or a task, of its own; every other one streamed."""

    async def ask_all() -> list[str]:
        return list(await asyncio.gather(*(ask(number, prompt) for number, prompt in enumerate(prompts))))

    async def ask(number: int, prompt: str) -> str:
        if number % 2:
            return (await client.client.generate(prompt, **GREEDY)).text
        async with client.client.stream(prompt, **GREEDY) as stream:
            return "".join([chunk.text async for chunk in stream])

    def ask_blocking(number: int, prompt: str) -> str:
        if number % 2:
            return client.generate(prompt, **GREEDY).text
        with client.stream(prompt, **GREEDY) as stream:
            return "".join(map(str, stream))

    if client_kind.style == "async":
        return client_kind.loop.run(ask_all())
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(ask_blocking, range(len(prompts)), prompts))


def test_32_share_a_client(client_kind, trtllm_server, client):
    prompts = [f"p{number}" for number in range(32)]

    for _ in range(2):
        texts = at_once(client_kind, client, prompts)
        assert texts == [expected(trtllm_server, prompt) for prompt in prompts]
