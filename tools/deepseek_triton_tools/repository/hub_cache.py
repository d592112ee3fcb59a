"""Models in the local cache of the Hugging Face hub, in the layout of huggingface_hub. Nothing is downloaded.

    models--ORG--NAME/refs/main               the commit that "main" was when the model was downloaded
    models--ORG--NAME/snapshots/COMMIT/FILE   a link to ../../blobs/HASH
    models--ORG--NAME/blobs/HASH.incomplete   the part of a file that a download has so far

(https://huggingface.co/docs/huggingface_hub/guides/manage-cache)
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from deepseek_triton_build.check import is_inside, read_bytes
from deepseek_triton_build.text import first_names, safe_name
from deepseek_triton_tools.tool_errors import CheckpointError

_NAME = re.compile(r"(?P<model>[\w.-]+/[\w.-]+)(?:@(?P<revision>\S+))?")
_MAIN = "main"
_MOST_REF_BYTES = 1000


@dataclass(frozen=True)
class HubName:
    """A model's name on the hub: "org/name" or "org/name@revision". The revision is a branch, a tag or a commit."""

    model: str
    revision: str = _MAIN

    def __str__(self) -> str:
        return self.model if self.revision == _MAIN else f"{self.model}@{self.revision}"

    @property
    def download(self) -> str:
        """The command that downloads the model."""
        return f"deepseek-triton checkpoint download {self.model}" + (
            "" if self.revision == _MAIN else f" --revision {self.revision}"
        )


def parse_hub_name(text: str) -> HubName | None:
    """Return the name in `text`; None where it can only be a path."""
    match = None if text.startswith((".", "/", "~")) else _NAME.fullmatch(text)
    return HubName(match["model"], match["revision"] or _MAIN) if match else None


def hub_cache() -> tuple[Path, str]:
    """Return the folder of the cache, and the setting that says so, for people."""
    # The order of huggingface_hub's constants.py, which the engines use; the second is the variable's older name.
    for variable, below in (
        ("HF_HUB_CACHE", ""),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
    ):
        if value := os.environ.get(variable):
            return Path(os.path.expandvars(os.path.expanduser(value)), below), f"by {variable}"
    return Path(os.path.expanduser("~/.cache/huggingface/hub")), "by default"


def find_snapshot(name: HubName, model_folder: Path | None = None, *, only: str = "") -> tuple[Path, str]:
    """Return the folder and the commit of the snapshot of one revision of a model.

    :param model_folder: the model's folder in a cache. None: its folder in the cache that the environment names.
    :param only: the one file that is wanted, for the advice to download.
    :raises CheckpointError: when the model or the revision isn't there.
    """
    cache, cache_setting = hub_cache()
    download = f"{name.download} --include {only}" if only else name.download
    model_folder = model_folder or cache / f"models--{name.model.replace('/', '--')}"
    if not os.path.isdir(model_folder):
        raise CheckpointError(
            f"{name}: the Hugging Face cache ({cache_setting}) has no {model_folder}; download it: {download}, "
            "or set HF_HUB_CACHE to the cache that has it"
        )
    revision = _commit(model_folder, name) or name.revision
    folder = model_folder / "snapshots" / revision
    if not is_inside(revision) or not os.path.isdir(folder):
        revisions = _file_names(model_folder / "snapshots")
        others = f"there are {first_names(revisions)}" if revisions else "no revision is there"
        fix = f"name one of them, as {name.model}@{revisions[0]}, or download it" if revisions else "download it"
        raise CheckpointError(
            f"{name}: {model_folder} has no {safe_name(name.revision)}: looked at refs/{safe_name(name.revision)} and "
            f"snapshots/{safe_name(revision)}; {others}; {fix}: {download}"
        )
    return folder, revision


def unfinished_downloads(folder: Path) -> list[Path]:
    """Return the partial files of a download into the cache, or into the folder itself, that has not finished."""
    blobs = folder.parent.parent / "blobs"
    local = folder / ".cache" / "huggingface" / "download"
    places = [local, blobs] if folder.parent.name == "snapshots" else [local]
    return [place / name for place in places for name in _file_names(place) if name.endswith(".incomplete")]


def _commit(model_folder: Path, name: HubName) -> str | None:
    """Return the commit that a branch or tag was when it was downloaded; None when no such branch or tag was."""
    if not is_inside(name.revision):
        return None
    ref = model_folder / "refs" / name.revision
    try:
        content = read_bytes(ref, _MOST_REF_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"{name}: {ref} can't be read: {error.strerror}; allow this user to read it") from error
    return (content or b"").decode("utf-8", "replace").strip() or None


def _file_names(folder: Path) -> list[str]:
    """Return the names in a folder, sorted; none where the folder does not exist or can't be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
