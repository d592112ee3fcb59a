"""Finds stop strings and the reasoning in the text while it streams, in the same way for every engine.

Engines that know stop strings match them as token sequences and miss those that are tokenized differently in context;
matching text has no such gap. The price is that the end of the text is held back while it may be the beginning of a
stop string.
"""

from collections.abc import Sequence
from enum import Enum, auto
from functools import lru_cache

from deepseek_backend.engines.tags import BEGINNINGS, CLOSING, DSML, OPENING, WHITE_SPACE


class StopStringFilter:
    """Passes text through up to the first of `stops`. Each sequence has one of its own. Not thread-safe."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._searches = tuple(map(_Search, stops))
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> str:
        """Return the text that may be sent now; nothing once a stop string has matched."""
        if not self._searches:
            return text
        if self.matched is not None:
            return ""
        found: list[tuple[int, int, str]] = []
        length = 0
        for search in self._searches:
            end = search.end_in(text)
            if end is not None:
                found.append((end, -len(search.stop), search.stop))
            elif search.length > length:
                length = search.length
        text = self._held + text
        if found:
            # The stop string that is complete first wins: the result must not depend on how the text was cut.
            end, _, self.matched = min(found)
            end += len(self._held)
            self._held = ""
            return text[:end] if self._include_stop else text[: end - len(self.matched)]
        end = len(text) - length
        self._held = text[end:]
        return text[:end]

    def finish(self) -> str:
        """Return what was held back, at the end of a sequence that no stop string ended."""
        held, self._held = self._held, ""
        return held


class _Search:
    """The search for one stop string, after Knuth, Morris and Pratt: no character is read again with the next piece."""

    __slots__ = ("length", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        """Length of the longest end of the text so far with which the stop string begins."""

    def end_in(self, text: str) -> int | None:
        """Return where in `text`, the next piece, the stop string is first complete; None where it is not."""
        stop, length, position = self.stop, self.length, 0
        if len(text) >= len(stop):  # find() is much faster; only the end of the text is left to the loop below
            start = (stop[:length] + text).find(stop)
            if start >= 0:
                return start - length + len(stop)
            length, position = 0, len(text) - len(stop) + 1
        while length < len(stop):
            if not length:  # nearly always: find() skips most of the text
                position = text.find(stop[0], position)
            if not 0 <= position < len(text):
                self.length = length
                return None
            if text[position] == stop[length]:
                position, length = position + 1, length + 1
            else:
                length = _borders(stop)[length - 1]
        return position


@lru_cache(maxsize=1024)
def _borders(stop: str) -> Sequence[int]:
    """Return, for each prefix of `stop`, the length of its longest proper suffix that is also a prefix of `stop`."""
    borders = [0]
    for character in stop[1:]:
        length = borders[-1]
        while length and stop[length] != character:
            length = borders[length - 1]
        borders.append(length + (stop[length] == character))
    return borders


_OPENING_LINE = OPENING + "\n"
# They all begin with "<" and have it nowhere else.
_ENDS = (CLOSING, *BEGINNINGS)


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
    white space before the opening tag, a newline after it, newlines before the closing tag or a call, white space after
    the closing tag, and newlines at the beginning where the prompt ends with a tag or inside of it.
    """

    def __init__(self, *, opened: bool, closed: bool = False) -> None:
        """Begin a sequence.

        :param opened: the prompt ends inside the tag. The model may repeat the tag even so, as R1 does.
        :param closed: the prompt ends with the closing tag.
        """
        self._opened, self._closed = opened, closed
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
            start = text.lstrip(WHITE_SPACE)
            if len(start) < len(_OPENING_LINE) and _OPENING_LINE.startswith(start):
                self._held = text  # whether the output begins with the tag can't be told yet
                return "", ""
            text = self._begin(text)
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
        if self._part is _OutputPart.REASONING and DSML in held:
            held = ""  # the beginning of a call's tag
        return (held, "") if self._part is _OutputPart.REASONING else ("", held)

    def _begin(self, text: str) -> str:
        """Settle which part `text`, the output so far, begins with, and return what follows the opening tag."""
        start = text.lstrip(WHITE_SPACE)
        if start.startswith(OPENING):
            self._part, self.has_reasoned = _OutputPart.REASONING, True
            return start.removeprefix(OPENING).removeprefix("\n")
        if self._opened:
            self._part, self.has_reasoned = _OutputPart.REASONING, True
            return text.lstrip("\n")
        self._part = _OutputPart.ANSWER
        return text.lstrip("\n") if self._closed else text

    def _up_to_end(self, text: str) -> tuple[str, str]:
        """Return (reasoning, the text that follows it). Calls of tools are part of what follows."""
        start = text.find("<")
        while start >= 0:
            rest = text[start:]
            reasoning = text[:start].rstrip("\n")
            for tag in _ENDS:
                if rest.startswith(tag):
                    self._part = _OutputPart.GAP if tag == CLOSING else _OutputPart.ANSWER
                    return reasoning, rest.removeprefix(CLOSING)
                if tag.startswith(rest):
                    self._held = text[len(reasoning) :]
                    return reasoning, ""
            start = text.find("<", start + 1)
        reasoning = text.rstrip("\n")
        self._held = text[len(reasoning) :]
        return reasoning, ""
