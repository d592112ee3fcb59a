"""What a service manager is told: readiness by a file for probes, and by the socket of sd_notify(3)."""

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
    """A file that is there while something is ready. Without a path, nothing happens.

    One of an earlier run is removed at once.

    :raises ToolError: when it can't be removed, or could not be written later; exit code 2.
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
        """One JSON line; whoever sees the file sees all of it.

        :raises ToolError: when it can't be written.
        """
        if self._path is None:
            return
        new = self._path.with_name(f"{self._path.name}.{secrets.token_hex(4)}")
        try:
            new.write_text(json.dumps(facts, allow_nan=False) + "\n", "utf-8")
            os.replace(new, self._path)
        except OSError as error:
            with contextlib.suppress(OSError):  # it may never have been made
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
    """Tell the service manager that started this process, if one did: READY="1", STATUS="...".

    One that does not listen is no trouble of ours.
    """
    address = os.environ.get("NOTIFY_SOCKET")
    if not address or address[0] not in "/@":  # other address families are for virtual machines
        return
    message = "\n".join(f"{name}={value}" for name, value in fields.items())
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(message.encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)
