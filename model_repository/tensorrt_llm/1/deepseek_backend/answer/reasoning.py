"""Separates the model's reasoning from its answer while both stream.

DeepSeek writes its reasoning between <think> and </think>, at the beginning of its output. Some chat templates end with
the opening tag, so that the output begins inside it; others leave the tag to the model. A model that begins to call
tools has also ended its reasoning; at times it leaves out the closing tag.

Anywhere else the tags are plain text. That includes a closing tag without an opening one in the prompt or the output:
the text before it may be an answer about the tag, so it is sent as an answer and not hidden on a guess.
"""

from __future__ import annotations

from enum import Enum, auto

from deepseek_backend.engines.tags import BEGINNINGS, CLOSING, OPENING, WHITE_SPACE

_OPENING_LINE = OPENING + "\n"
_ENDS = (CLOSING, *BEGINNINGS)
"""They all begin with "<" and have it nowhere else."""


class _OutputPart(Enum):
    """The part of the output that comes next."""

    BEGINNING = auto()
    """White space and perhaps a part of the opening tag, all of it held back."""
    REASONING = auto()
    GAP = auto()
    """White space between the closing tag and the answer."""
    ANSWER = auto()


class ReasoningSplitter:
    """Splits the text of one sequence. Not thread-safe.

    The result does not depend on how the text is cut into chunks. All of the text comes out except for the two tags,
    white space before the opening tag, a newline after it, and white space after the closing tag.
    """

    def __init__(self, *, opened: bool) -> None:
        """`opened`: the prompt ends inside the tag. The model may repeat the tag even so, as R1 does."""
        self._opened = opened
        self._part = _OutputPart.BEGINNING
        self._held = ""
        self.has_reasoned = False
        """The output has reasoning, be it empty."""

    @property
    def is_past(self) -> bool:
        """The reasoning has ended, or there is none."""
        return self._part in (_OutputPart.GAP, _OutputPart.ANSWER)

    def push(self, text: str) -> tuple[str, str]:
        """Return the (reasoning, answer) that may be sent now. What may be the beginning of a tag is held back."""
        if self._part is _OutputPart.ANSWER:
            return "", text
        reasoning = ""
        text, self._held = self._held + text, ""
        if self._part is _OutputPart.BEGINNING:
            text = self._after_beginning(text)
        if self._part is _OutputPart.REASONING:
            reasoning, text = self._up_to_end(text)
        if self._part is _OutputPart.GAP:
            text = text.lstrip(WHITE_SPACE)
            if text:
                self._part = _OutputPart.ANSWER
        return reasoning, text

    def finish(self) -> tuple[str, str]:
        """Return what was held back, at the end of the sequence. Reasoning that was never closed stays reasoning."""
        held, self._held = self._held, ""
        if self._part is _OutputPart.BEGINNING:
            held = self._begin(held)
        return (held, "") if self._part is _OutputPart.REASONING else ("", held)

    def _after_beginning(self, text: str) -> str:
        """Return the text after the output's opening tag, if there is one; nothing while that can't be told."""
        start = text.lstrip(WHITE_SPACE)
        if len(start) < len(_OPENING_LINE) and _OPENING_LINE.startswith(start):
            self._held = text
            return ""
        return self._begin(text)

    def _begin(self, text: str) -> str:
        """Settle which part `text`, the output so far, begins with, and return what follows the opening tag."""
        start = text.lstrip(WHITE_SPACE)
        if start.startswith(OPENING):
            self._part, self.has_reasoned = _OutputPart.REASONING, True
            return start.removeprefix(OPENING).removeprefix("\n")
        if self._opened:
            self._part, self.has_reasoned = _OutputPart.REASONING, True
            return text.removeprefix("\n")
        self._part = _OutputPart.ANSWER
        return text

    def _up_to_end(self, text: str) -> tuple[str, str]:
        """Return (reasoning, the text that follows it). Calls of tools are part of what follows."""
        start = text.find("<")
        while start >= 0:
            rest = text[start:]
            for tag in _ENDS:
                if rest.startswith(tag):
                    self._part = _OutputPart.GAP if tag == CLOSING else _OutputPart.ANSWER
                    return text[:start], rest.removeprefix(CLOSING)
                if tag.startswith(rest):
                    self._held = rest
                    return text[:start], ""
            start = text.find("<", start + 1)
        return text, ""
