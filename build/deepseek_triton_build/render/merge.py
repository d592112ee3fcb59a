"""Merge of hand edits with what is generated now: of a script line by line, of a YAML file setting by setting.

Lines are too coarse for YAML: a setting that the owner adds at the end of a section and one that the generator adds
there would be a conflict, one that both add in different places would stand in the file twice, and a section that moves
would lose its edits. Comments stand above the setting that they are about, and go where it goes.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from deepseek_triton_build.text import composed_yaml, is_comment, parse_yaml

_INDENT = "  "
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


_Path = tuple[str, ...]


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
    # The last line gets an end, because another may come to stand behind it.
    ended = (text if not text or text.endswith("\n") else f"{text}\n" for text in (base, yours, now))
    lines, your_lines, new_lines = (text.splitlines(keepends=True) for text in ended)
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
            first, last = start + shift + 1, start + shift + len(mine)
            where = f"lines {first} to {last}" if last > first else f"line {first}"
            own, old, theirs = ("".join(side) or None for side in (mine, lines[start:end], new))
            conflicts.append(MergeConflict(where=where, yours=own, before=old, now=theirs))
        shift += sum(len(hunk.lines) - (hunk.end - hunk.start) for hunk in of_yours)
    return Merged(text="".join([*merged, *lines[at:]]), conflicts=tuple(conflicts))


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
    changed = (
        [line for hunk in side for line in (*lines[hunk.start : hunk.end], *hunk.lines)] for side in (yours, now)
    )
    if not any(all(map(is_comment, of_side)) for of_side in changed):
        return None
    ordered = sorted((*yours, *now), key=lambda hunk: hunk[:2])
    for before, after in itertools.pairwise(ordered):
        if after.start < before.end or before[:2] == after[:2]:
            return None
    return _applied(lines, start, end, ordered)


class NoSettingsError(Exception):
    """The text is not a single YAML mapping in block style whose keys are each on a line of their own."""


@dataclass(frozen=True, kw_only=True)
class _Setting:
    """A setting or a section. Its lines have neither their ends nor the section's indentation."""

    above: tuple[str, ...] = ()
    """The comments and blank lines above it."""
    lines: tuple[str, ...] = ()
    """All of a setting, or the head of a section."""
    inner: Mapping[str, _Setting] | None = None
    """The settings below the head of a section, in the order of the text."""
    below: tuple[str, ...] = ()
    """The comments at the end of a section, which are indented deeper than what follows it."""
    side: int = -1
    """The side whose value a merged setting has: 0 yours, 1 now."""

    def text_lines(self) -> Iterator[str]:
        yield from (*self.above, *self.lines)
        if self.inner is not None:
            indented = [*(line for inner in self.inner.values() for line in inner.text_lines()), *self.below]
            yield from (_INDENT + line if line else line for line in indented)

    def folded(self) -> _Setting:
        """Return a section as a single setting."""
        return _Setting(above=self.above, lines=tuple(replace(self, above=()).text_lines()))


def merge_by_keys(base: str, yours: str, now: str, keep: Keep) -> Merged:
    """Merge the changes of settings from `base` to `yours` with those from `base` to `now`, in the order of `now`.

    A setting that only one side has changed, added or removed gets that side's form. One that both have changed is a
    conflict, and so is one that is gone now though the owner has changed it or commented on it. Where both have
    changed the comment above a setting, the owner's own lines are put below the generator's.

    :raises NoSettingsError: when one of the texts can't be taken apart, or the result would not say what its parts
        say.
    """
    import yaml

    merge = _KeyMerge(keep)
    root = merge.section((), *(_taken_apart(text) for text in (base, yours, now)), is_removed=False)
    inner = root.inner or {}
    lines = [*(line for setting in inner.values() for line in setting.text_lines()), *root.below]
    text = "".join(f"{line}\n" for line in lines)
    try:
        is_meant = _is_meant(root, *map(parse_yaml, (text, yours, now)))
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise NoSettingsError from error
    if not is_meant:
        raise NoSettingsError
    return Merged(text=text, conflicts=tuple(merge.conflicts))


@dataclass
class _KeyMerge:
    keep: Keep
    conflicts: list[MergeConflict] = field(default_factory=list)

    def section(
        self, path: _Path, before: _Setting | None, mine: _Setting | None, new: _Setting | None, *, is_removed: bool
    ) -> _Setting:
        """Return a section in which every setting is merged. It has no lines where its head goes, and no inner ones
        where they all go.

        :param is_removed: whether the owner has removed a section that it is in.
        """
        head = self.setting(path, before, mine, new, is_removed=is_removed) or _Setting()
        is_removed = is_removed or (before is not None and mine is None)
        old, own, theirs = ((side and side.inner) or {} for side in (before, mine, new))
        inner: dict[str, _Setting] = {}
        for name in dict.fromkeys((*theirs, *own)):
            sides = (old.get(name), own.get(name), theirs.get(name))
            merged = self.entry((*path, name), *sides, is_removed=is_removed)
            if merged is not None:
                inner[name] = merged
        return replace(head, inner={name: inner[name] for name in _order(inner, own, theirs)})

    def entry(
        self, path: _Path, before: _Setting | None, mine: _Setting | None, new: _Setting | None, *, is_removed: bool
    ) -> _Setting | None:
        """Return what becomes of a setting or a section; None where it goes."""
        sides = [side for side in (before, mine, new) if side is not None]
        if any(side.inner is None for side in sides):  # one that is a setting on a side is one on all of them
            before, mine, new = (side and side.folded() for side in (before, mine, new))
            return self.setting(path, before, mine, new, is_removed=is_removed)
        section = self.section(path, before, mine, new, is_removed=is_removed)
        if not section.inner:
            return None
        if section.lines:
            return section
        head = next(side for side in (new, mine) if side is not None)  # what stays in it needs a head
        return replace(head, inner=section.inner)

    def setting(
        self, path: _Path, before: _Setting | None, mine: _Setting | None, new: _Setting | None, *, is_removed: bool
    ) -> _Setting | None:
        """Return what becomes of a setting, or of the head of a section; None where it goes."""
        old = before or _Setting()
        side = self.side(old if before else None, mine, new, is_removed=is_removed)
        if side is None:
            own, was, theirs = (None if entry is None else "\n".join(entry.lines) for entry in (mine, before, new))
            self.conflicts.append(MergeConflict(where=".".join(path), yours=own, before=was, now=theirs))
            side = 0 if self.keep == "yours" else 1
        chosen = (mine, new, None)[side]
        if chosen is None:
            return None
        if mine is not None and new is not None:
            above, below = _comments(old.above, mine.above, new.above), _comments(old.below, mine.below, new.below)
            chosen = replace(chosen, above=above, below=below)
        return replace(chosen, side=side)

    def side(
        self, before: _Setting | None, mine: _Setting | None, new: _Setting | None, *, is_removed: bool
    ) -> Literal[0, 1, 2] | None:
        """Return the side that a setting is taken from: 0 yours, 1 now, 2 neither; None for a conflict."""
        if mine is None:
            if new is None or (before is None and is_removed):
                return 2
            return 1 if before is None else 2 if new.lines == before.lines else None
        if new is None:
            if before is None:
                return 0
            has_comments = _own_lines(before.above + before.below, mine.above + mine.below)
            return 2 if mine.lines == before.lines and not has_comments else None
        if mine.lines == new.lines or (before is not None and mine.lines == before.lines):
            return 1
        return 0 if before is not None and new.lines == before.lines else None


def _order(inner: Iterable[str], own: Iterable[str], theirs: Iterable[str]) -> list[str]:
    """Return the names of `inner`: in the order of `theirs`, the owner's own settings behind those that they stand
    behind in the owner's text."""
    inner = set(inner)
    order = [name for name in theirs if name in inner]
    mine = [name for name in own if name in inner]
    for number, name in enumerate(mine):
        if name not in order:
            before = next((other for other in reversed(mine[:number]) if other in order), None)
            order.insert(0 if before is None else order.index(before) + 1, name)
    return order


def _comments(base: Sequence[str], yours: Sequence[str], now: Sequence[str]) -> tuple[str, ...]:
    """Merge comments. Where both sides have changed the same lines, the owner's own stand below the generator's."""
    was, mine, new = ("".join(f"{line}\n" for line in side) for side in (base, yours, now))
    merged = merge_by_lines(was, mine, new, keep="yours")
    if not merged.conflicts:
        return tuple(merged.text.splitlines())
    return (*now, *(line for line in _own_lines(base, yours) if line not in now))


def _own_lines(base: Sequence[str], yours: Sequence[str]) -> list[str]:
    return [line for line in yours if line.strip() and line not in base]


def _taken_apart(text: str) -> _Setting:
    import yaml

    lines = text.splitlines()
    try:
        [root] = composed_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: no document, or several
        raise NoSettingsError from error
    inner, end = _collect(root, lines, 0)
    _require_comments(lines[end:])
    return _Setting(inner=inner, below=tuple(line.lstrip() for line in lines[end:]))


def _require_comments(lines: Iterable[str]) -> None:
    if any(line.strip()[:1] not in ("", "#") for line in lines):
        raise NoSettingsError


def _collect(node: Any, lines: list[str], start: int) -> tuple[dict[str, _Setting], int]:
    """Return the settings of a mapping, and the number of the line behind the last.

    :param start: the number of the first line that belongs to no setting yet.
    """
    import yaml

    if not isinstance(node, yaml.MappingNode) or node.flow_style or not node.value:
        raise NoSettingsError
    settings: dict[str, _Setting] = {}
    for key, value in node.value:
        line, column = key.start_mark.line, key.start_mark.column
        if not isinstance(key, yaml.ScalarNode) or lines[line][:column].strip() or key.value in settings:
            raise NoSettingsError
        _require_comments(lines[start:line])
        above = tuple(text.lstrip() for text in lines[start:line])
        if isinstance(value, yaml.MappingNode) and not value.flow_style and value.value:
            # Comments below the head are of the first setting.
            inner, start = _collect(value, lines, line + 1)
            end = _deeper_comments(lines, start, column)
            below = tuple(text.strip() for text in lines[start:end])
            head = (_unindented(lines[line].rstrip(), column),)
            settings[key.value] = _Setting(above=above, lines=head, inner=inner, below=below)
        else:
            end = _deeper_comments(lines, _end(value, line, lines), column)  # a part of it that was commented out
            is_text = isinstance(value, yaml.ScalarNode) and value.style in ("|", ">")  # blanks at the ends count in it
            own = tuple(_unindented(text if is_text else text.rstrip(), column) for text in lines[line:end])
            settings[key.value] = _Setting(above=above, lines=own)
        start = end
    return settings, start


def _deeper_comments(lines: Sequence[str], start: int, column: int) -> int:
    """Return the number of the line behind the comments from `start` on that are indented deeper than `column`."""
    end = start
    for number in range(start, len(lines)):
        text = lines[number].lstrip()
        if text and (text[0] != "#" or len(lines[number]) - len(text) <= column):
            break
        end = number + 1 if text else end
    return end


def _end(value: Any, first: int, lines: list[str]) -> int:
    """Return the number of the line behind a value: the parser counts comments that follow it to a block."""
    end: int = value.end_mark.line + (1 if value.end_mark.column else 0)
    while end - 1 > first and lines[end - 1].strip()[:1] in ("", "#"):
        end -= 1
    return max(end, first + 1)


def _unindented(line: str, column: int) -> str:
    return line[min(column, len(line) - len(line.lstrip())) :]


def _is_meant(setting: _Setting, value: Any, *sides: Any) -> bool:
    """Whether the settings of a section, merged and read again, have each its side's value, and no other stands there.

    :param value: the section, read from the merged text.
    :param sides: the same of the owner's text, and of the generator's.
    """
    if setting.inner is None:
        return bool(value == sides[setting.side])
    if not isinstance(value, dict):
        return False
    named, *named_sides = (_named(side) for side in (value, *sides))
    return named.keys() == setting.inner.keys() and all(
        _is_meant(inner, named[name], *(side.get(name) for side in named_sides))
        for name, inner in setting.inner.items()
    )


def _named(values: Any) -> dict[str, Any]:
    """Return the values by the keys as they are written; YAML reads some as numbers or truth values."""
    return {str(name): value for name, value in values.items()} if isinstance(values, dict) else {}
