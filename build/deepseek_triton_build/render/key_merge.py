"""Merge of a YAML file's hand edits with what is generated now, setting by setting.

Lines are too coarse here: a setting that the owner adds at the end of a section and one that the generator adds there
would be a conflict, one that both add in different places would stand in the file twice, and a section that moves
would lose its edits. Comments stand above the setting that they are about, and go where it goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deepseek_triton_build.render.line_merge import Keep, MergeConflict, Merged, merge_by_lines
from deepseek_triton_build.text import composed_yaml, parse_yaml

_INDENT = 2
_Path = tuple[str, ...]


class NoSettingsError(Exception):
    """The text is not a single YAML mapping in block style whose keys are each on a line of their own."""


@dataclass(frozen=True, kw_only=True)
class _PlacedSetting:
    """A setting, or the head of a section."""

    path: _Path
    above: tuple[str, ...]
    """The comments and blank lines above it, as those of `lines`: without their ends and the indentation."""
    lines: tuple[str, ...]
    is_section: bool = False
    below: tuple[str, ...] = ()
    """The comments at the end of a section, which are indented deeper than what follows it."""


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """A text, taken apart."""

    entries: Mapping[_Path, _PlacedSetting]
    """In the order of the text."""
    below: tuple[str, ...]
    """Comments and blank lines at the end of the text."""


def merge_by_keys(base: str, yours: str, now: str, keep: Keep) -> Merged:
    """Merge the changes of settings from `base` to `yours` with those from `base` to `now`, in the order of `now`.

    A setting that only one side has changed, added or removed gets that side's form. One that both have changed is a
    conflict, and so is one that is gone now though the owner has changed it or commented on it. Where both have
    changed the comment above a setting, the owner's own lines are put below the generator's.

    :raises NoSettingsError: when one of the texts can't be taken apart, or the result would not say what its parts
        say.
    """
    sides = _alike([_taken_apart(text) for text in (base, yours, now)])
    merger = _Merger(*sides, keep=keep)
    text = merger.text()
    _verify(text, merger.chosen, (yours, now))
    return Merged(text=text, conflicts=tuple(merger.conflicts))


class _Merger:
    def __init__(self, base: _Settings, yours: _Settings, now: _Settings, *, keep: Keep) -> None:
        self._base, self._yours, self._now, self._keep = base, yours, now, keep
        self.conflicts: list[MergeConflict] = []
        self.chosen: dict[_Path, int] = {}
        """Path of each setting in the result -> the side whose value it has: 0 yours, 1 now."""
        self._merged: dict[_Path, _PlacedSetting] = {}
        for path in dict.fromkeys((*now.entries, *yours.entries)):
            if (entry := self._entry(path)) is not None:
                self._merged[path] = entry
        self._complete_sections()

    def _entry(self, path: _Path) -> _PlacedSetting | None:
        """Return what becomes of the setting at `path`; None where it goes."""
        before, mine, new = (side.entries.get(path) for side in (self._base, self._yours, self._now))
        if mine is None:
            return self._without_mine(path, before, new)
        if new is None:
            return self._without_new(path, before, mine)
        above = _comments(() if before is None else before.above, mine.above, new.above)
        below = _comments(() if before is None else before.below, mine.below, new.below)
        mine_then, new_then = (replace(entry, above=above, below=below) for entry in (mine, new))
        if mine.lines == new.lines or (before is not None and mine.lines == before.lines):
            return self._choose(new_then, 1)
        if before is not None and new.lines == before.lines:
            return self._choose(mine_then, 0)
        self._conflict(path, mine, before, new)
        return self._choose(mine_then, 0) if self._keep == "yours" else self._choose(new_then, 1)

    def _without_mine(
        self, path: _Path, before: _PlacedSetting | None, new: _PlacedSetting | None
    ) -> _PlacedSetting | None:
        if new is None:
            return None
        if before is None:
            is_removed_section = any(
                above in self._base.entries and above not in self._yours.entries for above in _above(path)
            )
            return None if is_removed_section else self._choose(new, 1)
        if new.lines == before.lines:
            return None
        self._conflict(path, None, before, new)
        return None if self._keep == "yours" else self._choose(new, 1)

    def _without_new(self, path: _Path, before: _PlacedSetting | None, mine: _PlacedSetting) -> _PlacedSetting | None:
        if before is None:
            return self._choose(mine, 0)
        if mine.lines == before.lines and not _own_lines(before.above + before.below, mine.above + mine.below):
            return None
        self._conflict(path, mine, before, None)
        return self._choose(mine, 0) if self._keep == "yours" else None

    def _choose(self, entry: _PlacedSetting, side: int) -> _PlacedSetting:
        if not entry.is_section:
            self.chosen[entry.path] = side
        return entry

    def _conflict(
        self, path: _Path, yours: _PlacedSetting | None, before: _PlacedSetting | None, now: _PlacedSetting | None
    ) -> None:
        texts = (None if entry is None else "\n".join(entry.lines) for entry in (yours, before, now))
        mine, old, new = texts
        self.conflicts.append(MergeConflict(where=".".join(path), yours=mine, before=old, now=new))

    def _complete_sections(self) -> None:
        """Give each setting that stays the heads of its sections, and take away heads without settings."""
        needed = {above for path in self.chosen for above in _above(path)}
        for path in needed - self._merged.keys():
            sides = (side.entries.get(path) for side in (self._now, self._yours))
            self._merged[path] = next(entry for entry in sides if entry is not None)
        for path in [path for path, entry in self._merged.items() if entry.is_section and path not in needed]:
            del self._merged[path]

    def text(self) -> str:
        below = _comments(self._base.below, self._yours.below, self._now.below)
        return "".join(f"{line}\n" for line in (*self._lines(()), *below))

    def _lines(self, parent: _Path) -> Iterator[str]:
        indent = " " * _INDENT * len(parent)
        for path in self._children(parent):
            entry = self._merged[path]
            yield from (indent + line if line else line for line in (*entry.above, *entry.lines))
            if entry.is_section:
                yield from self._lines(path)
                yield from (f"{indent}{' ' * _INDENT}{line}" if line else line for line in entry.below)

    def _children(self, parent: _Path) -> list[_Path]:
        """Return what stays below `parent`: in the order of `now`, the owner's own settings behind those that they
        stand behind in the owner's text."""
        theirs, mine = (
            [path for path in side.entries if path[:-1] == parent and path in self._merged]
            for side in (self._now, self._yours)
        )
        order = list(theirs)
        for number, path in enumerate(mine):
            if path not in order:
                before = next((other for other in reversed(mine[:number]) if other in order), None)
                order.insert(0 if before is None else order.index(before) + 1, path)
        return order


def _above(path: _Path) -> Iterable[_Path]:
    return (path[:length] for length in range(1, len(path)))


def _comments(base: Sequence[str], yours: Sequence[str], now: Sequence[str]) -> tuple[str, ...]:
    """Merge comments. Where both sides have changed the same lines, the owner's own stand below the generator's."""
    merged = merge_by_lines(_joined(base), _joined(yours), _joined(now), keep="yours")
    if not merged.conflicts:
        return tuple(merged.text.splitlines())
    return (*now, *(line for line in _own_lines(base, yours) if line not in now))


def _joined(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _own_lines(base: Sequence[str], yours: Sequence[str]) -> list[str]:
    return [line for line in yours if line.strip() and line not in base]


def _taken_apart(text: str) -> _Settings:
    import yaml

    lines = text.splitlines()
    try:
        [root] = composed_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: no document, or several
        raise NoSettingsError from error
    entries: dict[_Path, _PlacedSetting] = {}
    end = _collect(root, (), lines, 0, entries)
    below = lines[end:]
    if any(line.strip()[:1] not in ("", "#") for line in below):
        raise NoSettingsError
    return _Settings(entries=entries, below=tuple(line.lstrip() for line in below))


def _collect(node: Any, parent: _Path, lines: list[str], start: int, entries: dict[_Path, _PlacedSetting]) -> int:
    """Add the settings of a mapping to `entries`, and return the number of the line behind the last.

    :param start: the number of the first line that belongs to no setting yet.
    """
    import yaml

    if not isinstance(node, yaml.MappingNode) or node.flow_style or not node.value:
        raise NoSettingsError
    for key, value in node.value:
        line, column = key.start_mark.line, key.start_mark.column
        if not isinstance(key, yaml.ScalarNode) or lines[line][:column].strip() or (*parent, key.value) in entries:
            raise NoSettingsError
        if any(text.strip()[:1] not in ("", "#") for text in lines[start:line]):
            raise NoSettingsError
        path = (*parent, key.value)
        is_section = isinstance(value, yaml.MappingNode) and not value.flow_style and bool(value.value)
        is_text = isinstance(value, yaml.ScalarNode) and value.style in ("|", ">")  # blanks at the ends count in it
        last = value.start_mark.line if is_section else _end(value, line, lines)
        above = [text.lstrip() for text in lines[start:line]]
        if is_section:  # comments below the head are of the first setting
            last = line + 1
        entries[path] = _PlacedSetting(
            path=path,
            above=tuple(above),
            lines=tuple(_unindented(text if is_text else text.rstrip(), column) for text in lines[line:last]),
            is_section=is_section,
        )
        start = _collect(value, path, lines, last, entries) if is_section else last
        end = _deeper_comments(lines, start, column)
        if is_section:
            entries[path] = replace(entries[path], below=tuple(text.strip() for text in lines[start:end]))
        else:  # a part of the value that was commented out
            more = tuple(_unindented(text if is_text else text.rstrip(), column) for text in lines[start:end])
            entries[path] = replace(entries[path], lines=(*entries[path].lines, *more))
        start = end
    return start


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


def _alike(sides: list[_Settings]) -> list[_Settings]:
    """Return the sides with the same sections: one that is a setting on a side is one on all of them."""
    kinds: dict[_Path, set[bool]] = {}
    for side in sides:
        for path, entry in side.entries.items():
            kinds.setdefault(path, set()).add(entry.is_section)
    mixed = {path for path, found in kinds.items() if len(found) > 1}
    return [_folded(side, mixed) for side in sides] if mixed else sides


def _folded(side: _Settings, paths: set[_Path]) -> _Settings:
    """Return `side` with each section of `paths` as a single setting."""
    entries: dict[_Path, _PlacedSetting] = {}
    for path, entry in side.entries.items():
        if any(above in paths for above in _above(path)):
            continue
        if entry.is_section and path in paths:
            entry = replace(entry, lines=(*entry.lines, *_inner(path, side.entries)), is_section=False, below=())
        entries[path] = entry
    return replace(side, entries=entries)


def _inner(section: _Path, entries: Mapping[_Path, _PlacedSetting]) -> Iterator[str]:
    """Yield the lines below the head of a section."""
    indent = " " * _INDENT
    for path, entry in entries.items():
        if path[:-1] == section:
            inner = _inner(path, entries) if entry.is_section else ()
            yield from (indent + line if line else line for line in (*entry.above, *entry.lines, *inner))
    yield from (indent + line if line else line for line in entries[section].below)


def _verify(text: str, chosen: Mapping[_Path, int], sides: Sequence[str]) -> None:
    """Raise NoSettingsError unless the YAML `text` has the chosen settings, each with its side's value, and no more."""
    import yaml

    try:
        merged, values = parse_yaml(text), [parse_yaml(side) for side in sides]
        wrong = any(_value(merged, path) != _value(values[side], path) for path, side in chosen.items())
    except (yaml.YAMLError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise NoSettingsError from error
    if wrong or set(_leaves(merged, (), chosen)) != set(chosen):
        raise NoSettingsError


def _value(values: Any, path: _Path) -> Any:
    for name in path:
        values = _named(values)[name]
    return values


def _leaves(values: Any, path: _Path, chosen: Mapping[_Path, int]) -> Iterator[_Path]:
    if path in chosen:
        yield path
    elif isinstance(values, dict) and values:
        for name, below in _named(values).items():
            yield from _leaves(below, (*path, name), chosen)
    else:
        yield path


def _named(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the values by the keys as they are written; YAML reads some as numbers or truth values."""
    return {str(name): value for name, value in values.items()}
