"""Values and types as findings quote them, in a line."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict = 2, 4, 2
_WORD = re.compile(r"[A-Za-z][\w-]{0,60}")
_NO_TEXT = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")
"""Words that YAML takes for something else."""
_CONSTANTS = {True: "true", False: "false", None: "null"}


def shown(value: Any) -> str:
    """`value` as YAML would have it, nearly, and never longer than a line."""
    if value is None or isinstance(value, bool):
        return _CONSTANTS[value]
    return one_line(_SHORT.repr(value))


def to_write(key: str, value: Any) -> str:
    """What to write into a file for the dotted `key`: its last name, under the others."""
    *sections, name = key.split(".")
    below = f"under {', '.join(sections)}: " if sections else ""
    return f"{below}write {name}: {value if _needs_no_quotes(value) else shown(value)}"


def _needs_no_quotes(value: Any) -> bool:
    return isinstance(value, str) and bool(_WORD.fullmatch(value)) and value.lower() not in _NO_TEXT


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
