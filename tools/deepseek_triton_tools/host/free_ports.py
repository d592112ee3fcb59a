"""Which ports a server gets: given ones that are free, or free ones; and who holds a port that isn't."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deepseek_triton_tools.tool_errors import PortError

Port = int | Literal["auto"]

ENDPOINTS = ("http", "grpc", "metrics")

_FIRST_UNPRIVILEGED = 1024
_CHOICE = 16384
"""So many ports `auto` chooses from: with Linux's defaults from 16384 to 32767."""
_TRIES = 32


@dataclass(frozen=True)
class Claim:
    """Ports that no other server of ours takes until `close`, or the end of this process.

    tritonserver takes its ports only when the model has loaded, an hour later, and two of them can share one without a
    word: each would get half of the requests. So each port has a mark, the name of a socket in Linux's abstract
    namespace, which is the network's own and needs no clearing up.
    """

    http: int
    grpc: int
    metrics: int
    marks: contextlib.ExitStack

    def close(self) -> None:
        self.marks.close()


def claim_ports(host: str, http: Port, grpc: Port, metrics: Port) -> Claim:
    """The ports of HTTP, gRPC and metrics, each free at this moment and marked.

    :raises PortError: when a given one is taken, or marked by another process.
    """
    given = dict(zip(ENDPOINTS, (http, grpc, metrics), strict=True))
    numbers = [port for port in given.values() if port != "auto"]
    if len(set(numbers)) < len(numbers):
        raise PortError(f"HTTP, gRPC and metrics need a port each, got {', '.join(map(str, given.values()))}")
    with contextlib.ExitStack() as held, contextlib.ExitStack() as marks:
        # The given ones first, and all are held until the last is chosen: `auto` must not pick any of them.
        first = sorted(ENDPOINTS, key=lambda endpoint: given[endpoint] == "auto")
        chosen = {endpoint: _claim(host, endpoint, given[endpoint], held, marks) for endpoint in first}
        return Claim(**chosen, marks=marks.pop_all())


def _claim(host: str, endpoint: str, port: Port, held: contextlib.ExitStack, marks: contextlib.ExitStack) -> int:
    while True:
        listener = _listener(host, endpoint, port) if port != "auto" else _automatic(host, endpoint)
        number: int = held.enter_context(listener).getsockname()[1]
        mark = socket.socket(socket.AF_UNIX)
        try:
            mark.bind(f"\0deepseek-triton/port/{number}")
        except OSError as error:
            mark.close()
            if error.errno != errno.EADDRINUSE:
                raise PortError(f"port {number} can't be marked as ours: {error.strerror}") from error
            if port == "auto":
                continue  # this one is held, so the next is another
            raise PortError(
                f"port {number} is spoken for: another deepseek-triton is loading a model to serve there; "
                "end that, or choose another port or auto"
            ) from error
        marks.enter_context(mark)
        return number


def _automatic(host: str, endpoint: str) -> socket.socket:
    """Below the ports that outgoing connections get, for one of those could be gone when the model has loaded."""
    low = _first_of_outgoing()
    below = range(max(_FIRST_UNPRIVILEGED, low - _CHOICE), low)
    for port in random.sample(below, min(_TRIES, len(below))):
        with contextlib.suppress(OSError):
            return socket.create_server((host, port))
    return _listener(host, endpoint, 0)


def _first_of_outgoing() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return _FIRST_UNPRIVILEGED


def _listener(host: str, endpoint: str, port: int) -> socket.socket:
    """:param port: 0 for any."""
    try:
        return socket.create_server((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE and port:
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
