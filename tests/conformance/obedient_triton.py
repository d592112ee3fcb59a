"""A server whose model does what it is told: it calls the tools that a text asks for, and follows JSON schemas.

The tiny model knows five tools, and its engine no schemas; the tests of others bring their own. The answers are in the
wire contract's words (docs/contract.md) and in V3.1's form of calls. A text that begins with OVERLOADED is refused the
first time.
"""

import json
import re

from deepseek_triton_client import Overloaded
from deepseek_triton_client.testing import FakeServer

CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
OVERLOADED = "Overloaded:"
INFO = {"name": "obedient", "checkpoint": "/obedient", "max_seq_len": 4096, "thinking_switch": True}
INFO |= {"fields": {"guided_json": "", "guided_json_object": ""}}
_PIECE = 5
"""Characters in each event of a stream."""


class ObedientTriton(FakeServer):
    def __init__(self):
        super().__init__()
        self.answer = self._answered
        self._refused = set()

    def _answered(self, request):
        inputs = request.body
        if inputs.get("task") == "describe":
            yield {"model_info": json.dumps(INFO), "finish_reason": "stop"}
            return
        asked = _asked(inputs)
        if asked.startswith(OVERLOADED) and asked not in self._refused:
            self._refused.add(asked)
            raise Overloaded("too many requests are in flight")
        thinks = json.loads(inputs.get("chat_template_kwargs") or "{}").get("thinking") is True
        if thinks:
            yield {"text_output": "", "reasoning_output": "Hm.", "num_output_tokens": 1}
        text = _told(inputs) or "I do what I am told."
        for at in range(0, len(text), _PIECE):
            yield {"text_output": text[at : at + _PIECE], "num_output_tokens": 1}
        counts = {"num_input_tokens": 10, "num_cached_tokens": 4, "num_reasoning_tokens": int(thinks)}
        yield {"text_output": "", "finish_reason": "stop", **counts}


def _told(inputs):
    """The answer to a request with tools or with a guide; None for all others."""
    messages = json.loads(inputs.get("messages") or "[]")
    tools = json.loads(inputs.get("tools") or "[]")
    asked = _asked(inputs)
    guides = {**inputs, **json.loads(inputs.get("sampling_parameters") or "{}")}
    if schema := guides.get("guided_json"):
        return json.dumps(_instance(json.loads(schema), asked), ensure_ascii=False)
    if guides.get("guided_json_object"):
        return json.dumps(dict.fromkeys(re.findall(r"'(\w+)'", asked), "a cat"))
    if not tools or inputs.get("tool_choice") == "none":
        return None
    if messages[-1]["role"] == "tool":
        return f"The tool said: {messages[-1]['content']}"
    function = _chosen(tools, inputs.get("tool_choice", "auto"), asked)
    arguments = json.dumps(_instance(function.get("parameters") or {}, asked), ensure_ascii=False)
    return f"{CALLS}{CALL}{function['name']}{SEPARATOR}{arguments}{END_CALL}{END_CALLS}"


def _asked(inputs):
    """The user's last text; "" where there is none."""
    messages = json.loads(inputs.get("messages") or "[]")
    return next((str(message["content"]) for message in reversed(messages) if message["role"] == "user"), "")


def _chosen(tools, choice, asked):
    functions = [tool["function"] for tool in tools]
    name = json.loads(choice)["function"]["name"] if choice.startswith("{") else None
    wanted = (
        function for function in functions if function["name"] == name or (not name and function["name"] in asked)
    )
    return next(wanted, functions[0])


def _instance(schema, asked):
    """A value that follows a JSON schema, with the text's numbers and quoted words."""
    if "$ref" in schema or "anyOf" in schema or "enum" in schema:
        return schema["enum"][0] if "enum" in schema else None
    kind = schema.get("type", "object")
    if kind == "object":
        return {name: _instance(part, asked) for name, part in schema.get("properties", {}).items()}
    if kind in ("integer", "number"):
        return int((re.findall(r"-?\d+", asked) or ["1"])[0])
    if kind == "array":
        return [_instance(schema.get("items", {"type": "string"}), asked)]
    return (re.findall(r"'([^']+)'", asked) or ["Pirate"])[0] if kind == "string" else kind == "boolean"
