import json
import os
import shlex

import pytest

from deepseek_triton_build import FORMATS
from support.checked import tree
from support.commands import run_command

R1 = ["deepseek-r1", "--gpu", "h200", "--gpus", "8"]


def built(folder, *argv):
    """What is printed."""
    done = run_command("build", *argv, "--output", str(folder))
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(folder, *argv, code=1):
    """The lines on stderr."""
    done = run_command("build", *argv, "--output", str(folder))
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    return done.stderr.splitlines()


def checkpoint(folder):
    folder.mkdir()
    config = {"architectures": ["DeepseekV3ForCausalLM"], "quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
def test_it_says_what_it_wrote_and_how_to_run_it(tmp_path):
    """A folder that was there is said to be replaced. A long load is announced where the container downloads it."""
    output = tmp_path / "it's r 1"
    for said in ("wrote", "replaced"):
        printed = built(output, *R1, "--set", "max_batch_size=1024")
        assert printed.startswith(f"{said} {output}: ")
        words = ("KV cache", "-trtllm-py", "requests at once", "\nWarnings and notes\n", "641 GiB for the container")
        assert [each for each in words if each not in printed] == []
        assert f"run it there: {shlex.quote(f'{output}/start.sh')}\n" in printed
    assert (output / "tensorrt_llm/1/release.yaml").is_file()
    assert "me/my-r1, on Hugging Face" in built(output, *R1, "--model", "me/my-r1", "--force")
    printed = built(tmp_path / "v3", "deepseek-v3", "--gpu", "h100", "--gpus", "16")
    assert f"run it on 2 nodes: {tmp_path}/v3/start.sh on the first" in printed
    assert f"run it here: deepseek-triton serve '{tmp_path}/a tiny'\n" in built(tmp_path / "a tiny", "tiny")


def test_every_format(tmp_path):
    help_text = run_command("build", "--help-all").stdout
    for name, format in FORMATS.items():
        assert f"{tmp_path / name}/{format.start}" in built(tmp_path / name, *R1, "--format", name)
        assert (tmp_path / name / format.start).is_file()
        assert name in help_text


@pytest.mark.slow
def test_both_files_say_whether_the_model_is_decoupled(tmp_path):
    for number, argv in enumerate(
        (
            R1,
            [*R1, "--no-decoupled"],
            [*R1, "--set", "triton_config.decoupled=false"],
            ["tiny", "--engine", "simulated", "--no-decoupled"],
        )
    ):
        folder, expected = tmp_path / str(number), "true" if argv == R1 else "false"
        built(folder, *argv)
        config = (folder / "tensorrt_llm/config.pbtxt").read_text()
        assert f"model_transaction_policy {{ decoupled: {expected} }}" in config
        assert f"  decoupled: {expected}\n" in (folder / "tensorrt_llm/1/model.yaml").read_text()
        assert run_command("check", str(folder)).returncode == 0


@pytest.mark.slow
def test_what_cant_be_built_is_one_line_and_leaves_nothing(tmp_path):
    for argv, code, expected in (
        (["--no-decoupled", "--format", "trtllm-serve"], 1, "only Triton has a use for it"),
        (["--profile", "ctx", "--format", "quickstart"], 1, "--format trtllm-serve"),
        (["--format", "vllm"], 2, "unknown format 'vllm'"),
        (["--gpus", "4"], 1, "--gpus 8"),
        (["--model", "~/no/R1"], 2, os.path.expanduser("~/no/R1")),
        (["--write-quant-config"], 2, "expected --model with its folder"),
        (["--set", "nonsense=1"], 1, "nonsense is not an LLM argument"),
    ):
        [line] = refused(tmp_path / "out", *R1, *argv, code=code)
        assert line.startswith("deepseek-triton build: ")
        assert expected in line
        assert list(tmp_path.iterdir()) == []
    [line] = refused("/proc/r1", *R1)  # where nobody may write, root included
    assert "/proc/r1: can't be written" in line


@pytest.mark.slow
def test_hand_edits_are_shown_and_kept_until_forced(tmp_path):
    output = tmp_path / "r1"
    here = [*R1, "--model", "/models/DeepSeek R1"]
    built(output, *here)
    path = output / "tensorrt_llm/1/model.yaml"
    path.write_text(path.read_text().replace("max_num_tokens: 8192", "max_num_tokens: 4096"))
    before = tree(output)
    *diff, line = refused(output, *here)
    assert {"-max_num_tokens: 4096", "+max_num_tokens: 8192"} <= set(diff)
    assert "--force replaces all of it" in line
    assert tree(output) == before

    built(output, *here, "--force")
    assert "max_num_tokens: 8192" in path.read_text()


TYPED = [
    "deepseek-r1 --gpu h200",
    "deepseek-r1-0528 --gpu b200 --precision fp4 --profile latency --mtp 1",
    "nvidia/DeepSeek-R1-FP4 --gpu b200 --image 26.02 --format trtllm-bench",
    'deepseek-r1 --gpu h200 --model "/a folder/it\'s" --isl 1024 --osl 64',
    "deepseek-r1 --gpu h200 --gpus 8 --set 'kv_cache_config={enable_block_reuse: false}' --set stream_interval=4",
    "deepseek-r1 --gpu b200 --gpus 4 --precision fp8 --allow-unpublished",
    "deepseek-r1 --gpu h200 --mtp 1 --relaxed-acceptance --kv-cache-dtype auto",
    "tiny --engine simulated",
]


@pytest.mark.slow
def test_the_stamps_options_typed_again_write_the_same_bytes(tmp_path, subtests):
    for number, options in enumerate(TYPED):
        with subtests.test(options):
            built(tmp_path / f"a{number}", *shlex.split(options))
            [stamp] = (tmp_path / f"a{number}").rglob("deepseek-triton.json")
            built(tmp_path / f"b{number}", *shlex.split(json.loads(stamp.read_text())["options"]))
            assert tree(tmp_path / f"a{number}") == tree(tmp_path / f"b{number}")


def test_json_says_what_was_written_and_whether_something_was_there(tmp_path):
    argv = [*R1, "--model", str(checkpoint(tmp_path / "R1")), "--write-quant-config", "--json"]
    first, second = (json.loads(built(tmp_path / "r1", *argv)) for _ in range(2))
    assert (first["schema"], first["output"]) == ("deepseek-triton/build/1", str(tmp_path / "r1"))
    assert (first["format"], first["start"]) == ("triton", "start.sh")
    assert set(first["files"]) == tree(tmp_path / "r1").keys()
    assert "hf_quant_config.json: written" in first["quant_config"]
    assert (first["plan"]["schema"], first["plan"]["gpus"]) == ("deepseek-triton/plan/1", 8)
    assert (first["replaced"], second["replaced"]) == (False, True)


@pytest.mark.slow
def test_write_quant_config(tmp_path):
    """A checkpoint that takes no change leaves no repository, and a refused build does not change it."""
    folder = checkpoint(tmp_path / "R1")
    build, config = [*R1, "--model", str(folder), "--write-quant-config"], folder / "hf_quant_config.json"
    refused("/proc/r1", *build)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert "hf_quant_config.json: written" in built(tmp_path / "a", *build)
    written = json.loads(config.read_text())
    assert written["quantization"] == {"quant_algo": "FP8_BLOCK_SCALES", "kv_cache_quant_algo": "FP8"}

    without = {"quantization": written["quantization"] | {"kv_cache_quant_algo": None}}
    config.write_text(json.dumps(without))
    assert f"as it was: {config}.bak" in built(tmp_path / "b", *build)
    assert json.loads(config.read_text()) == written

    config.write_text('{"quantization": {}, "more": 1e999}')
    [line] = refused(tmp_path / "c", *build)
    assert "holds a number that JSON can't express" in line
    assert not (tmp_path / "c").exists()


def test_plan_and_build_give_the_same_parts_of_the_memory(tmp_path):
    lines = run_command("plan", *R1).stdout.splitlines()
    summary = built(tmp_path / "r1", *R1)
    for part in ("weights", "CUDA graphs", "workspace"):
        [size] = [line.split(part)[1].split()[0] for line in lines if line[5:].startswith(f"{part} ")]
        assert f"{size} {part}" in summary


INT4 = {"weights": {"num_bits": 4, "type": "int", "group_size": 128}, "input_activations": None}


def quantized(quantization):
    return json.dumps({"architectures": ["DeepseekV3ForCausalLM"], "quantization_config": quantization})


def compressed(group):
    return quantized({"quant_method": "compressed-tensors", "config_groups": {"group_0": group}})


def test_a_folder_that_is_no_such_checkpoint_is_refused(tmp_path):
    folder = tmp_path / "ck"
    folder.mkdir()
    float8 = {"num_bits": 8, "type": "float"}
    wrong = [compressed({"weights": float8, "input_activations": inputs}) for inputs in (None, float8)]
    for config, expected in (
        (None, "config.json: "),
        ('{"architectures": ["Qwen2ForCausalLM"]}', "config.json says 'Qwen2ForCausalLM'"),
        ("{bad", "config.json: "),
        (quantized({"quant_method": "torchao"}), "found 'torchao'"),
        *((each, "found 'compressed-tensors'") for each in wrong),
    ):
        if config is not None:
            (folder / "config.json").write_text(config)
        for engine in ("tensorrt_llm", "vllm"):
            [line] = refused(tmp_path / "out", *R1, "--engine", engine, "--model", str(folder), code=2)
            assert (f"--model {folder}" in line, expected in line) == (True, True), line
            assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_folder_with_w4a16_weights_is_for_vllm(tmp_path):
    configs = [*(quantized({"quant_method": method, "bits": 4}) for method in ("awq", "gptq")), compressed(INT4)]
    for number, config in enumerate(configs):
        (tmp_path / "config.json").write_text(config)
        argv = [*R1, "--model", str(tmp_path)]
        assert "H007" in " ".join(refused(tmp_path / f"out{number}", *argv))
        assert "w4a16, profile balanced" in built(tmp_path / f"out{number}", *argv, "--engine", "vllm")


def test_a_relative_folder_is_written_as_an_absolute_one(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    checkpoint(tmp_path / "models/r1")
    monkeypatch.chdir(tmp_path)
    built("out", *R1, "--model", "models/r1", "--format", "trtllm-bench")
    assert f"--model_path {tmp_path}/models/r1" in (tmp_path / "out/bench.sh").read_text()


PAIR = ["deepseek-v3", "--gpu", "h200", "--profile", "disagg"]


def test_the_summary_of_a_pair_says_how_both_sides_are_started_and_joined(tmp_path):
    pair = tmp_path / "pair"
    printed = " ".join(built(pair, *PAIR, "--generation-servers", "2").split())
    for words in (
        f"wrote {pair}: DeepSeek-V3",
        "1 context server and 2 generation servers, 24 GPUs in all",
        "Warnings and notes of a context server warning A009",
        f"run it there: {pair}/context/start.sh",
        f"{pair}/generation, the same for 2 servers:",
        "gateway --context-server http://context1:8000 --server http://generation1:8000 "
        "--server http://generation2:8000",
    ):
        assert words in printed


def test_the_document_of_a_pair_holds_a_plan_of_each_side(tmp_path):
    options = [*PAIR, "--context-set", "max_batch_size=16", "--generation-set", "num_gpus=16", "--json"]
    planned = json.loads(run_command("plan", *options).stdout)
    assert json.loads(built(tmp_path / "pair", *options))["plan"] == planned
    assert (planned["schema"], planned["gpus"]) == ("deepseek-triton/pair/1", 24)
    assert [planned[side]["profile"] for side in ("context", "generation")] == ["ctx", "gen"]
    assert {row["key"]: row["value"] for row in planned["context"]["settings"]}["max_batch_size"] == 16


@pytest.mark.slow
def test_plan_shows_both_sides_of_a_pair_and_what_would_change(tmp_path):
    printed = run_command("plan", *PAIR, "--brief").stdout
    assert printed.index("Context: one server") < printed.index("Generation: one server")
    tiny = ["tiny", "--engine", "simulated", "--profile", "disagg"]
    built(tmp_path / "pair", *tiny)
    assert run_command("plan", *tiny, "--diff", str(tmp_path / "pair")).stdout.count("nothing would change") == 2


def test_what_makes_no_pair_is_refused(tmp_path):
    for options, code, said in (
        (["deepseek-v3", "--gpu", "h200", "--context-servers", "2"], 2, "--context-servers: only for --profile disagg"),
        ([*PAIR, "--generation-set", "x"], 2, "--generation-set x: expected KEY=VALUE, as in --generation-set"),
        ([*PAIR, "--context-set", "num_gpus=none"], 1, "--context-set num_gpus=none: expected a whole number from 1"),
        ([*PAIR, "--trtllm", "0.21.0"], 1, "no hand-over is proven"),
    ):
        assert said in " ".join(" ".join(refused(tmp_path / "pair", *options, code=code)).split())
        assert not (tmp_path / "pair").exists()
