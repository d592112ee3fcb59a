"""Processes: looked up in Linux's /proc, started so that they end with this one, signalled and reaped."""

import contextlib
import ctypes
import errno
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from deepseek_launcher.output import readable

_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
# Columns of /proc/PID/stat behind the name, from proc(5).
_STATE, _PARENT, _USER_TICKS, _SYSTEM_TICKS, _STARTED = 0, 1, 11, 12, 19
_CHUNK = 1 << 16
_ENDED = ("Z", "X")
_AT_A_LIMIT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def _read(pid: int, name: str) -> bytes:
    """Read a file of /proc/PID. Without pathlib and buffers, for there may be thousands of processes."""
    descriptor = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.read(descriptor, _CHUNK)
        while more := os.read(descriptor, _CHUNK):
            data += more
        return data
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Process:
    """A running process. Its number may later be another's, but never number and start time together."""

    pid: int
    started: int
    """Start time, in clock ticks after the machine's start."""
    parent: int
    name: str
    """The kernel's name of it, at most 15 characters."""
    cpu_s: float


def look_up(pid: int) -> Process | None:
    """Return the process; None when there is none that we may see, or it has ended and only waits to be reaped.

    :raises OSError: at a limit of open files or memory, where nobody can tell.
    """
    try:
        text = _read(pid, "stat").decode(errors="replace")
    except OSError as error:
        if error.errno in _AT_A_LIMIT:
            raise
        return None
    # The name is in parentheses and may hold anything.
    before, _, behind = text.rpartition(")")
    columns = behind.split()
    if columns[_STATE] in _ENDED:
        return None
    ticks = int(columns[_USER_TICKS]) + int(columns[_SYSTEM_TICKS])
    return Process(
        pid=pid,
        started=int(columns[_STARTED]),
        parent=int(columns[_PARENT]),
        name=before.partition("(")[2],
        cpu_s=ticks / _CLOCK_TICKS,
    )


def runs(process: Process) -> bool:
    """Return whether this very process still runs. True where /proc can't be read: nothing may be ended for that."""
    try:
        now = look_up(process.pid)
    except OSError:
        return True
    return now is not None and now.started == process.started


def all_processes() -> Iterator[Process]:
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (process := look_up(int(entry))):
            yield process


def is_this_users(pid: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.getuid()
    except OSError:
        return False


def namespace(pid: int | str = "self") -> str:
    """Return the name of its namespace of process numbers, as `pid:[4026531836]`; "" where we may not read it."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def environment_of(pid: int) -> dict[str, str]:
    """Return the variables that the process was started with; none when we may not read them."""
    try:
        raw = _read(pid, "environ")
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in raw.decode("utf-8", errors="surrogateescape").split("\0"))
    return {name: value for name, equals, value in pairs if equals}


def descendants(processes: Iterable[Process], roots: Iterable[int]) -> set[int]:
    """Return the numbers of all processes below `roots`, without `roots` themselves."""
    children: dict[int, list[int]] = {}
    for process in processes:
        children.setdefault(process.parent, []).append(process.pid)
    below: set[int] = set()
    waiting = list(roots)
    while waiting:
        new = [pid for pid in children.get(waiting.pop(), []) if pid not in below]
        below.update(new)
        waiting += new
    return below


def ancestors(pid: int) -> set[int]:
    """Return the numbers of all processes above `pid`, and its own."""
    line = {pid}
    while (process := look_up(pid)) and process.parent not in line:
        pid = process.parent
        line.add(pid)
    return line


def send(process: Process, signum: int) -> None:
    """Send a signal to this process, if it still runs, and never to another one that has its number by now."""
    with contextlib.suppress(ProcessLookupError):
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return
        except OSError:
            # Before Linux 5.3, or forbidden.
            if runs(process):
                os.kill(process.pid, signum)
            return
        try:
            if runs(process):
                signal.pidfd_send_signal(descriptor, signum)
        finally:
            os.close(descriptor)


def read_bytes(pid: int) -> int:
    """Return the bytes read so far, from storage or the page cache (rchar of proc(5)), without mapped files."""
    try:
        first = _read(pid, "io").split(maxsplit=2)
    except OSError:
        return 0
    return int(first[1])


def rss_bytes(pid: int) -> int:
    try:
        pages = _read(pid, "statm").split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


KILLED_CODE = 128 + signal.SIGKILL
"""Exit code of a process that was ended by SIGKILL, as a shell gives it."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

# Program that asks the kernel to kill it when its parent dies (prctl's PR_SET_PDEATHSIG, which an exec keeps), and then
# becomes the command. It is a program of its own because no Python code is safe between fork and exec in a process that
# has threads.
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

# Signals that a command gets with their default action. Python ignores SIGPIPE and SIGXFSZ; nohup ignores SIGHUP, which
# this process obeys for the command.
_DEFAULT_SIGNALS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD),
)
# sys.executable is empty where there is no PATH.
_PYTHON = sys.executable or os.readlink("/proc/self/exe")

# Process number -> child that was started here and is not reaped yet. Only the main thread starts and reaps.
_own: "dict[int, ChildProcess]" = {}


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


END_NOW = signal.SIGUSR2
"""Signal that ends a launch, or a rank, at once. mpirun and srun pass it on to every rank, also on other nodes. SIGQUIT
does the same, but a script's background job ignores SIGQUIT."""
ORDERLY = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that ask for an orderly stop, in which tritonserver finishes its open requests."""

# A repeated signal within one second is ignored: timeout(1), a terminal, a launcher and Slurm may each pass on the same
# stop request. Nobody presses Ctrl-C twice within a second to ask for two different things.
_SAME_REQUEST_S = 1.0
_TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)


class Signals:
    """Handles `signums` and SIGCHLD from now on. Make it in the main thread, and call `wait` only there.

    Every signal gets a handler, because the kernel delivers to process 1 of a container only signals with a handler.
    Signals of a terminal stay ignored where they were ignored: SIGHUP by nohup, SIGINT and SIGQUIT in a script's
    background job. SIGTERM does not, because it is the usual request to end.
    """

    def __init__(self, signums: Iterable[int]) -> None:
        self._came: list[int] = []
        self._reading, self._writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        for signum in signums:
            if signum not in _TERMINAL_SIGNALS or signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, lambda number, frame: self._came.append(number))
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the parent process may have blocked some

    def wait(self, timeout_s: float) -> list[int]:
        """Return the signals that came, in order. Waits until one comes, a child ends, or `timeout_s` is over."""
        readable(self._reading, max(0.0, timeout_s))
        with contextlib.suppress(BlockingIOError):
            while os.read(self._reading, 512):
                pass
        came, self._came = self._came, []
        return came


class StopRequests:
    """The stop that was asked for so far: none, an orderly one with a deadline, or an end at once."""

    def __init__(self, patience_s: float) -> None:
        self.stop_by: float | None = None
        """Deadline of the orderly stop, by time.monotonic(); None while none was requested."""
        self.end_now = False
        self._patience_s = patience_s
        self._first_at = 0.0

    @property
    def stopping(self) -> bool:
        return self.stop_by is not None or self.end_now

    @property
    def is_overdue(self) -> bool:
        return self.stop_by is not None and time.monotonic() > self.stop_by

    def take(self, signum: int) -> bool:
        """Take note of a stop signal; return True for the first request of an orderly stop."""
        now = time.monotonic()
        if signum in ORDERLY and not self.stopping:
            self._first_at, self.stop_by = now, now + self._patience_s
            return True
        if signum not in ORDERLY or now - self._first_at > _SAME_REQUEST_S:
            self.end_now = True
        return False
