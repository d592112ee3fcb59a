"""What blocking and asynchronous clients do differently besides the network: sleep, wait, keep to time limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from deepseek_triton_client._core.client_settings import Endpoint, Settings
from deepseek_triton_client._core.transport import Transport


@dataclass(frozen=True, slots=True)
class Deadlines:
    """The limits of one request as moments of time.monotonic(); None is never."""

    first_token: float | None
    end: float | None
    between_tokens_s: float | None
    """A duration, unlike the others: it counts from each wait."""

    @property
    def any(self) -> bool:
        return (self.first_token, self.end, self.between_tokens_s) != (None, None, None)


class Watchdog(Protocol):
    """Calls `interrupt` once when a limit runs out. Who reads the stream calls these, and nobody else."""

    expired: str | None
    """The field of `Timeouts` that ran out."""

    def expect(self, *, first: bool) -> None:
        """The caller begins to wait for a token."""

    def relax(self) -> None:
        """The token came: until the next wait only the end counts."""

    def stop(self) -> None:
        """No interrupt happens after this returns. May be called again."""


class RuntimeEvent(Protocol):
    """Happens once. Threads, or tasks of one event loop, may share it."""

    def set(self) -> None:
        """May be called again."""

    async def wait(self, timeout_s: float | None) -> bool:
        """Whether it has happened."""
        ...


class Runtime(Protocol):
    async def sleep(self, seconds: float) -> None: ...

    def event(self) -> RuntimeEvent:
        """A new one."""
        ...

    def watchdog(self, deadlines: Deadlines, interrupt: Callable[[], None]) -> Watchdog: ...

    def transport(self, endpoint: Endpoint, settings: Settings) -> Transport: ...
