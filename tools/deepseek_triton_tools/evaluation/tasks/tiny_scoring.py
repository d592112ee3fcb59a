"""Whether an answer of the tiny model is right."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

_END_THINK = "</think>"
_CALL = re.compile(
    "<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?P<r1>\\w+)\n```json\n(?P<r1_arguments>.*?)\n```"
    "|(?P<v31>\\w+)<｜tool▁sep｜>(?P<v31_arguments>.*?))<｜tool▁call▁end｜>",
    re.DOTALL,
)


def is_right_answer(kind: str, accepted: Sequence[str], text: str) -> bool:
    """Compare the greedy text, up to the end token, with the accepted answers: calls and JSON as parsed.

    :param kind: the question's kind, such as "tool_call_r1".
    """
    answer = text.rsplit(_END_THINK, 1)[-1].strip()
    if kind.startswith("tool_call"):
        return _calls(answer) in [_calls(one) for one in accepted]
    if kind == "json":
        return _json(answer) in [_json(one) for one in accepted]
    return answer in accepted


def _calls(text: str) -> list[tuple[str, str, Any]] | str:
    """Return form, name and arguments of each call, or the text itself when it is not only calls."""
    if not (text.startswith("<｜tool▁calls▁begin｜>") and text.endswith("<｜tool▁calls▁end｜>")):
        return text
    calls = [
        (form, found[form], _json(found[f"{form}_arguments"]))
        for found in _CALL.finditer(text)
        for form in ("v31", "r1")
        if found[form]
    ]
    return calls or text


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
