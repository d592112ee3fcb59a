"""Child processes that don't outlive this one, and the reaping of all that end below it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping, Sequence

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_GUARDED_EXEC = """\
import ctypes, os, signal, sys
if ctypes.CDLL(None, use_errno=True).prctl(1, ctypes.c_ulong(signal.SIGKILL)):
    sys.exit("prctl: " + os.strerror(ctypes.get_errno()))
if os.getppid() != int(sys.argv[1]):
    os._exit(137)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    print(f"deepseek-triton: {sys.argv[2]} can't be started: {error.strerror}", file=sys.stderr)
    sys.exit(127 if isinstance(error, FileNotFoundError) else 126)
"""
"""Becomes the command, after asking the kernel to kill it when its parent dies (prctl's PR_SET_PDEATHSIG, which an exec
keeps). A program of its own, because between fork and exec in a process with threads no Python code is safe."""

_HANDED_ON = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD),
)
"""Signals a command gets with their default action: Python ignores two, and nohup's SIGHUP is ours to mind."""
_PYTHON = sys.executable or os.readlink("/proc/self/exe")
"""Python can't tell without a PATH."""

_own: dict[int, ChildProcess] = {}
"""Those started here that are not reaped yet. Only the main thread starts and reaps."""


class ChildProcess:
    """A command in a session of its own, killed by the kernel when this process dies, however that comes.

    Start it in the main thread: what counts for the kernel is the end of the thread that started it.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, output: int | None = None) -> None:
        """`output`: where its stdout and stderr go, else to ours.

        :raises OSError: when no process can be started. A command that is not there ends with 127.
        """
        argv = [_PYTHON, "-I", "-S", "-c", _GUARDED_EXEC, str(os.getpid()), *command]
        actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        ]
        if output is not None:
            actions += [(os.POSIX_SPAWN_DUP2, output, 1), (os.POSIX_SPAWN_DUP2, output, 2)]
        self.pid = os.posix_spawn(
            _PYTHON, argv, dict(environment), file_actions=actions, setsid=True, setsigmask=(), setsigdef=_HANDED_ON
        )
        self.exit_code: int | None = None
        """As a shell has it: 128 and the number of the signal that ended it. None while it runs."""
        _own[self.pid] = self

    def send(self, signum: int) -> None:
        """Nothing when it has ended: until it is reaped its number is nobody else's."""
        if self.exit_code is None:
            os.kill(self.pid, signum)


def signal_of(code: int) -> int | None:
    """Which signal an exit code stands for, as a shell has them. There are 64; mpirun's 205 is no signal."""
    return code - 128 if 128 < code <= 128 + 64 else None


def how_ended(code: int) -> str:
    """`ended by signal 9`, `ended with exit code 1`"""
    signum = signal_of(code)
    return f"ended by signal {signum}" if signum else f"ended with exit code {code}"


def reap() -> None:
    """Take note of all that have ended: own children, and orphans that came here as to a subreaper or process 1."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        child = _own.pop(pid, None)
        if child is not None:
            code = os.waitstatus_to_exitcode(status)
            child.exit_code = 128 - code if code < 0 else code


def adopt_orphans() -> None:
    """Be the one that every orphan below comes to, instead of process 1 of the machine."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def signal_at_parents_death(signum: int) -> None:
    """Have the kernel send `signum` when the thread that started this process ends."""
    _prctl(_PR_SET_PDEATHSIG, signum)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value)):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl: {os.strerror(number)}")
