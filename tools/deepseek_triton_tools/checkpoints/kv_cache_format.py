"""Switches the KV cache of a checkpoint to FP8: TensorRT-LLM reads it in hf_quant_config.json."""

from __future__ import annotations

import json
from pathlib import Path

from deepseek_triton_build import QuantConfigChange, quant_config_change, write_quant_config
from deepseek_triton_tools.checkpoints.companion_files import QUANT_CFG
from deepseek_triton_tools.host.whole_file import whole_file
from deepseek_triton_tools.tool_errors import CheckpointError


def switch_to_fp8(folder: Path) -> QuantConfigChange:
    """Change the files in the checkpoint's folder, and return the change of hf_quant_config.json.

    :raises UnusableCheckpointError: for a checkpoint whose weights are not quantized, or whose files can't be read.
    :raises CheckpointError: when quant_cfg.json is no JSON object.
    """
    change = quant_config_change(folder, "FP8")
    by_layer = folder / QUANT_CFG
    if by_layer.is_file():  # TensorRT-LLM refuses mixed precision whose two files differ in this
        _switch(by_layer)
    write_quant_config(change)
    return change


def _switch(path: Path) -> None:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: expected JSON: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(document).__name__}")
    with whole_file(path) as file:
        json.dump(document | {"kv_cache_quant_algo": "FP8"}, file, indent=2)
        file.write("\n")
