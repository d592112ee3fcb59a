"""The tiny model in DeepSeek-V4's form under a real tritonserver, where the backend writes its prompts as V4's own."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from live.conftest import serving

from deepseek_backend.v4_prompt import V4
from deepseek_triton_tools.server.server_process import ServerProcess
from support.servers import build
from support.wire import WAYS, WHOLE, Answer, Way, ask, post
from tiny_checkpoint.chat_templates import calls_text

FRANCE = {"role": "user", "content": "What is the capital of France?"}
PARIS = "The capital of France is Paris."
THOUGHT = f"The question is the capital of France. I know this: {PARIS}"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TOOLS = {"tools": json.dumps([TOOL])}
TWO = {"role": "user", "content": "What is the weather in Berlin and Rome?"}
ARGUMENTS = ['{"city": "Berlin"}', '{"city": "Rome"}']
CALLS = calls_text([("get_weather", text) for text in ARGUMENTS], "v4")


@pytest.fixture(scope="module")
def v4_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(build(tmp_path_factory.mktemp("v4") / "repository", "tiny-v4")) as server:
        yield server


def chat(server: ServerProcess, way: Way, messages: list[dict[str, Any]], effort: str = "none", **more: str) -> Answer:
    kwargs = json.dumps({"reasoning_effort": effort})
    body = {"messages": json.dumps(messages), "max_tokens": 200, "separate_reasoning": True}
    return ask(server, way, {**body, "chat_template_kwargs": kwargs, **more}).answer()


def test_each_effort_has_its_thought(v4_server):
    checks = {
        "none": None,
        "low": "",
        "high": " I checked this once.",
        "max": " I checked this once. I checked it twice.",
    }
    for way, (effort, checked) in zip(WAYS, checks.items(), strict=True):
        answer = chat(v4_server, way, [FRANCE], effort)
        assert (answer.text, answer.reasoning) == (PARIS, "" if checked is None else THOUGHT + checked)


def test_two_calls_and_their_results_in_the_order_of_the_calls(v4_server):
    calls = [
        {"id": str(number), "type": "function", "function": {"name": "get_weather", "arguments": text}}
        for number, text in enumerate(ARGUMENTS)
    ]
    results = [{"temperature": 21, "sky": "cloudy"}, {"temperature": 30, "sky": "sunny"}]
    told = [
        {"role": "tool", "tool_call_id": str(number), "content": json.dumps(result)}
        for number, result in enumerate(results)
    ]
    for way, effort in zip(WAYS, ("none", *V4.efforts), strict=True):
        called = chat(v4_server, way, [TWO], effort, **TOOLS)
        assert (called.text.strip(), bool(called.reasoning)) == (CALLS.strip(), effort != "none")
        before = {"role": "assistant", "content": "", "tool_calls": calls, "reasoning_content": called.reasoning}
        answer = chat(v4_server, way, [TWO, before, *reversed(told)], effort, **TOOLS)
        assert answer.text == "It is 21 °C and cloudy in Berlin. It is 30 °C and sunny in Rome."
    required = chat(v4_server, WHOLE[0], [TWO], tool_choice="required", **TOOLS)
    assert required.text.strip() == CALLS.strip()


SAID = {"role": "latest_reminder", "content": "You are Flora."}
FORM = {"role": "system", "content": V4.json_object.strip()}  # what a guide would add: this engine takes none
ANSWERS = [
    ([FORM, FRANCE], "none", '{"country": "France", "capital": "Paris"}'),
    ([SAID, {"role": "user", "content": "What is your name?"}], "high", "My name is Flora."),
    ([FRANCE, {"role": "assistant", "content": "The capital of", "prefix": True}], "none", " France is Paris."),
    ([FRANCE, {"role": "assistant", "content": "", "reasoning_content": "The question", "prefix": True}], "low", PARIS),
]


def test_json_a_reminder_and_begun_answers(v4_server):
    for way, (messages, effort, expected) in zip(WAYS, ANSWERS, strict=True):
        assert chat(v4_server, way, messages, effort).text == expected


def test_the_model_says_what_it_is(v4_server):
    info = json.loads(post(v4_server, "generate", {"text_input": "", "task": "describe"}).json()["model_info"])
    assert (info["tool_form"], info["thinking_switch"], info["chat_template"]) == ("dsml", True, None)
    assert info["reasoning_efforts"] == V4.known_efforts
