"""The guard: a process beside this one that ends tritonserver or this stub when the other one has died.

When the stub dies (out of memory, a crash in native code), tritonserver goes on: it reports ready, its metrics stand
still, and open requests wait for ever (triton-inference-server/server#8604). When tritonserver dies, a stub with a
thread that hangs in native code stays, and keeps its GPU memory. The guard ends the process that is left. After the
stub it also ends the process group that has the stub's number: an engine puts processes there that would outlive it, as
vLLM's engine core does (vllm-project/vllm#55510).

It is forked before the engine is loaded, so that it holds none of the engine's memory, threads or devices. It only
waits, and leaves when the stub does. It is in a process group of its own, so that it is left when the server's group is
killed.
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

from deepseek_backend.parent_server import INIT, crash_init

logger = logging.getLogger(__name__)

NAME = "model_guard"
"""Name of the guard in ps; without it the fork would have the stub's name."""
_ARM, _DISARM = b"a", b"d"
_STUB_LEAVES_S = 10.0
"""Seconds given to a stub whose server has gone: it leaves by itself in 1 to 2 s."""
_SERVER_ENDS_S = 5.0
"""Seconds to wait for the end of a server that has been killed."""


class ProcessGuard:
    """The stub's side of the guard: starts it and tells it when to act."""

    def __init__(self, server_pid: int, regions: Sequence[Path]) -> None:
        """`regions`: this stub's shared memory, which the guard removes when stub and server have been killed.

        :raises OSError: where the kernel has no pidfd_open (before Linux 5.3) or forbids it.
        """
        stub_pid = os.getpid()
        server, stub = os.pidfd_open(server_pid), os.pidfd_open(stub_pid)
        reading, self._commands = os.pipe2(os.O_CLOEXEC)
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._commands)
            _watch(reading, server, stub, server_pid, stub_pid, regions)
        for descriptor in (reading, server, stub):
            os.close(descriptor)

    def arm(self) -> None:
        """Have the guard end the server if this process dies from now on."""
        self._tell(_ARM)

    def disarm(self) -> None:
        """Tell the guard that this process is about to end as it should."""
        self._tell(_DISARM)

    def _tell(self, command: bytes) -> None:
        try:
            os.write(self._commands, command)
        except BrokenPipeError:
            logger.warning("the guard process %d has gone; nobody watches over this one", self._pid)


def _watch(commands: int, server: int, stub: int, server_pid: int, stub_pid: int, regions: Sequence[Path]) -> NoReturn:
    """Run the guard. `server` and `stub` are pidfds, which become readable when the process has ended."""
    try:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        os.setpgid(0, 0)
        with contextlib.suppress(OSError):  # some sandboxes forbid it
            Path("/proc/self/comm").write_text(NAME, encoding="ascii")
        armed, watched = False, [commands, server, stub]
        while True:
            # Checked before the commands are read, so that a last command, sent just before the end, is still read.
            over = _ended(server) or _ended(stub)
            while commands in _readable(watched, 0.0):
                if command := os.read(commands, 1):
                    armed = command == _ARM
                else:
                    watched.remove(commands)
            if over:
                break
            _readable(watched, None)
        if _ended(stub):
            _end_group(stub_pid)
        if armed and not _ended(server):
            _end_server(server, server_pid, regions)
        if not _ended(stub, _STUB_LEAVES_S):
            _say("tritonserver has gone: ending the model's process that it left")
            signal.pidfd_send_signal(stub, signal.SIGKILL)
            _ended(stub, _STUB_LEAVES_S)
        _end_group(stub_pid)
        if _ended(server):
            for region in regions:
                region.unlink(missing_ok=True)
    finally:
        os._exit(0)


def _end_group(number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(number, signal.SIGKILL)


def _end_server(server: int, server_pid: int, regions: Sequence[Path]) -> None:
    _say("the engine is dead: the model's process has died; ending tritonserver")
    if server_pid == INIT:
        crash_init(regions)
        if not _ended(server, _SERVER_ENDS_S):
            # The web server of Triton's OpenAI front end waits for open requests, which nobody answers, until a SIGINT.
            signal.pidfd_send_signal(server, signal.SIGINT)
    else:
        signal.pidfd_send_signal(server, signal.SIGKILL)
    _ended(server, _SERVER_ENDS_S)


def _ended(pidfd: int, timeout_s: float = 0.0) -> bool:
    return bool(_readable([pidfd], timeout_s))


def _readable(descriptors: Sequence[int], timeout_s: float | None) -> list[int]:
    """Use poll: select(2) can't take descriptors from 1024 on, and a server with many connections passes such on."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)]


def _say(what: str) -> None:
    """Write to the log without waiting: its reader may have stopped, or died with the server."""
    with contextlib.suppress(OSError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"deepseek_backend CRITICAL: {what}\n".encode())
