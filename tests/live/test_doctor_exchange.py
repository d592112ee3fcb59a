"""`doctor --hosts` over two hosts (support/hosts.py): the MPI exchange, well and with real faults."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from deepseek_triton_tools.cli.main import main
from support.hosts import INTERFACE, SSH_PORT, Host

DOCTOR = [sys.executable, "-m", "deepseek_triton_tools.cli.main", "doctor", "--json"]
OVER_BOTH = ["--hosts", "node1,node2", "--ssh-port", str(SSH_PORT), "--interface", INTERFACE]
FAULTS = {
    "a rank that hangs before MPI_Init": 'exec sleep "$4"0',
    "a rank that hangs in MPI_Init": 'exec "$python" -c "${2//mpi.MPI_Init(None, None)/time.sleep(600)}" "${@:3}"',
    "a rank that sends nothing": 'exec "$python" -c "${2//MPI_Isend, sent/MPI_Irecv, sent}" "${@:3}"',
}
"""Fault of node2's rank -> lines of bash, whose arguments are -c, the program, the host and its patience in seconds."""


def found_by(host: Host, environment: Mapping[str, str], *options: str) -> dict[str, Any]:
    done = host.run(*DOCTOR, *OVER_BOTH, *options, env=environment)
    findings = json.loads(done.stdout)["findings"]
    [found] = [each for each in findings if each["check"] == "mpi-exchange"]
    assert isinstance(found, dict)
    return found


@pytest.fixture
def repository(tmp_path: Path) -> str:
    """R1 for two nodes: without a repository a fault is only a note."""
    folder = str(tmp_path / "r1")
    assert main(["build", "deepseek-r1", "--gpu", "h100", "--gpus", "16", "--output", folder]) == 0
    return folder


def faulty_python(folder: Path, fault: str) -> str:
    """A Python that has the fault when it is node2's rank."""
    python = folder / "python"
    lines = ["#!/usr/bin/env bash", f"python='{sys.executable}'"]
    lines += [f'if [[ "$3" == node2 ]]; then {FAULTS[fault]}; fi', 'exec "$python" "$@"', ""]
    python.write_text("\n".join(lines))
    python.chmod(0o755)
    return str(python)


def test_both_hosts_exchange_messages(hosts, launched, assert_nothing_is_left):
    found = found_by(hosts[0], launched.environment, "--python", sys.executable)

    assert (found["level"], found["result"]) == ("ok", "2 hosts, 1 pair, 1 MiB both ways")
    assert found["host"] == "node1, node2"
    assert_nothing_is_left()


@pytest.mark.nightly
def test_a_data_connection_over_the_wrong_interface(hosts, launched, repository, assert_nothing_is_left):
    """Open MPI takes this variable before --interface."""
    environment = {**launched.environment, "OMPI_MCA_btl_tcp_if_include": "lo"}
    over_both = OVER_BOTH[:-2]

    done = hosts[0].run(*DOCTOR, repository, *over_both, "--python", sys.executable, env=environment)

    [found] = [each for each in json.loads(done.stdout)["findings"] if each["check"] == "mpi-exchange"]
    assert found["level"] == "error"
    assert "node1" in found["result"]
    assert "--interface" in found["fix"]
    assert_nothing_is_left()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("a rank that hangs before MPI_Init", "no rank started on node2"),
        ("a rank that hangs in MPI_Init", "MPI_Init does not end on node1, node2"),
        ("a rank that sends nothing", "no message passes within 10 s: node1 and node2"),
    ],
)
@pytest.mark.nightly
def test_a_rank_with_a_fault(fault, said, hosts, launched, repository, tmp_path, assert_nothing_is_left):
    found = found_by(hosts[0], launched.environment, repository, "--python", faulty_python(tmp_path, fault))

    assert found["level"] == "error"
    assert said in found["result"]
    assert found["blocks"] == ["tensorrt-llm", "launch-mpirun"]
    assert_nothing_is_left()
