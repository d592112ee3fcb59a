"""Whichever process gets SIGKILL, no process of the launch stays."""

import os
import shlex
import signal
import sys

from support.supervising import TREE, rank_of, runs
from support.waiting import wait_for

VICTIMS = (("run",), ("rank",), ("bash",), ("run", "rank"), ("run", "rank", "bash"), ("run", "guard of run"))


LINES = {"rank": "supervise.py rank", "bash": "bash -c setsid"}


def grow(supervise):
    return supervise(*rank_of("bash", "-c", TREE))


def kill(tree, victims):
    pids = {
        "run": tree.process.pid,
        **{name: tree.pid_of(line) for name, line in LINES.items()},
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


RETITLED = """\
import ctypes, pathlib, time
columns = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
first, last = map(int, columns[47:49])
ctypes.memset(first, 0, last - first)
pathlib.Path("/proc/self/comm").write_text("VLLM::EngineCore")
print("pid", __import__("os").getpid(), flush=True)
time.sleep(1000)
"""
"""What setproctitle does to vLLM's processes: the title overwrites the environment, and the tag with it (proc(5):
env_start, env_end)."""


def test_an_orphan_whose_title_has_overwritten_the_tag_is_ended_too(supervise):
    trees = {}
    for victim in ("run", *LINES):
        orphan = f"(setsid {shlex.quote(sys.executable)} -S -c {shlex.quote(RETITLED)} &)"
        trees[victim] = supervise(*rank_of("bash", "-c", f"setsid sleep 1000 & {orphan}; wait"))
    for victim, tree in trees.items():
        wait_for(lambda: "pid " in tree.out)  # noqa: B023
        pid = int(tree.out.partition("pid ")[2].split()[0])
        assert pid not in tree.others()
        os.kill(tree.process.pid if victim == "run" else tree.pid_of(LINES[victim]), signal.SIGKILL)

        wait_for(lambda: not runs(pid))  # noqa: B023
