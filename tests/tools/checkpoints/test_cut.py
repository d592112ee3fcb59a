"""`checkpoint cut`: what is left of a checkpoint, byte for byte, and what can't be cut."""

import json
import os
import platform
import subprocess
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from deepseek_backend.engines.reference.checkpoint_loading import load_checkpoint
from deepseek_backend.engines.reference.deepseek_model import ModelRunner
from deepseek_triton_tools.checkpoints.cut import CutOptions, plan_cut, write_cut
from deepseek_triton_tools.checkpoints.folder_files import companion_files
from deepseek_triton_tools.checkpoints.shard_writer import OutputTensor, ShardWriter
from deepseek_triton_tools.checkpoints.stored_tensors import DTYPES, open_checkpoint, read_config
from deepseek_triton_tools.cli.main import main
from deepseek_triton_tools.tool_errors import CheckpointError
from support.small_checkpoint import TINY
from support.v4_checkpoint import v4_config, write_v4

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
}
WIDTH = 8


LAYERS, EXPERTS, OUTPUT = "--layers", "--experts", "--output"


def cut(source, *options):
    assert main(["checkpoint", "cut", str(source), *map(str, options)]) == 0
    return open_checkpoint(Path(options[-1]))


def write(folder, tensors, **config):
    """Write a checkpoint in one file, whose bytes count up, so that no two rows are alike."""
    folder.mkdir()
    outputs = [OutputTensor(name, dtype, shape) for name, (dtype, shape) in tensors.items()]
    with ShardWriter(folder / "model.safetensors", outputs) as writer:
        for number, output in enumerate(outputs):
            values = np.resize(np.roll(np.arange(251, dtype=np.uint8), number), output.num_bytes)
            writer.write(values.view(DTYPES[output.dtype]))
        writer.finish()
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def w4afp8(tmp_path):
    """A checkpoint with the names and types of W4AFP8, an MTP layer and 16 experts, and all its documents."""
    folder = tmp_path / "w"
    tensors = {"model.embed_tokens.weight": ("BF16", (32, WIDTH))}
    for layer in range(5):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.input_layernorm.weight"] = ("BF16", (WIDTH,))
        tensors[f"{prefix}.self_attn.o_proj.weight"] = ("F8_E4M3", (WIDTH, WIDTH))
        if layer:
            tensors[f"{prefix}.mlp.gate.weight"] = ("BF16", (16, WIDTH))
            tensors[f"{prefix}.mlp.gate.e_score_correction_bias"] = ("F32", (16,))
            for expert in range(16):
                tensors[f"{prefix}.mlp.experts.{expert}.up_proj.weight"] = ("I8", (WIDTH, WIDTH // 2))
                tensors[f"{prefix}.mlp.experts.{expert}.w3.input_scale"] = ("F32", (1,))
    write(folder, tensors | {"model.norm.weight": ("BF16", (WIDTH,)), "lm_head.weight": ("BF16", (32, WIDTH))})
    excluded = ["lm_head", "model.layers.3.x", "*.4"]
    layers = {f"model.layers.{layer}.mlp.experts": {"quant_algo": "W4A8_AWQ"} for layer in range(1, 5)}
    documents = {
        "hf_quant_config.json": {"quantization": {"quant_algo": "MIXED_PRECISION", "exclude_modules": excluded}},
        "quant_cfg.json": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers},
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document))
    return folder


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory):
    """The tiny checkpoint with two of its layers."""
    folder = tmp_path_factory.mktemp("two") / "cut"
    cut(TINY, LAYERS, 2, OUTPUT, folder)
    return folder


def read(folder, name):
    return json.loads((folder / name).read_text())


def same(found, name, source, origin=None):
    """Whether a tensor is the first rows of another one."""
    return source[origin or name].read().tobytes().startswith(found[name].read().tobytes())


@pytest.mark.slow
def test_the_tensors_that_are_left_have_their_bytes(two_layers):
    found, source = open_checkpoint(two_layers), open_checkpoint(TINY)
    assert set(found) == {name for name in source if not name.startswith(("model.layers.2.", "model.layers.3."))}
    assert all(same(found, name, source) for name in found)
    assert read(two_layers, "config.json")["num_hidden_layers"] == 2
    assert read(two_layers, "config.json")["num_nextn_predict_layers"] == 0
    assert (two_layers / "tokenizer.json").read_bytes() == (TINY / "tokenizer.json").read_bytes()
    # It can be verified.
    assert main(["checkpoint", "verify", str(two_layers)]) == 0
    assert "README.md" not in read(two_layers, "checkpoint.sha256.json")["files"]


@pytest.mark.slow
def test_a_cut_tiny_checkpoint_loads_in_the_reference_engine_and_generates(two_layers):
    checkpoint = load_checkpoint("cut", version_dir=two_layers.parent)
    runner = ModelRunner(checkpoint.model, 1)
    hidden = np.stack([runner.prefill(checkpoint.encode("The sun", True))[-1]])
    chosen = []
    for _ in range(4):
        chosen += runner.logits(hidden).argmax(-1).tolist()
        hidden = runner.decode(chosen[-1:])

    assert all(0 <= token < checkpoint.vocab_size for token in chosen)
    assert np.isfinite(hidden).all()


def test_checksums_of_other_weights_are_left_out(w4afp8):
    for name in ("SHA256SUMS", "sha256sum.txt", "sha256sums", "checksums.sha256", "a.safetensors.SHA256"):
        (w4afp8 / name).write_text("0" * 64 + "  model.safetensors\n")
    assert [path.name for path in companion_files(w4afp8)] == ["tokenizer.json"]


def test_the_mtp_layer_becomes_the_layer_after_the_last(tmp_path):
    found, source = cut(TINY, LAYERS, 2, "--mtp", OUTPUT, tmp_path / "cut"), open_checkpoint(TINY)
    mtp = [name for name in source if name.startswith("model.layers.3.")]
    assert len(mtp) == 76
    assert all(same(found, name.replace("layers.3", "layers.2"), source, name) for name in mtp)
    assert not any(name.startswith("model.layers.3.") for name in found)
    assert read(tmp_path / "cut", "config.json")["num_nextn_predict_layers"] == 1


def test_experts_are_cut_with_the_rows_of_their_router(tmp_path, w4afp8):
    source = open_checkpoint(w4afp8)
    found = cut(w4afp8, LAYERS, 2, EXPERTS, 8, "--mtp", OUTPUT, tmp_path / "cut")

    bias = "mlp.gate.e_score_correction_bias"
    assert found["model.layers.1.mlp.gate.weight"].shape == (8, WIDTH)
    assert found[f"model.layers.2.{bias}"].shape == (8,)
    assert same(found, "model.layers.1.mlp.gate.weight", source)
    assert same(found, f"model.layers.2.{bias}", source, f"model.layers.4.{bias}")
    assert same(found, "model.layers.1.mlp.experts.7.w3.input_scale", source)
    assert "model.layers.1.mlp.experts.8.w3.input_scale" not in found
    assert read(tmp_path / "cut", "config.json")["n_routed_experts"] == 8
    # The documents name no layer that is left out, and every tensor is aligned, whatever its size.
    layers = read(tmp_path / "cut", "quant_cfg.json")["quantized_layers"]
    assert set(layers) == {"model.layers.1.mlp.experts", "model.layers.2.mlp.experts"}
    excluded = read(tmp_path / "cut", "hf_quant_config.json")["quantization"]["exclude_modules"]
    assert excluded == ["lm_head", "*.4"]
    assert {name for name, one in found.items() if one.begin % DTYPES[one.dtype].itemsize} == set()


def test_files_have_the_size_that_is_asked_for(tmp_path, w4afp8):
    planned = plan_cut(open_checkpoint(w4afp8), read_config(w4afp8), CutOptions(num_layers=3, shard_bytes=1000))

    assert write_cut(planned, tmp_path / "cut", on_progress=lambda _: None)
    sizes = [sum(t.output.num_bytes for t in shard) for shard in planned.shards.values()]
    assert len(sizes) > 2
    assert max(sizes) <= 1000
    names = [f"model-{number:05}-of-{len(sizes):06}.safetensors" for number in range(1, len(sizes) + 1)]
    assert sorted(path.name for path in open_checkpoint(tmp_path / "cut").files) == list(planned.shards) == names


def test_only_dense_layers_are_said(tmp_path, w4afp8, checkpoint):
    said = checkpoint("cut", w4afp8, LAYERS, 1, OUTPUT, tmp_path / "cut").err
    assert "the first 1 layers are dense" in said


def test_a_cut_removes_what_killed_ones_have_left(tmp_path):
    with subprocess.Popen(["true"]) as ended:
        pass
    living = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    prefix = f".cut.{platform.node()}-"
    stale = [f"{prefix}{ended.pid}", f"{prefix}{os.getpid()}"]
    others = [
        f"{prefix}{living.pid}",
        f".cut.another-host-{ended.pid}",
        f"{prefix}x",
        f".cut2.{platform.node()}-{ended.pid}",
    ]
    for name in stale + others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model-00001-of-000001.safetensors").touch()

    cut(TINY, *TWO, OUTPUT, tmp_path / "cut")
    living.communicate()

    assert {path.name for path in tmp_path.iterdir()} == {"cut", *others}


TWO, EIGHT = (LAYERS, 2), (LAYERS, 2, EXPERTS, 8)
REFUSED = [
    ({}, (LAYERS, 9), 2, "--layers: expected 1 to 4, found 9"),
    ({}, (LAYERS, 4, "--mtp"), 2, "expected fewer than all layers"),
    ({}, (LAYERS, 2, EXPERTS, 6), 2, "found 6 of 16 experts; use 8"),
    ({}, (LAYERS, 2, EXPERTS, 4), 2, "use 8"),  # one expert in each group
    ({}, (LAYERS, 2, EXPERTS, 17), 2, "use 16"),
    ({}, (LAYERS, 9, EXPERTS, 6), 2, "--experts: expected equal groups (4)"),  # both at once
    ({"num_hidden_layers": "3"}, TWO, 1, "config.json: expected num_hidden_layers as a whole number, found '3'"),
    ({"first_k_dense_replace": -1}, TWO, 1, "config.json: expected first_k_dense_replace as a whole number, found -1"),
    ({"n_group": "8"}, EIGHT, 1, "config.json: expected n_group as a whole number, found '8'"),
    ({"n_routed_experts": "16"}, EIGHT, 1, "config.json: expected n_routed_experts as a whole number"),
    ({"n_routed_experts": None}, EIGHT, 2, "expected n_routed_experts in config.json, found none"),
    ({"n_routed_experts": 10**10}, (LAYERS, 2, EXPERTS, 6), 2, "found 6 of 10000000000 experts; use 8; --experts:"),
    ({"n_routed_experts": 32}, EIGHT, 2, "expected 32 rows in each router by config.json, found others"),
    ({"num_hidden_layers": 10**10}, (LAYERS, 10**9), 2, "found none of layer 5 and 999,999,994 more"),
]


@pytest.mark.slow
def test_what_cannot_be_cut_is_refused(tmp_path, w4afp8, refused, two_layers, subtests):
    for changes, options, code, said in REFUSED:
        with subtests.test(said):
            (w4afp8 / "config.json").write_text(json.dumps(CONFIG | changes))
            assert said in refused("cut", w4afp8, *options, OUTPUT, tmp_path / "cut", code=code)
            assert {path.name for path in tmp_path.iterdir()} == {"w"}
    line = refused("cut", two_layers, LAYERS, 1, "--mtp", OUTPUT, tmp_path / "cut", code=2)
    assert "--mtp: expected an MTP layer, found none" in line
    for content in ("[" * 100_000, "[]", "\x00"):
        (w4afp8 / "config.json").write_text(json.dumps(CONFIG))
        (w4afp8 / "quant_cfg.json").write_text(content)
        assert "quant_cfg.json: expected" in refused("cut", w4afp8, *TWO, OUTPUT, tmp_path / "cut")
    write(tmp_path / "none", {"lm_head.weight": ("BF16", (4, 4))})
    line = refused("cut", tmp_path / "none", LAYERS, 4, OUTPUT, tmp_path / "cut", code=2)
    assert "found none of layer 0 and 3 more" in line


V4_WIDTHS = {"hidden_size": 128, "moe_intermediate_size": 64, "q_lora_rank": 32, "vocab_size": 32, "o_lora_rank": 8}
V4_SMALL = {"num_hidden_layers": 6, "n_routed_experts": 2, "dspark_target_layer_ids": [3, 4, 5]} | V4_WIDTHS


def test_v4_is_cut_with_its_draft_or_without(tmp_path, checkpoint):
    source = write_v4(tmp_path / "w", v4_config("deepseek-v4-flash-dspark", **V4_SMALL))
    for options, num_drafts, read_layers in ((("--mtp",), 3, [1, 2, 3]), ((), 0, None)):
        folder = tmp_path / f"cut{num_drafts}"
        found = cut(source, LAYERS, 4, *options, OUTPUT, folder)
        config = read(folder, "config.json")
        assert (config["num_hidden_layers"], config["compress_ratios"][:4]) == (4, [0, 0, 4, 128])
        assert config["num_nextn_predict_layers"] == (1 if num_drafts else 0)
        assert config.get("dspark_target_layer_ids") == read_layers
        assert len({name.split(".")[1] for name in found if name.startswith("mtp.")}) == num_drafts
        # Every tensor that config.json asks for is there.
        assert "nothing is damaged" in checkpoint("verify", folder).out


def test_what_of_v4_cannot_be_cut_or_converted_is_refused(tmp_path, refused):
    source = write_v4(tmp_path / "w", v4_config("deepseek-v4-flash-dspark", **V4_SMALL))
    said = {
        "--experts: expected": ("cut", LAYERS, 4, EXPERTS, 1),
        "of at least 3": ("cut", LAYERS, 2, "--mtp"),
        "found V4,": ("quantize", "--to", "bf16"),
    }
    for words, (form, *options) in said.items():
        code = 2 if form == "cut" else 1
        assert words in refused(form, source, *options, "--output", tmp_path / "cut", code=code)
    config = read(source, "config.json")
    (source / "config.json").write_text(json.dumps({"text_config": config}))
    assert "found V4.1" in refused("cut", source, LAYERS, 4, OUTPUT, tmp_path / "cut", code=2)


def test_numbers_may_be_null(tmp_path, w4afp8):
    nulls = dict.fromkeys(("first_k_dense_replace", "num_nextn_predict_layers", "topk_group", "n_group"))
    (w4afp8 / "config.json").write_text(json.dumps(CONFIG | nulls))
    cut(w4afp8, *EIGHT, OUTPUT, tmp_path / "cut")
    assert read(tmp_path / "cut", "config.json")["first_k_dense_replace"] is None


def test_strange_names_and_shapes_and_all_types_are_copied(tmp_path):
    names = ["a\nb", "a\0b", "model.layers.0.²", "model.layers.0.x.y", "model.layers.0.5.y"]
    tensors = {**dict.fromkeys(names, ("BF16", (2, 2))), "model.layers.0.z": ("F32", (2**62, 0))}
    tensors |= {f"{dtype}.{number}": (dtype, (3, 1, 5)[:number]) for dtype in DTYPES for number in range(4)}
    write(tmp_path / "w", tensors)
    found, source = cut(tmp_path / "w", LAYERS, 1, OUTPUT, tmp_path / "cut"), open_checkpoint(tmp_path / "w")
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in found.items()} == tensors
    assert all(same(found, name, source) for name, tensor in found.items() if tensor.num_bytes)


def test_the_folder_where_it_runs_and_one_that_holds_something_are_not_replaced(tmp_path, refused, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").touch()
    monkeypatch.chdir(tmp_path / "here")

    for output in (".", "../here"):
        assert "expected another folder than the one it runs in" in refused("cut", TINY, *TWO, OUTPUT, output)
    assert "name another one" in refused("cut", TINY, *TWO, OUTPUT, tmp_path / "full")
    cut(TINY, *TWO, OUTPUT, "new")
    assert {path.name for path in tmp_path.glob("**/*") if path.is_dir()} == {"here", "full", "new"}
    assert (tmp_path / "full/mine").exists()


def test_a_stop_or_a_file_that_shrinks_leaves_nothing(tmp_path, w4afp8):
    planned = plan_cut(open_checkpoint(TINY), read_config(TINY), CutOptions(num_layers=2))
    for moment in range(0, 40, 8):
        asked = iter(range(1000))
        stopped = {"on_progress": lambda _: None, "should_stop": lambda: next(asked) >= moment}  # noqa: B023
        assert not write_cut(planned, tmp_path / "cut", **stopped)
        assert [path.name for path in tmp_path.iterdir()] == ["w"]

    planned = plan_cut(open_checkpoint(w4afp8), read_config(w4afp8), CutOptions(num_layers=2))
    with (w4afp8 / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, 2) - 100)  # the end of lm_head
    with pytest.raises(CheckpointError, match=r"within the tensor lm_head\.weight"):
        write_cut(planned, tmp_path / "cut", on_progress=lambda _: None)
    assert [path.name for path in tmp_path.iterdir()] == ["w"]


@pytest.mark.slow
def test_a_large_tensor_is_never_in_memory_as_a_whole(tmp_path):
    rows = 2**14
    tensors = {f"model.layers.{n}.x": ("BF16", (rows if n == 0 else 1, 2048)) for n in range(4)}
    folder = write(tmp_path / "w", tensors)
    planned = plan_cut(open_checkpoint(folder), read_config(folder), CutOptions(num_layers=1))
    tracemalloc.start()
    try:
        write_cut(planned, tmp_path / "cut", on_progress=lambda _: None)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert planned.size > 2**26
    assert peak < 2**26 * 0.6
