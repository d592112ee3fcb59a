"""The precision in which a checkpoint's experts are stored: what its files' headers say, whatever its JSON says."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from deepseek_triton_build.check.documents import is_inside, open_file, read_json
from deepseek_triton_build.check.safetensors import HeaderEntry, HeaderError, read_header
from deepseek_triton_build.check.weights import INDEX, files_read

_EXPERT = re.compile(r"model\.layers\.(\d{1,4})\.mlp\.experts\.\d+\.\w+\.(?:weight|qweight|weight_packed)")
# Data type of an expert's weight -> the precision that stores it so.
_STORED = {"F8_E4M3": "fp8", "U8": "fp4", "I8": "w4a8", "I32": "w4a16", "BF16": "bf16", "F16": "bf16"}


def stored_precision(name: str, entry: HeaderEntry) -> str | None:
    """Return the precision of an expert's weight, or "bf16"; None for another tensor or an unknown type."""
    is_matrix = len(entry.shape) == 2
    return _STORED.get(entry.dtype) if is_matrix and _EXPERT.fullmatch(name) else None


def stored_precisions(folder: Path, num_layers: int) -> dict[str, str]:
    """Return precision -> the first file that stores experts so: those of the first and the last layer with experts.

    What can't be read is left out: `check_weights` says why. The MTP layer, from `num_layers`, may be stored otherwise.
    """
    found: dict[str, str] = {}
    for file in _files_with_experts(folder, num_layers):
        for name, entry in _entries(folder, file).items():
            layer = _layer(name)
            precision = stored_precision(name, entry) if layer is not None and layer < num_layers else None
            if precision is not None:
                found.setdefault(precision, file)
                break
    return found


def _files_with_experts(folder: Path, num_layers: int) -> Iterator[str]:
    index, _ = read_json(folder / INDEX, INDEX)
    weight_map = (index or {}).get("weight_map")
    if not isinstance(weight_map, dict):
        with suppress(OSError):
            yield from files_read(folder)
        return
    layers = ((layer, file) for name, file in weight_map.items() if (layer := _layer(name)) is not None)
    placed = {layer: file for layer, file in layers if layer < num_layers and isinstance(file, str) and is_inside(file)}
    if placed:
        yield from dict.fromkeys((placed[min(placed)], placed[max(placed)]))


def _entries(folder: Path, file: str) -> Mapping[str, HeaderEntry]:
    try:
        with open_file(folder / file) as opened:
            return read_header(opened).tensors
    except (OSError, ValueError, HeaderError):
        return {}


def _layer(name: str) -> int | None:
    match = _EXPERT.fullmatch(name)
    return int(match[1]) if match else None
