"""LlamaIndex's OpenAILike on the gateway."""

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from conformance.asked import BERLIN, BERLIN_ARGUMENTS, FRANCE, PARIS

QUESTION = ChatMessage(role="user", content=FRANCE[0]["content"])


@pytest.fixture
def llm(base_url, model_name):
    return OpenAILike(
        model=model_name,
        api_base=base_url,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=0,
        max_retries=0,
    )


@pytest.mark.sample
async def test_a_chat(llm):
    assert llm.chat([QUESTION]).message.content == PARIS
    assert "".join(chunk.delta or "" for chunk in llm.stream_chat([QUESTION])) == PARIS
    assert (await llm.achat([QUESTION])).message.content == PARIS
    assert "".join([chunk.delta or "" async for chunk in await llm.astream_chat([QUESTION])]) == PARIS


def test_a_completion(llm):
    llm.is_chat_model = False
    assert llm.complete("The capital of France is", max_tokens=20).text.startswith(" Paris")


def test_a_tool_is_called(llm):
    def get_weather(city: str) -> str:
        """Get the weather in a city."""
        return f"sunny in {city}"

    tool = FunctionTool.from_defaults(fn=get_weather)
    response = llm.chat_with_tools([tool], user_msg=BERLIN[0]["content"])
    [call] = llm.get_tool_calls_from_response(response)
    assert (call.tool_name, call.tool_kwargs) == ("get_weather", BERLIN_ARGUMENTS)
