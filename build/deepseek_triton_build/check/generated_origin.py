"""The origin of a repository: deepseek-triton.json, with the checksums of its files, and 1/release.yaml."""

import os
import re
import shlex
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from deepseek_triton_build.check import codes
from deepseek_triton_build.check.documents import MAX_TEXT_BYTES, Document, read_bytes, read_json, read_yaml
from deepseek_triton_build.check.schema import triton_settings
from deepseek_triton_build.data.finding import Finding
from deepseek_triton_build.data.releases import READABLE_RELEASES, load_release
from deepseek_triton_build.data.vllm import VLLM_VERSIONS, load_vllm
from deepseek_triton_build.planning.plan_request import ENGINES
from deepseek_triton_build.render.owner_edits import recorded_checksums
from deepseek_triton_build.render.stamp import CHECKSUMS, MANIFEST, RELEASE_RECORD, is_settings, sha256, unpacked_text
from deepseek_triton_build.rules.disaggregation import CONTEXT, GENERATION
from deepseek_triton_build.text import edit_instruction, first_names, printable_line, safe_name

# A stamp with more GPUs is not believed.
_MOST_GPUS = 1_000_000
_RECORDED = re.compile(rb'^(release|vllm): "([0-9.]+)"', re.MULTILINE)

# Files that are read elsewhere, as scripts are, which lie beside the model.
_ASKED_FOR = ("config.pbtxt", "1/model.yaml", f"1/{RELEASE_RECORD}")
STAMP_FIX = (
    'if nothing else is left of it, write {"options": "..."}, with what is behind `build`, and before `, for`, in '
    "the first comment of start.sh and the other files; then `deepseek-triton upgrade DIR --apply` writes the rest"
)


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
        return recorded_checksums(self.values)

    @property
    def is_of_triton(self) -> bool:
        """Whether it is the stamp of a model repository, which lies in the model's folder."""
        return self.text("format") in (None, "triton")

    @property
    def side(self) -> str | None:
        """The side of a pair that the folder is for; None for another server."""
        return {"ctx": CONTEXT, "gen": GENERATION}.get(self.text("profile") or "")

    def has_below(self, folder: str) -> bool:
        """Whether a file was generated in `folder` of the model."""
        return any(name.partition("/")[2].startswith(f"{folder}/") for name in self.files)

    @property
    def num_gpus(self) -> int | None:
        value = self.values.get("gpus")
        if not isinstance(value, int) or isinstance(value, bool):
            return None
        return value if 0 < value <= _MOST_GPUS else None

    def usual_engine(self, version_dir: Path) -> str:
        """The engine where model.yaml names none: the backend's default, unless the folder was built without it."""
        built_for, default = self.text("engine"), "tensorrt_llm"
        is_there = os.path.isdir(version_dir / "deepseek_backend/engines" / default)
        return default if built_for not in ENGINES or is_there else built_for

    def lost_engine(self, document: Document | None, version_dir: Path) -> Iterator[Finding]:
        """Find that a model.yaml names no engine, where the backend's default is not in the folder."""
        key, engine = "triton_config.engine", self.usual_engine(version_dir)
        if document is not None and engine != "tensorrt_llm" and "engine" not in triton_settings(document):
            message, fix = f"{key} is missing; this folder was built for {engine}", edit_instruction({key: engine})
            yield document.finding(codes.WRONG_SETTING_VALUE, key, message, fix)


def read_stamp(folder: Path, label: str) -> tuple[Stamp, list[Finding]]:
    """Return the stamp in `folder`, an empty one when it has none, and what is wrong with its file."""
    file = f"{label}{MANIFEST}"
    if not os.path.exists(folder / MANIFEST):
        return Stamp(values={}, file=file), []
    values, findings = read_json(folder / MANIFEST, file)
    findings = [replace(one, fix=STAMP_FIX) if one.code == codes.BROKEN.code else one for one in findings]
    return Stamp(values=values or {}, file=file), findings


def changed_files(stamp: Stamp, model: Path, root: Path, label: str) -> Iterator[Finding]:
    """Find the files that were changed or removed since they were generated.

    :param model: the folder of the stamp: a model's, or the one with a script for a program of TensorRT-LLM.
    :param root: what is checked. Files beside a model's folder are looked at only when the repository is checked.
    """
    home = model.resolve().parent if stamp.is_of_triton else model.resolve()
    if stamp.side and os.path.exists(home.parent / MANIFEST):  # a pair is built and upgraded as one
        home = home.parent
    upgrade = f"deepseek-triton upgrade {shlex.quote(str(home))}"
    options = read_stamp(home, "")[0].text("options") or stamp.text("options") or "VARIANT"
    is_safe = options.isprintable() and not set(options) & set(";&|<>$`")  # a command from a stranger's folder
    build = f"deepseek-triton build {options if is_safe else 'VARIANT'} --output NEW"
    gone: dict[str, str] = {}
    unreadable: dict[str, dict[str, str]] = {}
    for name, expected in stamp.files.items():
        _, slash, within = name.partition("/")
        if within == MANIFEST or (not slash and root == model and stamp.is_of_triton):
            continue
        path, file = (model / within, f"{label}{within}") if slash else (root / name, name)
        try:
            content = read_bytes(path, MAX_TEXT_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            gone[name] = file
        except OSError as error:
            if within and within not in _ASKED_FOR:
                unreadable.setdefault(error.strerror or "unreadable", {})[name] = file
        else:
            if content is None or sha256(content) != expected:
                code = codes.CHANGED
                if (path.parent / CHECKSUMS).is_file():
                    code = codes.CHANGED_CHECKPOINT
                elif within.startswith("1/") and within != "1/model.yaml":
                    code = codes.CHANGED_PROGRAM
                message = f"{safe_name(name)} was changed since it was generated"
                fix = f"remove the file, and write the original again: {upgrade}{_again(name)}"
                text = b"\n" if content is None else content  # it is too long to be read
                fault = _syntax_error(text) if name.endswith(".py") else None
                original = text if name.endswith(".py") else unpacked_text(stamp.values, name) or b""
                # Settings that were edited may end so too, with other text.
                if not text.endswith(b"\n") and original.startswith(text):
                    code, message = codes.BROKEN, f"{safe_name(name)} is cut: it ends within a line"
                elif fault is not None:
                    code, message = codes.BROKEN, f"{safe_name(name)} is not Python: {printable_line(fault.msg)}"
                if code is codes.CHANGED:
                    fix = f"nothing, if that was meant; {build} writes the original in another folder"
                yield code.finding(message, fix, file=file, line=None if fault is None else fault.lineno)
            if name.endswith(".sh") and not os.access(path, os.X_OK):
                message = f"{safe_name(name)} can't be executed"
                yield codes.NOT_EXECUTABLE.finding(message, "chmod +x it, or copy the folder with its modes", file=file)
    for name in filter(is_settings, [*gone]):
        message, fix = f"{safe_name(name)} is gone since the folder was generated", f"write it again: {upgrade}"
        yield codes.MISSING_FILE.finding(message, fix + _again(name), file=gone.pop(name))
    if gone:
        message = f"{first_names(gone)} {'is' if len(gone) == 1 else 'are'} gone since the folder was generated"
        fix = f"write them again, with your edits kept: {upgrade} --apply"
        yield codes.MISSING_FILE.finding(message, fix, file=next(iter(gone.values())))
    for problem, files in unreadable.items():
        message, fix = f"{first_names(files)} can't be read: {problem}", "make them readable, for tritonserver too"
        yield codes.UNREADABLE.finding(message, fix, file=next(iter(files.values())))


def _again(name: str) -> str:
    """Return the options with which `upgrade` writes a file again; the removal of settings can be the owner's wish."""
    return " --keep generated (shows what changes; --apply writes it)" if is_settings(name) else " --apply"


def _syntax_error(program: bytes) -> SyntaxError | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(program, "", "exec", dont_inherit=True)
    except SyntaxError as error:
        return error
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes before Python 3.12, or nested too deeply
        return SyntaxError(str(error) or "nested too deeply")
    return None


@dataclass(frozen=True)
class Recorded:
    """The library whose record lies beside model.py. Without a record, both are None."""

    release: str | None = None
    """Release of TensorRT-LLM."""
    vllm: str | None = None
    """Version of vLLM."""


def read_recorded(version_dir: Path, label: str) -> tuple[Recorded, list[Finding]]:
    """Return what the record beside model.py is of, and what is wrong with it."""
    path = version_dir / RELEASE_RECORD
    if not os.path.exists(path):
        return Recorded(), []
    with suppress(OSError):  # read_yaml reads the file again and reports it
        # Parsing a record takes longer than the rest of a check, and most are as they were written.
        content = read_bytes(path, MAX_TEXT_BYTES) or b""
        match = _RECORDED.search(content)
        key, version = (match[1].decode(), match[2].decode()) if match else ("", "")
        if key == "release" and version in READABLE_RELEASES and load_release(version).text.encode() == content:
            return Recorded(release=version), []
        if key == "vllm" and version in VLLM_VERSIONS and load_vllm(version).text.encode() == content:
            return Recorded(vllm=version), []
    document, findings = read_yaml(path, f"{label}{RELEASE_RECORD}")
    values = {} if document is None else document.values
    named = {key: str(values[key]) for key in ("release", "vllm") if values.get(key) is not None}
    return Recorded(**named), findings
