"""The origin of a repository: deepseek-triton.json, 1/release.yaml and the variables in start.sh."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepseek_triton_build.check.codes import CHANGED
from deepseek_triton_build.check.documents import MAX_TEXT_BYTES, read_json, read_text, read_yaml
from deepseek_triton_build.check.finding import Finding
from deepseek_triton_build.check.regular_files import is_inside, read_bytes
from deepseek_triton_build.data.releases import READABLE_RELEASES, load_release
from deepseek_triton_build.render.stamp import MANIFEST, sha256
from deepseek_triton_build.text import safe_name

RELEASE_RECORD = "release.yaml"
START_SCRIPT = "start.sh"
_MOST_GPUS = 1_000_000
"""A stamp with more GPUs is not believed."""
_RELEASE = re.compile(rb'^release: "([0-9.]+)"', re.MULTILINE)
_EXPORT = re.compile(r'^\s*export (\w+)="?(?:\$\{\1:-)?([^"}]*)', re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """The stamp of a generated folder. A value of a wrong type counts as absent."""

    values: Mapping[str, Any]
    file: str

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        return value if isinstance(value, str) else None

    @property
    def num_gpus(self) -> int | None:
        value = self.values.get("gpus")
        if not isinstance(value, int) or isinstance(value, bool):
            return None
        return value if 0 < value <= _MOST_GPUS else None


def read_stamp(folder: Path, label: str) -> tuple[Stamp, list[Finding]]:
    """Return the stamp in `folder`, an empty one when it has none, and what is wrong with its file."""
    file = f"{label}{MANIFEST}"
    if not os.path.exists(folder / MANIFEST):
        return Stamp(values={}, file=file), []
    values, findings = read_json(folder / MANIFEST, file)
    return Stamp(values=values or {}, file=file), findings


def changed_files(stamp: Stamp, model: Path, root: Path, label: str) -> Iterator[Finding]:
    """Find the files that were changed or removed since they were generated.

    :param model: the model's folder.
    :param root: what is checked. Files beside the model's folder are looked at only when the repository is checked.
    """
    files = stamp.values.get("files")
    for name, expected in files.items() if isinstance(files, dict) else ():
        within = name.partition("/")[2]
        if not is_inside(name) or name.endswith(f"/{MANIFEST}") or (not within and root == model):
            continue
        path, file = (model / within, f"{label}{within}") if within else (root / name, name)
        found = _checksum(path)
        if found != expected:
            what = "is gone" if found is None else "was changed"
            fix = "nothing, if that was meant; deepseek-triton build --force writes the original again"
            yield CHANGED.finding(f"{safe_name(name)} {what} since it was generated", fix, file=file)


def read_release_version(version_dir: Path, label: str) -> tuple[str | None, list[Finding]]:
    """Return the release of the record beside model.py, None without a record, and what is wrong with it."""
    if not os.path.exists(version_dir / RELEASE_RECORD):
        return None, []
    if (version := _unchanged_record(version_dir / RELEASE_RECORD)) is not None:
        return version, []
    document, findings = read_yaml(version_dir / RELEASE_RECORD, f"{label}{RELEASE_RECORD}")
    value = None if document is None else document.values.get("release")
    return (str(value) if value is not None else None), findings


def _unchanged_record(path: Path) -> str | None:
    """Return the release whose record the file holds byte for byte; None for any other file.

    This saves parsing the record, which takes longer than the rest of a check.
    """
    try:
        content = read_bytes(path, MAX_TEXT_BYTES) or b""
    except OSError:  # read_release_version reads the file again and reports it
        return None
    found = _RELEASE.search(content)
    version = found[1].decode() if found else ""
    return version if version in READABLE_RELEASES and load_release(version).text.encode() == content else None


def read_environment(folder: Path) -> dict[str, str]:
    """Return the variables that start.sh exports with plain values."""
    if not os.path.isfile(folder / START_SCRIPT):
        return {}
    text = read_text(folder / START_SCRIPT, START_SCRIPT)
    return {} if isinstance(text, Finding) else dict(_EXPORT.findall(text))


def _checksum(path: Path) -> str | None:
    """Return the file's checksum; None when it can't be read; an empty string when it is too large to be generated."""
    try:
        content = read_bytes(path, MAX_TEXT_BYTES)
    except (OSError, ValueError):  # ValueError: a null byte in the path
        return None
    return "" if content is None else sha256(content)
