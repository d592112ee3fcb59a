"""The checkpoint that travels in every repository of a variant that has one: its files, checked by their checksums."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from deepseek_triton_build.build_errors import UnusableCheckpointError
from deepseek_triton_build.data import model_source
from deepseek_triton_build.render.stamp import sha256

if TYPE_CHECKING:
    from deepseek_triton_build.planning.plan import Plan

CHECKSUMS = "checksums.sha256"
"""The file with the checksums of those that an engine reads, in the form of sha256sum."""
_CARD = "README.md"
"""The model card, which says under which licence the rest may travel. No engine reads it, so it needs no checksum."""
_MEND = "restore the folder from this project's repository, or name another checkpoint with --model"


def carried_files(plan: Plan) -> Mapping[str, bytes]:
    """Return relative path -> content of the checkpoint that goes with `plan`; nothing where none does.

    :raises UnusableCheckpointError: when the checkpoint is not in this installation, or is damaged.
    """
    if not plan.carries_checkpoint:
        return {}
    files = _files(model_source.version_dir() / plan.variant.model, plan.variant.edition)
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
