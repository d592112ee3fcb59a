"""Merge of hand edits with what is generated now: of a script line by line, of a YAML file setting by setting.

Lines are too coarse for YAML: a setting that the owner adds at the end of a section and one that the generator adds
there would be a conflict, one that both add in different places would stand in the file twice, and a section that moves
would lose its edits. Comments stand above the setting that they are about, and go where it goes.
"""

import difflib
import itertools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from deepseek_triton_build.text import composed_yaml, is_comment, parse_yaml

_YAML = (".yaml", ".yml")
Keep = Literal["yours", "generated"]
"""The side that wins a conflict."""


@dataclass(frozen=True)
class MergeConflict:
    """A place that the owner and the generator have both changed, in different ways. None: it is not there."""

    where: str = ""
    """The setting's key, or lines of the file as it is; "" for all of the file."""
    yours: str | None = None
    before: str | None = None
    """The text as it was generated."""
    now: str | None = None
    why: str = ""
    """The reason, where it is about all of the file: then there are no texts."""


@dataclass(frozen=True, kw_only=True)
class Merged:
    """A merged text, and the conflicts, each of which is settled in the text in favour of one side."""

    text: str
    conflicts: tuple[MergeConflict, ...]


_Path = tuple[str, ...]


class _Key(NamedTuple):
    path: _Path
    line: int
    column: int
    is_head: bool
    least_end: int
    """The number of the line behind what is no comment for sure."""


def merge_texts(name: str, base: str, yours: str, now: str, keep: Keep) -> Merged | None:
    """Merge a file by its settings if it is YAML, else by its lines. None: no merge would be what both sides mean."""
    if not name.endswith(_YAML):
        return merge_by_lines(base, yours, now, keep)
    try:
        return merge_by_keys(base, yours, now, keep)
    except NoSettingsError:
        merged = merge_by_lines(base, yours, now, keep)
        return merged if _is_yaml(merged.text) else None


def _is_yaml(text: str) -> bool:
    """Whether the text is YAML, in which no key stands twice in a section: parsers take the last without a word.
    A value below the name of a YAML file, as in a ConfigMap, is such a text too."""
    import yaml

    try:
        nodes = composed_yaml(text)
        if len(nodes) == 1:
            parse_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return False
    while nodes:
        node: Any = nodes.pop()
        if isinstance(node, yaml.MappingNode):
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            files = [value for key, value in node.value if str(key.value).endswith(_YAML)]
            if len(set(keys)) < len(keys) or not all(_is_yaml(file.value) for file in files if file.id == "scalar"):
                return False
            nodes += [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value
    return True


def merge_by_lines(base: str, yours: str, now: str, keep: Keep) -> Merged:
    """Merge the changes from `base` to `yours` with those from `base` to `now`.

    Different changes of the same lines are a conflict. Changes of neighbouring lines are one too, because a line of a
    script may go on in the next; only a change of comments is at home beside any other.
    """
    # The last line gets an end, because another may come to stand behind it.
    ended = (text if not text or text.endswith("\n") else f"{text}\n" for text in (base, yours, now))
    old, own, new = (text.splitlines(keepends=True) for text in ended)
    in_own, in_new = _same_lines(old, own), _same_lines(old, new)
    merged: list[str] = []
    conflicts: list[MergeConflict] = []
    of_old = of_own = of_new = 0
    for at in (*sorted(in_own.keys() & in_new.keys()), len(old)):
        was, mine, theirs = old[of_old:at], own[of_own : in_own.get(at)], new[of_new : in_new.get(at)]
        if mine in (was, theirs):
            merged += theirs
        elif theirs == was:
            merged += mine
        elif _code(theirs) == _code(was):
            comments = [line for line in theirs if is_comment(line)]
            is_ours = [bool(line.strip()) and is_comment(line) and (line in was or line in theirs) for line in mine]
            is_one = "".join(comments) in "".join(theirs)  # several would come to each other's lines
            first = is_ours.index(True) if is_one and any(is_ours) else len(mine)
            rest = [line for line, is_old in zip(mine[first:], is_ours[first:], strict=True) if not is_old]
            merged += [*mine[:first], *(comments if first < len(mine) else ()), *rest]
        elif _code(mine) == _code(was):
            merged += [*(line for line in mine if line not in was and line not in theirs), *theirs]
        else:
            merged += mine if keep == "yours" else theirs
            last = of_own + len(mine)
            where = f"lines {of_own + 1} to {last}" if len(mine) > 1 else f"line {of_own + 1}"
            texts = ["".join(side) or None for side in (mine, was, theirs)]
            conflicts.append(MergeConflict(where, texts[0], texts[1], texts[2]))
        merged += old[at : at + 1]
        of_old, of_own, of_new = at + 1, in_own.get(at, 0) + 1, in_new.get(at, 0) + 1
    return Merged(text="".join(merged), conflicts=tuple(conflicts))


def _same_lines(old: Sequence[str], new: Sequence[str]) -> dict[int, int]:
    """Return the numbers of the lines of `old` that are in `new` too, with their numbers there."""
    # Without autojunk=False, lines that occur often, such as blank ones, are matched with nothing in long files.
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    return {block.a + number: block.b + number for block in blocks for number in range(block.size)}


def _code(lines: Iterable[str]) -> list[str]:
    return [line for line in lines if not is_comment(line)]


class NoSettingsError(Exception):
    """The text is not a single YAML mapping in block style whose keys are each on a line of their own."""


@dataclass(frozen=True, kw_only=True)
class _Block:
    """A setting, or the head of a section. `above` and `lines` are without the section's indentation."""

    above: tuple[str, ...]
    """The comments and blank lines above it."""
    lines: tuple[str, ...]
    below: tuple[str, ...]
    """The comments that are indented deeper than what follows: they stay at the end of a section."""
    is_head: bool


_Blocks = dict[_Path, _Block]


def merge_by_keys(base: str, yours: str, now: str, keep: Keep) -> Merged:
    """Merge the changes of settings from `base` to `yours` with those from `base` to `now`, in the order of `now`.

    A setting that only one side has changed, added or removed gets that side's form. One that both have changed is a
    conflict, and so is one that is gone now though the owner has changed it or commented on it. Where both have
    changed the comment above a setting, the owner's own lines are put below the generator's.

    :raises NoSettingsError: when one of the texts can't be taken apart, or the result would not say what its parts
        say.
    """
    import yaml

    try:
        # A section on one side that is a plain value on another counts as one setting on all of them.
        sides = [_blocks(text) for text in (base, yours, now)]
        plain = {path for side in sides for path, block in side.items() if not block.is_head}
        old, mine, new = (_blocks(text, plain) for text in (base, yours, now))
        chosen, conflicts = _merge_blocks(old, mine, new, keep)
        lines: list[str] = []
        for path, (block, _) in chosen.items():
            indent = "  " * (len(path) - 1)
            lines += [*(indent + line if line else line for line in (*block.above, *block.lines)), *block.below]
        text = "".join(f"{line}\n" for line in lines)
        if not _is_meant(chosen, parse_yaml(text), (parse_yaml(yours), parse_yaml(now))):
            raise NoSettingsError
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise NoSettingsError from error
    return Merged(text=text, conflicts=tuple(conflicts))


def _blocks(text: str, plain: Container[_Path] = ()) -> _Blocks:
    """Take a text apart.

    :param plain: paths of sections that count as settings.
    """
    [root] = composed_yaml(text)
    lines = text.splitlines()
    keys = list(_keys(root, (), lines, plain))
    blocks: _Blocks = {}
    start = 0
    for (path, first, column, is_head, least_end), (_, following, next_column, *_) in itertools.pairwise(
        [*keys, _Key((), len(lines), -1, False, 0)]
    ):
        end = following
        while end > least_end and lines[end - 1].strip()[:1] in ("", "#"):
            end -= 1
        below = end
        # Comments below the head of a section are of its first setting.
        for number in range(end, end if is_head else following):
            comment = lines[number].lstrip()
            if comment and len(lines[number]) - len(comment) <= next_column:
                break
            below = number + 1 if comment else below
        if path in blocks:
            raise NoSettingsError
        own = [line[min(column, len(line) - len(line.lstrip())) :] for line in lines[first:end]]
        blocks[path] = _Block(
            above=tuple(line.lstrip() for line in lines[start:first]),
            lines=tuple(own),
            below=tuple(lines[end:below]),
            is_head=is_head,
        )
        start = below
    return blocks


def _keys(node: Any, section: _Path, lines: Sequence[str], plain: Container[_Path]) -> Iterator[_Key]:
    """Yield the keys of a mapping and of the sections in it, in the order of the text."""
    import yaml

    if not isinstance(node, yaml.MappingNode) or node.flow_style or not node.value:
        raise NoSettingsError
    for key, value in node.value:
        line, column = key.start_mark.line, key.start_mark.column
        if not isinstance(key, yaml.ScalarNode) or lines[line][:column].strip():
            raise NoSettingsError
        path = (*section, key.value)
        is_section = isinstance(value, yaml.MappingNode) and not value.flow_style and bool(value.value)
        is_head = is_section and path not in plain
        is_text = isinstance(value, yaml.ScalarNode) and value.style in ("|", ">")  # its last lines may begin with "#"
        yield _Key(path, line, column, is_head, value.end_mark.line if is_text else line + 1)
        if is_head:
            yield from _keys(value, path, lines, plain)


def _merge_blocks(
    old: _Blocks, mine: _Blocks, new: _Blocks, keep: Keep
) -> tuple[dict[_Path, tuple[_Block, int]], list[MergeConflict]]:
    """Return each block that stays, with the side that its value is of (0 yours, 1 now), and the conflicts."""
    chosen: dict[_Path, tuple[_Block, int]] = {}
    conflicts: list[MergeConflict] = []
    for path in _order(new, mine):
        before, own, now = (side.get(path) for side in (old, mine, new))
        parents = [path[:depth] for depth in range(1, len(path))]
        if before is None and own is None and any(parent in old and parent not in mine for parent in parents):
            continue  # the owner has removed the section that it would come into
        side = _side(before, own, now)
        if side is None:
            texts = ["\n".join(block.lines) if block else None for block in (own, before, now)]
            conflicts.append(MergeConflict(".".join(path), texts[0], texts[1], texts[2]))
            side = 0 if keep == "yours" else 1
        block = (own, now)[side]
        if block is None:
            continue
        if own is not None and now is not None:
            above, below = (before.above, before.below) if before else ((), ())
            block = replace(
                block, above=_comments(above, own.above, now.above), below=_comments(below, own.below, now.below)
            )
        for parent in parents:  # what stays needs its heads
            chosen.setdefault(parent, (new.get(parent) or mine[parent], 1))
        chosen[path] = (block, side)
    used = {path[:depth] for path, (block, _) in chosen.items() if not block.is_head for depth in range(len(path))}
    return {path: row for path, row in chosen.items() if not row[0].is_head or path in used}, conflicts


def _side(before: _Block | None, mine: _Block | None, new: _Block | None) -> int | None:
    """Return the side that a setting is taken from: 0 yours, 1 now; None for a conflict."""
    was, own, now = (block.lines if block else None for block in (before, mine, new))
    if before and mine and new is None:
        has_comments = _own_lines(before.above + before.below, mine.above + mine.below)
        return 1 if own == was and not has_comments else None
    return 1 if own in (now, was) else 0 if now == was else None


def _order(now: Iterable[_Path], own: Iterable[_Path]) -> list[_Path]:
    """Return the paths in the order of `now`, the owner's own ones behind those that they stand behind in `own`."""
    order = list(now)
    last: dict[_Path, _Path] = {}
    for path in own:
        section = path[:-1]
        if path not in order:
            behind = last.get(section)
            within = [at for at, other in enumerate(order) if behind and other[: len(path)] == behind]
            order.insert(within[-1] + 1 if within else order.index(section) + 1 if section else 0, path)
        last[section] = path
    return order


def _comments(base: tuple[str, ...], yours: tuple[str, ...], now: tuple[str, ...]) -> tuple[str, ...]:
    """Merge comments. Where both sides have changed them, the owner's own lines stand below the generator's."""
    if yours in (base, now):
        return now
    return yours if now == base else (*now, *(line for line in _own_lines(base, yours) if line not in now))


def _own_lines(base: Sequence[str], yours: Sequence[str]) -> list[str]:
    return [line for line in yours if line.strip() and line not in base]


def _is_meant(chosen: Mapping[_Path, tuple[_Block, int]], result: Any, sides: Sequence[Any]) -> bool:
    """Whether the merged text, read again, has for each setting its side's value, and no other setting."""
    for path, (block, side) in chosen.items():
        if not block.is_head and _value(result, path) != _value(sides[side], path):
            return False
    sections = [(), *(path for path, (block, _) in chosen.items() if block.is_head)]
    return all(
        {str(name) for name in _value(result, section)} == {path[-1] for path in chosen if path[:-1] == section}
        for section in sections
    )


def _value(values: Any, path: _Path) -> Any:
    for name in path:
        # YAML reads some keys as numbers or truth values.
        values = {str(key): value for key, value in values.items()}[name]
    return values
