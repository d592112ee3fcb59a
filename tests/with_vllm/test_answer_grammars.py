"""The forms of whole answers, as the xgrammar that comes with vLLM reads them."""

from __future__ import annotations

from typing import Any

import pytest
import xgrammar
from xgrammar.testing import _is_grammar_accept_string as accepts

from deepseek_backend.answer_format import with_answer_format
from deepseek_backend.chat_rendering import FENCED, RAW_JSON, CallForm
from deepseek_backend.engines.generate_request import SamplingParams
from deepseek_backend.engines.tags import CALLS_END
from deepseek_backend.messages import ToolUse

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}},
    {"type": "function", "function": {"name": "time", "parameters": CITY}},
]
NUMBER = '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'
FORMS = pytest.mark.parametrize("form", [RAW_JSON, FENCED], ids=lambda form: form.name)


def answers(form: CallForm) -> dict[str, str]:
    """Answers by name. `wrong` breaks the strict tool's schema, and `unknown` calls a tool that is not there."""
    weather = f'{form.beginning("weather")}{{"city": "Paris"}}{form.after_arguments}'
    time = f'{form.between_calls}{form.call_begins}time{form.after_name}{{"any": [1]}}{form.after_arguments}'
    return {
        "json": '{"n": 1}',
        "text": "hello",
        "call": weather + CALLS_END,
        "calls": weather + time + CALLS_END,
        "wrong": f'{form.beginning("weather")}{{"town": 1}}{form.after_arguments}{CALLS_END}',
        "unknown": f"{form.beginning('nobody')}{{}}{form.after_arguments}{CALLS_END}",
    }


def accepted(form: CallForm, tool_use: ToolUse, *, before: str = "", begun: str = "", **given: Any) -> set[str]:
    """Names of the answers that the grammar takes. before: what the model writes first."""
    prompt = given.pop("prompt", "Why?")
    sampling = with_answer_format(SamplingParams(**given), tool_use, form, prompt=prompt, begun=begun, refused="")
    grammar = xgrammar.Grammar.from_structural_tag(sampling.guided_structural_tag)
    return {name for name, answer in answers(form).items() if accepts(grammar, before + answer.removeprefix(begun))}


@FORMS
def test_a_guide_beside_tools(form: CallForm) -> None:
    assert accepted(form, ToolUse(tools=TOOLS), guided_json=NUMBER) == {"json", "call", "calls"}


@FORMS
def test_a_guide_beside_tools_after_reasoning(form: CallForm) -> None:
    given = {"prompt": "<think>\n", "before": "Hm, {}.</think>", "guided_json": NUMBER}
    assert accepted(form, ToolUse(tools=TOOLS), **given) == {"json", "call", "calls"}


@FORMS
@pytest.mark.parametrize("before", ["", "I look.", "Hm.</think>\n\n"])
def test_strict_tools_in_free_text(form: CallForm, before: str) -> None:
    assert accepted(form, ToolUse(tools=TOOLS), before=before) == {"json", "text", "call", "calls"}


@FORMS
@pytest.mark.parametrize("name", ["weather", ""], ids=["named", "required"])
def test_a_strict_call_that_the_prompt_has_begun(form: CallForm, name: str) -> None:
    tool_use = ToolUse(tools=TOOLS, required=True, name=name)
    assert accepted(form, tool_use, begun=form.beginning(name)) == {"call", "calls"}
