"""The checks on the real machine, and the same checks sent to a bare Python."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import zipfile
from dataclasses import asdict
from io import BytesIO

import pytest

from deepseek_triton_tools.doctor import machine as machine_module
from deepseek_triton_tools.doctor.examine import CHECKS, EXPECTED_FILE, REPORT_PREFIX, examine, report_from_json
from deepseek_triton_tools.doctor.findings import Expected, expected_from_json
from deepseek_triton_tools.doctor.hosts import BOOTSTRAP, examine_by_command, pack
from deepseek_triton_tools.doctor.machine import NOT_FOUND, Machine
from deepseek_triton_tools.doctor.storage import repository_digest
from support.faked_machine import FakedMachine
from support.waiting import wait_for

BARE = [sys.executable, "-I", "-S", "-c", BOOTSTRAP]
"""A Python without site-packages: no package is installed for it, not even this project."""
EVERYTHING = Expected(repository="/r1", engine="tensorrt_llm", hosts=("a", "b"), drivers={"26.07": "590.44.01"})


def test_expected_and_a_report_travel_whole():
    assert expected_from_json(json.dumps(asdict(EVERYTHING))) == EVERYTHING
    report = examine(FakedMachine(), Expected(), host="here")
    assert report_from_json(json.dumps(asdict(report))) == report
    for text in ("{", "[]", "{}", '{"findings": [{}]}', '{"findings": []}'):
        with pytest.raises(ValueError):  # noqa: PT011 - JSONDecodeError is one
            report_from_json(text)


@pytest.mark.slow
def test_all_checks_run_in_a_python_with_nothing_installed(tmp_path):
    environ = {"PATH": os.environ["PATH"]}
    done = subprocess.run(BARE, input=pack(EVERYTHING), capture_output=True, cwd=tmp_path, env=environ)
    assert done.stderr == b""
    [line] = [line for line in done.stdout.decode().splitlines() if line.startswith(REPORT_PREFIX)]
    report = report_from_json(line.removeprefix(REPORT_PREFIX))
    assert [found.check for found in report.findings] == [check.id for check in CHECKS]
    assert [found for found in report.findings if "itself failed" in found.finding.result] == []
    of_repository = next(found.finding for found in report.findings if found.check == "repository")
    assert of_repository.result == "/r1 is not there"
    assert list(tmp_path.iterdir()) == []  # nothing is left


@pytest.mark.slow
def test_an_old_python_says_so_and_another_is_looked_at():
    old = BOOTSTRAP.replace("sys.version_info>=(3,10)", "sys.version_info>=(99,0)")
    result = examine_by_command([sys.executable, "-c", old], Expected(), host="old")
    assert result.report is None
    assert "Python 3.10 or newer is needed" in result.findings[0].finding.result
    assert "--python" in result.findings[0].finding.fix
    # What a login prints does no harm.
    login = ["env", "PATH=/bin", "sh", "-c", 'echo "Welcome to b"; printf "no newline"; PATH=/nowhere exec "$@"', "sh"]
    report = examine_by_command([*login, sys.executable, "-c", BOOTSTRAP], Expected(), host="here").report
    assert report.facts["Python"] == ".".join(map(str, sys.version_info[:3]))
    assert {found.host for found in report.findings} == {"here"}


def test_the_zip_needs_no_zlib_and_holds_no_installed_package():
    with zipfile.ZipFile(BytesIO(pack(Expected()))) as packed:
        assert {entry.compress_type for entry in packed.infolist()} == {zipfile.ZIP_STORED}
        names = packed.namelist()
    assert EXPECTED_FILE in names
    assert not [name for name in names if name.startswith("deepseek_triton_build")]


@pytest.mark.slow
def test_a_program_runs_once_and_is_killed_with_its_children(tmp_path):
    machine = Machine()
    script = f"echo x >> {tmp_path}/ran; sleep 60 & echo $! > {tmp_path}/child; wait"
    first = machine.run("sh", "-c", script, timeout_s=0.3)
    assert first.code is None
    assert machine.run("sh", "-c", script, timeout_s=0.3) == first
    assert (tmp_path / "ran").read_text() == "x\n"
    child = int((tmp_path / "child").read_text())
    wait_for(lambda: child not in {process.pid for process in machine.processes()})
    done = machine.run("no-such-program")
    assert (done.code, done.err) == (NOT_FOUND, "no-such-program: No such file or directory")
    done = machine.run("sh", "-c", "echo $ONE; echo two >&2; exit 3", environ={"ONE": "1"})
    assert (done.code, done.out, done.err) == (3, "1\n", "two\n")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:subprocess")  # the program is left running on purpose
def test_a_program_that_can_t_be_killed_is_left(tmp_path, monkeypatch):
    """nvidia-smi is such a program when its driver hangs."""
    monkeypatch.setattr(os, "killpg", lambda *_: None)
    monkeypatch.setattr(machine_module, "_KILLED_WITHIN_S", 0.1)
    done = Machine().run("sh", "-c", f"echo $$ > {tmp_path}/pid; echo first; exec sleep 60", timeout_s=0.5)
    monkeypatch.undo()
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert (done.code, done.out) == (None, "first\n")


def test_large_files_and_pipes_in_a_repository_are_not_read_to_their_end(tmp_path):
    """The repository holds a checkpoint beside model.yaml, and a pipe that nobody writes to."""
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "model-00001.safetensors").open("wb") as file:
        file.truncate(2**40)
    first = repository_digest(Machine(), str(tmp_path))
    os.truncate(tmp_path / "model-00001.safetensors", 2**40 - 1)
    assert repository_digest(Machine(), str(tmp_path)) != first


def test_a_process_with_a_launch_tag_is_seen_and_this_one_is_not():
    with subprocess.Popen(["sleep", "60"], env={**os.environ, "DEEPSEEK_TRITON_LAUNCH": "0123abcd"}) as sleeper:
        try:
            seen = {process.pid: process for process in Machine().processes()}
        finally:
            sleeper.kill()
    assert seen[sleeper.pid].launch == "0123abcd"
    assert seen[sleeper.pid].command == ("sleep", "60")
    assert seen[sleeper.pid].parent == os.getpid()
    assert os.getpid() not in seen


def test_who_listens_and_limits():
    machine = Machine()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert f"process {os.getpid()} " in (machine.listener(port) or "")
    assert machine.listener(port) is None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    try:
        assert Machine().limit("nofile") == (300, None if hard == resource.RLIM_INFINITY else hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_interfaces_and_names():
    machine = Machine()
    [loopback] = [each for each in machine.interfaces() if each.name == "lo"]
    assert loopback.is_up
    assert "127.0.0.1" in loopback.addresses
    assert "127.0.0.1" in machine.resolve("localhost")
    with pytest.raises(OSError, match="not a valid host name"):
        machine.resolve("a..b")
