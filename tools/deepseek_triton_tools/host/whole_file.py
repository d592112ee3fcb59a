"""Writing a file whole or not at all."""

import gzip
import io
import os
import platform
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from deepseek_triton_tools.host.processes import is_running
from deepseek_triton_tools.tool_errors import ToolError

_PART = ".part"
"""End of the name of a file that is being written."""


def part_of(path: Path) -> Path:
    """Return the name under which this thread writes `path`: it has the machine and the thread's number."""
    return path.with_name(f".{path.name}.{platform.node()}-{threading.get_native_id()}{_PART}")


def sweep(folder: Path) -> None:
    """Remove what threads of this machine that were killed have left of their files."""
    for path in folder.glob(f"*{_PART}"):
        match = re.search(rf"\.{re.escape(platform.node())}-(\d+){re.escape(_PART)}$", path.name)
        if match and not is_running(int(match[1])):
            path.unlink(missing_ok=True)


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """Open a file that takes the place of `path` when the block ends, and disappears when an exception ends it.

    Where the name ends in .gz it is compressed. A process that is killed leaves a file with another name, until `sweep`
    is called. Raises ToolError where it can't be written.
    """
    scratch = part_of(path)
    try:
        try:
            with _new(scratch, is_compressed=path.suffix == ".gz") as file:
                yield file
            os.replace(scratch, path)
        except BaseException:
            with suppress(FileNotFoundError):
                scratch.unlink()
            raise
    except OSError as error:
        raise ToolError(f"{path} can't be written: {error.strerror}") from error


def _new(path: Path, *, is_compressed: bool) -> TextIO:
    if is_compressed:
        return io.TextIOWrapper(gzip.open(path, "wb", compresslevel=1), encoding="utf-8", newline="")
    return path.open("w", encoding="utf-8", newline="")
