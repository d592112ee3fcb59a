"""hf_quant_config.json of a checkpoint: which quantization TensorRT-LLM takes its weights and KV cache to have."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from deepseek_triton_build.catalog import architectures
from deepseek_triton_build.checkpoint_defaults import read_json_object
from deepseek_triton_build.errors import CheckpointError

NAME = "hf_quant_config.json"
FP8_BLOCK_SCALES = "FP8_BLOCK_SCALES"
"""DeepSeek's own FP8 weights (TensorRT-LLM examples/models/core/deepseek_v3/README.md, FP8 KV Cache and MLA)."""

KvAlgo = Literal["FP8"]


@dataclass(frozen=True, kw_only=True)
class Change:
    """What is to become of one checkpoint's hf_quant_config.json."""

    path: Path
    before: Mapping[str, Any] | None
    """None: there is no such file yet."""
    after: Mapping[str, Any]

    @property
    def is_needed(self) -> bool:
        return self.before != self.after

    @property
    def summary(self) -> str:
        """One line, for people."""
        if not self.is_needed:
            return f"{self.path}: is so already"
        quantization = self.after["quantization"]
        values = (
            f"{quantization['quant_algo']}, KV cache {quantization['kv_cache_quant_algo'] or 'as the engine is told'}"
        )
        return f"{self.path}: {'changed to' if self.before is not None else 'written with'} {values}"


def quant_config_change(checkpoint: Path, kv_cache: KvAlgo | None) -> Change:
    """The change that makes the checkpoint in the folder `checkpoint` say `kv_cache`; writes nothing.

    DeepSeek's FP8 weights are called FP8_BLOCK_SCALES besides. Of a checkpoint quantized otherwise (NVFP4, W4AFP8) only
    the KV cache is changed. Every other key stays.

    :param kv_cache: None leaves the KV cache to kv_cache_config.dtype.
    :raises CheckpointError: when it is no DeepSeek checkpoint, or a file can't be read.
    """
    model = read_json_object(checkpoint / "config.json")
    _require_deepseek(checkpoint, model)
    path = checkpoint / NAME
    before = read_json_object(path) if path.exists() else None
    quantization = (before or {}).get("quantization", {})
    if not isinstance(quantization, dict):
        raise CheckpointError(
            f"{path}: expected an object under 'quantization', found {quantization!r}; remove the file"
        )
    algo = quantization.get("quant_algo")
    if algo is None:
        algo = _fp8_blocks(checkpoint, model)
    values = {**quantization, "quant_algo": algo, "kv_cache_quant_algo": kv_cache}
    return Change(path=path, before=before, after={**(before or {}), "quantization": values})


def apply(change: Change) -> Path | None:
    """Carry `change` out: all of it or nothing.

    :returns: where the file as it was is kept: hf_quant_config.json.bak, or .bak.1 and so on where there is one
        already; None when there was nothing to keep.
    :raises CheckpointError: when the folder can't be written.
    """
    if not change.is_needed:
        return None
    try:
        return _replace(change.path, json.dumps(change.after, indent=4) + "\n", keep=change.before is not None)
    except OSError as error:
        raise CheckpointError(
            f"{change.path}: can't be written: {error.strerror}; the checkpoint is as it was"
        ) from error


def _require_deepseek(checkpoint: Path, model: Mapping[str, Any]) -> None:
    known = {architecture.class_name for architecture in architectures().values()}
    found = model.get("architectures") or []
    if not isinstance(found, list) or not known.intersection(map(str, found)):
        raise CheckpointError(
            f"{checkpoint / 'config.json'}: expected the architecture {' or '.join(sorted(known))}, found {found!r}; "
            "name the folder of a DeepSeek checkpoint"
        )


def _fp8_blocks(checkpoint: Path, model: Mapping[str, Any]) -> str:
    """FP8_BLOCK_SCALES, once config.json says that these are DeepSeek's FP8 weights."""
    own = model.get("quantization_config")
    method = own.get("quant_method") if isinstance(own, dict) else None
    if method != "fp8":
        raise CheckpointError(
            f"{checkpoint / 'config.json'}: expected quant_method fp8 (DeepSeek's FP8 weights), found {method!r}; "
            f"a checkpoint quantized otherwise brings its own {NAME}"
        )
    return FP8_BLOCK_SCALES


def _replace(path: Path, text: str, *, keep: bool) -> Path | None:
    """`text` in the place of `path`, whole or not at all, with the permissions of what was there; the backup's path."""
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    backup = None
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(scratch, path.stat().st_mode & 0o777 if keep else 0o644)
        backup = _back_up(path) if keep else None
        os.replace(scratch, path)
    except OSError:
        os.unlink(scratch)
        if backup is not None:
            backup.unlink()
        raise
    return backup


def _back_up(path: Path) -> Path:
    """A copy of `path` under the first free name."""
    content = path.read_bytes()
    for number in itertools.count():
        backup = path.with_name(f"{path.name}.bak.{number}" if number else f"{path.name}.bak")
        if not os.path.lexists(backup):
            break
    with open(backup, "xb") as file:
        file.write(content)
    return backup
