"""Says what a checkpoint is: its model, precision and parts, by its configuration and the headers of its files.

It is the JSON document "deepseek-triton/checkpoint/1", which is also shown as tables.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deepseek_triton_build.catalog import Variant, cut_summary, variant_of_folder, variant_of_model, variants
from deepseek_triton_build.check import CheckpointFacts, draft_kind, read_facts
from deepseek_triton_build.text import safe_name
from deepseek_triton_tools.checkpoints.stored_tensors import StoredTensor, layer_of, open_checkpoint
from deepseek_triton_tools.host.units import sized
from deepseek_triton_tools.plans.support_tables import support_of
from deepseek_triton_tools.repository.checkpoint_files import CheckpointFiles
from deepseek_triton_tools.repository.checkpoint_manifest import read_manifest
from deepseek_triton_tools.terminal.tables import Table

SCHEMA = "deepseek-triton/checkpoint/1"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MTP, _OTHER = "MTP layer", "other"
_DRAFTS = {"dspark": "DSpark layers"}
_PATTERNS: Mapping[str, re.Pattern[str]] = {
    part: re.compile(pattern, re.DOTALL)
    for part, pattern in {
        "hyper-connections": r"(?:layers\.\d+\.)?hc_\w+",
        "scales": r".*(?:_scale|_scale_inv|_scale_2|_scales|\.scale|\.weight_shape)",
        "embedding": r"(?:model\.embed_tokens|embed)\..*",
        "norms": r"(?:model\.)?(?:layers\.\d+\..*)?\w*norm\..*",
        "attention": r"(?:model\.)?layers\.\d+\.(?:self_)?attn\..*",
        "router": r"(?:model\.)?layers\.\d+\.(?:mlp|ffn)\.gate\..*",
        "routed experts": r"(?:model\.)?layers\.\d+\.(?:mlp|ffn)\.experts\..*",
        "shared experts": r"(?:model\.)?layers\.\d+\.(?:mlp|ffn)\.shared_experts\..*",
        "dense MLP": r"model\.layers\.\d+\.mlp\..*",
        "head": r"(?:lm_)?head\..*",
    }.items()
}
"""Part -> the tensors that belong to it, unless they belong to the MTP layer or an earlier one."""
PARTS = (
    *("embedding", "attention", "dense MLP", "shared experts", "routed experts", "router", "norms"),
    "hyper-connections",
    *(_MTP, "head", "scales", _OTHER),
)
"""All parts, in the order in which they are shown."""


def describe(files: CheckpointFiles) -> dict[str, Any]:
    """Describe a checkpoint for JSON. Only headers and JSON files are read.

    :raises CheckpointError: when a weight file is missing or damaged.
    """
    tensors = open_checkpoint(files.folder)
    facts, findings = read_facts(files.folder, str(files.folder))
    _, for_vllm = read_facts(files.folder, str(files.folder), for_vllm=True)
    layers = {layer for name in tensors if (layer := layer_of(name)) is not None}
    configured = facts.config.get("num_hidden_layers")
    num_layers = configured if type(configured) is int else max(layers, default=-1) + 1
    precision = next(iter(facts.stored), None)
    problems = list(dict.fromkeys(f"{finding.file}: {finding.message}" for finding in (*findings, *for_vllm)))
    if num_missing := num_layers - sum(layer < num_layers for layer in layers):
        said = f"it says {num_layers} layers, of which {num_missing} are not stored"
        problems.append(f"{facts.label}/config.json: {said}")
    cut = cut_summary(facts.cut, facts.architecture) if facts.cut is not None and facts.architecture else None
    known = _variants(files, facts, precision)
    # What serves the whole model says nothing about a cut one.
    support = support_of(known[0], precision) if known and precision is not None and cut is None else None
    draft = draft_kind(facts.config) if any(layer >= num_layers for layer in layers) else None
    numbers = {key: facts.config.get(key) for key in ("n_routed_experts", "max_position_embeddings")}
    return {
        "source": files.source,
        "folder": str(files.folder),
        "found_by": files.found_by,
        "format": "hugging-face",
        "revision": _revision(files.folder),
        "variants": [variant.name for variant in known],
        "architecture": facts.class_name,
        "cut": cut,
        "precision": precision,
        "quantization": facts.quantization,
        "kv_cache_quant_algo": facts.kv_cache_quant_algo,
        "num_layers": len([layer for layer in layers if layer < num_layers]),
        "num_mtp_layers": len([layer for layer in layers if layer >= num_layers]),
        "draft": draft,
        "num_routed_experts": number if isinstance(number := numbers["n_routed_experts"], int) else None,
        "context_length": number if isinstance(number := numbers["max_position_embeddings"], int) else None,
        "num_tensors": len(tensors),
        "num_files": len(tensors.files),
        "bytes": sum(tensor.num_bytes for tensor in tensors.values()),
        "parts": list(_parts(tensors.values(), num_layers, draft)),
        "gpus": [asdict(cell) for cell in support.cells] if support else [],
        "trtllm_releases": list(support.releases) if support else [],
        "vllm_versions": list(support.vllm_versions) if support else [],
        "problems": problems,
    }


def _parts(tensors: Iterable[StoredTensor], num_layers: int, draft: str | None) -> Iterator[dict[str, Any]]:
    """Yield the tensors of each kind, with their data types, the one with the most bytes first."""
    by_part: dict[str, dict[str, list[int]]] = {name: {} for name in PARTS}
    for tensor in tensors:
        layer = layer_of(tensor.name)
        matches = (part for part, pattern in _PATTERNS.items() if pattern.fullmatch(tensor.name))
        part = _MTP if layer is not None and layer >= num_layers else next(matches, _OTHER)
        by_part[part].setdefault(tensor.dtype, []).append(tensor.num_bytes)
    for name, dtypes in by_part.items():
        if dtypes:
            sizes = [size for each in dtypes.values() for size in each]
            in_order = sorted(dtypes, key=lambda key: -sum(dtypes[key]))
            part = _DRAFTS.get(draft or "", name) if name == _MTP else name
            yield {"part": part, "tensors": len(sizes), "bytes": sum(sizes), "dtypes": in_order}


def _variants(files: CheckpointFiles, facts: CheckpointFacts, precision: str | None) -> list[Variant]:
    """Return the variants that it may be. Only a name tells R1 from V3: their shapes are the same."""
    if facts.architecture is None or facts.difference:
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


def tables(info: Mapping[str, Any]) -> Iterator[Table]:
    """Yield what `describe` has found, for people."""
    share_a_shape = ", which share this shape" if len(info["variants"]) > 1 else ""
    facts = {
        "found as": info["found_by"],
        "revision": info["revision"],
        "variant": " or ".join(info["variants"]) + share_a_shape or "none that is known here",
        "architecture": info["architecture"],
        "cut": info["cut"],
        "precision": info["precision"] or "not known",
        "quantization": info["quantization"] or "none",
        "KV cache": info["kv_cache_quant_algo"] or "no type named: the engine's settings decide",
        "layers": f"{info['num_layers']}, and {info['num_mtp_layers'] or 'no'} {_DRAFTS.get(info['draft'], _MTP)}",
        "routed experts": info["num_routed_experts"],
        "context length": f"{info['context_length']:,} tokens" if info["context_length"] else "",
        "tensors": f"{info['num_tensors']:,} in {info['num_files']:,} files, {sized(info['bytes'])}",
        "TensorRT-LLM": ", ".join(info["trtllm_releases"]),
        "vLLM": ", ".join(info["vllm_versions"]),
    }
    rows = [(heading, safe_name(str(value))) for heading, value in facts.items() if value]
    yield Table(title=safe_name(info["folder"]), headings=("fact", "value"), rows=rows)
    parts = [
        (part["part"], sized(part["bytes"]), f"{part['tensors']:,}", ", ".join(part["dtypes"]))
        for part in info["parts"]
    ]
    yield Table(title="Parts", headings=("part", "size", "tensors", "stored as"), rows=parts)
    if info["gpus"]:
        columns = ("gpu", "published_gpus", "minimum_gpus", "vllm_gpus")
        served = [[str(cell[column] or "-") for column in columns] for cell in info["gpus"]]
        headings = ("GPU", "TensorRT-LLM, as published", "TensorRT-LLM, that fit", "vLLM, that fit")
        yield Table(title="GPUs of one instance", headings=headings, rows=served, is_grid=True)
