"""The origin of a repository: deepseek-triton.json, with the checksums of its files, and 1/release.yaml."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from deepseek_triton_build.check import codes
from deepseek_triton_build.check.documents import MAX_TEXT_BYTES, is_inside, read_bytes, read_json, read_yaml
from deepseek_triton_build.data.releases import READABLE_RELEASES, load_release
from deepseek_triton_build.data.vllm import VLLM_VERSIONS, load_vllm
from deepseek_triton_build.render.carried_checkpoint import CHECKSUMS
from deepseek_triton_build.render.stamp import MANIFEST, RELEASE_RECORD, sha256
from deepseek_triton_build.rules.finding import Finding
from deepseek_triton_build.text import first_names, safe_name

_MOST_GPUS = 1_000_000
"""A stamp with more GPUs is not believed."""
_RECORDED = re.compile(rb'^(release|vllm): "([0-9.]+)"', re.MULTILINE)


_ASKED_FOR = ("config.pbtxt", "1/model.yaml")
"""Files whose absence is another finding. The record, and scripts, which lie beside the model, are read elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """The stamp of a generated folder. A value of a wrong type counts as absent."""

    values: Mapping[str, Any]
    file: str

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        return value if isinstance(value, str) else None

    @cached_property
    def files(self) -> Mapping[str, str]:
        """Path -> checksum, as they were generated. A path that no file of the folder can have is left out."""
        files = self.values.get("files")
        rows = files.items() if isinstance(files, dict) else ()
        return {name: sum for name, sum in rows if isinstance(sum, str) and is_inside(name)}

    @property
    def is_of_triton(self) -> bool:
        """Whether it is the stamp of a model repository, which lies in the model's folder."""
        return self.text("format") in (None, "triton")

    def has_below(self, folder: str) -> bool:
        """Whether a file was generated in `folder` of the model."""
        return any(name.partition("/")[2].startswith(f"{folder}/") for name in self.files)

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

    :param model: the folder of the stamp: a model's, or the one with a script for a program of TensorRT-LLM.
    :param root: what is checked. Files beside a model's folder are looked at only when the repository is checked.
    """
    problems: dict[str, dict[str, str]] = {"gone": {}}
    for name, expected in stamp.files.items():
        _, slash, within = name.partition("/")
        if within == MANIFEST:
            continue
        if slash:
            path, file = model / within, f"{label}{within}"
        elif root == model and stamp.is_of_triton:
            continue
        else:
            path, file = root / name, name
        try:
            content = read_bytes(path, MAX_TEXT_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            if within not in _ASKED_FOR:
                problems["gone"][name] = file
        except OSError as error:
            if within and within not in (*_ASKED_FOR, f"1/{RELEASE_RECORD}"):
                problems.setdefault(error.strerror or "unreadable", {})[name] = file
        else:
            if content is None or sha256(content) != expected:
                yield _changed(name, file, within, path)
    for problem, files in problems.items():
        if files:
            yield _missing(problem, files)


def _missing(problem: str, files: Mapping[str, str]) -> Finding:
    """Return the finding about files that are gone, or that can't be read.

    :param files: their names in the stamp, with the names that findings use.
    """
    first = files[next(iter(files))]
    if problem == "gone":
        message = f"{first_names(files)} {'is' if len(files) == 1 else 'are'} gone since the folder was generated"
        fix = "put the files back, or write the folder again: deepseek-triton build --force"
        return codes.MISSING_FILE.finding(message, fix, file=first)
    message = f"{first_names(files)} can't be read: {problem}"
    return codes.UNREADABLE.finding(message, "make them readable, for tritonserver too", file=first)


def _changed(name: str, file: str, within: str, path: Path) -> Finding:
    message = f"{safe_name(name)} was changed since it was generated"
    if (path.parent / CHECKSUMS).is_file():
        fix = "write the original again: deepseek-triton build --force"
        return codes.CHANGED_CHECKPOINT.finding(message, fix, file=file)
    if within.startswith("1/") and within != "1/model.yaml":
        fix = "write the original again: deepseek-triton build --force; or report what it lacks"
        return codes.CHANGED_PROGRAM.finding(message, fix, file=file)
    fix = "nothing, if that was meant; deepseek-triton build --force writes the original again"
    return codes.CHANGED.finding(message, fix, file=file)


@dataclass(frozen=True)
class Recorded:
    """The library whose record lies beside model.py. Without a record, both are None."""

    release: str | None = None
    """Release of TensorRT-LLM."""
    vllm: str | None = None
    """Version of vLLM."""


def read_recorded(version_dir: Path, label: str) -> tuple[Recorded, list[Finding]]:
    """Return what the record beside model.py is of, and what is wrong with it."""
    if not os.path.exists(version_dir / RELEASE_RECORD):
        return Recorded(), []
    if (recorded := _unchanged_record(version_dir / RELEASE_RECORD)) is not None:
        return recorded, []
    document, findings = read_yaml(version_dir / RELEASE_RECORD, f"{label}{RELEASE_RECORD}")
    values = {} if document is None else document.values
    named = {key: str(values[key]) for key in ("release", "vllm") if values.get(key) is not None}
    return Recorded(**named), findings


def _unchanged_record(path: Path) -> Recorded | None:
    """Return what the record is of that the file holds byte for byte; None for any other file.

    This saves parsing the record, which takes longer than the rest of a check.
    """
    try:
        content = read_bytes(path, MAX_TEXT_BYTES) or b""
    except OSError:  # read_recorded reads the file again and reports it
        return None
    found = _RECORDED.search(content)
    key, version = (found[1].decode(), found[2].decode()) if found else ("", "")
    if key == "release" and version in READABLE_RELEASES and load_release(version).text.encode() == content:
        return Recorded(release=version)
    if key == "vllm" and version in VLLM_VERSIONS and load_vllm(version).text.encode() == content:
        return Recorded(vllm=version)
    return None
