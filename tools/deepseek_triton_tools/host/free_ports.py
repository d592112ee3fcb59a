"""Claiming ports for a server, given ones or free ones; and finding the process that holds a port."""

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
"""Number of ports that `auto` chooses from. With Linux's defaults they are 16384 to 32767."""
_TRIES = 32


@dataclass(frozen=True)
class Claim:
    """Ports that no other server of ours takes until `close`, or until this process ends.

    tritonserver opens its ports only when the model has loaded, perhaps an hour later. Two servers can then share a
    port without any error, and each would get half of the requests. So each port is reserved by binding a Unix socket
    to a name in Linux's abstract namespace. Each network namespace has names of its own, and they vanish with the
    process.
    """

    http: int
    grpc: int
    metrics: int
    reservations: contextlib.ExitStack

    def close(self) -> None:
        self.reservations.close()


def claim_ports(host: str, http: Port, grpc: Port, metrics: Port) -> Claim:
    """Claim a port each for HTTP, gRPC and metrics. All are free at this moment.

    :raises PortError: when a given port is taken, or reserved by another process.
    """
    given = dict(zip(ENDPOINTS, (http, grpc, metrics), strict=True))
    numbers = [port for port in given.values() if port != "auto"]
    if len(set(numbers)) < len(numbers):
        raise PortError(f"HTTP, gRPC and metrics need a port each, got {', '.join(map(str, given.values()))}")
    with contextlib.ExitStack() as listeners, contextlib.ExitStack() as reservations:
        # The given ports come first, and all listeners stay open until the last port is chosen, so that `auto` picks
        # none of them.
        first = sorted(ENDPOINTS, key=lambda endpoint: given[endpoint] == "auto")
        chosen = {endpoint: _claim(host, endpoint, given[endpoint], listeners, reservations) for endpoint in first}
        return Claim(**chosen, reservations=reservations.pop_all())


def _claim(
    host: str, endpoint: str, port: Port, listeners: contextlib.ExitStack, reservations: contextlib.ExitStack
) -> int:
    while True:
        listener = _listener(host, endpoint, port) if port != "auto" else _automatic(host, endpoint)
        number: int = listeners.enter_context(listener).getsockname()[1]
        reservation = socket.socket(socket.AF_UNIX)
        try:
            reservation.bind(f"\0deepseek-triton/port/{number}")
        except OSError as error:
            reservation.close()
            if error.errno != errno.EADDRINUSE:
                raise PortError(f"port {number} can't be reserved: {error.strerror}") from error
            if port == "auto":
                continue  # its listener stays open, so the next choice is another port
            raise PortError(
                f"port {number} is spoken for: another deepseek-triton is loading a model to serve there; "
                "end that, or choose another port or auto"
            ) from error
        reservations.enter_context(reservation)
        return number


def _automatic(host: str, endpoint: str) -> socket.socket:
    """A listener on a random free port below those of outgoing connections. A port of those could be taken by a
    connection before the model has loaded."""
    try:
        low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        low = _FIRST_UNPRIVILEGED
    below = range(max(_FIRST_UNPRIVILEGED, low - _CHOICE), low)
    for port in random.sample(below, min(_TRIES, len(below))):
        with contextlib.suppress(OSError):
            return socket.create_server((host, port))
    return _listener(host, endpoint, 0)


def _listener(host: str, endpoint: str, port: int) -> socket.socket:
    """Listen on the port; 0: on any.

    :raises PortError: when the port can't be listened on.
    """
    try:
        return socket.create_server((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE and port:
            holder = holder_of(port)
            by = f" by {holder}" if holder else ""
            message = f"port {port} for {endpoint} is taken{by}: end that, or give --{endpoint}-port another or auto"
        elif error.errno == errno.EACCES:
            message = f"port {port} for {endpoint} is for root only: give --{endpoint}-port another, 1024 or higher"
        else:
            message = f"can't listen on {host!r} for {endpoint} ({error}): give --host an address of this machine"
        raise PortError(message) from error


def holder_of(port: int) -> str | None:
    """The process that listens on `port`; None where nothing does or /proc does not show it to this user."""
    sockets = {f"socket:[{inode}]" for inode in listening_inodes(port)}
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        # The process belongs to another user, or has ended meanwhile.
        with contextlib.suppress(OSError):
            if os.readlink(descriptor) in sockets:
                name = (descriptor.parents[1] / "comm").read_text().strip()
                return f"process {descriptor.parents[1].name} ({name})"
    return None


def listening_inodes(port: int) -> Iterator[str]:
    """The inodes of sockets that listen on `port`, by /proc/net/tcp.

    Its columns (proc(5)): 1 is address:port in hexadecimal, 3 is the state, 9 is the inode.
    """
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for row in table.read_text().splitlines()[1:] if table.is_file() else []:
            columns = row.split()
            if columns[3] == "0A" and int(columns[1].rpartition(":")[2], 16) == port:
                yield columns[9]
