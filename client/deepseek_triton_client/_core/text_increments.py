"""New text of each response, for servers that send increments and for those that repeat all text so far."""

from __future__ import annotations

from typing import Protocol

from deepseek_triton_client._core.exceptions import ProtocolError

_INCOMPLETE = "\ufffd"
"""At the end of a text this marks a character whose last bytes a later token may bring."""


class Increments(Protocol):
    """The texts of one answer, which are added in order."""

    def add(self, text: str, *, last: bool) -> str:
        """Return the new text; `last`: no more will come. Raises ProtocolError for a text that can't follow."""
        ...

    def end(self) -> str:
        """Return the text that was held back, when the stream ends without saying which text was the last."""
        ...


class Deltas:
    """Each text is an increment."""

    def add(self, text: str, *, last: bool) -> str:
        return text

    def end(self) -> str:
        return ""


class Cumulative:
    """Each text repeats all before it. Text that was returned stays, even if a later text is shorter."""

    def __init__(self, returned: str = "") -> None:
        self._returned = returned
        """Text that was returned; a prefix of the text received."""
        self._text = returned
        """The text received last; of two of which one begins with the other, the longer one."""

    def add(self, text: str, *, last: bool) -> str:
        stable = text if last else text.rstrip(_INCOMPLETE)
        if not text.startswith(self._returned):
            if self._returned.startswith(stable):  # shorter than before, as when a stop string was cut off
                return ""
            raise ProtocolError(
                f"expected each text of the stream to begin with the one before it, got {text[-80:]!r} after "
                f'{self._returned[-80:]!r}; where the texts are increments, make the client with stream_mode="delta"'
            )
        self._text = text
        return self._return_new(stable)

    def end(self) -> str:
        return self._return_new(self._text)

    def _return_new(self, text: str) -> str:
        new = text[len(self._returned) :]
        if new:
            self._returned = text
        return new


class Unknown:
    """Detects whether the texts are increments or cumulative.

    A text that begins with the one before it and is longer shows that the stream is cumulative; one that does not begin
    with it shows increments. A text that repeats the one before it, or is empty, shows neither. Nor does a text after
    one that holds only a broken character, because that character may have become whole in it; the text is held back.
    Increments look cumulative only if the second begins with all of the first, as "a" and "ab" do: the client's
    `stream_mode` settles that.
    """

    def __init__(self) -> None:
        self._before = ""
        """Broken characters before the first text; they count only if the texts are increments."""
        self._first = ""
        """The text that the next one is compared with."""
        self._repeats = 0
        self._returned = ""
        """Text that was returned; a prefix of the first text, and empty if broken characters came before it."""
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
            self._known = Cumulative(self._returned)
            return self._known.add(text, last=last)
        self._known = Deltas()
        return self._before + self._first[len(self._returned) :] + self._first * self._repeats + text

    def end(self) -> str:
        if self._known is not None:
            return self._known.end()
        new = self._first[len(self._returned) :]
        self._returned = self._first
        return new

    def _begin(self, text: str, *, last: bool) -> str:
        self._before += self._first * (1 + self._repeats)
        self._first, self._repeats = text, 0
        if last:
            self._returned = text
        elif not self._before:
            self._returned = text.rstrip(_INCOMPLETE)
        return self._returned
