"""The files of a checkpoint's folder: their sizes and hashes, and those beside the weights."""

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from deepseek_triton_build.check import INDEX
from deepseek_triton_tools.repository.checkpoint_manifest import MANIFEST_NAME, SUMS_FILE

if TYPE_CHECKING:
    from hashlib import _Hash

CONFIG = "config.json"
CONVERSION = ".conversion"
"""Folder in the output of a conversion. When it is complete, only the plan stays in it, by which the same command knows
that."""
HF_QUANT_CONFIG = "hf_quant_config.json"
QUANT_CFG = "quant_cfg.json"
UNFINISHED = "expected a whole checkpoint, found a conversion that was stopped; run the same checkpoint quantize again"
_NOT_COPIED = ("README.md", CONFIG, INDEX, HF_QUANT_CONFIG, QUANT_CFG, MANIFEST_NAME)
"""Files that are written anew, or that would be wrong beside other weights."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_PIECE = 4 * 2**20
_LFS = b"version https://git-lfs"


class StoppedError(Exception):
    """The work was told to stop."""


def add_file(
    digest: "_Hash", path: Path, stop: threading.Event, on_bytes: Callable[[int], object] = lambda _: None
) -> int:
    """Hash the file's content and return its length in bytes.

    :param on_bytes: called with the length of each piece.
    :raises StoppedError: when `stop` was set.
    :raises OSError: when the file can't be read.
    """
    buffer = bytearray(_PIECE)
    view = memoryview(buffer)
    total = 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            if stop.is_set():
                raise StoppedError
            digest.update(view[:count])
            total += count
            on_bytes(count)
    return total


def is_pointer(path: Path) -> bool:
    """Tell whether the file is what Git LFS leaves in the place of a large file that was not fetched."""
    try:
        with path.open("rb") as file:
            return file.read(len(_LFS)) == _LFS
    except OSError:
        return False


def size_of(path: Path) -> int | None:
    """Return the file's bytes; None where there is none."""
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def is_unfinished(folder: Path) -> bool:
    """Tell whether a conversion into the folder was stopped: its config.json comes last."""
    return (folder / CONVERSION).is_dir() and not (folder / CONFIG).exists()


def companion_files(folder: Path) -> Iterator[Path]:
    """Yield the files beside the weights that stay as they are: tokenizer, generation_config.json, model code."""
    for path in sorted(folder.iterdir()):
        is_of_weights = path.name.endswith(_WEIGHTS) or SUMS_FILE.fullmatch(path.name)
        if path.is_file() and not is_of_weights and path.name not in _NOT_COPIED and not path.name.startswith("."):
            yield path


def free_bytes(path: Path) -> int:
    """Return the bytes that are free where `path` is, or is to be."""
    return shutil.disk_usage(next(folder for folder in path.absolute().parents if folder.exists())).free
