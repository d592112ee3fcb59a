"""What each text of a stream adds to those before it, for servers that send it and for those that send all so far."""

from __future__ import annotations

from typing import Protocol

from deepseek_triton_client._core.exceptions import ProtocolError

_INCOMPLETE = "\ufffd"
"""At the end of a text: a character whose last bytes a later token may bring."""


class Increments(Protocol):
    """The texts of one answer, in order."""

    def add(self, text: str, *, last: bool) -> str:
        """What is new; `last` where no more will come. Raises ProtocolError for a text that can't follow."""
        ...

    def end(self) -> str:
        """What was held back, where the stream ends without saying which text was the last."""
        ...


class Deltas:
    """Each text is an increment."""

    def add(self, text: str, *, last: bool) -> str:
        return text

    def end(self) -> str:
        return ""


class Cumulative:
    """Each text is all so far. What has been passed on stays, also where a later text has less."""

    def __init__(self, given: str = "") -> None:
        self._given = given
        """What has been passed on; a prefix of what came."""
        self._text = given
        """What came last; of two where the second is the beginning of the first, that one."""

    def add(self, text: str, *, last: bool) -> str:
        stable = text if last else text.rstrip(_INCOMPLETE)
        if not text.startswith(self._given):
            if self._given.startswith(stable):  # less than before, as where a stop string was cut off
                return ""
            raise ProtocolError(
                f"expected each text of the stream to begin with the one before it, got {text[-80:]!r} after "
                f'{self._given[-80:]!r}; where the texts are increments, make the client with stream_mode="delta"'
            )
        self._text = text
        return self._pass_on(stable)

    def end(self) -> str:
        return self._pass_on(self._text)

    def _pass_on(self, text: str) -> str:
        new = text[len(self._given) :]
        if new:
            self._given = text
        return new


class Unknown:
    """Finds out which of the two it is.

    A text that begins with the one before it and is longer shows that the stream is cumulative, one that doesn't that
    it is not; one that repeats the one before, or is empty, leaves it open. So does one after nothing but a broken
    character, which may have become whole in it or not; it is held back. Increments can look like the other thing only
    where the second begins with all of the first, as "a" and "ab" do: the client's `stream_mode` settles that.
    """

    def __init__(self) -> None:
        self._before = ""
        """The broken characters before the first text; its own only where they are increments."""
        self._first = ""
        """With which the next one is compared."""
        self._repeats = 0
        self._given = ""
        """What has been passed on; a prefix of the first text, and nothing where something is before it."""
        self._known: Increments | None = None

    def add(self, text: str, *, last: bool) -> str:
        if self._known is not None:
            return self._known.add(text, last=last)
        if text in ("", self._first):
            self._repeats += text != ""
            return self.end() if last else ""
        stable = self._first.rstrip(_INCOMPLETE)
        if not stable:
            return self._begin(text, last=last)
        if text.startswith(stable):
            self._known = Cumulative(self._given)
            return self._known.add(text, last=last)
        self._known = Deltas()
        return self._before + self._first[len(self._given) :] + self._first * self._repeats + text

    def end(self) -> str:
        if self._known is not None:
            return self._known.end()
        new = self._first[len(self._given) :]
        self._given = self._first
        return new

    def _begin(self, text: str, *, last: bool) -> str:
        self._before += self._first * (1 + self._repeats)
        self._first, self._repeats = text, 0
        if last:
            self._given = text
        elif not self._before:
            self._given = text.rstrip(_INCOMPLETE)
        return self._given
