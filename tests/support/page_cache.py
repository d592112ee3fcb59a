"""What a test asks of the page cache."""

from __future__ import annotations

import contextlib
from pathlib import Path

from deepseek_triton_tools.warming.pagecache.residency import ResidentFile


def resident_bytes(path: Path) -> int | None:
    """Bytes of the whole file that are in the page cache; None: unknown."""
    with contextlib.closing(ResidentFile(path)) as file:
        return file.resident()
