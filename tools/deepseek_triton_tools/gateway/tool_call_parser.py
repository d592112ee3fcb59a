"""Finds the calls in a model's answer while it streams. Their form is recognised by their tags."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from deepseek_triton_tools.gateway.call_tags import (
    AFTER_PARAMETER,
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CLOSINGS,
    DSML_CALL_BEGIN,
    DSML_CALL_END,
    DSML_CALLS_BEGIN,
    DSML_CALLS_END,
    DSML_PARAMETER_BEGIN,
    DSML_PARAMETER_END,
    FENCED_TYPE,
    OPENINGS,
    SEPARATOR,
    Incomplete,
    JsonExtent,
    TagReader,
)

_LONGEST_NAME = 256
"""Characters of a tool's or a parameter's name. Text without an end of the name is held back up to this length."""
_FENCE = "```"
_NEWLINES_BEFORE_TAG = 2
"""DSML has two newlines before its first tag. They belong to the call."""


class TextPiece(msgspec.Struct, frozen=True, gc=False):
    """Text for the reader: no part of a call."""

    text: str


class CallBegins(msgspec.Struct, frozen=True, gc=False):
    """A call begins. index: its number in the answer, from 0."""

    index: int
    name: str


class ArgumentsPiece(msgspec.Struct, frozen=True, gc=False):
    """The next part of a call's arguments. All of them joined are the JSON text of an object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnds:
    """A call has no more arguments. cut: the answer ended in the middle of them, so they may be no whole JSON."""

    index: int
    cut: bool


ParsedPiece = TextPiece | CallBegins | ArgumentsPiece | CallEnds


class ToolCallParser:
    """Parses the answer of one sequence.

    The pieces joined don't depend on how the text is cut. What may be the beginning of a tag is held back; all else
    comes at once. Text that looks like a call and is none comes out as text, and only tags and the white space around
    them are dropped. No text comes between a call's beginning and its end.
    """

    def __init__(self) -> None:
        self._held = ""
        self._pieces: list[ParsedPiece] = []
        self._step: Callable[[TagReader], None] = self._outside
        self._in_block = False
        self._after_tag = False
        self._plain = True
        self._calls = 0
        self._json = JsonExtent()
        self._in_fence = False
        self._call_end: tuple[str, ...] = ()
        self._parameters = 0
        self._scalar: str | None = None
        self._stray_text = ""

    def feed(self, text: str) -> list[ParsedPiece]:
        """Return what the next text of the answer gives."""
        if self._plain and "<" not in text and not text.endswith("\n"):
            return [TextPiece(text)] if text else []
        return self._parse(text, last=False)

    def end(self) -> list[ParsedPiece]:
        """Return what was held back, at the end of the answer."""
        pieces = self._parse("", last=True)
        if self._step != self._outside:
            pieces += self._cut_call()
        return pieces

    def _cut_call(self) -> list[ParsedPiece]:
        self._pieces = []
        if self._scalar:
            self._arguments(self._scalar)
        self._end_call(cut=self._step != self._after_json)
        return self._pieces

    def _parse(self, text: str, *, last: bool) -> list[ParsedPiece]:
        """Take steps until the text ends. A step has no effect before the text that it needs is there."""
        self._pieces = []
        reader = TagReader(self._held + text, last=last)
        done = 0
        try:
            while not reader.ended:
                self._step(reader)
                done = reader.at
        except Incomplete:
            pass
        self._held = reader.text[done:]
        self._plain = not self._held and not self._after_tag and self._step == self._outside
        return self._pieces

    # What comes out

    def _text(self, text: str) -> None:
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, TextPiece):
            self._pieces[-1] = TextPiece(last.text + text)
        elif text:
            self._pieces.append(TextPiece(text))

    def _arguments(self, text: str) -> None:
        index, last = self._calls - 1, self._pieces[-1] if self._pieces else None
        if isinstance(last, ArgumentsPiece) and last.index == index:
            self._pieces[-1] = ArgumentsPiece(index, last.text + text)
        elif text:
            self._pieces.append(ArgumentsPiece(index, text))

    def _begin_call(self, name: str, step: Callable[[TagReader], None], end: tuple[str, ...]) -> None:
        self._pieces.append(CallBegins(self._calls, name))
        self._calls += 1
        self._step, self._call_end = step, end
        self._json = JsonExtent()
        self._in_fence = False
        self._parameters = 0
        self._scalar = None

    def _end_call(self, *, cut: bool = False) -> None:
        self._pieces.append(CallEnds(self._calls - 1, cut))
        self._text(self._stray_text)
        self._stray_text = ""
        self._step = self._outside
        self._in_block = self._after_tag = True

    # Steps outside of calls

    def _outside(self, reader: TagReader) -> None:
        start = reader.at
        if self._after_tag:
            reader.skip_white_space()
            if reader.ended or (reader.next_character() == "<" and self._tag(reader)):
                return
            self._after_tag = False
            self._text(reader.text[start : reader.at])
            return
        text = reader.take_before("<")
        newlines = min(len(text) - len(text.rstrip("\n")), _NEWLINES_BEFORE_TAG)
        if newlines < len(text):
            reader.at -= newlines
            self._text(text[: len(text) - newlines])
        elif not (reader.next_character() and self._tag(reader)):
            reader.at = start + len(text) + 1
            self._text(reader.text[start : reader.at])
            reader.at = min(reader.at, len(reader.text))

    def _tag(self, reader: TagReader) -> bool:
        """Pass the tags that stand here and say whether there were any."""
        if self._in_block and (tag := reader.takes(*CLOSINGS)):
            self._in_block = tag in (CALL_END, *DSML_CALL_END)
            self._after_tag = True
            return True
        start, opening = reader.at, reader.takes(*OPENINGS)
        if opening in (CALLS_BEGIN, CALL_BEGIN):
            found = self._json_call(reader, opening)
        else:
            found = opening is not None and self._dsml_call(reader, opening)
        if not found:
            reader.at = start
        return found

    def _json_call(self, reader: TagReader, opening: str) -> bool:
        if opening == CALLS_BEGIN:
            reader.skip_white_space()
            if not reader.takes(CALL_BEGIN):
                return False
        name = reader.take_until("<\n`{", limit=_LONGEST_NAME)
        if name is None or not name.strip() or not reader.takes(SEPARATOR):
            return False
        if name.strip() == FENCED_TYPE:
            reader.skip_white_space()
            after = reader.next_character()
            # A tool may be called `function` too: then its arguments come next, and no name.
            if after == "" or after not in "<{[`":
                name = reader.take_until("<\n`{", limit=_LONGEST_NAME)
        if name is None:
            return False
        self._begin_call(name.strip(), self._before_json, (CALL_END,))
        return True

    def _dsml_call(self, reader: TagReader, opening: str) -> bool:
        if opening in DSML_CALLS_BEGIN:
            reader.skip_white_space()
            if not reader.takes(*DSML_CALL_BEGIN):
                return False
        name = self._quoted_name(reader)
        if not name or not reader.takes(">"):
            return False
        self._begin_call(name, self._dsml_parameters, DSML_CALL_END)
        return True

    def _quoted_name(self, reader: TagReader) -> str | None:
        """A name up to its closing quote, which is passed, with the white space after it."""
        name = reader.take_until('"\n', limit=_LONGEST_NAME)
        if name is None or not reader.takes('"'):
            return None
        reader.skip_white_space()
        return name

    # Steps inside a call with JSON

    def _before_json(self, reader: TagReader) -> None:
        reader.skip_white_space()
        if not self._in_fence and reader.takes(_FENCE):
            reader.takes("json")
            self._in_fence = True
        elif reader.next_character() in "{[":
            self._step = self._in_json
        elif reader.sees(CLOSINGS):
            self._arguments("{}")
            self._close_call(reader)
        else:
            self._step = self._in_other_arguments

    def _in_json(self, reader: TagReader) -> None:
        start = reader.at
        end = reader.at = self._json.scan(reader.text, start)
        if start == end:
            self._in_other_arguments(reader)
            return
        self._arguments(reader.text[start:end])
        if self._json.closed:
            self._step = self._after_json

    def _in_other_arguments(self, reader: TagReader) -> None:
        """Pass arguments that are no JSON: only a tag ends them."""
        text = reader.take_before("<")
        if text:
            self._arguments(text)
        elif reader.sees(CLOSINGS):
            self._close_call(reader)
        else:
            reader.at += 1
            self._arguments("<")

    def _after_json(self, reader: TagReader) -> None:
        reader.skip_white_space()
        if self._in_fence and reader.takes(_FENCE):
            self._in_fence = False
        else:
            self._close_call(reader)

    def _close_call(self, reader: TagReader) -> None:
        """Pass the call's end tag. Without one the call has ended all the same."""
        if not reader.ended:
            reader.takes(*self._call_end)
        self._end_call()

    # Steps inside a DSML call

    def _dsml_parameters(self, reader: TagReader) -> None:
        reader.skip_white_space()
        if not self._parameters and reader.next_character() == "{":
            self._step = self._in_json  # V3.2 at times writes the whole object
        elif reader.sees(DSML_CALL_END + DSML_CALLS_END + DSML_CALL_BEGIN):
            self._arguments("}" if self._parameters else "{}")
            self._close_call(reader)
        elif not self._dsml_parameter(reader):
            self._stray_text += reader.next_character()
            reader.at = min(reader.at + 1, len(reader.text))
            self._step = self._dsml_stray_text

    def _dsml_stray_text(self, reader: TagReader) -> None:
        text = reader.take_before("<")
        self._stray_text += text
        if not text:
            self._step = self._dsml_parameters

    def _dsml_parameter(self, reader: TagReader) -> bool:
        start = reader.at
        if reader.takes(*DSML_PARAMETER_BEGIN):
            name = self._quoted_name(reader)
            kind = name is not None and reader.takes('string="true"', 'string="false"')
            if name is not None and kind:
                reader.skip_white_space()
                if reader.takes(">"):
                    self._begin_parameter(name, is_string=kind == 'string="true"')
                    return True
        reader.at = start
        return False

    def _begin_parameter(self, name: str, *, is_string: bool) -> None:
        self._arguments((", " if self._parameters else "{") + json.dumps(name, ensure_ascii=False) + ": ")
        self._parameters += 1
        if is_string:
            self._arguments('"')
            self._step = self._string_value
        else:
            self._scalar = ""
            self._step = self._json_value

    def _string_value(self, reader: TagReader) -> None:
        text, ended = self._value_text(reader)
        self._arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        if ended:
            self._arguments('"')
            self._step = self._dsml_parameters

    def _json_value(self, reader: TagReader) -> None:
        """Pass a value that is JSON. A number or a word is held back up to its end, because it may be no JSON."""
        text, ended = self._value_text(reader)
        if self._scalar is not None:
            self._scalar += text
            if ended:
                text = _checked_json(self._scalar)
            elif self._scalar.lstrip()[:1] in ("{", "[", '"'):
                text = self._scalar
            else:
                return
            self._scalar = None
        self._arguments(text)
        if ended:
            self._step = self._dsml_parameters

    def _value_text(self, reader: TagReader) -> tuple[str, bool]:
        """Pass the next part of a value. Return (text, whether the value has ended)."""
        text = reader.take_before("<")
        if text:
            return text, False
        after_bracket = reader.at + 1
        if reader.takes(*DSML_PARAMETER_END):
            end = reader.at
            reader.skip_white_space()
            if reader.ended or reader.sees(AFTER_PARAMETER):
                reader.at = end
                return "", True
        reader.at = after_bracket
        return "<", False


def _checked_json(text: str) -> str:
    """The text if it is JSON. A model at times calls a string JSON, so all else becomes a string."""
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return json.dumps(text.strip(), ensure_ascii=False)
    return text
