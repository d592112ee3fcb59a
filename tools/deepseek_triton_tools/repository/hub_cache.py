"""Models in the local cache of the Hugging Face hub, as huggingface_hub lays it out. Nothing is downloaded.

    models--ORG--NAME/refs/main               the commit that "main" was when it was downloaded
    models--ORG--NAME/snapshots/COMMIT/FILE   links to ../../blobs/HASH
    models--ORG--NAME/blobs/HASH.incomplete   what a download has of a file so far

(https://huggingface.co/docs/huggingface_hub/guides/manage-cache)
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from deepseek_triton_build.check.regular_files import is_inside, read_bytes
from deepseek_triton_build.text import listed, plain
from deepseek_triton_tools.tool_errors import CheckpointError

_NAME = re.compile(r"(?P<model>[\w.-]+/[\w.-]+)(?:@(?P<revision>\S+))?")
_DEFAULT = "~/.cache"
_MAIN = "main"
_MOST_REF_BYTES = 1000


@dataclass(frozen=True)
class HubName:
    """ "org/name" or "org/name@revision"; the revision is a branch, a tag or a commit."""

    model: str
    revision: str = _MAIN

    def __str__(self) -> str:
        return self.model if self.revision == _MAIN else f"{self.model}@{self.revision}"

    @property
    def download(self) -> str:
        """The command that downloads it."""
        return f"hf download {self.model}" + ("" if self.revision == _MAIN else f" --revision {self.revision}")


@dataclass(frozen=True)
class Snapshot:
    folder: Path
    revision: str
    """The commit."""


def parse_hub_name(text: str) -> HubName | None:
    """None for what can only be a path."""
    match = None if text.startswith((".", "/", "~")) else _NAME.fullmatch(text)
    return HubName(match["model"], match["revision"] or _MAIN) if match else None


def hub_cache() -> tuple[Path, str]:
    """The folder of the cache, and what says so."""
    for variable, below in (
        ("HF_HUB_CACHE", ""),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
    ):
        if value := os.environ.get(variable):
            return Path(os.path.expandvars(os.path.expanduser(value)), below), f"by {variable}"
    return Path(os.path.expanduser(_DEFAULT), "huggingface/hub"), "by default"


def cached_model(name: HubName) -> Path:
    """Where the cache has it, if it has."""
    return hub_cache()[0] / f"models--{name.model.replace('/', '--')}"


def find_snapshot(name: HubName, model_folder: Path | None = None) -> Snapshot:
    """The files of one revision.

    :param model_folder: its folder in a cache; the environment's cache unless given.
    :raises CheckpointError: when it isn't there.
    """
    model_folder = model_folder or cached_model(name)
    if not os.path.isdir(model_folder):
        raise CheckpointError(
            f"{name}: the Hugging Face cache ({hub_cache()[1]}) has no {model_folder}; download it: {name.download}, "
            "or set HF_HUB_CACHE to the cache that has it"
        )
    revision = _commit(model_folder, name) or name.revision
    folder = model_folder / "snapshots" / revision
    if not is_inside(revision) or not os.path.isdir(folder):
        there = _names(model_folder / "snapshots")
        others = f"there are {listed(there)}" if there else "no revision is there"
        fix = f"name one of them, as {name.model}@{there[0]}, or download it" if there else "download it"
        raise CheckpointError(
            f"{name}: {model_folder} has no {plain(name.revision)}: looked at refs/{plain(name.revision)} and "
            f"snapshots/{plain(revision)}; {others}; {fix}: {name.download}"
        )
    return Snapshot(folder, revision)


def unfinished_downloads(folder: Path) -> list[Path]:
    """What a download has begun of the files of a snapshot, or of a folder it downloads into."""
    blobs = folder.parent.parent / "blobs"
    local = folder / ".cache" / "huggingface" / "download"
    places = [local, blobs] if folder.parent.name == "snapshots" else [local]
    return [place / name for place in places for name in _names(place) if name.endswith(".incomplete")]


def _commit(model_folder: Path, name: HubName) -> str | None:
    """What the revision was when it was downloaded; None when it is no branch or tag that was."""
    if not is_inside(name.revision):
        return None
    ref = model_folder / "refs" / name.revision
    try:
        content = read_bytes(ref, _MOST_REF_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"{name}: {ref} can't be read: {error.strerror}; let it be read") from error
    return (content or b"").decode("utf-8", "replace").strip() or None


def _names(folder: Path) -> list[str]:
    """Of what is in it; nothing in a folder that is not there, or not for us to read."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
