"""The names of DeepSeek's own inference format, which its inference/convert.py makes of a checkpoint.

A folder has N files, model0-mpN.safetensors and so on, one for each GPU. Most weights are split over them, the routed
experts are dealt to them, and the rest is in each. The MTP layer is left out. (deepseek-ai/DeepSeek-V3,
inference/convert.py of commit 07de76f5; DeepSeek-V3.2-Exp adds the indexer, whose names stay)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from deepseek_triton_build.text import first_names

_FILE = re.compile(r"model(\d{1,6})-mp(\d{1,6})\.safetensors", re.ASCII)
_ROOT = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_IN_LAYER = {"attn": "self_attn", "ffn": "mlp", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_MODULES = {
    "wq": "q_proj",
    "wq_a": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "wq_b": "q_b_proj",
    "wkv_a": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "wkv_b": "kv_b_proj",
    "wo": "o_proj",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
}
"""Name of a module in attention or an MLP -> its name on Hugging Face. A module without an entry has the same one."""
_SPLIT = {**dict.fromkeys(("embed", "head", "wq", "wq_b", "wkv_b", "w1", "w3"), 0), "wo": 1, "w2": 1}
"""Name of a module -> the dimension in which its weight and its scales are split. The others are in each file."""


@dataclass(frozen=True)
class TensorPlace:
    """The tensor that a tensor of one file is a part of."""

    name: str
    """Its name on Hugging Face."""
    dimension: int | None
    """The dimension in which it is split over the files; None: it is whole."""


def place_of(name: str) -> TensorPlace:
    """Return what the tensor `name` of this format is."""
    *path, kind = name.split(".")
    if path and path[0] in _ROOT:
        return TensorPlace(f"{_ROOT[path[0]]}.{kind}", _SPLIT.get(path[0]))
    kind = {"scale": "weight_scale_inv"}.get(kind, kind)
    if len(path) < 3 or path[0] != "layers":
        return TensorPlace(f"{name.rpartition('.')[0]}.{kind}", None)
    layer, block, *modules = path[1:]
    dimension = None
    if "indexer" not in modules and modules:
        is_expert = modules[0] == "experts"
        dimension = None if is_expert else _SPLIT.get(modules[-1])
        kind = "e_score_correction_bias" if modules == ["gate"] and kind == "bias" else kind
        modules[-1] = _MODULES.get(modules[-1], modules[-1])
    return TensorPlace(".".join(["model.layers", layer, _IN_LAYER.get(block, block), *modules, kind]), dimension)


def num_parts(names: Sequence[str]) -> int:
    """Return N for the files of a folder in this format; 0 for those of another one."""
    matches = [_FILE.fullmatch(name) for name in names]
    numbers = [int(match[2]) for match in matches if match]
    return max(numbers) if numbers and all(matches) else 0


def wrong_files(names: Sequence[str]) -> str | None:
    """Say which files of the format are missing, or belong to another conversion."""
    number = num_parts(names)
    numbers = {name: int(match[1]) for name in names if (match := _FILE.fullmatch(name))}
    present = {name for name, part in numbers.items() if part < number and name == _file_name(part, number)}
    if others := set(names) - present:
        return f"expected the files of one conversion, found {first_names(others)} beside those for {number} GPUs"
    # There may be a million of them, by one name.
    if len(present) < number:
        missing = (name for part in range(number) if (name := _file_name(part, number)) not in present)
        return f"{number - len(present):,} of {number:,} files are missing: {', '.join(islice(missing, 3))}"
    return None


def _file_name(part: int, number: int) -> str:
    return f"model{part}-mp{number}.safetensors"


def is_inference_config(config: Mapping[str, Any]) -> bool:
    """Tell whether a config.json is one of this format, whose keys have other names."""
    return "n_layers" in config and "num_hidden_layers" not in config
