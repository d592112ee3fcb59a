"""A process beside this one that acts when one of the two it watches is gone and the other doesn't notice.

When the stub dies (killed for want of memory, a crash in native code), tritonserver goes on: it says ready, its
metrics stand still, and open requests wait for ever (triton-inference-server/server#8604). When tritonserver dies, a
stub with a thread that hangs in native code stays, with its GPU memory. The guard ends the one that is left.

It is forked before the engine is loaded, so that it holds none of the engine's memory, threads or devices, and only
waits; it leaves when the stub does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from deepseek_backend.process.parent_server import INIT, crash_init

logger = logging.getLogger(__name__)

NAME = "model_guard"
"""What ps calls it; as a fork it had the stub's name."""
_ARM, _DISARM = b"a", b"d"
_STUB_LEAVES_S = 10.0
"""A stub whose server has gone leaves by itself in 1 to 2 s."""
_SERVER_ENDS_S = 5.0


class ProcessGuard:
    """The parent's side."""

    def __init__(self, server_pid: int, regions: Sequence[Path]) -> None:
        """`regions`: shared memory of this stub, for nobody removes it when both are killed.

        :raises OSError: where the kernel has no pidfd_open (before Linux 5.3) or forbids it.
        """
        server, stub = os.pidfd_open(server_pid), os.pidfd_open(os.getpid())
        reading, self._commands = os.pipe2(os.O_CLOEXEC)
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._commands)
            _watch(reading, server, stub, server_pid, regions)
        for descriptor in (reading, server, stub):
            os.close(descriptor)

    def arm(self) -> None:
        """From now on the server ends when this process dies."""
        self._tell(_ARM)

    def disarm(self) -> None:
        """This process is about to end as it should."""
        self._tell(_DISARM)

    def _tell(self, command: bytes) -> None:
        try:
            os.write(self._commands, command)
        except BrokenPipeError:
            logger.warning("the guard process %d has gone; nobody watches over this one", self._pid)


def _watch(commands: int, server: int, stub: int, server_pid: int, regions: Sequence[Path]) -> NoReturn:
    """The guard. `server` and `stub` are pidfds, readable when the process has ended."""
    try:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        with contextlib.suppress(OSError):  # not every sandbox lets it
            Path("/proc/self/comm").write_text(NAME, encoding="ascii")
        armed, watched = False, [commands, server, stub]
        while True:
            over = _ended(server) or _ended(stub)  # looked at before the last words are read, which may be unread yet
            while commands in _readable(watched, 0.0):
                if command := os.read(commands, 1):
                    armed = command == _ARM
                else:
                    watched.remove(commands)
            if over:
                break
            _readable(watched, None)
        if armed and not _ended(server):
            _end_server(server, server_pid, regions)
        if not _ended(stub, _STUB_LEAVES_S):
            _say("tritonserver has gone: ending the model's process that it left")
            signal.pidfd_send_signal(stub, signal.SIGKILL)
        if _ended(server):
            for region in regions:
                region.unlink(missing_ok=True)
    finally:
        os._exit(0)


def _end_server(server: int, server_pid: int, regions: Sequence[Path]) -> None:
    _say("the engine is dead: the model's process has died; ending tritonserver")
    if server_pid == INIT:
        crash_init(regions)
    else:
        signal.pidfd_send_signal(server, signal.SIGKILL)
    _ended(server, _SERVER_ENDS_S)


def _ended(pidfd: int, timeout_s: float = 0.0) -> bool:
    return bool(_readable([pidfd], timeout_s))


def _readable(descriptors: Sequence[int], timeout_s: float | None) -> list[int]:
    """Not by select(2), which can't take numbers from 1024 on: a server with as many connections hands them on."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)]


def _say(what: str) -> None:
    """Without waiting: whoever reads the log may have stopped, or died with the server."""
    with contextlib.suppress(OSError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"deepseek_backend CRITICAL: {what}\n".encode())
