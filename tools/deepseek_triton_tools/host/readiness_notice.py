"""Telling others that something is ready: by a file for probes, and by the socket of sd_notify(3)."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepseek_triton_tools.tool_errors import ToolError


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
        new = self._path.with_name(f"{self._path.name}.{secrets.token_hex(4)}")
        try:
            new.write_text(json.dumps(facts, allow_nan=False) + "\n", "utf-8")
            os.replace(new, self._path)
        except OSError as error:
            with contextlib.suppress(OSError):  # it may never have been created
                new.unlink()
            raise ToolError(f"--ready-file {self._path}: can't be written: {error.strerror}") from error

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
