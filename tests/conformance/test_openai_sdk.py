"""openai-python, blocking and asynchronous, against the gateway with the tiny model."""

import json
from functools import partial

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
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

pytestmark = pytest.mark.sample
WEATHER_NAME = WEATHER_TOOL["function"]["name"]
NAMED = {"type": "function", "function": {"name": WEATHER_NAME}}
CAPITAL = "The capital of France is"


@pytest.fixture(scope="module")
def client(base_url):
    with OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def chat(client, model_name):
    return partial(client.chat.completions.create, model=model_name, temperature=0)


@pytest.fixture(scope="module")
def chat_stream(client, model_name):
    """The helper of the SDK that puts a stream together."""
    return partial(client.chat.completions.stream, model=model_name, temperature=0)


@pytest.fixture(scope="module")
def complete(client, model_name):
    return partial(client.completions.create, model=model_name, temperature=0)


def called(call):
    assert call.id
    return call.function.name, json.loads(call.function.arguments)


async def test_the_asynchronous_client(base_url, model_name):
    client = AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
    asked = {"model": model_name, "messages": FRANCE, "temperature": 0}
    assert model_name in [found.id async for found in client.models.list()]
    assert (await client.chat.completions.create(**asked)).choices[0].message.content == PARIS
    stream = await client.chat.completions.create(**asked, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == PARIS
    async with client.chat.completions.stream(**asked) as stream:
        assert (await stream.get_final_completion()).choices[0].message.content == PARIS
    whole = await client.completions.create(model=model_name, prompt="7 + 5 =", temperature=0, max_tokens=10)
    assert whole.choices[0].text.startswith(" 12.")
    assert (await client.responses.create(model=model_name, input=FRANCE, temperature=0)).output_text == PARIS


# --- chat -------------------------------------------------------------------------------------------------------------


def test_a_chat_whole_and_streamed(chat, model_name):
    completion = chat(messages=FRANCE)
    [choice] = completion.choices
    assert (choice.message.role, choice.message.content) == ("assistant", PARIS)
    assert (choice.finish_reason, choice.message.tool_calls, choice.message.refusal) == ("stop", None, None)
    usage = completion.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens > usage.prompt_tokens > 0
    assert completion.model == model_name
    assert completion.id.startswith("chatcmpl-")

    with chat(messages=FRANCE, stream=True) as stream:
        chunks = list(stream)
    assert len(chunks) > 3
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == PARIS
    assert [delta.role for delta in deltas if delta.role] == ["assistant"]
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert [reason for reason in reasons if reason] == [reasons[-1]] == ["stop"]
    assert len({chunk.id for chunk in chunks}) == len({chunk.created for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)

    without = list(chat(messages=FRANCE, stream=True, stream_options={"include_usage": False}))
    assert all(chunk.choices for chunk in without)
    *chunks, last = chat(messages=FRANCE, stream=True, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in chunks)
    assert (last.choices, last.usage.total_tokens, last.usage.completion_tokens) == (
        [],
        usage.total_tokens,
        usage.completion_tokens,
    )


def test_the_stream_helper_puts_an_answer_together(chat_stream):
    with chat_stream(messages=FRANCE) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        [choice] = stream.get_final_completion().choices
    assert (text, choice.message.content, choice.finish_reason) == (PARIS, PARIS, "stop")


def test_max_tokens_ends_with_length(chat):
    for limit in ({"max_tokens": 2}, {"max_completion_tokens": 2}):
        completion = chat(messages=FRANCE, **limit)
        assert (completion.choices[0].finish_reason, completion.usage.completion_tokens) == ("length", 2)


def test_several_choices(chat):
    completion = chat(messages=FRANCE, n=3, temperature=0.01)
    assert [(choice.index, choice.message.content) for choice in completion.choices] == list(enumerate([PARIS] * 3))
    texts = ["", "", ""]
    for chunk in chat(messages=FRANCE, n=3, temperature=0.01, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [PARIS] * 3


def test_logprobs(chat):
    asked = {"messages": FRANCE, "logprobs": True, "top_logprobs": 2}
    whole = chat(**asked).choices[0].logprobs.content
    assert "".join(token.token for token in whole).startswith(PARIS)
    for token in whole:
        assert token.logprob <= 0
        assert bytes(token.bytes or []).decode(errors="replace") == token.token
        first, second = token.top_logprobs
        assert first.logprob >= second.logprob
    choices = [choice for chunk in chat(**asked, stream=True) for choice in chunk.choices if choice.logprobs]
    streamed = [token for choice in choices for token in choice.logprobs.content or []]
    assert [token.token for token in streamed] == [token.token for token in whole]
    assert [token.logprob for token in streamed] == pytest.approx([token.logprob for token in whole], abs=1e-5)


# --- thinking ---------------------------------------------------------------------------------------------------------


def test_reasoning_stands_beside_the_answer_and_is_taken_back(chat):
    completion = chat(messages=SUM, extra_body=THINKING)
    message, usage = completion.choices[0].message, completion.usage
    assert message.content == SUM_ANSWER
    assert message.reasoning_content.endswith(THOUGHT)
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens
    second = chat(messages=[*SUM, message.model_dump(), *FRANCE])
    assert second.choices[0].finish_reason == "stop"
    assert second.choices[0].message.content


def test_deepseeks_own_switch_turns_thinking_on(chat):
    on, off = (chat(messages=SUM, extra_body={"thinking": {"type": kind}}) for kind in ("enabled", "disabled"))
    assert on.choices[0].message.reasoning_content.endswith(THOUGHT)
    assert not getattr(off.choices[0].message, "reasoning_content", None)
    assert off.choices[0].message.content


def test_reasoning_streams_before_the_answer(chat):
    deltas = [chunk.choices[0].delta for chunk in chat(messages=SUM, extra_body=THINKING, stream=True)]
    parts = [(getattr(delta, "reasoning_content", None), delta.content) for delta in deltas]
    assert "".join(reasoning or "" for reasoning, _ in parts).endswith(THOUGHT)
    assert "".join(content or "" for _, content in parts) == SUM_ANSWER
    first_content = next(place for place, (_, content) in enumerate(parts) if content)
    assert not any(reasoning for reasoning, _ in parts[first_content + 1 :])


# --- tools ------------------------------------------------------------------------------------------------------------


def test_a_tool_is_called_and_its_result_is_told(chat):
    [choice] = chat(messages=BERLIN, tools=[WEATHER_TOOL]).choices
    assert (choice.finish_reason, choice.message.content or "") == ("tool_calls", "")
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert called(call) == (WEATHER_NAME, BERLIN_ARGUMENTS)
    result = {"role": "tool", "tool_call_id": call.id, "content": BERLIN_RESULT}
    [told] = chat(messages=[*BERLIN, choice.message, result], tools=[WEATHER_TOOL]).choices
    assert (told.message.content, told.finish_reason) == (BERLIN_ANSWER, "stop")
    [told] = chat(messages=BERLIN, tools=[WEATHER_TOOL], tool_choice="none").choices
    assert (told.message.tool_calls or [], told.finish_reason) == ([], "stop")
    assert "tool▁call" not in (told.message.content or "")


def test_a_call_streams(chat):
    chunks = list(chat(messages=BERLIN, tools=[WEATHER_TOOL, TIME_TOOL], stream=True))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert {call.index for call in calls} == {0}
    assert [call.function.name for call in calls if call.function.name] == [WEATHER_NAME]
    assert len([call.id for call in calls if call.id]) == 1
    assert json.loads("".join(call.function.arguments or "" for call in calls)) == BERLIN_ARGUMENTS
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("tool_choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
def test_the_stream_helper_puts_calls_together(chat, chat_stream, tool_choice):
    asked = {"messages": BERLIN, "tools": [WEATHER_TOOL], "tool_choice": tool_choice}
    with chat_stream(**asked) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [(event.name, json.loads(event.arguments)) for event in done] == [(WEATHER_NAME, BERLIN_ARGUMENTS)]
    assert final.choices[0].finish_reason == "tool_calls"
    for completion in (final, chat(**asked)):
        [call] = completion.choices[0].message.tool_calls
        assert called(call) == (WEATHER_NAME, BERLIN_ARGUMENTS)


def test_parse_reads_the_arguments_of_a_strict_tool(client, model_name):
    class get_weather(BaseModel):
        city: str

    tools = [openai.pydantic_function_tool(get_weather)]
    parsed = client.chat.completions.parse(model=model_name, messages=BERLIN, tools=tools, temperature=0)
    [call] = parsed.choices[0].message.tool_calls
    assert call.function.parsed_arguments == get_weather(city="Berlin")


# --- completions ------------------------------------------------------------------------------------------------------


def test_a_completion(complete):
    whole = complete(prompt=CAPITAL, max_tokens=40)
    chunks = list(complete(prompt=CAPITAL, max_tokens=40, stream=True))
    [choice] = whole.choices
    assert choice.text.startswith(" Paris")
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    assert choice.finish_reason == chunks[-1].choices[0].finish_reason
    assert (whole.id.partition("-")[0], whole.object) == ("cmpl", "text_completion")


def test_several_prompts(complete):
    completion = complete(prompt=[CAPITAL, "7 + 5 ="], temperature=0.01, max_tokens=10, n=2)
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    first, second, third, fourth = (choice.text for choice in completion.choices)
    assert (first, third) == (second, fourth)
    assert first.startswith(" Paris")
    assert third.startswith(" 12.")


def test_echo_with_logprobs(complete):
    [choice] = complete(prompt=CAPITAL, max_tokens=3, echo=True, logprobs=1).choices
    assert choice.text.startswith(CAPITAL + " Paris")
    found = choice.logprobs
    lengths = {len(part) for part in (found.tokens, found.token_logprobs, found.text_offset, found.top_logprobs)}
    assert lengths == {len(found.tokens)}
    assert found.token_logprobs[0] is None


# --- errors -----------------------------------------------------------------------------------------------------------


def test_a_wrong_field_is_named(chat, subtests):
    """By the gateway, and by the server behind it."""
    table = [
        ({"temperature": -1}, "temperature"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages"),
        ({"tool_choice": NAMED, "tools": [TIME_TOOL]}, "tool_choice"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
    ]
    for change, param in table:
        with subtests.test(param=param):
            with pytest.raises(openai.BadRequestError) as caught:
                chat(**{"messages": FRANCE, "max_tokens": 5} | change)
            assert caught.value.type == "invalid_request_error"
            assert caught.value.param.startswith(param)
            assert param in caught.value.message


def test_errors_have_openais_codes(client, chat, model_name):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(messages=[{"role": "user", "content": "word " * 20_000}])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as caught:
        chat(model="gpt-nothing", messages=FRANCE)
    assert (caught.value.code, caught.value.type) == ("model_not_found", "invalid_request_error")
    assert model_name in caught.value.message
    with pytest.raises(openai.NotFoundError) as caught:
        client.embeddings.create(model=model_name, input="x")
    assert caught.value.body is not None
