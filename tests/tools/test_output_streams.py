"""Real processes with real pipes: the work is done even if the output can't be written."""

import json
import os
import subprocess
import sys

import pytest

from support.commands import run_command

pytestmark = pytest.mark.slow

R1 = ["deepseek-r1", "--gpu", "h200", "--gpus", "8"]
FINITE = (["variants"], ["plan", *R1, "--json"], ["plan", "--help"])


def run(argv, stdout, *, unbuffered="", **options):
    """Run the command line with `stdout` as its standard output."""
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-m", "deepseek_triton_tools.cli.main", *argv]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment, **options)


@pytest.fixture
def broken_repository(tmp_path):
    folder = tmp_path / "model/1"
    folder.mkdir(parents=True)
    (folder / "model.yaml").write_text("max_num_tokenz: 3\n")
    return tmp_path


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_a_reader_that_left_is_no_failure(tmp_path, broken_repository, unbuffered):
    """The work is done, and check keeps its verdict."""
    folder = tmp_path / "R1"
    folder.mkdir()
    config = {"architectures": ["DeepseekV3ForCausalLM"], "quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps(config))
    build = ["build", *R1, "--model", str(folder), "--write-quant-config", "--output", str(tmp_path / "out")]
    check = ["check", str(broken_repository), "--trtllm", "1.2.1"]
    for argv in (*FINITE, build, check):
        reading, writing = os.pipe()
        os.close(reading)
        done = run(argv, writing, unbuffered=unbuffered)
        os.close(writing)
        assert (done.returncode, done.stderr) == (argv == check, ""), argv
    assert (folder / "hf_quant_config.json").is_file()
    assert (tmp_path / "out/start.sh").is_file()


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_a_full_disk_is_one_line(unbuffered):
    for argv in FINITE:
        if argv[-1] == "--help" and unbuffered:
            continue  # argparse of Python 3.12 keeps it to itself
        with open("/dev/full", "w") as full:
            done = run(argv, full, unbuffered=unbuffered)
        (line,) = done.stderr.splitlines()
        assert done.returncode == 1
        assert line.endswith("the output can't be written: No space left on device")


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_a_closed_stream_is_no_failure(closed, broken_repository):
    for argv, code in (
        (["variants"], 0),
        (["check", str(broken_repository), "--trtllm", "1.2.1"], 1),
        (["plan", "x"], 2),
    ):
        command = [sys.executable, "-m", "deepseek_triton_tools.cli.main", *argv]
        done = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *command], capture_output=True, text=True)
        assert done.returncode == code
        assert "Traceback" not in done.stderr


def test_an_error_that_nobody_reads_keeps_its_code():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "deepseek_triton_tools.cli.main", "plan", "deepsek-r1"]
    assert subprocess.run(command, stderr=writing).returncode == 2
    os.close(writing)


def test_a_name_that_is_not_utf_8_can_be_an_output(tmp_path):
    output = os.fsencode(tmp_path) + b"/\xff\x1b[2J"
    done = run([b"build", b"tiny", b"--output", output], subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, "")
    assert os.path.exists(output + b"/start.sh")
    assert "\x1b" not in done.stdout


def test_what_is_checked_says_nothing_a_terminal_obeys(tmp_path):
    folder = tmp_path / "a\nb\x1b[2J/1"
    folder.mkdir(parents=True)
    (folder / "model.yaml").write_text('model: "\\e[2J"\n"\\e[31m": 3\n')
    shown = run_command("check", str(tmp_path), "--trtllm", "1.2.1").stdout
    assert ("\x1b" in shown, "a\\nb\\x1b[2J" in shown) == (False, True)
