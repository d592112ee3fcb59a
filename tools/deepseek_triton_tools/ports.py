"""Which ports a server gets: given ones that are free, or free ones; and who holds a port that isn't."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from deepseek_triton_tools.errors import PortError

Port = int | Literal["auto"]

ENDPOINTS = ("http", "grpc", "metrics")


def choose_ports(host: str, http: Port, grpc: Port, metrics: Port) -> tuple[int, int, int]:
    """The ports of HTTP, gRPC and metrics, each free at this moment.

    :raises PortError: when a given one is not.
    """
    given = dict(zip(ENDPOINTS, (http, grpc, metrics), strict=True))
    numbers = [port for port in given.values() if port != "auto"]
    if len(set(numbers)) < len(numbers):
        raise PortError(f"HTTP, gRPC and metrics need a port each, got {', '.join(map(str, given.values()))}")
    chosen = {}
    with contextlib.ExitStack() as held:
        # The given ones first, and all are held until the last is chosen: `auto` must not pick any of them.
        for endpoint in sorted(ENDPOINTS, key=lambda endpoint: given[endpoint] == "auto"):
            listener = held.enter_context(_listener(host, endpoint, given[endpoint]))
            chosen[endpoint] = listener.getsockname()[1]
    return chosen["http"], chosen["grpc"], chosen["metrics"]


def reserve_ports(ports: Iterable[int]) -> contextlib.ExitStack:
    """Mark `ports` as this process's until the result is closed, or the process ends.

    tritonserver takes its ports only when the model has loaded, an hour later, and two of them can share one without a
    word: each would get half of the requests. The mark is the name of a socket in Linux's abstract namespace, which is
    the network's own and needs no clearing up.

    :raises PortError: when another process has one of them marked.
    """
    with contextlib.ExitStack() as marks:
        for port in ports:
            mark = marks.enter_context(socket.socket(socket.AF_UNIX))
            try:
                mark.bind(f"\0deepseek-triton/port/{port}")
            except OSError as error:
                raise PortError(
                    f"port {port} is spoken for: another deepseek-triton is loading a model to serve there; "
                    "end that, or choose another port or auto"
                ) from error
        return marks.pop_all()


def _listener(host: str, endpoint: str, port: Port) -> socket.socket:
    try:
        return socket.create_server((host, 0 if port == "auto" else port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE and port != "auto":
            holder = holder_of(port)
            by = f" by {holder}" if holder else ""
            message = f"port {port} for {endpoint} is taken{by}: end that, or give --{endpoint}-port another or auto"
        elif error.errno == errno.EACCES:
            message = f"port {port} for {endpoint} is for root alone: give --{endpoint}-port another, 1024 or higher"
        else:
            message = f"can't listen on {host!r} for {endpoint} ({error}): give --host an address of this machine"
        raise PortError(message) from error


def holder_of(port: int) -> str | None:
    """Which process listens on `port`, where /proc lets us see it."""
    sockets = {f"socket:[{inode}]" for inode in listening_inodes(port)}
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        # Another user's, or gone meanwhile.
        with contextlib.suppress(OSError):
            if os.readlink(descriptor) in sockets:
                name = (descriptor.parents[1] / "comm").read_text().strip()
                return f"process {descriptor.parents[1].name} ({name})"
    return None


def listening_inodes(port: int) -> Iterator[str]:
    """Columns of /proc/net/tcp, from proc(5): 1 is address:port in hex, 3 the state, 9 the inode."""
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for row in table.read_text().splitlines()[1:] if table.is_file() else []:
            columns = row.split()
            if columns[3] == "0A" and int(columns[1].rpartition(":")[2], 16) == port:
                yield columns[9]
