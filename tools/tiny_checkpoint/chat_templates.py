"""The chat templates of V3.1 and R1: as Jinja text for the checkpoint, and in plain Python, which the corpus uses.

Both forms render the same text; a test holds that. The special tokens are as DeepSeek publishes them. One thing is
added: the published templates drop `tools`, and these describe them after the system text, in the form of V3.1's model
card. The last line of that description shows how a call is written, which tells the model which form to write.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from tiny_checkpoint.special_tokens import (
    ASSISTANT,
    BOS,
    CALL,
    CALLS,
    END_CALL,
    END_CALLS,
    END_OUTPUT,
    END_OUTPUTS,
    END_THINK,
    EOS,
    OUTPUT,
    OUTPUTS,
    SEPARATOR,
    THINK,
    USER,
)

Form = Literal["v31", "r1"]
Message = dict[str, Any]
Tool = dict[str, Any]

TOOLS_HEADING = "## Tools\nYou can call these tools:"
CALL_HINT = "Write a call like this:"

_SHARED_BEGIN = r"""
{#- `tools` are in no published template. Here they follow the system text. -#}
{%- if thinking is defined and thinking is not boolean -%}
  {{- raise_exception('thinking: expected true or false') -}}
{%- endif -%}
{%- macro text_of(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- elif content -%}
    {%- for part in content -%}
      {%- if part.type != 'text' -%}
        {{- raise_exception('expected content parts of type text, got ' + part.type) -}}
      {%- endif -%}
      {{- part.text -}}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- macro json_of(arguments) -%}
  {{- arguments if arguments is string else arguments | tojson -}}
{%- endmacro -%}
{%- set ns = namespace(head='', after='') -%}
{%- for message in messages -%}
  {%- if message.role == 'system' -%}
    {%- set text = text_of(message.content) -%}
    {%- set ns.head = ns.head + ('\n\n' if ns.head and text else '') + text -%}
  {%- elif message.role not in ['user', 'assistant', 'tool'] -%}
    {{- raise_exception('expected a role of system, user, assistant or tool, got ' + message.role) -}}
  {%- endif -%}
{%- endfor -%}
{{- bos_token + ns.head -}}
{%- if tools -%}
  {{- ('\n\n' if ns.head else '') + '@HEADING@' -}}
  {%- for tool in tools -%}
    {%- set function = tool.function -%}
    {{- '\n\n### ' + function.name + '\nDescription: ' + (function.description or '') -}}
    {{- '\nParameters: ' + ((function.parameters or {}) | tojson) -}}
  {%- endfor -%}
  {{- '\n\n@HINT@\n@SHAPE@\n' -}}
{%- endif -%}
"""

_V31_TURNS = r"""
{%- for message in messages -%}
  {%- if message.role == 'user' -%}
    {{- '<｜User｜>' + text_of(message.content) -}}
    {%- set ns.after = 'user' -%}
  {%- elif message.role == 'assistant' -%}
    {{- '<｜Assistant｜></think>' if ns.after == 'user' -}}
    {{- text_of(message.content).split('</think>', 1)[-1] -}}
    {%- if message.tool_calls -%}
      {{- '<｜tool▁calls▁begin｜>' -}}
      {%- for call in message.tool_calls -%}
        {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' -}}
        {{- json_of(call.function.arguments) + '<｜tool▁call▁end｜>' -}}
      {%- endfor -%}
      {{- '<｜tool▁calls▁end｜>' -}}
    {%- endif -%}
    {{- eos_token -}}
    {%- set ns.after = 'assistant' -%}
  {%- elif message.role == 'tool' -%}
    {{- '<｜tool▁output▁begin｜>' + text_of(message.content) + '<｜tool▁output▁end｜>' -}}
    {%- set ns.after = 'tool' -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and ns.after == 'user' -%}
  {{- '<｜Assistant｜>' + ('<think>' if thinking else '</think>') -}}
{%- endif -%}
"""

_R1_TURNS = r"""
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    {{- '\n' if ns.after == 'tool' else '<｜tool▁outputs▁begin｜>' -}}
    {{- '<｜tool▁output▁begin｜>' + text_of(message.content) + '<｜tool▁output▁end｜>' -}}
    {%- set ns.after = 'tool' -%}
  {%- elif message.role != 'system' -%}
    {{- '<｜tool▁outputs▁end｜>' if ns.after == 'tool' -}}
    {%- if message.role == 'user' -%}
      {{- '<｜User｜>' + text_of(message.content) -}}
    {%- else -%}
      {{- '<｜Assistant｜>' if ns.after != 'tool' -}}
      {{- text_of(message.content).split('</think>', 1)[-1] -}}
      {%- if message.tool_calls -%}
        {{- '<｜tool▁calls▁begin｜>' -}}
        {%- for call in message.tool_calls -%}
          {{- '' if loop.first else '\n' -}}
          {{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\n```json\n' -}}
          {{- json_of(call.function.arguments) + '\n```<｜tool▁call▁end｜>' -}}
        {%- endfor -%}
        {{- '<｜tool▁calls▁end｜>' -}}
      {%- endif -%}
      {{- eos_token -}}
    {%- endif -%}
    {%- set ns.after = message.role -%}
  {%- endif -%}
{%- endfor -%}
{{- '<｜tool▁outputs▁end｜>' if ns.after == 'tool' -}}
{%- if add_generation_prompt and ns.after != 'tool' -%}
  {{- '<｜Assistant｜><think>\n' -}}
{%- endif -%}
"""


def calls_text(calls: Sequence[tuple[str, str]], form: Form) -> str:
    """Return what the model writes to call tools; each call is a name and its arguments as JSON."""
    if form == "v31":
        written = "".join(f"{CALL}{name}{SEPARATOR}{arguments}{END_CALL}" for name, arguments in calls)
    else:
        written = "\n".join(
            f"{CALL}function{SEPARATOR}{name}\n```json\n{arguments}\n```{END_CALL}" for name, arguments in calls
        )
    return f"{CALLS}{written}{END_CALLS}"


def _call_shape(form: Form) -> str:
    return calls_text([("NAME", '{"KEY": "VALUE"}')], form)


def _template(turns: str, form: Form) -> str:
    begin = _SHARED_BEGIN
    for place, text in (("@HEADING@", TOOLS_HEADING), ("@HINT@", CALL_HINT), ("@SHAPE@", _call_shape(form))):
        begin = begin.replace(place, text.replace("\n", r"\n"))
    return begin.strip("\n") + "\n" + turns.strip("\n") + "\n"


V31_TEMPLATE = _template(_V31_TURNS, "v31")
R1_TEMPLATE = _template(_R1_TURNS, "r1")


def render_tools(tools: Sequence[Tool], form: Form, heading: str = TOOLS_HEADING, hint: str = CALL_HINT) -> str:
    """Return the description of `tools` that follows the system text."""
    described = "".join(
        f"\n\n### {tool['function']['name']}\nDescription: {tool['function'].get('description') or ''}"
        f"\nParameters: {json.dumps(tool['function'].get('parameters') or {}, ensure_ascii=False)}"
        for tool in tools
    )
    return f"{heading}{described}\n\n{hint}\n{_call_shape(form)}\n"


def render(
    messages: Sequence[Message],
    form: Form,
    *,
    thinking: bool = False,
    tools: Sequence[Tool] = (),
    add_generation_prompt: bool = True,
    tools_text: str = "",
) -> str:
    """Return the text that the form's template renders; `tools_text` replaces the description of `tools`.

    The contents are strings, the roles known, and the calls' arguments are JSON text.
    """
    system_texts = (message["content"] for message in messages if message["role"] == "system")
    system = "\n\n".join(filter(None, system_texts))
    described = tools_text or (render_tools(tools, form) if tools else "")
    head = BOS + system + ("\n\n" if system and described else "") + described
    turns = [message for message in messages if message["role"] != "system"]
    if form == "v31":
        return head + _v31_turns(turns, thinking, add_generation_prompt)
    return head + _r1_turns(turns, add_generation_prompt)


def _written(message: Message, form: Form) -> str:
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    text: str = (message["content"] or "").split(END_THINK, 1)[-1]
    return text + (calls_text(calls, form) if calls else "") + EOS


def _v31_turns(turns: Sequence[Message], thinking: bool, add_generation_prompt: bool) -> str:
    text, after = "", ""
    for message in turns:
        if message["role"] == "user":
            text += USER + message["content"]
        elif message["role"] == "tool":
            text += OUTPUT + message["content"] + END_OUTPUT
        else:
            text += (ASSISTANT + END_THINK if after == "user" else "") + _written(message, "v31")
        after = message["role"]
    if add_generation_prompt and after == "user":
        text += ASSISTANT + (THINK if thinking else END_THINK)
    return text


def _r1_turns(turns: Sequence[Message], add_generation_prompt: bool) -> str:
    text, after = "", ""
    for message in turns:
        role = message["role"]
        if role == "tool":
            text += ("\n" if after == "tool" else OUTPUTS) + OUTPUT + message["content"] + END_OUTPUT
        else:
            text += END_OUTPUTS if after == "tool" else ""
            if role == "user":
                text += USER + message["content"]
            else:
                text += ("" if after == "tool" else ASSISTANT) + _written(message, "r1")
        after = role
    if after == "tool":
        return text + END_OUTPUTS
    return text + (f"{ASSISTANT}{THINK}\n" if add_generation_prompt else "")
