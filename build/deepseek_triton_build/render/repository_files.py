"""A plan -> the files of a repository, and the one function that writes them, or any other rendering's."""

from __future__ import annotations

import json
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from deepseek_triton_build.build_errors import EditedError, OutputError
from deepseek_triton_build.data import model_source
from deepseek_triton_build.planning.plan import Plan
from deepseek_triton_build.planning.plan_request import ENGINES
from deepseek_triton_build.render.config_pbtxt import config_pbtxt
from deepseek_triton_build.render.model_yaml import model_yaml
from deepseek_triton_build.render.owner_edits import edited_names, edits_diff
from deepseek_triton_build.render.stamp import MANIFEST, manifest, stamp_line
from deepseek_triton_build.render.start_sh import start_sh
from deepseek_triton_build.text import listed

MODEL = "tensorrt_llm"
"""The model's name: what upstream calls it and what clients put into their URLs."""

_OLD_MANIFEST = "deepseek-triton.sha256"
"""What 0.1.0 first wrote: a line for each file, its checksum first."""
_MANIFESTS = (
    PurePosixPath(MODEL, MANIFEST),
    PurePosixPath(MANIFEST),
    PurePosixPath(MODEL, _OLD_MANIFEST),
)


@dataclass(frozen=True)
class File:
    path: PurePosixPath
    """Relative to the folder that is written."""
    content: bytes
    executable: bool = False


def repository_files(plan: Plan, *, version: str) -> list[File]:
    """Every file of the repository, sorted by path; the same plan and version give the same bytes.

    :param version: this program's, for the stamp.
    """
    stamp = stamp_line(plan, version)
    files = [
        File(PurePosixPath("start.sh"), start_sh(plan, stamp=stamp).encode(), executable=True),
        File(PurePosixPath(MODEL, "config.pbtxt"), config_pbtxt(stamp=stamp).encode()),
        File(PurePosixPath(MODEL, "1", "model.yaml"), model_yaml(plan, stamp=stamp).encode()),
        *_backend_files(plan),
    ]
    if plan.release is not None:
        files.append(File(PurePosixPath(MODEL, "1", "release.yaml"), plan.release.text.encode()))
    return stamped(plan, files, version=version, format="triton", folder=MODEL)


def stamped(plan: Plan, files: Iterable[File], *, version: str, format: str, folder: str = "") -> list[File]:
    """`files` sorted by path, and their manifest in `folder`."""
    ordered = sorted(files, key=lambda file: file.path)
    contents = {file.path.as_posix(): file.content for file in ordered}
    return [*ordered, File(PurePosixPath(folder, MANIFEST), manifest(plan, version, contents, format=format))]


def write_repository(
    files: list[File], output: Path, *, force: bool = False, before: Callable[[], None] | None = None
) -> None:
    """Write `files` as the folder `output`: all of them or, on any failure or interrupt, none.

    A folder that this generator wrote and nobody changed since is replaced; a changed one only with `force`; a folder
    of other origin never.

    :param before: called when every file is written, and before they take the place of `output`. What it raises
        leaves everything as it was.
    :raises EditedError: for a changed folder, with the difference.
    :raises OutputError: for every other reason, with the path and the fix.
    """
    output = _resolved(output)
    try:
        _refuse_foreign(output)
        if not force:
            _refuse_edited(output, files)
        scratch = _write_and_swap(files, output, before)
    except OSError as error:
        raise OutputError(f"{output}: can't be written: {error.strerror}; choose another --output") from error
    _remove(scratch, output)


def _resolved(output: Path) -> Path:
    try:
        return output.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: pathlib's word for a link that leads to itself
        reason = error.strerror if isinstance(error, OSError) else "a link leads to itself"
        raise OutputError(f"{output}: can't be written: {reason}; choose another --output") from error


def _write_and_swap(files: list[File], output: Path, before: Callable[[], None] | None) -> Path:
    """Put `files` in the place of `output`; what was there is below the folder that is returned.

    Beside `output`, for a rename needs one file system. A failure leaves everything as it was.
    """
    made = [parent for parent in output.parents if not parent.exists()]
    scratch = None
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name[:_LONGEST_PREFIX]}."))
        for file in files:
            _write(scratch / "fresh" / file.path, file)
        if output.exists():
            (scratch / "fresh").chmod(stat.S_IMODE(output.stat().st_mode))
        if before is not None:
            before()
        _swap(scratch / "fresh", output, scratch / "replaced")
    except BaseException as error:
        if scratch is not None:
            _discard(scratch, output, error)
        for parent in made:
            if parent.is_dir():
                parent.rmdir()
        raise
    return scratch


_LONGEST_PREFIX = 40
"""Of the folder's name in its scratch folder's, which may be as long as a name can be."""


def _swap(fresh: Path, output: Path, replaced: Path) -> None:
    """Put `fresh` in the place of `output`, back to how it was when that fails or is interrupted."""
    try:
        if output.exists():
            output.rename(replaced)
        fresh.rename(output)
    except BaseException:
        if not fresh.exists():  # interrupted when all was done
            output.rename(fresh)
        if replaced.exists():
            replaced.rename(output)
        raise


def _discard(scratch: Path, output: Path, error: BaseException) -> None:
    """Remove what was written; never the only copy of what was there before.

    :raises OutputError: when that could not be put back, with its place.
    """
    kept = scratch / "replaced"
    if kept.exists():
        raise OutputError(
            f"{output}: was interrupted, and what was there before can't be put back; it is whole in {kept}: move it "
            "back by hand"
        ) from error
    shutil.rmtree(scratch)


def _remove(scratch: Path, output: Path) -> None:
    """A container that ran the replaced folder as root may have left files in it that we can't remove."""
    try:
        shutil.rmtree(scratch)
    except OSError as error:
        raise OutputError(
            f"{output}: is in place, but what was there before can't be removed: {error.strerror}; remove "
            f"{scratch} by hand"
        ) from error


def _refuse_foreign(output: Path) -> None:
    nearest = next(path for path in (output, *output.parents) if path.exists())
    if not nearest.is_dir():
        raise OutputError(f"{output}: expected a folder to write, found a file at {nearest}; choose another --output")
    if output.is_dir() and any(output.iterdir()) and _manifest_of(output) is None:
        raise OutputError(f"{output}: is not empty and was not written by this generator; choose another --output")


def _manifest_of(output: Path) -> Path | None:
    return next((output / path for path in _MANIFESTS if (output / path).is_file()), None)


def _refuse_edited(output: Path, files: list[File]) -> None:
    found = _manifest_of(output)
    if found is None:
        return
    new = {file.path.as_posix(): file.content for file in files}
    edited = edited_names(output, found.relative_to(output).as_posix(), _recorded(found), new)
    if edited:
        raise EditedError(
            f"{output}: changed since it was generated: {listed(edited, most=10)}; --force replaces all of it",
            diff=edits_diff(output, edited, new),
        )


def _recorded(found: Path) -> dict[str, str]:
    """Path -> checksum as generated; nothing when the manifest itself was damaged."""
    text = found.read_text("utf-8", errors="replace")
    if found.name == _OLD_MANIFEST:
        return {name: checksum for checksum, _, name in (line.partition("  ") for line in text.splitlines())}
    try:
        files = json.loads(text)["files"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return dict(files) if isinstance(files, dict) else {}


def _write(path: Path, file: File) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(file.content)
    if file.executable:
        path.chmod(0o755)


_MODULES = ("model.py", "supervise.py")
_PACKAGES = ("deepseek_backend/", "deepseek_launcher/")


_ENGINES = "deepseek_backend/engines/"


def _backend_files(plan: Plan) -> list[File]:
    """Return model.py, the supervisor and their packages, with the plan's engine as the only one.

    The overlay of work-arounds goes along only with a TensorRT-LLM release, for whose worker processes start.sh uses
    it.
    """
    unused = tuple(f"{_ENGINES}{engine}/" for engine in ENGINES if engine != plan.engine)
    if plan.release is None:
        unused += ("deepseek_backend/process/overlay/", "deepseek_backend/workarounds.py")
    version_dir = model_source.version_dir()
    paths = sorted(path for path in version_dir.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    relative = [(path, path.relative_to(version_dir).as_posix()) for path in paths]
    return [
        File(PurePosixPath(MODEL, "1", name), path.read_bytes())
        for path, name in relative
        if name in _MODULES or (name.startswith(_PACKAGES) and not name.startswith(unused))
    ]
