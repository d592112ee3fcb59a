"""The watcher ends what nobody else would: a request whose client has gone or whose time is up, everything when the
engine or the server is gone. It also tells whether requests should be sent here: a living process is not enough."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from deepseek_backend.active_request import ActiveRequest
from deepseek_backend.config import BackendConfig
from deepseek_backend.engines.base import Engine, EngineHealth
from deepseek_backend.errors import ASK_ANOTHER, BackendError, CancelledError, UnavailableError


class TokenClock:
    """How long the open requests have waited for a token.

    Threads: the engine's thread reports tokens; the caller's lock is held around the other two reports.
    """

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        """Time of the last token, or at which the first request came that waits for one."""
        self._waiting = False
        """Requests have waited since then, and no token has come."""

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self._since_s

    def request_came(self) -> None:
        """A request has come and no other is open."""
        if not self._waiting:
            self._since_s, self._waiting = time.monotonic(), True

    def token_came(self) -> None:
        self._since_s, self._waiting = time.monotonic(), False

    def wait_is_over(self) -> None:
        """The last open request has ended in a way that is no sign of a hang."""
        self._waiting = False


def readiness(engine: EngineHealth, *, draining: bool, num_open: int, idle_s: float, hang_s: float) -> EngineHealth:
    """The engine's own health, and what the engine can't see itself: draining and a hang.

    `idle_s` is the time since the last token of any request, or since there is a request to answer.
    """
    if not engine.alive:
        return engine
    if draining:
        return EngineHealth(alive=False, reason="the model is being stopped")
    if num_open and idle_s > hang_s:
        reason = f"{num_open} requests are open and none had a token for {idle_s:.0f} s (hang_s is {hang_s:.0f})"
        return EngineHealth(alive=False, reason=reason)
    return EngineHealth(alive=True)


logger = logging.getLogger(__name__)

MAX_CHECKS_PER_S = 1000
"""Most clients asked a second. Asking Triton whether a client has gone is a message there and back, and a wait for
Python's lock: with 7,000 streams under way 65 microseconds of processor were seen, 0.07 core at this rate. They are all
asked within 7 s."""
MARGIN_S = 5.0
"""Seconds of the exit timeout left for sending the last responses and stopping the engine; half of a shorter one."""


@dataclass(frozen=True, kw_only=True)
class ServerAbove:
    """The tritonserver this process works for. The defaults describe one that never exits, as in tests."""

    is_exiting: Callable[[], bool] = lambda: False
    """Whether the server was told to exit and waits for open requests."""
    exit_timeout_s: float = 30.0
    """Seconds for which it waits for them."""
    end: Callable[[str], None] = lambda reason: None
    """Ends the server with an exit code other than 0."""


class Watched(Protocol):
    """The part of the service that the watcher needs."""

    config: BackendConfig

    @property
    def num_open(self) -> int: ...

    def snapshot(self) -> list[ActiveRequest]: ...

    def drain(self, reason: str) -> None: ...

    def end_all(self, *, cause: str, error: BackendError | None = None) -> None: ...

    def end_early(
        self, active: ActiveRequest, *, cause: str, error: BackendError | None = None, timed_out: bool = False
    ) -> None: ...


class Watcher:
    """A thread that looks at everything once in cancellation_check_period_ms. The attributes belong to that thread."""

    def __init__(self, service: Watched, engine: Engine, server: ServerAbove) -> None:
        self._service = service
        self._engine = engine
        self._server = server
        self._drain_s = drain_seconds(service.config.drain_s, server.exit_timeout_s)
        self._period_s = service.config.cancellation_check_period_ms / 1000
        self._next_to_ask = 0
        self._drain_until_s: float | None = None
        self._has_stopped_engine = False
        self._fatal_at_s: float | None = None
        """Time at which the engine was found dead, by time.monotonic()."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._period_s):
            try:
                self.look(time.monotonic())
            except Exception:
                # Every open request depends on this thread.
                logger.exception("the watcher goes on after")

    def look(self, now: float) -> None:
        """Look at deadlines, clients, engine and server once."""
        open_requests = self._service.snapshot()
        for active in open_requests:
            if active.deadline_s is not None and now >= active.deadline_s and not active.ended:
                self._service.end_early(active, cause="deadline", timed_out=True)
        # As many clients are asked as MAX_CHECKS_PER_S allows in one period, the next ones in the next period.
        most = max(1, int(MAX_CHECKS_PER_S * self._period_s))
        if len(open_requests) > most:
            first = self._next_to_ask % len(open_requests)
            self._next_to_ask = first + most
            open_requests = (open_requests[first:] + open_requests[:first])[:most]
        for active in open_requests:
            try:
                has_gone = active.client_has_gone()
            except Exception:
                # Whatever Triton raises: the other requests still have to be watched.
                logger.exception("request %r can't be asked whether its client has gone", active.client_id)
                continue
            if has_gone:
                self._service.end_early(active, cause="client_gone", error=CancelledError("the client has gone"))
        self._look_at_engine(now)
        self._look_at_server(now)

    def _look_at_engine(self, now: float) -> None:
        health = self._engine.health()
        if health.alive or self._stopped.is_set() or self._has_stopped_engine:
            return
        if self._fatal_at_s is None:
            self._fatal_at_s = now
            logger.critical("the engine is dead: %s", health.reason)
        self._service.end_all(cause="error", error=UnavailableError(health.reason))
        config = self._service.config
        if config.on_fatal == "exit" and now >= self._fatal_at_s + config.fatal_grace_s:
            self._server.end(health.reason)

    def _look_at_server(self, now: float) -> None:
        if self._drain_until_s is None:
            if not self._server.is_exiting():
                return
            self._drain_until_s = now + self._drain_s
            logger.info("the server is exiting: open requests have %g s", self._drain_s)
            self._service.drain(f"the server is exiting{ASK_ANOTHER}")
        if now >= self._drain_until_s:
            self._service.end_all(cause="drain")
        # Not left to `finalize`: one open gRPC stream of a client, even an idle one, keeps Triton from calling it.
        if not self._service.num_open or now >= self._drain_until_s + MARGIN_S / 2:
            self._has_stopped_engine = True
            self._engine.stop()


def drain_seconds(configured: int | None, exit_timeout_s: float) -> float:
    """How many seconds open requests may go on once the server is exiting."""
    longest = max(exit_timeout_s - MARGIN_S, exit_timeout_s / 2)
    if configured is None:
        return longest
    if configured > longest:
        logger.warning(
            "drain_s is %d and --exit-timeout-secs %g: what is open after that is cut off, and tritonserver may crash",
            configured,
            exit_timeout_s,
        )
    return float(configured)
