"""Writes safetensors files, with the data types that numpy lacks: bfloat16, and FP8 with a scale for each block."""

import json

import numpy as np

BLOCK = 128
_LARGEST_E4M3 = 448.0


def write_tensors(path, tensors):
    """Write one file: the length of the header, the header, the bytes."""
    header = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, values) in tensors.items():
        begin, end = end, end + values.nbytes
        header[name] = {"dtype": dtype, "shape": values.shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for _, values in tensors.values():
            file.write(values.tobytes())


def write_sharded(folder, tensors, number):
    """Write `number` files with an index, as published checkpoints have them."""
    names = list(tensors)
    weight_map = {}
    for shard in range(number):
        file_name = f"model-{shard + 1:05d}-of-{number:05d}.safetensors"
        held = names[shard::number]
        write_tensors(folder / file_name, {name: tensors[name] for name in held})
        weight_map |= dict.fromkeys(held, file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def as_float32(values):
    return "F32", values.astype(np.float32)


def as_bfloat16(values):
    """Round to the nearest bfloat16, which is the upper half of a float32."""
    return "BF16", ((values.astype(np.float32).view(np.uint32) + 0x8000) >> 16).astype(np.uint16)


def as_fp8(name, values):
    """Return the tensor `name` in FP8 (e4m3), and the scales of its blocks."""
    rows, columns = values.shape
    height, width = -(-rows // BLOCK), -(-columns // BLOCK)
    padded = np.zeros((height * BLOCK, width * BLOCK))
    padded[:rows, :columns] = np.abs(values)
    largest = padded.reshape(height, BLOCK, width, BLOCK).max((1, 3))
    scales = np.where(largest, largest / _LARGEST_E4M3, 1).astype(np.float32)
    codes = _e4m3_codes(values / np.kron(scales, np.ones((BLOCK, BLOCK)))[:rows, :columns])
    return {name: ("F8_E4M3", codes), f"{name}_scale_inv": ("F32", scales)}


def _e4m3_codes(values):
    """Return the byte of the nearest e4m3 number: a sign, 4 bits of exponent with a bias of 7, 3 bits of mantissa."""
    magnitude = np.minimum(np.abs(values), _LARGEST_E4M3)
    exponent = np.clip(np.floor(np.log2(np.maximum(magnitude, 2.0**-20))), -6, 8)
    steps = np.rint(magnitude / 2.0 ** (exponent - 3))  # eighths of the power of two; 16 of them are the next power
    codes = steps + (exponent + 6) * 8
    return (codes + np.where(values < 0, 128, 0)).astype(np.uint8)
