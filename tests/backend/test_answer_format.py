"""The form of a whole answer: a guide beside thinking and tools, and strict tools."""

import json

import pytest

from deepseek_backend.answer_format import with_answer_format
from deepseek_backend.chat_rendering import DSML_FORM, FENCED, OTHER_FORM, RAW_JSON
from deepseek_backend.contract import ErrorCode
from deepseek_backend.engines.generate_request import SamplingParams
from deepseek_backend.errors import RequestError
from deepseek_backend.messages import NO_TOOLS, ToolUse

PLAIN, THINKING = "Why?", "Why?<｜Assistant｜><think>\n"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
STRICT = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
FREE = {"type": "function", "function": {"name": "time", "parameters": SCHEMA}}
GUIDES = {
    "guided_json": ('{"type": "array"}', {"type": "json_schema", "json_schema": {"type": "array"}}),
    "guided_json_object": (True, {"type": "json_schema", "json_schema": {"type": "object"}}),
    "guided_regex": ("é+", {"type": "regex", "pattern": "é+"}),
    "guided_grammar": ('root ::= "a"', {"type": "grammar", "grammar": 'root ::= "a"'}),
}


def changed(tool_use=NO_TOOLS, *, form=RAW_JSON, prompt=PLAIN, begun="", refused="", has_switch=True, **sampling):
    params = SamplingParams(temperature=0.5, **sampling)
    told = {"begun": begun, "refused": refused, "has_switch": has_switch}
    return with_answer_format(params, tool_use, form, prompt=prompt, **told)


def format_of(sampling):
    """The format of the structural tag, which is the only guide."""
    assert sampling.guided_structural_tag is not None
    assert sampling == SamplingParams(temperature=0.5, guided_structural_tag=sampling.guided_structural_tag)
    tag = json.loads(sampling.guided_structural_tag)
    assert tag["type"] == "structural_tag"
    return tag["format"]


@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_begins_after_the_reasoning_and_leaves_room_for_calls(name):
    value, answer = GUIDES[name]
    found = format_of(changed(prompt=THINKING, **{name: value}))
    reasoning = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>"}
    assert found == {"type": "sequence", "elements": [reasoning, answer]}
    found = format_of(changed(ToolUse(tools=[STRICT, FREE]), **{name: value}))
    assert found["type"] == "or"
    assert found["elements"][0] == answer
    begin, calls, end = found["elements"][1]["elements"]
    assert (begin["value"], end["value"]) == ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    begun = [f"<｜tool▁call▁begin｜>{function}<｜tool▁sep｜>" for function in ("weather", "time")]
    assert [tag["begin"] for tag in calls["tags"]] == begun
    assert [tag["content"]["json_schema"] for tag in calls["tags"]] == [SCHEMA, {"type": "object"}]


def test_strict_tools_bind_their_calls_and_leave_the_text_free():
    found = format_of(changed(ToolUse(tools=[STRICT]), form=FENCED))
    assert (found["type"], found["triggers"]) == ("triggered_tags", ["<｜tool▁call▁begin｜>"])
    assert found["tags"] == [
        {
            "type": "tag",
            "begin": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n",
            "content": {"type": "json_schema", "json_schema": SCHEMA},
            "end": "\n```<｜tool▁call▁end｜>",
        }
    ]


def test_a_call_that_the_prompt_has_begun_goes_on_from_there():
    named = format_of(changed(ToolUse(tools=[STRICT, FREE], required=True, name="weather"), begun="..."))
    assert named["elements"][0] == {"type": "json_schema", "json_schema": SCHEMA}
    any_of_them = format_of(changed(ToolUse(tools=[STRICT, FREE], required=True), begun="..."))
    begun = [tag["begin"] for tag in any_of_them["elements"][0]["elements"]]
    assert begun == ["weather<｜tool▁sep｜>", "time<｜tool▁sep｜>"]


def test_an_answer_that_must_be_a_call_has_no_other_guide():
    assert changed(ToolUse(tools=[FREE], required=True), begun="...", guided_regex="a") == changed()


UNCHANGED = [
    (NO_TOOLS, {}),
    (NO_TOOLS, {"guided_regex": "a+"}),
    (NO_TOOLS, {"prompt": "What does <think> mean?", "guided_regex": "a+"}),
    (NO_TOOLS, {"prompt": THINKING}),
    (NO_TOOLS, {"prompt": THINKING, "guided_structural_tag": "{}"}),
    (ToolUse(tools=[FREE]), {"prompt": THINKING}),
    (ToolUse(tools=[STRICT]), {"guided_structural_tag": "{}"}),
    *((ToolUse(tools=[STRICT]), {"form": form}) for form in (DSML_FORM, OTHER_FORM, None)),
    (ToolUse(tools=[STRICT]), {"refused": "too old"}),
    (ToolUse(tools=[STRICT]), {"refused": "too old", "guided_regex": "a+"}),
    (ToolUse(tools=[FREE]), {"form": DSML_FORM, "guided_regex": "a+"}),
]


def test_all_else_stays_as_it_is():
    for tool_use, given in UNCHANGED:
        guides = {name: value for name, value in given.items() if name.startswith("guided_")}
        assert changed(tool_use, **given) == SamplingParams(temperature=0.5, **guides), (tool_use, given)


def test_a_guide_that_would_bind_the_reasoning_is_refused():
    for has_switch in (True, False):
        with pytest.raises(RequestError) as caught:
            changed(prompt=THINKING, refused="the engine is too old", guided_json="{}", has_switch=has_switch)
        assert caught.value.code is ErrorCode.UNSUPPORTED
        assert str(caught.value).startswith("guided_json: ")
        assert "the engine is too old" in str(caught.value)
        assert str(caught.value).endswith("; turn thinking off") == has_switch
