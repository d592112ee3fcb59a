"""A checkpoint's folder: what model it is of, how it is quantized, and whether its weights are all there."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepseek_triton_build.catalog import Architecture, Precision, architectures
from deepseek_triton_build.check.codes import (
    BROKEN,
    BROKEN_SHARD,
    MISSING_SHARD,
    MISSING_TENSORS,
    NO_WEIGHTS,
    STRAY_SHARD,
    UNKNOWN_ARCHITECTURE,
    UNREADABLE,
    WRONG_LENGTH,
)
from deepseek_triton_build.check.document import read_json
from deepseek_triton_build.check.files import NotAFileError, is_inside
from deepseek_triton_build.check.finding import Finding
from deepseek_triton_build.check.safetensors import Header, HeaderError, read_header
from deepseek_triton_build.words import listed, plain, shown

INDEX = "model.safetensors.index.json"
QUANT_CONFIG = "hf_quant_config.json"
_NUMBERED = re.compile(r"-(\d+)-of-(\d+)\.safetensors$")

_TOOLS = ("modelopt", "compressed-tensors")
"""quant_method of checkpoints whose precision is said elsewhere."""
_PRECISIONS: Mapping[str, Precision] = {
    "FP8_BLOCK_SCALES": "fp8",
    "fp8": "fp8",
    "NVFP4": "fp4",
    "W4A8_AWQ": "w4a8",
    "MIXED_PRECISION": "w4a8",
    "w4afp8": "w4a8",
}
"""quant_algo of hf_quant_config.json, or quant_method of config.json's quantization_config, as DeepSeek's checkpoints
and those made of them have it."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFacts:
    """What a checkpoint says of itself."""

    folder: Path
    label: str
    """What findings call the folder."""
    class_name: str | None
    architecture: Architecture | None
    quantization: str | None
    """As the checkpoint spells it; None without one."""
    quantization_file: str
    kv_cache_quant_algo: str | None
    is_whole: bool
    """Its files could be read."""

    @property
    def is_quantization_known(self) -> bool:
        """Whether it is known how the weights are quantized: in one of our precisions, in another, or not at all."""
        return self.is_whole and self.architecture is not None and self.quantization not in _TOOLS

    @property
    def precision(self) -> Precision | None:
        return _PRECISIONS.get(self.quantization or "")


def read_facts(folder: Path, label: str) -> tuple[CheckpointFacts, list[Finding]]:
    """What config.json and hf_quant_config.json of `folder` say, and what is wrong with them."""
    config, findings = read_json(folder / "config.json", f"{label}/config.json")
    quant: dict[str, Any] | None = None
    if os.path.exists(folder / QUANT_CONFIG):
        quant, found = read_json(folder / QUANT_CONFIG, f"{label}/{QUANT_CONFIG}")
        findings += found
    class_name = _class_name(config or {})
    architecture = next((a for a in architectures().values() if a.class_name == class_name), None)
    if config is not None and architecture is None:
        known = " or ".join(a.class_name for a in architectures().values())
        message = f"expected architectures: {known}, found {shown(class_name)}"
        fix = "point model at the right checkpoint, or leave its rules unchecked"
        findings.append(UNKNOWN_ARCHITECTURE.finding(message, fix, file=f"{label}/config.json"))
    in_config, in_quant = _section(config, "quantization_config"), _section(quant, "quantization")
    algo = in_quant.get("quant_algo") or in_config.get("quant_algo") or in_config.get("quant_method")
    kv_algo = in_quant.get("kv_cache_quant_algo")
    facts = CheckpointFacts(
        folder=folder,
        label=label,
        class_name=class_name,
        architecture=architecture,
        quantization=algo if isinstance(algo, str) else None,
        quantization_file=f"{label}/{QUANT_CONFIG if in_quant.get('quant_algo') else 'config.json'}",
        kv_cache_quant_algo=kv_algo if isinstance(kv_algo, str) else None,
        is_whole=not findings,
    )
    return facts, findings


def check_weights(folder: Path, label: str) -> Iterator[Finding]:
    """Every shard is there and whole. Reads the index and the shards' headers."""
    present = _weight_files(folder)
    if not os.path.exists(folder / INDEX):
        yield from _check_unlisted(folder, label, present)
        return
    index, findings = read_json(folder / INDEX, f"{label}/{INDEX}")
    yield from findings
    if index is None:
        return
    wanted = _shards(index)
    if wanted is None:
        message = "expected weight_map, a mapping of tensor to shard"
        yield BROKEN.finding(message, "download it again", file=f"{label}/{INDEX}")
        return
    outside = [shard for shard in wanted if not is_inside(shard)]
    if outside:
        message = f"expected names of files in the folder, found {listed(outside)}"
        yield BROKEN.finding(message, "download it again", file=f"{label}/{INDEX}")
    inside = wanted.keys() - set(outside)
    missing = [shard for shard in inside if not os.path.exists(folder / shard)]
    if missing:
        message = f"{len(missing)} of {len(wanted)} shards are missing: {listed(missing)}"
        yield MISSING_SHARD.finding(message, "download them again", file=f"{label}/{INDEX}")
    for shard in sorted(inside - set(missing)):
        yield from _check_shard(folder / shard, f"{label}/{shard}", wanted[shard])
    if not wanted:
        message = f"{INDEX} names no tensor"
        yield NO_WEIGHTS.finding(message, "download the checkpoint again", file=f"{label}/{INDEX}")
    for shard in sorted(present - wanted.keys()):
        fix = "move it out of the folder, or download the index again"
        yield STRAY_SHARD.finding("the index has no such shard", fix, file=f"{label}/{shard}")


def _check_unlisted(folder: Path, label: str, present: set[str]) -> Iterator[Finding]:
    """A folder without an index: one file, or several that number themselves."""
    if not present:
        message = f"{plain(label)} has neither {INDEX} nor a *.safetensors file"
        yield NO_WEIGHTS.finding(message, "download the checkpoint again", file=label)
    missing = _unnumbered(present)
    if missing:
        message = f"{len(missing)} shards are missing, by the names of the others: {listed(missing)}"
        yield MISSING_SHARD.finding(message, "download them again", file=label)
    for shard in sorted(present):
        yield from _check_shard(folder / shard, f"{label}/{shard}", None)


def _check_shard(path: Path, file: str, wanted: frozenset[str] | None) -> Iterator[Finding]:
    """
    :param wanted: the tensors that the index has in it; None without an index: some.
    """
    fix = "download it again"
    try:
        header = read_header(path)
    except NotAFileError:
        yield BROKEN_SHARD.finding("expected a file, found something else", fix, file=file)
    except OSError as error:
        yield UNREADABLE.finding(f"can't be read: {error.strerror}", "let it be read, or download it again", file=file)
    except HeaderError as error:
        yield BROKEN_SHARD.finding(str(error), fix, file=file)
    else:
        yield from _check_header(header, file, wanted)


def _check_header(header: Header, file: str, wanted: frozenset[str] | None) -> Iterator[Finding]:
    if header.found != header.length:
        what = "truncated" if header.found < header.length else "too long"
        message = f"{what}: {header.found:,} bytes, where its header says {header.length:,}"
        yield WRONG_LENGTH.finding(message, "download it again", file=file)
    if wanted is None and not header.tensors:
        yield NO_WEIGHTS.finding("it holds no tensor", "download it again", file=file)
    if absent := (wanted or frozenset()) - header.tensors:
        message = f"{len(absent)} tensors that the index has in it are not: {listed(absent)}"
        yield MISSING_TENSORS.finding(message, "download it and the index again", file=file)


def _shards(index: Mapping[str, Any]) -> dict[str, frozenset[str]] | None:
    """Shard -> its tensors, by the index."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        return None
    shards: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        shards.setdefault(shard, set()).add(tensor)
    return {shard: frozenset(tensors) for shard, tensors in shards.items()}


def _weight_files(folder: Path) -> set[str]:
    """What the engine loads of the folder (weight_loader.py leaves out the consolidated ones)."""
    try:
        names = os.listdir(folder)
    except OSError:  # reported by what can't be read in it
        return set()
    return {name for name in names if name.endswith(".safetensors") and "consolidated" not in name}


def _unnumbered(present: set[str]) -> list[str]:
    """Shards that are not there, by the numbers in the names of those that are."""
    missing: set[str] = set()
    for name in present:
        if match := _NUMBERED.search(name):
            digits, total = match[1], int(match[2])
            names = (f"{name[: match.start(1)]}{n:0{len(digits)}}{name[match.end(1) :]}" for n in range(1, total + 1))
            missing.update(other for other in names if total <= 10_000 and other not in present)
    return sorted(missing)


def _class_name(config: Mapping[str, Any]) -> str | None:
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def _section(document: Mapping[str, Any] | None, key: str) -> Mapping[str, Any]:
    section = (document or {}).get(key)
    return section if isinstance(section, dict) else {}
