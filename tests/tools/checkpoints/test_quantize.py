"""`checkpoint quantize`: what is written, how it goes on after a kill, and what is refused."""

import errno
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from deepseek_triton_tools.checkpoints.folder_files import CONVERSION
from deepseek_triton_tools.checkpoints.number_formats import (
    GROUP,
    bfloat16_of,
    dequantize_blocks,
    dequantize_groups,
    float32_of,
)
from deepseek_triton_tools.checkpoints.stored_tensors import open_checkpoint
from deepseek_triton_tools.cli.main import main
from support.small_checkpoint import CONFIG, FP8, TINY, small_checkpoint, write_act_scales, write_checkpoint
from support.waiting import wait_for

CLI = [sys.executable, "-m", "deepseek_triton_tools.cli.main", "checkpoint", "quantize"]
EXPERT = "model.layers.1.mlp.experts.2.down_proj.weight"
INDEX = "model.safetensors.index.json"
TO_BF16 = ("--to", "bf16", "--output")


def quantize(source, *options):
    return main(["checkpoint", "quantize", str(source), *map(str, options)])


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return small_checkpoint(tmp_path_factory.mktemp("source") / "fp8")


@pytest.fixture(scope="module")
def whole(source):
    """The same in bfloat16."""
    return small_checkpoint(source.with_name("bf16"), fp8=False)


@pytest.fixture(scope="module")
def to_w4afp8(tmp_path_factory):
    """The options."""
    scales = write_act_scales(tmp_path_factory.mktemp("scales") / "act_scales.safetensors", CONFIG)
    return ["--to", "w4afp8", "--act-scales", str(scales)]


@pytest.fixture(scope="module")
def w4afp8(source, to_w4afp8):
    output = source.with_name("w4afp8")
    assert quantize(source, *to_w4afp8, "--output", output) == 0
    return output


def document(folder, name):
    return json.loads((folder / name).read_text())


def contents(folder):
    """Name -> type, shape and bytes of a tensor."""
    return {name: (one.dtype, one.shape, one.read().tobytes()) for name, one in open_checkpoint(folder).items()}


def weight(tensors, name):
    stored, scales = tensors[name].read(), tensors.get(f"{name}_scale_inv")
    if scales is None:
        return float32_of(stored)
    return (dequantize_groups if stored.dtype == np.int8 else dequantize_blocks)(stored, scales.read())


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


def overwrite(tensor, content, at=1000):
    with tensor.file.open("r+b") as file:
        file.seek(tensor.begin + at)
        file.write(content)


# --- What is written ---


@pytest.mark.slow
def test_w4afp8_has_int4_experts_and_everything_else_as_it_was(source, w4afp8, to_w4afp8):
    before, after = open_checkpoint(source), open_checkpoint(w4afp8)
    experts = {name for name in before if ".mlp.experts." in name and ".layers.3." not in name}
    scales = open_checkpoint(Path(to_w4afp8[-1]).parent)

    assert set(after) == set(before) | set(scales)
    for name in before.keys() - experts:
        assert before[name].read().tobytes() == after[name].read().tobytes(), name
    for name in scales:
        assert after[name].read() == scales[name].read()
    for name in sorted(name for name in experts if name.endswith("weight")):
        rows, columns = before[name].shape
        assert (after[name].dtype, after[name].shape) == ("I8", (rows, columns // 2))
        assert after[f"{name}_scale_inv"].shape == (rows, columns // GROUP)
        wanted = float32_of(bfloat16_of(weight(before, name)))
        steps = after[f"{name}_scale_inv"].read().repeat(GROUP, axis=1)
        assert (np.abs(weight(after, name) - wanted) <= steps * 0.5001).all()


@pytest.mark.slow
def test_what_was_made_is_verified_and_known_without_being_told(w4afp8, checkpoint):
    checkpoint("verify", w4afp8)
    assert json.loads(checkpoint("info", w4afp8, "--json").out)["checkpoints"][0]["precision"] == "w4a8"
    path = w4afp8 / "model-00001-of-000001.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    checkpoint("verify", w4afp8, code=1)
    path.write_bytes(content)


@pytest.mark.slow
def test_w4afp8_says_what_it_is_as_tensorrt_llm_reads_it(w4afp8):
    layers = document(w4afp8, "quant_cfg.json")["quantized_layers"]

    assert "quantization_config" not in document(w4afp8, "config.json")
    assert document(w4afp8, "hf_quant_config.json") == {
        "quantization": {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None}
    }
    assert layers["model.layers.1.mlp.experts"] == layers["model.layers.2.mlp.experts"] == {"quant_algo": "W4A8_AWQ"}
    assert layers["model.layers.3.mlp.experts"] == {"quant_algo": "FP8_BLOCK_SCALES"}
    assert layers["model.layers.0.mlp.gate_up_proj"] == {"quant_algo": "FP8_BLOCK_SCALES"}
    assert len(layers) == 4 * 4 + 2 + 3 * 3
    assert (w4afp8 / "tokenizer_config.json").is_file()
    assert [path.name for path in (w4afp8 / CONVERSION).iterdir()] == ["plan.json"]
    assert not list(w4afp8.glob("*.part"))


@pytest.mark.slow
def test_bfloat16_is_the_weight_itself(source, w4afp8, tmp_path):
    assert quantize(source, *TO_BF16, tmp_path / "bf16") == 0
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "bf16")
    assert set(after) == {name for name in before if not name.endswith("_scale_inv")}
    for name, tensor in after.items():
        wanted = bfloat16_of(weight(before, name)) if before[name].dtype == "F8_E4M3" else before[name].read()
        assert tensor.read().tobytes() == wanted.tobytes()
    assert "quantization_config" not in document(tmp_path / "bf16", "config.json")
    # The same command once more finds it complete.
    made = digests(tmp_path / "bf16")
    assert quantize(source, *TO_BF16, tmp_path / "bf16", "--share", "2/3") == 0
    assert digests(tmp_path / "bf16") == made

    assert quantize(w4afp8, *TO_BF16, tmp_path / "of_int4") == 0
    before, after = open_checkpoint(w4afp8), open_checkpoint(tmp_path / "of_int4")
    assert after[EXPERT].read().tobytes() == bfloat16_of(weight(before, EXPERT)).tobytes()
    assert {tensor.dtype for tensor in after.values()} == {"BF16", "F32"}
    assert not [name for name in after if name.endswith("input_scale")]


@pytest.mark.slow
def test_fp8_from_bfloat16_has_the_layout_that_deepseek_publishes(source, whole, to_w4afp8, tmp_path):
    fp8 = tmp_path / "fp8"
    assert quantize(whole, "--to", "fp8", "--kv-cache", "fp8", "--output", fp8) == 0
    assert contents(fp8) == contents(source)
    assert document(fp8, "config.json")["quantization_config"] == FP8
    assert document(fp8, "hf_quant_config.json") == {
        "quantization": {"quant_algo": "FP8_BLOCK_SCALES", "kv_cache_quant_algo": "FP8"}
    }
    # W4AFP8 of bfloat16 has FP8 where it is not INT4.
    assert quantize(whole, *to_w4afp8, "--output", tmp_path / "w4afp8") == 0
    ours = contents(tmp_path / "w4afp8")
    assert ours[EXPERT][0] == "I8"
    for name, tensor in contents(source).items():
        if ".mlp.experts." not in name or ".layers.3." in name:
            assert ours[name] == tensor, name


@pytest.mark.slow
def test_the_mtp_layer_can_be_dropped(tmp_path):
    """What the checkpoint says of its scales stays where they stay."""
    section = {**FP8, "scale_fmt": "ue8m0"}
    folder = small_checkpoint(tmp_path / "source")
    changed_config(quantization_config=section)(folder)
    assert quantize(folder, "--to", "fp8", "--mtp", "drop", "--output", tmp_path / "fp8") == 0

    before, after = open_checkpoint(folder), open_checkpoint(tmp_path / "fp8")
    assert set(after) == {name for name in before if ".layers.3." not in name}
    assert document(tmp_path / "fp8", "config.json")["num_nextn_predict_layers"] == 0
    assert document(tmp_path / "fp8", "config.json")["quantization_config"] == section


@pytest.mark.slow
def test_the_kv_cache_alone_changes_one_file_and_the_manifest(whole, tmp_path, checkpoint):
    folder, fp8 = small_checkpoint(tmp_path / "source"), tmp_path / "fp8"
    before = digests(folder)
    checkpoint("quantize", folder, "--kv-cache", "fp8")
    assert document(folder, "hf_quant_config.json") == {
        "quantization": {"quant_algo": "FP8_BLOCK_SCALES", "kv_cache_quant_algo": "FP8"}
    }
    assert {name: digest for name, digest in digests(folder).items() if name != "hf_quant_config.json"} == before

    checkpoint("quantize", whole, "--to", "fp8", "--output", fp8)
    checkpoint("quantize", fp8, "--kv-cache", "fp8")
    checkpoint("verify", fp8)
    assert "hf_quant_config.json" in document(fp8, "checkpoint.sha256.json")["files"]


@pytest.mark.slow
def test_the_tiny_checkpoint_has_a_document(tmp_path, checkpoint):
    found = json.loads(checkpoint("quantize", TINY, *TO_BF16, tmp_path / "bf16", "--json").out)
    assert (found["schema"], found["complete"], found["files"]) == ("deepseek-triton/checkpoint-quantize/1", True, 1)
    assert found["bytes"] == sum(path.stat().st_size for path in (tmp_path / "bf16").glob("*.safetensors"))


# --- Shares, stops and kills ---


@pytest.mark.slow
def test_shares_make_the_same_bytes_together(source, to_w4afp8, tmp_path, checkpoint):
    options = [*to_w4afp8, "--shard-size", "200KB", "--workers", "1", "--output"]
    made, shared, together = (tmp_path / name for name in ("whole", "shared", "together"))
    assert quantize(source, *options, made) == 0
    assert len(digests(made)) > 8

    assert quantize(source, *options, shared, "--share", "2/2") == 3
    assert not (shared / "config.json").exists()
    for form in ("verify", "info"):
        assert "run the same checkpoint quantize again" in checkpoint(form, shared, code=1).err
    assert "another conversion was begun here" in checkpoint("quantize", source, *TO_BF16, shared, code=1).err
    assert quantize(source, *options, shared, "--share", "1/2") == 0
    assert digests(shared) == digests(made)

    command = [*CLI, str(source), *options, str(together), "--share"]
    shares = [subprocess.Popen([*command, f"{number}/2"], stdout=subprocess.DEVNULL) for number in (1, 2)]
    assert {share.wait() for share in shares} <= {0, 3}
    assert quantize(source, *options, together) == 0
    assert digests(together) == digests(made)
    checkpoint("verify", together)


def killed(source, options, output, num_kills, seed):
    """Kill the conversion at random moments; how often it was under way."""
    rng = random.Random(seed)
    num_killed = 0
    while num_killed < num_kills and not (output / "config.json").exists():
        wanted = rng.randrange(1, 6) + len(list(output.glob("*.safetensors")))
        command = [*CLI, str(source), *options, str(output)]
        with subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL) as process:
            while process.poll() is None and len(list(output.glob("*.safetensors"))) < wanted:
                pass
            if process.poll() is None:
                (os.killpg if rng.random() < 0.5 else os.kill)(process.pid, signal.SIGKILL)
                num_killed += 1
    return num_killed


@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [1, pytest.param(5, marks=pytest.mark.nightly)])
def test_a_conversion_that_is_killed_makes_the_same_bytes(source, to_w4afp8, tmp_path, num_kills):
    options = [*to_w4afp8, "--shard-size", "50KB", "--workers", "2", "--output"]
    assert quantize(source, *options, tmp_path / "whole") == 0
    output = tmp_path / "killed"

    assert killed(source, options, output, num_kills, seed=11) >= (num_kills + 1) // 2
    assert quantize(source, *options, output) == 0
    wait_for(lambda: not list(output.glob("*.part")))  # a worker that outlived its main process ends at its next word
    assert digests(output) == digests(tmp_path / "whole")


@pytest.mark.slow
def test_a_conversion_that_is_stopped_says_so_and_goes_on(source, to_w4afp8, tmp_path):
    output = tmp_path / "stopped"
    options = [*to_w4afp8, "--shard-size", "100KB", "--workers", "1", "--output", str(output)]
    with subprocess.Popen([*CLI, str(source), *options], stderr=subprocess.PIPE, text=True) as process:
        while not list(output.glob("*.safetensors")):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()

    assert process.returncode == 130
    assert "stopped; the same command goes on from here" in said
    assert not list(output.glob("*.part"))
    assert quantize(source, *options) == 0


@pytest.mark.slow
def test_a_worker_that_is_killed_is_named(source, tmp_path, monkeypatch, checkpoint):
    """As the kernel does where memory is short."""
    monkeypatch.setattr("deepseek_triton_tools.checkpoints.converting._write_shard", _die)
    assert "was memory short?" in checkpoint("quantize", source, *TO_BF16, tmp_path / "bf16", code=1).err


def _die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_lack_of_descriptors_is_not_taken_for_a_killed_worker(source, tmp_path, monkeypatch, refused):
    def no_pipe(_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("multiprocessing.context.SpawnContext.Pipe", no_pipe)
    line = refused("quantize", source, *TO_BF16, tmp_path / "bf16")
    assert os.strerror(errno.EMFILE) in line
    assert "killed" not in line


@pytest.mark.slow
def test_a_checkpoint_that_has_changed_is_not_gone_on_with(tmp_path, checkpoint):
    """R1's weights in the place of V3's have the same names and shapes."""
    folder = small_checkpoint(tmp_path / "source")
    options = (*TO_BF16, tmp_path / "out", "--shard-size", "200KB")
    assert quantize(folder, *options, "--share", "1/2") == 3
    overwrite(open_checkpoint(folder)[EXPERT], b"\x01", at=0)
    assert "or the checkpoint has changed" in checkpoint("quantize", folder, *options, code=1).err


# --- What is refused ---


def changed_config(**changes):
    return lambda folder: (folder / "config.json").write_text(json.dumps(document(folder, "config.json") | changes))


def written(name, text):
    return lambda folder: (folder / name).write_text(text)


def missing_tensor(folder):
    weight_map = document(folder, INDEX)["weight_map"]
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map | {"model.gone.weight": weight_map[EXPERT]}}))


def pipe(folder):
    path = sorted(folder.glob("*.safetensors"))[1]
    path.unlink()
    os.mkfifo(path)


def cut_shard(folder):
    path = sorted(folder.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-100])


BF16 = ["--to", "bf16"]
REFUSED = [
    (None, ["--to", "w4afp8"], 2, "expected --act-scales for w4afp8"),
    (None, ["--to", "fp8"], 2, "expected a checkpoint in another precision than fp8, found that one already"),
    (None, [*BF16, "--kv-cache", "fp8"], 2, "--kv-cache fp8 is written for fp8"),
    (None, [], 2, "expected --to w4afp8, fp8 or bf16, or --kv-cache fp8"),
    (None, ["--kv-cache", "fp8", "--workers", "2"], 2, "--output, --act-scales, --mtp, --share, --workers and"),
    (cut_shard, BF16, 1, "truncated: it has"),
    (written("config.json", "{}"), BF16, 1, "expected num_hidden_layers as a whole number, found null"),
    (missing_tensor, BF16, 1, "expected every tensor that model.safetensors.index.json names"),
    (written(INDEX, '{"weight_map": []}'), BF16, 1, "expected weight_map"),
    (written("config.json", "[" * 100_000), BF16, 1, "config.json: expected JSON"),
    (changed_config(num_hidden_layers=10**10), BF16, 1, "by config.json, found no 4"),
    (changed_config(num_hidden_layers=4), BF16, 1, "expected the MTP layer by config.json, found none"),
    (changed_config(n_routed_experts=5), BF16, 1, "expected 5 routed experts by config.json, found others in layer 1"),
    (pipe, BF16, 1, "expected a file, found a folder, a pipe or a device"),
]


@pytest.mark.slow
def test_what_cant_be_is_refused_in_one_line_and_nothing_is_written(tmp_path, refused, subtests):
    for number, (change, options, code, said) in enumerate(REFUSED):
        with subtests.test(said):
            folder = small_checkpoint(tmp_path / str(number))
            if change:
                change(folder)
            output = ["--output", tmp_path / "out"] if options else []
            assert said in refused("quantize", folder, *options, *output, code=code)
            assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_w4afp8_takes_no_fp8_kv_cache(source, w4afp8, to_w4afp8, tmp_path, refused):
    before = digests(w4afp8)
    for words in ((source, *to_w4afp8, "--output", tmp_path / "out"), (w4afp8,)):
        assert "TensorRT-LLM is known to crash" in refused("quantize", *words, "--kv-cache", "fp8", code=2)
    assert digests(w4afp8) == before


def test_scales_that_miss_an_expert_or_are_another_models_are_refused(source, tmp_path, refused):
    cases = {
        "found none for model.layers.2.mlp.experts.0.": {"num_hidden_layers": 2},
        "found some of model.layers.1.mlp.experts.4; are they another model's?": {"n_routed_experts": 8},
    }
    for number, (said, changes) in enumerate(cases.items()):
        scales = write_act_scales(tmp_path / f"{number}.safetensors", {**CONFIG, **changes})
        options = ("--to", "w4afp8", "--act-scales", scales, "--output", tmp_path / "out")
        line = refused("quantize", source, *options, code=2)
        assert said in line
        assert ("and 11 more" in line) == (number == 0)


def test_a_folder_of_something_else_is_left_alone(source, tmp_path, refused):
    (tmp_path / "precious").write_text("x")
    assert "expected an empty folder" in refused("quantize", source, *TO_BF16, tmp_path)
    for output in (source, source / "bf16"):
        assert "outside the checkpoint's" in refused("quantize", source, *TO_BF16, output)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
    assert not (source / "bf16").exists()


@pytest.mark.slow
def test_a_weight_that_is_no_number_is_named(to_w4afp8, tmp_path, checkpoint):
    name = "model.layers.1.mlp.experts.0.up_proj.weight"
    cases = [(True, b"\x7f", to_w4afp8), (True, b"\x7f", BF16), (False, b"\xff\x7f", ["--to", "fp8"])]
    for number, (fp8, content, options) in enumerate(cases):
        folder, output = small_checkpoint(tmp_path / f"source{number}", fp8=fp8), tmp_path / f"out{number}"
        overwrite(open_checkpoint(folder)[name], content)
        said = checkpoint("quantize", folder, *options, "--output", output, code=1).err
        assert f"{name}: expected numbers, found an infinite one or NaN" in said
        assert not list(output.glob("*.safetensors*"))


def test_other_quantizations_are_refused(tmp_path, refused):
    name = "model.layers.0.mlp.up_proj.weight_packed"
    folder = write_checkpoint(tmp_path / "source", {name: np.zeros((4, 4), np.int32)}, CONFIG)
    line = refused("quantize", folder, *TO_BF16, tmp_path / "out")
    assert f"{name}: expected FP8 in blocks, W4AFP8 or BF16, F16, F32, F64, found I32" in line
