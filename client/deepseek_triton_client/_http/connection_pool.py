"""HTTP connections that wait for their next request."""

from __future__ import annotations

import threading
import time
from collections import deque

from deepseek_triton_client._http.http_connection import HttpConnection


class Pool:
    """Idle connections, the last one used first, so that the others can grow old. Threads may share the pool.

    Their number is not limited: the server says when requests are too many, and a pool that queues would hide it.
    """

    def __init__(self, keepalive_s: float) -> None:
        self._keepalive_s = keepalive_s
        # (moment when it was given back, connection), oldest first.
        self._idle: deque[tuple[float, HttpConnection]] = deque()
        self._lock = threading.Lock()
        self._closed = False

    def __len__(self) -> int:
        return len(self._idle)

    async def take(self) -> HttpConnection | None:
        """Return an idle connection, or None."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                since, connection = self._idle.pop()
            if self._is_fresh(since) and connection.is_idle:
                return connection
            await connection.close()

    async def give_back(self, connection: HttpConnection) -> None:
        """Keep the connection if it can serve another request. Closes connections that have waited too long."""
        to_close = []
        is_idle = connection.is_idle
        with self._lock:
            if is_idle and not self._closed:
                self._idle.append((time.monotonic(), connection))
            else:
                to_close.append(connection)
            while self._idle and not self._is_fresh(self._idle[0][0]):
                to_close.append(self._idle.popleft()[1])
        for each in to_close:
            await each.close()

    async def close(self) -> None:
        """Close all connections; none is kept from now on."""
        with self._lock:
            self._closed = True
            to_close = [connection for _, connection in self._idle]
            self._idle.clear()
        for each in to_close:
            await each.close()

    def _is_fresh(self, since: float) -> bool:
        return time.monotonic() - since < self._keepalive_s
