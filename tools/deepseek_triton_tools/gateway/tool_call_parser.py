"""Finds the calls in a model's answer while it streams. Their form is recognised by their tags.

`｜` is U+FF5C and `▁` U+2581.

V3, R1 (fenced):     calls begin, call begin, `function`, separator, name, newline, JSON in a fence, call end, calls end
V3.1, V3.2-Exp:      calls begin, call begin, name, separator, JSON, call end, calls end
V3.2 and later:      DSML, with a tag for each call and each argument

Sources: the chat templates of DeepSeek-V3-0324, R1-0528 and V3.1, and encoding_dsv32.py of V3.2. DSML's outer tag is
`function_calls` in V3.2, `tool_calls` in V4 (encoding_dsv4.py) and ` calls` in V4.1 (encoding.py), whose other tags
have a space at the same place. From V4's first block on only its calls are read, whatever stands between and behind
them, and a value that is called JSON and is none stays as it is, as in deepseek-recipe 0.2.0.
"""

import json
import re
from collections.abc import Callable, Sequence

import msgspec

CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
CALL_BEGIN = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCED_TYPE = "function"
"""The word in the name's place in the fenced form."""

_DSML = "<｜DSML｜"
_DSML_OUTER = ("function_calls", "tool_calls", " calls")
_SPACES = ("", " ")

DSML_CALLS_BEGIN = tuple(f"<｜DSML｜{word}>" for word in _DSML_OUTER)
_V4_BEGIN = DSML_CALLS_BEGIN[1:]
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

    def takes_cut(self, *tags: str) -> bool:
        """Pass the rest of the answer where it is the beginning of one of the tags, and say whether it was."""
        if not self._last or not any(tag.startswith(self.text[self.at :]) for tag in tags):
            return False
        self.at = len(self.text)
        return True

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


_LONGEST_NAME = 256
"""Characters of a tool's or a parameter's name. Text without an end of the name is held back up to this length."""
_FENCE = "```"
_STOP_IN_STRING = re.compile(r'["\\]')
# Outside of strings JSON has no `<`, so that one there may begin the tag that ends the call.
_STOP_OUTSIDE = re.compile(r'["{}\[\]<]')


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


class CallEnds(msgspec.Struct, frozen=True, gc=False):
    """A call has no more arguments. cut: the answer ended in the middle of them, so they may be no whole JSON."""

    index: int
    cut: bool


ParsedPiece = TextPiece | CallBegins | ArgumentsPiece | CallEnds


class ToolCallParser:
    """Parses the answer of one sequence.

    The pieces joined don't depend on how the text is cut. What may be the beginning of a tag is held back; all else
    comes at once. But for V4's block, text that looks like a call and is none comes out as text, and only tags and the
    white space around them are dropped. No text comes between a call's beginning and its end.
    """

    def __init__(self) -> None:
        self._held = ""
        self._pieces: list[ParsedPiece] = []
        self._step: Callable[[TagReader], None] = self._outside
        self._in_block = False
        self._after_tag = False
        self._is_v4 = False
        self._plain = True
        self._calls = 0
        self._depth = 0
        self._in_string = self._is_escaped = False
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
        if self._step in (self._outside, self._past):
            return pieces
        self._pieces = []
        if self._scalar:
            self._arguments(self._scalar)
        self._end_call(cut=self._step != self._after_json)
        return pieces + self._pieces

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
        self._plain = not (self._held or self._after_tag or self._is_v4) and self._step == self._outside
        return self._pieces

    # What comes out

    def _text(self, text: str) -> None:
        if self._is_v4:
            return
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
        self._depth = 0
        self._in_string = self._is_escaped = self._in_fence = False
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
        newlines = len(text) - len(text.rstrip("\n"))  # they belong to a call
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
            if self._is_v4 and not self._in_block:
                self._step = self._past
            return True
        start, opening = reader.at, reader.takes(*OPENINGS)
        if opening == CALLS_BEGIN:
            reader.skip_white_space()
            opening = reader.takes(CALL_BEGIN)
        elif opening in _V4_BEGIN or (
            not opening and reader.text.startswith(_DSML, start) and reader.takes_cut(*_V4_BEGIN)
        ):
            self._is_v4 = self._in_block = self._after_tag = True
            return True
        elif opening in DSML_CALLS_BEGIN:
            reader.skip_white_space()
            opening = reader.takes(*DSML_CALL_BEGIN)
        if opening == CALL_BEGIN:
            name = self._json_call_name(reader)
            if name is not None:
                self._begin_call(name, self._before_json, (CALL_END,))
                return True
        elif opening is not None:
            name = self._quoted_name(reader)
            if name and reader.takes(">"):
                self._begin_call(name, self._dsml_parameters, DSML_CALL_END)
                return True
        reader.at = start
        return False

    def _past(self, reader: TagReader) -> None:
        """Drop the rest of the answer."""
        reader.at = len(reader.text)

    def _json_call_name(self, reader: TagReader) -> str | None:
        name = reader.take_until("<\n`{", limit=_LONGEST_NAME)
        if name is None or not name.strip() or not reader.takes(SEPARATOR):
            return None
        if name.strip() == FENCED_TYPE:
            reader.skip_white_space()
            after = reader.next_character()
            # A tool may be called `function` too: then its arguments come next, and no name.
            if after == "" or after not in "<{[`":
                name = reader.take_until("<\n`{", limit=_LONGEST_NAME)
        return name if name is None else name.strip()

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
        """Pass the rest of the value, up to a `<` that is in no string: then the value is broken."""
        start, text = reader.at, reader.text
        while reader.at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                reader.at += 1
                continue
            stop = (_STOP_IN_STRING if self._in_string else _STOP_OUTSIDE).search(text, reader.at)
            reader.at = stop.end() if stop else len(text)
            if stop is None:
                break
            if stop[0] == "<":
                reader.at -= 1
                break
            if stop[0] == '"':
                self._in_string = not self._in_string
            elif stop[0] == "\\":
                self._is_escaped = True
            else:
                self._depth += 1 if stop[0] in "{[" else -1
                if self._depth <= 0:
                    self._step = self._after_json
                    break
        if reader.at == start:
            self._in_other_arguments(reader)
        else:
            self._arguments(text[start : reader.at])

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
            # Text between parameters must not come inside a call, where clients would lose it: it comes behind.
            self._stray_text += reader.next_character()
            reader.at = min(reader.at + 1, len(reader.text))
            self._step = self._dsml_stray_text

    def _dsml_stray_text(self, reader: TagReader) -> None:
        text = reader.take_before("<")
        self._stray_text += text
        if not text:
            self._step = self._dsml_parameters

    def _dsml_parameter(self, reader: TagReader) -> bool:
        """Pass the beginning of a parameter, and say whether there was one."""
        start = reader.at
        name = self._quoted_name(reader) if reader.takes(*DSML_PARAMETER_BEGIN) else None
        kind = name is not None and reader.takes('string="true"', 'string="false"')
        if kind:
            reader.skip_white_space()
        if not kind or not reader.takes(">"):
            reader.at = start
            return False
        self._arguments((", " if self._parameters else "{") + json.dumps(name, ensure_ascii=False) + ": ")
        self._parameters += 1
        if kind == 'string="true"':
            self._arguments('"')
            self._step = self._string_value
        else:
            self._scalar = ""
            self._step = self._json_value
        return True

    def _string_value(self, reader: TagReader) -> None:
        text, ended = self._value_text(reader)
        self._arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        if ended:
            self._arguments('"')
            self._step = self._dsml_parameters

    def _json_value(self, reader: TagReader) -> None:
        """Pass a value that is JSON. A number or a word is held back up to its end, because it may be no JSON."""
        text, ended = self._value_text(reader)
        if self._scalar is not None and not self._is_v4:
            self._scalar += text
            if ended:
                text = self._scalar
                try:
                    msgspec.json.decode(text)
                except (msgspec.DecodeError, RecursionError):
                    # A model at times calls a string JSON.
                    text = json.dumps(text.strip(), ensure_ascii=False)
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
        # DSML has no escapes, so only what stands behind an end tag tells whether it ends the value or is part of it.
        if reader.takes(*DSML_PARAMETER_END):
            end = reader.at
            reader.skip_white_space()
            if reader.sees(AFTER_PARAMETER) or reader.takes_cut(*AFTER_PARAMETER):
                reader.at = end
                return "", True
        if reader.takes_cut(*DSML_PARAMETER_END):
            return "", False
        reader.at = after_bracket
        return "<", False
