"""Child processes that the kernel kills when this process dies, and the reaping of everything that ends below it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping, Sequence

KILLED_CODE = 128 + signal.SIGKILL
"""Exit code of a process that was ended by SIGKILL, as a shell gives it."""

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
"""Program that asks the kernel to kill it when its parent dies (prctl's PR_SET_PDEATHSIG, which an exec keeps), and
then becomes the command. It is a program of its own because no Python code is safe between fork and exec in a process
that has threads."""

_DEFAULT_SIGNALS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD),
)
"""Signals that a command gets with their default action. Python ignores SIGPIPE and SIGXFSZ; nohup ignores SIGHUP,
which this process obeys for the command."""
_PYTHON = sys.executable or os.readlink("/proc/self/exe")
"""sys.executable is empty where there is no PATH."""

_own: dict[int, ChildProcess] = {}
"""Process number -> child that was started here and is not reaped yet. Only the main thread starts and reaps."""


class ChildProcess:
    """A command in a session of its own, which the kernel kills when this process dies for any reason.

    Start it in the main thread: the kernel kills it at the end of the thread that started it.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, output: int | None = None) -> None:
        """Start the command.

        :param output: descriptor for its stdout and stderr; without one it inherits ours.
        :raises OSError: when no process can be started. A command that does not exist ends with 127 instead.
        """
        argv = [_PYTHON, "-I", "-S", "-c", _GUARDED_EXEC, str(os.getpid()), *command]
        actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        ]
        if output is not None:
            actions += [(os.POSIX_SPAWN_DUP2, output, 1), (os.POSIX_SPAWN_DUP2, output, 2)]
        self.pid = os.posix_spawn(
            _PYTHON,
            argv,
            dict(environment),
            file_actions=actions,
            setsid=True,
            setsigmask=(),
            setsigdef=_DEFAULT_SIGNALS,
        )
        self.exit_code: int | None = None
        """Exit code as a shell gives it: 128 and the signal's number after a signal. None while the command runs."""
        _own[self.pid] = self

    def send(self, signum: int) -> None:
        """Send a signal, if the command has not ended. No other process has its number before it is reaped."""
        if self.exit_code is None:
            os.kill(self.pid, signum)


def signal_of(code: int) -> int | None:
    """Return the signal that a shell's exit code stands for. There are 64 signals, so mpirun's 205 is none."""
    return code - 128 if 128 < code <= 128 + 64 else None


def how_ended(code: int) -> str:
    """Return `ended by signal 9` or `ended with exit code 1`."""
    signum = signal_of(code)
    return f"ended by signal {signum}" if signum else f"ended with exit code {code}"


def reap() -> None:
    """Reap every process that has ended: own children, and orphans that came here as to a subreaper or process 1."""
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
    """Become the parent of every orphan below this process, instead of the machine's process 1."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def signal_at_parents_death(signum: int) -> None:
    """Have the kernel send `signum` when the thread that started this process ends."""
    _prctl(_PR_SET_PDEATHSIG, signum)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value)):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl: {os.strerror(number)}")
