"""Converts the FP8 checkpoint to bfloat16, for engines and GPUs without FP8.

A weight is its E4M3 value times the float32 scale of its block, rounded to the nearest bfloat16, to the even one of
two. Tensors that are not FP8 stay as they are. Only numpy is needed: `python bfloat16.py CHECKPOINT OUTPUT`.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Header = dict[str, dict[str, Any]]
"""Each tensor's dtype, shape and data_offsets, as in https://docs.rs/crate/safetensors."""

SCALE_SUFFIX = "_scale_inv"
WEIGHTS = "model.safetensors"


def convert(checkpoint: Path, output: Path) -> None:
    """Write the checkpoint into the new folder `output` without FP8 and without checksums; the other files are copied.

    Raises FileExistsError when `output` exists, and ValueError when the checkpoint is not FP8 in one file.
    """
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    quantization = config.pop("quantization_config", None) or {}
    is_fp8 = quantization.get("quant_method") == "fp8" and "weight_block_size" in quantization
    if not is_fp8 or not (checkpoint / WEIGHTS).is_file():
        raise ValueError(f"{checkpoint}: expected a checkpoint of quant_method fp8 in blocks, all weights in {WEIGHTS}")
    shutil.copytree(checkpoint, output, ignore=shutil.ignore_patterns(WEIGHTS, "config.json", "checksums.sha256"))
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _convert_weights(checkpoint / WEIGHTS, output / WEIGHTS, quantization["weight_block_size"])


def _convert_weights(source: Path, target: Path, block_size: Sequence[int]) -> None:
    header, data = _open(source)
    kept = {name: entry for name, entry in header.items() if not name.endswith(SCALE_SUFFIX)}
    with target.open("wb") as file:
        file.write(_header_bytes(kept))
        for name, entry in kept.items():
            stored = _tensor(data, entry)
            if entry["dtype"] == "F8_E4M3":
                scales = _tensor(data, header[name + SCALE_SUFFIX])
                stored = to_bfloat16(dequantize(stored, scales, block_size))
            file.write(stored.tobytes())


def dequantize(values: npt.NDArray[np.uint8], scales: Floats, block_size: Sequence[int]) -> Floats:
    """Return the weight [rows, columns] of E4M3 bytes and their scales [row blocks, column blocks].

    The last block of a row or column may be smaller than the others.
    """
    rows, columns = values.shape
    whole = scales.repeat(block_size[0], axis=0)[:rows].repeat(block_size[1], axis=1)[:, :columns]
    return E4M3[values] * whole


def to_bfloat16(values: Floats) -> npt.NDArray[np.uint16]:
    """Return the bits of the nearest bfloat16 to each finite value; half-way goes to the even one."""
    bits = values.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded: npt.NDArray[np.uint32] = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    return rounded.astype(np.uint16)


def _e4m3_values() -> Floats:
    """Return the number that each byte stands for: a sign, four bits of exponent with bias 7, three of fraction."""
    byte = np.arange(256)
    sign = np.where(byte & 0x80, -1.0, 1.0)
    exponent, fraction = byte >> 3 & 0xF, (byte & 7) / 8
    values = sign * np.where(exponent, (1 + fraction) * 2.0 ** (exponent - 7), fraction * 2.0**-6)
    return np.where(byte & 0x7F == 0x7F, np.nan, values).astype(np.float32)


E4M3 = _e4m3_values()
_DTYPES = {"F8_E4M3": np.uint8, "BF16": np.uint16, "F32": np.float32}


def _open(path: Path) -> tuple[Header, npt.NDArray[np.uint8]]:
    """Return the header, and the data that follows it."""
    everything = np.memmap(path, np.uint8, "r")
    length = int(everything[:8].view("<u8")[0])
    header: Header = json.loads(bytes(everything[8 : 8 + length]))
    header.pop("__metadata__", None)
    return header, everything[8 + length :]


def _tensor(data: npt.NDArray[np.uint8], entry: dict[str, Any]) -> npt.NDArray[Any]:
    start, end = entry["data_offsets"]
    return data[start:end].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])


def _header_bytes(kept: Header) -> bytes:
    """Return the beginning of the new file: its header's length and the header, padded to a multiple of 8 bytes."""
    header = json.dumps({"__metadata__": {"format": "pt"}, **dict(_new_entries(kept))}, separators=(",", ":"))
    padded = header.encode() + b" " * (-len(header) % 8)
    return len(padded).to_bytes(8, "little") + padded


def _new_entries(kept: Header) -> Iterator[tuple[str, dict[str, Any]]]:
    end = 0
    for name, entry in kept.items():
        start, dtype = end, "BF16" if entry["dtype"] == "F8_E4M3" else entry["dtype"]
        end += int(np.prod(entry["shape"])) * np.dtype(_DTYPES[dtype]).itemsize
        yield name, {"dtype": dtype, "shape": entry["shape"], "data_offsets": [start, end]}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Convert an FP8 checkpoint to bfloat16.")
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="its folder")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="folder to make")
    arguments = parser.parse_args(argv)
    try:
        convert(arguments.checkpoint, arguments.output)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
