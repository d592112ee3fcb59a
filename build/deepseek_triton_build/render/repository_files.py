"""The files of a Triton model repository for a plan: paths and bytes. Nothing is written here; see folder_writer.

A variant's own small checkpoint travels in it, checked by its checksums.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath

from deepseek_triton_build.build_errors import UnusableCheckpointError
from deepseek_triton_build.data import own_files
from deepseek_triton_build.planning.plan import Plan
from deepseek_triton_build.planning.plan_request import ENGINES, PYTHON_BACKEND
from deepseek_triton_build.render.model_yaml import model_yaml, settings_file_text
from deepseek_triton_build.render.stamp import (
    CHECKSUMS,
    MANIFEST,
    RELEASE_RECORD,
    build_options,
    manifest,
    sha256,
    stamp_line,
)
from deepseek_triton_build.render.start_sh import NAME as START_SH
from deepseek_triton_build.render.start_sh import start_sh
from deepseek_triton_build.render.wire_contract import config_pbtxt

_CARD = "README.md"
"""The model card, which says under which licence the rest may travel. No engine reads it, so it needs no checksum."""
_MEND = "restore the folder from this project's repository, or name another checkpoint with --model"


def carried_files(plan: Plan) -> Mapping[str, bytes]:
    """Return relative path -> content of the checkpoint that goes with `plan`; nothing where none does.

    :raises UnusableCheckpointError: when the checkpoint is not in this installation, or is damaged.
    """
    if not plan.carries_checkpoint:
        return {}
    files = _files(own_files.version_dir() / plan.variant.model, plan.variant.edition)
    return {f"{plan.variant.model}/{name}": content for name, content in files.items()}


@lru_cache(maxsize=4)
def _files(source: Path, edition: str) -> Mapping[str, bytes]:
    """Return the files that the checksums name, checksums of them, and the model card. Files in the folder `edition`
    replace those beside it; those of other editions stay behind."""
    lines = _read(source / CHECKSUMS).decode("utf-8", errors="replace").splitlines()
    recorded = {name: checksum for checksum, _, name in (line.partition("  ") for line in lines if line)}
    if not lines:
        raise UnusableCheckpointError(f"{source / CHECKSUMS}: expected lines with checksums, found none; {_MEND}")
    names = {name: name for name in recorded if "/" not in name}
    inside = f"{edition}/"
    replaced = {name.removeprefix(inside): name for name in recorded if name.startswith(inside)}
    if edition and not replaced:
        raise UnusableCheckpointError(f"{source / CHECKSUMS}: expected files in {inside}, found none; {_MEND}")
    names |= replaced if edition else {}
    content = {name: _read(source / origin) for name, origin in sorted(names.items())}
    for name, data in content.items():
        if sha256(data) != recorded[names[name]]:
            raise UnusableCheckpointError(
                f"{source / names[name]}: expected the file that {CHECKSUMS} names, found another or a cut one; {_MEND}"
            )
    own = "".join(f"{sha256(data)}  {name}\n" for name, data in content.items())
    return content | {_CARD: _read(source / _CARD), CHECKSUMS: own.encode()}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UnusableCheckpointError(f"{path}: can't be read: {error.strerror}; {_MEND}") from error


MODEL = "tensorrt_llm"
"""The model's name: what upstream calls it and what clients put into their URLs."""


_MODULES = ("model.py", "supervise.py")
_PACKAGES = ("deepseek_backend/", "deepseek_launcher/")
_ENGINES = "deepseek_backend/engines/"


@dataclass(frozen=True)
class File:
    """One file that is to be written."""

    path: PurePosixPath
    """Relative to the folder that is written."""
    content: bytes
    executable: bool = False


def text_file(path: str, text: str, *, executable: bool = False) -> File:
    return File(PurePosixPath(path), text.encode(), executable=executable)


def settings_files(plan: Plan, stamp: str, folder: str = "") -> list[File]:
    """Return the files that settings of the plan name."""
    return [text_file(f"{folder}{file.name}", settings_file_text(file, stamp=stamp)) for file in plan.files]


def repository_files(plan: Plan, version: str) -> list[File]:
    """Return every file of the repository, sorted by path; the same plan and version give the same bytes."""
    return stamped(plan, model_files(plan, stamp_line(plan, version)), version=version, format="triton", folder=MODEL)


def stamped(plan: Plan, files: Iterable[File], *, version: str, format: str, folder: str = "") -> list[File]:
    """Return `files` sorted by path, and after them their manifest, which lies in `folder`."""
    ordered = sorted(files, key=lambda file: file.path)
    contents = {file.path.as_posix(): file.content for file in ordered}
    options = build_options(plan, format=format)
    text = manifest(plan, version=version, options=options, format=format, files=contents, of_one_plan=True)
    return [*ordered, File(PurePosixPath(folder, MANIFEST), text)]


def model_files(plan: Plan, stamp: str) -> list[File]:
    """Return the files of the repository but for the manifest."""
    version_dir, backend_name = f"{MODEL}/1/", plan.request.backend_name
    # config.pbtxt is decoupled as model.yaml is, which --set may have changed: the two files must agree.
    is_decoupled = next(bool(setting.value) for setting in plan.settings if setting.key == "triton_config.decoupled")
    files = [
        text_file(START_SH, start_sh(plan, stamp=stamp), executable=True),
        text_file(
            f"{MODEL}/config.pbtxt", config_pbtxt(stamp=stamp, decoupled=is_decoupled, backend_name=backend_name)
        ),
        text_file(f"{version_dir}model.yaml", model_yaml(plan, stamp=stamp)),
        *settings_files(plan, stamp, version_dir),
        *_backend_files(plan),
        *(File(PurePosixPath(version_dir, name), content) for name, content in carried_files(plan).items()),
    ]
    if backend_name != PYTHON_BACKEND:
        # It lies in the model's folder: Triton takes every folder of the repository for a model.
        source = own_files.version_dir() / "named_backend.py"
        files.append(File(PurePosixPath(MODEL, "backends", backend_name, "model.py"), source.read_bytes()))
    record = plan.release or plan.vllm
    if record is not None:
        files.append(text_file(f"{version_dir}{RELEASE_RECORD}", record.text))
    return files


def _backend_files(plan: Plan) -> list[File]:
    """Return model.py, the supervisor and their packages, with the plan's engine as the only one.

    The overlay of work-arounds goes along only with a TensorRT-LLM release, for whose worker processes start.sh uses
    it.
    """
    unused = tuple(f"{_ENGINES}{engine}/" for engine in ENGINES if engine != plan.engine)
    if plan.release is None:
        unused += ("deepseek_backend/process/overlay/",)
    version_dir = own_files.version_dir()
    paths = (path for path in version_dir.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    relative = [(path, path.relative_to(version_dir).as_posix()) for path in paths]
    return [
        File(PurePosixPath(MODEL, "1", name), path.read_bytes())
        for path, name in relative
        if name in _MODULES or (name.startswith(_PACKAGES) and not name.startswith(unused))
    ]
