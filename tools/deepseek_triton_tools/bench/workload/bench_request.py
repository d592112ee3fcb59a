"""One request of a dataset, and conversations of several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """A request to send. In a conversation, the prompt is only what the user adds in this turn."""

    prompt: str | tuple[int, ...]
    """Text, or token ids."""
    output_tokens: int | None = None
    """Number of tokens to generate; None: the server's default."""
    at_s: float | None = None
    """Seconds after the start of the run at which a trace sends it. In a conversation only the first turn has it."""
    wait_s: float = 0.0
    """Seconds between the end of the turn before and this one."""
    fields: Mapping[str, Any] | None = None
    """More sampling fields of this request."""


Conversation: TypeAlias = tuple[BenchRequest, ...]
"""Turns that are sent one after the other; each prompt follows the text so far. A plain request is one of one turn."""
