"""The queues that the soak makes longer, and what short ones excuse."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from reliability.checker import Verdict
from reliability.front_end_queues import LONG_BYTES, lengthen_queues
from reliability.jobs import SERVER
from reliability.run_verdict import add_torn

USUAL_BYTES = int(Path("/proc/sys/net/core/wmem_default").read_text())
ASKED_FOR_ITS_QUEUES = """
import socket
queue = socket.socketpair()
with socket.create_server(("127.0.0.1", 0)), open("/dev/null"):
    print("ready", flush=True)
    input()
    print(min(each.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) for each in queue))
"""


def test_the_queues_of_a_running_process_are_made_longer() -> None:
    command = [sys.executable, "-c", ASKED_FOR_ITS_QUEUES]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        told = lengthen_queues(process.pid)
        found, _ = process.communicate("\n")

    assert int(found) == told
    assert told >= USUAL_BYTES


@pytest.mark.parametrize(("num_bytes", "num_violations"), [(LONG_BYTES, 1), (USUAL_BYTES, USUAL_BYTES >= LONG_BYTES)])
def test_a_torn_stream_is_a_violation_where_queues_are_long(num_bytes: int, num_violations: int) -> None:
    verdict = Verdict()
    add_torn(verdict, num_bytes)
    assert verdict.num_violations == 0

    verdict.torn = Counter({SERVER: 1})
    add_torn(verdict, num_bytes)
    assert verdict.num_violations == num_violations
