"""Prompts of DeepSeek-V4 and V4.1 beside those of DeepSeek's own renderer."""

import json
from pathlib import Path

import pytest

from deepseek_backend.answer_format import with_answer_format
from deepseek_backend.chat_rendering import ChatRenderer, find_chat_facts
from deepseek_backend.config import CHAT_ENCODINGS
from deepseek_backend.engines.generate_request import SamplingParams
from deepseek_backend.errors import RequestError
from deepseek_backend.messages import NO_TOOLS, ToolUse, read_messages, read_tool_use
from deepseek_backend.v4_prompt import JSON_OBJECT, V4, V4_PREVIEW, V41, v4_form

RECORDED = json.loads((Path(__file__).parent / "recorded" / "v4_prompts.json").read_text())
FORMS = {"v4": V4, "v41": V41}
USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f"}}


class NoTemplate:
    """An engine whose tokenizer is not asked."""

    render_chat = None


def rendered(form, messages, tool_use=NO_TOOLS, reply_format="", **template_kwargs):
    engine = NoTemplate()
    renderer = ChatRenderer(engine, find_chat_facts(engine, is_v32=False, v4=form), eos_token="")
    return renderer.render(read_messages(json.dumps(messages)), template_kwargs, tool_use, reply_format)


def prompt_of(case):
    """Return the prompt of a request to DeepSeek's API."""
    choice = case.get("tool_choice")
    choice = json.dumps(choice) if isinstance(choice, dict) else choice
    tool_use = read_tool_use(json.dumps(case.get("tools", [])), choice)
    asked = {"reasoning_effort": case["reasoning_effort"]} if "reasoning_effort" in case else {}
    if "thinking" in case:
        asked["thinking"] = case["thinking"]["type"] != "disabled"
    reply = case.get("response_format", {})
    schema = reply["json_schema"]["schema"] if reply.get("type") == "json_schema" else ""
    reply_format = JSON_OBJECT if reply.get("type") == "json_object" else schema
    return rendered(FORMS[case["id"].split("/")[0]], case["messages"], tool_use, reply_format, **asked).prompt


def test_prompts_are_those_of_deepseek(subtests):
    for case in RECORDED["prompts"]:
        with subtests.test(case["id"]):
            expected = case["prompt"]
            for mark, text in RECORDED["texts"].items():
                expected = expected.replace(mark, text)
            assert prompt_of(case) == expected


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
REFUSED = [
    (
        {"tool_use": ToolUse(tools=[TOOL]), "more": [{"role": "assistant", "content": "", "prefix": True}]},
        "messages[1].pr",
    ),
    ({"more": [{"role": "assistant", "tool_calls": [CALL]}, USER]}, "messages[1].tool_calls[0]: "),
    ({"thinking": 1}, "chat_template_kwargs.thinking: "),
    ({"reasoning_effort": "much"}, "chat_template_kwargs.reasoning_effort: "),
    ({"reasoning_effort": 50}, "chat_template_kwargs.reasoning_effort: "),
    ({"form": V41, "reasoning_effort": 101}, "chat_template_kwargs.reasoning_effort: "),
    ({"enable": 1}, "chat_template_kwargs: "),
]


def test_what_deepseek_refuses_is_refused_with_its_field(subtests):
    for asked, begins in REFUSED:
        with subtests.test(begins):
            form, more = asked.pop("form", V4), asked.pop("more", [])
            with pytest.raises(RequestError) as refused:
                rendered(form, [USER, *more], **asked)
            assert str(refused.value).startswith(begins)


def test_the_form_follows_the_model_and_the_efforts_its_name():
    named = {"deepseek-v4-flash": V4_PREVIEW, "deepseek-v4-flash-dspark": V4_PREVIEW, "deepseek-v4-flash-0731": V4}
    assert {name: v4_form("deepseek_v4", name) for name in named} == named
    assert v4_form("deepseek_v41", "x") is V41
    assert v4_form("deepseek_v32", "deepseek-v4-flash") is None
    named = {"v4-preview": V4_PREVIEW, "v4-0731": V4, "v4.1": V41}
    assert {encoding: v4_form("deepseek_v3", "x-0731", encoding) for encoding in CHAT_ENCODINGS} == named
    assert "Effort" not in rendered(V4_PREVIEW, [USER]).prompt
    assert rendered(V4_PREVIEW, [USER], reasoning_effort="max").prompt == rendered(V4, [USER]).prompt
    assert "Effort: 33 (" in rendered(V41, [USER], reasoning_effort=33).prompt


def test_a_begun_reasoning_goes_on_and_a_required_call_is_begun():
    begun = {"role": "assistant", "content": "", "reasoning_content": "Let me", "prefix": True}
    assert rendered(V4, [USER, begun]).continues_reasoning
    sampling = SamplingParams(guided_regex="a+")
    guided = with_answer_format(sampling, NO_TOOLS, None, prompt="", begun="", refused="", continues_reasoning=True)
    assert "</think>" in str(guided.guided_structural_tag)
    for asked in ({}, {"thinking": True, "reasoning_effort": "max"}, {"thinking": False}):
        call = rendered(V41, [USER], ToolUse(tools=[TOOL], required=True), **asked)
        assert call.begun == "\n\n<｜DSML｜ calls>\n"
        assert call.prompt.endswith(f"<｜Assistant｜></think>{call.begun}")
        assert "Effort" not in call.prompt
