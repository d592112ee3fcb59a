"""Rows of a file: each is checked, and the first ten that are wrong are named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from deepseek_triton_tools.terminal.output_streams import complain
from deepseek_triton_tools.tool_errors import ToolError

_ItemT = TypeVar("_ItemT")
_ReadT = TypeVar("_ReadT")

_MOST_PROBLEMS = 10


def checked_rows(
    name: str, kind: str, items: Iterable[tuple[int, _ItemT]], parse: Callable[[_ItemT], _ReadT]
) -> list[_ReadT]:
    """Parse the numbered items of a file. Each problem is one line on stderr.

    :param kind: names an item in messages, such as "line".
    :param parse: raises ToolError for a wrong item.
    :raises ToolError: when one is wrong.
    """
    parsed, num_wrong = [], 0
    for number, item in items:
        try:
            parsed.append(parse(item))
        except ToolError as error:
            num_wrong += 1
            if num_wrong <= _MOST_PROBLEMS:
                complain(f"{name} {kind} {number}: {error}")
    if num_wrong:
        total = num_wrong + len(parsed)
        shown = "" if num_wrong <= _MOST_PROBLEMS else f"; the first {_MOST_PROBLEMS} are listed"
        raise ToolError(f"{num_wrong} of {total} {kind}s of {name} are wrong{shown}")
    return parsed


def json_of_line(line: bytes) -> Any:
    """Raises ToolError, which leaves the line's number to the caller: json's own is always 1, or 2 at its end."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ToolError(f"not JSON: {error.msg} at character {error.pos + 1}") from error
    except (ValueError, RecursionError) as error:
        raise ToolError(f"not JSON: {error}") from error
