"""HTTP connections that wait for the next request."""

from __future__ import annotations

import threading
import time
from collections import deque

from deepseek_triton_client._http.http_connection import HttpConnection


class Pool:
    """Idle connections, the last one used first, so that the others can grow old. Of any number: the server decides
    how many requests are too many, and says so; a pool that queues would hide it. Threads may share it."""

    def __init__(self, keepalive_s: float) -> None:
        self._keepalive_s = keepalive_s
        self._idle: deque[tuple[float, HttpConnection]] = deque()  # oldest first, with when each was given back
        self._lock = threading.Lock()
        self._closed = False

    def __len__(self) -> int:
        return len(self._idle)

    async def take(self) -> HttpConnection | None:
        """One to send a request on, if there is one."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                since, connection = self._idle.pop()
            if self._is_fresh(since) and connection.is_idle:
                return connection
            await connection.close()

    async def give_back(self, connection: HttpConnection) -> None:
        """Keeps it if it can serve again. Closes those that have waited for too long."""
        leaving = []
        is_idle = connection.is_idle
        with self._lock:
            if is_idle and not self._closed:
                self._idle.append((time.monotonic(), connection))
            else:
                leaving.append(connection)
            while self._idle and not self._is_fresh(self._idle[0][0]):
                leaving.append(self._idle.popleft()[1])
        for each in leaving:
            await each.close()

    async def close(self) -> None:
        """From now on nothing is kept."""
        with self._lock:
            self._closed = True
            leaving = [connection for _, connection in self._idle]
            self._idle.clear()
        for each in leaving:
            await each.close()

    def _is_fresh(self, since: float) -> bool:
        return time.monotonic() - since < self._keepalive_s
