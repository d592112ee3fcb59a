"""`checkpoint calibrate`: the script, run with programs that record their calls, and what keeps it from running."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from bench.synthetic_checkpoint import CONFIG as PUBLISHED

from deepseek_triton_tools.checkpoints.activation_scales import read_activation_scales
from deepseek_triton_tools.checkpoints.calibration import Calibration
from support.recording import recording
from support.small_checkpoint import FP8, write_checkpoint

EXPORT = Path(__file__).parent / "torch_archives/export"
R1_BYTES = 688_574_839_360
CONFIG = {**PUBLISHED, "n_group": 8, "topk_group": 4, "quantization_config": FP8}
_GPU = "{index}, NVIDIA H200, {mib}, 0, 9.0, 550.90.07, Enabled, Disabled"


def written(folder, config=CONFIG):
    """A checkpoint with one weight."""
    return write_checkpoint(folder, {"lm_head.weight": np.ones((8, 8), np.float32)}, config)


@pytest.fixture
def r1(tmp_path):
    return written(tmp_path / "R1 of $USER")


@pytest.fixture
def script(r1, checkpoint):
    """Of a calibration into an output."""
    return lambda output: checkpoint("calibrate", r1, "--output", output).out


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A git that makes folders, and a python3 that writes amax files. It fails where a file FAIL names its script."""
    folder = tmp_path / "bin"
    clone = "if 'clone' in sys.argv: os.makedirs(sys.argv[-1])"
    python = f"""
import pathlib, shutil
fail = pathlib.Path({str(tmp_path / "FAIL")!r})
if fail.exists() and any(one.endswith(fail.read_text()) for one in sys.argv): sys.exit(3)
if "ptq.py" in sys.argv: shutil.copytree({str(EXPORT)!r}, sys.argv[sys.argv.index("--output_path") + 1])
"""
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return {"git": recording(folder, "git", after=clone), "python3": recording(folder, "python3", after=python)}


def gpus(tmp_path, number, mib=143771):
    rows = [_GPU.format(index=index, mib=mib) for index in range(number)]
    recording(tmp_path / "bin", "nvidia-smi", after=f"print({os.linesep.join(rows)!r})")


def bash(text):
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True)


def stages(programs):
    """The scripts that python3 has run, and pip."""
    names = {"pip", "convert.py", "ptq.py"}
    return [name for call in programs["python3"].calls for one in call["args"] if (name := Path(one).name) in names]


@pytest.mark.slow
def test_the_script_does_what_the_guide_says(r1, tmp_path, script, programs):
    output = tmp_path / "amax of $USER"
    done = bash(script(output))

    assert done.returncode == 0, done.stderr
    work = f"{output}.work"
    clone_modelopt, clone_deepseek, checkout = [call["args"] for call in programs["git"].calls]
    assert clone_modelopt[-2:] == ["https://github.com/NVIDIA/TensorRT-Model-Optimizer.git", f"{work}/modelopt"]
    assert clone_modelopt[-4:-2] == ["--branch", "0.39.0"]
    deepseek = f"{work}/modelopt/examples/deepseek/DeepSeek-V3"
    assert clone_deepseek[-2:] == ["https://github.com/deepseek-ai/DeepSeek-V3.git", deepseek]
    assert checkout == ["-C", deepseek, "checkout", "1398800"]
    _, pip, convert, ptq = [call["args"] for call in programs["python3"].calls]
    assert pip == ["-m", "pip", "install", f"{work}/modelopt[all]"]
    assert convert == [
        f"{deepseek}/inference/convert.py",
        *("--hf-ckpt-path", str(r1), "--save-path", f"{work}/converted"),
        *("--n-experts", "256", "--model-parallel", "8"),
    ]
    assert ptq[:6] == ["-m", "torch.distributed.run", "--nproc-per-node", "8", "--master_port=12346", "ptq.py"]
    assert ptq[6:] == [
        *("--model_path", f"{work}/converted", "--config", f"{deepseek}/inference/configs/config_671B.json"),
        *("--quant_cfg", "FP8_DEFAULT_CFG", "--output_path", f"{work}/amax"),
    ]
    assert len(read_activation_scales(output)) == 14
    quantize = shlex.split(done.stdout.splitlines()[-2].partition(": ")[2])
    assert quantize[3:] == [str(r1), "--to", "w4afp8", "--act-scales", str(output), "--output", "DIR"]


@pytest.mark.slow
def test_a_run_goes_on_with_the_stage_that_failed(tmp_path, script, programs):
    for fails, again in (("convert.py", ["convert.py", "ptq.py"]), ("ptq.py", ["ptq.py"])):
        output = tmp_path / f"amax-{fails}"
        text = script(output)
        (tmp_path / "FAIL").write_text(fails)
        assert bash(text).returncode == 3
        before = stages(programs)
        assert before[-1] == fails
        assert not output.exists()

        (tmp_path / "FAIL").unlink()
        assert bash(text).returncode == 0
        assert stages(programs)[len(before) :] == again
        assert output.is_dir()


@pytest.mark.slow
def test_run_runs_it(r1, tmp_path, programs):
    gpus(tmp_path, 8)
    command = [sys.executable, "-m", "deepseek_triton_tools.cli.main", "checkpoint", "calibrate", str(r1), "--run"]
    output = tmp_path / "new" / "amax"
    done = subprocess.run([*command, "--output", str(output)], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert stages(programs) == ["pip", "convert.py", "ptq.py"]
    assert len(read_activation_scales(output)) == 14


def test_a_machine_without_the_gpus_is_refused(r1, tmp_path, refused, programs):
    for number, found in ((7, "found 7 of them"), (0, "found none: ")):
        gpus(tmp_path, number)
        line = refused("calibrate", r1, "--output", tmp_path / "amax", "--run")
        assert re.search(r"expected 8 GPUs with \d+ bytes each, " + found, line)
    assert not programs["git"].calls


def test_what_r1_needs():
    r1 = Calibration(Path("/models/R1"), Path("/amax"), 256, R1_BYTES)
    h100, h200 = 81559 * 2**20, 143771 * 2**20
    assert h100 < r1.gpu_bytes < h200
    assert R1_BYTES < r1.disk_bytes < 1.2 * R1_BYTES


def test_other_checkpoints_and_an_output_that_is_there_are_refused(r1, tmp_path, refused):
    assert "expected a new folder for the amax files, found one" in refused("calibrate", r1, "--output", tmp_path)
    for number, quantization in enumerate((None, "fp8", [], {"quant_method": "awq"})):
        changes = {"model_type": "deepseek_v32", "n_routed_experts": 8, "quantization_config": quantization}
        other = written(tmp_path / str(number), CONFIG | changes)
        assert refused("calibrate", other, "--output", tmp_path / "amax").endswith(
            "but model_type is 'deepseek_v32', not 'deepseek_v3'; n_routed_experts is 8, not 256; "
            "it is not in FP8, as DeepSeek publishes it"
        )
