"""Raw answers and events of every kind, judged by OpenAI's own API description and by the types of its SDK.

The SDK itself builds its objects unchecked, so that a wrong field would not be noticed. OPENAI_DOCUMENT may name the
whole openapi.json; without it, the shapes in tests/gateway/openai_facts.json are taken.
"""

import functools
import json
import os
from pathlib import Path

import httpx
import pytest
from jsonschema import Draft202012Validator
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from conformance.asked import AGE, BERLIN, FRANCE, SUM, THINKING, TIME_TOOL, WEATHER_TOOL, post
from gateway.openai_facts import faults

pytestmark = pytest.mark.sample
CHATS = {
    "plain": {"messages": FRANCE},
    "usage": {"messages": FRANCE, "stream_options": {"include_usage": True}},
    "continuous usage": {"messages": FRANCE, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "thinking": {"messages": SUM, **THINKING},
    "call": {"messages": BERLIN, "tools": [WEATHER_TOOL, TIME_TOOL]},
    "required call": {"messages": BERLIN, "tools": [WEATHER_TOOL], "tool_choice": "required"},
    "logprobs": {"messages": FRANCE, "logprobs": True, "top_logprobs": 3},
    "choices": {"messages": FRANCE, "n": 2, "temperature": 0.5},
    "cut": {"messages": FRANCE, "max_tokens": 3},
    "stop": {"messages": FRANCE, "stop": ["is"]},
    "json": {"messages": AGE},
    "nulls": {
        "messages": FRANCE,
        **dict.fromkeys(["tools", "tool_choice", "stop", "n", "logprobs", "seed", "max_tokens", "response_format"]),
    },
}
COMPLETIONS = {
    "plain": {"prompt": "7 + 5 ="},
    "usage": {"prompt": "7 + 5 =", "stream_options": {"include_usage": True}},
    "logprobs": {"prompt": "7 + 5 =", "logprobs": 2, "max_tokens": 4},
    "echo": {"prompt": "7 + 5 =", "echo": True, "logprobs": 1, "max_tokens": 1},
    "prompts": {"prompt": ["7 + 5 =", "The capital of France is"], "n": 2, "max_tokens": 5, "temperature": 0.5},
    "ids": {"prompt": [100, 101, 102], "max_tokens": 5},
}
RESPONSES = {
    "plain": {"input": FRANCE[0]["content"]},
    "messages": {"input": FRANCE, "instructions": "Answer in one word."},
    "thinking": {"input": SUM[0]["content"], **THINKING},
    "call": {"input": BERLIN, "tools": [{"type": "function", **WEATHER_TOOL["function"]}]},
    "cut": {"input": FRANCE[0]["content"], "max_output_tokens": 3},
}


def judged(found, schema):
    """Faults by the whole document where there is one, otherwise by the recorded shapes."""
    path = os.environ.get("OPENAI_DOCUMENT")
    if not path:
        return faults(found, schema)
    return [f"{error.json_path}: {error.message}" for error in _whole(Path(path), schema).iter_errors(found)]


@functools.cache
def _whole(path, schema):
    document = json.loads(path.read_text(encoding="utf-8"), object_hook=_nullable)
    return Draft202012Validator({"$ref": f"#/components/schemas/{schema}", **document})


def _nullable(schema):
    """`nullable` is OpenAPI 3.0's word; JSON schema has none, and the document uses both."""
    return {"anyOf": [schema, {"type": "null"}]} if schema.pop("nullable", False) is True else schema


def with_numbers(completion):
    """The first token of an echoed prompt has no log-probability: OpenAI sends null, which its document forgets."""
    copied = json.loads(json.dumps(completion))
    for choice in copied["choices"]:
        if (found := choice["logprobs"]) and found["token_logprobs"][:1] == [None]:
            found["token_logprobs"][0], found["top_logprobs"][0] = 0, {}
    return copied


@pytest.fixture
def ask(base_url, model_name):
    def ask(path, fields):
        """The JSON of the answer, and of each event of the stream without its last line, `[DONE]`."""
        body = {"model": model_name, "temperature": 0, **fields}
        whole = post(f"{base_url}/{path}", {key: value for key, value in body.items() if key != "stream_options"})
        stream = post(f"{base_url}/{path}", body | {"stream": True})
        assert (whole.status_code, stream.status_code) == (200, 200), whole.text + stream.text
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data:").strip() for line in stream.text.splitlines() if line.startswith("data:")]
        assert (lines[-1] == "[DONE]") is (path != "responses")
        return whole.json(), [json.loads(line) for line in lines if line != "[DONE]"]

    return ask


@pytest.mark.parametrize("kind", CHATS)
def test_chat(ask, kind):
    whole, chunks = ask("chat/completions", CHATS[kind])
    assert judged(whole, "CreateChatCompletionResponse") == []
    ChatCompletion.model_validate(whole)
    assert len(chunks) > 1
    assert [fault for chunk in chunks for fault in judged(chunk, "CreateChatCompletionStreamResponse")] == []
    assert [ChatCompletionChunk.model_validate(chunk) for chunk in chunks]


@pytest.mark.parametrize("kind", COMPLETIONS)
def test_completions(ask, kind):
    whole, chunks = ask("completions", COMPLETIONS[kind])
    assert judged(with_numbers(whole), "CreateCompletionResponse") == []
    Completion.model_validate(with_numbers(whole))
    # OpenAI's document has no shape of its own for these chunks: it says that they are like the whole answer, whose
    # finish_reason is never null. Its SDK reads them with the same type, without checks.
    for chunk in map(with_numbers, chunks):
        ended = [choice | {"finish_reason": choice["finish_reason"] or "stop"} for choice in chunk["choices"]]
        usage = {key: value for key, value in chunk.items() if key != "usage" or value is not None}
        assert judged(usage | {"choices": ended}, "CreateCompletionResponse") == []
        Completion.model_validate(chunk | {"choices": ended})


@pytest.mark.parametrize("kind", RESPONSES)
def test_responses(ask, kind):
    whole, events = ask("responses", RESPONSES[kind])
    assert judged(whole, "Response") == []
    Response.model_validate(whole)
    assert [fault for event in events for fault in judged(event, "ResponseStreamEvent")] == []
    assert [TypeAdapter(ResponseStreamEvent).validate_python(event) for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_models(base_url, model_name):
    listed = httpx.get(f"{base_url}/models").json()
    assert judged(listed, "ListModelsResponse") == []
    assert judged(httpx.get(f"{base_url}/models/{model_name}").json(), "Model") == []
    Model.model_validate(listed["data"][0])


def test_errors(base_url, model_name):
    table = [
        ("chat/completions", {"temperature": "hot", "messages": FRANCE}, 400),
        ("chat/completions", {"model": "nothing", "messages": FRANCE}, 404),
        ("chat/completions", [], 400),
        ("completions", {"prompt": 5}, 400),
        ("responses", {"previous_response_id": "resp_1", "input": "Hello"}, 400),
        ("embeddings", {}, 404),
    ]
    for path, body, status in table:
        response = post(f"{base_url}/{path}", {"model": model_name, **body} if isinstance(body, dict) else body)
        assert (response.status_code, judged(response.json(), "ErrorResponse")) == (status, []), response.text
