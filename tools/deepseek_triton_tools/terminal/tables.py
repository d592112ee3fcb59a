"""Tables and text for people: tables are drawn by rich on a terminal; in a pipe or a file they are plain lines, never
cut off. A model's control characters are shown on a terminal instead of obeyed."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal
from unicodedata import category, east_asian_width

from deepseek_triton_tools.terminal.output_streams import (
    NO_LIMIT,
    can_redraw,
    has_style,
    printable,
    terminal_columns,
    wrapped,
)

if TYPE_CHECKING:
    from rich.console import Console

Row = Sequence[str]

_WIDEST = 120
"""Characters. In plain text a longer cell doesn't widen its column."""

# The control characters of ASCII and Latin-1, which begin every escape sequence, without newline and tab. Other
# characters that don't print, such as joiners and wide spaces, are part of what people read.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, kw_only=True)
class Table:
    title: str
    headings: Row
    rows: Sequence[Row]
    is_grid: bool = False
    """The cells are short: none is wrapped, and all columns but the first two are right-aligned."""


def is_terminal() -> bool:
    return sys.stdout.isatty()


def width() -> int:
    return terminal_columns(sys.stdout) if is_terminal() else NO_LIMIT


def show(table: Table) -> None:
    """Print `table` to stdout."""
    if table.title:
        print(styled(paragraph(table.title, ""), "1"))
    table = replace(table, rows=[[printable(cell) for cell in row] for row in table.rows])
    lines = plain_lines([table.headings, *table.rows])
    # A drawn column takes one more character. Where a grid has no room, rich would cut off digits.
    if is_terminal() and not (table.is_grid and max(map(len, lines)) + len(table.headings) > width()):
        _draw(table)
    else:
        for line in lines:
            print(f"  {line}")
    print()


def plain_lines(rows: Sequence[Row]) -> list[str]:
    """Return `rows` as lines, in columns two spaces apart. Nothing is cut off."""
    fitting = [[len(cell) for cell in column if len(cell) <= _WIDEST] for column in zip(*rows, strict=True)]
    widths = [max(lengths, default=0) for lengths in fitting]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def paragraph(text: str, indent: str = "  ", hanging: str = "  ") -> str:
    """Return `text` wrapped to the terminal's width; in a pipe it stays one line."""
    return wrapped(text, width(), indent=indent, hanging=hanging)


def bar(parts: Sequence[tuple[str, int]], length: int) -> str:
    """Return a bar in which each part has its own character, as often as its share of `length`.

    :param parts: (character, size). A part that isn't empty gets one character at least, so that the bar may be longer
        than `length` by the number of the parts at most.
    """
    total = sum(max(0, size) for _, size in parts)
    drawn, end = "", 0
    for character, size in parts:
        end += max(0, size)
        if size > 0:
            drawn += character * max(1, round(length * end / total) - len(drawn))
    return drawn


def styled(text: str, code: str) -> str:
    """Return `text` in an ANSI style (1 bold, 2 dim, 31 red, 33 yellow) if stdout shows it."""
    return f"\x1b[{code}m{text}\x1b[0m" if text and has_style(sys.stdout) else text


def visible(text: str) -> str:
    """Return `text` with its control characters written out, such as \\x1b."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


class AnswerPrinter:
    """Writes an answer to stdout while it comes, the reasoning dimmed; a terminal's lines end between words. A pipe or
    a file gets the text alone, unchanged."""

    def __init__(self, *, with_reasoning: bool = True) -> None:
        self._with_reasoning = with_reasoning and is_terminal()
        self._is_reasoning = False
        self._column = 0
        self._word, self._word_column = "", 0
        """The part of the last word that is shown, and the column where the word begins."""

    def show(self, text: str, reasoning: str = "") -> None:
        if reasoning:
            self._is_reasoning = True
            if self._with_reasoning:
                self._write(reasoning, style="2")
        if self._is_reasoning:
            text = text.lstrip("\n")  # one empty line separates reasoning and answer, however many the model writes
            if text:
                self._is_reasoning = False
                self._write("\n\n" if self._with_reasoning else "")
        if text:
            self._write(text)

    def end(self) -> None:
        """End the line, so that what follows (an error, another answer) begins a line of its own."""
        self._is_reasoning = False
        self._write("\n")

    def _write(self, text: str, style: str = "") -> None:
        text = visible(text) if sys.stdout.isatty() else text
        text = self._fitted(text) if can_redraw(sys.stdout) else text
        print(styled(text, style) if style else text, end="", flush=True)

    def _fitted(self, text: str) -> str:
        """Return `text` with line ends between words. A word that grows too long is taken back, and begins a line."""
        room, fitted = terminal_columns(sys.stdout) - 1, []
        for char in text:
            size = 2 if east_asian_width(char) in "WF" else 0 if category(char) in ("Mn", "Me", "Cf") else 1
            size = 8 - self._column % 8 if char == "\t" else size
            is_full = self._column + size > room
            if char == "\n" or (is_full and char.isspace()):
                char, size, self._column = "\n", 0, 0
            elif is_full and self._word_column:
                back = self._column - self._word_column
                fitted.append((f"\x1b[{back}D\x1b[K" if back else "") + f"\n{self._word}")
                self._column, self._word_column = back, 0
            self._column += size
            fitted.append(char)
            self._word += char
            if char.isspace() or size > 1:
                self._word, self._word_column = "", self._column
        return "".join(fitted)


def console() -> "Console":
    """A console of rich that prints to stdout as the other functions do."""
    from rich.console import Console

    return Console(highlight=False, color_system="auto" if has_style(sys.stdout) else None)


def _draw(table: Table) -> None:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for number, heading in enumerate(table.headings):
        justify: Literal["left", "right"] = "right" if table.is_grid and number > 1 else "left"
        drawn.add_column(heading, justify=justify, overflow="fold", no_wrap=table.is_grid and number > 0)
    for row in table.rows:
        drawn.add_row(*map(Text, row))  # no markup
    console().print(drawn)
