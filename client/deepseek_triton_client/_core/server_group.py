"""The servers of a client: what is known about each, and in which order they are tried."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from copy import copy

from deepseek_triton_client._core.checked_request import Request
from deepseek_triton_client._core.client_settings import Endpoint, Settings
from deepseek_triton_client._core.dialect import Dialect
from deepseek_triton_client._core.exceptions import DeepseekTritonError, ServerUnavailable
from deepseek_triton_client._core.interfaces import ResponseStream, Runtime, RuntimeEvent, Transport
from deepseek_triton_client._core.response_reader import ResponseReader

_COOL_DOWN_S = 5.0
"""Seconds for which a server that could not be reached, or said that it stops, is tried only after the others."""


class ServerState:
    """One of the client's servers: its transport, and what is known about its model."""

    def __init__(self, endpoint: Endpoint, settings: Settings, runtime: Runtime) -> None:
        self.endpoint = endpoint
        self.url = str(endpoint)
        self.transport: Transport = runtime.transport(endpoint, settings)
        self._stream_mode = settings.stream_mode
        self._event = runtime.event
        self._dialect: Dialect | None = None
        self._reading: tuple[RuntimeEvent, float, list[DeepseekTritonError]] | None = None
        """The read of the metadata under way: its end, the seconds that it may take, and the errors it ended with."""
        self._failed_at = -math.inf

    async def dialect(self, limit_s: Callable[[], float | None]) -> Dialect:
        """Return how to speak to the model. Its metadata is read once; others who ask meanwhile wait for that, and fail
        with it unless they have more time.
        `limit_s` is called before each step and returns how many seconds the step may take."""
        # A local variable, because `failed` may reset the attribute at any time.
        while (dialect := self._dialect) is None:
            limit = limit_s()
            if (reading := self._reading) is not None:
                event, its_limit, failures = reading
                if not await event.wait(limit):
                    raise ServerUnavailable(f"the model's metadata did not come within {limit:g} s", unprocessed=True)
                left = limit_s()
                if failures and (math.inf if left is None else left) <= its_limit:
                    raise copy(failures[0])
                continue
            own, failures = self._event(), []
            try:
                # Two threads may come here at once: then both read, which is no harm.
                self._reading = own, math.inf if limit is None else limit, failures
                self._dialect = dialect = Dialect(await self.transport.metadata(limit), self._stream_mode)
                return dialect
            except DeepseekTritonError as error:
                failures.append(copy(error))  # each request writes its own id into its error
                raise
            finally:
                self._reading = None
                own.set()
        return dialect

    async def open(
        self, request: Request, limit_s: Callable[[], float | None]
    ) -> tuple[ResponseStream, ResponseReader]:
        """Prepare the request in the form that the model needs; the stream's first `receive` sends it. `limit_s` is
        called before each step and returns how many seconds the step may take. Raises InvalidRequest for what the model
        has no input for."""
        dialect = await self.dialect(limit_s)
        inputs = dialect.inputs(request, streamed=request.streaming or self.transport.always_streams)
        responses = self.transport.open(request.request_id, inputs, connect_s=limit_s())
        return responses, dialect.reader(request)

    def failed(self) -> None:
        """Note that the server is unavailable. It may come back with another model, so its metadata is read again."""
        self._failed_at = time.monotonic()
        self._dialect = None

    @property
    def failed_recently(self) -> bool:
        return time.monotonic() - self._failed_at < _COOL_DOWN_S


class ServerGroup:
    """Servers that can stand in for one another."""

    def __init__(self, endpoints: Sequence[Endpoint], settings: Settings, runtime: Runtime) -> None:
        self.all = tuple(ServerState(endpoint, settings, runtime) for endpoint in endpoints)
        self._rotates = settings.balance == "round_robin"
        self._next = 0

    def in_order(self) -> Iterator[ServerState]:
        """All servers in the order to try them: those that failed a moment ago come last."""
        first = 0
        if self._rotates and self.all:
            first, self._next = self._next, (self._next + 1) % len(self.all)
        rotated = self.all[first:] + self.all[:first]
        return iter(sorted(rotated, key=lambda server: server.failed_recently))
