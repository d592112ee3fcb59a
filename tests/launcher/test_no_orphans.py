"""Whichever process gets SIGKILL, no process of the launch stays."""

import os
import signal

from support.supervising import TREE, rank_of
from support.waiting import wait_for

VICTIMS = (("run",), ("rank",), ("bash",), ("run", "rank"), ("run", "rank", "bash"), ("run", "guard of run"))


def grow(supervise):
    return supervise(*rank_of("bash", "-c", TREE))


def kill(tree, victims):
    pids = {
        "run": tree.process.pid,
        "rank": tree.pid_of("supervise.py rank"),
        "bash": tree.pid_of("bash -c setsid"),
        "guard of run": tree.guard_of("supervise.py run"),
    }
    for victim in victims:
        os.kill(pids[victim], signal.SIGKILL)


def test_a_kill_leaves_nothing(supervise):
    trees = {victims: grow(supervise) for victims in VICTIMS}
    for victims, tree in trees.items():
        wait_for(lambda: "grown" in tree.out and len(tree.others()) >= 7)  # noqa: B023
        kill(tree, victims)

    for victims, tree in trees.items():
        wait_for(lambda: not tree.others())  # noqa: B023
        assert tree.wait() == (-signal.SIGKILL if "run" in victims else 128 + signal.SIGKILL), victims
    # Where its guard was killed too, no process is left to remove the record.
    listed = {victims for victims, tree in trees.items() if tree.launch in tree.ask("list").stdout}
    assert listed == {("run", "guard of run")}
