"""The Triton server above this process: whether it has been told to exit, and how to end it when nothing else helps.

It is the program tritonserver, or another program that has Triton inside it, such as Triton's OpenAI front end.

Triton runs the backend in a child process, the stub, and does not tell it of a SIGTERM: `finalize` comes only when no
request is open any more. A stream that is still being written when the exit timeout ends crashes the server (2.51.0,
exit code 139). To end open requests in time, the stub has to notice the exit itself, from what the kernel shows of its
parent.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, Protocol

logger = logging.getLogger(__name__)

PROC = Path("/proc")
SHARED_MEMORY = Path("/dev/shm")
DEFAULT_EXIT_TIMEOUT_S = 30.0
_STATE, _LISTENS, _INODE = 3, "0A", 9
"""Columns of /proc/PID/net/tcp, and TCP_LISTEN in the first of them."""
FATAL_SIGNAL = signal.SIGKILL
"""It ends the server in 20 ms and leaves no core. The server handles SIGABRT and SIGSEGV, for up to 0.7 s, and dumps
core; SIGQUIT dumps core too; SIGTERM would mean exit code 0."""

_SERVER_NAME = "tritonserver"
_STUB_NAME = "triton_python_backend_stub"
_NAME_LENGTH = 15
"""Most characters of a process's name: the kernel cuts it there."""
_LIBRARY = re.compile(r"/libtritonserver[^/\n]*\.so")
"""Triton itself, as a process that has it inside maps it. The nvidia-pytriton wheel puts a hash into the name."""
_OPTION = "--exit-timeout-secs"
_OPTION_MIN = len("--exit-t")
"""Least length of the option's name. getopt takes every unique beginning; a shorter one could be --exit-on-error."""
_CONFIRM_S = 0.5
"""Seconds for which a sign of an exit has to last before it counts."""
_SETTLED_S = 2.0
"""Seconds for which a program has to have listened before it counts that it no longer does."""
_FIND_S = 1.0
"""Seconds between two searches for the ports of a program, which reads a link for each file that it has open."""
_FLUSH_S = 0.5
"""Seconds between the last `send` and the end of the server, whose threads write to the clients after `send` has
returned. With no time in between 2 of 17 tries cut a client off, with this none of 18."""
INIT = 1
"""The pid of a server that is process 1 of its container."""


def parent_server() -> int | None:
    """Return the pid of the process with the Triton server that started this stub; None where there is none.

    A process has the server inside when it maps libtritonserver, whatever its name. The name counts too: what a process
    maps can't be read where it has capabilities of its file.
    """
    pid = os.getppid()
    if _name(os.getpid()) != _STUB_NAME[:_NAME_LENGTH]:
        return None  # this is a test
    is_server = _name(pid) == _SERVER_NAME or _LIBRARY.search(_read(PROC / str(pid) / "maps"))
    return pid if is_server else None


def exit_timeout_s(pid: int) -> float:
    """Return the seconds that the server gives open requests after it was told to exit, from its command line."""
    arguments = _arguments(pid)
    found = DEFAULT_EXIT_TIMEOUT_S
    for argument, following in zip(arguments, [*arguments, ""][1:], strict=True):
        name, equals, value = argument.partition("=")
        if len(name) >= _OPTION_MIN and _OPTION.startswith(name):
            try:
                found = float(value if equals else following)
            except ValueError:
                logger.warning("%s of tritonserver can't be read: %r; taken for %g", name, value or following, found)
    return found


class ExitWatch:
    """Notices that the server has been told to exit. Create it in the main thread; only one thread may ask it.

    There are two signs: the one of the program, and a SIGTERM to this process: systemd and `kill -- -GROUP` send it
    also to the stubs, which ignore it. Where the kernel shows no wchan (gVisor), the second is the only sign.
    """

    def __init__(self, pid: int) -> None:
        self.exit_timeout_s = exit_timeout_s(pid)
        self._sign: _Sign = _Countdown(pid) if _is_tritonserver(pid) else _ClosedPorts(pid)
        self._since_s: float | None = None
        """Since when the sign is there."""
        self._noticed_s: float | None = None
        self._signals = _pipe_of_signals()

    def is_exiting(self) -> bool:
        """Look at the signs, which is cheap. The program's counts after _CONFIRM_S; once true, it stays true."""
        now = time.monotonic()
        if self._noticed_s is None and (self._was_told() or self._shows(now)):
            self._noticed_s = now
        return self._noticed_s is not None

    def close(self) -> None:
        """Give the signal back. Call this in the main thread, when nobody asks any more."""
        if self._signals is None:
            return
        _release_wakeup_fd(self._signals[1])
        # The stub's handler in C can't be put back from here; it ignored the signal too.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for descriptor in self._signals:
            os.close(descriptor)
        self._signals = None

    def _was_told(self) -> bool:
        if self._signals is None:
            return False
        try:
            return signal.SIGTERM in os.read(self._signals[0], 64)
        except BlockingIOError:
            return False

    def _shows(self, now: float) -> bool:
        shown = self._sign.shown(now)
        if shown is not None:
            self._since_s = (self._since_s or now) if shown else None
        return bool(shown) and self._since_s is not None and now - self._since_s >= _CONFIRM_S


class _Sign(Protocol):
    """A look at a program from outside that tells whether its Triton server waits for open requests, to exit then."""

    def shown(self, now: float) -> bool | None:
        """Return whether it looks so at this moment; None where this look says nothing."""


class _Countdown:
    """The sign of tritonserver: what its main thread waits for.

    Until a signal comes, it waits on a condition variable; after that it counts its exit timeout down in sleeps of a
    second, whichever phase it is in. /proc/PID/wchan tells the two apart. In each of 20 exits of 2.51.0 it changed
    within 0.1 s, with HTTP, gRPC, both or nothing in flight; it did not change while the same thread loaded another
    model (--model-control-mode=poll). The ports are no such sign: HTTP's closes when the last HTTP connection has gone,
    the others close at the very end, and gRPC takes requests as long as HTTP's port is open.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._waits_for_signal = False

    def shown(self, now: float) -> bool | None:
        """Return whether the thread sleeps. It does while loading as well, but has not taken over SIGTERM then."""
        waits_in = _read(PROC / str(self._pid) / "wchan")
        if not self._waits_for_signal:
            self._waits_for_signal = "futex" in waits_in and _catches_sigterm(self._pid)
            return False
        if "futex" in waits_in:
            return False
        return True if "nanosleep" in waits_in else None  # None: the thread is running at this moment


class _ClosedPorts:
    """The sign of another program with Triton inside, whose main thread may wait for anything: it no longer listens.

    Triton's OpenAI front end closes its port when it is told to exit, waits for its open requests, and then stops
    Triton. With --enable-kserve-frontends, the ports of these stay open until Triton stops.
    """

    def __init__(self, pid: int) -> None:
        self._process = PROC / str(pid)
        self._ports: dict[Path, str] = {}
        self._listens_since_s: float | None = None
        self._has_listened = False
        self._next_search_s = 0.0

    def shown(self, now: float) -> bool | None:
        if not any(_link(path) == socket for path, socket in self._ports.items()):
            if now < self._next_search_s:
                return None
            self._next_search_s = now + _FIND_S
            self._ports = _listening(self._process)
        if not self._ports:
            self._listens_since_s = None
            return self._has_listened
        self._listens_since_s = self._listens_since_s or now
        self._has_listened = self._has_listened or now - self._listens_since_s >= _SETTLED_S
        return False


def end_server(pid: int) -> NoReturn:
    """End the server with a non-zero exit code and then this process. It does not return, and `finalize` is not called.

    The server's other models end with it. Responses that were sent before arrive.
    """
    if pid != os.getppid() or pid != parent_server():
        raise ValueError(f"process {pid} is not the tritonserver of this one")
    regions = own_regions()
    logger.error("ending tritonserver, process %d", pid)
    time.sleep(_FLUSH_S)
    if pid == INIT:
        crash_init(regions)
    else:
        os.kill(pid, FATAL_SIGNAL)
    for region in regions:
        region.unlink(missing_ok=True)
    # The stub would leave by itself 1 to 2 s later, through the clean-up of an engine that may hang.
    os._exit(1)


def own_regions() -> list[Path]:
    """Return the files of the memory that this stub shares with its server: nobody removes them when both are killed.

    They are named on the stub's command line, at a position that may change, and they are mapped. The shared memory of
    NCCL and MPI is mapped too, but not named there.
    """
    mapped = {line.split(maxsplit=5)[-1] for line in _read(PROC / "self" / "maps").splitlines()}
    named = [SHARED_MEMORY / argument for argument in _arguments(os.getpid()) if argument and "/" not in argument]
    return [path for path in named if str(path) in mapped]


def crash_init(regions: Sequence[Path]) -> None:
    """End a server that is process 1 of its container, where the kernel delivers only signals that it handles.

    The server is told to exit, which alone would give exit code 0. When it unloads this model, it finds its shared
    memory gone: the kernel's own SIGBUS ends a process 1 too (exit code 135 after 0.4 to 1.4 s in each of 4 tries).
    """
    os.kill(INIT, signal.SIGTERM)
    for region in regions:
        os.truncate(region, 0)


def _pipe_of_signals() -> tuple[int, int] | None:
    """Make a pipe into which Python's C handler writes the number of each signal; None where there is one already.

    A handler in Python would not help: the stub's main thread stays in C++ until the next request comes.
    """
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    previous = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    if previous != -1:
        signal.set_wakeup_fd(previous)
        os.close(reading)
        os.close(writing)
        return None
    signal.signal(signal.SIGTERM, lambda signum, frame: None)
    # Without this, a forked child would write into the same pipe when it gets a SIGTERM.
    os.register_at_fork(after_in_child=lambda: _release_wakeup_fd(writing))
    return reading, writing


def _release_wakeup_fd(writing: int) -> None:
    ours = signal.set_wakeup_fd(-1)
    if ours != writing:
        signal.set_wakeup_fd(ours)


def _catches_sigterm(pid: int) -> bool:
    status = dict(line.split(":", 1) for line in _read(PROC / str(pid) / "status").splitlines() if ":" in line)
    return bool(int(status.get("SigCgt", "0"), 16) >> (signal.SIGTERM - 1) & 1)


def _is_tritonserver(pid: int) -> bool:
    """Whether the process runs Triton's own program. A link to it may have another name; its file can be unreadable."""
    return (_link(PROC / str(pid) / "exe").rpartition("/")[2] or _name(pid)) == _SERVER_NAME


def _listening(process: Path) -> dict[Path, str]:
    """Return the TCP sockets on which a process listens: the link in /proc of each, and what it says."""
    rows = [row.split() for name in ("tcp", "tcp6") for row in _read(process / "net" / name).splitlines()[1:]]
    sockets = {f"socket:[{row[_INODE]}]" for row in rows if row[_STATE] == _LISTENS}
    try:
        links = {path: _link(path) for path in (process / "fd").iterdir()}
    except OSError:  # the process has ended, or belongs to another user
        return {}
    return {path: link for path, link in links.items() if link in sockets}


def _name(pid: int) -> str:
    return _read(PROC / str(pid) / "comm").rstrip("\n")


def _arguments(pid: int) -> list[str]:
    return _read(PROC / str(pid) / "cmdline").split("\0")[1:]


def _read(path: Path) -> str:
    """Read a file; empty where it is not there, as after the end of a process, or may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


def _link(path: Path) -> str:
    """Read a link; empty where it is not there or may not be read."""
    try:
        return os.readlink(path)
    except OSError:
        return ""
