"""Values and types as findings quote them, in a line."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict = 2, 4, 2
_LONGEST_WRITTEN = 400
"""Values of more characters are cut short even where they are to be written."""
_CONSTANTS = {True: "true", False: "false", None: "null"}


def shown(value: Any) -> str:
    """`value` as YAML would have it, nearly, and never longer than a line."""
    if value is None or isinstance(value, bool):
        return _CONSTANTS[value]
    return one_line(_SHORT.repr(value))


def to_write(settings: Mapping[str, Any]) -> str:
    """What to write into a file for dotted keys: the lines, in one and apart by semicolons, under their sections."""
    by_section: dict[str, list[str]] = {}
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        by_section.setdefault(section, []).append(f"{name}: {as_yaml(value)}")
    return "; ".join(
        (f"under {section.replace('.', ', ')}: " if section else "") + f"write {'; '.join(lines)}"
        for section, lines in by_section.items()
    )


def as_yaml(value: Any) -> str:
    """`value` as YAML has it, in a line; cut short as by `shown` where it is very long."""
    if len(repr(value)) > _LONGEST_WRITTEN:
        return shown(value)
    text = yaml.dump([value], Dumper=_LineDumper, default_flow_style=True, width=10**6, sort_keys=False)
    text = text.strip()[1:-1]
    return text if text.isprintable() else one_line(text)


class _LineDumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_LineDumper.add_representer(str, _represent_text)


def one_line(text: str) -> str:
    """`text` in one line, and safe to print: what a terminal would act upon is spelled out."""
    line = " ".join(text.split())
    return line if line.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


def plain(name: str) -> str:
    """`name` itself where it fits into a line, else in quotes and cut short."""
    return name if name.isprintable() and len(name) <= 200 else shown(name)


def nearest(name: Any, known: Iterable[str]) -> str | None:
    """The known name that `name` may be a slip of."""
    by_lower = {entry.lower(): entry for entry in known}
    found = difflib.get_close_matches(str(name).lower()[:100], by_lower, n=1)
    return by_lower[found[0]] if found else None


def listed(names: Iterable[str], most: int = 3) -> str:
    """The first few of `names`, and how many more there are."""
    names = [plain(name) for name in sorted(names)]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
