import os
import re
import subprocess
import sys

import pytest

from deepseek_triton_tools.cli.main import main
from deepseek_triton_tools.generating.demo import PROMPTS
from deepseek_triton_tools.pages import install_extra

pytestmark = pytest.mark.slow

SIMULATED = ["--engine", "simulated", "--preset", "b200x8-r1-fp4-min-latency"]


@pytest.mark.parametrize("options", [[], SIMULATED], ids=["reference", "simulated"])
def test_the_demo_answers_every_prompt_and_stops(options, capsys):
    assert main(["demo", "--max-tokens", "12", *options]) == 0

    printed = capsys.readouterr().out
    assert all(prompt in printed for prompt in PROMPTS)
    rows = re.findall(r"  (HTTP|gRPC)  \d+ ms +(\d+) ", printed)
    assert rows == [("HTTP", "12")] * 4 + [("gRPC", "12")]
    assert "Stopped cleanly" in printed


def test_a_preset_without_the_simulated_engine_is_refused(capsys):
    assert main(["demo", "--preset", "b200x8-r1-fp4-min-latency"]) == 1
    assert "--preset paces the simulated engine" in capsys.readouterr().err


def demo(shell="", **variables):
    """Run the demo in a process of its own, after `shell`."""
    program = [sys.executable, "-m", "deepseek_triton_tools.cli.main", "demo"]
    command = ["bash", "-c", f'{shell} exec "$@"', "-", *program]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)


def test_a_full_disk_is_told_as_such(tmp_path):
    done = demo("ulimit -f 100;", XDG_CACHE_HOME=str(tmp_path))

    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert "File too large (os error 27); the variable XDG_CACHE_HOME names another folder" in line
    assert "pip" not in line


def test_a_package_that_is_missing_is_told_as_such(tmp_path):
    (tmp_path / "safetensors.py").write_text("raise ModuleNotFoundError('No module named safetensors')\n")
    done = demo(f"cd '{tmp_path}';", XDG_CACHE_HOME=str(tmp_path))

    assert done.returncode == 1
    assert done.stderr.endswith(f"No module named safetensors; {install_extra('demo')}\n")
