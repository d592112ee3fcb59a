"""Several hosts: they are reached (by a real sshd on this machine, if there is one) and compared; hosts that can't be
reached get a finding with a fix."""

import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from deepseek_triton_tools.doctor.comparing import clock, compare
from deepseek_triton_tools.doctor.hosts import (
    Ssh,
    bootstrap_command,
    examine_by_command,
    examine_hosts,
    is_here,
    parse_host_file,
)
from deepseek_triton_tools.doctor.machine.examine import HostReport
from deepseek_triton_tools.doctor.machine.expected import Expected
from support.faked_machine import FakedMachine
from support.waiting import wait_for

SSHD = shutil.which("sshd") or ("/usr/sbin/sshd" if os.path.exists("/usr/sbin/sshd") else None)
R1 = Expected(engine="tensorrt_llm", repository="/r1")
FACTS = {"Python": "3.12.3", "TensorRT-LLM": "1.2.1", "GPUs": "8 x NVIDIA H200, 143771 MiB", "repository": "aa"}


def report(host, **facts):
    changed = {**FACTS, **{name.replace("_", " "): value for name, value in facts.items()}}
    there = {name: value for name, value in changed.items() if value is not None}
    return HostReport(host=host, findings=(), facts=there, began=100.0, ended=101.0)


def test_hosts_that_are_alike_and_two_names_of_one():
    found = list(compare([report("a"), report("b")], R1))
    alike = ["same-tensorrt-llm", "same-python", "same-gpus", "same-repository"]
    assert [(each.check, each.finding.level) for each in found] == [(check, "ok") for check in alike]
    assert {each.host for each in found} == {"a, b"}
    assert list(compare([report("a")], R1)) == []  # one host is not compared
    reports = [report("a", machine="m"), report("b", machine="n"), report("a-ib", machine="m"), report("c")]
    [found] = [each for each in compare(reports, R1) if each.check == "machines"]
    assert (found.finding.level, found.finding.result) == ("error", "a and a-ib are the same machine")
    [found] = [each for each in compare(reports[:2] + reports[3:], R1) if each.check == "machines"]
    assert found.finding.level == "ok"


def test_hosts_that_differ():
    cases = [
        ({"repository": "bb"}, R1, "same-repository", "error", "aa on a, c; bb on b"),
        ({"repository": "bb"}, Expected(), "same-repository", "error", "aa on a, c; bb on b"),
        ({"GPUs": None}, R1, "same-gpus", "error", "8 x NVIDIA H200, 143771 MiB on a, c; none on b"),
        ({"GPUs": None}, Expected(), "same-gpus", "warning", "none on b"),
        ({"Python": "3.11.2"}, R1, "same-python", "warning", "3.12.3 on a, c; 3.11.2 on b"),
        ({"GPU_driver": "580.1"}, R1, "same-gpu-driver", "warning", "none on a, c; 580.1 on b"),
        ({"checkpoint_index": "cc"}, R1, "same-checkpoint-index", "error", "none on a, c; cc on b"),
    ]
    for other, expected, check, level, said in cases:
        reports = [report("a"), report("b", **other), report("c")]
        found = {each.check: each.finding for each in compare(reports, expected)}[check]
        assert (found.level, bool(found.fix)) == (level, True), check
        assert said in found.result


def test_clocks():
    cases = [
        (99.5, 101.5, "ok", "agrees"),
        (101.0, 103.0, "ok", "agrees"),  # a second behind at the least
        (160.0, 162.0, "warning", "at least 60 s behind"),
        (40.0, 42.0, "warning", "at least 59 s ahead"),
    ]
    for asked, answered, level, said in cases:
        found = clock(report("b"), asked, answered).finding
        assert (found.level, said in found.result) == (level, True), asked


def test_names_of_hosts():
    machine = FakedMachine(names_of_hosts={"this": ("10.0.0.1",), "loop": ("127.0.1.1",), "node2": ("10.0.0.2",)})
    here = {"node1": True, "localhost": True, "this": True, "loop": True, "node2": False, "nobody": False}
    assert {host: is_here(host, machine) for host in here} == here
    both = ["node1", "node2"]
    files = {"node1 slots=8\nnode2 slots=8\n": both, "# ours\nnode1:8\n\n  node2 # spare\nnode1\n": both, "": []}
    assert {text: parse_host_file(text) for text in files} == files


def test_a_host_that_is_not_reached():
    fixes = {
        "user@b: Permission denied (publickey,password).": "ssh-copy-id",
        "Host key verification failed.": "ssh-keyscan",
        "ssh: Could not resolve hostname b: Name or service not known": "/etc/hosts",
        "ssh: connect to host b port 22: Connection refused": "--ssh-port",
        "ssh: connect to host b port 22: Connection timed out": "check both",
        "ssh: connect to host b port 22: No route to host": "routes",
        "sh: 1: python3: not found": "--python",
        "something new": "run the command by hand",
    }
    for said, fix in fixes.items():
        result = examine_by_command(["sh", "-c", 'cat >/dev/null; echo "$1" >&2; exit 255', "sh", said], R1, host="b")
        [found] = result.findings
        assert result.report is None
        assert (found.host, found.finding.level, found.finding.result) == ("b", "error", said)
        assert fix in found.finding.fix, said
        assert found.finding.blocks
    result = examine_by_command(["sh", "-c", "cat >/dev/null; echo 'deepseek-triton diagnosis {}'"], R1, host="b")
    assert "its report can't be read" in result.findings[0].finding.result


@pytest.fixture(scope="module")
def sshd(tmp_path_factory):
    """An sshd of this user, on the loopback interface, with its own keys."""
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("no ssh and sshd here")
    folder = tmp_path_factory.mktemp("sshd")
    folder.chmod(0o700)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\n"
    settings += "PidFile none\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
    (folder / "config").write_text(settings)
    Path("/run/sshd").mkdir(exist_ok=True) if os.getuid() == 0 else None
    server = subprocess.Popen([SSHD, "-D", "-f", folder / "config", "-E", folder / "log"])

    def answers():
        if server.poll() is not None:
            pytest.skip(f"sshd does not run here: {(folder / 'log').read_text()}")
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait_for(answers)
        options = f"-i {folder}/user -o IdentitiesOnly=yes -o StrictHostKeyChecking=accept-new "
        options += f"-o UserKnownHostsFile={folder}/known -o IdentityAgent=none -F none"
        yield Ssh(port=port, args=tuple(options.split()))
    finally:
        server.terminate()
        server.wait()


@pytest.mark.slow
def test_a_key_that_is_refused(sshd, tmp_path):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other"], check=True)
    ssh = replace(sshd, args=("-i", str(tmp_path / "other"), *sshd.args[2:]))
    result = examine_by_command(ssh.command("127.0.0.1", bootstrap_command("python3")), R1, host="node2")
    assert "Permission denied" in result.findings[0].finding.result
    assert "launch ssh-setup" in result.findings[0].finding.fix


@pytest.mark.slow
def test_several_hosts_at_once(sshd):
    """This machine is examined without ssh. Its loopback address would be taken for this machine too, so the machine is
    a made-up one, for which 127.0.0.1 is elsewhere."""
    elsewhere = FakedMachine(names_of_hosts={"127.0.0.1": ("10.9.9.9",)})
    results = examine_hosts(["node1", "127.0.0.1"], elsewhere, R1, ssh=sshd, python=None)
    assert [result.host for result in results] == ["node1", "127.0.0.1"]
    assert [result.report is not None for result in results] == [True, True]
    assert results[0].findings == ()
    assert [(found.check, found.finding.level) for found in results[1].findings] == [("reached", "ok"), ("clock", "ok")]
    assert {found.host for found in (*results[1].findings, *results[1].report.findings)} == {"127.0.0.1"}
    assert results[1].report.facts["Python"] == ".".join(map(str, sys.version_info[:3]))
    reports = [result.report for result in results if result.report]
    differing = [each.check for each in compare(reports, R1) if each.finding.level != "ok"]
    assert "same-gpus" in differing
