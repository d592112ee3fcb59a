"""Calls of tools, reasoning and the Responses API through a real gateway and a real tritonserver.

The tiny model calls its own tools. The simulated engine says what the test dictates, token by token, in every form.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from conformance.asked import BERLIN, BERLIN_ANSWER, BERLIN_ARGUMENTS, BERLIN_RESULT, SUM, SUM_ANSWER, THINKING, THOUGHT
from conformance.running import gateway
from deepseek_triton_tools.server.server_process import ServerProcess
from support.servers import twin, url

pytestmark = pytest.mark.slow

TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Get the {name[4:]}.", "parameters": parameters}}
    for name in ("get_weather", "get_time")
    for parameters in [{"type": "object", "properties": {"city": {"type": "string"}}}]
]
ARGUMENTS = {"city": 'Łódź "1"\n', "days": 3}
JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
RAW = (
    f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
FENCED = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
    f"```json\n{JSON}\n```<｜tool▁call▁end｜>\n"
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
DSML = (
    '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
    f'<｜DSML｜parameter name="city" string="true">{ARGUMENTS["city"]}</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="get_time">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
)


@pytest.fixture(scope="module")
def dictated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a gateway before an engine that says what it is told."""
    folder = tmp_path_factory.mktemp("dictated")
    repository = twin(folder / "repository", engine_options={"text": "dictated"})
    with ServerProcess.serving(repository) as server, gateway(url(server, "http"), log=folder / "log") as address:
        yield address


@pytest.fixture(scope="module")
def tiny(v31_server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a gateway before the trained tiny model."""
    with gateway(url(v31_server, "http"), log=tmp_path_factory.mktemp("tiny") / "log") as address:
        yield address


def chat(address: str, messages: list[dict[str, Any]], *, stream: bool, **fields: object) -> dict[str, Any]:
    """The choice, put together of the deltas as clients do where it streams."""
    body = {"messages": messages, "stream": stream, "temperature": 0, "max_tokens": 1000, **fields}
    answer = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    if not stream:
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    finish_reason = None
    for line in answer.text.splitlines():
        if not line.startswith("data: {"):
            continue
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        finish_reason = choice["finish_reason"] or finish_reason
        for name in ("content", "reasoning_content"):
            message[name] += choice["delta"].get(name) or ""
        for delta in choice["delta"].get("tool_calls", ()):
            if delta["index"] == len(message["tool_calls"]):
                message["tool_calls"].append(delta)
            else:
                call = message["tool_calls"][delta["index"]]
                call["function"]["arguments"] += delta["function"]["arguments"]
    return {"message": message, "finish_reason": finish_reason}


def calls_of(message: dict[str, Any]) -> list[tuple[str, object]]:
    calls = message.get("tool_calls") or []
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def dictate(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"Say <answer>{text}</answer>"}]


def test_calls_in_every_form(dictated, subtests):
    for form, calls in {"raw": RAW, "fenced": FENCED, "dsml": DSML}.items():
        for stream in (False, True):
            with subtests.test(form, stream=stream):
                choice = chat(dictated, dictate(f"I look.{calls}"), stream=stream, tools=TOOLS)
                assert calls_of(choice["message"]) == [("get_weather", ARGUMENTS), ("get_time", {})]
                assert choice["message"]["content"] == "I look."
                assert choice["finish_reason"] == "tool_calls"


def test_a_call_ends_the_reasoning_and_some_are_left_out(dictated):
    for stream in (False, True):
        message = chat(dictated, dictate(f"<think>Hm.{RAW}"), stream=stream, tools=TOOLS)["message"]
        assert message["reasoning_content"] == "Hm."
        assert [name for name, _ in calls_of(message)] == ["get_weather", "get_time"]

    one = chat(dictated, dictate(RAW), stream=True, tools=TOOLS, parallel_tool_calls=False)
    assert (calls_of(one["message"]), one["finish_reason"]) == ([("get_weather", ARGUMENTS)], "tool_calls")
    none = chat(dictated, dictate(f"I look.{RAW}"), stream=False, tools=TOOLS, tool_choice="none")
    assert (none["message"]["content"], none["finish_reason"]) == ("I look.", "stop")


def test_the_tiny_model_calls_a_tool_and_uses_the_result(tiny):
    named = {"type": "function", "function": {"name": "get_weather"}}
    for tool_choice, stream in (("auto", True), ("required", True), (named, True), (named, False), ("auto", False)):
        choice = chat(tiny, BERLIN, stream=stream, tools=TOOLS[:1], tool_choice=tool_choice)
        assert calls_of(choice["message"]) == [("get_weather", BERLIN_ARGUMENTS)]
        assert choice["finish_reason"] == "tool_calls"

    called = choice["message"]
    result = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": BERLIN_RESULT}
    answer = chat(tiny, [*BERLIN, called, result], stream=True, tools=TOOLS[:1])
    assert answer["message"]["content"] == BERLIN_ANSWER


def test_the_tiny_model_thinks(tiny):
    for stream in (False, True):
        message = chat(tiny, SUM, stream=stream, **THINKING)["message"]

        assert message["reasoning_content"].strip().endswith(THOUGHT)
        assert message["content"] == SUM_ANSWER


def test_items_of_a_response_go_back_as_they_came(tiny):
    tool = {"type": "function", **TOOLS[0]["function"]}
    body: dict[str, Any] = {"input": BERLIN, "tools": [tool], "temperature": 0}
    first = httpx.post(f"{tiny}/v1/responses", json=body, timeout=60).json()
    (call,) = first["output"]
    assert (call["name"], json.loads(call["arguments"])) == ("get_weather", BERLIN_ARGUMENTS)
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": BERLIN_RESULT}
    second = httpx.post(f"{tiny}/v1/responses", json={**body, "input": [*BERLIN, call, result]}, timeout=60).json()

    assert second["output"][0]["content"][0]["text"] == BERLIN_ANSWER


def test_the_form_of_an_answer_is_the_schemas(tiny):
    schema = {"type": "object", "properties": {"capital": {"type": "string", "maxLength": 20}}, "required": ["capital"]}
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema | {"additionalProperties": False}}}
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "response_format": form}
    answer = httpx.post(f"{tiny}/v1/chat/completions", json={**body, "temperature": 0}, timeout=60).json()

    assert json.loads(answer["choices"][0]["message"]["content"]).keys() == {"capital"}
    choice = httpx.post(f"{tiny}/v1/completions", json={"prompt": "The", "guided_choice": ["A.", "B?"]}, timeout=60)
    assert choice.json()["choices"][0]["text"] in ("A.", "B?")
