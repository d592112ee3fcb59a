"""What a model writes, on the terminal: thinking dimmed, and nothing in it that the terminal would obey."""

from __future__ import annotations

import os
import re
from typing import TextIO

# The control characters of ASCII and of Latin-1, which begin every escape sequence, but for newline and tab. Nothing
# else: joiners and wide spaces are part of what people read.
_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def visible(text: str) -> str:
    """`text` with its control characters written out, such as \\x1b."""
    return _OBEYED.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def has_style(out: TextIO) -> bool:
    """Whether `out` shows styles: a terminal of some sort, and nobody asked for none (no-color.org)."""
    return out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def dimmed(text: str, out: TextIO) -> str:
    return f"\x1b[2m{text}\x1b[0m" if text and has_style(out) else text


class AnswerPrinter:
    """Writes an answer as it comes. Into a pipe or a file it goes as it is."""

    def __init__(self, out: TextIO, *, with_reasoning: bool = True) -> None:
        self._out = out
        self._with_reasoning = with_reasoning
        self._is_thinking = False

    def show(self, text: str, reasoning: str = "") -> None:
        if reasoning:
            self._is_thinking = True
            if self._with_reasoning:
                self._write(dimmed(self._safe(reasoning), self._out))
        if self._is_thinking:
            text = text.lstrip("\n")  # one empty line stands between the two, however many the model writes
            if text:
                self._is_thinking = False
                self._write("\n\n" if self._with_reasoning else "")
        if text:
            self._write(self._safe(text))

    def end(self) -> None:
        """What follows, an error or another answer, gets a line of its own."""
        self._is_thinking = False
        self._write("\n")

    def _safe(self, text: str) -> str:
        return visible(text) if self._out.isatty() else text

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
