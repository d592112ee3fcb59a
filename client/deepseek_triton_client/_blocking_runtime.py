"""The runtime of the blocking client: sleep, events, sockets and time limits that block a thread.

A blocked socket read and a gRPC stream do not accept a time limit that changes from token to token, but both can be
interrupted: one thread watches the limits of all requests.
"""

import _thread
import math
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from deepseek_triton_client._core.client_settings import Endpoint, Settings
from deepseek_triton_client._core.interfaces import NO_WATCHDOG, Deadlines, Due, LimitWatchdog, Transport, Watchdog

if TYPE_CHECKING:
    import ssl

T = TypeVar("T")

_READ_BYTES = 2**16


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that blocks where others would wait for an event loop, and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    coroutine.close()
    raise RuntimeError("expected a coroutine that blocks, and it waited for an event loop")


class BlockingRuntime:
    """See `Runtime`."""

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def event(self) -> "_BlockingEvent":
        return _BlockingEvent()

    def watchdog(self, deadlines: Deadlines, interrupt: Callable[[], None]) -> Watchdog:
        return ThreadWatchdog(deadlines, interrupt) if deadlines.any else NO_WATCHDOG

    def transport(self, endpoint: Endpoint, settings: Settings) -> Transport:
        if endpoint.is_grpc:
            from deepseek_triton_client._grpc.grpc_transport import GrpcTransport  # needs the extra grpc

            return GrpcTransport(endpoint, settings, self.transport, is_asyncio=False)
        from deepseek_triton_client._http.openai_transport import http_transport

        return http_transport(endpoint, settings, BlockingSocket)


class _BlockingEvent:
    """See `RuntimeEvent`. threading.Event is written in Python: an exception such as KeyboardInterrupt that lands
    inside it can leave its lock held for ever."""

    def __init__(self) -> None:
        self._is_set = False
        # One lock for each waiting thread, which waits by acquiring its lock a second time.
        self._waiting_locks: list[threading.Lock] = []

    def set(self) -> None:
        self._is_set = True
        with suppress(IndexError):  # none is left; checked before, another thread could take the last one
            while True:
                self._waiting_locks.pop().release()

    async def wait(self, timeout_s: float | None) -> bool:
        lock = threading.Lock()
        lock.acquire()
        self._waiting_locks.append(lock)
        if not self._is_set:  # checked once `set` can see the lock
            lock.acquire(timeout=-1 if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))
        return self._is_set


class BlockingSocket:
    """See `Socket`. With `tls` None it is plain TCP."""

    def __init__(self, host: str, port: int, tls: "ssl.SSLContext | None") -> None:
        self._address = host, port
        self._tls = tls
        self._socket: socket.socket | None = None
        self._arrived = select.poll()
        self._timeout_s: float | None = None
        self._interrupted = False

    async def connect(self, timeout_s: float | None) -> None:
        self._use(socket.create_connection(self._address, timeout_s))
        sock = self._connected
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self._tls is not None:
                # The handshake comes after `_use`, so that `interrupt` can reach the socket that it waits on.
                host, _ = self._address
                secured = self._tls.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
                self._use(secured)
                secured.do_handshake()
        except BaseException:
            self._connected.close()
            raise
        self._timeout_s = timeout_s
        self._arrived.register(self._connected, select.POLLIN)

    async def write(self, data: bytes, timeout_s: float | None) -> None:
        self._limit(timeout_s)
        # The server may have hung up after it had answered: `read` returns the answer, or fails too.
        with suppress(ConnectionError):
            self._connected.sendall(data)

    async def read(self, timeout_s: float | None) -> bytes:
        self._limit(timeout_s)
        return self._connected.recv(_READ_BYTES)

    @property
    def is_quiet(self) -> bool:
        sock = self._connected
        return not self._interrupted and sock.fileno() >= 0 and not self._arrived.poll(0)

    def interrupt(self) -> None:
        self._interrupted = True
        if self._socket is not None:
            # Closing a socket does not wake a thread that reads from it, but shutting it down does. TLS sockets use
            # the method of plain ones: after their own, the reading thread would take ciphertext for plain text.
            with suppress(OSError):  # already disconnected: what waited has ended by itself
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    async def close(self) -> None:
        self.interrupt()  # closing alone would not wake another thread that reads
        if self._socket is not None:
            self._socket.close()

    @property
    def _connected(self) -> socket.socket:
        assert self._socket is not None, "connect comes first"
        return self._socket

    def _use(self, sock: socket.socket) -> None:
        self._socket = sock
        # Checked once `interrupt` can see the socket: either it has shut the socket down, or its flag is seen here.
        if self._interrupted:
            sock.close()
            raise ConnectionAbortedError("interrupted")

    def _limit(self, timeout_s: float | None) -> None:
        if timeout_s != self._timeout_s:  # each change is a system call
            self._connected.settimeout(timeout_s)
            self._timeout_s = timeout_s


class ThreadWatchdog(LimitWatchdog):
    """Calls `interrupt` once when a limit runs out. The call comes from the thread of `_WatchdogThread`.

    `expect`, `relax` and `stop` are called by the reading thread. An exception such as KeyboardInterrupt may land in
    any of them: `stop` can be called again then, and nothing remains of a watchdog that is no longer referenced.
    """

    def __init__(self, deadlines: Deadlines, interrupt: Callable[[], None]) -> None:
        super().__init__(deadlines, interrupt)
        self._due = self._first
        self._stopped = False
        # Reentrant, because a signal handler may call `stop` while its thread is in `stop`.
        self._lock = threading.RLock()
        self._ref: weakref.ref[ThreadWatchdog] | None = None

    def stop(self) -> None:
        with self._lock:  # waits for an interrupt that is being made
            self._stopped = True
        if self._ref is not None:
            _watchdog_thread.watched.discard(self._ref)

    def _set(self, due: Due) -> None:
        self._due = due
        if self._stopped or self.expired is not None:
            return
        if self._ref is None:
            # A bound method of C: Python swallows exceptions that are raised in such a callback, KeyboardInterrupt too.
            self._ref = weakref.ref(self, _watchdog_thread.watched.discard)
        _watchdog_thread.watch(self._ref, due[0])

    def check(self) -> float:
        """Interrupt if a limit has run out. Called by the watchdog thread; returns the moment of the next check."""
        with self._lock:
            if self._stopped or self.expired is not None:
                return math.inf
            moment, limit = self._due
            if moment > time.monotonic():
                return moment
            self.expired = limit
            self._interrupt()
            return math.inf


class _WatchdogThread:
    """The one thread of the process that checks the limits of all blocking requests.

    A thread for each request would take longer to start than all else here. Every lock is one of C, acquired by `with`
    or held for ever, and the thread is started by one call of C: an exception such as KeyboardInterrupt lands between
    two steps of Python code, and threading's Condition, Event and Thread are written in Python.
    """

    def __init__(self) -> None:
        # Weak, so that a stream that is dropped ends its request.
        self.watched: set[weakref.ref[ThreadWatchdog]] = set()
        self._wakes_at = math.inf
        self._wake_up = threading.Lock()
        self._wake_up.acquire()
        self._running_lock = threading.Lock()

    def watch(self, watchdog: weakref.ref[ThreadWatchdog], moment: float) -> None:
        """Check this watchdog at `moment`, which may differ from the moment given before."""
        self.watched.add(watchdog)
        if moment < self._wakes_at:  # the thread finds a later moment by itself, so most tokens do not wake it
            with suppress(RuntimeError):  # it has been woken already
                self._wake_up.release()
        if not self._running_lock.locked():
            _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        if self._running_lock.acquire(blocking=False):  # two threads may each have started one
            try:
                while True:
                    self._wakes_at = moment = self._check_all()
                    left_s = moment - time.monotonic()
                    self._wake_up.acquire(timeout=min(max(left_s, 0.0), threading.TIMEOUT_MAX))
            finally:
                self._running_lock.release()

    def _check_all(self) -> float:
        """Check all watchdogs. Returns the moment when the next limit can run out."""
        self._wakes_at = math.inf  # a watchdog that is added meanwhile wakes the thread
        moments = [watchdog.check() for ref in list(self.watched) if (watchdog := ref()) is not None]
        return min(moments, default=math.inf)


_watchdog_thread = _WatchdogThread()


def _after_fork() -> None:
    """Start afresh in a forked child: it has no copy of the thread, and may have a copy of a held lock."""
    global _watchdog_thread
    _watchdog_thread = _WatchdogThread()


os.register_at_fork(after_in_child=_after_fork)
