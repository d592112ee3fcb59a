"""LiteLLM with the gateway as provider `openai/`, which is how its proxy is told about it too."""

import json

import litellm
import pytest

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
    WEATHER_TOOL,
)

WEATHER_NAME = WEATHER_TOOL["function"]["name"]


@pytest.fixture
def asked(base_url, model_name):
    return {"model": f"openai/{model_name}", "api_base": base_url, "api_key": "none", "num_retries": 0}


@pytest.mark.sample
async def test_a_chat(asked):
    response = litellm.completion(messages=FRANCE, temperature=0, **asked)
    assert (response.choices[0].message.content, response.choices[0].finish_reason) == (PARIS, "stop")
    assert response.usage.total_tokens == response.usage.prompt_tokens + response.usage.completion_tokens > 0
    assert (await litellm.acompletion(messages=FRANCE, temperature=0, **asked)).choices[0].message.content == PARIS


def test_a_stream_put_together_by_litellm(asked):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(messages=FRANCE, temperature=0, **options, **asked))
    whole = litellm.stream_chunk_builder(chunks, messages=FRANCE)
    assert whole.choices[0].message.content == PARIS
    assert whole.choices[0].finish_reason == "stop"
    assert (
        whole.usage.completion_tokens
        == litellm.completion(messages=FRANCE, temperature=0, **asked).usage.completion_tokens
    )


async def test_a_stream_asynchronously(asked):
    stream = await litellm.acompletion(messages=FRANCE, temperature=0, stream=True, **asked)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == PARIS


def test_reasoning(asked):
    whole = litellm.completion(messages=SUM, temperature=0, extra_body=THINKING, **asked).choices[0].message
    deltas = [
        chunk.choices[0].delta
        for chunk in litellm.completion(messages=SUM, temperature=0, extra_body=THINKING, stream=True, **asked)
    ]
    assert whole.content == SUM_ANSWER
    assert whole.reasoning_content.endswith(THOUGHT)
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == whole.reasoning_content
    assert "".join(delta.content or "" for delta in deltas) == SUM_ANSWER


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_and_its_result(asked, stream):
    response = litellm.completion(messages=BERLIN, tools=[WEATHER_TOOL], temperature=0, stream=stream, **asked)
    whole = litellm.stream_chunk_builder(list(response), messages=BERLIN) if stream else response
    [choice] = whole.choices
    [call] = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert (call.function.name, json.loads(call.function.arguments)) == (WEATHER_NAME, BERLIN_ARGUMENTS)
    told = [*BERLIN, choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": BERLIN_RESULT}]
    answer = litellm.completion(messages=told, tools=[WEATHER_TOOL], temperature=0, **asked)
    assert answer.choices[0].message.content == BERLIN_ANSWER


def test_a_text_completion(asked):
    asked["model"] = asked["model"].replace("openai/", "text-completion-openai/")
    response = litellm.text_completion(prompt="The capital of France is", temperature=0, max_tokens=20, **asked)
    assert response.choices[0].text.startswith(" Paris")


def test_errors_are_told_apart(asked):
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(messages=FRANCE, temperature=-1, **asked)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "word " * 20_000}], **asked)
    asked["model"] = "openai/nothing"
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=FRANCE, **asked)
