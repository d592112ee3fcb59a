"""Several hosts: they are reached (by a real sshd on this machine, if there is one) and compared; hosts that can't be
reached get a finding with a fix."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
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

SSHD = shutil.which("sshd") or ("/usr/sbin/sshd" if os.path.exists("/usr/sbin/sshd") else None)
R1 = Expected(engine="tensorrt_llm", repository="/r1")
FACTS = {"Python": "3.12.3", "TensorRT-LLM": "1.2.1", "GPUs": "8 x NVIDIA H200, 143771 MiB", "repository": "aa"}


def report(host: str, **facts: str | None) -> HostReport:
    changed = {**FACTS, **{name.replace("_", " "): value for name, value in facts.items()}}
    return HostReport(
        host=host, findings=(), facts={n: v for n, v in changed.items() if v is not None}, began=100.0, ended=101.0
    )


def test_hosts_that_are_alike() -> None:
    found = list(compare([report("a"), report("b")], R1))

    assert [(each.check, each.finding.level) for each in found] == [
        ("same-tensorrt-llm", "ok"),
        ("same-python", "ok"),
        ("same-gpus", "ok"),
        ("same-repository", "ok"),
    ]
    assert {each.host for each in found} == {"a, b"}


def test_two_names_of_one_machine() -> None:
    reports = [report("a", machine="m"), report("b", machine="n"), report("a-ib", machine="m"), report("c")]
    [found] = [each for each in compare(reports, R1) if each.check == "machines"]

    assert (found.finding.level, found.finding.result) == ("error", "a and a-ib are the same machine")
    [found] = [each for each in compare(reports[:2] + reports[3:], R1) if each.check == "machines"]
    assert found.finding.level == "ok"


def test_one_host_is_not_compared() -> None:
    assert list(compare([report("a")], R1)) == []


@pytest.mark.parametrize(
    ("other", "expected", "check", "level", "said"),
    [
        ({"repository": "bb"}, R1, "same-repository", "error", "aa on a, c; bb on b"),
        ({"repository": "bb"}, Expected(), "same-repository", "error", "aa on a, c; bb on b"),
        ({"GPUs": None}, R1, "same-gpus", "error", "8 x NVIDIA H200, 143771 MiB on a, c; none on b"),
        ({"GPUs": None}, Expected(), "same-gpus", "warning", "none on b"),
        ({"Python": "3.11.2"}, R1, "same-python", "warning", "3.12.3 on a, c; 3.11.2 on b"),
        ({"GPU_driver": "580.1"}, R1, "same-gpu-driver", "warning", "none on a, c; 580.1 on b"),
        ({"checkpoint_index": "cc"}, R1, "same-checkpoint-index", "error", "none on a, c; cc on b"),
    ],
)
def test_hosts_that_differ(other: dict[str, str | None], expected: Expected, check: str, level: str, said: str) -> None:
    found = {each.check: each.finding for each in compare([report("a"), report("b", **other), report("c")], expected)}

    assert found[check].level == level
    assert said in found[check].result
    assert found[check].fix


@pytest.mark.parametrize(
    ("asked", "answered", "level", "said"),
    [
        (99.5, 101.5, "ok", "agrees"),
        (101.0, 103.0, "ok", "agrees"),  # a second behind at the least
        (160.0, 162.0, "warning", "at least 60 s behind"),
        (40.0, 42.0, "warning", "at least 59 s ahead"),
    ],
)
def test_clocks(asked: float, answered: float, level: str, said: str) -> None:
    found = clock(report("b"), asked, answered).finding

    assert found.level == level
    assert said in found.result


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("node1", True),
        ("localhost", True),
        ("this", True),
        ("loop", True),
        ("node2", False),
        ("nobody", False),
    ],
)
def test_which_host_is_this_machine(host: str, here: bool) -> None:
    names = {"this": ("10.0.0.1",), "loop": ("127.0.1.1",), "node2": ("10.0.0.2",)}

    assert is_here(host, FakedMachine(names_of_hosts=names)) is here


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1 slots=8\nnode2 slots=8\n", ["node1", "node2"]),
        ("# ours\nnode1:8\n\n  node2 # spare\nnode1\n", ["node1", "node2"]),
        ("", []),
    ],
)
def test_host_files(text: str, hosts: list[str]) -> None:
    assert parse_host_file(text) == hosts


SAID_BY_SSH = [
    ("user@b: Permission denied (publickey,password).", "ssh-copy-id"),
    ("Host key verification failed.", "ssh-keyscan"),
    ("ssh: Could not resolve hostname b: Name or service not known", "/etc/hosts"),
    ("ssh: connect to host b port 22: Connection refused", "--ssh-port"),
    ("ssh: connect to host b port 22: Connection timed out", "check both"),
    ("ssh: connect to host b port 22: No route to host", "routes"),
    ("sh: 1: python3: not found", "--python"),
    ("something new", "run the command by hand"),
]


@pytest.mark.parametrize(("said", "fix"), SAID_BY_SSH)
def test_a_host_that_is_not_reached(said: str, fix: str) -> None:
    result = examine_by_command(["sh", "-c", 'cat >/dev/null; echo "$1" >&2; exit 255', "sh", said], R1, host="b")

    [found] = result.findings
    assert result.report is None
    assert (found.host, found.finding.level, found.finding.result) == ("b", "error", said)
    assert fix in found.finding.fix
    assert found.finding.blocks


def test_a_report_that_can_t_be_read() -> None:
    result = examine_by_command(["sh", "-c", "cat >/dev/null; echo 'deepseek-triton diagnosis {}'"], R1, host="b")

    assert "its report can't be read" in result.findings[0].finding.result


def test_what_a_login_prints_does_no_harm() -> None:
    command = [
        "sh",
        "-c",
        'echo "Welcome to b"; printf "no newline"; exec "$@"',
        "sh",
        *bootstrap_command(sys.executable),
    ]

    result = examine_by_command(command, R1, host="b")

    assert result.report is not None


@dataclass(frozen=True)
class Sshd:
    ssh: Ssh
    log: Path


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
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
    settings = {
        "Port": port,
        "ListenAddress": "127.0.0.1",
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "authorized",
        "PidFile": "none",
        "StrictModes": "no",
        "UsePAM": "no",
        "PasswordAuthentication": "no",
        "KbdInteractiveAuthentication": "no",
    }
    (folder / "config").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    Path("/run/sshd").mkdir(exist_ok=True) if os.getuid() == 0 else None
    server = subprocess.Popen([SSHD, "-D", "-f", folder / "config", "-E", folder / "log"])
    try:
        _wait_for(port, server, folder / "log")
        options = (
            f"-i {folder}/user -o IdentitiesOnly=yes -o StrictHostKeyChecking=accept-new "
            f"-o UserKnownHostsFile={folder}/known -o IdentityAgent=none -F none"
        )
        yield Sshd(Ssh(port=port, args=tuple(options.split())), folder / "log")
    finally:
        server.terminate()
        server.wait()


def _wait_for(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(200):
        if server.poll() is not None:
            pytest.skip(f"sshd does not run here: {log.read_text()}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    pytest.fail("sshd took no connection within 10 s")


@pytest.mark.slow
def test_a_host_by_ssh(sshd: Sshd) -> None:
    host = f"{getpass.getuser()}@127.0.0.1"

    result = examine_by_command(sshd.ssh.command(host, bootstrap_command(sys.executable)), R1, host="node2")

    assert result.report is not None, result.findings
    assert {found.host for found in (*result.findings, *result.report.findings)} == {"node2"}
    assert [(found.check, found.finding.level) for found in result.findings] == [("reached", "ok"), ("clock", "ok")]
    assert result.report.facts["Python"] == ".".join(map(str, sys.version_info[:3]))


def test_a_key_that_is_refused(sshd: Sshd, tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other"], check=True)
    args = tuple(arg.replace("/user", "/no-such") if arg.endswith("/user") else arg for arg in sshd.ssh.args)
    ssh = replace(sshd.ssh, args=("-i", str(tmp_path / "other"), *args[2:]))

    result = examine_by_command(ssh.command("127.0.0.1", bootstrap_command("python3")), R1, host="node2")

    assert "Permission denied" in result.findings[0].finding.result
    assert "launch ssh-setup" in result.findings[0].finding.fix


@pytest.mark.slow
def test_several_hosts_at_once(sshd: Sshd) -> None:
    """This machine is examined without ssh. Its loopback address would be taken for this machine too, so the machine is
    a made-up one, for which 127.0.0.1 is elsewhere."""
    elsewhere = FakedMachine(names_of_hosts={"127.0.0.1": ("10.9.9.9",)})

    results = examine_hosts(["node1", "127.0.0.1"], elsewhere, R1, ssh=sshd.ssh, python=None)

    assert [result.host for result in results] == ["node1", "127.0.0.1"]
    assert [result.report is not None for result in results] == [True, True]
    assert results[0].findings == ()
    assert [found.check for found in results[1].findings] == ["reached", "clock"]
    reports = [result.report for result in results if result.report]
    differing = [each.check for each in compare(reports, R1) if each.finding.level != "ok"]
    assert "same-gpus" in differing
