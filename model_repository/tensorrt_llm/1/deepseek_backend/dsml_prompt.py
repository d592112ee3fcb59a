"""Renders a conversation for DeepSeek-V3.2, which has no chat template: DeepSeek gives a program instead.

It follows that program, encoding_dsv32.py in the checkpoint's folder, but for its "developer" messages, which have no
place in a chat.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from deepseek_backend.contract import ErrorCode
from deepseek_backend.engines.generate_request import Messages
from deepseek_backend.engines.tags import CLOSING, DSML, DSML_BEGIN, DSML_END, OPENING
from deepseek_backend.errors import RequestError
from deepseek_backend.field_values import listed, quoted, read_object

_BOS, _EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_TOOLS = f"""## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "{DSML_BEGIN}" block like the following as part of your reply to the user:
{DSML_BEGIN}
<{DSML}invoke name="$FUNCTION_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$FUNCTION_NAME2">
...
</{DSML}invoke>
{DSML_END}

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should \
use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types \
(numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. \
Here is an example:

{DSML_BEGIN}
...
{DSML_END}

<function_results>
...
</function_results>

{OPENING}...thinking about results{CLOSING}

Here are the functions available in JSONSchema format:
<functions>
%s
</functions>
"""
"""The words that the model was trained with."""


def render_dsml(messages: Messages, tools: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any]) -> str:
    """Return the prompt. A last message of the assistant is left open, for the answer to continue it.

    :raises RequestError: for template arguments other than `thinking`, and for arguments of a call that are no object.
    """
    if unknown := [name for name in template_kwargs if name != "thinking"]:
        raise RequestError(f"chat_template_kwargs: DeepSeek-V3.2 has no {listed(unknown)}; it knows thinking")
    thinks = template_kwargs.get("thinking", False)
    if not isinstance(thinks, bool):
        raise RequestError(f"chat_template_kwargs.thinking: expected true or false, got {quoted(thinks)}")
    last_user = max((place for place, message in enumerate(messages) if message["role"] == "user"), default=-1)
    text = _BOS + "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    if tools:
        text += "\n\n" + _TOOLS % "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    for place, message in enumerate(messages):
        role, content = message["role"], message["content"] or ""
        tag = OPENING if thinks and place >= last_user else CLOSING
        if role == "user":
            text += f"<｜User｜>{content}<｜Assistant｜>{tag}"
        elif role == "tool":
            first = messages[place - 1]["role"] != "tool" if place else True
            text += ("\n\n<function_results>" if first else "") + f"\n<result>{content}</result>"
            if place == len(messages) - 1 or messages[place + 1]["role"] != "tool":
                text += f"\n</function_results>\n\n{tag}"
        elif role == "assistant":
            if thinks and place > last_user:
                text += message.get("reasoning_content", "") + CLOSING
            text += content
            if calls := message.get("tool_calls"):
                written = "\n".join(_call(f"messages[{place}]", call["function"]) for call in calls)
                text += f"\n\n{DSML_BEGIN}\n{written}\n{DSML_END}"
            text += "" if message.get("prefix") else _EOS
    return text


def _call(where: str, function: Mapping[str, Any]) -> str:
    arguments = read_object(function["arguments"])
    if arguments is None:
        raise RequestError(
            f"{where}: expected a JSON object as arguments of {function['name']}, got {quoted(function['arguments'])}",
            code=ErrorCode.INVALID_ARGUMENT,
        )
    parameters = "\n".join(
        f'<{DSML}parameter name="{name}" string="{str(isinstance(value, str)).lower()}">'
        f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}</{DSML}parameter>"
        for name, value in arguments.items()
    )
    return f'<{DSML}invoke name="{function["name"]}">\n{parameters}\n</{DSML}invoke>'
