"""What `doctor` says of a server that runs, and of what one leaves behind."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepseek_triton_tools.doctor.findings import Expected, MachineFinding
from deepseek_triton_tools.doctor.hosts import BOOTSTRAP, examine_by_command
from deepseek_triton_tools.doctor.machine import HostProcess, Machine
from deepseek_triton_tools.doctor.software import STUB
from deepseek_triton_tools.host.tritonserver import find_tritonserver
from deepseek_triton_tools.server.server_process import ServerProcess
from support.servers import build
from support.waiting import wait_for

pytestmark = pytest.mark.slow


@pytest.fixture
def renamed_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerProcess]:
    """A tritonserver that was started through a link of another name."""
    found = find_tritonserver()
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    link = tmp_path / "server-prod"
    link.symlink_to(found.binary)
    repository = build(tmp_path / "repository", "tiny", "--engine", "simulated")
    with ServerProcess.serving(repository, tritonserver=link, server_args=found.extra_args) as server:
        yield server


def leftovers() -> MachineFinding:
    """What doctor finds, run by a Python of its own: its ancestors are not looked at, and this test is the server's."""
    report = examine_by_command(["python3", "-c", BOOTSTRAP], Expected(), host="here").report
    assert report is not None
    return next(found.finding for found in report.findings if found.check == "leftovers")


def stub_of(pid: int) -> HostProcess:
    """The stub that was started for this server, which knows the server's pid from its command line."""
    found = [each for each in Machine().processes() if STUB in " ".join(each.command[:1]) and str(pid) in each.command]
    return min(found, key=lambda each: each.pid)  # a guard is a later fork


def test_a_stub_is_left_over_only_when_its_server_is_gone(renamed_server: ServerProcess) -> None:
    server, stub = renamed_server.pid, stub_of(renamed_server.pid)
    assert stub.parent == server
    healthy = leftovers()
    assert str(stub.pid) not in healthy.result + healthy.fix
    [region] = [word for word in stub.command if word.startswith("deepseek_triton_")]
    assert region.rpartition("_")[0] not in healthy.fix

    supervisor = next(each.parent for each in Machine().processes() if each.pid == server)
    os.kill(supervisor, signal.SIGSTOP)  # or it would end what its server leaves
    os.kill(stub.pid, signal.SIGSTOP)  # or it would leave by itself
    try:
        os.kill(server, signal.SIGKILL)
        wait_for(lambda: stub_of(server).parent != server)
        left = leftovers()
    finally:
        os.kill(stub.pid, signal.SIGKILL)
        os.kill(supervisor, signal.SIGCONT)

    assert left.level == "warning"
    assert str(stub.pid) in left.fix
