"""The command of `--then`, run after a warm-up: in place of this process, or beside it during a hold."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from deepseek_triton_tools.host.stop_signals import Stop
from deepseek_triton_tools.tool_errors import ToolError

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
            self._process = subprocess.Popen(command)
        except OSError as error:
            raise _cannot_run(command, error) from error
        stop.forward = self._forward
        threading.Thread(target=self._wait, args=(self._process, stop), name="then", daemon=True).start()

    def exit_code(self) -> int:
        """Wait for the command, and return its exit code as a shell would; 0 without a command."""
        if self._process is None:
            return 0
        code = self._process.wait()
        return 128 - code if code < 0 else code

    @staticmethod
    def _wait(process: subprocess.Popen[bytes], stop: Stop) -> None:
        process.wait()
        stop.event.set()

    def _forward(self, signum: int) -> None:
        # The terminal sends Ctrl-C to the whole foreground group, so the command has it already. A second SIGINT might
        # mean something else to it.
        if self._process is not None and not (signum == signal.SIGINT and _is_in_foreground()):
            self._process.send_signal(signum)


def _is_in_foreground() -> bool:
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:  # there is no terminal
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _cannot_run(command: Sequence[str], error: OSError) -> ToolError:
    code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
    return ToolError(f"--then: {command[0]} can't be run: {error.strerror}", exit_code=code)
