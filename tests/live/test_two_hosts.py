"""The rendered mpirun line over two hosts, each with an ssh server of its own, under the supervisor of the first.

tests/support/hosts.py makes the hosts, install_launchers.sh installs what they need. The engine's ranks are those of
tests/standin/launcher: real processes in a real MPI world, which load nothing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.hosts import INTERFACE, SSH_PORT, Host, Running
from support.launched import Launched, last_words
from support.waiting import clients_leave, wait_for

PORTS = {8000, 8001, 8002}
RANK_9_LOADS = "[RANK 9] [I] Prefetching"
"""The second of the second host."""
FOREVER_S = "600"

Start = Callable[..., Running]


@pytest.fixture
def start(hosts: tuple[Host, Host], launched: Launched, tmp_path: Path) -> Iterator[Start]:
    """`launch mpirun --submit` on the first host, with further options; variables as keywords."""
    over = ["mpirun", "--hosts", "node1,node2", "--ssh-port", str(SSH_PORT), "--interface", INTERFACE]
    with ExitStack() as stack:

        def start_it(*options: str, **variables: str) -> Running:
            command = launched.launch(*over, *options, "--submit")
            running = hosts[0].start(*command, log=tmp_path / "log", env={**launched.environment, **variables})
            stack.callback(running.end)
            return running

        yield start_it


def test_the_first_host_serves_and_an_orderly_stop_leaves_nothing(
    start, hosts, launched, tmp_path, assert_nothing_is_left
):
    ready = tmp_path / "ready"
    running = start("--ready-file", str(ready))
    wait_for(lambda: ready.exists() or running.ended, running.output)

    assert ready.exists(), running.output()
    assert launched.generate(hosts[0])
    wait_for(lambda: hosts[0].listening() >= PORTS, running.output)
    assert not hosts[1].listening() & PORTS
    assert hosts[1].process("worker_node.py", rank=9)
    clients_leave()
    running.signal(signal.SIGTERM)
    assert running.wait() == 0, running.output()
    assert not ready.exists()
    assert_nothing_is_left()


def test_a_worker_that_is_killed_while_loading_is_named_and_all_ends(start, hosts, assert_nothing_is_left):
    running = start(STANDIN_LOAD_S=FOREVER_S)
    running.wait_for(RANK_9_LOADS)

    os.kill(hosts[1].process("worker_node.py", rank=9), signal.SIGKILL)

    assert running.wait() == 128 + signal.SIGKILL, running.output()
    assert "rank 9 on node2 ended by signal 9 (phase: prefetching the checkpoint)" in last_words(running.output())
    assert_nothing_is_left()


def test_a_host_that_is_lost_is_named(start, hosts, assert_nothing_is_left):
    """mpirun's own daemon there dies, as with its host."""
    running = start(STANDIN_LOAD_S=FOREVER_S)
    running.wait_for(RANK_9_LOADS)

    daemon = next(
        pid for pid, command in hosts[1].processes().items() if command.startswith(("orted", "/usr/bin/orted"))
    )
    os.kill(daemon, signal.SIGKILL)

    assert running.wait() > 0, running.output()
    assert "mpirun has lost the connection to node2" in last_words(running.output())
    assert "by signal 7" not in running.output()
    assert_nothing_is_left()


def test_a_rank_that_hangs_is_named_at_the_deadline(start, hosts, assert_nothing_is_left):
    running = start("--ready-within", "15", STANDIN_HANGING_RANK="9")

    assert running.wait() == 4, running.output()
    assert "not ready within 15 s: rank 9 on node2: prefetching the checkpoint" in last_words(running.output())
    assert_nothing_is_left()


def test_a_supervisor_that_is_killed_takes_the_ranks_of_both_hosts_along(start, hosts, assert_nothing_is_left):
    running = start(STANDIN_LOAD_S=FOREVER_S)
    running.wait_for(RANK_9_LOADS)

    assert "supervise.py run" in hosts[0].processes()[running.pid]
    running.signal(signal.SIGKILL)

    assert running.wait() == -signal.SIGKILL
    assert_nothing_is_left()


def test_ssh_setup_brings_an_mpi_hello_from_every_rank(hosts, launchers, launched, tmp_path, assert_nothing_is_left):
    """From two hosts that know each other by ssh's own port, without a container."""
    options = ("ssh-setup", "--hosts", "node1,node2", "--interface", INTERFACE)
    environment = {**launched.environment, "PYTHONPATH": str(launchers)}
    script = hosts[0].run(*launched.launch(*options), env=environment)
    assert script.returncode == 0, script.stderr
    (tmp_path / "ssh-setup.sh").write_text(script.stdout)
    environment |= {"CONTAINER": "", "KEYS": str(tmp_path / "keys"), "PORT": "2244"}

    done = hosts[0].run("bash", str(tmp_path / "ssh-setup.sh"), env=environment)

    for host in hosts:
        host.end("sshd", argument="2244")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hello from 16 ranks: node1 x 8 node2 x 8" in done.stdout
    assert_nothing_is_left()
