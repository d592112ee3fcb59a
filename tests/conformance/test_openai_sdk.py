"""openai-python, blocking and asynchronous, against the gateway with the tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from conformance.asked import (
    BERLIN,
    BERLIN_ANSWER,
    BERLIN_ARGUMENTS,
    BERLIN_RESULT,
    FRANCE,
    PARIS,
    SUM,
    SUM_ANSWER,
    THINKING,
    THOUGHT,
    TIME_TOOL,
    WEATHER_TOOL,
)

WEATHER_NAME = WEATHER_TOOL["function"]["name"]
NAMED = {"type": "function", "function": {"name": WEATHER_NAME}}


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def async_client(base_url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def model(model_name: str) -> str:
    return model_name


# --- models -----------------------------------------------------------------------------------------------------------


def test_the_model_is_listed_and_found_by_its_name(client: OpenAI, model: str) -> None:
    found = client.models.retrieve(model)

    assert (found.id, found.object) == (model, "model")
    assert found.created > 0
    assert found.owned_by


async def test_models_are_listed_asynchronously(async_client: AsyncOpenAI, model: str) -> None:
    assert model in [found.id async for found in async_client.models.list()]


def test_a_model_that_is_not_served_is_not_found(client: OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-nothing", messages=FRANCE)

    assert (caught.value.code, caught.value.type) == ("model_not_found", "invalid_request_error")
    assert model in caught.value.message


# --- chat -------------------------------------------------------------------------------------------------------------


def test_a_chat_is_answered(client: OpenAI, model: str) -> None:
    completion = client.chat.completions.create(model=model, messages=FRANCE, temperature=0)

    [choice] = completion.choices
    assert (choice.message.role, choice.message.content) == ("assistant", PARIS)
    assert (choice.finish_reason, choice.message.tool_calls, choice.message.refusal) == ("stop", None, None)
    usage = completion.usage
    assert usage is not None
    assert usage.prompt_tokens > 0
    assert usage.completion_tokens > 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert completion.model == model
    assert completion.id.startswith("chatcmpl-")


async def test_a_chat_is_answered_asynchronously(async_client: AsyncOpenAI, model: str) -> None:
    completion = await async_client.chat.completions.create(model=model, messages=FRANCE, temperature=0)

    assert completion.choices[0].message.content == PARIS


def test_a_chat_streams(client: OpenAI, model: str) -> None:
    with client.chat.completions.create(model=model, messages=FRANCE, temperature=0, stream=True) as stream:
        chunks = list(stream)

    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == PARIS
    assert [delta.role for delta in deltas if delta.role] == ["assistant"]
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert len({chunk.id for chunk in chunks}) == len({chunk.created for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)
    assert len(chunks) > 3


async def test_a_chat_streams_asynchronously(async_client: AsyncOpenAI, model: str) -> None:
    stream = await async_client.chat.completions.create(model=model, messages=FRANCE, temperature=0, stream=True)

    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == PARIS


def test_the_last_chunk_has_the_usage_of_the_whole_answer(client: OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": FRANCE, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    without = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": False}))
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))

    assert chunks[-1].choices == []
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.choices for chunk in without)


def test_the_stream_helper_puts_an_answer_together(client: OpenAI, model: str) -> None:
    with client.chat.completions.stream(model=model, messages=FRANCE, temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()

    assert text == PARIS
    assert final.choices[0].message.content == PARIS
    assert final.choices[0].finish_reason == "stop"


async def test_the_stream_helper_works_asynchronously(async_client: AsyncOpenAI, model: str) -> None:
    async with async_client.chat.completions.stream(model=model, messages=FRANCE, temperature=0) as stream:
        final = await stream.get_final_completion()

    assert final.choices[0].message.content == PARIS


def test_max_tokens_ends_with_length(client: OpenAI, model: str) -> None:
    for limit in ({"max_tokens": 2}, {"max_completion_tokens": 2}):
        completion = client.chat.completions.create(model=model, messages=FRANCE, temperature=0, **limit)
        assert completion.choices[0].finish_reason == "length"
        assert completion.usage is not None
        assert completion.usage.completion_tokens == 2


def test_several_choices(client: OpenAI, model: str) -> None:
    completion = client.chat.completions.create(model=model, messages=FRANCE, n=3, temperature=0.01)
    chunks = list(client.chat.completions.create(model=model, messages=FRANCE, n=3, temperature=0.01, stream=True))

    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert {choice.message.content for choice in completion.choices} == {PARIS}
    texts = ["", "", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [PARIS] * 3


def test_logprobs(client: OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": FRANCE, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**asked).choices[0].logprobs
    chunks = list(client.chat.completions.create(**asked, stream=True))

    assert whole is not None
    assert whole.content is not None
    assert "".join(token.token for token in whole.content).startswith(PARIS)
    for token in whole.content:
        assert token.logprob <= 0
        assert bytes(token.bytes or []).decode(errors="replace") == token.token
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
    streamed = [
        token
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for token in choice.logprobs.content or []
    ]
    assert [token.token for token in streamed] == [token.token for token in whole.content]
    assert [token.logprob for token in streamed] == pytest.approx([token.logprob for token in whole.content], abs=1e-5)


# --- thinking ---------------------------------------------------------------------------------------------------------


def test_reasoning_stands_beside_the_answer(client: OpenAI, model: str) -> None:
    completion = client.chat.completions.create(model=model, messages=SUM, temperature=0, extra_body=THINKING)

    message = completion.choices[0].message
    assert message.content == SUM_ANSWER
    assert message.reasoning_content.endswith(THOUGHT)  # type: ignore[attr-defined]
    assert completion.usage is not None
    assert completion.usage.completion_tokens_details is not None
    assert 0 < (completion.usage.completion_tokens_details.reasoning_tokens or 0) < completion.usage.completion_tokens


def test_deepseeks_own_switch_turns_thinking_on(client: OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": SUM, "temperature": 0}
    on = client.chat.completions.create(**asked, extra_body={"thinking": {"type": "enabled"}})
    off = client.chat.completions.create(**asked, extra_body={"thinking": {"type": "disabled"}})

    assert on.choices[0].message.reasoning_content.endswith(THOUGHT)  # type: ignore[attr-defined]
    assert not getattr(off.choices[0].message, "reasoning_content", None)
    assert off.choices[0].message.content


def test_reasoning_streams_before_the_answer(client: OpenAI, model: str) -> None:
    stream = client.chat.completions.create(model=model, messages=SUM, temperature=0, extra_body=THINKING, stream=True)
    parts = [
        (getattr(chunk.choices[0].delta, "reasoning_content", None), chunk.choices[0].delta.content) for chunk in stream
    ]

    assert "".join(reasoning or "" for reasoning, _ in parts).endswith(THOUGHT)
    assert "".join(content or "" for _, content in parts) == SUM_ANSWER
    first_content = next(place for place, (_, content) in enumerate(parts) if content)
    assert not any(reasoning for reasoning, _ in parts[first_content + 1 :])


def test_an_answer_with_its_reasoning_is_taken_back(client: OpenAI, model: str) -> None:
    first = client.chat.completions.create(model=model, messages=SUM, temperature=0, extra_body=THINKING)
    history = [*SUM, first.choices[0].message.model_dump(), *FRANCE]
    second = client.chat.completions.create(model=model, messages=history, temperature=0)

    assert second.choices[0].finish_reason == "stop"
    assert second.choices[0].message.content


# --- tools ------------------------------------------------------------------------------------------------------------


def test_a_tool_is_called_and_its_result_is_told(client: OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "tools": [WEATHER_TOOL], "temperature": 0}
    completion = client.chat.completions.create(messages=BERLIN, **asked)

    [choice] = completion.choices
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == (WEATHER_NAME, BERLIN_ARGUMENTS)
    result = {"role": "tool", "tool_call_id": call.id, "content": BERLIN_RESULT}
    told = client.chat.completions.create(messages=[*BERLIN, choice.message, result], **asked)
    assert (told.choices[0].message.content, told.choices[0].finish_reason) == (BERLIN_ANSWER, "stop")


def test_a_call_streams(client: OpenAI, model: str) -> None:
    chunks = list(
        client.chat.completions.create(
            model=model, messages=BERLIN, tools=[WEATHER_TOOL, TIME_TOOL], temperature=0, stream=True
        )
    )
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]

    assert {call.index for call in calls} == {0}
    assert [call.function.name for call in calls if call.function and call.function.name] == [WEATHER_NAME]
    assert len([call.id for call in calls if call.id]) == 1
    arguments = "".join(call.function.arguments or "" for call in calls if call.function)
    assert json.loads(arguments) == BERLIN_ARGUMENTS
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("tool_choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
def test_the_stream_helper_puts_calls_together(client: OpenAI, model: str, tool_choice: Any) -> None:
    asked: dict[str, Any] = {"model": model, "messages": BERLIN, "tools": [WEATHER_TOOL], "tool_choice": tool_choice}
    with client.chat.completions.stream(**asked, temperature=0) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()

    assert [(event.name, json.loads(event.arguments)) for event in done] == [(WEATHER_NAME, BERLIN_ARGUMENTS)]
    [call] = final.choices[0].message.tool_calls or []
    assert (call.function.name, json.loads(call.function.arguments)) == (WEATHER_NAME, BERLIN_ARGUMENTS)
    assert call.id
    assert final.choices[0].finish_reason == "tool_calls"
    whole = client.chat.completions.create(**asked, temperature=0)
    [same] = whole.choices[0].message.tool_calls or []
    assert (same.function.name, json.loads(same.function.arguments)) == (WEATHER_NAME, BERLIN_ARGUMENTS)


def test_no_tool_is_called_where_none_may_be(client: OpenAI, model: str) -> None:
    completion = client.chat.completions.create(
        model=model, messages=BERLIN, tools=[WEATHER_TOOL], tool_choice="none", temperature=0
    )

    assert not completion.choices[0].message.tool_calls
    assert completion.choices[0].finish_reason == "stop"
    assert "tool▁call" not in (completion.choices[0].message.content or "")


def test_parse_reads_the_arguments_of_a_strict_tool(client: OpenAI, model: str) -> None:
    class get_weather(BaseModel):
        city: str

    parsed = client.chat.completions.parse(
        model=model, messages=BERLIN, tools=[openai.pydantic_function_tool(get_weather)], temperature=0
    )

    [call] = parsed.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == get_weather(city="Berlin")


# --- completions ------------------------------------------------------------------------------------------------------


def test_a_completion(client: OpenAI, model: str) -> None:
    prompt = "The capital of France is"
    whole = client.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=40)
    chunks = list(client.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=40, stream=True))

    assert whole.choices[0].text.startswith(" Paris")
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason
    assert whole.id.startswith("cmpl-")
    assert whole.object == "text_completion"


async def test_a_completion_asynchronously(async_client: AsyncOpenAI, model: str) -> None:
    whole = await async_client.completions.create(model=model, prompt="7 + 5 =", temperature=0, max_tokens=10)

    assert whole.choices[0].text.startswith(" 12.")


def test_several_prompts(client: OpenAI, model: str) -> None:
    prompts = ["The capital of France is", "7 + 5 ="]
    completion = client.completions.create(model=model, prompt=prompts, temperature=0.01, max_tokens=10, n=2)

    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in completion.choices]
    assert texts[0] == texts[1]
    assert texts[0].startswith(" Paris")
    assert texts[2] == texts[3]
    assert texts[2].startswith(" 12.")


def test_echo_with_logprobs(client: OpenAI, model: str) -> None:
    prompt = "The capital of France is"
    completion = client.completions.create(
        model=model, prompt=prompt, temperature=0, max_tokens=3, echo=True, logprobs=1
    )

    [choice] = completion.choices
    assert choice.text.startswith(prompt + " Paris")
    found = choice.logprobs
    assert found is not None
    lengths = {len(part or []) for part in (found.tokens, found.token_logprobs, found.text_offset, found.top_logprobs)}
    assert lengths == {len(found.tokens or [])}
    assert (found.token_logprobs or [0])[0] is None


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED, "tools": [TIME_TOOL]}, "tool_choice"),
        ({"n": 0}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_field_is_named(client: OpenAI, model: str, change: dict[str, Any], param: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": FRANCE, "max_tokens": 5}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**asked | change)

    assert caught.value.type == "invalid_request_error"
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)
    assert param in caught.value.message


def test_a_prompt_that_is_too_long_is_refused_with_openais_code(client: OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "word " * 20_000}])

    assert caught.value.code == "context_length_exceeded"


def test_an_unknown_path_is_not_found(client: OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.embeddings.create(model=model, input="x")

    assert caught.value.body is not None


# --- every byte -------------------------------------------------------------------------------------------------------


def test_raw_answers_are_whole_by_the_sdks_own_models(client: OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": BERLIN, "tools": [WEATHER_TOOL], "temperature": 0}
    raw = client.chat.completions.with_raw_response.create(**asked)

    assert raw.headers["content-type"] == "application/json"
    assert raw.headers["x-request-id"]
    assert ChatCompletion.model_validate(raw.http_response.json()).choices[0].message.tool_calls
    with client.chat.completions.with_streaming_response.create(**asked, stream=True) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    assert [ChatCompletionChunk.model_validate_json(line) for line in lines[:-1]]
