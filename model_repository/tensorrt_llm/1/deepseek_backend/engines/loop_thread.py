"""A thread that runs an asyncio event loop, and the calls into it from other threads."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 20.0
"""Seconds that `stop` waits for a thread that may be stuck in the engine."""


class LoopThread:
    """The thread and its loop. Every call that `call` accepts is made, also when `stop` comes at the same moment."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop, guarded by _lock; None before `start` and after `stop`."""

    @property
    def running(self) -> bool:
        return self._loop is not None

    def start(self, first: Callable[[], None]) -> None:
        """Run `first` in the thread and wait for it. Its exception is raised here, after the thread has ended."""
        begun: Future[None] = Future()
        # A daemon thread, because the process has to end even when this thread is stuck.
        self._thread = threading.Thread(target=self._run, args=(first, begun), name=self._name, daemon=True)
        self._thread.start()
        error = begun.exception()
        if error is not None:
            self._thread.join()
            raise error

    def call(self, function: Callable[..., object], *args: Any) -> bool:
        """Have the thread call `function`; return False when it takes no calls, before `start` and after `stop`."""
        with self._lock:
            if self._loop is None:
                return False
            self._loop.call_soon_threadsafe(function, *args)
        return True

    def run(self, function: Callable[[], Coroutine[Any, Any, None]], timeout_s: float) -> None:
        """Run a coroutine function in the thread, and wait for it.

        :raises TimeoutError: when it takes longer.
        """
        with self._lock:
            if self._loop is None:
                return
            future = asyncio.run_coroutine_threadsafe(function(), self._loop)
        future.result(timeout_s)

    def stop(self) -> None:
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is None or self._thread is None:
            return
        # One turn of the loop later, so that everything that the last calls schedule runs too.
        loop.call_soon_threadsafe(loop.call_soon, loop.stop)
        self._thread.join(JOIN_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("the thread %s has not ended in %g s", self._name, JOIN_TIMEOUT_S)

    def _run(self, first: Callable[[], None], begun: Future[None]) -> None:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            first()
        except BaseException as error:  # also SystemExit: `start` waits for the result
            loop.close()
            begun.set_exception(error)
            return
        with self._lock:
            self._loop = loop
        begun.set_result(None)
        loop.run_forever()
        loop.close()
