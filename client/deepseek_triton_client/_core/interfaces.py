"""The interfaces under the calls: to the network, and to time.

All methods that may wait are coroutines. Those of the blocking kind only ever wait by blocking, so that
`_blocking_runtime.run` can run them to their end in one step, and everything above these interfaces is written once.

A transport raises only errors of this package: each translates the errors of its library in one place.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from deepseek_triton_client._core.client_settings import Endpoint, Settings
from deepseek_triton_client._core.results import ModelMetadata

Outputs = Mapping[str, Any]
"""One response: output name -> value. A value is an int, float, bool or str; or a list of them, unless it has one
element. This is the form of /generate's JSON; the tensors of gRPC are converted to it."""


@dataclass(frozen=True, slots=True)
class Input:
    """One tensor of a request."""

    name: str
    datatype: str
    """Name of the datatype in Triton's protocol: BYTES, BOOL, INT32, UINT64 or FP32."""
    values: Sequence[Any]


class ResponseStream(Protocol):
    """The responses to one request. Only one thread or task reads and closes it."""

    async def receive(self) -> Outputs | None:
        """Return the next response; None at the end. Raises the server's error. The first call sends the request."""
        ...

    def interrupt(self) -> None:
        """Make a waiting `receive` fail or end soon. Called from any thread, but not after `close`; never raises."""
        ...

    async def close(self) -> None:
        """End the use of the network. An unfinished request is cancelled, and the server sees it. May be called again.

        Only from here on, and not from the stream's end, the connection can serve others: no `interrupt` may follow.
        """
        ...


class Transport(Protocol):
    """One model on one server. Threads may share a blocking transport, the tasks of one event loop the other kind."""

    always_streams: bool
    """Whether to stream even whole answers, because only then the server notices that a client left."""

    def open(self, request_id: str, inputs: Sequence[Input], *, connect_s: float | None) -> ResponseStream:
        """Prepare a request; the first `receive` sends it. `connect_s` limits the time to reach the server."""
        ...

    # The following methods apply `timeout_s` to each of their steps; None is no limit.

    async def server_ready(self, timeout_s: float | None) -> bool: ...

    async def model_ready(self, timeout_s: float | None) -> bool: ...

    async def metadata(self, timeout_s: float | None) -> ModelMetadata: ...

    async def index(self, timeout_s: float | None) -> list[dict[str, str]]: ...  # name, perhaps version and state

    async def metrics(self, url: str, timeout_s: float | None) -> str:
        """Return the text at `url`, which is http:// or https://."""
        ...

    async def close(self) -> None: ...


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


Due = tuple[float, str]
"""A moment of time.monotonic(), and the name of the field of `Timeouts` that runs out then."""
NEVER: Due = (math.inf, "")


class Watchdog:
    """The time limits of a request: this one has none. Only the thread or task that reads the stream calls it."""

    expired: str | None = None
    """Name of the field of `Timeouts` that ran out."""

    def expect(self, *, first: bool) -> None:
        """The caller begins to wait for a token; `first` if no token has come yet."""

    def relax(self) -> None:
        """The token came: until the next wait only the limit of the whole request counts."""

    def stop(self) -> None:
        """End all limits: no interrupt happens after this returns. May be called again."""


NO_WATCHDOG = Watchdog()


class LimitWatchdog(Watchdog, ABC):
    """Calls `interrupt` once when a limit runs out."""

    def __init__(self, deadlines: Deadlines, interrupt: Callable[[], None]) -> None:
        self._interrupt = interrupt
        self._between_s = deadlines.between_tokens_s
        self._end = NEVER if deadlines.end is None else (deadlines.end, "total")
        first = NEVER if deadlines.first_token is None else (deadlines.first_token, "first_token")
        self._first = min(first, self._end)

    def expect(self, *, first: bool) -> None:
        if first:
            self._set(self._first)
        elif self._between_s is None:
            self._set(self._end)
        else:
            self._set(min((time.monotonic() + self._between_s, "between_tokens"), self._end))

    def relax(self) -> None:
        self._set(self._end)

    @abstractmethod
    def _set(self, due: Due) -> None:
        """Let this limit be the next one."""


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

    def watchdog(self, deadlines: Deadlines, interrupt: Callable[[], None]) -> Watchdog: ...

    def transport(self, endpoint: Endpoint, settings: Settings) -> Transport: ...
