"""All checks of a checkpoint's folder: its configuration, its quantization, its tokenizer and its weights."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deepseek_triton_build.check.checkpoint_facts import LAYERS_CONFIG, CheckpointFacts, read_facts
from deepseek_triton_build.check.codes import (
    NO_MTP_LAYER,
    NO_TOKENIZER,
    STRAY_SHARD,
    WRONG_QUANT_CONFIG,
    WRONG_TOKENIZER,
)
from deepseek_triton_build.check.documents import read_json
from deepseek_triton_build.check.finding import Finding
from deepseek_triton_build.check.weights import check_weights
from deepseek_triton_build.render.hf_quant_config import NAME as QUANT_CONFIG
from deepseek_triton_build.text import nearest_name, safe_name, short_repr

_TOKENIZER = "tokenizer.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_DOWNLOAD = "download it again"
_QUANT_KEYS = (
    "quant_algo",
    "kv_cache_quant_algo",
    "group_size",
    "exclude_modules",
    "quantized_layers",
    "has_zero_point",
    "pre_quant_scale",
)
"""Keys that load_modelopt_quant_config of TensorRT-LLM reads, and those of its quant_cfg.json."""
_ALGOS = (
    "FP8_BLOCK_SCALES",
    "NVFP4",
    "MIXED_PRECISION",
    "W4A8_AWQ",
    "fp8_pb_wo",
    *("W8A16", "W4A16", "W4A16_AWQ", "W8A16_GPTQ", "W4A16_GPTQ", "W8A8_SQ_PER_CHANNEL", "W8A8_SQ_PER_TENSOR_PLUGIN"),
    *("W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN", "W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN", "W4A8_QSERVE_PER_GROUP"),
    *("W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN", "W4A8_QSERVE_PER_CHANNEL", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "INT8"),
    *("W4A8_NVFP4_FP8", "W4A8_MXFP4_FP8", "W4A8_MXFP4_MXFP8", "W4A16_MXFP4", "NO_QUANT"),
)
"""QuantAlgo of TensorRT-LLM 1.2 (tensorrt_llm/quantization/mode.py), DeepSeek's own first, and modelopt's fp8_pb_wo."""
_KV_ALGOS = ("FP8",)
"""Types of the KV cache that MLA has kernels for (TensorRT-LLM examples/models/core/deepseek_v3/README.md)."""
_GROUP_SIZES = {"NVFP4": 16}
_FP8_BLOCK = [128, 128]


def check_checkpoint(
    folder: Path, label: str, tokenizer: Path | None, *, for_vllm: bool = False
) -> tuple[CheckpointFacts, list[Finding]]:
    """Return what the files of a checkpoint say, and what is wrong with them.

    :param tokenizer: the folder of the tokenizer where that is another one; None when it is not to be looked at.
    :param for_vllm: whether vLLM reads it. It goes by the index and by config.json, so it ignores a shard that is not
        in the index, and hf_quant_config.json if config.json says how the weights are quantized.
    """
    facts, findings = read_facts(folder, label, for_vllm=for_vllm)
    findings += _block_problems(facts)
    findings += [] if for_vllm else _quantization_problems(facts)
    if tokenizer is not None:
        where = label if tokenizer == folder else str(tokenizer)
        findings += _tokenizer_problems(tokenizer, where, facts.config)
    found = check_weights(folder, label)
    return facts, [*findings, *(one for one in found if not (for_vllm and one.code == STRAY_SHARD.code))]


def mtp_problems(facts: CheckpointFacts, num_draft_tokens: int) -> Iterator[Finding]:
    """Find a checkpoint without the MTP layer that its settings ask for."""
    layers = facts.config.get("num_nextn_predict_layers")
    if not num_draft_tokens or not facts.config or (isinstance(layers, int) and layers > 0):
        return
    found = "none" if layers is None else short_repr(layers)
    message = f"expected num_nextn_predict_layers: 1, because speculative_config asks for MTP, found {found}"
    fix = "download config.json again, or remove speculative_config"
    yield NO_MTP_LAYER.finding(message, fix, file=f"{facts.label}/config.json", key="num_nextn_predict_layers")


def _block_problems(facts: CheckpointFacts) -> Iterator[Finding]:
    own = facts.config.get("quantization_config")
    own = own if isinstance(own, dict) else {}
    block = own.get("weight_block_size", _FP8_BLOCK)
    if own.get("quant_method") == "fp8" and block != _FP8_BLOCK:
        message = f"expected weight_block_size {_FP8_BLOCK}, found {short_repr(block)}"
        yield WRONG_QUANT_CONFIG.finding(message, _DOWNLOAD, file=f"{facts.label}/config.json")


def _quantization_problems(facts: CheckpointFacts) -> Iterator[Finding]:
    if facts.hf_quant_config is None:
        return
    for message, fix in (*_quant_config_problems(facts.hf_quant_config), *_layers_problems(facts)):
        yield WRONG_QUANT_CONFIG.finding(message, fix, file=f"{facts.label}/{QUANT_CONFIG}")


def _layers_problems(facts: CheckpointFacts) -> Iterator[tuple[str, str]]:
    section = (facts.hf_quant_config or {}).get("quantization")
    if not isinstance(section, dict) or section.get("quant_algo") != "MIXED_PRECISION" or "quantized_layers" in section:
        return
    layers, _ = read_json(facts.folder / LAYERS_CONFIG, LAYERS_CONFIG)
    if not isinstance((layers or {}).get("quantized_layers"), dict):
        message = f"MIXED_PRECISION: expected {LAYERS_CONFIG} with quantized_layers beside it, found none"
        yield message, f"copy {LAYERS_CONFIG} from where the weights were quantized"


def _quant_config_problems(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with hf_quant_config.json, and how to mend it."""
    section = document.get("quantization")
    if not isinstance(section, dict):
        near = next((key for key in document if nearest_name(key, ["quantization"])), None)
        found = safe_name(near) if near is not None else "none" if section is None else short_repr(section)
        yield f"expected an object under quantization, found {found}", "write quantization, with quant_algo in it"
        return
    for key in section:
        if key not in _QUANT_KEYS:
            meant = nearest_name(key, _QUANT_KEYS)
            fix = f"did you mean {meant}?" if meant else "remove it"
            yield f"{safe_name(key)} is not a key that TensorRT-LLM reads, so it is ignored", fix
    algo, kv_algo, group = (section.get(key) for key in ("quant_algo", "kv_cache_quant_algo", "group_size"))
    if algo not in _ALGOS:
        likely = nearest_name(algo, _ALGOS) if algo is not None else None
        fix = f"did you mean {likely}?" if likely else f"write one of {', '.join(_ALGOS[:4])}, as the weights are"
        yield f"quant_algo: expected a quantization that TensorRT-LLM knows, found {short_repr(algo)}", fix
    if kv_algo is not None and kv_algo not in _KV_ALGOS:
        fix = "write FP8, or null for 16 bits"
        yield f"kv_cache_quant_algo: expected FP8 or null, found {short_repr(kv_algo)}", fix
    size = _GROUP_SIZES.get(algo) if isinstance(algo, str) else None
    if size is not None and group is not None and group != size:
        yield f"group_size: expected {size} for {algo}, found {short_repr(group)}", f"write {size}"


def _tokenizer_problems(folder: Path, label: str, config: Mapping[str, Any]) -> Iterator[Finding]:
    missing = [name for name in (_TOKENIZER, _TOKENIZER_CONFIG) if not os.path.exists(folder / name)]
    for name in missing:
        message = f"{name} is missing, so the engine has no tokenizer"
        yield NO_TOKENIZER.finding(message, _DOWNLOAD, file=f"{label}/{name}")
    if missing:
        return
    file = f"{label}/{_TOKENIZER}"
    tokenizer, findings = read_json(folder / _TOKENIZER, file)
    names, found = read_json(folder / _TOKENIZER_CONFIG, f"{label}/{_TOKENIZER_CONFIG}")
    yield from (*findings, *found)
    if tokenizer is None or names is None:
        return
    ids = _token_ids(tokenizer)
    most, highest = config.get("vocab_size"), max(ids.values(), default=-1)
    fix = "put the model's own tokenizer there; download it again"
    if isinstance(most, int) and highest >= most:
        message = f"it has token {highest:,}, but config.json gives a vocabulary of {most:,}"
        yield WRONG_TOKENIZER.finding(message, fix, file=file)
    for kind in ("bos", "eos"):
        token, wanted = _token_name(names.get(f"{kind}_token")), config.get(f"{kind}_token_id")
        if token is not None and isinstance(wanted, int) and ids.get(token) != wanted:
            found_id = short_repr(ids.get(token))
            message = f"its {kind}_token {safe_name(token)} is token {found_id}, but config.json says {wanted}"
            yield WRONG_TOKENIZER.finding(message, fix, file=file)
            return


def _token_ids(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Return token -> id, as far as tokenizer.json has it in the usual form."""
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict):
            ids[str(entry.get("content"))] = entry.get("id")
    return {name: number for name, number in ids.items() if isinstance(number, int)}


def _token_name(value: Any) -> str | None:
    """Return the text of a special token, which tokenizer_config.json gives alone or in an object."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None
