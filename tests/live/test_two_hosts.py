"""The rendered mpirun line over two hosts, each with an ssh server of its own, under the supervisor of the first.

tests/support/hosts.py makes the hosts, install_launchers.sh installs what they need. The engine's ranks are those of
tests/standin/launcher: real processes in a real MPI world, which load nothing.
"""

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.hosts import INTERFACE, SSH_PORT, Host, Running
from support.launched import Launched, last_words
from support.servers import build
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


@pytest.mark.nightly
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


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_a_rank_that_hangs_is_named_at_the_deadline(start, tmp_path, assert_nothing_is_left):
    """By then the other ranks must have loaded, which takes as long as it takes on this machine now."""
    ready, began = tmp_path / "ready", time.monotonic()
    running = start("--ready-file", str(ready))
    wait_for(lambda: ready.exists() or running.ended, running.output)
    within = 10 + 2 * math.ceil(time.monotonic() - began)
    clients_leave()
    running.signal(signal.SIGTERM)
    assert running.wait() == 0, running.output()

    running = start("--ready-within", str(within), STANDIN_HANGING_RANK="9")
    assert running.wait() == 4, running.output()
    assert f"not ready within {within} s: rank 9 on node2: prefetching the checkpoint" in last_words(running.output())
    assert_nothing_is_left()


@pytest.mark.nightly
def test_a_supervisor_that_is_killed_takes_the_ranks_of_both_hosts_along(start, hosts, assert_nothing_is_left):
    running = start(STANDIN_LOAD_S=FOREVER_S)
    running.wait_for(RANK_9_LOADS)

    assert "supervise.py run" in hosts[0].processes()[running.pid]
    running.signal(signal.SIGKILL)

    assert running.wait() == -signal.SIGKILL
    assert_nothing_is_left()


SET_BY_HAND = {
    "TRTLLM_DG_ENABLED": "0",
    "TLLM_LOG_LEVEL": "INFO",
    "PYTORCH_ALLOC_CONF": "max_split_size_mb:8192,expandable_segments:True",
    "CUDA_HOME": "/usr/local/cuda 12.8",
    "DG_JIT_DEBUG": """it's "1"; $HOME `id` \\ """,
    "NCCL_DEBUG_FILE": "two\nlines",
    "UCX_TLS": "rc,cuda_copy",
    "NVSHMEM_DEBUG": "",
    "OMPI_MCA_btl_tcp_links": "1",  # mpirun itself passes on its own parameters
}
HERE_ONLY = {"CUDA_VISIBLE_DEVICES": "0,1", "MINE": "1"}
OVER_BOTH = {"HOSTS": "node1,node2", "SSH_PORT": str(SSH_PORT), "INTERFACE": INTERFACE}


@pytest.mark.nightly
def test_variables_set_by_hand_are_on_every_rank(hosts, launched, tmp_path, assert_nothing_is_left):
    """start.sh as an operator runs it, with a work-around in front."""
    environment = {**launched.environment, **OVER_BOTH, **SET_BY_HAND, **HERE_ONLY, "STANDIN_LOAD_S": FOREVER_S}
    running = hosts[0].start("bash", str(launched.repository / "start.sh"), log=tmp_path / "log", env=environment)
    running.wait_for(RANK_9_LOADS)
    ranks = {(host.name, n): host.environment("worker_node.py", rank=n) for host, n in zip(hosts, (1, 9), strict=True)}
    running.signal(signal.SIGTERM)
    running.wait()

    for environment in ranks.values():
        assert SET_BY_HAND.items() <= environment.items()
    assert not HERE_ONLY.keys() & ranks["node2", 9].keys()
    assert_nothing_is_left()


@pytest.mark.nightly
def test_the_benchmark_has_them_on_every_rank_too(hosts, launched, tmp_path):
    """The launcher of the ranks only records its environment: both hosts see this folder."""
    folder = build(tmp_path / "a bench", "deepseek-r1", "--gpu", "h100", "--gpus", "16", "--format", "trtllm-bench")
    (folder / "dataset.txt").touch()
    (tmp_path / "bin").mkdir()
    launcher = tmp_path / "bin/trtllm-llmapi-launch"
    launcher.write_text(f'#!/usr/bin/env bash\nenv -0 > "{tmp_path}/rank-$OMPI_COMM_WORLD_RANK-$HOSTNAME"\n')
    launcher.chmod(0o755)
    path = f"{launcher.parent}:{launched.environment['PATH']}"
    environment = {**launched.environment, **OVER_BOTH, **SET_BY_HAND, **HERE_ONLY, "PATH": path}

    done = hosts[0].run("bash", str(folder / "bench.sh"), env=environment)

    assert done.returncode == 0, done.stderr
    records = {path.name: path.read_text().split("\0") for path in tmp_path.glob("rank-*")}
    assert records.keys() == {f"rank-{n}-node{1 + n // 8}" for n in range(16)}
    for settings in records.values():
        assert {f"{name}={value}" for name, value in SET_BY_HAND.items()} <= set(settings)
    assert not {name for name in HERE_ONLY if any(line.startswith(f"{name}=") for line in records["rank-9-node2"])}


@pytest.mark.nightly
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
