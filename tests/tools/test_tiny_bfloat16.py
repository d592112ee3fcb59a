"""The bfloat16 form of the FP8 checkpoint: each number as the definition of the formats has it, and a loadable file."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tiny_checkpoint.bfloat16 import E4M3, convert, dequantize, main, to_bfloat16

BLOCK = [128, 128]


def write_safetensors(path, tensors):
    """Write (dtype, array) by name. The header lists the names in reverse, as a file may."""
    header, data = {}, b""
    for name, (dtype, array) in tensors.items():
        end = len(data) + array.nbytes
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), end]}
        data += array.tobytes()
    text = json.dumps({"__metadata__": {"format": "pt"}, **dict(reversed(header.items()))}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def read_safetensors(path):
    """Return (dtype, shape, bytes) by name, having looked that the tensors fill the file without a gap."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    assert header.pop("__metadata__") == {"format": "pt"}
    spans = sorted(entry["data_offsets"] for entry in header.values())
    assert [0, *(end for _, end in spans)] == [*(start for start, _ in spans), len(data)]
    assert length % 8 == 0
    return {
        name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])]) for name, entry in header.items()
    }


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint whose one FP8 matrix ends with part of a block both ways, as kv_a_proj_with_mqa's rows do."""
    random = np.random.RandomState(0)
    folder = tmp_path / "fp8"
    (folder / "r1").mkdir(parents=True)
    config = {"hidden_size": 200, "quantization_config": {"quant_method": "fp8", "weight_block_size": BLOCK}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "r1" / "tokenizer_config.json").write_text("{}")
    (folder / "checksums.sha256").write_text("of the FP8 files\n")
    tensors = {
        "norm.weight": ("BF16", random.randint(0, 2**15, 5).astype(np.uint16)),
        "proj.weight": ("F8_E4M3", random.randint(0, 0x7F, (130, 200)).astype(np.uint8)),
        "proj.weight_scale_inv": ("F32", random.rand(2, 2).astype(np.float32)),
        "bias": ("F32", random.rand(3).astype(np.float32)),
    }
    write_safetensors(folder / "model.safetensors", tensors)
    return folder, tensors


@pytest.mark.parametrize(
    ("byte", "number"),
    [
        (0x00, 0.0),
        (0x01, 2.0**-9),
        (0x07, 7 * 2.0**-9),
        (0x08, 2.0**-6),
        (0x38, 1.0),
        (0x39, 1.125),
        (0xC0, -2.0),
        (0x7E, 448.0),
        (0xFE, -448.0),
    ],
)
def test_a_byte_stands_for_its_number_in_e4m3(byte, number):
    assert E4M3[byte] == number


def test_e4m3_has_two_nans_and_no_infinity():
    assert np.flatnonzero(~np.isfinite(E4M3)).tolist() == [0x7F, 0xFF]


@pytest.mark.parametrize(
    ("number", "bits"),
    [
        (1.0, 0x3F80),
        (1 + 2.0**-8, 0x3F80),  # half-way: the even one is below
        (1 + 3 * 2.0**-8, 0x3F82),  # half-way: the even one is above
        (1 + 2.0**-8 + 2.0**-20, 0x3F81),
        (-1 - 2.0**-8 - 2.0**-20, 0xBF81),
        (2 - 2.0**-20, 0x4000),
    ],
)
def test_a_float_becomes_the_nearest_bfloat16(number, bits):
    assert to_bfloat16(np.array([number], np.float32)).tolist() == [bits]


def test_each_block_has_its_own_scale():
    values = np.full((130, 200), 0x38, np.uint8)
    weight = dequantize(values, np.array([[1, 2], [3, 4]], np.float32), BLOCK)
    corners = [weight[0, 0], weight[127, 127], weight[0, 128], weight[127, 199], weight[128, 127], weight[129, 199]]
    assert corners == [1, 1, 2, 2, 3, 4]


def test_the_converted_checkpoint_has_the_same_tensors_without_scales(checkpoint, tmp_path):
    folder, tensors = checkpoint
    assert main([str(folder), str(tmp_path / "out")]) == 0
    converted = read_safetensors(tmp_path / "out" / "model.safetensors")
    values, scales = tensors["proj.weight"][1], tensors["proj.weight_scale_inv"][1]
    assert converted == {
        "norm.weight": ("BF16", [5], tensors["norm.weight"][1].tobytes()),
        "proj.weight": ("BF16", [130, 200], to_bfloat16(dequantize(values, scales, BLOCK)).tobytes()),
        "bias": ("F32", [3], tensors["bias"][1].tobytes()),
    }


def test_the_other_files_come_along_but_not_what_no_longer_holds(checkpoint, tmp_path):
    folder, _ = checkpoint
    convert(folder, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"hidden_size": 200}
    assert (tmp_path / "out" / "r1" / "tokenizer_config.json").read_text() == "{}"
    assert not (tmp_path / "out" / "checksums.sha256").exists()


@pytest.mark.parametrize("fault", ["no FP8", "shards"])
def test_another_form_is_refused_and_nothing_is_made(checkpoint, tmp_path, fault):
    folder, _ = checkpoint
    if fault == "no FP8":
        (folder / "config.json").write_text("{}")
    else:
        (folder / "model.safetensors").rename(folder / "model-00001-of-000001.safetensors")
    with pytest.raises(ValueError, match="expected a checkpoint of quant_method fp8 in blocks, all weights in model"):
        convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_every_byte_times_any_scale_is_what_torch_makes_of_it():
    torch = pytest.importorskip("torch")
    values = np.arange(256, dtype=np.uint8).reshape(2, 128)[:, :127]  # all but the two NaNs
    for scale in np.random.RandomState(1).rand(200).astype(np.float32):
        ours = to_bfloat16(dequantize(values, np.array([[scale]]), BLOCK))
        theirs = (torch.from_numpy(values.copy()).view(torch.float8_e4m3fn).float() * float(scale)).bfloat16()
        assert (ours == theirs.view(torch.uint16).numpy()).all()
