"""Interfaces to what differs between the clients: sleeping, waiting for events, time limits, connecting."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from deepseek_triton_client._core.client_settings import Endpoint, Settings
from deepseek_triton_client._core.transport import Transport


@dataclass(frozen=True, slots=True)
class Deadlines:
    """The time limits of one request as moments of time.monotonic(); None is never."""

    first_token: float | None
    end: float | None
    between_tokens_s: float | None
    """A duration, unlike the other two: it counts from the begin of each wait."""

    @property
    def any(self) -> bool:
        return (self.first_token, self.end, self.between_tokens_s) != (None, None, None)


class Watchdog(Protocol):
    """Calls `interrupt` once when a limit runs out. Only the thread or task that reads the stream calls it."""

    expired: str | None
    """Name of the field of `Timeouts` that ran out."""

    def expect(self, *, first: bool) -> None:
        """The caller begins to wait for a token; `first` if no token has come yet."""

    def relax(self) -> None:
        """The token came: until the next wait only the limit of the whole request counts."""

    def stop(self) -> None:
        """End all limits: no interrupt happens after this returns. May be called again."""


class RuntimeEvent(Protocol):
    """An event that happens once. Threads, or tasks of one event loop, may share it."""

    def set(self) -> None:
        """Make the event happen. May be called again."""

    async def wait(self, timeout_s: float | None) -> bool:
        """Wait until the event happens, at most `timeout_s` seconds. Returns whether it has happened."""
        ...


class Runtime(Protocol):
    """All that a client needs to run blocking, or on an event loop."""

    async def sleep(self, seconds: float) -> None: ...

    def event(self) -> RuntimeEvent:
        """Return a new event."""
        ...

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which raises nothing, beside all else."""

    def watchdog(self, deadlines: Deadlines, interrupt: Callable[[], None]) -> Watchdog: ...

    def transport(self, endpoint: Endpoint, settings: Settings) -> Transport: ...
