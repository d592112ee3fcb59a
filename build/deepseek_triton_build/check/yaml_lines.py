"""Where a YAML file of settings stops being YAML. A parser names the line that it stumbles over, which comes later."""

import re
from collections.abc import Iterator
from typing import NamedTuple

_STEP = 2
_KEY = re.compile(r"[^\s#\[{'\"][^:#]*:(\s|$)")
_COMMENT = re.compile(r"(^|\s)#.*")
_OPENS = re.compile(r":\s*([&!]\S*\s*)?$")
_BLOCK_TEXT = re.compile(r":\s*[|>][\d+-]*\s*$")
_QUOTED = re.compile(r"""(?<=[\s\[{,:])("(\\.|[^"\\])*"|'[^']*')""")


class _Line(NamedTuple):
    number: int
    indent: int
    text: str
    """Without indentation, comment and quoted texts."""

    @property
    def opens(self) -> bool:
        """Whether its value is on the lines below it."""
        return _OPENS.search(self.text) is not None


class _Fault(NamedTuple):
    line: int
    message: str
    fix: str


def faulty_line(text: str) -> _Fault | None:
    """Return what is wrong in a file of mappings that is not YAML; None where nothing that is looked for is there."""
    return next((fault for fault in (*_bad_characters(text), *_bad_indents(text))), None)


def _lines(text: str) -> Iterator[_Line]:
    for number, line in enumerate(text.splitlines(), 1):
        kept = _COMMENT.sub("", _QUOTED.sub("Q", line)).rstrip()
        bare = kept.lstrip()
        if bare not in ("", "---", "..."):
            yield _Line(number, len(kept) - len(bare), bare)


def _bad_characters(text: str) -> Iterator[_Fault]:
    for number, raw in enumerate(text.splitlines(), 1):
        margin = raw[: len(raw) - len(raw.lstrip())]
        if margin.strip(" ") and raw.strip():
            what = "a tab" if "\t" in margin else "a blank that is none of ASCII's"
            yield _Fault(number, f"{what} in the indentation", "indent with plain blanks")
    for line in _lines(text):
        if line.text.count('"') % 2 or re.search(r":\s*'", line.text):
            yield _Fault(line.number, "a quote that is not closed", "write the second quote")


def _bad_indents(text: str) -> Iterator[_Fault]:
    """Yield the keys that stand in no level of indentation, and the lines that have no key."""
    depth = 0
    # The levels that are open, each with the line of its first key.
    levels: list[_Line] = []
    above: _Line | None = None
    dash: _Line | None = None
    bracket: _Line | None = None
    # A level that was left, or that a key opened and nobody entered, and the line behind it.
    left: tuple[int, _Line] | None = None
    text_below: int | None = None
    for line in _lines(text):
        if text_below is not None and line.indent > text_below:
            continue
        text_below = line.indent if _BLOCK_TEXT.search(line.text) else None
        is_inside, depth = depth > 0, depth + sum((char in "[{") - (char in "]}") for char in line.text)
        bracket = line if depth > 0 and not is_inside else bracket
        if is_inside or line.text[0] in "[{":
            if depth < 0 or (depth == 0 and line.text[-1] not in "]}"):
                yield _Fault(line.number, "a bracket without the one that belongs to it", "write or remove a bracket")
            above = None
            continue
        if line.text.startswith("- "):
            if above is not None and above.indent == line.indent and not above.opens:
                yield _Fault(line.number, "an item of a list among keys", "remove the dash")
            dash = line
            continue
        if not _KEY.match(line.text):
            yield _Fault(line.number, "expected a key, a colon, a blank and a value", "write KEY: VALUE")
            continue
        if above is not None and above.opens and line.indent <= above.indent:
            left = above.indent + _STEP, line
        expected = levels[-2].indent + _STEP if len(levels) > 1 else 0
        if not levels or (above is not None and above.opens and line.indent > above.indent):
            if dash is not None and dash.indent == line.indent:
                yield _Fault(dash.number, "an item of a list among keys", "remove the dash")
            levels.append(line)
            left = None
        elif line.indent > levels[-1].indent:
            if levels[-1].indent != expected == line.indent:
                yield _wrong(levels[-1], expected)
            elif left is not None and line.indent == left[0]:
                yield _wrong(left[1], left[0])
            else:
                yield _wrong(line, levels[-1].indent)
        else:
            first = levels[-1]
            while levels and levels[-1].indent > line.indent:
                left = levels.pop().indent, line
            if not levels or levels[-1].indent != line.indent:
                is_first_wrong = first.indent != expected and line.indent == expected
                yield _wrong(first, expected) if is_first_wrong else _wrong(line, first.indent)
        above, dash = line, None
    if bracket is not None and depth > 0:
        yield _Fault(bracket.number, "a bracket that is not closed", "write the bracket that closes it")


def _wrong(line: _Line, wanted: int) -> _Fault:
    key = line.text.partition(":")[0]
    message = f"{key} is indented by {line.indent}, and the keys around it by {wanted}"
    return _Fault(line.number, message, f"indent it by {wanted} blanks" if wanted else "write it without an indent")
