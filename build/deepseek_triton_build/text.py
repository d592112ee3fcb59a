"""Text helpers of the generator and the tools: quoted values, names safe to print, comments, YAML, templates."""

import difflib
import math
import re
import reprlib
import string
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

MAX_YAML_DEPTH = 60
"""Levels of nesting. The limit is needed because libyaml's composer crashes the process on very deep nesting."""
UNREADABLE_YAML = (ValueError, ArithmeticError, LookupError, AttributeError, TypeError, RecursionError)
"""Errors of PyYAML beside its own: for a tag that does not fit its text, a date that is none, and deep nesting."""
LINE_WIDTH = 110
"""Characters of a line in generated files."""
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict = 2, 4, 2
# Characters of repr(value) up to which `short_yaml` writes a value in full.
_LONGEST_YAML = 400
# Values in a YAML text, those of its aliases counted each time: a few lines of them can stand for any number.
_MOST_VALUES = 100_000
_WORD = re.compile(r"0*([^\W_]+)")  # 26.7 is 26.07
# From 0 to 1, as difflib counts it: the least that is a misspelling, of a name and of each of its words. Two exchanged
# letters leave more of a word of three.
_LIKENESS = 0.65
_VALUE = re.compile(r"@@\{(\w+)\}")
_DIRECTIVE = re.compile(r"(?P<indent> *)#(?P<verb>if|else|end|include)\b *(?P<negated>not )?(?P<name>[\w.-]*)")
_CONSTANTS = {True: "true", False: "false", None: "null"}
# Text that YAML takes for text without quotes: a part of it, for the values that there are most of.
_PLAIN = re.compile(r"(?!(?:yes|no|on|off|true|false|null)$)[a-z_][\w./-]*", re.ASCII | re.IGNORECASE)


def parse_yaml(text: str) -> Any:
    """Return what YAML `text` stands for, read by the safe loader.

    :raises yaml.YAMLError: when the text is not YAML, is nested more than MAX_YAML_DEPTH deep, or has aliases that
        never end or stand for too many values.
    """
    import yaml  # takes as long as a tenth of a build, and most verbs have no YAML to read or to quote

    try:
        limit_yaml_depth(text)
        if "&" in text and "*" in text:
            composed_yaml(text)
        # libyaml's loader is about ten times as fast as Python's.
        return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except UNREADABLE_YAML as error:
        raise yaml.YAMLError(f"a value does not fit its tag: {error}") from error


def limit_yaml_depth(text: str) -> None:
    """:raises yaml.YAMLError: when the text is not YAML, or is nested more than MAX_YAML_DEPTH deep."""
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CLoader", yaml.Loader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_YAML_DEPTH:
            where: Any = event.start_mark
            raise yaml.constructor.ConstructorError(None, None, f"nested more than {MAX_YAML_DEPTH} deep", where)


def is_comment(line: str) -> bool:
    """Tell whether a line of a script or of settings is a comment or blank. Options of Slurm are none."""
    text = line.strip()
    return not text or (text.startswith("#") and not text.startswith(("#!", "#SBATCH")))


def composed_yaml(text: str) -> list[Any]:
    """Return the root node of each document in YAML `text`. A walk over the nodes ends, in spite of aliases.

    :raises yaml.YAMLError: as `parse_yaml` does.
    """
    import yaml

    limit_yaml_depth(text)  # libyaml's composer would go down as deep as the text says
    roots = list(yaml.compose_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    counts: dict[int, int] = {}
    if sum(_num_values(root, counts) for root in roots) > _MOST_VALUES:
        raise yaml.YAMLError(f"expected at most {_MOST_VALUES:,} values, found more")
    return roots


def _num_values(node: Any, counts: dict[int, int]) -> int:
    """Return the number of values that a YAML node stands for.

    :param counts: the numbers of the nodes before it, by their identities; 0 for one that is being counted.
    """
    import yaml

    if counts.get(id(node)) == 0:
        raise yaml.YAMLError("expected aliases that end, found one of a section that holds it")
    if id(node) not in counts:
        counts[id(node)] = 0
        children = node.value if isinstance(node, yaml.CollectionNode) else ()
        pairs = (child if isinstance(child, tuple) else (child,) for child in children)
        counts[id(node)] = 1 + sum(_num_values(child, counts) for pair in pairs for child in pair)
    return counts[id(node)]


def short_repr(value: Any) -> str:
    """Return `value` for a message, nearly as YAML writes it, on one line and cut short."""
    if value is None or isinstance(value, bool):
        return _CONSTANTS[value]
    return printable_line(_SHORT.repr(value))


def yaml_flow(value: Any) -> str:
    """Return `value` as YAML on one line, in flow style and in full."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(yaml_flow, value))}]"
    if value is None or isinstance(value, bool):
        return _CONSTANTS[value]
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        # YAML's numbers have a dot before the exponent.
        return repr(value) if "." in repr(value) else repr(value).replace("e", ".0e")
    if isinstance(value, str) and _PLAIN.fullmatch(value):
        return value
    import yaml

    # A list is dumped and its brackets are cut off: a scalar dumped alone would end with a line "...".
    text = yaml.dump([value], Dumper=_line_dumper(), default_flow_style=True, width=math.inf, sort_keys=False)
    return text.strip()[1:-1]


def short_yaml(value: Any) -> str:
    """Return `value` as YAML on one printable line, or as `short_repr` where it is very long."""
    if len(repr(value)) > _LONGEST_YAML:
        return short_repr(value)
    text = yaml_flow(value)
    return text if text.isprintable() else printable_line(text)


def edit_instruction(settings: Mapping[str, Any]) -> str:
    """Say on one line what to write into a YAML file for these dotted keys: "under a, b: write c: 1; d: 2"."""
    by_section: dict[str, list[str]] = {}
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        by_section.setdefault(section, []).append(f"{name}: {short_yaml(value)}")
    return "; ".join(
        (f"under {section.replace('.', ', ')}: " if section else "") + f"write {'; '.join(lines)}"
        for section, lines in by_section.items()
    )


@cache
def _line_dumper() -> Any:
    """A dumper for single lines: it repeats a value instead of using an alias, and escapes line breaks."""
    import yaml

    class LineDumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')

    LineDumper.add_representer(str, represent_text)
    return LineDumper


def printable_line(text: str) -> str:
    r"""Return `text` on one line and safe to print: control characters, which a terminal obeys, are escaped (\x1b)."""
    line = " ".join(text.split())
    return line if line.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


def for_comment(text: str) -> str:
    """Return `text` with a question mark for each unprintable character.

    Generated files need it for a user's path: it can hold a line break, which would end the comment it stands in.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def comment_lines(text: str, indent: str = "") -> list[str]:
    """Return `text` wrapped as lines of a comment, which YAML, protobuf text and shell write alike."""
    wrapped = textwrap.wrap(
        for_comment(" ".join(text.split())), LINE_WIDTH - len(indent), break_long_words=False, break_on_hyphens=False
    )
    return [f"{indent}# {line}" for line in wrapped]


def is_path(model: str) -> bool:
    """Tell whether `model` is a folder rather than a Hugging Face name (`owner/name`), by its form alone."""
    return model.startswith(("/", ".", "~")) or model.count("/") > 1


def is_inside(name: str) -> bool:
    """Tell whether the relative path `name`, which a file gives, stays inside its folder, and can be a path at all."""
    return "\0" not in name and all(part not in ("", "..") for part in name.split("/"))


def safe_name(name: str) -> str:
    """Return `name` itself where it is printable and at most 200 characters long, else quoted and cut short."""
    return name if name.isprintable() and len(name) <= 200 else short_repr(name)


def enroot_image(image: str) -> str:
    """Return a container's name in the form of Slurm's pyxis: [USER@][REGISTRY#]IMAGE[:TAG], or a squashfs file."""
    registry, slash, rest = image.partition("/")
    if "#" in image or image.startswith((".", "/")) or not slash or not set(".:") & set(registry):
        return image
    return f"{registry}#{rest}"


def first_names(names: Iterable[str], most: int = 3) -> str:
    """Return the first `most` of the sorted `names`, and how many more there are."""
    names = [safe_name(name) for name in sorted(names)]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def nearest_name(name: Any, known: Iterable[str], *, lacks_some: bool = False) -> str | None:
    """Return the known name that `name` may be a misspelling of, upper and lower case apart; None when none is near.

    :param lacks_some: whether there are names that `known` lacks. One with a word more or less, or only begun, is then
        another name.
    """
    given, by_lower = str(name).lower()[:100], {entry.lower(): entry for entry in known}
    near = difflib.get_close_matches(given, by_lower, n=max(1, len(by_lower)), cutoff=_LIKENESS)
    return next((by_lower[entry] for entry in near if _has_alike_words(given, entry, lacks_some)), None)


def _has_alike_words(name: str, other: str, lacks_some: bool) -> bool:
    """Tell whether each word of the one is like one of the other. Endings such as _config make any two names alike."""
    fewer, more = sorted((_WORD.findall(name), _WORD.findall(other)), key=len)
    if lacks_some and len(fewer) < len(more) and abs(sum(map(len, fewer)) - sum(map(len, more))) > 1:
        return False
    return all(
        word in more
        or difflib.get_close_matches(word, [one for one in more if word[2:] or one[0] == word[0]], 1, _LIKENESS)
        or (not lacks_some and any(one.startswith(word) or word.startswith(one) for one in more))
        for word in fewer
    )


class _Template(string.Template):
    delimiter = "@@"  # none of the languages uses it


@cache
def template_lines(path: Path) -> tuple[str, ...]:
    """Return the lines of a template, with those that it includes by `#include FILE`."""
    lines: list[str] = []
    for line in path.read_text("utf-8").splitlines():
        found = _DIRECTIVE.match(line)
        if found and found["verb"] == "include":
            lines += [
                found["indent"] + inner if inner else inner for inner in template_lines(path.with_name(found["name"]))
            ]
        else:
            lines.append(line)
    return tuple(lines)


@cache
def template_names(path: Path) -> set[str]:
    """Return the names of the values and conditions in a template."""
    conditions = {found["name"] for line in template_lines(path) if (found := _DIRECTIVE.match(line))}
    return conditions | set(_VALUE.findall("\n".join(template_lines(path))))


def kept_lines(lines: Iterable[str], values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines whose conditions hold: `#if name` or `#if not name`, up to #else or #end."""
    holds: list[bool] = []
    for line in lines:
        found = _DIRECTIVE.match(line)
        if found is None:
            if all(holds):
                yield line
        elif found["verb"] == "if":
            # Inside what is left out, a value may be unknown.
            holds.append(all(holds) and bool(values[found["name"]]) is not bool(found["negated"]))
        elif found["verb"] == "else":
            holds[-1] = not holds[-1]
        else:
            holds.pop()


def with_values(line: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the line with its @@{value}s once, or for each entry of the lists in it, which are equally long."""
    used = {name: values[name] for name in _VALUE.findall(line)}
    [count] = {len(value) for value in used.values() if isinstance(value, list)} or {1}
    for number in range(count):
        yield _Template(line).substitute(
            {name: value[number] if isinstance(value, list) else value for name, value in used.items()}
        )
