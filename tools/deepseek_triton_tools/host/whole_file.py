"""Writing a file whole or not at all."""

from __future__ import annotations

import gzip
import io
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from deepseek_triton_tools.tool_errors import ToolError


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """Open a file that takes the place of `path` when the block ends, and disappears when an exception ends it.

    Where the name ends in .gz it is compressed. Raises ToolError where it can't be written.
    """
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
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
        return io.TextIOWrapper(gzip.open(path, "xb", compresslevel=1), encoding="utf-8", newline="")
    return path.open("x", encoding="utf-8", newline="")
