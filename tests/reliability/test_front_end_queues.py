"""The queues that the soak makes longer, and what short ones excuse."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import Counter

import pytest

from reliability.checker import Verdict
from reliability.front_end_queues import LONG_BYTES, lengthen_queues
from reliability.jobs import SERVER
from reliability.run_verdict import add_torn

SHORT_BYTES = 212_992
A_PROCESS_WITH_QUEUES = """
import socket, sys
queue = socket.socketpair()
for each in queue:
    for option in (32, socket.SO_SNDBUF):
        try:
            each.setsockopt(socket.SOL_SOCKET, option, int(sys.argv[1]))
            break
        except PermissionError:
            pass
def size():
    return min(each.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) for each in queue)
with socket.create_server(("127.0.0.1", 0)), open("/dev/null"):
    print(size(), flush=True)
    input()
    print(size())
"""


@pytest.mark.parametrize("num_bytes", [SHORT_BYTES // 2, 32 * 2**20])
def test_the_queues_of_a_running_process_get_longer_and_never_shorter(num_bytes: int) -> None:
    command = [sys.executable, "-c", A_PROCESS_WITH_QUEUES, str(num_bytes)]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        before = int(process.stdout.readline())
        told = lengthen_queues(process.pid)
        after, _ = process.communicate("\n")

    assert int(after) >= before
    assert told in (int(after), usual_bytes())


def usual_bytes() -> int:
    first, second = socket.socketpair()
    with first, second:
        return first.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def test_a_process_that_has_ended_has_no_queues() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ProcessLookupError):
            lengthen_queues(process.pid)


def violations(num_bytes: int, num_requests: int, num_torn: int) -> int:
    verdict = Verdict()
    verdict.num_requests = num_requests
    verdict.torn = Counter({SERVER: num_torn})
    add_torn(verdict, num_bytes)
    return verdict.num_violations


def test_a_torn_stream_is_a_violation_where_queues_are_long() -> None:
    table = {
        (LONG_BYTES, 10**6, 0): 0, (LONG_BYTES, 10**6, 1): 1,
        (SHORT_BYTES, 600, 1): 0, (SHORT_BYTES, 600, 2): 1,
        (SHORT_BYTES, 10**6, 10): 0, (SHORT_BYTES, 10**6, 11): 1,
    }  # fmt: skip
    assert {case: violations(*case) for case in table} == table
