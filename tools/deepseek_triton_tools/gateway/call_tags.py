"""The tags around calls, as the models write them, and a reader of them while their text comes.

`｜` is U+FF5C and `▁` U+2581.

V3, R1 (fenced):     calls begin, call begin, `function`, separator, name, newline, JSON in a fence, call end, calls end
V3.1, V3.2-Exp:      calls begin, call begin, name, separator, JSON, call end, calls end
V3.2 and later:      DSML, with a tag for each call and each argument

Sources: the chat templates of DeepSeek-V3-0324, R1-0528 and V3.1, and encoding_dsv32.py of V3.2. DSML's outer tag is
`function_calls` in V3.2, `tool_calls` in V4 (encoding_dsv4.py) and ` calls` in V4.1 (encoding.py), whose other tags
have a space at the same place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
CALL_BEGIN = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCED_TYPE = "function"
"""The word in the name's place in the fenced form."""

_DSML_OUTER = ("function_calls", "tool_calls", " calls")
_SPACES = ("", " ")

DSML_CALLS_BEGIN = tuple(f"<｜DSML｜{word}>" for word in _DSML_OUTER)
DSML_CALLS_END = tuple(f"</｜DSML｜{word}>" for word in _DSML_OUTER)
DSML_CALL_BEGIN = tuple(f'<｜DSML｜{space}invoke name="' for space in _SPACES)
DSML_CALL_END = tuple(f"</｜DSML｜{space}invoke>" for space in _SPACES)
DSML_PARAMETER_BEGIN = tuple(f'<｜DSML｜{space}parameter name="' for space in _SPACES)
DSML_PARAMETER_END = tuple(f"</｜DSML｜{space}parameter>" for space in _SPACES)

AFTER_PARAMETER = DSML_PARAMETER_BEGIN + DSML_CALL_END + DSML_CALL_BEGIN + DSML_CALLS_END
"""A parameter has ended only if its end tag is followed by one of these, so a value may have the end tag in it."""

OPENINGS = (CALLS_BEGIN, CALL_BEGIN, *DSML_CALLS_BEGIN, *DSML_CALL_BEGIN)
CLOSINGS = (CALL_END, CALLS_END, *DSML_CALL_END, *DSML_CALLS_END)


_NO_WHITE_SPACE = re.compile(r"[^ \t\r\n]")


class Incomplete(Exception):
    """The next piece can't be told before there is more text."""


class TagReader:
    """A place in a text. `last`: no more text will come, so nothing is incomplete.

    Every method gives the same result for a text as for its beginning, or raises Incomplete for the beginning.
    """

    def __init__(self, text: str, *, last: bool) -> None:
        self.text = text
        self.at = 0
        self._last = last

    @property
    def ended(self) -> bool:
        return self.at == len(self.text)

    def sees(self, tags: Sequence[str]) -> str | None:
        """Return the one of the tags that stands here. None of them may begin with another one."""
        for tag in tags:
            if self.text.startswith(tag, self.at):
                return tag
        if not self._last and len(self.text) - self.at < max(map(len, tags)):
            rest = self.text[self.at :]
            if any(tag.startswith(rest) for tag in tags):
                raise Incomplete
        return None

    def takes(self, *tags: str) -> str | None:
        """Pass the one of the tags that stands here, and return it."""
        tag = self.sees(tags)
        if tag is not None:
            self.at += len(tag)
        return tag

    def next_character(self) -> str:
        """The character that stands here; "" at the end of the whole text."""
        if self.ended and not self._last:
            raise Incomplete
        return self.text[self.at : self.at + 1]

    def skip_white_space(self) -> None:
        """Pass white space up to something else, or to the end of the whole text."""
        # Not character by character: a model that goes on writing white space is read again with each token.
        found = _NO_WHITE_SPACE.search(self.text, self.at)
        self.at = found.start() if found else len(self.text)
        self.next_character()

    def take_until(self, stops: str, *, limit: int) -> str | None:
        """Pass and return the text before the first of the stops; None if it is longer than the limit or never ends."""
        for at in range(self.at, min(len(self.text), self.at + limit + 1)):
            if self.text[at] in stops:
                word = self.text[self.at : at]
                self.at = at
                return word
        if len(self.text) - self.at <= limit and not self._last:
            raise Incomplete
        return None

    def take_before(self, stop: str) -> str:
        """Pass and return the text before the stop, a single character, or all of it if there is none."""
        start, found = self.at, self.text.find(stop, self.at)
        self.at = len(self.text) if found < 0 else found
        return self.text[start : self.at]


_STOP_IN_STRING = re.compile(r'["\\]')
_STOP_OUTSIDE = re.compile(r'["{}\[\]<]')


class JsonExtent:
    """Follows the brackets and strings of one value, which begins with a bracket."""

    def __init__(self) -> None:
        self.closed = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def scan(self, text: str, start: int) -> int:
        """Return where the value's part of the text ends: after its last bracket, at the end of the text, or before a
        `<` that is not in a string, which JSON has nowhere."""
        at = start
        while at < len(text) and not self.closed:
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            stop = (_STOP_IN_STRING if self._in_string else _STOP_OUTSIDE).search(text, at)
            if stop is None:
                return len(text)
            if stop[0] == "<":
                return stop.start()
            at = stop.end()
            self._pass(stop[0])
        return at

    def _pass(self, character: str) -> None:
        if character == '"':
            self._in_string = not self._in_string
        elif character == "\\":
            self._escaped = True
        elif character in "{[":
            self._depth += 1
        else:
            self._depth -= 1
            self.closed = self._depth <= 0
