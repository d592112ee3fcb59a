"""Write the files of any format as a folder: all of them or none, and never over what somebody else put there."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from deepseek_triton_build.build_errors import OutputError, ReplacementError
from deepseek_triton_build.render.owner_edits import edited_names, edits_diff, recorded_checksums
from deepseek_triton_build.render.repository_files import MODEL, File
from deepseek_triton_build.render.stamp import MANIFEST
from deepseek_triton_build.rules.disaggregation import CONTEXT, GENERATION
from deepseek_triton_build.text import first_names, printable_line

_MANIFESTS = (PurePosixPath(MODEL, MANIFEST), PurePosixPath(MANIFEST))
"""Where a manifest may lie in a generated folder: in the model of a repository, at the top of every other format."""
_SERVED = (*_MANIFESTS, *(PurePosixPath(side, path) for side in (CONTEXT, GENERATION) for path in _MANIFESTS))
"""Where the manifests lie on which servers hold locks: those above, and those of a pair's two sides."""
_BACKUP_NAME = re.compile(r"\.before-upgrade-([1-9][0-9]{0,8})$", re.ASCII)
# Characters of the folder's name that its scratch folder's name begins with. The folder's name may be as long as a name
# can be, which leaves no room for the random part of the scratch folder's name.
_LONGEST_PREFIX = 40
_DEPLOYMENT = (
    *("options", "format", "variant", "engine", "gpu", "gpus", "precision", "profile", "recipe", "release", "image"),
)
"""Keys of the manifest that say what the folder deploys. A folder in which one differs is another deployment."""
_SAID_TWICE = re.compile(r" --trtllm \S+| --vllm \S+(?= --image )")  # by `release`, `image`; some stamps lack them


def write_repository(
    files: list[File], output: Path, *, force: bool = False, before: Callable[[], None] | None = None
) -> bool:
    """Write `files` as the folder `output`: all of them or, on any failure or interrupt, none. Return whether a folder
    was replaced.

    A folder that this generator wrote with the same options, and nobody changed since, is replaced. A changed one, and
    one that was written with other options, is replaced only with `force`. A folder of other origin, and one that a
    server runs from, is never replaced.

    :param before: called once every file is written, and before the files take the place of `output`. If it raises an
        error, everything stays as it was.
    :raises ReplacementError: when `force` is needed; the error holds the difference.
    :raises OutputError: for every other reason, with the path and the fix.
    """
    output = _resolved(output)
    try:
        _refuse_foreign(output)
        is_replaced = _manifest_of(output) is not None
        _refuse_served(output)
        if not force:
            _refuse_loss(output, files)
        scratch = _put(output, files, before)
    except OSError as error:
        raise OutputError(f"{output}: can't be written: {error.strerror}; choose another --output") from error
    try:
        _remove_tree(scratch)
    except OSError as error:  # a container that ran what was there as root may have left files in it
        raise OutputError(
            f"{output}: is in place, but what was there before can't be removed: {error.strerror}; remove "
            f"{scratch} by hand"
        ) from error
    return is_replaced


def replace_repository(
    files: Sequence[File], output: Path, *, kept: Sequence[str] = (), before: Callable[[], None] | None = None
) -> Path:
    """Put `files`, and what is `kept` of the folder, in the place of the generated folder `output`, all or nothing.
    Return where the folder is kept as it was: beside it, as NAME.before-upgrade-1, or one more than the last.

    Files and folders that were there before keep their mode and, where root writes them, their owner.

    :param kept: relative paths of what the owner has added. These files are the same ones in both folders (hard
        links), so that nothing large is copied and a log that is being written loses no line.
    :param before: as that of `write_repository`.
    :raises OutputError: when the folder can't be written, or a server runs from it.
    """
    output = _resolved(output)
    try:
        _refuse_served(output)
        backups = backups_of(output)
        number = _number(backups[-1]) + 1 if backups else 1
        backup = output.with_name(f"{output.name}.before-upgrade-{number}")
        _remove_tree(_put(output, files, before, kept=kept, backup=backup))
    except OSError as error:
        at = f" ({error.filename})" if error.filename else ""
        raise OutputError(f"{output}: can't be replaced: {error.strerror or error}{at}; nothing was changed") from error
    return backup


def backups_of(output: Path) -> list[Path]:
    """Return the folders that upgrades of the folder `output` have kept, oldest first. Those of a link lie beside the
    folder that it leads to, even if that is gone."""
    place = Path(os.path.realpath(output)) if output.is_symlink() else output
    names = os.listdir(place.parent) if place.parent.is_dir() else []
    beside = [place.with_name(name) for name in names if name.startswith(f"{place.name}.before-upgrade-")]
    return sorted((path for path in beside if _number(path)), key=_number)


def _number(backup: Path) -> int:
    """Return the number at the end of a backup's name; 0 for a name that is none of a backup."""
    found = _BACKUP_NAME.search(backup.name)
    return int(found[1]) if found else 0


def backup_above(folder: Path) -> Path | None:
    """Return the backup of an upgrade that `folder` is, or lies in."""
    place = Path(os.path.realpath(folder))
    return next((path for path in (place, *place.parents) if _number(path)), None)


def _resolved(output: Path) -> Path:
    try:
        return output.resolve()
    except (OSError, RuntimeError) as error:  # pathlib raises RuntimeError for a link that leads to itself
        reason = error.strerror if isinstance(error, OSError) else "a link leads to itself"
        raise OutputError(f"{output}: can't be written: {reason}; choose another --output") from error


def _put(
    output: Path,
    files: Sequence[File],
    before: Callable[[], None] | None,
    *,
    kept: Sequence[str] = (),
    backup: Path | None = None,
) -> Path:
    """Put `files`, and what is `kept` of `output`, in its place, and return the scratch folder. A failure leaves
    everything as it was.

    :param backup: the place for what was there before; None: in the scratch folder, as "replaced".
    """
    made = [parent for parent in output.parents if not parent.exists()]
    scratch = old = None
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        # Beside `output`, because a rename works within one file system only.
        scratch = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name[:_LONGEST_PREFIX]}."))
        fresh, old = scratch / "fresh", backup or scratch / "replaced"
        _fill(fresh, files, output, kept)
        if before is not None:
            before()
        _refuse_served(output)  # again: a server may have started meanwhile
        _swap(fresh, output, old)
    except BaseException as error:
        # The only copy of what was there before; a backup beside the folder is none to be moved back.
        if old is not None and old.exists() and not (backup and output.exists()):
            raise OutputError(
                f"{output}: was interrupted, and what was there before can't be put back; it is whole in {old}: move "
                "it back by hand"
            ) from error
        if scratch is not None:
            _remove_tree(scratch)
        for parent in made:
            if parent.is_dir():
                parent.rmdir()
        raise
    return scratch


def _fill(fresh: Path, files: Sequence[File], output: Path, kept: Sequence[str]) -> None:
    """Write `files`, and what is `kept` of `output`, to `fresh`, with the modes and owners that `output` has."""
    for folder in {path.parent for path in (*(file.path for file in files), *map(PurePosixPath, kept))}:
        (fresh / folder).mkdir(parents=True, exist_ok=True)
    for file in files:
        (fresh / file.path).write_bytes(file.content)
        if file.executable:
            (fresh / file.path).chmod(0o755)
    for name in kept:
        path, place = output / name, fresh / name
        if stat.S_ISDIR(path.lstat().st_mode):
            place.mkdir(exist_ok=True)
            continue
        try:
            os.link(path, place, follow_symlinks=False)
        except OSError:  # another user's file, or a file system without hard links
            shutil.copy2(path, place, follow_symlinks=False)
    for path in (fresh, *fresh.rglob("*")):
        before = output / path.relative_to(fresh)
        if path.is_symlink() or not os.path.lexists(before) or before.is_symlink():
            continue
        status = before.lstat()
        if stat.S_ISDIR(status.st_mode) != path.is_dir() or os.path.samestat(status, path.lstat()):
            continue
        if os.geteuid() == 0:
            with contextlib.suppress(PermissionError):  # root of another machine, on a network file system
                os.chown(path, status.st_uid, status.st_gid)
        path.chmod(stat.S_IMODE(status.st_mode))


def _swap(fresh: Path, output: Path, replaced: Path) -> None:
    """Move `output` to `replaced` and `fresh` to `output`. Undo both when that fails or is interrupted."""
    try:
        if output.exists():
            output.rename(replaced)
        fresh.rename(output)
    except BaseException:
        if not fresh.exists():  # the interrupt came when both renames were done
            output.rename(fresh)
        if replaced.exists():
            replaced.rename(output)
        raise


def _remove_tree(folder: Path) -> None:
    """Remove a folder of ours with all in it, folders too that had kept a mode in which nobody may write them."""
    for place, _, _ in os.walk(folder):
        with contextlib.suppress(PermissionError):  # another user's: then removing it says so
            os.chmod(place, stat.S_IRWXU)
    shutil.rmtree(folder)


def _refuse_foreign(output: Path) -> None:
    nearest = next(path for path in (output, *output.parents) if path.exists())
    if not nearest.is_dir():
        raise OutputError(f"{output}: expected a folder to write, found a file at {nearest}; choose another --output")
    if output.is_dir() and any(output.iterdir()) and _manifest_of(output) is None:
        raise OutputError(f"{output}: is not empty and was not written by this generator; choose another --output")


def _refuse_served(output: Path) -> None:
    """Raise OutputError when a server runs from the folder, in whatever container: it holds a lock on the manifest."""
    for found in (output / path for path in _SERVED if (output / path).is_file()):
        with found.open("r+b") as file:  # NFS gives an exclusive lock only on a file that is open for writing
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                repository = found.parents[1] if found.parent.name == MODEL else found.parent
                raise OutputError(
                    f"{output}: a server runs from this folder; stop it first (deepseek-triton launch stop "
                    f"{repository}, or as it was started); `build` can also write elsewhere, with --output"
                ) from error
            except OSError:  # a file system without locks
                return


def _refuse_loss(output: Path, files: list[File]) -> None:
    """Raise ReplacementError when the folder holds another deployment, or something that was not generated."""
    found = _manifest_of(output)
    if found is None:
        return
    name = found.relative_to(output).as_posix()
    new = {file.path.as_posix(): file.content for file in files}
    old_record = read_manifest(found)
    new_record = _record(next(new[str(path)] for path in _MANIFESTS if str(path) in new))
    changes = list(_deployment_diff(output, old_record, new_record))
    edited = edited_names(output, name, recorded_checksums(old_record), new)
    reasons = ["holds another deployment"] if changes else []
    if edited:
        reasons.append(f"changed since it was generated: {first_names(edited, most=10)}")
    if reasons:
        kept = "" if changes else ", `deepseek-triton upgrade` keeps the changes"
        raise ReplacementError(
            f"{output}: {'; '.join(reasons)}; --force replaces all of it{kept}",
            diff="\n".join(filter(None, [*changes, edits_diff(output, edited, new)])),
        )


def _deployment_diff(output: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Yield a diff of the lines that say what is deployed. A damaged manifest says nothing; the files tell then."""
    was, will_be = ({**each, "options": _SAID_TWICE.sub("", str(each.get("options")))} for each in (old, new))
    changed = [key for key in _DEPLOYMENT if old and was.get(key) != will_be.get(key)]
    if changed:
        yield from (f"--- {output} as it is", f"+++ {output} as it would be")
    for key in changed:
        for sign, record in (("-", old), ("+", new)):
            if key in record:
                yield f"{sign}{key}: {printable_line(str(record[key]))}"


def _manifest_of(output: Path) -> Path | None:
    return next((output / path for path in _MANIFESTS if (output / path).is_file()), None)


def manifests_of(folder: Path) -> list[tuple[str, Path]]:
    """Return the manifests of a generated folder: of a pair first its own, then those of its sides. Each has before it
    what the paths in it are relative to: "" or a side with a slash behind it."""
    found = [path for path in _SERVED if (folder / path).is_file()]
    return [(f"{path.parts[0]}/" if path.parts[0] in (CONTEXT, GENERATION) else "", folder / path) for path in found]


def read_manifest(path: Path) -> dict[str, Any]:
    """Return what a manifest holds; nothing when it was damaged.

    :raises OSError: when it can't be read.
    """
    return _record(path.read_bytes())


def _record(text: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(text)
        if isinstance(record, dict) and isinstance(record.get("files", {}), dict):
            return record
    return {}
