"""Hands KV caches over between simulated engines, which have none to send: only who holds one, and how long it takes.

A context engine listens on a TCP socket, and each connection is one transfer. The generation engine sends a greeting
with the key of a KV cache; the answer is one byte, TAKEN or GONE. After TAKEN the generation engine keeps the
connection for the time of the transfer, and closes it. However a connection ends, the context engine frees the KV cache
then.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import cast

from deepseek_backend.engines.generate_request import ContextHandover
from deepseek_backend.engines.loop_thread import LoopThread
from deepseek_backend.engines.simulated.filler_text import Script
from deepseek_backend.errors import ContextLostError, RequestError, describe

GREETING = b"deepseek-triton kv "
"""Comes before each key, so that a made-up ticket can't make an engine say anything of use to another service."""
TAKEN, GONE = b"+", b"-"
PATIENCE_S = 10.0
"""Limit on connecting and on the exchange of key and answer."""
MAX_UNKNOWN = 256
"""Most connections at a time that have not sent a key."""
FAREWELL_S = 2.0
"""Seconds in which an engine that stops fetches what it was to fetch."""

_KEY_LENGTH = 32
_KEY = re.compile(rf"[0-9a-f]{{{_KEY_LENGTH}}}")
_READ_LIMIT_BYTES = 256
_TURNS_TO_OPEN = 5
"""Turns of asyncio's loop from the accept of a connection to its connection_made, and a few more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTicket:
    """`ContextHandover.opaque_state` of a simulated context engine."""

    host: str
    port: int
    key: str
    """An unguessable name of the KV cache, good for one transfer."""
    script: Script | None
    """The tokens of the answer, which a random seed may have chosen; None where the prompt dictates them."""

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def read_ticket(handover: ContextHandover) -> KvTicket:
    """Return the ticket in a handover.

    :raises RequestError: when `KvTicket.to_bytes` has not written it.
    """
    try:
        match json.loads(handover.opaque_state):
            case {"host": str(host), "port": int(port), "key": str(key), "script": None | dict() as script} if (
                0 < port < 65536 and _KEY.fullmatch(key)
            ):
                return KvTicket(host=host, port=port, key=key, script=_read_script(script))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{_EXPECTED}: {describe(error)}") from error
    raise RequestError(_EXPECTED)


_EXPECTED = "context_phase_params: expected opaque_state as a simulated context server wrote it"


def _read_script(given: Mapping[str, object] | None) -> Script | None:
    match given:
        case None:
            return None
        case {"start": int(start), "stride": int(stride), "closes_at": int(closes_at)}:
            return Script(start & 0xFFFF, stride & 0xFFFF, closes_at)
    raise ValueError("script has not its three numbers")


class KvTransfers:
    """Both ends of an engine's transfers, in a thread that begins with the first of them.

    One thread at a time may call the methods.
    """

    def __init__(self, host: str, timeout_s: float | None) -> None:
        """
        :param host: address on which to listen, and at which generation engines reach this one.
        :param timeout_s: seconds after which a KV cache is freed in any case; None for never.
        """
        self._host = host
        self._timeout_s = timeout_s
        self._loop = LoopThread("simulated-kv-transfers")
        self._port = 0
        self._closed = False
        # Only the loop's thread uses the following ones.
        self._held: dict[str, Callable[[], None]] = {}
        self._expiries: dict[str, asyncio.TimerHandle] = {}
        """Timers of KV caches that are held or sent. The loop keeps one for `timeout_s` unless it is cancelled."""
        self._connections: set[asyncio.Transport] = set()
        self._sending: dict[str, asyncio.Transport] = {}
        """Connections that have sent the key of a KV cache."""
        self._serving: asyncio.Future[asyncio.Server] | None = None
        self._fetches: set[asyncio.Task[None]] = set()
        self._asking: set[asyncio.Task[None]] = set()
        """Fetches whose key has not been answered yet."""

    def hold(self, script: Script | None, freed: Callable[[], None]) -> KvTicket:
        """Hold a KV cache until it has been fetched. Another thread calls `freed` then, once.

        :raises OSError: when the engine can't listen on its host.
        """
        self._start()
        if not self._port:
            self._listen()
        key = secrets.token_hex(_KEY_LENGTH // 2)
        self._loop.call(self._keep, key, freed)
        return KvTicket(host=self._host, port=self._port, key=key, script=script)

    def drop(self, key: str) -> None:
        """Hold a KV cache no longer, unless a generation engine is fetching it already."""
        self._loop.call(self._drop, key)

    def fetch(self, ticket: KvTicket, seconds: float, ended: Callable[[ContextLostError | None], None]) -> None:
        """Fetch a KV cache, which takes `seconds`. Another thread calls `ended` then, unless `close` comes before."""
        if self._closed:
            return
        self._start()
        self._loop.call(self._begin_fetch, ticket, seconds, ended)

    def close(self) -> None:
        """End all transfers, for good. Fetches that have not begun still take their KV caches, which frees them."""
        self._closed = True
        self._loop.run(self._finish, FAREWELL_S + PATIENCE_S)
        self._loop.stop()

    def _start(self) -> None:
        if not self._loop.running:
            self._loop.start(lambda: None)

    def _listen(self) -> None:
        family, _, _, _, address = socket.getaddrinfo(self._host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=MAX_UNKNOWN)
        self._port = listener.getsockname()[1]
        self._loop.call(self._serve, listener)

    # Everything below runs in the loop's thread.

    def _serve(self, listener: socket.socket) -> None:
        self._serving = asyncio.ensure_future(
            asyncio.get_running_loop().create_server(lambda: _KvConnection(self), sock=listener)
        )

    def _keep(self, key: str, freed: Callable[[], None]) -> None:
        self._held[key] = freed
        if self._timeout_s is not None:
            self._expiries[key] = asyncio.get_running_loop().call_later(self._timeout_s, self._expire, key)

    def _drop(self, key: str) -> None:
        if (freed := self._held.pop(key, None)) is not None:
            self._forget_expiry(key)
            freed()

    def _forget_expiry(self, key: str) -> None:
        if (expiry := self._expiries.pop(key, None)) is not None:
            expiry.cancel()

    def _expire(self, key: str) -> None:
        self._drop(key)
        if (transport := self._sending.get(key)) is not None:
            transport.close()

    def take(self, key: str, transport: asyncio.Transport) -> Callable[[], None] | None:
        """Return what frees the KV cache, for the connection that transfers it; None for a key of none that is held."""
        if (freed := self._held.pop(key, None)) is not None:
            self._sending[key] = transport
        return freed

    def opened(self, transport: asyncio.Transport) -> bool:
        """Return whether there is room for one more connection."""
        self._connections.add(transport)
        return len(self._connections) - len(self._sending) <= MAX_UNKNOWN

    def ended(self, key: str, transport: asyncio.Transport) -> None:
        self._connections.discard(transport)
        if self._sending.pop(key, None) is not None:
            self._forget_expiry(key)

    def _begin_fetch(self, ticket: KvTicket, seconds: float, ended: Callable[[ContextLostError | None], None]) -> None:
        task = asyncio.get_running_loop().create_task(self._fetch(ticket, seconds, ended))
        for tasks in (self._fetches, self._asking):
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _fetch(self, ticket: KvTicket, seconds: float, ended: Callable[[ContextLostError | None], None]) -> None:
        where = f"the context server's transfer socket {ticket.host}:{ticket.port}"
        try:
            connecting = asyncio.open_connection(ticket.host, ticket.port, limit=_READ_LIMIT_BYTES)
            reader, writer = await asyncio.wait_for(connecting, PATIENCE_S)
        except (OSError, ValueError, asyncio.TimeoutError) as error:  # ValueError: a name that can't be one of a host
            ended(ContextLostError(f"{where} can't be reached ({describe(error)})"))
            return
        try:
            ended(await self._receive(reader, writer, ticket.key, seconds, where))
        finally:
            writer.close()

    async def _receive(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str, seconds: float, where: str
    ) -> ContextLostError | None:
        writer.write(GREETING + key.encode())
        try:
            answer = await asyncio.wait_for(reader.read(1), PATIENCE_S)
        except (OSError, asyncio.TimeoutError) as error:
            return ContextLostError(f"{where} did not answer ({describe(error)})")
        if answer != TAKEN:
            return ContextLostError(
                f"{where} has not this KV cache: it was fetched already, or held longer than kv_transfer_timeout_ms"
            )
        if (task := asyncio.current_task()) is not None:
            self._asking.discard(task)
        if self._closed or not seconds:
            return None
        with suppress(OSError):
            try:
                await asyncio.wait_for(reader.read(1), seconds)
            except asyncio.TimeoutError:
                return None
        return ContextLostError(f"{where} closed during the transfer")

    async def _finish(self) -> None:
        if self._serving is not None:
            await self._stop_serving(await self._serving)
        if self._asking:
            await asyncio.wait(self._asking, timeout=FAREWELL_S)
        fetches = list(self._fetches)
        for task in fetches:
            task.cancel()
        await asyncio.gather(*fetches, return_exceptions=True)

    async def _stop_serving(self, server: asyncio.Server) -> None:
        """End all connections. One accepted a moment ago opens first: a server closed before would leave it."""
        for listener in server.sockets:
            asyncio.get_running_loop().remove_reader(listener)
        for _ in range(_TURNS_TO_OPEN):
            await asyncio.sleep(0)
        server.close()
        for transport in self._connections:
            transport.close()


class _KvConnection(asyncio.Protocol):
    """A connection to a context engine. Whatever a stranger sends or leaves out, it only ends the stranger's own."""

    def __init__(self, transfers: KvTransfers) -> None:
        self._transfers = transfers
        self._sent = b""
        self._key = ""
        self._freed: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._patience = asyncio.get_running_loop().call_later(PATIENCE_S, transport.close)
        if not self._transfers.opened(self._transport):
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Take the key. A generation engine sends nothing behind it: more data ends the connection."""
        self._sent += data[:_READ_LIMIT_BYTES]
        if self._freed is None and len(self._sent) == len(GREETING) + _KEY_LENGTH and self._sent.startswith(GREETING):
            self._key = self._sent.removeprefix(GREETING).decode(errors="replace")
            self._freed = self._transfers.take(self._key, self._transport)
            self._transport.write(GONE if self._freed is None else TAKEN)
            if self._freed is not None:
                self._patience.cancel()
                return
        if len(self._sent) >= len(GREETING) + _KEY_LENGTH:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._patience.cancel()
        self._transfers.ended(self._key if self._freed else "", self._transport)
        if self._freed is not None:
            self._freed()
