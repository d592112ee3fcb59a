"""`checkpoint info` says what lies in a folder, as the files have it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from bench.synthetic_checkpoint import CONFIG, make_checkpoint

from deepseek_triton_tools.checkpoints.info import PARTS
from deepseek_triton_tools.cli.main import main
from support.small_checkpoint import TINY, write_checkpoint
from support.v4_checkpoint import v4_config, write_v4


@pytest.fixture
def info(checkpoint):
    """What `checkpoint info` says of a folder or a name."""

    def run(source, code=0):
        document = json.loads(checkpoint("info", source, "--json", code=code).out)
        assert document["schema"] == "deepseek-triton/checkpoint/1"
        [entry] = document["checkpoints"]
        return entry

    return run


@pytest.fixture
def tiny(tmp_path):
    """A copy."""
    return shutil.copytree(TINY, tmp_path / "tiny")


def test_the_tiny_checkpoint(info, checkpoint):
    entry = info(TINY)

    assert (entry["variants"], entry["precision"]) == (["tiny", "tiny-r1", "tiny-v4"], "fp8")
    assert (entry["num_layers"], entry["num_mtp_layers"], entry["num_routed_experts"]) == (3, 1, 8)
    assert entry["context_length"] == 4096
    parts = {part["part"]: part for part in entry["parts"]}
    assert parts["embedding"]["bytes"] == 1280 * 256 * 2
    assert parts["routed experts"]["bytes"] == 2 * 8 * 3 * 256 * 256  # layers, experts, matrices of one byte a value
    assert parts["dense MLP"]["dtypes"] == ["F8_E4M3"]
    assert sum(part["tensors"] for part in entry["parts"]) == entry["num_tensors"]
    header = int.from_bytes((TINY / "model.safetensors").read_bytes()[:8], "little")
    assert entry["bytes"] == (TINY / "model.safetensors").stat().st_size - 8 - header
    assert "other" not in parts
    out = checkpoint("info", TINY).out  # for people
    shown = ("fp8", "3, and 1 MTP layer", "routed experts")
    assert [text for text in shown if text not in out] == []


@pytest.mark.slow
def test_every_tensor_of_r1_has_a_part_and_the_catalogue_says_what_serves_it(tmp_path, info):
    """DeepSeek-R1's tensors with small widths, in 61 layers of 256 experts, without their bytes."""
    small = tmp_path / "DeepSeek-R1"
    make_checkpoint(small, size=2 * 10**9, sparse=True)
    (small / "config.json").write_text(json.dumps(dict(CONFIG)))
    entry = info(small)

    assert entry["num_tensors"] == 91_991
    assert (entry["num_layers"], entry["num_mtp_layers"]) == (61, 1)
    assert {part["part"] for part in entry["parts"]} == {*PARTS} - {"other", "hyper-connections"}
    assert entry["variants"] == ["deepseek-r1"]
    assert {gpu["gpu"]: gpu["published_gpus"] for gpu in entry["gpus"]}["h200"] == 8
    assert "1.2.1" in entry["trtllm_releases"]


def test_v4_has_layers_of_a_draft_beside_its_own(tmp_path, info, checkpoint):
    small = {"num_hidden_layers": 5, "n_routed_experts": 8}
    folders = [
        write_v4(tmp_path / "a", v4_config("deepseek-v4-flash", **small)),
        write_v4(tmp_path / "DeepSeek-V4-Flash-0731", v4_config("deepseek-v4-flash-dspark", **small)),
    ]
    entries = [info(folder) for folder in folders]

    keys = ("precision", "num_layers", "num_mtp_layers", "draft", "cut")
    left = "5 of 43 layers, 8 of 256 routed experts"
    assert [[entry[key] for key in keys] for entry in entries] == [
        ["mxfp4", 5, 1, "mtp", left],
        ["mxfp4", 5, 3, "dspark", left],
    ]
    assert [entry["variants"] for entry in entries] == [["deepseek-v4-flash"], ["deepseek-v4-flash-0731"]]
    parts = [{part["part"]: part["dtypes"] for part in entry["parts"]} for entry in entries]
    assert parts[0].keys() == {*PARTS} - {"dense MLP", "other"}
    assert parts[1].keys() == {*parts[0], "DSpark layers"} - {"MTP layer"}
    assert (parts[0]["routed experts"], parts[0]["scales"]) == (["I8"], ["F8_E8M0"])
    assert "3 DSpark layers" in checkpoint("info", folders[1]).out
    assert checkpoint("verify", folders[1]).out.endswith("nothing is damaged\n")


def test_a_repository_is_described_by_the_checkpoint_that_it_serves(tmp_path, capsys, info):
    root = tmp_path / "repository"
    assert main(["build", "tiny", "--output", str(root)]) == 0
    capsys.readouterr()
    entry = info(root)
    assert Path(entry["folder"]).resolve() == root / "tensorrt_llm/1/tiny"
    assert entry["precision"] == "fp8"


def test_a_name_in_the_hub_s_cache_has_a_revision_and_a_variant(tmp_path, info, monkeypatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = tmp_path / "models--deepseek-ai--DeepSeek-R1"
    make_checkpoint(folder / "snapshots" / commit, size=10**7, sparse=True)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(commit)
    config = {**CONFIG, "num_hidden_layers": 4, "n_routed_experts": 8}  # R1's widths, which the name goes with
    (folder / "snapshots" / commit / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    entry = info("deepseek-ai/DeepSeek-R1")

    assert entry["revision"] == commit
    assert entry["variants"] == ["deepseek-r1"]
    assert entry["cut"] == "4 of 61 layers, 8 of 256 routed experts"
    assert entry["gpus"] == []  # what serves the whole model says nothing about a cut one


def test_what_the_documents_say_is_held_against_the_weights(tiny, info):
    quant = {"quantization": {"quant_algo": "FP8_BLOCK_SCALES", "kv_cache_quant_algo": "FP8"}}
    (tiny / "hf_quant_config.json").write_text(json.dumps(quant))
    entry = info(tiny)
    assert (entry["quantization"], entry["kv_cache_quant_algo"]) == ("FP8_BLOCK_SCALES", "FP8")

    (tiny / "hf_quant_config.json").unlink()
    config = json.loads((tiny / "config.json").read_text()) | {"quantization_config": None, "num_hidden_layers": 5}
    (tiny / "config.json").write_text(json.dumps(config))
    entry = info(tiny, code=1)
    assert entry["precision"] == "fp8"
    problems = "\n".join(entry["problems"])
    assert "it says bf16, but the experts are stored as fp8" in problems
    assert "5 layers, of which 1 are not stored" in problems


def test_a_damaged_file_or_index_is_named(tiny, tmp_path, refused):
    with (tiny / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    assert "model.safetensors: truncated" in refused("info", tiny)

    folder = write_checkpoint(tmp_path / "a", {"lm_head.weight": np.ones((2, 2), np.float32)}, {"num_hidden_layers": 1})
    weight_map = {"lm_head.weight": "model-00001-of-000001.safetensors", "a.weight": "x\0.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for verb, *options in (["info"], ["cut", "--layers", "1", "--output", "x"]):
        assert "found no a.weight" in refused(verb, folder, *options)


def test_strange_names_and_endless_layers(tmp_path, info):
    names = ["a\nb", "lm_head.\n", "model.layers.0.²", "model.layers.0.x.y"]
    config = {"num_hidden_layers": 10**10, "num_nextn_predict_layers": None}
    write_checkpoint(tmp_path / "a", dict.fromkeys(names, np.ones((2, 2), np.float32)), config)
    entry = info(tmp_path / "a", code=1)

    assert {part["part"]: part["tensors"] for part in entry["parts"]} == {"head": 1, "other": 3}
    assert any("10000000000 layers, of which 9999999999 are not stored" in problem for problem in entry["problems"])


def test_files_of_deepseeks_inference_code_are_refused(tmp_path, refused):
    shutil.copy(TINY / "model.safetensors", tmp_path / "model0-mp8.safetensors")
    assert "name the folder that it was made of" in refused("info", tmp_path)
