"""The chat templates of V3.1 and R1, and the prompts of V4, which the corpus uses too.

The special tokens are as DeepSeek publishes them. One thing is
added: the published templates drop `tools`, and these describe them after the system text, in the form of V3.1's model
card. The last line of that description shows how a call is written, which tells the model which form to write.
V4 has no template: the backend writes its prompts, here as everywhere.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from jinja2 import Environment, Template, TemplateError
from jinja2.ext import loopcontrols

from deepseek_backend.engines.tags import CLOSING
from deepseek_backend.messages import ToolUse
from deepseek_backend.v4_prompt import V4, render_v4
from tiny_checkpoint.architecture import BOS, CALL, CALLS, END_CALL, END_CALLS, EOS, SEPARATOR

Form = Literal["v31", "r1", "v4"]
Message = dict[str, Any]
Tool = dict[str, Any]

TOOLS_HEADING = "## Tools\nYou can call these tools:"
CALL_HINT = "Write a call like this:"
_FOLDER = Path(__file__).with_name("templates")


def calls_text(calls: Sequence[tuple[str, str]], form: Form) -> str:
    """Return what the model writes to call tools; each call is a name and its arguments as JSON."""
    if form == "v4":
        prompt = render_v4(V4, [called(calls), *({"role": "tool", "content": ""} for _ in calls)], {}, ToolUse()).prompt
        return prompt.split(CLOSING, 1)[1].split(EOS, 1)[0]
    if form == "v31":
        written = "".join(f"{CALL}{name}{SEPARATOR}{arguments}{END_CALL}" for name, arguments in calls)
    else:
        written = "\n".join(
            f"{CALL}function{SEPARATOR}{name}\n```json\n{arguments}\n```{END_CALL}" for name, arguments in calls
        )
    return f"{CALLS}{written}{END_CALLS}"


def called(calls: Sequence[tuple[str, str]]) -> Message:
    """Return the assistant's message with calls."""
    functions = [{"type": "function", "function": {"name": name, "arguments": text}} for name, text in calls]
    return {"role": "assistant", "content": "", "tool_calls": functions}


def _call_shape(form: Form) -> str:
    return calls_text([("NAME", '{"KEY": "VALUE"}')], form)


def _template(form: Form) -> str:
    begin, turns = (_FOLDER.joinpath(f"{name}.jinja").read_text(encoding="utf-8") for name in ("begin", form))
    for place, text in (("@HEADING@", TOOLS_HEADING), ("@HINT@", CALL_HINT), ("@SHAPE@", _call_shape(form))):
        begin = begin.replace(place, text.replace("\n", r"\n"))
    return begin + turns


V31_TEMPLATE, R1_TEMPLATE = _template("v31"), _template("r1")


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


# As transformers compiles them, but without its sandbox, which takes time.
_ENVIRONMENT = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
_ENVIRONMENT.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
_ENVIRONMENT.globals["raise_exception"] = _refuse
_COMPILED: dict[Form, Template] = {
    "v31": _ENVIRONMENT.from_string(V31_TEMPLATE),
    "r1": _ENVIRONMENT.from_string(R1_TEMPLATE),
}


def render_tools(tools: Sequence[Tool], form: Form, heading: str = TOOLS_HEADING, hint: str = CALL_HINT) -> str:
    """Return the description of `tools` that follows the system text."""
    described = "".join(
        f"\n\n### {tool['function']['name']}\nDescription: {tool['function'].get('description') or ''}"
        f"\nParameters: {json.dumps(tool['function'].get('parameters') or {}, ensure_ascii=False)}"
        for tool in tools
    )
    return f"{heading}{described}\n\n{hint}\n{_call_shape(form)}\n"


def render(messages: Sequence[Message], form: Form, *, tools_text: str = "", **variables: Any) -> str:
    """Return the text that the form's template renders; `tools_text` is a description of tools in other words.

    :param variables: of the template: `tools`, `thinking`.
    """
    if tools_text:
        # The description follows the system text, with an empty line between, as a second system text does.
        messages = [*messages, {"role": "system", "content": tools_text}]
    return _COMPILED[form].render(
        {"messages": messages, "bos_token": BOS, "eos_token": EOS, "add_generation_prompt": True} | variables
    )
