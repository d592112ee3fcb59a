"""The scales of the experts' inputs, from a safetensors file and from files that PyTorch wrote."""

import itertools
import shutil
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from deepseek_triton_tools.checkpoints.activation_scales import missing_scales, read_activation_scales
from deepseek_triton_tools.checkpoints.stored_tensors import DTYPES
from deepseek_triton_tools.tool_errors import CheckpointError
from support.tensor_writing import write_tensors

ARCHIVES = Path(__file__).parent / "torch_archives"
RANK_1 = "amax_dict_rank1-mp2.pt"
CONFIG = {"first_k_dense_replace": 1, "num_hidden_layers": 2, "n_routed_experts": 4, "num_nextn_predict_layers": 1}


def scale(layer, expert, matrix):
    return f"model.layers.{layer}.mlp.experts.{expert}.w{matrix}.input_scale"


def safetensors(path, tensors, dtype="F32", shape=(1,)):
    write_tensors(path, {name: (dtype, np.full(shape, value, DTYPES[dtype])) for name, value in tensors.items()})
    return path


@pytest.fixture
def export(tmp_path):
    return Path(shutil.copytree(ARCHIVES / "export", tmp_path / "export"))


def replace_values(path, name, values):
    """Write other values in the place of the tensor that the archive names `name`."""
    with zipfile.ZipFile(path) as archive:
        entries = {entry: archive.read(entry) for entry in archive.namelist()}
    (pickle_name,) = (entry for entry in entries if entry.endswith("data.pkl"))
    before = entries[pickle_name].partition(name.encode())[0]
    number = before.count(b"._amax")  # each tensor has a storage of its own, numbered in the order of their names
    entries[f"{pickle_name.removesuffix('data.pkl')}data/{number}"] = values
    with zipfile.ZipFile(path, "w") as archive:
        for entry, content in entries.items():
            archive.writestr(entry, content)


def test_an_export_of_modelopt():
    found = read_activation_scales(ARCHIVES / "export")
    amaxes = {
        scale(1, expert, matrix): expert + (2 if matrix == 2 else 3) + 1
        for expert in range(4)  # gate and up have the larger of both
        for matrix in (1, 2, 3)
    }
    amaxes |= {scale(2, 0, 2): 9, scale(2, 1, 2): 9}  # the larger of both ranks, whichever has it
    assert found.keys() == amaxes.keys()
    for name, amax in amaxes.items():
        assert found[name] == np.float32(amax) / np.float32(448), name
        assert found[name].dtype == np.float32, name


def test_missing_experts_are_told():
    found = read_activation_scales(ARCHIVES / "export")
    assert missing_scales(found, CONFIG) == []
    more = CONFIG | {"num_hidden_layers": 3}
    there = {scale(2, 0, 2), scale(2, 1, 2)}
    needed = [scale(2, expert, matrix) for expert in range(4) for matrix in (1, 2, 3)]
    assert missing_scales(found, more) == [name for name in needed if name not in there]
    assert missing_scales(found, {"num_hidden_layers": 3}) == []


def test_numbers_of_config_json_are_checked():
    found = read_activation_scales(ARCHIVES / "export")
    assert missing_scales(found, CONFIG | {"n_routed_experts": None}) == []
    assert len(missing_scales(found, CONFIG | {"first_k_dense_replace": None})) == 12  # those of layer 0
    for changes, message in (
        ({"n_routed_experts": "4"}, "expected n_routed_experts as a whole number, found '4'"),
        ({"num_hidden_layers": 10**10}, "experts in all layers, found 39,999,999,996"),
        ({"n_routed_experts": 10**10}, "experts in all layers, found 10,000,000,000"),
    ):
        with pytest.raises(CheckpointError, match=message):
            missing_scales(found, CONFIG | changes)


def test_a_safetensors_file(tmp_path):
    tensors = {scale(3, 7, 1): 0.5, scale(3, 7, 2): 2, "other": 1}
    for dtype, shape in itertools.product(("F32", "BF16"), ((1,), ())):
        path = safetensors(tmp_path / "a.safetensors", tensors, dtype, shape)
        assert dict(read_activation_scales(path)) == {scale(3, 7, 1): 0.5, scale(3, 7, 2): 2.0}


def test_a_scale_that_is_none(tmp_path):
    for value in (0.0, -1.0, float("nan"), float("inf")):
        path = safetensors(tmp_path / "a.safetensors", {scale(3, 0, 1): 1, scale(3, 7, 1): value})
        with pytest.raises(CheckpointError) as caught:
            read_activation_scales(path)
        assert f"{scale(3, 7, 1)} is {value:g};" in str(caught.value)
        assert scale(3, 0, 1) not in str(caught.value)
    path = safetensors(tmp_path / "a.safetensors", {scale(3, 7, 1): 1}, shape=(2,))
    with pytest.raises(CheckpointError, match="input_scale has 2 values"):
        read_activation_scales(path)


def test_files_that_are_something_else(tmp_path):
    cases = {
        tmp_path / "gone": "expected a safetensors file or a folder of ModelOpt's amax files, found nothing",
        safetensors(tmp_path / "weights.safetensors", {"a.weight": 1}): r"such as model\.layers.*, found a\.weight",
        ARCHIVES / "tensors.pt": "expected a safetensors file: ",
        tmp_path: "expected amax_dict_rank0-mp8.pt and so on, as ptq.py writes them, found none",
    }
    for path, message in cases.items():
        with pytest.raises(CheckpointError, match=message):
            read_activation_scales(path)


def test_all_ranks_have_to_be_there(export):
    (export / RANK_1).rename(export / "amax_dict_rank2-mp2.pt")
    with pytest.raises(CheckpointError, match=r"ranks 0 to 1, found 1 of 2, no amax_dict_rank1-mp2\.pt"):
        read_activation_scales(export)
    shutil.copy(export / "amax_dict_rank2-mp2.pt", export / RANK_1)
    with pytest.raises(CheckpointError, match=r"ranks 0 to 1, found amax_dict_rank2-mp2\.pt too"):
        read_activation_scales(export)
    (export / "amax_dict_rank2-mp2.pt").rename(export / "amax_dict_rank0-mp1.pt")
    with pytest.raises(CheckpointError, match="the files of one run, found those of mp1, mp2"):
        read_activation_scales(export)


def test_a_name_that_says_many_ranks_takes_no_memory_for_them(tmp_path):
    for number, message in (("999999", "1 of 999,999, no "), ("9" * 30, "as ptq.py writes them, found none")):
        folder = tmp_path / number
        folder.mkdir()
        (folder / f"amax_dict_rank0-mp{number}.pt").touch()
        with pytest.raises(CheckpointError, match=message) as caught:
            read_activation_scales(folder)
        assert len(str(caught.value)) < 1000


def test_all_wrong_values_of_all_ranks_are_told(export):
    names = {rank: f"layers.1.ffn.experts.{rank * 2}.w1.input_quantizer._amax" for rank in range(2)}
    for rank, value in ((0, -3.0), (1, float("nan"))):
        replace_values(export / f"amax_dict_rank{rank}-mp2.pt", names[rank], struct.pack("<f", value))
    with pytest.raises(CheckpointError) as caught:
        read_activation_scales(export)
    assert f"{names[0]} is -3;" in str(caught.value)
    assert f"{names[1]} is nan;" in str(caught.value)


def test_weights_may_have_any_amax(export):
    name = "layers.1.ffn.experts.0.w1.weight_quantizer._amax"
    replace_values(export / "amax_dict_rank0-mp2.pt", name, struct.pack("<f", 0))
    assert missing_scales(read_activation_scales(export), CONFIG) == []
