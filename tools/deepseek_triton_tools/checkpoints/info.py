"""Says what a checkpoint is: its model, precision and parts, by its configuration and the headers of its files.

It is shown as tables, or as the JSON document "deepseek-triton/checkpoint/1".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepseek_triton_build.catalog import Variant, cut_summary, variant_of_folder, variant_of_model, variants
from deepseek_triton_build.check import CheckpointFacts, read_facts
from deepseek_triton_build.text import safe_name
from deepseek_triton_tools.checkpoints.model_parts import PARTS, layer_of, part_of
from deepseek_triton_tools.checkpoints.stored_tensors import StoredTensor, StoredTensors, open_checkpoint
from deepseek_triton_tools.host.units import sized
from deepseek_triton_tools.plans.support_tables import Support, support_of
from deepseek_triton_tools.repository.checkpoint_files import CheckpointFiles
from deepseek_triton_tools.repository.checkpoint_manifest import read_manifest
from deepseek_triton_tools.terminal.tables import Table

_EXPERT = re.compile(r"model\.layers\.\d+\.mlp\.experts\.\d+\.\w+\.(?:weight|qweight|weight_packed)")
_STORED_PRECISIONS = {"F8_E4M3": "fp8", "U8": "fp4", "I8": "w4a8", "I32": "w4a16", "BF16": "bf16", "F16": "bf16"}
"""Data type of an expert's weight -> the precision that stores it so."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
SCHEMA = "deepseek-triton/checkpoint/1"


@dataclass(frozen=True)
class PartSize:
    """The tensors of one kind."""

    name: str
    num_tensors: int
    num_bytes: int
    dtypes: tuple[str, ...]
    """Their data types, the one with the most bytes first."""


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """Everything that is known of one checkpoint."""

    files: CheckpointFiles
    tensors: StoredTensors
    facts: CheckpointFacts
    variants: tuple[Variant, ...]
    """The one that its name says, else all that have its architecture and precision; none for another model."""
    num_layers: int
    """Layers that are stored, the MTP layer not counted."""
    num_mtp_layers: int
    parts: tuple[PartSize, ...]
    precision: str | None
    """The precision of the experts as they are stored; None when they are of no known one."""
    revision: str | None
    """The commit on the Hugging Face hub."""
    problems: tuple[str, ...]
    """The contradictions between its files."""

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def cut(self) -> str | None:
        """The layers and experts that are left of the model, where the checkpoint is cut."""
        if self.facts.cut is None or self.facts.architecture is None:
            return None
        return cut_summary(self.facts.cut, self.facts.architecture)

    @property
    def experts(self) -> int | None:
        number = self.facts.config.get("n_routed_experts")
        return number if isinstance(number, int) else None

    @property
    def context_length(self) -> int | None:
        length = self.facts.config.get("max_position_embeddings")
        return length if isinstance(length, int) else None


def describe(files: CheckpointFiles) -> CheckpointInfo:
    """Describe a checkpoint. Only headers and JSON files are read.

    :raises CheckpointError: when a weight file is missing or damaged.
    """
    tensors = open_checkpoint(files.folder)
    facts, findings = read_facts(files.folder, str(files.folder))
    if tensors.num_parts and "num_hidden_layers" not in facts.config:
        # DeepSeek's inference format has no config.json, or one with other keys.
        findings = []
    layers = {layer for name in tensors if (layer := layer_of(name)) is not None}
    configured = facts.config.get("num_hidden_layers")
    num_layers = configured if type(configured) is int else max(layers, default=-1) + 1
    expert = next((tensor for name, tensor in tensors.items() if _EXPERT.fullmatch(name)), None)
    precision = _STORED_PRECISIONS.get(expert.dtype) if expert else None
    problems = [f"{finding.file}: {finding.message}" for finding in findings]
    problems += _contradictions(facts, layers, num_layers, precision)
    return CheckpointInfo(
        files=files,
        tensors=tensors,
        facts=facts,
        variants=tuple(_variants(files, facts, precision)),
        num_layers=len([layer for layer in layers if layer < num_layers]),
        num_mtp_layers=len([layer for layer in layers if layer >= num_layers]),
        parts=tuple(_parts(tensors.values(), num_layers)),
        precision=precision,
        revision=_revision(files.folder),
        problems=tuple(problems),
    )


def _parts(tensors: Iterable[StoredTensor], num_layers: int) -> Iterator[PartSize]:
    by_part: dict[str, dict[str, list[int]]] = {name: {} for name in PARTS}
    for tensor in tensors:
        by_part[part_of(tensor.name, num_layers)].setdefault(tensor.dtype, []).append(tensor.num_bytes)
    for name, dtypes in by_part.items():
        if dtypes:
            sizes = [size for each in dtypes.values() for size in each]
            yield PartSize(name, len(sizes), sum(sizes), tuple(sorted(dtypes, key=lambda key: -sum(dtypes[key]))))


def _contradictions(facts: CheckpointFacts, layers: set[int], num_layers: int, precision: str | None) -> Iterator[str]:
    named = facts.precision or ("bf16" if facts.has_16_bits else None)
    if named is not None and precision is not None and named != precision:
        yield f"{facts.quantization_file}: it says {named}, but the experts are stored as {precision}"
    num_missing = num_layers - sum(layer < num_layers for layer in layers)
    if num_missing:
        yield f"{facts.label}/config.json: it says {num_layers} layers, of which {num_missing} are not stored"


def _variants(files: CheckpointFiles, facts: CheckpointFacts, precision: str | None) -> list[Variant]:
    """Return the variants that it may be. Only a name tells R1 from V3: their shapes are the same."""
    if facts.architecture is None or (facts.other_figures and facts.cut is None):
        return []
    hub_name = files.folder.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
    named = (
        variant_of_model(files.source) or variant_of_model(hub_name) or variant_of_folder(str(files.folder.resolve()))
    )
    if named is not None and named[0].architecture == facts.architecture:
        return [named[0]]
    alike = [variant for variant in variants().values() if variant.architecture == facts.architecture]
    return [variant for variant in alike if precision in {**variant.checkpoints, **variant.own_checkpoints}] or alike


def _revision(folder: Path) -> str | None:
    """Return the commit of a folder that was downloaded: by its manifest, its place in the hub's cache, or what
    `hf download --local-dir` has left."""
    if (manifest := read_manifest(folder)) is not None:
        return manifest.revision or None
    if folder.parent.name == "snapshots":
        return folder.name
    try:
        first = (folder / ".cache/huggingface/download/config.json.metadata").read_text(encoding="utf-8").split("\n")[0]
    except (OSError, UnicodeDecodeError):
        return None
    return first if _COMMIT.fullmatch(first) else None


def quantization(facts: CheckpointFacts) -> str:
    """Say how the files name the quantization: "fp8, blocks of 128 x 128"."""
    if facts.quantization is None:
        return "none"
    section = facts.config.get("quantization_config")
    block: Any = section.get("weight_block_size") if isinstance(section, dict) else None
    is_block = isinstance(block, list) and len(block) == 2
    return facts.quantization + (f", blocks of {block[0]} x {block[1]}" if is_block else "")


def tables(info: CheckpointInfo) -> Iterator[Table]:
    rows = [(heading, value) for heading, value in _rows(info) if value]
    yield Table(title=safe_name(str(info.files.folder)), headings=("fact", "value"), rows=rows)
    parts = [(part.name, sized(part.num_bytes), f"{part.num_tensors:,}", ", ".join(part.dtypes)) for part in info.parts]
    yield Table(title="Parts", headings=("part", "size", "tensors", "stored as"), rows=parts)
    support = support_for(info)
    if support is not None:
        served = [
            (cell.gpu, str(cell.published_gpus or "-"), str(cell.minimum_gpus or "-"), str(cell.vllm_gpus or "-"))
            for cell in support.cells
        ]
        headings = ("GPU", "TensorRT-LLM, as published", "TensorRT-LLM, that fit", "vLLM, that fit")
        yield Table(title="GPUs of one instance", headings=headings, rows=served, is_grid=True)


def support_for(info: CheckpointInfo) -> Support | None:
    """Return what serves the checkpoint whole; None for a cut one, whose size is its own, and for an unknown one."""
    if info.cut is not None or not info.variants or info.precision is None:
        return None
    return support_of(info.variants[0], info.precision)


def _rows(info: CheckpointInfo) -> Iterator[tuple[str, str]]:
    facts, support = info.facts, support_for(info)
    yield "found as", info.files.found_by
    yield "revision", info.revision or ""
    yield "format", f"DeepSeek's inference format, for {info.tensors.num_parts} GPUs" if info.tensors.num_parts else ""
    if "num_hidden_layers" not in facts.config:
        yield "config.json", "none of the model; to serve or convert it, copy it from the model on Hugging Face"
    yield "variant", _variant(info)
    yield "architecture", safe_name(facts.class_name or "")
    yield "cut", info.cut or ""
    yield "precision", info.precision or "not known"
    yield "quantization", safe_name(quantization(facts))
    yield "KV cache", facts.kv_cache_quant_algo or "no type named: the engine's settings decide"
    yield "layers", f"{info.num_layers}, and {_mtp(info)}"
    yield "routed experts", str(info.experts or "")
    yield "context length", f"{info.context_length:,} tokens" if info.context_length else ""
    num_files = len(info.tensors.files)
    files = "1 file" if num_files == 1 else f"{num_files:,} files"
    yield "tensors", f"{len(info.tensors):,} in {files}, {sized(info.num_bytes)}"
    if support is not None:
        yield "TensorRT-LLM", ", ".join(support.releases) or "no release serves it"
        yield "vLLM", ", ".join(support.vllm_versions) or "no version serves it"


def _mtp(info: CheckpointInfo) -> str:
    configured = info.facts.config.get("num_nextn_predict_layers", 0)
    is_missing = isinstance(configured, int) and configured > info.num_mtp_layers
    return f"{info.num_mtp_layers or 'no'} MTP layer" + (
        f", though config.json says {configured}" if is_missing else ""
    )


def _variant(info: CheckpointInfo) -> str:
    names = [variant.name for variant in info.variants]
    if not names:
        return "none that is known here"
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} or {names[-1]}, which share this shape"


def entry(info: CheckpointInfo) -> dict[str, Any]:
    """Return what the JSON document says of a checkpoint."""
    facts, support = info.facts, support_for(info)
    return {
        "source": info.files.source,
        "folder": str(info.files.folder),
        "found_by": info.files.found_by,
        "format": "deepseek-inference" if info.tensors.num_parts else "hugging-face",
        "revision": info.revision,
        "variants": [variant.name for variant in info.variants],
        "architecture": facts.class_name,
        "cut": info.cut,
        "precision": info.precision,
        "quantization": facts.quantization,
        "kv_cache_quant_algo": facts.kv_cache_quant_algo,
        "num_layers": info.num_layers,
        "num_mtp_layers": info.num_mtp_layers,
        "num_routed_experts": info.experts,
        "context_length": info.context_length,
        "num_tensors": len(info.tensors),
        "num_files": len(info.tensors.files),
        "bytes": info.num_bytes,
        "parts": [
            {"part": part.name, "tensors": part.num_tensors, "bytes": part.num_bytes, "dtypes": list(part.dtypes)}
            for part in info.parts
        ],
        "gpus": [asdict(cell) for cell in support.cells] if support else [],
        "trtllm_releases": list(support.releases) if support else [],
        "vllm_versions": list(support.vllm_versions) if support else [],
        "problems": list(info.problems),
    }
