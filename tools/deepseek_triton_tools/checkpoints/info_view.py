"""Shows what is known of checkpoints, as tables and as the JSON document "deepseek-triton/checkpoint/1"."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from deepseek_triton_build.text import safe_name
from deepseek_triton_tools.checkpoints.info import CheckpointInfo, quantization
from deepseek_triton_tools.host.units import sized
from deepseek_triton_tools.plans.support_tables import Support, support_of
from deepseek_triton_tools.terminal.tables import Table

SCHEMA = "deepseek-triton/checkpoint/1"


def document(checkpoints: Iterable[CheckpointInfo]) -> dict[str, Any]:
    return {"schema": SCHEMA, "checkpoints": [_entry(info) for info in checkpoints]}


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
    said = info.facts.config.get("num_nextn_predict_layers", 0)
    is_missing = isinstance(said, int) and said > info.num_mtp_layers
    return f"{info.num_mtp_layers or 'no'} MTP layer" + (f", though config.json says {said}" if is_missing else "")


def _variant(info: CheckpointInfo) -> str:
    names = [variant.name for variant in info.variants]
    if not names:
        return "none that is known here"
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} or {names[-1]}, which share this shape"


def _entry(info: CheckpointInfo) -> dict[str, Any]:
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
