"""Checks that ports are free, names the process that holds one, and reserves ports during an hour's load."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from deepseek_launcher.launcher_errors import UsageError


def check_free(host: str, ports: Mapping[str, int]) -> None:
    """Refuse ports that can't be listened on.

    :raises UsageError: with every such port, and the process that holds it.
    """
    problems = [problem for name, port in ports.items() if (problem := _problem(host, name, port))]
    if len(set(ports.values())) < len(ports):
        problems.append(f"HTTP, gRPC and metrics need a port each, got {', '.join(map(str, ports.values()))}")
    if problems:
        raise UsageError("; ".join(problems))


def reserve(ports: Mapping[str, int]) -> contextlib.ExitStack:
    """Reserve the ports for this process until the result is closed or the process ends.

    tritonserver opens its ports only when the model has loaded. Two servers can then share a port without an error, and
    each gets half of the requests. A reservation is the name of a socket in Linux's abstract namespace, the same name
    that `deepseek-triton serve` takes.

    :raises UsageError: when another process has reserved one of them.
    """
    with contextlib.ExitStack() as reservations:
        for port in ports.values():
            reservation = reservations.enter_context(socket.socket(socket.AF_UNIX))
            try:
                reservation.bind(f"\0deepseek-triton/port/{port}")
            except OSError as error:
                raise UsageError(
                    f"port {port} is reserved: another launch is loading a model to serve there; "
                    "end that (supervise.py list shows it), or choose another port"
                ) from error
        return reservations.pop_all()


def _problem(host: str, name: str, port: int) -> str | None:
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            holder = _holder(port)
            return f"port {port} for {name} is taken{f' by {holder}' if holder else ''}: end that, or choose another"
        if error.errno == errno.EACCES:
            return f"port {port} for {name} is for root alone: choose one from 1024 on"
        return f"can't listen on {host}:{port} for {name}: {error.strerror or error}: give an address of this machine"
    return None


def _holder(port: int) -> str | None:
    """Return the process that listens on `port`; None where /proc does not show it."""
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        # It belongs to another user, or has gone meanwhile.
        with contextlib.suppress(OSError):
            if os.readlink(descriptor) in sockets:
                name = (descriptor.parents[1] / "comm").read_text(encoding="utf-8", errors="replace").strip()
                return f"process {descriptor.parents[1].name} ({name})"
    return None


def _listening_inodes(port: int) -> Iterator[str]:
    """Yield the inodes of the sockets that listen on `port`.

    Columns of /proc/net/tcp, from proc(5): 1 is address:port in hex, 3 the state, 9 the inode.
    """
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for row in table.read_text(encoding="ascii").splitlines()[1:] if table.is_file() else []:
            columns = row.split()
            if columns[3] == "0A" and int(columns[1].rpartition(":")[2], 16) == port:
                yield columns[9]
