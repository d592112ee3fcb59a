"""POST /v1/responses: what is asked of the model's server, and what a client gets of its answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from gateway.scripted_triton import ScriptedTriton, gateway_of

CALL = '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
TWO_CALLS = f"<｜tool▁calls▁begin｜>{CALL}{CALL}<｜tool▁calls▁end｜>"
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
LAST = {"finish_reason": "stop", "num_input_tokens": 5, "num_output_tokens": 3, "num_reasoning_tokens": 1}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[ScriptedTriton, TestClient]]:
    triton = ScriptedTriton()
    with gateway_of(triton) as client:
        yield triton, client


@pytest.fixture
def triton(served: tuple[ScriptedTriton, TestClient]) -> ScriptedTriton:
    scripted = served[0]
    scripted.events, scripted.status, scripted.pause_s = (), 200, 0.0
    scripted.asked.clear()
    return scripted


@pytest.fixture
def client(served: tuple[ScriptedTriton, TestClient]) -> TestClient:
    return served[1]


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


def test_a_response(triton: ScriptedTriton, client: TestClient) -> None:
    triton.events = [{"reasoning_output": "hm"}, {"text_output": "Paris"}, LAST]
    answer = client.post("/v1/responses", json={"input": "Capital of France?", "instructions": "Be brief."})
    assert answer.status_code == 200
    document = answer.json()
    assert document["status"] == "completed"
    assert [item["content"][0]["text"] for item in document["output"]] == ["hm", "Paris"]
    assert document["usage"]["output_tokens_details"] == {"reasoning_tokens": 1}
    (asked,) = triton.asked
    assert json.loads(asked["messages"]) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Capital of France?"},
    ]
    assert asked["separate_reasoning"] is True
    assert asked["streaming"] is False


def test_a_stream_tells_the_same(triton: ScriptedTriton, client: TestClient) -> None:
    triton.events = [{"text_output": "Look: "}, {"text_output": TWO_CALLS[:50]}, {"text_output": TWO_CALLS[50:]}, LAST]
    answer = client.post("/v1/responses", json={"input": "Hi", "tools": [TOOL], "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer.text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    response = events[-1]["response"]
    assert events[-1]["type"] == "response.completed"
    assert [item["type"] for item in response["output"]] == ["message", "function_call", "function_call"]
    assert triton.asked[0]["streaming"] is True
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert json.loads(triton.asked[0]["tools"]) == [tool]


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_at_a_time(triton: ScriptedTriton, client: TestClient, stream: bool) -> None:
    triton.events = [{"text_output": TWO_CALLS, "num_output_tokens": 9, "num_input_tokens": 4}, LAST]
    asked = {"input": "Hi", "tools": [TOOL], "parallel_tool_calls": False, "stream": stream}
    answer = client.post("/v1/responses", json=asked)
    document = events_of(answer.text)[-1]["response"] if stream else answer.json()
    assert [item["type"] for item in document["output"]] == ["function_call"]
    assert triton.asked[0]["streaming"] is True


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_of_the_server_has_its_own_status(triton: ScriptedTriton, client: TestClient, stream: bool) -> None:
    triton.status = 400
    triton.events = [{"error": "[E_PROMPT_TOO_LONG] the prompt has 5,000 tokens"}]
    answer = client.post("/v1/responses", json={"input": "Hi", "stream": stream})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_an_error_after_the_first_event_is_the_last_event(triton: ScriptedTriton, client: TestClient) -> None:
    triton.events = [{"text_output": "Once"}, {"error": "[E_INTERNAL] the engine failed"}]
    triton.pause_s = 0.1  # the two come in one piece otherwise, and then the error is the whole answer
    answer = client.post("/v1/responses", json={"input": "Hi", "stream": True})
    assert answer.status_code == 200
    last = events_of(answer.text)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert "the engine failed" in last["response"]["error"]["message"]
    assert last["response"]["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1"),
        ("GET", "/v1/responses/resp_1/input_items"),
        ("POST", "/v1/responses/resp_1/cancel"),
    ],
)
def test_no_response_is_kept(triton: ScriptedTriton, client: TestClient, method: str, path: str) -> None:
    answer = client.request(method, path)
    assert answer.status_code == 404
    assert "keeps no responses" in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "response_not_found"


def test_the_length_of_a_prompt(triton: ScriptedTriton, client: TestClient) -> None:
    triton.events = [{"num_input_tokens": 12, "output_ids": [1] * 12}]
    answer = client.post("/v1/responses/input_tokens", json={"input": "Hi", "tools": [TOOL]})
    assert answer.json() == {"object": "response.input_tokens", "input_tokens": 12}
    assert triton.asked[0]["task"] == "tokenize"
    assert {"messages", "tools"} <= triton.asked[0].keys()


def test_a_response_without_its_end_has_failed(triton: ScriptedTriton, client: TestClient) -> None:
    triton.events = [{"text_output": "Hel"}]
    assert client.post("/v1/responses", json={"input": "Hi"}).status_code == 502
    answer = client.post("/v1/responses", json={"input": "Hi", "stream": True})
    assert events_of(answer.text)[-1]["type"] == "response.failed"


@pytest.mark.parametrize(
    ("error", "param", "message"),
    [
        ("[E_INVALID_ARGUMENT] max_tokens: expected at least 1", "max_output_tokens", "max_output_tokens: expected at"),
        ("[E_INVALID_ARGUMENT] messages[2].content: expected text", "input", "input.content: expected text"),
        (
            "[E_INVALID_ARGUMENT] messages[0].role: expected user, got 'it\\'s messages, too'",
            "input",
            "input.role: expected user, got 'it\\'s messages, too'",
        ),
        ('[E_INVALID_ARGUMENT] tools: got "my messages 1"', "tools", 'tools: got "my messages 1"'),
        ("[E_UNSUPPORTED] guided_json is for engines that have it", None, "guided_json is for"),
        ("[E_UNSUPPORTED] guided_json: no engine has it", "text", "guided_json: no engine"),
        ("[E_PROMPT_TOO_LONG] 9 tokens and max_tokens 7", "input", "This model's maximum context length is exceeded"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/input_tokens"])
def test_the_servers_errors_name_the_fields_of_this_api(
    triton: ScriptedTriton, client: TestClient, path: str, error: str, param: str | None, message: str
) -> None:
    triton.events, triton.status = [{"error": error}], 400
    refused = client.post(path, json={"input": "Hi"})
    found = refused.json()["error"]
    assert (refused.status_code, found["param"]) == (400, param)
    assert found["message"].startswith(message)
    assert "max_tokens" not in found["message"]


def test_a_stream_that_fails_names_the_fields_of_this_api(triton: ScriptedTriton, client: TestClient) -> None:
    triton.events = [{"text_output": "Hel"}, {"error": "[E_INTERNAL] max_tokens: the engine forgot it"}]
    answer = client.post("/v1/responses", json={"input": "Hi", "stream": True})
    error = events_of(answer.text)[-1]["response"]["error"]
    assert error["message"] == "max_output_tokens: the engine forgot it"
