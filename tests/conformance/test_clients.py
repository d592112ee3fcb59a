"""Clients of others on the gateway with the tiny model: openai-python's three APIs, LiteLLM and LlamaIndex.

All are asked the same, as far as each can, whole and streamed.
"""

import json

import litellm
import openai
import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
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

WEATHER_NAME = WEATHER_TOOL["function"]["name"]
NAMED = {"type": "function", "function": {"name": WEATHER_NAME}}
FLAT_TOOL = {"type": "function", **WEATHER_TOOL["function"]}
"""The Responses API has the function's fields beside its type."""
CAPITAL = "The capital of France is"
CALLED = (WEATHER_NAME, BERLIN_ARGUMENTS)


class OpenAIChat:
    """openai-python's chat completions; streams are put together by its own helper."""

    length = "max_completion_tokens"

    def __init__(self, base_url, model):
        self.client = OpenAI(base_url=base_url, api_key="none", max_retries=0)
        self.model = {"model": model, "temperature": 0}

    def close(self):
        self.client.close()

    def whole(self, messages, *, streamed, **fields):
        if not streamed:
            return self.client.chat.completions.create(messages=messages, **self.model, **fields)
        with self.client.chat.completions.stream(messages=messages, **self.model, **fields) as stream:
            events = list(stream)
            final = stream.get_final_completion()
        message = final.choices[0].message
        assert "".join(event.delta for event in events if event.type == "content.delta") == (message.content or "")
        done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
        assert [(event.name, json.loads(event.arguments)) for event in done] == self.calls(final)
        return final

    def text(self, found):
        return found.choices[0].message.content or ""

    def reasoning(self, found):
        return found.choices[0].message.reasoning_content

    def reason(self, found):
        return found.choices[0].finish_reason

    def num_tokens(self, found):
        return found.usage.completion_tokens

    def calls(self, found):
        calls = [(call.id, call.function) for call in found.choices[0].message.tool_calls or []]
        assert all(call_id for call_id, _ in calls)
        return [(function.name, json.loads(function.arguments)) for _, function in calls]

    def told(self, found):
        """The conversation with the result of the call."""
        message = found.choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": BERLIN_RESULT}
        return [*BERLIN, message.model_dump(exclude_none=True), result]


class OpenAIResponses(OpenAIChat):
    length = "max_output_tokens"

    def whole(self, messages, *, streamed, tools=(), tool_choice="auto", **fields):
        if tools:
            choice = {"type": "function", "name": WEATHER_NAME} if tool_choice == NAMED else tool_choice
            fields |= {"tools": [FLAT_TOOL], "tool_choice": choice}
        if not streamed:
            return self.client.responses.create(input=messages, **self.model, **fields)
        with self.client.responses.stream(input=messages, **self.model, **fields) as stream:
            events = list(stream)
            final = stream.get_final_response()
        kinds = [event.type for event in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"
        said = {"response.output_text.delta": "", "response.function_call_arguments.delta": ""}
        for event in events:
            if event.type in said:
                said[event.type] += event.delta
        text, arguments = said.values()
        assert text == final.output_text
        assert [json.loads(each) for each in [arguments] if each] == [each for _, each in self.calls(final)]
        return final

    def text(self, found):
        return found.output_text

    def reasoning(self, found):
        return "".join(part.text for item in found.output if item.type == "reasoning" for part in item.content or [])

    def reason(self, found):
        if found.status == "incomplete":
            return {"max_output_tokens": "length"}[found.incomplete_details.reason]
        return "tool_calls" if self.calls(found) else {"completed": "stop"}[found.status]

    def num_tokens(self, found):
        return found.usage.output_tokens

    def calls(self, found):
        return [(item.name, json.loads(item.arguments)) for item in found.output if item.type == "function_call"]

    def told(self, found):
        [call] = found.output
        result = {"type": "function_call_output", "call_id": call.call_id, "output": BERLIN_RESULT}
        return [*BERLIN, call.model_dump(), result]


class LiteLLM(OpenAIChat):
    """The gateway as provider `openai/`, which is how LiteLLM's proxy is told about it too."""

    length = "max_tokens"

    def __init__(self, base_url, model):
        self.model = {"model": f"openai/{model}", "api_base": base_url, "api_key": "none", "num_retries": 0}

    def close(self):
        pass

    def whole(self, messages, *, streamed, **fields):
        options = {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
        found = litellm.completion(messages=messages, temperature=0, **options, **self.model, **fields)
        return litellm.stream_chunk_builder(list(found), messages=messages) if streamed else found


KINDS = {"chat": OpenAIChat, "responses": OpenAIResponses, "litellm": LiteLLM}


@pytest.fixture(params=KINDS)
def asking(request, base_url, model_name):
    client = KINDS[request.param](base_url, model_name)
    yield client
    client.close()


@pytest.mark.sample
@pytest.mark.parametrize("streamed", [False, True])
def test_a_text(asking, streamed):
    found = asking.whole(FRANCE, streamed=streamed)
    assert (asking.text(found), asking.reason(found)) == (PARIS, "stop")
    if not streamed:  # of a stream that was cut, openai-python's helper makes an error
        cut = asking.whole(FRANCE, streamed=False, **{asking.length: 3})
        assert (asking.reason(cut), asking.num_tokens(cut)) == ("length", 3)


@pytest.mark.sample
@pytest.mark.parametrize("streamed", [False, True])
def test_reasoning_stands_beside_the_answer(asking, streamed):
    found = asking.whole(SUM, streamed=streamed, extra_body=THINKING)
    assert asking.text(found) == SUM_ANSWER
    assert asking.reasoning(found).endswith(THOUGHT)


@pytest.mark.sample
@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_is_called_and_its_result_is_told(asking, streamed):
    for choice in ("auto", "required", NAMED):
        found = asking.whole(BERLIN, streamed=streamed, tools=[WEATHER_TOOL], tool_choice=choice)
        assert (asking.calls(found), asking.text(found)) == ([CALLED], "")
        assert asking.reason(found) == "tool_calls"
    told = asking.whole(asking.told(found), streamed=streamed, tools=[WEATHER_TOOL])
    assert (asking.text(told), asking.reason(told)) == (BERLIN_ANSWER, "stop")


async def test_asynchronous_clients(base_url, model_name):
    client = AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
    asked = {"model": model_name, "messages": FRANCE, "temperature": 0}
    assert model_name in [found.id async for found in client.models.list()]
    through_litellm = LiteLLM(base_url, model_name).model
    for ask, fields in ((client.chat.completions.create, asked), (litellm.acompletion, asked | through_litellm)):
        assert (await ask(**fields)).choices[0].message.content == PARIS
        stream = await ask(**fields, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == PARIS


@pytest.mark.sample
async def test_llama_index(base_url, model_name):
    llm = OpenAILike(
        model=model_name,
        api_base=base_url,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=0,
        max_retries=0,
    )
    question = ChatMessage(role="user", content=FRANCE[0]["content"])
    assert llm.chat([question]).message.content == PARIS
    assert "".join(chunk.delta or "" for chunk in llm.stream_chat([question])) == PARIS
    assert (await llm.achat([question])).message.content == PARIS

    def get_weather(city: str) -> str:
        """Get the weather in a city."""
        return f"sunny in {city}"

    response = llm.chat_with_tools([FunctionTool.from_defaults(fn=get_weather)], user_msg=BERLIN[0]["content"])
    [call] = llm.get_tool_calls_from_response(response)
    assert (call.tool_name, call.tool_kwargs) == CALLED
    llm.is_chat_model = False
    assert llm.complete(CAPITAL, max_tokens=20).text.startswith(" Paris")


# --- What only openai-python is asked ---


@pytest.fixture(scope="module")
def client(base_url):
    with OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def chat(client, model_name):
    def ask(**fields):
        return client.chat.completions.create(**{"model": model_name, "messages": FRANCE, "temperature": 0, **fields})

    return ask


@pytest.mark.sample
def test_the_chunks_of_a_chat(chat):
    usage = chat().usage
    *chunks, last = chat(stream=True, stream_options={"include_usage": True})
    assert len(chunks) > 3
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas if delta.role] == ["assistant"]
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert [reason for reason in reasons if reason] == [reasons[-1]] == ["stop"]
    assert len({chunk.id for chunk in chunks}) == len({chunk.created for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)
    assert (last.choices, last.usage.total_tokens) == ([], usage.total_tokens)
    assert all(chunk.choices for chunk in chat(stream=True))


@pytest.mark.sample
def test_reasoning_streams_before_the_answer_and_is_taken_back(chat):
    deltas = [chunk.choices[0].delta for chunk in chat(messages=SUM, extra_body=THINKING, stream=True)]
    parts = [(getattr(delta, "reasoning_content", None), delta.content) for delta in deltas]
    first_content = next(place for place, (_, content) in enumerate(parts) if content)
    assert not any(reasoning for reasoning, _ in parts[first_content + 1 :])
    on, off = (chat(messages=SUM, extra_body={"thinking": {"type": kind}}) for kind in ("enabled", "disabled"))
    assert on.choices[0].message.reasoning_content.endswith(THOUGHT)
    assert 0 < on.usage.completion_tokens_details.reasoning_tokens < on.usage.completion_tokens
    assert not getattr(off.choices[0].message, "reasoning_content", None)
    assert chat(messages=[*SUM, on.choices[0].message.model_dump(), *FRANCE]).choices[0].message.content


@pytest.mark.sample
def test_log_probabilities_of_a_chat(chat):
    asked = {"logprobs": True, "top_logprobs": 2}
    whole = chat(**asked).choices[0].logprobs.content
    assert "".join(token.token for token in whole).startswith(PARIS)
    for token in whole:
        assert bytes(token.bytes or []).decode(errors="replace") == token.token
        first, second = token.top_logprobs
        assert 0 >= first.logprob >= second.logprob
    choices = [choice for chunk in chat(**asked, stream=True) for choice in chunk.choices if choice.logprobs]
    streamed = [token for choice in choices for token in choice.logprobs.content or []]
    assert [token.token for token in streamed] == [token.token for token in whole]
    assert [token.logprob for token in streamed] == pytest.approx([token.logprob for token in whole], abs=1e-5)


@pytest.mark.sample
def test_parse_reads_the_arguments_of_a_strict_tool(client, model_name):
    class get_weather(BaseModel):
        """Get the current weather of a city."""

        city: str

    asked = {"model": model_name, "tools": [openai.pydantic_function_tool(get_weather)], "temperature": 0}
    [call] = client.chat.completions.parse(messages=BERLIN, **asked).choices[0].message.tool_calls
    [item] = client.responses.parse(input=BERLIN, **asked).output
    assert call.function.parsed_arguments == item.parsed_arguments == get_weather(city="Berlin")


@pytest.mark.sample
def test_completions(client, model_name):
    def complete(**fields):
        return client.completions.create(model=model_name, prompt=CAPITAL, temperature=0, **fields)

    whole = complete(max_tokens=40).choices[0]
    chunks = list(complete(max_tokens=40, stream=True))
    assert whole.text.startswith(" Paris")
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    assert whole.finish_reason == chunks[-1].choices[0].finish_reason
    [choice] = complete(max_tokens=3, echo=True, logprobs=1).choices
    assert choice.text.startswith(CAPITAL + " Paris")
    found = choice.logprobs
    lengths = {len(part) for part in (found.tokens, found.token_logprobs, found.text_offset, found.top_logprobs)}
    assert lengths == {len(found.tokens)}
    assert found.token_logprobs[0] is None


@pytest.mark.sample
def test_what_is_refused_is_named(client, chat, model_name, base_url):
    """By the gateway, and by the server behind it."""
    long = [{"role": "user", "content": "word " * 20_000}]
    table = [
        ({"temperature": -1}, openai.BadRequestError, "temperature", None),
        ({"messages": [{"role": "nobody", "content": "x"}]}, openai.BadRequestError, "messages", None),
        ({"tool_choice": NAMED, "tools": [TIME_TOOL]}, openai.BadRequestError, "tool_choice", None),
        ({"extra_body": {"temprature": 1}}, openai.BadRequestError, "temprature", "unknown_parameter"),
        ({"messages": long}, openai.BadRequestError, "messages", "context_length_exceeded"),
        ({"model": "gpt-nothing"}, openai.NotFoundError, "model", "model_not_found"),
    ]
    for change, kind, param, code in table:
        with pytest.raises(kind) as caught:
            chat(**change)
        assert caught.value.type == "invalid_request_error"
        assert caught.value.param.startswith(param)
        assert caught.value.code == code or code is None
    refused = {"previous_response_id": "resp_1", "background": True, "tools": [{"type": "web_search"}]}
    for name, value in {**refused, "conversation": "conv_1"}.items():
        with pytest.raises(openai.BadRequestError, match=name):
            client.responses.create(model=model_name, input="Hello", **{name: value})
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=long, **LiteLLM(base_url, model_name).model)
