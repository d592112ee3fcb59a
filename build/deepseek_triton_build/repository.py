"""A plan -> the files of a repository, and the one function that writes them."""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from deepseek_triton_build import render, source
from deepseek_triton_build.errors import OutputError
from deepseek_triton_build.plan import Plan

MODEL = "tensorrt_llm"
"""The model's name: what upstream calls it and what clients put into their URLs."""

_MANIFEST = PurePosixPath(MODEL) / "deepseek-triton.sha256"


@dataclass(frozen=True)
class File:
    path: PurePosixPath
    """Relative to the repository."""
    content: bytes
    executable: bool = False


def repository_files(plan: Plan, *, stamp: str) -> list[File]:
    """Every file of the repository, sorted by path; the same plan and stamp give the same bytes."""
    files = [
        File(PurePosixPath("start.sh"), render.start_sh(plan, stamp=stamp).encode(), executable=True),
        File(PurePosixPath(MODEL, "config.pbtxt"), render.config_pbtxt(stamp=stamp).encode()),
        File(PurePosixPath(MODEL, "1", "model.yaml"), render.model_yaml(plan, stamp=stamp).encode()),
        *_backend_files(),
    ]
    if plan.release is not None:
        files.append(File(PurePosixPath(MODEL, "1", "release.yaml"), plan.release.text.encode()))
    files.sort(key=lambda file: file.path)
    return [*files, _manifest(files)]


def write_repository(files: list[File], output: Path, *, force: bool = False) -> None:
    """Write `files` as the folder `output`: all of them or, on any failure, none.

    A folder that this generator wrote and nobody changed since is replaced; a changed one only with `force`; a folder
    of other origin never.

    :raises OutputError: with the path and the fix.
    """
    output = output.resolve()
    _refuse_foreign(output)
    if not force:
        _refuse_edited(output)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as scratch:
            fresh = Path(scratch, "repository")
            for file in files:
                _write(fresh / file.path, file)
            _swap(fresh, output, Path(scratch, "replaced"))
    except OSError as error:
        raise OutputError(f"{output}: can't be written: {error.strerror}; choose another --output") from error


def _refuse_foreign(output: Path) -> None:
    if output.exists() and not output.is_dir():
        raise OutputError(f"{output}: expected a folder to write, found a file; choose another --output")
    if output.is_dir() and any(output.iterdir()) and not (output / _MANIFEST).is_file():
        raise OutputError(f"{output}: is not empty and was not written by this generator; choose another --output")


def _refuse_edited(output: Path) -> None:
    changed = _changed_files(output, output / _MANIFEST) if (output / _MANIFEST).is_file() else []
    if changed:
        raise OutputError(f"{output}: changed since it was generated: {', '.join(changed)}; --force replaces all of it")


def _changed_files(output: Path, manifest: Path) -> list[str]:
    lines = manifest.read_text("utf-8").splitlines()
    recorded = {name: checksum for checksum, _, name in (line.partition("  ") for line in lines)}
    present = {
        path.relative_to(output).as_posix()
        for path in output.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path != manifest
    }
    changed = [
        name for name in recorded if name not in present or _sha256((output / name).read_bytes()) != recorded[name]
    ]
    return sorted({*changed, *(present - recorded.keys())})


def _swap(fresh: Path, output: Path, replaced: Path) -> None:
    """Put `fresh` in the place of `output`, back to how it was when that fails."""
    if output.exists():
        output.rename(replaced)
    try:
        fresh.rename(output)
    except OSError:
        if replaced.exists():
            replaced.rename(output)
        raise


def _write(path: Path, file: File) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(file.content)
    if file.executable:
        path.chmod(0o755)


def _backend_files() -> list[File]:
    """model.py and the package beside it, without what Python leaves there."""
    version_dir = source.version_dir()
    paths = sorted(path for path in version_dir.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    relative = [(path, path.relative_to(version_dir).as_posix()) for path in paths]
    return [
        File(PurePosixPath(MODEL, "1", name), path.read_bytes())
        for path, name in relative
        if name == "model.py" or name.startswith("deepseek_backend/")
    ]


def _manifest(files: list[File]) -> File:
    """Checksums, by which a later run tells a generated folder from an edited one."""
    lines = [f"{_sha256(file.content)}  {file.path}\n" for file in files]
    return File(_MANIFEST, "".join(lines).encode())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
