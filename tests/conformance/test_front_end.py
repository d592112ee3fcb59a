"""Requests in the shape of the tests of Triton's own OpenAI front end, answered by the gateway.

The rows are in front_end_requests.py. Below them are the functions that need more than a request and its answer.
"""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from conformance.front_end_requests import (
    BIG_BODY_BYTES,
    BOTH_APIS,
    CHAT,
    COMPLETIONS,
    ELSEWHERE,
    MESSAGES,
    NOT_APPLICABLE,
    NUM_FUNCTIONS,
    PROMPT,
    ROWS,
    SHAPES,
    TWICE,
    Row,
)
from conformance.raw_http import post


def test_every_function_has_an_outcome() -> None:
    of_rows = {row.test for row in ROWS}
    named = [*of_rows, *ELSEWHERE, *(name for names in SHAPES.values() for name in names)]
    total = len(named) + len(TWICE) + len(BOTH_APIS) + sum(count for _, count, _ in NOT_APPLICABLE)

    assert len(named) == len(set(named))
    assert total == NUM_FUNCTIONS


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_request_of_the_front_ends_tests(gateway_url: str, model_name: str, row: Row) -> None:
    asked = {"messages": MESSAGES} if row.path == CHAT else {"prompt": PROMPT}
    first = {"model": model_name} | ({} if row.bare else asked)
    responses = [post(gateway_url + row.path, first | body) for body in row.bodies]

    assert [response.status_code for response in responses] == [row.status] * len(responses), responses[-1].text
    row.judge([response.json() for response in responses])


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def client(base_url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)


async def test_completion_streaming(client: AsyncOpenAI, model_name: str) -> None:
    asked: dict[str, Any] = {"model": model_name, "prompt": PROMPT, "max_tokens": 10, "temperature": 0, "seed": 0}
    whole = (await client.completions.create(**asked)).choices[0]
    choices = [chunk.choices[0] async for chunk in await client.completions.create(**asked, stream=True)]

    assert "".join(choice.text for choice in choices) == whole.text
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == [whole.finish_reason]
    assert choices[-1].finish_reason == whole.finish_reason


@pytest.mark.parametrize("fields", [{}, {"stop": "is"}, {"stop": ["is"]}, {"stop": ["is", ".", ","]}], ids=str)
async def test_chat_streaming(client: AsyncOpenAI, model_name: str, fields: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"model": model_name, "messages": MESSAGES, "temperature": 0, "seed": 0, **fields}
    whole = (await client.chat.completions.create(**asked, max_completion_tokens=64)).choices[0]
    stream = await client.chat.completions.create(**asked, max_completion_tokens=64, stream=True)
    chunks = [chunk async for chunk in stream]

    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
    assert "".join(texts) == whole.message.content
    assert len(texts) > 1
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert [reason for reason in reasons if reason] == [reasons[-1]] == [whole.finish_reason]
    assert all(chunk.usage is None for chunk in chunks)


async def test_completion_streaming_usage_option(client: AsyncOpenAI, model_name: str) -> None:
    asked: dict[str, Any] = {"model": model_name, "prompt": PROMPT, "max_tokens": 16, "temperature": 0, "seed": 0}
    whole = await client.completions.create(**asked)
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": False}}
    without = [chunk async for chunk in await client.completions.create(**asked, **options)]
    options["stream_options"] = {"include_usage": True}
    with_usage = [chunk async for chunk in await client.completions.create(**asked, **options)]

    # How many chunks there are is chance: tokens that come together share one.
    assert [chunk.usage for chunk in [*without, *with_usage[:-1]] if chunk.usage] == []
    assert [len(chunk.choices) for chunk in [*without, *with_usage[:-1]] if len(chunk.choices) != 1] == []
    assert with_usage[-1].choices == []
    assert with_usage[-1].usage is not None
    assert whole.usage is not None
    assert with_usage[-1].usage.model_dump() == whole.usage.model_dump()


async def test_stream_options_without_streaming(client: AsyncOpenAI, model_name: str) -> None:
    options: Any = {"stream_options": {"include_usage": True}}
    with pytest.raises(openai.BadRequestError, match="stream_options"):
        await client.completions.create(model=model_name, prompt=PROMPT, **options)
    with pytest.raises(openai.BadRequestError, match="stream_options"):
        await client.chat.completions.create(model=model_name, messages=MESSAGES, **options)


async def test_completion_logprobs(client: AsyncOpenAI, model_name: str) -> None:
    asked: dict[str, Any] = {"model": model_name, "prompt": PROMPT, "logprobs": 3, "max_tokens": 10, "temperature": 0}
    whole = (await client.completions.create(**asked)).choices[0]
    found = [chunk.choices[0] async for chunk in await client.completions.create(**asked, stream=True)]

    assert whole.logprobs is not None
    assert "".join(choice.text for choice in found) == whole.text
    parts = [choice.logprobs for choice in found if choice.logprobs]
    for key in ("tokens", "text_offset"):
        assert [value for part in parts for value in getattr(part, key)] == getattr(whole.logprobs, key)
    streamed = [value for part in parts for value in part.token_logprobs or []]
    assert streamed == pytest.approx(whole.logprobs.token_logprobs, abs=1e-4)


@pytest.mark.parametrize("top_logprobs", [5])
async def test_top_logprobs_requires_logprobs(client: AsyncOpenAI, model_name: str, top_logprobs: int) -> None:
    with pytest.raises(openai.BadRequestError, match="logprobs"):
        await client.chat.completions.create(model=model_name, messages=MESSAGES, top_logprobs=top_logprobs)


async def test_chat_top_logprobs_exceeds_max(client: AsyncOpenAI, model_name: str) -> None:
    with pytest.raises(openai.BadRequestError, match="20"):
        await client.chat.completions.create(model=model_name, messages=MESSAGES, logprobs=True, top_logprobs=25)


async def test_completion_logprobs_exceeds_max(client: AsyncOpenAI, model_name: str) -> None:
    with pytest.raises(openai.BadRequestError, match="logprobs"):
        await client.completions.create(model=model_name, prompt=PROMPT, logprobs=21)


def test_completions_no_model(gateway_url: str, model_name: str) -> None:
    """A gateway with one model needs no name. The front end answers 422."""
    response = post(gateway_url + COMPLETIONS, {"prompt": PROMPT})

    assert response.status_code == 200
    assert response.json()["model"] == model_name


def test_completions_logprobs_zero(gateway_url: str, model_name: str) -> None:
    """OpenAI: 0 asks for the generated tokens' own log-probabilities. The front end takes it for none at all."""
    response = post(gateway_url + COMPLETIONS, {"model": model_name, "prompt": PROMPT, "logprobs": 0, "max_tokens": 5})

    assert response.status_code == 200
    assert len(response.json()["choices"][0]["logprobs"]["token_logprobs"]) == 5


# --- what else it serves ----------------------------------------------------------------------------------------------


def test_not_found(gateway_url: str) -> None:
    assert httpx.get(f"{gateway_url}/does-not-exist").status_code == 404


@pytest.mark.parametrize("path", ["/health/ready", "/ready", "/health"])
def test_startup_success(gateway_url: str, path: str) -> None:
    assert httpx.get(gateway_url + path).status_code == 200


def test_startup_metrics(gateway_url: str) -> None:
    """The gateway's own metrics: Triton's are at each server."""
    response = httpx.get(f"{gateway_url}/metrics")

    assert response.status_code == 200
    assert "deepseek_triton_gateway" in response.text


def test_models_list_and_get(gateway_url: str, model_name: str) -> None:
    [listed] = httpx.get(f"{gateway_url}/v1/models").json()["data"]
    found = httpx.get(f"{gateway_url}/v1/models/{model_name}").json()

    for model in (listed, found):
        assert (model["id"], model["object"]) == (model_name, "model")
        assert model["created"] > 0
        assert model["owned_by"]


@pytest.mark.parametrize("verb", ["load", "unload"])
def test_load_and_unload_rejected(gateway_url: str, model_name: str, verb: str) -> None:
    assert post(f"{gateway_url}/v1/models/{model_name}/{verb}", {}).status_code in (404, 405)


# --- how large a request may be ---------------------------------------------------------------------------------------


JSON_BODY = {"Content-Type": "application/json"}


def over_limit() -> Iterator[bytes]:
    yield b"x" * BIG_BODY_BYTES
    yield b"x"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_body_at_limit_is_not_rejected(gateway_url: str, path: str) -> None:
    response = httpx.post(gateway_url + path, content=b"x" * BIG_BODY_BYTES, headers=JSON_BODY, timeout=60)

    assert response.status_code == 400


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("chunked", [False, True])
def test_body_over_limit_is_rejected(gateway_url: str, path: str, chunked: bool) -> None:
    content = over_limit() if chunked else b"".join(over_limit())
    try:
        response = httpx.post(gateway_url + path, content=content, headers=JSON_BODY, timeout=60)
    except httpx.WriteError:
        return  # the gateway answered and closed before the whole body was sent
    assert response.status_code == 413
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_get_without_body_is_unaffected(gateway_url: str) -> None:
    response = httpx.get(gateway_url + CHAT)

    assert response.status_code == 405
    assert "POST" in response.headers["allow"]


@pytest.mark.parametrize("length", ["not-a-number", "-1", "-1024"])
def test_a_wrong_content_length_is_rejected(gateway_url: str, length: str) -> None:
    connection = http.client.HTTPConnection(urlsplit(gateway_url).netloc)
    connection.putrequest("POST", CHAT)
    connection.putheader("Content-Length", length)
    connection.endheaders()

    assert connection.getresponse().status == 400
    connection.close()
