"""Facts from the files of a checkpoint: which model it is, its figures, and how it is quantized."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from deepseek_triton_build.check.codes import UNKNOWN_ARCHITECTURE
from deepseek_triton_build.check.documents import read_json
from deepseek_triton_build.check.finding import Finding
from deepseek_triton_build.check.weights import INDEX
from deepseek_triton_build.data.catalog import Architecture, Precision, architectures, cut_architecture
from deepseek_triton_build.render.hf_quant_config import NAME as QUANT_CONFIG
from deepseek_triton_build.text import short_repr

LAYERS_CONFIG = "quant_cfg.json"
"""The file that says how each layer is quantized, beside an hf_quant_config.json with MIXED_PRECISION."""
_TOOLS = ("modelopt", "compressed-tensors")
"""Values of quant_method that name a tool and not a precision, which another file gives."""
_PRECISIONS: Mapping[str, Precision] = {
    "FP8_BLOCK_SCALES": "fp8",
    "fp8": "fp8",
    "fp8_pb_wo": "fp8",
    "NVFP4": "fp4",
    "W4A8_AWQ": "w4a8",
    "MIXED_PRECISION": "w4a8",
    "w4afp8": "w4a8",
    "W4A16_AWQ": "w4a16",
    "W4A16": "w4a16",
}
"""quant_algo of hf_quant_config.json, or quant_method in config.json's quantization_config -> the precision. These are
the values of DeepSeek's checkpoints and of those made from them."""


_FIGURES: Mapping[str, str] = {
    "num_hidden_layers": "num_layers",
    "first_k_dense_replace": "num_dense_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "moe_intermediate_size": "moe_intermediate_size",
    "n_routed_experts": "num_routed_experts",
    "n_shared_experts": "num_shared_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "num_attention_heads": "num_heads",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "vocab_size": "vocab_size",
    "index_n_heads": "index_num_heads",
    "index_head_dim": "index_head_dim",
    "index_topk": "index_topk",
    "model_type": "model_type",
}
"""Key of config.json -> attribute of Architecture. max_position_embeddings may be lowered by hand."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFacts:
    folder: Path
    label: str
    config: Mapping[str, Any]
    """The content of config.json; empty when it can't be read."""
    hf_quant_config: Mapping[str, Any] | None
    """The content of hf_quant_config.json; None without one."""
    class_name: str | None
    architecture: Architecture | None
    """The architecture of that class whose figures are the nearest; None for another class."""
    quantization: str | None
    """The quantization as the checkpoint spells it; None without one."""
    quantization_file: str
    kv_cache_quant_algo: str | None
    is_whole: bool
    """Whether its files could be read and named a known architecture."""

    @property
    def is_quantization_known(self) -> bool:
        """Whether it is known how the weights are quantized: in one of our precisions, in another, or not at all."""
        return self.is_whole and self.architecture is not None and self.quantization not in _TOOLS

    @property
    def other_figures(self) -> Mapping[str, tuple[Any, Any]]:
        """Key of config.json -> its value and the architecture's, where the two differ."""
        return {} if self.architecture is None else _differing(self.config, self.architecture)

    @cached_property
    def cut(self) -> Architecture | None:
        """The shape of a checkpoint that was cut from the architecture: config.json and the index agree that it has
        the first layers alone, or the first experts. None for any other."""
        cut = cut_architecture(self.config, self.architecture) if self.architecture and self.other_figures else None
        is_cut = cut is not None and not _differing(self.config, cut) and _holds_no_more(self.folder, cut)
        return cut if is_cut else None

    @property
    def has_16_bits(self) -> bool:
        """Whether no file says that the weights are quantized: they are bfloat16, as far as is known."""
        return self.is_quantization_known and self.quantization is None

    @property
    def precision(self) -> Precision | None:
        return _PRECISIONS.get(self.quantization or "")


def read_facts(folder: Path, label: str, *, for_vllm: bool = False) -> tuple[CheckpointFacts, list[Finding]]:
    """Return what config.json and hf_quant_config.json of `folder` say, and what is wrong with them.

    :param for_vllm: whether vLLM reads them, for which config.json comes first.
    """
    config, findings = read_json(folder / "config.json", f"{label}/config.json")
    quant: dict[str, Any] | None = None
    if os.path.exists(folder / QUANT_CONFIG):
        quant, found = read_json(folder / QUANT_CONFIG, f"{label}/{QUANT_CONFIG}")
        findings += found
    class_name = _class_name(config or {})
    alike = [a for a in architectures().values() if a.class_name == class_name]
    architecture = min(alike, key=lambda a: len(_differing(config or {}, a)), default=None)
    if config is not None and architecture is None:
        known = " or ".join(a.class_name for a in architectures().values())
        message = f"expected architectures: {known}, found {short_repr(class_name)}"
        fix = "point model at the right checkpoint; for another model the rules are not checked"
        findings.append(UNKNOWN_ARCHITECTURE.finding(message, fix, file=f"{label}/config.json"))
    in_config, in_quant = _section(config, "quantization_config"), _section(quant, "quantization")
    by_config = in_config.get("quant_algo") or ("W4A16" if _is_w4a16(in_config) else in_config.get("quant_method"))
    is_in_quant = bool(in_quant.get("quant_algo")) and not (for_vllm and by_config)
    algo = in_quant["quant_algo"] if is_in_quant else by_config
    kv_algo = in_quant.get("kv_cache_quant_algo")
    if algo == "MIXED_PRECISION" and kv_algo is None and os.path.exists(folder / LAYERS_CONFIG):
        layers, found = read_json(folder / LAYERS_CONFIG, f"{label}/{LAYERS_CONFIG}")
        findings += found
        kv_algo = (layers or {}).get("kv_cache_quant_algo")
    facts = CheckpointFacts(
        folder=folder,
        label=label,
        config=config or {},
        hf_quant_config=quant,
        class_name=class_name,
        architecture=architecture,
        quantization=algo if isinstance(algo, str) else None,
        quantization_file=f"{label}/{QUANT_CONFIG if is_in_quant else 'config.json'}",
        kv_cache_quant_algo=kv_algo if isinstance(kv_algo, str) else None,
        is_whole=not findings,
    )
    return facts, findings


def _is_w4a16(section: Mapping[str, Any]) -> bool:
    """Tell whether quantization_config names 4-bit integer weights and 16-bit activations, as AWQ, GPTQ and
    compressed-tensors write it."""
    if section.get("quant_method") in ("awq", "gptq"):
        return bool(section.get("bits", section.get("w_bit")) == 4)
    if section.get("quant_method") != "compressed-tensors":
        return False
    groups = [_section(_section(section, "config_groups"), name) for name in _section(section, "config_groups")]
    weights = [_section(group, "weights") for group in groups]
    is_int4 = all((each.get("num_bits"), each.get("type")) == (4, "int") for each in weights)
    return bool(groups) and is_int4 and not any(group.get("input_activations") for group in groups)


def _differing(config: Mapping[str, Any], architecture: Architecture) -> Mapping[str, tuple[Any, Any]]:
    wanted = {key: getattr(architecture, name) for key, name in _FIGURES.items() if key in config}
    return {key: (config[key], value) for key, value in wanted.items() if config[key] != value}


_NUMBERED = re.compile(r"model\.layers\.(\d+)\.(?:mlp\.experts\.(\d+)\.)?")


def _holds_no_more(folder: Path, cut: Architecture) -> bool:
    """Tell whether the index names tensors of layers, and none of a layer or an expert that `cut` doesn't have."""
    index, _ = read_json(folder / INDEX, INDEX)
    found = [match.groups() for name in _section(index, "weight_map") if (match := _NUMBERED.match(name))]
    most = cut.num_layers + cut.num_mtp_layers
    within = (int(layer) < most and int(expert or 0) < cut.num_routed_experts for layer, expert in found)
    return bool(found) and all(within)


def _class_name(config: Mapping[str, Any]) -> str | None:
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def _section(document: Mapping[str, Any] | None, key: str) -> Mapping[str, Any]:
    section = (document or {}).get(key)
    return section if isinstance(section, dict) else {}
