"""`checkpoint quantize`: what is written, how it goes on after a kill, and what is refused."""

import hashlib
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from deepseek_triton_tools.checkpoints.companion_files import CONVERSION
from deepseek_triton_tools.checkpoints.number_formats import (
    GROUP,
    bfloat16_of,
    dequantize_blocks,
    dequantize_groups,
    float32_of,
)
from deepseek_triton_tools.checkpoints.shard_writer import sweep
from deepseek_triton_tools.checkpoints.stored_tensors import open_checkpoint
from deepseek_triton_tools.cli.main import main
from support.small_checkpoint import CONFIG, FP8, TINY, small_checkpoint, write_act_scales, write_checkpoint
from support.waiting import wait_for

CLI = [sys.executable, "-m", "deepseek_triton_tools.cli.main", "checkpoint", "quantize"]
EXPERT = "model.layers.1.mlp.experts.2.down_proj.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return small_checkpoint(tmp_path_factory.mktemp("source") / "fp8")


@pytest.fixture(scope="module")
def act_scales(tmp_path_factory):
    return write_act_scales(tmp_path_factory.mktemp("scales") / "act_scales.safetensors", CONFIG)


@pytest.fixture(scope="module")
def w4afp8(source, act_scales):
    output = source.with_name("w4afp8")
    options = ["--to", "w4afp8", "--act-scales", str(act_scales), "--output", str(output)]
    assert main(["checkpoint", "quantize", str(source), *options]) == 0
    return output


def quantize(source, *options):
    return main(["checkpoint", "quantize", str(source), *map(str, options)])


def document(folder, name):
    return json.loads((folder / name).read_text())


def weight(tensors, name):
    stored, scales = tensors[name].read(), tensors.get(f"{name}_scale_inv")
    if scales is None:
        return float32_of(stored)
    return (dequantize_groups if stored.dtype == np.int8 else dequantize_blocks)(stored, scales.read())


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


@pytest.mark.slow
def test_w4afp8_has_int4_experts_and_everything_else_as_it_was(source, w4afp8, act_scales):
    before, after = open_checkpoint(source), open_checkpoint(w4afp8)
    experts = {name for name in before if ".mlp.experts." in name and ".layers.3." not in name}
    scales = open_checkpoint(act_scales.parent)

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
def test_what_was_made_is_verified_and_known_without_being_told(w4afp8, tmp_path, capsys):
    assert main(["checkpoint", "verify", str(w4afp8)]) == 0
    capsys.readouterr()
    assert main(["checkpoint", "info", str(w4afp8), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoints"][0]["precision"] == "w4a8"

    damaged = tmp_path / "damaged"
    shutil.copytree(w4afp8, damaged)
    path = damaged / "model-00001-of-000001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert main(["checkpoint", "verify", str(damaged)]) == 1


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
def test_bfloat16_is_the_weight_itself(source, tmp_path):
    assert quantize(source, "--to", "bf16", "--output", tmp_path / "bf16") == 0

    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "bf16")
    assert set(after) == {name for name in before if not name.endswith("_scale_inv")}
    for name, tensor in after.items():
        assert (
            tensor.read().tobytes()
            == (before[name].read() if before[name].dtype != "F8_E4M3" else bfloat16_of(weight(before, name))).tobytes()
        )
    assert "quantization_config" not in document(tmp_path / "bf16", "config.json")


@pytest.mark.slow
def test_int4_comes_back_as_bfloat16(w4afp8, tmp_path):
    assert quantize(w4afp8, "--to", "bf16", "--output", tmp_path / "bf16") == 0

    before, after = open_checkpoint(w4afp8), open_checkpoint(tmp_path / "bf16")
    assert after[EXPERT].read().tobytes() == bfloat16_of(weight(before, EXPERT)).tobytes()
    assert {tensor.dtype for tensor in after.values()} == {"BF16", "F32"}
    assert not [name for name in after if name.endswith("input_scale")]


@pytest.mark.slow
def test_fp8_from_bfloat16_has_the_layout_that_deepseek_publishes(source, tmp_path):
    whole = small_checkpoint(tmp_path / "bf16", fp8=False)

    assert quantize(whole, "--to", "fp8", "--kv-cache", "fp8", "--output", tmp_path / "fp8") == 0

    published, ours = open_checkpoint(source), open_checkpoint(tmp_path / "fp8")
    assert {name: (one.dtype, one.shape, one.read().tobytes()) for name, one in ours.items()} == {
        name: (one.dtype, one.shape, one.read().tobytes()) for name, one in published.items()
    }
    assert document(tmp_path / "fp8", "config.json")["quantization_config"] == FP8
    assert document(tmp_path / "fp8", "hf_quant_config.json") == {
        "quantization": {"quant_algo": "FP8_BLOCK_SCALES", "kv_cache_quant_algo": "FP8"}
    }


@pytest.mark.slow
def test_w4afp8_of_bfloat16_has_fp8_where_it_is_not_int4(source, act_scales, tmp_path):
    whole = small_checkpoint(tmp_path / "bf16", fp8=False)
    options = ("--to", "w4afp8", "--act-scales", act_scales, "--output", tmp_path / "w4afp8")

    assert quantize(whole, *options) == 0

    ours, published = open_checkpoint(tmp_path / "w4afp8"), open_checkpoint(source)
    assert ours[EXPERT].dtype == "I8"
    for name, tensor in published.items():
        if ".mlp.experts." not in name or ".layers.3." in name:
            assert ours[name].read().tobytes() == tensor.read().tobytes(), name


@pytest.mark.slow
def test_the_mtp_layer_can_be_dropped(source, tmp_path):
    assert quantize(source, "--to", "fp8", "--mtp", "drop", "--output", tmp_path / "fp8") == 0

    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "fp8")
    assert set(after) == {name for name in before if ".layers.3." not in name}
    assert document(tmp_path / "fp8", "config.json")["num_nextn_predict_layers"] == 0


def test_the_kv_cache_alone_changes_one_file(source, tmp_path):
    folder = small_checkpoint(tmp_path / "fp8")
    before = digests(folder)

    assert main(["checkpoint", "quantize", str(folder), "--kv-cache", "fp8"]) == 0

    assert document(folder, "hf_quant_config.json") == {
        "quantization": {"quant_algo": "FP8_BLOCK_SCALES", "kv_cache_quant_algo": "FP8"}
    }
    assert {name: digest for name, digest in digests(folder).items() if name != "hf_quant_config.json"} == before


def test_w4afp8_takes_no_fp8_kv_cache(source, w4afp8, act_scales, tmp_path, capsys):
    before = digests(w4afp8)
    output = ("--output", tmp_path / "out")

    assert quantize(source, "--to", "w4afp8", "--act-scales", act_scales, "--kv-cache", "fp8", *output) == 1
    assert quantize(w4afp8, "--kv-cache", "fp8") == 1

    assert capsys.readouterr().err.count("TensorRT-LLM is known to crash") == 2
    assert digests(w4afp8) == before


@pytest.mark.slow
def test_shares_make_the_same_bytes_together(source, act_scales, tmp_path, capsys):
    options = ["--to", "w4afp8", "--act-scales", act_scales, "--shard-size", "200KB"]
    assert quantize(source, *options, "--output", tmp_path / "whole") == 0

    assert quantize(source, *options, "--output", tmp_path / "shared", "--share", "2/2") == 3
    assert not (tmp_path / "shared/config.json").exists()
    for form in ("verify", "info"):
        assert main(["checkpoint", form, str(tmp_path / "shared")]) == 1
        assert "found a conversion that was stopped; run the same checkpoint quantize again" in capsys.readouterr().err
    assert quantize(source, *options, "--output", tmp_path / "shared", "--share", "1/2") == 0

    assert digests(tmp_path / "shared") == digests(tmp_path / "whole")
    assert len(digests(tmp_path / "whole")) > 8


@pytest.mark.slow
def test_a_conversion_that_is_killed_again_and_again_makes_the_same_bytes(source, act_scales, tmp_path):
    options = ["--to", "w4afp8", "--act-scales", act_scales, "--shard-size", "50KB", "--workers", "2", "--output"]
    assert quantize(source, *options, tmp_path / "whole") == 0
    command = [*CLI, str(source), *map(str, options), str(tmp_path / "killed")]
    rng = random.Random(11)
    output = tmp_path / "killed"
    num_killed = 0
    while num_killed < 5 and not (output / "config.json").exists():
        wanted = rng.randrange(1, 6) + len(list(output.glob("*.safetensors")))
        with subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL) as process:
            while process.poll() is None and len(list(output.glob("*.safetensors"))) < wanted:
                pass
            if process.poll() is None:
                with_its_workers = rng.random() < 0.5
                (os.killpg if with_its_workers else os.kill)(process.pid, signal.SIGKILL)
                num_killed += 1

    assert quantize(source, *options, output) == 0

    assert num_killed >= 2
    wait_for(lambda: not list(output.glob("*.part")))  # a worker that outlived its main process ends at its next word
    assert digests(output) == digests(tmp_path / "whole")


@pytest.mark.slow
def test_a_conversion_that_is_stopped_says_so_and_goes_on(source, act_scales, tmp_path):
    output = tmp_path / "stopped"
    options = ["--to", "w4afp8", "--act-scales", act_scales, "--shard-size", "100KB", "--workers", "1", "--output"]
    command = [*CLI, str(source), *map(str, options), str(output)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not list(output.glob("*.safetensors")):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()

    assert process.returncode == 130
    assert "stopped; the same command goes on from here" in said
    assert not list(output.glob("*.part"))
    assert quantize(source, *options, output) == 0


@pytest.mark.slow
def test_a_worker_that_is_killed_is_named(source, tmp_path, monkeypatch, capsys):
    """As the kernel does where memory is short."""
    monkeypatch.setattr("deepseek_triton_tools.checkpoints.converting._write_shard", _die)

    assert quantize(source, "--to", "bf16", "--output", tmp_path / "bf16") == 1

    assert "a process that converts was killed; was memory short?" in capsys.readouterr().err


def _die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def changed_index(folder, change):
    index = document(folder, "model.safetensors.index.json")
    change(index["weight_map"])
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def changed_config(folder, **changes):
    (folder / "config.json").write_text(json.dumps({**document(folder, "config.json"), **changes}))


def missing_scales(folder):
    changed_index(folder, lambda weight_map: weight_map.update({"model.gone.weight": weight_map[EXPERT]}))


def strange_index(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": []}')


def deep_config(folder):
    (folder / "config.json").write_text("[" * 100_000)


def fewer_layers(folder):
    changed_config(folder, num_hidden_layers=10**10)


def no_mtp(folder):
    changed_config(folder, num_hidden_layers=4)


def other_experts(folder):
    changed_config(folder, n_routed_experts=5)


def pipe(folder):
    path = sorted(folder.glob("*.safetensors"))[1]
    path.unlink()
    os.mkfifo(path)


def cut_shard(folder):
    path = sorted(folder.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-100])


def no_number(folder):
    tensor = open_checkpoint(folder)["model.layers.1.mlp.experts.0.up_proj.weight"]
    with tensor.file.open("r+b") as file:
        file.seek(tensor.begin + 1000)
        file.write(b"\x7f")


def no_layers(folder):
    (folder / "config.json").write_text("{}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "options", "code", "said"),
    [
        (None, ["--to", "w4afp8"], 1, "expected --act-scales for w4afp8"),
        (None, ["--to", "fp8"], 1, "expected a checkpoint in another precision than fp8, found that one already"),
        (None, ["--to", "bf16", "--kv-cache", "fp8"], 1, "--kv-cache fp8 is written for fp8"),
        (None, [], 2, "expected --to w4afp8, fp8 or bf16, or --kv-cache fp8"),
        (cut_shard, ["--to", "bf16"], 1, "truncated: it has"),
        (None, ["--kv-cache", "fp8", "--mtp", "drop"], 2, "--output, --act-scales, --mtp and --share go with --to"),
        (no_layers, ["--to", "bf16"], 1, "expected num_hidden_layers as a whole number, found null"),
        (missing_scales, ["--to", "bf16"], 1, "expected every tensor that model.safetensors.index.json names"),
        (strange_index, ["--to", "bf16"], 1, "expected weight_map"),
        (deep_config, ["--to", "bf16"], 1, "config.json: expected JSON"),
        (fewer_layers, ["--to", "bf16"], 1, "by config.json, found no 4"),
        (no_mtp, ["--to", "bf16"], 1, "expected the MTP layer by config.json, found none"),
        (other_experts, ["--to", "bf16"], 1, "expected 5 routed experts by config.json, found others in layer 1"),
        (pipe, ["--to", "bf16"], 1, "expected a file, found a folder, a pipe or a device"),
    ],
)
def test_what_cant_be_is_refused_in_one_line_and_nothing_is_written(tmp_path, capsys, change, options, code, said):
    folder = small_checkpoint(tmp_path / "source")
    if change:
        change(folder)
    output = ["--output", str(tmp_path / "out")] if options else []

    assert quantize(folder, *options, *output) == code

    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_act_scales_that_miss_an_expert_are_refused(source, tmp_path, capsys):
    few = write_act_scales(tmp_path / "few.safetensors", {**CONFIG, "num_hidden_layers": 2})

    assert quantize(source, "--to", "w4afp8", "--act-scales", few, "--output", tmp_path / "out") == 1

    error = capsys.readouterr().err
    assert "found none for model.layers.2.mlp.experts.0." in error
    assert "and 11 more" in error


def test_a_folder_of_something_else_is_left_alone(source, tmp_path, capsys):
    (tmp_path / "precious").write_text("x")

    assert quantize(source, "--to", "bf16", "--output", tmp_path) == 1
    assert quantize(source, "--to", "bf16", "--output", source) == 1

    error = capsys.readouterr().err
    assert "expected an empty folder, or one of a conversion that was stopped" in error
    assert "expected a folder for the output outside the checkpoint's" in error
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


@pytest.mark.slow
def test_another_conversion_does_not_go_on_in_the_folder(source, act_scales, tmp_path, capsys):
    options = ["--output", tmp_path / "out", "--shard-size", "200KB"]
    assert quantize(source, "--to", "w4afp8", "--act-scales", act_scales, *options, "--share", "1/2") == 3

    assert quantize(source, "--to", "bf16", *options) == 1

    assert "another conversion was begun here" in capsys.readouterr().err


@pytest.mark.slow
def test_the_tiny_checkpoint_has_a_document(tmp_path, capsys):
    assert quantize(TINY, "--to", "bf16", "--output", tmp_path / "bf16", "--json") == 0

    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["complete"], found["files"]) == ("deepseek-triton/checkpoint-quantize/1", True, 1)
    assert found["bytes"] == sum(path.stat().st_size for path in (tmp_path / "bf16").glob("*.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["w4afp8", "bf16"])
def test_a_weight_that_is_no_number_is_named(target, act_scales, tmp_path, capsys):
    folder = small_checkpoint(tmp_path / "source")
    no_number(folder)
    scales = ["--act-scales", act_scales] if target == "w4afp8" else []

    assert quantize(folder, "--to", target, *scales, "--output", tmp_path / "out") == 1

    error = capsys.readouterr().err
    assert "model.layers.1.mlp.experts.0.up_proj.weight: expected numbers, found an infinite one or NaN" in error
    assert not list((tmp_path / "out").glob("*.safetensors*"))


@pytest.mark.slow
def test_a_bfloat16_weight_that_is_no_number_is_named(tmp_path, capsys):
    folder = small_checkpoint(tmp_path / "source", fp8=False)
    tensor = open_checkpoint(folder)["model.layers.1.mlp.experts.0.up_proj.weight"]
    with tensor.file.open("r+b") as file:
        file.seek(tensor.begin + 1000)
        file.write(b"\xff\x7f")

    assert quantize(folder, "--to", "fp8", "--output", tmp_path / "out") == 1

    assert "up_proj.weight: expected numbers, found an infinite one or NaN" in capsys.readouterr().err


@pytest.mark.slow
def test_the_same_command_once_more_finds_it_complete(source, tmp_path):
    output = tmp_path / "bf16"
    assert quantize(source, "--to", "bf16", "--output", output) == 0
    before = digests(output)

    assert quantize(source, "--to", "bf16", "--output", output, "--share", "2/3") == 0

    assert digests(output) == before


@pytest.mark.slow
def test_shares_that_end_together_make_one_checkpoint(source, act_scales, tmp_path):
    options = ["--to", "w4afp8", "--act-scales", act_scales, "--shard-size", "200KB", "--workers", "1"]
    assert quantize(source, *options, "--output", tmp_path / "whole") == 0
    output = tmp_path / "shared"
    command = [*CLI, str(source), *map(str, options), "--output", str(output), "--share"]

    shares = [subprocess.Popen([*command, f"{number}/2"], stdout=subprocess.DEVNULL) for number in (1, 2)]

    assert {share.wait() for share in shares} <= {0, 3}
    assert quantize(source, *options, "--output", output) == 0
    assert digests(output) == digests(tmp_path / "whole")
    assert main(["checkpoint", "verify", str(output)]) == 0


@pytest.mark.slow
def test_a_checkpoint_that_has_changed_is_not_gone_on_with(tmp_path, capsys):
    """R1's weights in the place of V3's have the same names and shapes."""
    folder, output = small_checkpoint(tmp_path / "source"), tmp_path / "out"
    options = ["--to", "bf16", "--output", output, "--shard-size", "200KB"]
    assert quantize(folder, *options, "--share", "1/2") == 3
    tensor = open_checkpoint(folder)[EXPERT]
    with tensor.file.open("r+b") as file:
        file.seek(tensor.begin)
        file.write(b"\x01")

    assert quantize(folder, *options) == 1

    assert "or the checkpoint has changed" in capsys.readouterr().err


def test_other_quantizations_are_refused(tmp_path, capsys):
    name = "model.layers.0.mlp.up_proj.weight_packed"
    folder = write_checkpoint(tmp_path / "source", {name: np.zeros((4, 4), np.int32)}, CONFIG)

    assert quantize(folder, "--to", "bf16", "--output", tmp_path / "out") == 1

    assert f"{name}: expected FP8 in blocks, W4AFP8 or BF16, F16, F32, F64, found I32" in capsys.readouterr().err


@pytest.mark.slow
def test_what_the_checkpoint_says_of_its_scales_stays_where_they_stay(tmp_path):
    folder = small_checkpoint(tmp_path / "source")
    section = {**FP8, "scale_fmt": "ue8m0"}
    changed_config(folder, quantization_config=section)

    assert quantize(folder, "--to", "fp8", "--mtp", "drop", "--output", tmp_path / "out") == 0

    assert document(tmp_path / "out", "config.json")["quantization_config"] == section


@pytest.mark.slow
def test_names_that_are_odd_are_copied(tmp_path):
    odd = {f"model.odd.{part}.weight": np.ones(8, np.float32) for part in ("²", "1", "x")}
    before = {name: tensor.read() for name, tensor in open_checkpoint(small_checkpoint(tmp_path / "small")).items()}
    config = document(tmp_path / "small", "config.json")
    folder = write_checkpoint(tmp_path / "source", {**before, **odd}, config)

    assert quantize(folder, "--to", "bf16", "--output", tmp_path / "out") == 0

    assert odd.keys() < open_checkpoint(tmp_path / "out").keys()


@pytest.mark.slow
def test_the_manifest_follows_a_new_kv_cache(source, tmp_path):
    whole = small_checkpoint(tmp_path / "bf16", fp8=False)
    assert quantize(whole, "--to", "fp8", "--output", tmp_path / "fp8") == 0

    assert quantize(tmp_path / "fp8", "--kv-cache", "fp8") == 0

    assert main(["checkpoint", "verify", str(tmp_path / "fp8")]) == 0
    assert "hf_quant_config.json" in document(tmp_path / "fp8", "checkpoint.sha256.json")["files"]


def test_scales_of_another_model_are_refused(source, tmp_path, capsys):
    more = write_act_scales(tmp_path / "more.safetensors", {**CONFIG, "n_routed_experts": 8})

    assert quantize(source, "--to", "w4afp8", "--act-scales", more, "--output", tmp_path / "out") == 1

    assert "found some of model.layers.1.mlp.experts.4; are they another model's?" in capsys.readouterr().err


def test_the_output_is_not_put_into_the_checkpoint(source, capsys):
    assert quantize(source, "--to", "bf16", "--output", source / "bf16") == 1

    assert "expected a folder for the output outside the checkpoint's" in capsys.readouterr().err
    assert not (source / "bf16").exists()


def test_what_a_killed_process_has_left_is_swept_though_nobody_has_asked_for_its_end(tmp_path):
    with subprocess.Popen(["sleep", "600"]) as process:
        name = f"model-00001-of-000002.safetensors.{platform.node()}-{process.pid}.part"
        (tmp_path / name).write_bytes(b"half")
        sweep(tmp_path)
        assert (tmp_path / name).exists()

        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        sweep(tmp_path)

        assert not (tmp_path / name).exists()
