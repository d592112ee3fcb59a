"""Merge of a file's hand edits with what is generated now, line by line."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from deepseek_triton_build.text import is_comment

Keep = Literal["yours", "generated"]
"""The side that wins a conflict."""


@dataclass(frozen=True, kw_only=True)
class MergeConflict:
    """A place that the owner and the generator have both changed, in different ways. None: it is not there."""

    where: str
    """The setting's key, or lines of the file as it is; "" for all of the file."""
    yours: str | None
    before: str | None
    """The text as it was generated."""
    now: str | None
    why: str = ""
    """The reason, where it is about all of the file: then there are no texts."""


@dataclass(frozen=True, kw_only=True)
class Merged:
    """A merged text, and the conflicts, each of which is settled in the text in favour of one side."""

    text: str
    conflicts: tuple[MergeConflict, ...]


class _Hunk(NamedTuple):
    """A change of the lines from `start` to before `end` of the base; nothing is replaced where they are equal."""

    start: int
    end: int
    lines: list[str]


def merge_by_lines(base: str, yours: str, now: str, keep: Keep) -> Merged:
    """Merge the changes from `base` to `yours` with those from `base` to `now`.

    Changes of the same lines are a conflict, unless they are the same change. Changes of neighbouring lines are one
    too, because a line of a script may go on in the next; only a change of comments is at home beside any other.
    """
    lines, your_lines, new_lines = (text.splitlines(keepends=True) for text in map(_ended, (base, yours, now)))
    your_hunks, new_hunks = _hunks(lines, your_lines), _hunks(lines, new_lines)
    merged: list[str] = []
    conflicts: list[MergeConflict] = []
    at = shift = 0
    for of_yours, of_now in _groups(your_hunks, new_hunks):
        start = min(hunk.start for hunk in (*of_yours, *of_now))
        end = max(hunk.end for hunk in (*of_yours, *of_now))
        merged += lines[at:start]
        at = end
        mine, new = _applied(lines, start, end, of_yours), _applied(lines, start, end, of_now)
        if not of_yours or mine == new:
            merged += new
        elif not of_now:
            merged += mine
        elif (both := _beside(lines, start, end, of_yours, of_now)) is not None:
            merged += both
        else:
            merged += mine if keep == "yours" else new
            where = _where(start + shift + 1, len(mine))
            old = "".join(lines[start:end])
            conflicts.append(
                MergeConflict(where=where, yours="".join(mine) or None, before=old or None, now="".join(new) or None)
            )
        shift += sum(len(hunk.lines) - (hunk.end - hunk.start) for hunk in of_yours)
    return Merged(text="".join([*merged, *lines[at:]]), conflicts=tuple(conflicts))


def _ended(text: str) -> str:
    """Return `text` with an end of its last line: another line may come to stand behind it."""
    return text if not text or text.endswith("\n") else f"{text}\n"


def _hunks(old: Sequence[str], new: Sequence[str]) -> list[_Hunk]:
    # Without autojunk=False, lines that occur often, such as blank ones, are matched with nothing in long files.
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    return [_Hunk(i, end, list(new[j:to])) for tag, i, end, j, to in matcher.get_opcodes() if tag != "equal"]


def _groups(yours: list[_Hunk], now: list[_Hunk]) -> Iterator[tuple[list[_Hunk], list[_Hunk]]]:
    """Yield the hunks of both sides in the order of the base, those together that touch each other."""
    of_side = sorted([(hunk, 0) for hunk in yours] + [(hunk, 1) for hunk in now], key=lambda row: row[0][:2])
    group: tuple[list[_Hunk], list[_Hunk]] = ([], [])
    end = -1
    for hunk, side in of_side:
        if hunk.start > end and (group[0] or group[1]):
            yield group
            group = ([], [])
        group[side].append(hunk)
        end = max(end, hunk.end)
    if group[0] or group[1]:
        yield group


def _applied(lines: Sequence[str], start: int, end: int, hunks: Sequence[_Hunk]) -> list[str]:
    """Return the lines from `start` to `end` of the base with `hunks` applied."""
    result: list[str] = []
    for hunk in hunks:
        result += [*lines[start : hunk.start], *hunk.lines]
        start = hunk.end
    return [*result, *lines[start:end]]


def _beside(
    lines: Sequence[str], start: int, end: int, yours: Sequence[_Hunk], now: Sequence[_Hunk]
) -> list[str] | None:
    """Return both sides' changes applied, where all of one side's are of comments and no two are of the same lines."""
    if not any(all(_is_comments(lines, hunk) for hunk in hunks) for hunks in (yours, now)):
        return None
    ordered = sorted((*yours, *now), key=lambda hunk: hunk[:2])
    for before, after in itertools.pairwise(ordered):
        if after.start < before.end or before[:2] == after[:2]:
            return None
    return _applied(lines, start, end, ordered)


def _is_comments(lines: Sequence[str], hunk: _Hunk) -> bool:
    return all(is_comment(line) for line in (*lines[hunk.start : hunk.end], *hunk.lines))


def _where(line: int, count: int) -> str:
    return f"lines {line} to {line + count - 1}" if count > 1 else f"line {line}"
