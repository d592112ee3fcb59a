"""hf_quant_config.json of a checkpoint, which tells TensorRT-LLM how its weights and KV cache are quantized."""

from __future__ import annotations

import itertools
import json
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from deepseek_triton_build.build_errors import UnusableCheckpointError
from deepseek_triton_build.data.catalog import architectures, variants
from deepseek_triton_build.planning.plan_request import read_json_object
from deepseek_triton_build.text import short_repr

NAME = "hf_quant_config.json"
FP8_BLOCK_SCALES = "FP8_BLOCK_SCALES"
"""DeepSeek's own FP8 weights (TensorRT-LLM examples/models/core/deepseek_v3/README.md, FP8 KV Cache and MLA)."""

KvAlgo = Literal["FP8"]


@dataclass(frozen=True, kw_only=True)
class QuantConfigChange:
    """The change of one checkpoint's hf_quant_config.json."""

    path: Path
    before: Mapping[str, Any] | None
    """Content of the file now; None when there is no such file yet."""
    after: Mapping[str, Any]

    @property
    def is_needed(self) -> bool:
        return self.before != self.after

    @property
    def summary(self) -> str:
        """The change in one line, for people."""
        if not self.is_needed:
            return f"{self.path}: needs no change"
        quantization = self.after["quantization"]
        values = (
            f"{quantization['quant_algo']}, KV cache {quantization['kv_cache_quant_algo'] or 'as the engine is told'}"
        )
        return f"{self.path}: {'changed to' if self.before is not None else 'written with'} {values}"


def quant_config_change(checkpoint: Path, kv_cache: KvAlgo | None) -> QuantConfigChange:
    """Return the change that gives the checkpoint in the folder `checkpoint` the KV cache `kv_cache`. Write nothing.

    The change also gives DeepSeek's own FP8 weights their name, FP8_BLOCK_SCALES. In a checkpoint quantized otherwise
    (NVFP4, W4AFP8) only the KV cache is changed. Every other key stays.

    :param kv_cache: None leaves the KV cache to kv_cache_config.dtype.
    :raises UnusableCheckpointError: when it is no DeepSeek checkpoint, or a file can't be read.
    """
    model = read_json_object(checkpoint / "config.json")
    _require_deepseek(checkpoint, model)
    path = checkpoint / NAME
    before = read_json_object(path) if path.exists() else None
    quantization = (before or {}).get("quantization", {})
    if not isinstance(quantization, dict):
        raise UnusableCheckpointError(
            f"{path}: expected an object under 'quantization', found {short_repr(quantization)}; remove the file"
        )
    algo = quantization.get("quant_algo")
    if algo is None:
        algo = _fp8_blocks(checkpoint, model)
    elif algo not in _known_algos():
        raise UnusableCheckpointError(
            f"{path}: expected quant_algo to be one of {', '.join(_known_algos())}, found {short_repr(algo)}; "
            "download it again, or remove it where the weights are DeepSeek's own FP8"
        )
    values = {**quantization, "quant_algo": algo, "kv_cache_quant_algo": kv_cache}
    return QuantConfigChange(path=path, before=before, after={**(before or {}), "quantization": values})


def write_quant_config(change: QuantConfigChange) -> Path | None:
    """Carry out `change`: all of it or nothing.

    :returns: the copy of the file as it was: hf_quant_config.json.bak, or .bak.1 and so on when earlier copies are
        there already. None when there was no file.
    :raises UnusableCheckpointError: when the folder can't be written.
    """
    if not change.is_needed:
        return None
    try:
        text = json.dumps(change.after, indent=4, allow_nan=False) + "\n"
        return _replace(change.path, text, keep=change.before is not None)
    except ValueError as error:
        raise UnusableCheckpointError(
            f"{change.path}: holds a number that JSON can't express; download it again"
        ) from error
    except OSError as error:
        raise UnusableCheckpointError(
            f"{change.path}: can't be written: {error.strerror}; the checkpoint is as it was"
        ) from error


def _known_algos() -> list[str]:
    """Return the quantizations of the known checkpoints, and W4A8_AWQ, the name of W4AFP8 in TensorRT-LLM's guide."""
    known = {
        checkpoint.quant_algo
        for variant in variants().values()
        for checkpoint in variant.checkpoints.values()
        if checkpoint.precision != "w4a16"  # vLLM's, which reads no hf_quant_config.json of it
    }
    return sorted({*filter(None, known), FP8_BLOCK_SCALES, "W4A8_AWQ"})


def _require_deepseek(checkpoint: Path, model: Mapping[str, Any]) -> None:
    known = {architecture.class_name for architecture in architectures().values()}
    found = model.get("architectures") or []
    if not isinstance(found, list) or not known.intersection(map(str, found)):
        raise UnusableCheckpointError(
            f"{checkpoint / 'config.json'}: expected the architecture {' or '.join(sorted(known))}, "
            f"found {short_repr(found)}; name the folder of a DeepSeek checkpoint"
        )


def _fp8_blocks(checkpoint: Path, model: Mapping[str, Any]) -> str:
    """Return FP8_BLOCK_SCALES when config.json says that these are DeepSeek's FP8 weights.

    :raises UnusableCheckpointError: when it says anything else.
    """
    own = model.get("quantization_config")
    method = own.get("quant_method") if isinstance(own, dict) else None
    if method != "fp8":
        raise UnusableCheckpointError(
            f"{checkpoint / 'config.json'}: expected quant_method fp8 (DeepSeek's FP8 weights), found "
            f"{short_repr(method)}; a checkpoint quantized otherwise comes with its own {NAME}"
        )
    return FP8_BLOCK_SCALES


def _replace(path: Path, text: str, *, keep: bool) -> Path | None:
    """Put `text` in the place of `path`, whole or not at all, with the same permissions. Return the backup's path."""
    mode = stat.S_IMODE(path.stat().st_mode) if keep else 0o644
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    scratch, backup = Path(name), None
    try:
        _fill(handle, text.encode(), mode)
        backup = _back_up(path, mode) if keep else None
        os.replace(scratch, path)
    except BaseException:
        if scratch.exists():  # else it is in place, and only the backup holds the file as it was
            scratch.unlink()
            if backup is not None:
                backup.unlink()
        raise
    return backup


def _back_up(path: Path, mode: int) -> Path:
    """Copy `path` to the first free name, and return that name."""
    content = path.read_bytes()
    names = (f"{path.name}.bak.{number}" if number else f"{path.name}.bak" for number in itertools.count())
    backup = next(path.with_name(name) for name in names if not os.path.lexists(path.with_name(name)))
    handle = os.open(backup, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        _fill(handle, content, mode)
    except BaseException:
        backup.unlink()
        raise
    return backup


def _fill(handle: int, content: bytes, mode: int) -> None:
    """Write `content` and wait until it is on the disk, so that no crash leaves the new name with an empty file."""
    with open(handle, "wb") as file:
        os.fchmod(handle, mode)
        file.write(content)
        file.flush()
        os.fsync(handle)
