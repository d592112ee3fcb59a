import json
import os
import struct
import subprocess
import sys

import pytest

from deepseek_triton_build import model_repository
from support.commands import run_command
from support.servers import build

MODEL_YAML = "tensorrt_llm/1/model.yaml"
R1 = ["deepseek-r1", "--gpu", "h200"]


@pytest.fixture
def repository(tmp_path):
    """R1 for 8 x H200, as generated."""
    return build(tmp_path / "r1", *R1)


def checked(*argv, code=0):
    """What is printed."""
    done = run_command("check", *map(str, argv))
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def edit(repository, old, new):
    path = repository / MODEL_YAML
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def checkpoint(folder, *, missing_bytes=0):
    """A checkpoint of one tensor."""
    folder.mkdir()
    config = {"architectures": ["DeepseekV3ForCausalLM"], "quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps(config))
    name = "model-00001-of-00001.safetensors"
    header = json.dumps({"t": {"dtype": "F8_E4M3", "shape": [64], "data_offsets": [0, 64]}}).encode()
    (folder / name).write_bytes(struct.pack("<Q", len(header)) + header + bytes(64 - missing_bytes))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"t": name}}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    return folder


def test_what_was_built_is_ok(repository):
    printed = checked(repository)
    assert "deepseek-r1, fp8, 8 x h200; TensorRT-LLM " in printed
    assert "ok: 0 errors, 0 warnings" in printed
    assert checked(model_repository()).splitlines()[-1] == "ok: nothing found"


def test_a_finding_has_file_line_code_and_fix(repository):
    edit(repository, "\nmax_num_tokens:", "\nmax_num_tokenz:")
    line = next(n for n, text in enumerate((repository / MODEL_YAML).read_text().splitlines(), 1) if "tokenz" in text)

    lines = checked(repository, code=1).splitlines()
    at = next(n for n, text in enumerate(lines) if text.startswith(f"{MODEL_YAML}:{line}: error "))
    assert "max_num_tokenz" in lines[at]
    assert lines[at + 1].startswith("    fix: ")
    assert lines[-1].startswith("not ok: 1 error, ")

    got = json.loads(checked(repository, "--json", code=1))
    assert (got["schema"], got["ok"]) == ("deepseek-triton/check/1", False)
    errors = [finding for finding in got["findings"] if finding["severity"] == "error"]
    assert [(finding["key"], finding["file"]) for finding in errors] == [("max_num_tokenz", MODEL_YAML)]
    [model] = got["models"]
    assert (model["variant"], model["release"]) == ("deepseek-r1", "1.2.1")
    assert model["unchecked"] == ["the checkpoint's files, because they are not on this machine (--model)"]


@pytest.mark.slow
def test_model_says_where_the_checkpoint_is_here(tmp_path):
    repository = build(tmp_path / "r1", *R1, "--model", "/in/the/container/R1")
    cut = checkpoint(tmp_path / "cut", missing_bytes=1)
    checked(repository)
    checked(repository, "--strict", code=1)
    checked(repository, "--model", checkpoint(tmp_path / "whole"))
    checked(repository, "--model", cut, code=1)
    printed = checked(build(tmp_path / "of cut", *R1, "--model", str(cut)), code=1)
    assert "model-00001-of-00001.safetensors" in printed
    assert "fix: download it again" in printed


def test_release_gpu_and_model_of_a_file_can_be_said(tmp_path):
    path = tmp_path / "extra.yaml"
    path.write_text("cuda_graph_config:\n  max_batch_size: 8\n")
    assert "cuda_graph_config" in checked(path, "--trtllm", "0.21.0", code=1)
    on_b200 = [path, "--trtllm", "1.2.1", "--gpu", "b200", "--gpus", "8"]
    assert "--vllm" in run_command("check", *map(str, on_b200), "--vllm", "0.27.1").stderr
    path.write_text("moe_config:\n  backend: CUTLASS\n")
    printed = " ".join(checked(*on_b200).split())
    assert "not checked: the rules about the model and its memory" in printed
    assert printed.endswith("ok: nothing found in what was checked")
    assert "M002" in checked(*on_b200, "--variant", "deepseek-r1", "--precision", "fp8", code=1)


AS_NOBODY = """
import os, sys
from contextlib import redirect_stderr, redirect_stdout
from deepseek_triton_tools.cli.main import main
with open(os.devnull, "w") as null, redirect_stdout(null), redirect_stderr(null):
    # Imports everything while root, who may read this Python: an error needs more than a report.
    main(["check", sys.argv[1]])
    main(["check", "/nowhere"])
for path in sys.argv[2:]:
    mode = os.stat(path).st_mode
    os.chmod(path, 0)
    if not (child := os.fork()):
        os.setuid(65534)
        sys.exit(main(["check", sys.argv[1]]))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.chmod(path, mode)
    print(f"== exit code {code}", flush=True)
"""
UNREADABLE = ("", "start.sh", "tensorrt_llm", "tensorrt_llm/1/deepseek_backend", "tensorrt_llm/1/release.yaml")
UNREADABLE += ("tensorrt_llm/config.pbtxt", "tensorrt_llm/deepseek-triton.json", MODEL_YAML)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_told_what_may_not_be_read(repository):
    for folder in (repository.parent, *(folder for folder in repository.parents if "pytest" in folder.name)):
        folder.chmod(0o755)
    command = [sys.executable, "-c", AS_NOBODY, str(repository), *(str(repository / path) for path in UNREADABLE)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    *said, end = done.stdout.split("== exit code 1\n")
    assert end == ""
    for path, text in zip(UNREADABLE, said, strict=True):
        assert "Permission denied" in text, path
        assert ("Traceback" in text, "ok: nothing found" in text) == (False, False), path


def test_a_code_is_explained():
    assert checked("--explain", "g010").startswith("G010 ")


def test_what_cant_be_checked_is_one_line():
    options = {"--trtllm": "1.3", "--gpu": "h300", "--variant": "deepseek-r9", "--precision": "fp9"}
    wrong = [([str(model_repository()), option, value], 2, f"'{value}'") for option, value in options.items()]
    wrong += [([str(model_repository()), "--model", "/nowhere"], 2, "expected the checkpoint's folder")]
    wrong += [(["--explain", "G099"], 2, "'G099'")]
    for argv, code, expected in [*wrong, (["nowhere"], 1, "nowhere")]:
        done = run_command("check", *argv)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1), done.stderr
        assert expected in done.stderr
