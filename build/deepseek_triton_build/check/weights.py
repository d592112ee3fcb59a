"""The weight files of a checkpoint: which of them the engine reads, whether they are all there and complete, and the
precision in which they store the experts."""

import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepseek_triton_build.check import codes
from deepseek_triton_build.check.deepseek_v4 import Form, is_v4, tensor_problems
from deepseek_triton_build.check.documents import NotAFileError, open_file, read_json
from deepseek_triton_build.check.safetensors import Header, HeaderEntry, HeaderError, PointerError, read_header
from deepseek_triton_build.data.finding import Finding
from deepseek_triton_build.text import first_names, is_inside, safe_name

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
"""Name of the weight file when the checkpoint has only one."""
_NUMBERED = re.compile(r"-(\d+)-of-(\d+)\.safetensors$")
_AGAIN = "download it again"
_EXPERT = re.compile(r"(?:model\.)?layers\.(\d{1,4})\.(?:mlp|ffn)\.experts\.\d+\.\w+\.(?:weight|qweight|weight_packed)")
# Data type of an expert's weight -> the precision that stores it so.
_STORED = {"F8_E4M3": "fp8", "U8": "fp4", "I8": "w4a8", "I32": "w4a16", "BF16": "bf16", "F16": "bf16"}


def files_read(folder: Path, *, only_indexed: bool = False) -> list[str]:
    """Return the names of the weight files in `folder` that the engine reads, sorted.

    :param only_indexed: whether the engine reads only the files that the index names, as the reference engine does.
        TensorRT-LLM reads every weight file in the folder.
    :raises OSError: when the folder can't be listed, or no file in it can be opened.
    """
    present = _present(folder)
    if not only_indexed:
        return sorted(present)
    if WEIGHTS in present:  # transformers looks for this file first
        return [WEIGHTS]
    index, _ = read_json(folder / INDEX, INDEX)
    shards = None if index is None else _shards(index)
    return sorted(present if shards is None else filter(is_inside, shards))


def instead_of_checkpoint(folder: Path) -> str:
    """Say what is there, where nothing of a checkpoint is; "" where something is, or the folder can't be read."""
    try:
        names = set(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError) as error:
        return "nothing" if isinstance(error, FileNotFoundError) else "a file"
    except OSError:
        return ""
    if "config.json" in names or INDEX in names or any(name.endswith(".safetensors") for name in names):
        return ""
    is_repository = any(os.path.isfile(folder / name / "config.pbtxt") for name in names)
    what = "a model repository" if is_repository else "neither config.json nor *.safetensors files"
    return what if names else "an empty one"


def check_weights(
    folder: Path, label: str, *, only_indexed: bool = False, on_file: Callable[[Path], None] = lambda _: None
) -> Iterator[Finding]:
    """Find weight files that are missing, damaged or unlike the index, and V4's unlike config.json. Only JSON files
    and headers are read.

    :param only_indexed: see `files_read`.
    :param on_file: called with each file before it is opened, because storage may not answer.
    """
    config, _ = read_json(folder / "config.json", "config.json")
    stored: dict[str, Form] | None = {} if config and is_v4(config) else None
    is_whole = True
    for finding in _FolderCheck(folder, label, on_file, stored).check(only_indexed):
        is_whole = is_whole and finding.severity != "error"
        yield finding
    if config and stored and is_whole:
        yield from tensor_problems(config, stored, label)


# Largest total that is believed when a file's name says that it is one of so many.
_MOST_SHARDS = 10_000


@dataclass(frozen=True)
class _FolderCheck:
    folder: Path
    label: str
    on_file: Callable[[Path], None]
    stored: dict[str, Form] | None
    """Gets every tensor that is read; None where they are not compared with config.json."""

    def check(self, only_indexed: bool) -> Iterator[Finding]:
        try:
            present = _present(self.folder)
        except OSError as error:
            message = f"{safe_name(self.label)} can't be looked into: {error.strerror}"
            yield codes.UNREADABLE.finding(message, "make it readable and searchable", file=self.label)
            return
        if only_indexed and WEIGHTS in present:  # transformers looks for this file first
            yield from self.check_without_index({WEIGHTS})
        elif _is_absent(self.folder / INDEX):
            yield from self.check_without_index(present)
        else:
            yield from self.check_with_index(present, only_indexed)

    def check_with_index(self, present: set[str], only_indexed: bool) -> Iterator[Finding]:
        file = f"{self.label}/{INDEX}"
        self.on_file(self.folder / INDEX)
        index, findings = read_json(self.folder / INDEX, file)
        shards = None if index is None else _shards(index)
        if index is not None and shards is None:
            findings.append(
                codes.BROKEN.finding("expected weight_map, a mapping of tensor to shard", _AGAIN, file=file)
            )
        index = None  # freed early, because it takes as much memory as everything below
        yield from findings
        if shards is None:
            yield from self.check_each(present)
            return
        if not shards:
            yield codes.NO_WEIGHTS.finding(f"{INDEX} names no tensor", "download the checkpoint again", file=file)
        yield from self.check_shards(shards, file)
        for name in () if only_indexed else sorted(present - shards.keys()):
            header, findings = self.check_file(name)
            reads = "" if header is None else f", but TensorRT-LLM reads its {header.found:,} bytes all the same"
            message, fix = (
                f"the index does not name this file{reads}",
                "move it out of the folder, or download the index again",
            )
            yield codes.STRAY_SHARD.finding(message, fix, file=f"{self.label}/{name}")
            yield from findings

    def check_shards(self, shards: Mapping[str, Collection[str]], index_file: str) -> Iterator[Finding]:
        outside = {name for name in shards if not is_inside(name)}
        if outside:
            message = f"expected names of files in this folder, found {first_names(outside)}"
            yield codes.BROKEN.finding(message, _AGAIN, file=index_file)
        missing = {name for name in shards.keys() - outside if _is_absent(self.folder / name)}
        if missing:
            message = f"{len(missing)} of {len(shards)} shards are missing: {first_names(missing)}"
            yield codes.MISSING_SHARD.finding(message, "download them again", file=index_file)
        everywhere = frozenset().union(*shards.values())
        for name in sorted(shards.keys() - outside - missing):
            header, findings = self.check_file(name)
            yield from findings
            if header is not None:
                yield from _compare(header, frozenset(shards[name]), everywhere, f"{self.label}/{name}")

    def check_without_index(self, present: set[str]) -> Iterator[Finding]:
        """Check a folder with one file, or with files whose names hold numbers."""
        if not present:
            message, fix = f"neither {INDEX} nor a *.safetensors file is there", "download the checkpoint again"
            if found := instead_of_checkpoint(self.folder):
                message, fix = f"expected a checkpoint's folder, found {found}", "name the folder that holds its files"
            yield codes.NO_WEIGHTS.finding(message, fix, file=self.label)
        expected: set[str] = set()
        for name in present:
            if (match := _NUMBERED.search(name)) and int(match[2]) <= _MOST_SHARDS:
                start, end, digits = name[: match.start(1)], name[match.end(1) :], len(match[1])
                expected.update(f"{start}{number:0{digits}}{end}" for number in range(1, int(match[2]) + 1))
        if missing := expected - present:
            message = f"{len(missing)} shards are missing, as the names of the others show: {first_names(missing)}"
            yield codes.MISSING_SHARD.finding(message, "download them again", file=self.label)
        yield from self.check_each(present)

    def check_each(self, names: set[str]) -> Iterator[Finding]:
        """Check files when no index says what they hold."""
        for name in sorted(names):
            header, findings = self.check_file(name)
            yield from findings
            if header is not None and not header.tensors:
                yield codes.NO_WEIGHTS.finding("it holds no tensor", _AGAIN, file=f"{self.label}/{name}")

    def check_file(self, name: str) -> tuple[Header | None, list[Finding]]:
        """Check that one file is complete, without regard to the index, and return its header."""
        file = f"{self.label}/{name}"
        self.on_file(self.folder / name)
        try:
            with open_file(self.folder / name) as opened:
                header = read_header(opened)
        except NotAFileError:
            return None, [codes.BROKEN_SHARD.finding("expected a file, found something else", _AGAIN, file=file)]
        except FileNotFoundError:
            message = "it is missing: it is a link to nothing, or was removed during the check"
            return None, [codes.MISSING_SHARD.finding(message, _AGAIN, file=file)]
        except OSError as error:
            fix = "make it readable, or download it again"
            return None, [codes.UNREADABLE.finding(f"can't be read: {error.strerror}", fix, file=file)]
        except PointerError as error:
            return None, [codes.BROKEN_SHARD.finding(str(error), "fetch it: git lfs pull", file=file)]
        except HeaderError as error:
            return None, [codes.BROKEN_SHARD.finding(str(error), _AGAIN, file=file)]
        if header.found != header.length:
            return header, [codes.WRONG_LENGTH.finding(_wrong_length(header), _AGAIN, file=file)]
        if self.stored is not None:
            self.stored.update((name, (one.dtype, one.shape)) for name, one in header.tensors.items())
        return header, []


def _present(folder: Path) -> set[str]:
    """Return the files of `folder` that TensorRT-LLM loads. Its weight_loader.py leaves out the consolidated ones.

    :raises OSError: as files_read raises it.
    """
    os.stat(os.path.join(folder, os.curdir))  # listing a folder and opening its files need different permissions
    return {name for name in os.listdir(folder) if name.endswith(".safetensors") and "consolidated" not in name}


def _wrong_length(header: Header) -> str:
    if header.found > header.length:
        return f"too long: it has {header.found:,} bytes, but by its header it ends at byte {header.length:,}"
    cut = header.tensors_beyond(header.found)
    begin, end, *_ = header.tensors[cut[0]]
    message = f"truncated: it ends at byte {header.found:,}, but by its header at byte {header.length:,}; tensors cut: "
    return f"{message}{len(cut)}, the first {safe_name(cut[0])}, bytes {begin:,} to {end:,}"


def _compare(header: Header, wanted: frozenset[str], everywhere: frozenset[str], file: str) -> Iterator[Finding]:
    """Compare a shard's header with the index.

    :param wanted: the tensors that the index lists for this shard.
    :param everywhere: the tensors that it lists for any shard.
    """
    found = header.tensors.keys()
    if absent := wanted - found:
        message = f"{len(absent)} of the {len(wanted)} tensors that the "
        message += f"index lists for it are missing: {first_names(absent)}"
        yield codes.MISSING_TENSORS.finding(message, "download it and the index again", file=file)
    others = (
        (found - everywhere, "are not in the index"),
        ((found - wanted) & everywhere, "are in another shard by the index"),
    )
    if unlisted := [(tensors, what) for tensors, what in others if tensors]:
        parts = [
            f"{len(tensors)} of its {len(found)} tensors {what}: {first_names(tensors)}" for tensors, what in unlisted
        ]
        yield codes.UNLISTED_TENSORS.finding("; ".join(parts), "download it and the index again", file=file)


def _is_absent(path: Path) -> bool:
    """Whether the file does not exist. A file that may not be looked at exists."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: no file can have this name
        return True
    except OSError:  # reading the file will report why
        return False
    return False


def _shards(index: Mapping[str, Any]) -> dict[str, set[str]] | None:
    """Return the tensors of each shard, and empty the index's weight_map; None when it has no valid weight_map."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        return None
    shards: dict[str, set[str]] = defaultdict(set)
    while weight_map:  # emptied on the way, because a small container has no memory for both
        tensor, shard = weight_map.popitem()
        shards[shard].add(tensor)
    return shards


def stored_precisions(folder: Path, num_layers: int) -> dict[str, str]:
    """Return precision ("bf16": not quantized) -> the first file that stores experts so, whatever the JSON files say.

    The files are those of the first and the last layer with experts. What can't be read is left out: `check_weights`
    says why. The MTP layer, from `num_layers`, may be stored otherwise.
    """
    found: dict[str, str] = {}
    for file in _files_with_experts(folder, num_layers):
        entries = _entries(folder, file).items()
        matrices = (entry for name, entry in entries if _layer(name) < num_layers and len(entry.shape) == 2)
        if (precision := next((_STORED.get(entry.dtype) for entry in matrices), None)) is not None:
            found.setdefault(precision, file)
    return found


def _files_with_experts(folder: Path, num_layers: int) -> Iterator[str]:
    index, _ = read_json(folder / INDEX, INDEX)
    weight_map = (index or {}).get("weight_map")
    if not isinstance(weight_map, dict):
        with suppress(OSError):
            yield from files_read(folder)
        return
    inside = ((name, file) for name, file in weight_map.items() if isinstance(file, str) and is_inside(file))
    placed = {layer: file for name, file in inside if (layer := _layer(name)) < num_layers}
    if placed:
        yield from dict.fromkeys((placed[min(placed)], placed[max(placed)]))


def _entries(folder: Path, file: str) -> Mapping[str, HeaderEntry]:
    try:
        with open_file(folder / file) as opened:
            return read_header(opened).tensors
    except (OSError, ValueError, HeaderError):
        return {}


def _layer(name: str) -> float:
    """Return the layer of an expert's weight; infinity for another tensor."""
    match = _EXPERT.fullmatch(name)
    return int(match[1]) if match else math.inf
