"""The model's thinking, told from its answer while both stream.

DeepSeek writes it between <think> and </think>, at the beginning of its output. Some chat templates end with the
opening tag, so that the output begins inside it; others leave the tag to the model.

Anywhere else the tags are plain text. That includes a closing tag in an output that nothing seen here has opened: the
text before it may be an answer about the tag, and is shown as what it is rather than hidden on a guess.
"""

from __future__ import annotations

from enum import Enum, auto

from deepseek_backend.engines.reasoning_tags import CLOSING, OPENING, WHITE_SPACE

_OPENING_LINE = OPENING + "\n"


class _OutputPart(Enum):
    """Where the output has come to."""

    BEGINNING = auto()
    """White space and perhaps a part of the opening tag, all of it held back."""
    THINKING = auto()
    GAP = auto()
    """After the closing tag, before the answer."""
    ANSWER = auto()


class ReasoningSplitter:
    """Splits the text of one sequence. Not thread-safe.

    How the text is cut into chunks makes no difference. All of it comes out but for the two tags, white space before
    the opening one, a newline after it, and white space after the closing one.
    """

    def __init__(self, *, opened: bool) -> None:
        """`opened`: the prompt ends inside the tag. The model may repeat the tag all the same, as R1 does."""
        self._opened = opened
        self._place = _OutputPart.BEGINNING
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """(thinking, answer) that may be shown now; the beginning of a tag is held back until it is one or isn't."""
        if self._place is _OutputPart.ANSWER:
            return "", text
        thinking = ""
        text, self._held = self._held + text, ""
        if self._place is _OutputPart.BEGINNING:
            text = self._after_beginning(text)
        if self._place is _OutputPart.THINKING:
            thinking, text = self._up_to_closing(text)
        if self._place is _OutputPart.GAP:
            text = text.lstrip(WHITE_SPACE)
            if text:
                self._place = _OutputPart.ANSWER
        return thinking, text

    def finish(self) -> tuple[str, str]:
        """What was held back, at the end of the sequence. Thinking that was never closed stays thinking."""
        held, self._held = self._held, ""
        if self._place is _OutputPart.BEGINNING:
            held = self._begin(held)
        return (held, "") if self._place is _OutputPart.THINKING else ("", held)

    def _after_beginning(self, text: str) -> str:
        """The text that follows what opens the output; empty while that can't be told."""
        start = text.lstrip(WHITE_SPACE)
        if len(start) < len(_OPENING_LINE) and _OPENING_LINE.startswith(start):
            self._held = text
            return ""
        return self._begin(text)

    def _begin(self, text: str) -> str:
        """Settle what `text`, the output so far, begins with, and return what follows that."""
        start = text.lstrip(WHITE_SPACE)
        if start.startswith(OPENING):
            self._place = _OutputPart.THINKING
            return start.removeprefix(OPENING).removeprefix("\n")
        if self._opened:
            self._place = _OutputPart.THINKING
            return text.removeprefix("\n")
        self._place = _OutputPart.ANSWER
        return text

    def _up_to_closing(self, text: str) -> tuple[str, str]:
        """(thinking, what follows the closing tag)"""
        thinking, closing, rest = text.partition(CLOSING)
        if closing:
            self._place = _OutputPart.GAP
            return thinking, rest
        start = text.rfind(CLOSING[0])  # nowhere else in the tag: it can't begin earlier and still be incomplete
        if start >= 0 and CLOSING.startswith(text[start:]):
            self._held = text[start:]
            return text[:start], ""
        return text, ""
