"""What a folder's owner changed in it, to be shown before it is replaced."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

MAX_LINES = 200
MAX_BYTES = 256 * 1024
"""A larger file is only named."""


def edits_diff(output: Path, edited: Iterable[str], new: Mapping[str, bytes]) -> str:
    """A unified diff from the files `edited` in the folder `output` to `new`, of MAX_LINES lines at most.

    :param new: path -> content, of everything that would be written.
    """
    lines = [line for name in edited for line in _one_file(output, name, new.get(name))]
    if len(lines) > MAX_LINES:
        lines = [*lines[: MAX_LINES - 1], f"... and {len(lines) - MAX_LINES + 1} more lines"]
    return "\n".join(lines)


def _one_file(output: Path, name: str, new: bytes | None) -> Iterator[str]:
    path = output / name
    if not path.is_file():
        yield f"{name}: was removed, and would be written again"
        return
    old_text = _text(path.read_bytes()) if path.stat().st_size <= MAX_BYTES else None
    new_text = "" if new is None else _text(new)
    if old_text is None or new_text is None:
        yield f"{name}: would be {'removed' if new is None else 'replaced'}; it is binary or large"
        return
    yield from difflib.unified_diff(
        old_text.splitlines(),
        new_text.splitlines(),
        fromfile=str(path),
        tofile="/dev/null" if new is None else f"{name} as generated",
        lineterm="",
    )


def _text(content: bytes) -> str | None:
    """None for what nobody reads as lines."""
    if len(content) > MAX_BYTES or b"\0" in content:
        return None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return None
