"""DeepSeek's inference format is read as the checkpoint that it was made of, whatever it was split over."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_triton_tools.checkpoints.shard_writer import OutputTensor, ShardWriter
from deepseek_triton_tools.checkpoints.stored_tensors import open_checkpoint, place_of, read_config
from deepseek_triton_tools.tool_errors import CheckpointError
from support.small_checkpoint import TINY

SIZES = (1, 2, 4)
NAMES = {
    "model.embed_tokens.weight": "embed.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
    "model.layers.0.input_layernorm.weight": "layers.0.attn_norm.weight",
    "model.layers.0.post_attention_layernorm.weight": "layers.0.ffn_norm.weight",
    "model.layers.0.self_attn.q_proj.weight": "layers.0.attn.wq.weight",
    "model.layers.0.self_attn.q_a_proj.weight_scale_inv": "layers.0.attn.wq_a.scale",
    "model.layers.0.self_attn.q_a_layernorm.weight": "layers.0.attn.q_norm.weight",
    "model.layers.0.self_attn.q_b_proj.weight": "layers.0.attn.wq_b.weight",
    "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": "layers.0.attn.wkv_a.weight",
    "model.layers.0.self_attn.kv_a_layernorm.weight": "layers.0.attn.kv_norm.weight",
    "model.layers.0.self_attn.kv_b_proj.weight": "layers.0.attn.wkv_b.weight",
    "model.layers.0.self_attn.o_proj.weight_scale_inv": "layers.0.attn.wo.scale",
    "model.layers.0.self_attn.indexer.wq_b.weight": "layers.0.attn.indexer.wq_b.weight",
    "model.layers.0.self_attn.indexer.k_norm.bias": "layers.0.attn.indexer.k_norm.bias",
    "model.layers.0.mlp.gate_proj.weight": "layers.0.ffn.w1.weight",
    "model.layers.3.mlp.gate.weight": "layers.3.ffn.gate.weight",
    "model.layers.3.mlp.gate.e_score_correction_bias": "layers.3.ffn.gate.bias",
    "model.layers.3.mlp.shared_experts.up_proj.weight": "layers.3.ffn.shared_experts.w3.weight",
    "model.layers.3.mlp.experts.17.down_proj.weight_scale_inv": "layers.3.ffn.experts.17.w2.scale",
}
IN_COLUMNS = ("o_proj", "down_proj")
IN_ROWS = ("embed_tokens", "lm_head", "q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj")
LONGEST_FIRST = {
    "kv_a_proj_with_mqa": "wkv_a",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "e_score_correction_bias": "bias",
    "weight_scale_inv": "scale",
    "kv_a_layernorm": "kv_norm",
    "q_a_layernorm": "q_norm",
    "embed_tokens": "embed",
    "self_attn": "attn",
    "kv_b_proj": "wkv_b",
    "gate_proj": "w1",
    "down_proj": "w2",
    "q_a_proj": "wq_a",
    "q_b_proj": "wq_b",
    "up_proj": "w3",
    "lm_head": "head",
    "o_proj": "wo",
    "q_proj": "wq",
    "mlp": "ffn",
}


def short_name(name):
    return re.sub("|".join(LONGEST_FIRST), lambda match: LONGEST_FIRST[match[0]], name.removeprefix("model."))


def split(source, folder, number):
    """Write the layers of the tiny checkpoint as DeepSeek's converter does, for `number` GPUs."""
    folder.mkdir()
    files = [{} for _ in range(number)]
    for name, tensor in source.items():
        if name.startswith("model.layers.3."):  # the MTP layer
            continue
        values, module = tensor.read(), name.split(".")[-2]
        expert = re.search(r"\.experts\.(\d+)\.", name)
        for part in range(number):
            piece = values
            if expert is not None:
                if int(expert[1]) // (8 // number) != part:
                    continue
            elif module in IN_ROWS + IN_COLUMNS:
                piece = np.split(values, number, axis=int(module in IN_COLUMNS))[part]
            output = OutputTensor(short_name(name), tensor.dtype, piece.shape)
            files[part][output.name] = (output, piece)
    for part, tensors in enumerate(files):
        with ShardWriter(folder / f"model{part}-mp{number}.safetensors", [o for o, _ in tensors.values()]) as writer:
            for _, piece in tensors.values():
                writer.write(piece)
            writer.finish()
    return folder


@pytest.fixture(scope="module")
def tiny():
    return open_checkpoint(TINY)


@pytest.fixture(scope="module")
def folders(tiny, tmp_path_factory):
    root = tmp_path_factory.mktemp("split")
    return {number: split(tiny, root / str(number), number) for number in SIZES}


def test_a_name_is_the_one_on_hugging_face():
    assert [place_of(short).name for short in NAMES.values()] == list(NAMES)


@pytest.mark.slow
def test_every_tensor_comes_back(tiny, folders):
    for number in SIZES:
        found = open_checkpoint(folders[number])

        assert set(found) == {name for name in tiny if not name.startswith("model.layers.3.")}
        assert found.num_parts == len(found.files) == number
        for name, tensor in found.items():
            assert (tensor.name, tensor.dtype, tensor.shape) == (name, tiny[name].dtype, tiny[name].shape)
            assert tensor.num_bytes == tiny[name].num_bytes
            assert tensor.read().tobytes() == tiny[name].read().tobytes(), name


@pytest.mark.slow
@given(data=st.data(), number=st.sampled_from(SIZES))
def test_any_rows_of_any_tensor_come_back(data, number, tiny, folders):
    found = open_checkpoint(folders[number])
    tensor = found[data.draw(st.sampled_from(sorted(found)))]
    begin = data.draw(st.integers(0, tensor.shape[0]))
    end = data.draw(st.integers(begin, tensor.shape[0] + 3))

    rows = tensor.read(begin, end)

    expected = tiny[tensor.name].read(begin, end)
    assert (rows.shape, rows.tobytes()) == (expected.shape, expected.tobytes())


@pytest.fixture
def damaged(folders, tmp_path):
    """A copy of the checkpoint for two GPUs, to spoil."""
    return Path(shutil.copytree(folders[2], tmp_path / "damaged"))


def refused(folder):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.slow
def test_a_missing_file_is_named_and_many_take_no_memory(damaged, tmp_path):
    (damaged / "model1-mp2.safetensors").unlink()
    assert "1 of 2 files are missing: model1-mp2.safetensors" in refused(damaged)

    many, none = tmp_path / "many", tmp_path / "none"
    for folder, number in ((many, "999999"), (none, "9" * 11)):
        folder.mkdir()
        shutil.copy(TINY / "model.safetensors", folder / f"model0-mp{number}.safetensors")
    assert "999,998 of 999,999 files are missing: model1-mp999999.safetensors, " in refused(many)
    assert open_checkpoint(none).num_parts == 0  # no such number of GPUs is one: it is some other file


@pytest.mark.slow
def test_files_of_two_conversions_are_told_apart(damaged, folders):
    shutil.copy(folders[4] / "model3-mp4.safetensors", damaged)
    assert "model0-mp2.safetensors" in refused(damaged)


def test_a_tensor_without_its_other_part_is_named(damaged):
    whole = open_checkpoint(TINY)["model.norm.weight"]
    with ShardWriter(damaged / "model1-mp2.safetensors", [OutputTensor("norm.weight", "BF16", (256,))]) as writer:
        writer.write(whole.read())
        writer.finish()
    assert "embed.weight" in refused(damaged)


def test_info_describes_it_without_a_config(folders, checkpoint):
    [entry] = json.loads(checkpoint("info", folders[4], "--json").out)["checkpoints"]
    assert (entry["format"], entry["precision"]) == ("deepseek-inference", "fp8")
    assert (entry["num_layers"], entry["num_mtp_layers"]) == (3, 0)
    assert {part["part"]: part["tensors"] for part in entry["parts"]}["routed experts"] == 48


def test_cut_makes_hugging_face_s_format_of_it_with_its_config(tiny, damaged, tmp_path, checkpoint):
    for config in (None, {"vocab_size": 1280, "dim": 256, "n_layers": 3}):
        if config is not None:
            (damaged / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match="from the model on Hugging Face"):
            read_config(damaged)
    shutil.copy(TINY / "config.json", damaged)
    checkpoint("cut", damaged, "--layers", "2", "--output", tmp_path / "cut")

    found = open_checkpoint(tmp_path / "cut")
    assert found.num_parts == 0
    assert len(found) > 50
    assert all(tensor.read().tobytes() == tiny[name].read().tobytes() for name, tensor in found.items())
