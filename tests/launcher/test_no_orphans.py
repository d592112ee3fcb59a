"""Whoever is killed with SIGKILL, nothing that was started stays."""

import os
import signal

import pytest
from supervising import TREE, rank_of, until


@pytest.fixture
def tree(supervise):
    running = supervise(*rank_of("bash", "-c", TREE))
    until(lambda: "grown" in running.out)
    until(lambda: len(running.others()) >= 7)
    return running


@pytest.mark.parametrize(
    "victims",
    [("run",), ("rank",), ("bash",), ("run", "rank"), ("run", "rank", "bash")],
    ids=" and ".join,
)
def test_a_kill_leaves_nothing(tree, victims):
    pids = {"run": tree.process.pid, "rank": tree.pid_of("supervise.py rank"), "bash": tree.pid_of("bash -c setsid")}
    for victim in victims:
        os.kill(pids[victim], signal.SIGKILL)

    until(lambda: not tree.others())
    assert tree.wait() == (-signal.SIGKILL if "run" in victims else 128 + signal.SIGKILL)
    assert tree.launch not in tree.ask("list").stdout
