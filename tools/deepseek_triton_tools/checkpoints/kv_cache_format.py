"""Switches the KV cache of a checkpoint to FP8: TensorRT-LLM reads it in hf_quant_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deepseek_triton_tools.checkpoints.companion_files import HF_QUANT_CONFIG, QUANT_CFG
from deepseek_triton_tools.checkpoints.conversion_plan import hf_quant_config
from deepseek_triton_tools.checkpoints.stored_tensors import read_config
from deepseek_triton_tools.host.whole_file import whole_file
from deepseek_triton_tools.tool_errors import CheckpointError

_KEY = "kv_cache_quant_algo"


def switch_to_fp8(folder: Path) -> Path:
    """Write hf_quant_config.json into the checkpoint's folder, or change the one that is there. Return its path.

    :raises CheckpointError: for a checkpoint whose weights are not quantized.
    """
    path = folder / HF_QUANT_CONFIG
    if path.is_file():
        document = _read(path)
        if not isinstance(document.get("quantization"), dict):
            raise CheckpointError(f"{path}: expected an object `quantization`, found none")
        document["quantization"][_KEY] = "FP8"
    elif read_config(folder).get("quantization_config", {}).get("quant_method") == "fp8":
        document = hf_quant_config("FP8_BLOCK_SCALES", "FP8")
    else:
        raise CheckpointError(
            f"{folder}: expected a checkpoint in FP8, or one with {HF_QUANT_CONFIG}, found neither; for others set "
            "kv_cache_config.dtype: fp8 in model.yaml (build --kv-cache-dtype fp8)"
        )
    by_layer = folder / QUANT_CFG
    if by_layer.is_file():  # TensorRT-LLM takes the KV cache of mixed precision from here
        _write(by_layer, _read(by_layer) | {_KEY: "FP8"})
    _write(path, document)
    return path


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: expected JSON: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(document).__name__}")
    return document


def _write(path: Path, document: dict[str, Any]) -> None:
    with whole_file(path) as file:
        json.dump(document, file, indent=2)
        file.write("\n")
