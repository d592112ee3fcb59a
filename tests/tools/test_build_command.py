import json
import shlex

import pytest

from deepseek_triton_build import FORMATS
from deepseek_triton_tools.cli.main import main

R1 = ["build", "deepseek-r1", "--gpu", "h200", "--gpus", "8"]


def checkpoint(folder):
    folder.mkdir()
    config = {"architectures": ["DeepseekV3ForCausalLM"], "quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_it_says_what_it_wrote_and_how_to_run_it(capsys, tmp_path):
    """A folder that was there is said to be replaced."""
    output = tmp_path / "it's r 1"
    for said in ("wrote", "replaced"):
        assert main([*R1, "--set", "max_batch_size=1024", "--output", str(output)]) == 0
        printed = capsys.readouterr().out
        assert printed.startswith(f"{said} {output}: ")
        for words in ("KV cache", "26.07-trtllm", "requests at once", "\nWarnings and notes\n"):
            assert words in printed
        assert f"run it there: {shlex.quote(f'{output}/start.sh')}\n" in printed
    assert (output / "tensorrt_llm/1/release.yaml").is_file()

    assert main(["build", "deepseek-v3", "--gpu", "h100", "--gpus", "16", "--output", str(tmp_path / "v3")]) == 0
    assert f"run it on 2 nodes: {shlex.quote(f'{tmp_path}/v3/start.sh')} on the first" in capsys.readouterr().out
    assert main(["build", "tiny", "--output", str(tmp_path / "a tiny")]) == 0
    assert f"run it here: deepseek-triton serve {shlex.quote(f'{tmp_path}/a tiny')}\n" in capsys.readouterr().out


def test_the_hugging_face_name_of_the_default_checkpoint_is_the_same_plan(tmp_path, capsys):
    assert main([*R1, "--output", str(tmp_path / "a"), "--precision", "fp8"]) == 0
    named = ["build", "deepseek-ai/DeepSeek-R1", "--gpu", "h200", "--gpus", "8"]
    assert main([*named, "--output", str(tmp_path / "b")]) == 0

    a, b = (
        json.loads((tmp_path / name / "tensorrt_llm/deepseek-triton.json").read_text())["plan"] for name in ("a", "b")
    )
    assert a == b
    assert "689 GB for the container to download" in capsys.readouterr().out


def test_every_format(tmp_path, capsys):
    for name in FORMATS:
        engine = ["--engine", "vllm"] if name == "vllm-serve" else []
        assert main([*R1, *engine, "--format", name, "--output", str(tmp_path / name)]) == 0
        assert f"{tmp_path / name}/{FORMATS[name].start}" in capsys.readouterr().out
        assert (tmp_path / name / FORMATS[name].start).is_file()
    with pytest.raises(SystemExit):
        main(["build", "--help"])
    printed = capsys.readouterr().out
    assert [name for name in FORMATS if name not in printed] == []


@pytest.mark.parametrize(
    "argv",
    [
        R1,
        [*R1, "--no-decoupled"],
        [*R1, "--set", "triton_config.decoupled=false"],
        ["build", "tiny", "--engine", "simulated", "--no-decoupled"],
    ],
)
def test_both_files_say_whether_the_model_is_decoupled(argv, tmp_path):
    assert main([*argv, "--output", str(tmp_path / "out")]) == 0
    folder, expected = tmp_path / "out" / "tensorrt_llm", "true" if argv == R1 else "false"

    assert f"model_transaction_policy {{ decoupled: {expected} }}" in (folder / "config.pbtxt").read_text()
    assert f"  decoupled: {expected}\n" in (folder / "1/model.yaml").read_text()
    assert main(["check", str(tmp_path / "out")]) == 0


def test_what_cant_be_built_is_one_line_and_leaves_nothing(tmp_path, capsys):
    for argv, code, expected in (
        (["--no-decoupled", "--format", "trtllm-serve"], 1, "only Triton has a use for it"),
        (["--profile", "ctx", "--format", "quickstart"], 1, "--format trtllm-serve"),
        (["--format", "vllm"], 2, "unknown format 'vllm'"),
        (["--format", "ctx"], 2, "ctx is a profile: --profile ctx"),
        (["--gpus", "4"], 1, "--gpus 8"),
        (["--write-quant-config"], 2, "expected --model with its folder"),
        (["--set", "nonsense=1"], 1, "nonsense is not an LLM argument"),
        (["--output", "/proc/r1"], 1, "/proc/r1: can't be written"),  # where nobody may write, root included
    ):
        assert main([*R1, "--output", str(tmp_path / "out"), *argv]) == code
        captured = capsys.readouterr()
        assert captured.out == ""
        (line,) = captured.err.splitlines()
        assert line.startswith("deepseek-triton build: ")
        assert expected in line
        assert list(tmp_path.iterdir()) == []


def test_hand_edits_are_shown_and_kept_until_forced(tmp_path, capsys):
    output = tmp_path / "r1"
    assert main([*R1, "--output", str(output)]) == 0
    path = output / "tensorrt_llm/1/model.yaml"
    edited = path.read_text().replace("max_num_tokens: 8192", "max_num_tokens: 4096")
    path.write_text(edited)
    capsys.readouterr()

    assert main([*R1, "--output", str(output)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    *diff, line = captured.err.splitlines()
    assert "-max_num_tokens: 4096" in diff
    assert "+max_num_tokens: 8192" in diff
    assert "--force replaces all of it" in line
    assert path.read_text() == edited

    assert main([*R1, "--output", str(output), "--force"]) == 0
    assert "max_num_tokens: 8192" in path.read_text()


def test_another_deployment_is_shown_and_kept_until_forced(tmp_path, capsys):
    output = tmp_path / "r1"
    assert main([*R1, "--model", "/models/DeepSeek R1", "--output", str(output)]) == 0
    before = contents(output)
    capsys.readouterr()

    wanted = ["build", "deepseek-r1", "--gpu", "h100", "--gpus", "16", "--output", str(output)]
    assert main(wanted) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    *diff, line = captured.err.splitlines()
    assert "-options: deepseek-r1 --gpu h200 --gpus 8 --model '/models/DeepSeek R1'" in diff
    assert "+options: deepseek-r1 --gpu h100 --gpus 16" in diff
    assert "holds another deployment; --force replaces all of it" in line
    assert contents(output) == before

    assert main([*wanted, "--force"]) == 0


@pytest.mark.parametrize(
    "options",
    [
        ["deepseek-r1", "--gpu", "h200"],
        ["deepseek-r1-0528", "--gpu", "b200", "--precision", "fp4", "--profile", "latency", "--mtp", "1"],
        ["nvidia/DeepSeek-R1-FP4", "--gpu", "b200", "--image", "26.02", "--format", "trtllm-bench"],
        ["deepseek-r1", "--gpu", "h200", "--model", "/a folder/it's", "--isl", "1024", "--osl", "64"],
        [*R1[1:], "--set", "kv_cache_config={enable_block_reuse: false}", "--set", "stream_interval=4"],
        ["deepseek-r1", "--gpu", "b200", "--gpus", "4", "--precision", "fp8", "--allow-unpublished"],
        ["deepseek-r1", "--gpu", "h200", "--mtp", "1", "--relaxed-acceptance", "--kv-cache-dtype", "auto"],
        ["tiny", "--engine", "simulated"],
    ],
    ids=["default", "latency", "checkpoint", "path", "set", "unpublished", "relaxed", "tiny"],
)
def test_the_stamps_options_typed_again_write_the_same_bytes(options, tmp_path, capsys):
    assert main(["build", *options, "--output", str(tmp_path / "a")]) == 0
    [stamp] = (tmp_path / "a").rglob("deepseek-triton.json")
    again = shlex.split(json.loads(stamp.read_text())["options"])
    assert main(["build", *again, "--output", str(tmp_path / "b")]) == 0

    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_json_says_what_was_written_and_whether_something_was_there(tmp_path, capsys):
    folder = checkpoint(tmp_path / "R1")
    argv = [*R1, "--model", str(folder), "--write-quant-config", "--output", str(tmp_path / "r1"), "--json"]
    documents = []
    for _ in range(2):
        assert main(argv) == 0
        documents.append(json.loads(capsys.readouterr().out))

    first, second = documents
    assert (first["schema"], first["output"]) == ("deepseek-triton/build/1", str(tmp_path / "r1"))
    assert (first["format"], first["start"]) == ("triton", "start.sh")
    assert set(first["files"]) == {path.as_posix() for path in contents(tmp_path / "r1")}
    assert "hf_quant_config.json: written" in first["quant_config"]
    assert (first["plan"]["schema"], first["plan"]["gpus"]) == ("deepseek-triton/plan/1", 8)
    assert (first["replaced"], second["replaced"]) == (False, True)


def test_write_quant_config(tmp_path, capsys):
    folder = checkpoint(tmp_path / "R1")
    build = [*R1, "--model", str(folder), "--write-quant-config"]
    assert main([*build, "--output", str(tmp_path / "a")]) == 0

    written = json.loads((folder / "hf_quant_config.json").read_text())
    assert written["quantization"] == {"quant_algo": "FP8_BLOCK_SCALES", "kv_cache_quant_algo": "FP8"}
    assert "hf_quant_config.json: written" in capsys.readouterr().out

    without = {"quantization": written["quantization"] | {"kv_cache_quant_algo": None}}
    (folder / "hf_quant_config.json").write_text(json.dumps(without))
    assert main([*build, "--output", str(tmp_path / "b")]) == 0
    assert json.loads((folder / "hf_quant_config.json").read_text()) == written
    assert f"as it was: {folder}/hf_quant_config.json.bak" in capsys.readouterr().out


def test_a_checkpoint_that_takes_no_change_leaves_no_repository(tmp_path, capsys):
    """Nor does a refused build change the checkpoint."""
    folder = checkpoint(tmp_path / "R1")
    build = [*R1, "--model", str(folder), "--write-quant-config", "--output"]
    assert main([*build, "/proc/r1"]) == 1
    assert [path.name for path in folder.iterdir()] == ["config.json"]

    (folder / "hf_quant_config.json").write_text('{"quantization": {}, "more": 1e999}')
    assert main([*build, str(tmp_path / "out")]) == 1
    assert "holds a number that JSON can't express" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["R1"]


def test_plan_and_build_give_the_same_parts_of_the_memory(tmp_path, capsys):
    assert main(["plan", *R1[1:]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert main([*R1, "--output", str(tmp_path / "r1")]) == 0
    built = capsys.readouterr().out

    for part in ("weights", "CUDA graphs", "workspace"):
        [size] = [line.split(part)[1].split()[0] for line in lines if line[5:].startswith(f"{part} ")]
        assert f"{size} {part}" in built


INT4 = {"weights": {"num_bits": 4, "type": "int", "group_size": 128}, "input_activations": None}


def quantized(quantization):
    return json.dumps({"architectures": ["DeepseekV3ForCausalLM"], "quantization_config": quantization})


def compressed(group):
    return quantized({"quant_method": "compressed-tensors", "config_groups": {"group_0": group}})


def test_a_folder_that_is_no_such_checkpoint_is_refused(tmp_path, capsys):
    folder = tmp_path / "ck"
    folder.mkdir()
    float8 = {"num_bits": 8, "type": "float"}
    wrong = {inputs: compressed({"weights": float8, "input_activations": inputs and float8}) for inputs in (None, True)}
    for config, expected in (
        (None, "config.json: "),
        ('{"architectures": ["Qwen2ForCausalLM"]}', "config.json says 'Qwen2ForCausalLM'"),
        ("{bad", "config.json: "),
        (quantized({"quant_method": "torchao"}), "found 'torchao'"),
        (wrong[None], "found 'compressed-tensors'"),
        (wrong[True], "found 'compressed-tensors'"),
    ):
        if config is not None:
            (folder / "config.json").write_text(config)
        for engine in ("tensorrt_llm", "vllm"):
            argv = [*R1, "--engine", engine, "--model", str(folder), "--output", str(tmp_path / "out")]
            assert main(argv) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert f"--model {folder}" in line
            assert expected in line
            assert not (tmp_path / "out").exists()


def test_a_folder_with_w4a16_weights_is_for_vllm(tmp_path, capsys):
    for number, config in enumerate(
        (*(quantized({"quant_method": method, "bits": 4}) for method in ("awq", "gptq")), compressed(INT4))
    ):
        (tmp_path / "config.json").write_text(config)
        out = tmp_path / f"out{number}"

        assert main([*R1, "--model", str(tmp_path), "--output", str(out)]) == 1
        assert "H007" in capsys.readouterr().err
        assert main([*R1, "--engine", "vllm", "--model", str(tmp_path), "--output", str(out)]) == 0
        assert "w4a16, profile balanced" in capsys.readouterr().out


def test_a_relative_folder_is_a_folder_in_every_format(tmp_path, capsys, monkeypatch):
    (tmp_path / "models").mkdir()
    checkpoint(tmp_path / "models/r1")
    monkeypatch.chdir(tmp_path)
    assert main([*R1, "--model", "models/r1", "--format", "trtllm-bench", "--output", "out"]) == 0

    assert "--model deepseek-ai/DeepSeek-R1 --model_path ./models/r1" in (tmp_path / "out/bench.sh").read_text()
