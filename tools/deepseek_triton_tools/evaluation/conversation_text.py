"""A conversation as one text: lm-eval passes texts only, from its tasks through to its models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_MARK = "\x1emessages "
"""No prompt begins with a record separator."""


def as_text(messages: Sequence[Mapping[str, Any]]) -> str:
    return _MARK + json.dumps(messages, ensure_ascii=False)


def conversation_in(text: str) -> list[dict[str, Any]] | None:
    """Return the messages; None for a text that is a prompt."""
    if not text.startswith(_MARK):
        return None
    messages: list[dict[str, Any]] = json.loads(text.removeprefix(_MARK))
    return messages
