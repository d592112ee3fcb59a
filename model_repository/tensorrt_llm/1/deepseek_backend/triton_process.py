"""The Triton server above this process: when it is told to exit, how to end it, and the guard that does so for both.

It is the program tritonserver, or another program that has Triton inside it, such as Triton's OpenAI front end.

Triton runs the backend in a child process, the stub, and does not tell it of a SIGTERM: `finalize` comes only when no
request is open any more. A stream that is still being written when the exit timeout ends crashes the server (2.51.0,
exit code 139). To end open requests in time, the stub has to notice the exit itself, from what the kernel shows of its
parent.
"""

import contextlib
import logging
import os
import re
import select
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

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
# Most characters of a process's name: the kernel cuts it there.
_NAME_LENGTH = 15
# Triton itself, as a process that has it inside maps it. The nvidia-pytriton wheel puts a hash into the name.
_LIBRARY = re.compile(r"/libtritonserver[^/\n]*\.so")
_OPTION = "--exit-timeout-secs"
# Least length of the option's name. getopt takes every unique beginning; a shorter one could be --exit-on-error.
_OPTION_MIN = len("--exit-t")
_CONFIRM_S = 0.5
"""Seconds for which a sign of an exit has to last before it counts."""
_SETTLED_S = 2.0
"""Seconds for which a program has to have listened before it counts that it no longer does."""
# Seconds between two searches for the ports of a program, which reads a link for each file that it has open.
_FIND_S = 1.0
# Seconds between the last `send` and the end of the server, whose threads write to the clients after `send` has
# returned. With no time in between 2 of 17 tries cut a client off, with this none of 18.
_FLUSH_S = 0.5
INIT = 1
"""The pid of a server that is process 1 of its container."""


def parent_server() -> int | None:
    """Return the pid of the process with the Triton server that started this stub; None where there is none.

    A process has the server inside when it maps libtritonserver, whatever its name. The name counts too: what a process
    maps can't be read where it has capabilities of its file.
    """
    pid = os.getppid()
    if _name(os.getpid()) != _STUB_NAME[:_NAME_LENGTH]:
        return None  # no stub: this code was imported by a program of its own, such as a test
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
        # A link to Triton's own program may have another name, and its file can be unreadable.
        program = _link(PROC / str(pid) / "exe").rpartition("/")[2] or _name(pid)
        self._sign = _Countdown(pid) if program == _SERVER_NAME else _ClosedPorts(pid)
        self._since_s: float | None = None
        """Since when the sign is there."""
        self._is_noticed = False
        self._signals = _pipe_of_signals()

    def is_exiting(self) -> bool:
        """Look at the signs, which is cheap. The program's counts after _CONFIRM_S; once true, it stays true."""
        now = time.monotonic()
        if self._is_noticed:
            return True
        if self._signals is not None:
            with contextlib.suppress(BlockingIOError):
                self._is_noticed = signal.SIGTERM in os.read(self._signals[0], 64)
        shown = self._sign.shown(now)
        if shown is not None:
            self._since_s = (self._since_s or now) if shown else None
        self._is_noticed |= bool(shown) and self._since_s is not None and now - self._since_s >= _CONFIRM_S
        return self._is_noticed

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
            status = _read(PROC / str(self._pid) / "status")
            caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
            self._waits_for_signal = "futex" in waits_in and bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)
            return False
        if "futex" in waits_in:
            return False
        return True if "nanosleep" in waits_in else None  # None: the thread runs now, so that this look says nothing


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
    if (ours := signal.set_wakeup_fd(-1)) != writing:
        signal.set_wakeup_fd(ours)


def _listening(process: Path) -> dict[Path, str]:
    """Return the TCP sockets on which a process listens: the link in /proc of each, and what it says."""
    rows = [row.split() for name in ("tcp", "tcp6") for row in _read(process / "net" / name).splitlines()[1:]]
    sockets = {f"socket:[{row[_INODE]}]" for row in rows if row[_STATE] == _LISTENS}
    try:
        links = {path: _link(path) for path in (process / "fd").iterdir()}
    except OSError:
        # The process has ended, or belongs to another user.
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


NAME = "model_guard"
"""Name of the guard in ps; without it the fork would have the stub's name."""
_ARM, _DISARM = b"a", b"d"
_STUB_LEAVES_S = 10.0
"""Seconds given to a stub whose server has gone: it leaves by itself in 1 to 2 s."""
_SERVER_ENDS_S = 5.0
"""Seconds to wait for the end of a server that has been killed."""
_LOOK_S, _STOPPED_LOOKS = 5.0, 12
"""Seconds between two looks at the stub, and how many in a row have to find it stopped. They are counted, because a
paused machine looks at nothing. A debugger's stop (state t) doesn't count, nor one that the server shares."""


class ProcessGuard:
    """The stub's side of the guard, a process that ends tritonserver or this stub when the other one has died.

    When the stub dies (out of memory, a crash in native code), tritonserver goes on: it reports ready, its metrics
    stand still, and open requests wait for ever (triton-inference-server/server#8604). When tritonserver dies, a stub
    with a thread that hangs in native code stays, and keeps its GPU memory. The guard ends the process that is left.
    A stub that stays stopped, to which Triton refuses all requests, it ends first. After the stub it also ends the
    process group with the stub's number: an engine puts processes there that would outlive it, as vLLM's engine core
    does (vllm-project/vllm#55510).

    It is forked before the engine is loaded, so that it holds none of the engine's memory, threads or devices. It
    leaves when the stub does. It is in a process group of its own, so that it is left when the server's is killed.
    """

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
        armed, stopped_looks, watched = False, 0, [commands, server, stub]
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
            is_stopped = armed and _is_stopped(stub_pid) and not _is_stopped(server_pid)
            stopped_looks = stopped_looks + 1 if is_stopped else 0
            if stopped_looks == _STOPPED_LOOKS:
                _say("the model's process stays stopped (state T): ending it")
                signal.pidfd_send_signal(stub, signal.SIGKILL)
            _readable(watched, _LOOK_S if armed else None)
        if _ended(stub):
            _end_group(stub_pid)
        if armed and not _ended(server):
            _say("the engine is dead: the model's process has died; ending tritonserver")
            if server_pid == INIT:
                crash_init(regions)
                if not _ended(server, _SERVER_ENDS_S):
                    # The web server of Triton's OpenAI front end waits for open requests, which nobody answers, until a
                    # SIGINT.
                    signal.pidfd_send_signal(server, signal.SIGINT)
            else:
                signal.pidfd_send_signal(server, signal.SIGKILL)
            _ended(server, _SERVER_ENDS_S)
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


def _is_stopped(pid: int) -> bool:
    return _read(PROC / str(pid) / "stat").rpartition(")")[2].split()[:1] == ["T"]


def _end_group(number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(number, signal.SIGKILL)


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
