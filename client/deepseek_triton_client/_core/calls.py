"""The work of both clients, written once: servers, retries, time limits.

Everything here is a coroutine over the interfaces `Transport` and `Runtime`. With the blocking runtime these coroutines
block wherever the others wait for an event loop.
"""

import math
import time
from collections.abc import Callable
from contextlib import suppress

from deepseek_triton_client._core.checked_request import Request, checked_id
from deepseek_triton_client._core.client_settings import Settings, Timeouts
from deepseek_triton_client._core.exceptions import (
    DeadlineExceeded,
    DeepseekTritonError,
    InvalidRequest,
    ModelNotFound,
    ModelNotReady,
    Overloaded,
    ServerUnavailable,
)
from deepseek_triton_client._core.exchange import Exchange, end_request
from deepseek_triton_client._core.interfaces import Deadlines, Runtime
from deepseek_triton_client._core.results import Completion, Metrics, ModelMetadata, Readiness
from deepseek_triton_client._core.server_group import ServerGroup, ServerState
from deepseek_triton_client._core.wire import checked

_POLL_INTERVAL_S = 1.0

_LAST_LOOK_S = 0.2
"""Seconds before the end of `wait_until_ready` at which the servers are asked for the last time."""


class Calls:
    """All calls to one model on the servers of `settings`."""

    def __init__(self, settings: Settings, runtime: Runtime) -> None:
        self._settings = settings
        self._runtime = runtime
        self._servers = ServerGroup(settings.endpoints, settings, runtime)

    async def open(self, request: Request) -> Exchange:
        """Send the request and return with its first response. Refusals are tried again as `Retries` says."""
        started = time.monotonic()
        deadlines = _deadlines(request.timeouts, started)
        retries, rounds = self._settings.retries, [0, 0]  # the latter with a server that was full
        refusal: DeepseekTritonError | None = None
        while True:
            is_full = False
            for server in self._servers.in_order():
                try:
                    return await self._begin(server, request, deadlines, started)
                except DeepseekTritonError as exc:
                    error = exc
                is_full |= isinstance(error, Overloaded)
                if isinstance(error, ServerUnavailable):
                    server.failed()
                if not error.unprocessed or _seconds_left(deadlines) <= 0:
                    raise error
                if error.code is not None:
                    refusal = error
            rounds[is_full] += 1
            most = (is_full and retries.attempts_when_full) or retries.attempts
            delay_s = retries.delay_s(sum(rounds), error.retry_after_s)
            if rounds[is_full] >= most or delay_s >= _seconds_left(deadlines):
                # The refusal of a server says more than a lost connection.
                if refusal is not None and error.code is None:
                    raise error from refusal
                raise error
            await self._runtime.sleep(delay_s)

    async def generate(self, request: Request) -> Completion:
        exchange = await self.open(request)
        try:
            while await exchange.next() is not None:
                pass
        finally:
            await exchange.close()
        return exchange.completion()

    async def cancel(self, request_id: str) -> None:
        """End the active request with this id, on whichever server it runs."""
        checked_id(request_id)
        for server in self._servers.all:
            try:
                return await self._stop(server, request_id)
            except DeepseekTritonError as exc:
                exc.request_id, exc.url = request_id, server.url
                if server is self._servers.all[-1]:
                    raise
        raise AssertionError("settings have at least one server")

    async def metadata(self) -> ModelMetadata:
        for server in (servers := list(self._servers.in_order())):
            try:
                return await server.transport.metadata(self._settings.timeouts.connect)
            except DeepseekTritonError as exc:
                exc.url = server.url
                if server is servers[-1] or not isinstance(exc, (ServerUnavailable, DeadlineExceeded)):
                    raise
        raise AssertionError("settings have at least one server")

    async def metrics(self) -> Metrics:
        """Return the metrics at `metrics_url`, or those of the first server where that has a usual place."""
        first = self._servers.all[0]
        if not (url := self._settings.metrics_url or first.endpoint.metrics_url):
            raise InvalidRequest("metrics_url: expected it, for 8002 is usual only beside Triton's ports 8000 and 8001")
        try:
            return Metrics.parse(await first.transport.metrics(url, self._settings.timeouts.connect))
        except DeepseekTritonError as exc:
            exc.message, exc.url = f"metrics_url {url}: {exc.message}", url
            raise

    async def ready(self) -> bool:
        """Tell whether one of the servers can answer now."""
        for server in self._servers.all:
            if _is_ready(await self._readiness(server, 0.0, None)):
                return True
        return False

    async def readiness(self) -> tuple[Readiness, ...]:
        """Tell how far each of the servers is, in the order of their URLs."""
        return tuple([await self._readiness(server, 0.0, None) for server in self._servers.all])

    async def wait_until_ready(self, timeout_s: float | None, on_progress: Callable[[Readiness], None] | None) -> None:
        started = time.monotonic()
        end = started + (math.inf if timeout_s in (None, math.inf) else checked("timeout_s", "FP32", timeout_s))
        while True:
            seen: list[Readiness] = []
            for server in self._servers.all:
                now = time.monotonic()
                # A silent server must leave time for the next.
                share_s = (end - now) / (len(self._servers.all) - len(seen))
                readiness = await self._readiness(server, now - started, now + share_s)
                seen.append(readiness)
                if on_progress is not None:
                    on_progress(readiness)
                if _is_ready(readiness):
                    return
            if all(each.state == "missing" for each in seen):
                raise ModelNotFound(seen[0].detail, url=seen[0].url)
            left_s = end - time.monotonic() - _LAST_LOOK_S
            if left_s <= 0:
                why = "; ".join(f"{each.url} is {each.state}" + (each.detail and f" ({each.detail})") for each in seen)
                raise DeadlineExceeded(f"model {self._settings.model_name!r} is not ready after {timeout_s:g} s: {why}")
            await self._runtime.sleep(min(left_s, _POLL_INTERVAL_S))

    async def close(self) -> None:
        for server in self._servers.all:
            await server.transport.close()

    async def _begin(self, server: ServerState, request: Request, deadlines: Deadlines, started: float) -> Exchange:
        try:
            responses, reader = await server.open(request, lambda: _limit_s(request.timeouts.connect, deadlines))
            watchdog = self._runtime.watchdog(deadlines, responses.interrupt)
            exchange = Exchange(
                request, server=server, responses=responses, reader=reader, watchdog=watchdog, started=started
            )
            try:
                await exchange.begin()
            except BaseException:
                await exchange.close()
                raise
            return exchange
        except DeepseekTritonError as exc:
            exc.request_id, exc.url = request.request_id, server.url
            if isinstance(exc, ServerUnavailable) and _seconds_left(deadlines) <= 0:
                unsent = exc.unprocessed
                limits = {name: getattr(request.timeouts, name) for name in ("first_token", "total")}
                seconds, limit = min((value, name) for name, value in limits.items() if value is not None)
                message = f"timeouts.{limit} of {seconds:g} s ran out before there was a connection: {exc.message}"
                raise DeadlineExceeded(message, request_id=exc.request_id, url=exc.url, unprocessed=unsent) from exc
            raise

    async def _stop(self, server: ServerState, request_id: str) -> None:
        limit_s = self._settings.timeouts.connect
        dialect = await server.dialect(lambda: limit_s)
        responses = server.transport.open(request_id, dialect.stop_inputs(), connect_s=limit_s)
        deadlines = _deadlines(Timeouts(total=limit_s), time.monotonic())
        watchdog = self._runtime.watchdog(deadlines, responses.interrupt)
        try:
            watchdog.expect(first=True)
            while await responses.receive() is not None:
                pass
        except DeepseekTritonError as exc:
            if watchdog.expired:
                raise DeadlineExceeded(
                    f"the server did not cancel the request within timeouts.connect of {limit_s:g} s"
                ) from exc
            if not dialect.is_stopped(exc):
                raise
        finally:
            await end_request(watchdog, responses)

    async def _readiness(self, server: ServerState, waited_s: float, end: float | None) -> Readiness:
        connect_s = self._settings.timeouts.connect
        deadlines = Deadlines(first_token=None, end=end, between_tokens_s=None)
        try:
            is_ready, detail = True, ""
            try:  # Triton's metrics port answers yes to everything, but has no metadata
                if not await server.transport.server_ready(_limit_s(connect_s, deadlines)):
                    return Readiness(server.url, "starting", waited_s)
                is_ready = await server.transport.model_ready(_limit_s(connect_s, deadlines))
                await server.transport.metadata(_limit_s(connect_s, deadlines))
            except ModelNotReady as exc:  # it loads, as model_ready has said, or the error says more
                is_ready, detail = False, exc.message if is_ready else ""
            except ModelNotFound as exc:
                detail = exc.message
                if detail.endswith("is not found"):  # Triton's words for what it neither has nor loads; no proxy's
                    why = await self._why_missing(server, detail, _limit_s(connect_s, deadlines))
                    return Readiness(server.url, "missing" if why else "loading", waited_s, why)
        except (ServerUnavailable, DeadlineExceeded) as exc:
            return Readiness(server.url, "unreachable", waited_s, exc.message)
        except DeepseekTritonError as exc:
            exc.url = server.url
            raise
        return Readiness(server.url, "ready" if is_ready else "loading", waited_s, detail)

    async def _why_missing(self, server: ServerState, message: str, timeout_s: float | None) -> str:
        """Say why the server will not have the model; "" while it may load, as one in its repository may."""
        rows: list[dict[str, str]] = []
        with suppress(DeepseekTritonError):  # it wants a token, or doesn't show its index: the model's answer decides
            rows = await server.transport.index(timeout_s)
        own = [row.get("state") for row in rows if row.get("name") == self._settings.model_name]
        if any(row.get("state") == "LOADING" for row in rows) or (own and "READY" not in own):
            return ""
        names = {" version ".join(filter(None, (row.get("name"), row.get("version")))) for row in rows}
        return f"{message}; the server has {', '.join(sorted(names))}" if names else message


def _is_ready(readiness: Readiness) -> bool:
    """Raises ModelNotFound for what answers Triton's probes and nothing else of Triton's, as a gateway does."""
    if readiness.state == "ready" and readiness.detail:
        raise ModelNotFound(readiness.detail, url=readiness.url)
    return readiness.state == "ready"


def _deadlines(timeouts: Timeouts, started: float) -> Deadlines:
    return Deadlines(
        first_token=None if timeouts.first_token is None else started + timeouts.first_token,
        end=None if timeouts.total is None else started + timeouts.total,
        between_tokens_s=timeouts.between_tokens,
    )


def _seconds_left(deadlines: Deadlines) -> float:
    """Seconds until a limit that counts from the start ends the request."""
    ends = [moment for moment in (deadlines.first_token, deadlines.end) if moment is not None]
    return min(ends) - time.monotonic() if ends else math.inf


def _limit_s(connect_s: float | None, deadlines: Deadlines) -> float | None:
    """Seconds that a step before the request is sent may take. Never 0, which sockets take for "do not wait"."""
    limit_s = min(math.inf if connect_s is None else connect_s, _seconds_left(deadlines))
    return None if math.isinf(limit_s) else max(limit_s, 0.001)
