"""hf_quant_config.json of a checkpoint, which tells TensorRT-LLM how its weights and KV cache are quantized."""

import itertools
import json
import os
import stat
import time
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
        values = f"{quantization['quant_algo']}, "
        values += f"KV cache {quantization['kv_cache_quant_algo'] or 'as the engine is told'}"
        return f"{self.path}: {'changed to' if self.before is not None else 'written with'} {values}"


def quant_config_change(checkpoint: Path, kv_cache: KvAlgo | None) -> QuantConfigChange:
    """Return the change that gives the checkpoint in the folder `checkpoint` the KV cache `kv_cache`. Write nothing.

    The change also gives DeepSeek's own FP8 weights their name, FP8_BLOCK_SCALES. In a checkpoint quantized otherwise
    (NVFP4, W4AFP8) only the KV cache is changed. Every other key stays.

    :param kv_cache: None leaves the KV cache to kv_cache_config.dtype.
    :raises UnusableCheckpointError: when it is no DeepSeek checkpoint, or a file can't be read.
    """
    model = read_json_object(checkpoint / "config.json")
    # The engines themselves choose the type of V4's KV cache.
    known = {architecture.class_name for architecture in architectures().values() if architecture.csa is None}
    names = model.get("architectures") or []
    if not isinstance(names, list) or not known.intersection(map(str, names)):
        raise UnusableCheckpointError(
            f"{checkpoint / 'config.json'}: expected the architecture {' or '.join(sorted(known))}, "
            f"found {short_repr(names)}; name the folder of a DeepSeek checkpoint"
        )
    path = checkpoint / NAME
    before = read_json_object(path) if path.exists() else None
    quantization = (before or {}).get("quantization", {})
    if not isinstance(quantization, dict):
        raise UnusableCheckpointError(
            f"{path}: expected an object under 'quantization', found {short_repr(quantization)}; remove the file"
        )
    algo = quantization.get("quant_algo")
    if algo is None:
        own = model.get("quantization_config")
        method = own.get("quant_method") if isinstance(own, dict) else None
        if method != "fp8":
            raise UnusableCheckpointError(
                f"{checkpoint / 'config.json'}: expected quant_method fp8 (DeepSeek's FP8 weights), found "
                f"{short_repr(method)}; a checkpoint quantized otherwise comes with its own {NAME}"
            )
        algo = FP8_BLOCK_SCALES
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
        return _replace(change.path, text.encode(), keep=change.before is not None)
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


def _replace(path: Path, content: bytes, *, keep: bool) -> Path | None:
    """Put a file of this content in the place of `path`, whole or not at all. Return the backup's path.

    :param keep: whether there is a file, which is kept as the first free of NAME.bak, NAME.bak.1 and so on. The new one
        gets its permissions.
    """
    mode, backup = 0o644, None
    scratch = path.with_name(f".{path.name}.{os.getpid()}-{time.time_ns()}")
    _write(scratch, content, mode)
    try:
        if keep:
            mode = stat.S_IMODE(path.stat().st_mode)
            scratch.chmod(mode)
            places = (path.with_name(f"{path.name}.bak{f'.{n}' if n else ''}") for n in itertools.count())
            backup = _write(next(place for place in places if not os.path.lexists(place)), path.read_bytes(), mode)
        os.replace(scratch, path)
    except BaseException:
        if scratch.exists():  # else it is in place, and only the backup holds the file as it was
            scratch.unlink()
            if backup is not None:
                backup.unlink()
        raise
    return backup


def _write(path: Path, content: bytes, mode: int) -> Path:
    """Write a new file, whole or not at all, and return its path."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with open(handle, "wb") as file:
            os.fchmod(handle, mode)  # whatever the user's umask
            file.write(content)
            file.flush()
            os.fsync(handle)  # so that no crash leaves the new name with an empty file
    except BaseException:
        path.unlink()
        raise
    return path
