import json
import os
import struct
import subprocess
import sys

import pytest

from deepseek_triton_tools.cli.main import main

MODEL_YAML = "tensorrt_llm/1/model.yaml"
R1 = ["deepseek-r1", "--gpu", "h200"]


@pytest.fixture
def repository(tmp_path, capsys):
    """R1 for 8 x H200, as generated."""
    folder = tmp_path / "r1"
    assert main(["build", "deepseek-r1", "--gpu", "h200", "--gpus", "8", "--output", str(folder)]) == 0
    capsys.readouterr()
    return folder


def edit(repository, old, new):
    path = repository / MODEL_YAML
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def shard(path, *, missing_bytes=0):
    """A safetensors file of one tensor."""
    header = json.dumps({"t": {"dtype": "F8_E4M3", "shape": [64], "data_offsets": [0, 64]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64 - missing_bytes))


def checkpoint(folder, *, missing_bytes=0):
    folder.mkdir()
    config = {"architectures": ["DeepseekV3ForCausalLM"], "quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps(config))
    name = "model-00001-of-00001.safetensors"
    shard(folder / name, missing_bytes=missing_bytes)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"t": name}}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    return folder


def test_what_was_built_is_ok(repository, capsys):
    assert main(["check", str(repository)]) == 0
    printed = capsys.readouterr().out
    assert "deepseek-r1, fp8, 8 x h200; TensorRT-LLM 1.2.1" in printed
    assert "ok: 0 errors, 0 warnings" in printed
    assert main(["check", "model_repository"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "ok: nothing found"


def test_a_finding_has_file_line_code_and_fix(repository, capsys):
    edit(repository, "\nmax_num_tokens:", "\nmax_num_tokenz:")
    line = next(n for n, text in enumerate((repository / MODEL_YAML).read_text().splitlines(), 1) if "tokenz" in text)

    assert main(["check", str(repository)]) == 1
    lines = capsys.readouterr().out.splitlines()
    at = next(n for n, text in enumerate(lines) if text.startswith(f"{MODEL_YAML}:{line}: error "))
    assert "max_num_tokenz" in lines[at]
    assert lines[at + 1].startswith("    fix: ")
    assert lines[-1].startswith("not ok: 1 error, ")

    assert main(["check", str(repository), "--json"]) == 1
    got = json.loads(capsys.readouterr().out)
    assert (got["schema"], got["ok"]) == ("deepseek-triton/check/1", False)
    errors = [finding for finding in got["findings"] if finding["severity"] == "error"]
    assert [(finding["key"], finding["file"]) for finding in errors] == [("max_num_tokenz", MODEL_YAML)]
    [model] = got["models"]
    assert (model["variant"], model["release"]) == ("deepseek-r1", "1.2.1")
    assert model["unchecked"] == ["the checkpoint's files, because they are not on this machine (--model)"]


@pytest.mark.slow
def test_model_says_where_the_checkpoint_is_here(tmp_path, capsys):
    repository, cut = str(tmp_path / "r1"), str(checkpoint(tmp_path / "cut", missing_bytes=1))
    assert main(["build", *R1, "--model", "/in/the/container/R1", "--output", repository]) == 0

    assert main(["check", repository]) == 0
    assert main(["check", repository, "--strict"]) == 1
    assert main(["check", repository, "--model", str(checkpoint(tmp_path / "whole"))]) == 0
    assert main(["check", repository, "--model", cut]) == 1
    assert main(["build", *R1, "--model", cut, "--output", str(tmp_path / "of cut")]) == 0
    capsys.readouterr()
    assert main(["check", str(tmp_path / "of cut")]) == 1
    printed = capsys.readouterr().out
    assert "model-00001-of-00001.safetensors" in printed
    assert "fix: download it again" in printed


def test_release_and_gpu_can_be_said(tmp_path, capsys):
    path = tmp_path / "extra.yaml"
    path.write_text("cuda_graph_config:\n  max_batch_size: 8\n")

    assert main(["check", str(path), "--trtllm", "1.2.1", "--gpu", "h200", "--gpus", "8"]) == 0
    capsys.readouterr()
    assert main(["check", str(path), "--trtllm", "0.21.0"]) == 1
    assert "cuda_graph_config" in capsys.readouterr().out


def test_the_model_of_a_file_that_names_none_can_be_said(tmp_path, capsys):
    path = tmp_path / "extra.yaml"
    path.write_text("moe_config:\n  backend: CUTLASS\n")
    argv = ["check", str(path), "--trtllm", "1.2.1", "--gpu", "b200", "--gpus", "8"]

    assert main(argv) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "not checked: the rules about the model and its memory" in printed
    assert "(--variant, --precision)" in printed
    assert printed.endswith("ok: nothing found in what was checked")
    assert main([*argv, "--variant", "deepseek-r1", "--precision", "fp8"]) == 1
    assert "M002" in capsys.readouterr().out


AS_NOBODY = """
import os, sys
from contextlib import redirect_stdout
from deepseek_triton_tools.cli.main import main
with open(os.devnull, "w") as null, redirect_stdout(null):
    main(["check", sys.argv[1]])  # imports everything while root, who may read this Python
os.chmod(sys.argv[2], 0)
os.setuid(65534)
sys.exit(main(["check", sys.argv[1]]))
"""
UNREADABLE = ("", "start.sh", "tensorrt_llm", "tensorrt_llm/1/deepseek_backend", "tensorrt_llm/1/release.yaml")
UNREADABLE += ("tensorrt_llm/config.pbtxt", "tensorrt_llm/deepseek-triton.json", MODEL_YAML)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_told_what_may_not_be_read(repository, subtests):
    for folder in repository.parents:
        if "pytest" in folder.name:
            folder.chmod(0o755)
    repository.parent.chmod(0o755)

    for path in UNREADABLE:
        mode = (repository / path).stat().st_mode
        command = [sys.executable, "-c", AS_NOBODY, str(repository), str(repository / path)]
        done = subprocess.run(command, capture_output=True, text=True)
        (repository / path).chmod(mode)
        with subtests.test(path):
            assert done.returncode == 1, done
            assert "Permission denied" in done.stdout + done.stderr
            assert "Traceback" not in done.stderr
            assert "ok: nothing found" not in done.stdout


def test_what_cant_be_checked_is_one_line(capsys):
    options = {"--trtllm": "1.3", "--gpu": "h300", "--variant": "deepseek-r9", "--precision": "fp9"}
    wrong = [([option, value], f"'{value}'") for option, value in options.items()]
    for argv, expected in [*wrong, (["--model", "/nowhere"], "expected the checkpoint's folder")]:
        assert main(["check", "model_repository", *argv]) == 2
        captured = capsys.readouterr()
        assert (captured.out, expected in captured.err, captured.err.count("\n")) == ("", True, 1), captured.err
    assert main(["check", "nowhere"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_the_exit_code_of_the_process(repository):
    command = [sys.executable, "-m", "deepseek_triton_tools.cli.main", "check", str(repository)]
    assert subprocess.run(command, capture_output=True).returncode == 0

    edit(repository, "\nmax_num_tokens:", "\nmax_num_tokenz:")
    assert subprocess.run(command, capture_output=True).returncode == 1
