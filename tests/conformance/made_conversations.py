"""Requests to DeepSeek's API and answers of its models, made by chance, with all that changes prompts and parsing."""

import re

TEXTS = ["", "a", "Hi\n", "  x ", "é﹣", "<think>", "json"]
ARGUMENTS = ['{"a": "x", "b": [1, {"c": null}], "d": 1.5e10}', "{}", "not", "[1]", ' {"a" : 2} ', '{"a": 1, "a": 2}']
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer", "title": "T"}}}
TOOLS = [
    {"type": "function", "function": function}
    for function in ({"name": "f", "description": "Dé", "parameters": PARAMETERS}, {"name": "g"})
]
FORMATS = [
    {"type": "text"},
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": PARAMETERS}},
]
EFFORTS = ["none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra"]


def request(chance):
    """A body without its model."""
    body = {"messages": _messages(chance)}
    if chance.random() < 0.5:
        body["tools"] = chance.sample(TOOLS, chance.randint(1, 2))
        named = {"type": "function", "function": {"name": body["tools"][0]["function"]["name"]}}
        body["tool_choice"] = chance.choice(["auto", "auto", "none", "required", named])
    if chance.random() < 0.6:
        body["thinking"] = {"type": chance.choice(["enabled", "disabled", "adaptive"])}
    if chance.random() < 0.5:
        body["reasoning_effort"] = chance.choice(EFFORTS)
    if chance.random() < 0.3:
        body["response_format"] = chance.choice(FORMATS)
        body["messages"][-1]["content"] = "json"  # DeepSeek wants the word in the prompt
    elif chance.random() < 0.4 and "tools" not in body and not any("tool_calls" in each for each in body["messages"]):
        begun = {"role": "assistant", "content": chance.choice(TEXTS), "prefix": True, **_reasoning(chance)}
        body["messages"].append(begun)
    return body


def _messages(chance):
    messages = [{"role": "system", "content": chance.choice(TEXTS)} for _ in range(chance.randint(0, 2))]
    for turn in range(chance.randint(1, 4)):
        kind = chance.choice(["user", "user", "latest_reminder", "system", "assistant", "calls"])
        if kind == "calls":
            messages += _calls(chance, turn)
        elif kind == "assistant":
            messages.append({"role": kind, "content": chance.choice(TEXTS), **_reasoning(chance)})
        else:
            content = chance.choice(TEXTS) if kind == "latest_reminder" else _content(chance)
            messages.append({"role": kind, "content": content})
    return [*messages, {"role": "user", "content": _content(chance)}]


def _content(chance):
    parts = [{"type": "text", "text": chance.choice(TEXTS)} for _ in range(chance.randint(1, 2))]
    return chance.choice([parts, parts[0]["text"]])


def _reasoning(chance):
    return {"reasoning_content": chance.choice(TEXTS)} if chance.random() < 0.5 else {}


def _calls(chance, turn):
    calls = [
        {"id": f"{turn}-{at}", "type": "function", "function": {"name": name, "arguments": chance.choice(ARGUMENTS)}}
        for at, name in enumerate(chance.choices("fg", k=chance.randint(1, 3)))
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": _content(chance)} for call in calls]
    chance.shuffle(results)
    return [
        {"role": "assistant", "content": chance.choice([None, "a"]), "tool_calls": calls, **_reasoning(chance)},
        *results,
    ]


def answer(chance, blank, *, thinks, has_tools):
    """A text that a model generates behind its prompt, perhaps cut anywhere. blank: of V4.1's tags."""
    text = ""
    if thinks:  # without tools only the tag ends it
        ends = ["</think>", "</think>\n\n", *([""] if has_tools else [])]
        text += chance.choice(["", "\n", "Hm.", "\n\nHm.\n\n"]) + chance.choice(ends)
    text += chance.choice(["", "Hi", "a < b\n", "<｜DSM "])
    if chance.random() < 0.7:
        text += f"\n\n{_block(chance, blank)}"
    if chance.random() < 0.2:
        text += chance.choice(["More.", f"\n{_block(chance, blank)}"])
    if chance.random() < 0.3:
        text = text[: chance.randint(0, len(text))]
    return re.sub('<｜DSML｜ ?invoke name="[^>]*$', "", text)  # DeepSeek begins a call before its name's end


VALUES = [("a", "true", "Łódź\n"), ("b", "false", "[1, {}]"), ("c", "false", "no JSON"), ("d", "true", "")]


def _block(chance, blank):
    dsml, word = f"｜DSML｜{blank}", "calls" if blank else "tool_calls"
    calls = ""
    for name in chance.choices(["f", "g", "other"], k=chance.randint(1, 2)):
        calls += f'<{dsml}invoke name="{name}">\n'
        for key, is_text, value in chance.sample(VALUES, chance.randint(0, 2)):
            calls += f'<{dsml}parameter name="{key}" string="{is_text}">{value}</{dsml}parameter>\n'
        calls += f"</{dsml}invoke>\n"
    return f"<{dsml}{word}>\n{calls}</{dsml}{word}>"
