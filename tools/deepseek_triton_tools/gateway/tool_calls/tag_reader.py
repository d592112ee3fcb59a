"""Reads tags from a text of which the rest may not have come yet."""

from __future__ import annotations

import re
from collections.abc import Sequence

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
