"""What a test asks of the page cache, and what it pretends of it."""

import contextlib
from dataclasses import replace
from pathlib import Path

from deepseek_triton_tools.warming.page_cache import ResidentFile
from deepseek_triton_tools.warming.survey import Survey


def resident_bytes(path: Path) -> int | None:
    """Bytes of the whole file that are in the page cache; None: unknown."""
    with contextlib.closing(ResidentFile(path)) as file:
        return file.resident()


def on_uncached(survey: Survey, **changes: object) -> Survey:
    """The survey as if its files lay where nothing stays in the page cache, and the kernel did not say what is in it.

    :param changes: of how the file systems are read.
    """
    files = []
    for each in survey.files:
        reading = replace(each.file_system.reading, is_cached=False, **changes)
        system = replace(each.file_system, reading=reading)
        files.append(replace(each, file_system=system, resident=None, residency_method=None))
    return replace(survey, files=tuple(files))
