"""Finds where a JSON object or array ends while its text comes in pieces."""

from __future__ import annotations

import re

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
