"""A client that closes its connection in the middle of an answer."""

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from support.waiting import PATIENCE_S


@contextmanager
def leaving(
    url: str, body: Mapping[str, Any], *, until: bytes, headers: Mapping[str, str] | None = None
) -> Iterator[None]:
    """POST `body` as JSON, and read until these bytes have come. The connection is closed at the end of the block."""
    data = json.dumps(body).encode()
    parts = urlsplit(url)
    every = {
        "Host": parts.netloc,
        "Content-Type": "application/json",
        "Content-Length": str(len(data)),
        **(headers or {}),
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in every.items())
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        connection.settimeout(PATIENCE_S)
        connection.sendall(f"POST {parts.path} HTTP/1.1\r\n{head}\r\n".encode() + data)
        received = b""
        while until not in received:
            more = connection.recv(65536)
            assert more, received
            received += more
        yield
