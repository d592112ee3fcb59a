"""A model's text on the terminal: reasoning is dimmed, and control characters are shown instead of obeyed."""

from __future__ import annotations

import re
from typing import TextIO

from deepseek_triton_tools.terminal.output_streams import has_style

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""The control characters of ASCII and Latin-1, which begin every escape sequence, without newline and tab. Other
characters that don't print, such as joiners and wide spaces, are part of what people read."""


def visible(text: str) -> str:
    """Return `text` with its control characters written out, such as \\x1b."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def dimmed(text: str, out: TextIO) -> str:
    """Return `text` dimmed if `out` shows it."""
    return f"\x1b[2m{text}\x1b[0m" if text and has_style(out) else text


class AnswerPrinter:
    """Writes an answer while it comes. A pipe or a file gets the text unchanged."""

    def __init__(self, out: TextIO, *, with_reasoning: bool = True) -> None:
        self._out = out
        self._with_reasoning = with_reasoning
        self._is_reasoning = False

    def show(self, text: str, reasoning: str = "") -> None:
        if reasoning:
            self._is_reasoning = True
            if self._with_reasoning:
                self._write(dimmed(self._safe(reasoning), self._out))
        if self._is_reasoning:
            text = text.lstrip("\n")  # one empty line separates reasoning and answer, however many the model writes
            if text:
                self._is_reasoning = False
                self._write("\n\n" if self._with_reasoning else "")
        if text:
            self._write(self._safe(text))

    def end(self) -> None:
        """End the line, so that what follows (an error, another answer) begins a line of its own."""
        self._is_reasoning = False
        self._write("\n")

    def _safe(self, text: str) -> str:
        return visible(text) if self._out.isatty() else text

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
