"""Each long-running verb needs an orderly stop, a way to tell that it is ready, and a command that follows it."""

import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from deepseek_triton_tools.host.whole_file import whole_file
from deepseek_triton_tools.tool_errors import ToolError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """A context in which a signal sets `event`, or goes where `pass_on` said. Without that, a second signal ends the
    process. Enter it in the main thread.
    """

    def __init__(self) -> None:
        self.event = threading.Event()
        self._forward: Callable[[int], object] | None = None
        self._lock = threading.Lock()
        self._first: int | None = None
        self._handled = 0

    @property
    def exit_code(self) -> int:
        """The exit code after the first signal, as in a shell: 130 or 143."""
        return 128 + (self._first or signal.SIGINT)

    def __enter__(self) -> "Stop":
        # A shell lets its background jobs ignore SIGINT; a signal that was ignored stays ignored.
        self._before = {n: signal.getsignal(n) for n in _SIGNALS if signal.getsignal(n) != signal.SIG_IGN}
        # Python runs a handler only when the main thread gets to it, which takes as long as a wait that it has just
        # begun. The interpreter writes the signal's number to this socket at once, and another thread reads it.
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._act, name="stop", daemon=True).start()
        for signum in self._before:
            signal.signal(signum, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._writer.close()  # ends the thread, which closes the other one

    def pass_on(self, forward: Callable[[int], object] | None) -> None:
        """Have signals passed to `forward` from now on, beginning with one that has set `event`."""
        with self._lock:
            self._forward = forward
            missed = self._first if self.event.is_set() else None
        if forward is not None and missed is not None:
            forward(missed)

    def _take(self, signum: int, _: FrameType | None) -> None:
        self._handled += 1
        if self._handled > 1 and self._forward is None:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    def _act(self) -> None:
        with self._reader:
            while number := self._reader.recv(1):
                signum = number[0]
                if signum not in self._before:
                    continue
                # Under the lock, a signal is either in `event` when `pass_on` looks, or goes to `forward`.
                with self._lock:
                    self._first = self._first or signum
                    forward = self._forward
                    if forward is None:
                        self.event.set()
                if forward is not None:
                    forward(signum)


class ReadyFile:
    """A file that exists while something is ready. Without a path, nothing happens.

    A file of an earlier run is removed at once.

    :raises ToolError: when that file can't be removed, or the folder can't be written to; exit code 2.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        if path is None:
            return
        folder = path.absolute().parent
        if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
            raise ToolError(f"--ready-file {path}: expected a folder that can be written to, {folder}", exit_code=2)
        if os.path.isdir(path):
            raise ToolError(f"--ready-file {path}: can't be removed: it is a folder", exit_code=2)
        self.remove()

    def write(self, facts: Mapping[str, Any]) -> None:
        """Write one line of JSON. The file appears with its whole content, never with a part of it.

        :raises ToolError: when the file can't be written.
        """
        if self._path is None:
            return
        try:
            with whole_file(self._path) as file:
                file.write(json.dumps(facts, allow_nan=False) + "\n")
        except ToolError as error:
            raise ToolError(f"--ready-file {error}") from error

    def remove(self) -> None:
        if self._path is None:
            return
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            raise ToolError(f"--ready-file {self._path}: can't be removed: {error.strerror}") from error


def notify(**fields: str) -> None:
    """Send READY="1", STATUS="..." and the like to the service manager that started this process, if one did.

    Errors are ignored, because the work goes on whether or not the service manager listens.
    """
    address = os.environ.get("NOTIFY_SOCKET")
    if not address or address[0] not in "/@":  # other address families are for virtual machines
        return
    message = "\n".join(f"{name}={value}" for name, value in fields.items())
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(message.encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)


NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""The exit codes that shells use."""


def find_command(command: Sequence[str]) -> None:
    """Check that the command can be run, before an hour goes into the warm-up.

    :raises ToolError: when it does not exist (exit code 127) or can't be executed (126).
    """
    name = command[0]
    if shutil.which(name) is not None:
        return
    places = [name] if os.path.dirname(name) else [os.path.join(folder, name) for folder in os.get_exec_path()]
    code = errno.EACCES if name and any(map(os.path.exists, places)) else errno.ENOENT
    raise _cannot_run(command, OSError(code, os.strerror(code)))


def run_instead(command: Sequence[str]) -> NoReturn:
    """Replace this process by the command.

    :raises ToolError: when it can't be run; exit code 127 or 126.
    """
    sys.stdout.flush()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and exec keeps an ignored signal ignored
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        raise _cannot_run(command, error) from error


class CommandBeside:
    """The command, running beside this process. When it ends, `stop.event` is set. An empty command runs nothing.

    :raises ToolError: when it can't be run; exit code 127 or 126.
    """

    def __init__(self, command: Sequence[str], stop: Stop) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if not command:
            return
        try:
            self._process = process = subprocess.Popen(command)
        except OSError as error:
            raise _cannot_run(command, error) from error

        def forward(signum: int) -> None:
            # The terminal sends Ctrl-C to the whole foreground group, so the command has it already. A second SIGINT
            # might mean something else to it.
            if signum != signal.SIGINT or not _is_in_foreground():
                process.send_signal(signum)

        def wait() -> None:
            process.wait()
            stop.event.set()

        # The command may have begun, and a signal may have come, before this line is reached.
        stop.pass_on(forward)
        threading.Thread(target=wait, name="then", daemon=True).start()

    def exit_code(self) -> int:
        """Wait for the command, and return its exit code as a shell would; 0 without a command."""
        if self._process is None:
            return 0
        code = self._process.wait()
        return 128 - code if code < 0 else code


def _is_in_foreground() -> bool:
    with contextlib.suppress(OSError), open(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY), "rb") as terminal:
        return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    return False


def _cannot_run(command: Sequence[str], error: OSError) -> ToolError:
    code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
    return ToolError(f"--then: {command[0]} can't be run: {error.strerror}", exit_code=code)
