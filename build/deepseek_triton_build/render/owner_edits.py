"""The owner's changes in a generated folder, to be shown before the folder is replaced."""

import difflib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path, PurePosixPath
from typing import Any

from deepseek_triton_build.render.stamp import sha256
from deepseek_triton_build.text import is_inside, safe_name

MAX_LINES = 200
"""Lines of a difference; longer ones are cut."""
MAX_BYTES = 256 * 1024
"""Size of the largest file whose lines are compared; a larger one is only named."""


def edited_names(output: Path, manifest: str, recorded: Mapping[str, str], new: Mapping[str, bytes]) -> list[str]:
    """Return the paths below the folder `output` that are neither as generated nor as they would be written now.

    Files that are gone count, and so does everything that was added: files, links, pipes and empty folders. The caches
    that Python writes beside our own modules do not count.

    :param manifest: path of the file that `recorded` was read from; it is not compared.
    :param recorded: the SHA-256 of each file as generated, by path, from `recorded_checksums`.
    :param new: the content of every file that would be written, by path.
    :raises OSError: when a folder or a file can't be read.
    """
    ours = _folders_of({*recorded, *new})
    present = present_paths(output, {*recorded, *new})
    edited = {name for name in recorded if name not in present}
    for name, path in present.items():
        if name == manifest or name in ours:
            continue
        if (
            not stat.S_ISREG(path.lstat().st_mode)
            or (name not in recorded and name not in new)
            or ((content := path.read_bytes()) != new.get(name) and sha256(content) != recorded.get(name))
        ):
            edited.add(name)
    return sorted(edited)


def recorded_checksums(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the checksums of the files in a manifest, by path, but for paths that lead out of the folder."""
    files = record.get("files")
    rows = files.items() if isinstance(files, dict) else ()
    return {name: checksum for name, checksum in rows if isinstance(checksum, str) and is_inside(name)}


def present_paths(output: Path, generated: Set[str]) -> dict[str, Path]:
    """Return what is in the folder `output`, by relative path: everything that is no folder, and empty folders. The
    caches that Python writes beside the modules among `generated` are left out.

    :raises OSError: when a folder can't be read.
    """
    ours = _folders_of(generated)
    return {name: path for name, path in _entries(output) if not _is_python_cache(name, path, ours)}


def _folders_of(names: Set[str]) -> set[str]:
    return {above.as_posix() for name in names for above in PurePosixPath(name).parents}


def _entries(output: Path) -> Iterator[tuple[str, Path]]:
    """Yield everything that is not a folder, and the folders that are empty. Links are not followed."""

    def fail(error: OSError) -> None:
        raise error

    for folder, folders, files in os.walk(output, onerror=fail):
        here = Path(folder)
        if here != output and not folders and not files:
            yield here.relative_to(output).as_posix(), here
        for path in (here / name for name in (*folders, *files)):
            if not stat.S_ISDIR(path.lstat().st_mode):
                yield path.relative_to(output).as_posix(), path


def _is_python_cache(name: str, path: Path, ours: set[str]) -> bool:
    """Whether the path is a compiled module beside our own modules, or an empty folder for such files."""
    entry = PurePosixPath(name)
    cache = entry if entry.name == "__pycache__" else entry.parent
    if cache.name != "__pycache__" or cache.parent.as_posix() not in ours:
        return False
    kind = path.lstat().st_mode
    return stat.S_ISDIR(kind) if entry is cache else stat.S_ISREG(kind) and entry.suffix == ".pyc"


def edits_diff(output: Path, edited: Iterable[str], new: Mapping[str, bytes]) -> str:
    """Return a unified diff from the files `edited` in the folder `output` to `new`, of MAX_LINES lines at most.

    :param new: the content of every file that would be written, by path.
    """
    lines = [line for name in edited for line in _file_diff(output, name, new.get(name))]
    # A terminal might obey other characters.
    lines = ["".join(c if c.isprintable() or c == "\t" else "?" for c in line) for line in lines]
    if len(lines) > MAX_LINES:
        lines = [*lines[: MAX_LINES - 1], f"... and {len(lines) - MAX_LINES + 1} more lines"]
    return "\n".join(lines)


def _file_diff(output: Path, name: str, new: bytes | None) -> Iterator[str]:
    path = output / name
    becomes = "removed" if new is None else "replaced"
    if not os.path.lexists(path):
        yield f"{safe_name(name)}: was removed, and would be written again"
        return
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        yield f"{safe_name(name)}: would be {becomes}; it is {describe(found.st_mode)}"
        return
    old_text = _text(path.read_bytes()) if found.st_size <= MAX_BYTES else None
    new_text = "" if new is None else _text(new)
    if old_text is None or new_text is None:
        yield f"{safe_name(name)}: would be {becomes}; it is binary or large"
        return
    yield from difflib.unified_diff(
        old_text.splitlines(),
        new_text.splitlines(),
        fromfile=str(path),
        tofile="/dev/null" if new is None else f"{name} as generated",
        lineterm="",
    )


def describe(mode: int) -> str:
    """Say what something with this mode is that is no regular file, or none that is read."""
    if stat.S_ISLNK(mode):
        return "a link"
    if stat.S_ISREG(mode):
        return "a very large file"
    return "a folder" if stat.S_ISDIR(mode) else "no regular file"


def _text(content: bytes) -> str | None:
    """Return the text of a file; None for a file that nobody reads as lines, because it is large or binary."""
    if len(content) > MAX_BYTES or b"\0" in content:
        return None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return None
