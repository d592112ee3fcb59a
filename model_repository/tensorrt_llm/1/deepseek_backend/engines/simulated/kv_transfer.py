"""Hands KV caches over between simulated engines, which have none to send: only who holds one, and how long it takes.

A context engine listens on a TCP socket, and each connection is one transfer. The generation engine sends a greeting
with the key of a KV cache; the answer is one byte, TAKEN or GONE. After TAKEN the generation engine keeps the
connection for the time of the transfer, and closes it. However a connection ends, the context engine frees the KV cache
then.
"""

import asyncio
import json
import re
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass

from deepseek_backend.engines.generate_request import ContextHandover
from deepseek_backend.engines.loop_engine import LoopThread
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

_KEY = re.compile("[0-9a-f]{32}")
_GREETED_BYTES = len(GREETING) + 32
_READ_LIMIT_BYTES = 256
_TURNS_TO_OPEN = 5
"""Turns of asyncio's loop from the accept of a connection until it is served, and a few more."""


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
    expected = "context_phase_params: expected opaque_state as a simulated context server wrote it"
    try:
        document = json.loads(handover.opaque_state)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{expected}: {describe(error)}") from error
    match document:
        case {
            "host": str(host),
            "port": int(port),
            "key": str(key),
            "script": None | {"start": int(), "stride": int(), "closes_at": int()} as script,
        } if 0 < port < 65536 and _KEY.fullmatch(key):
            made = Script(script["start"] & 0xFFFF, script["stride"] & 0xFFFF, script["closes_at"]) if script else None
            return KvTicket(host=host, port=port, key=key, script=made)
    raise RequestError(expected)


@dataclass(slots=True, eq=False)
class _HeldCache:
    """A KV cache of a context engine, until it is freed."""

    freed: Callable[[], None]
    expiry: asyncio.TimerHandle | None = None
    writer: asyncio.StreamWriter | None = None
    """The connection that transfers it."""


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
        self._held: dict[str, _HeldCache] = {}
        self._writers: set[asyncio.StreamWriter] = set()
        """All connections to this engine."""
        self._serving: set[asyncio.Task[None]] = set()
        """A task serves each of them."""
        self._server: asyncio.Future[asyncio.Server] | None = None
        self._fetches: set[asyncio.Task[None]] = set()
        self._asking: set[asyncio.Task[None]] = set()
        """Fetches whose key has not been answered yet."""

    def hold(self, script: Script | None, freed: Callable[[], None]) -> KvTicket:
        """Hold a KV cache until it has been fetched. Another thread calls `freed` then, once.

        :raises OSError: when the engine can't listen on its host.
        """
        self._start()
        if not self._port:
            family, _, _, _, address = socket.getaddrinfo(self._host, 0, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(address[:2], family=family, backlog=MAX_UNKNOWN)
            self._port = listener.getsockname()[1]
            serving = asyncio.start_server(self._serve, sock=listener, limit=_READ_LIMIT_BYTES)
            self._loop.call(lambda: setattr(self, "_server", asyncio.ensure_future(serving)))
        key = secrets.token_hex(16)

        def keep() -> None:
            self._held[key] = cache = _HeldCache(freed)
            if self._timeout_s is not None:
                cache.expiry = asyncio.get_running_loop().call_later(self._timeout_s, expire)

        def expire() -> None:
            if (writer := self._held[key].writer) is None:
                self._free(key)
            else:
                writer.close()  # `_serve` frees it

        self._loop.call(keep)
        return KvTicket(host=self._host, port=self._port, key=key, script=script)

    def drop(self, key: str) -> None:
        """Hold a KV cache no longer, unless a generation engine is fetching it already."""

        def free() -> None:
            if key in self._held and self._held[key].writer is None:
                self._free(key)

        self._loop.call(free)

    def fetch(self, ticket: KvTicket, seconds: float, ended: Callable[[ContextLostError | None], None]) -> None:
        """Fetch a KV cache, which takes `seconds`. Another thread calls `ended` then, unless `close` comes before."""

        def begin() -> None:
            task = asyncio.get_running_loop().create_task(self._fetch(ticket, seconds, ended))
            for tasks in (self._fetches, self._asking):
                tasks.add(task)
                task.add_done_callback(tasks.discard)

        if not self._closed:
            self._start()
            self._loop.call(begin)

    def close(self) -> None:
        """End all transfers, for good. Fetches that have not begun still take their KV caches, which frees them."""
        self._closed = True
        self._loop.run(self._finish, FAREWELL_S + PATIENCE_S)
        self._loop.stop()

    def _start(self) -> None:
        if not self._loop.running:
            self._loop.start(lambda: None)

    # Everything below runs in the loop's thread.

    def _free(self, key: str) -> None:
        cache = self._held.pop(key)
        # The loop would keep the timer until its time.
        if cache.expiry is not None:
            cache.expiry.cancel()
        cache.freed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection. Whatever a stranger sends or leaves out, it only ends the stranger's own."""
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        self._writers.add(writer)
        key = ""
        try:
            key = await self._take(reader, writer)
            if key:
                await reader.read(1)  # a generation engine sends nothing more: more data ends the connection
        except (OSError, EOFError, asyncio.TimeoutError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()
            if key:
                self._free(key)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        """Answer a new connection; return the key of the KV cache that it takes, "" for none."""
        num_unknown = len(self._writers) - sum(cache.writer is not None for cache in self._held.values())
        if self._closed or num_unknown > MAX_UNKNOWN:
            return ""
        sent = await asyncio.wait_for(reader.readexactly(_GREETED_BYTES), PATIENCE_S)
        key = sent.removeprefix(GREETING).decode(errors="replace")
        cache = self._held.get(key)
        if not sent.startswith(GREETING) or cache is None or cache.writer is not None:
            if sent.startswith(GREETING):
                writer.write(GONE)
            return ""
        cache.writer = writer
        writer.write(TAKEN)
        return key

    async def _fetch(self, ticket: KvTicket, seconds: float, ended: Callable[[ContextLostError | None], None]) -> None:
        where = f"the context server's transfer socket {ticket.host}:{ticket.port}"
        try:
            connecting = asyncio.open_connection(ticket.host, ticket.port, limit=_READ_LIMIT_BYTES)
            reader, writer = await asyncio.wait_for(connecting, PATIENCE_S)
        except (OSError, ValueError, asyncio.TimeoutError) as error:
            # ValueError: a name that can't be one of a host.
            ended(ContextLostError(f"{where} can't be reached ({describe(error)})"))
            return
        try:
            writer.write(GREETING + ticket.key.encode())
            ended(await self._receive(reader, seconds, where))
        finally:
            writer.close()

    async def _receive(self, reader: asyncio.StreamReader, seconds: float, where: str) -> ContextLostError | None:
        """Wait for the answer to a key and for the end of the transfer; return why it has failed."""
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
        if self._server is not None:
            server = await self._server
            # A connection accepted a moment ago opens first: a server closed before would leave it.
            for listener in server.sockets:
                asyncio.get_running_loop().remove_reader(listener)
            for _ in range(_TURNS_TO_OPEN):
                await asyncio.sleep(0)
            server.close()
            for writer in list(self._writers):
                writer.close()
        # Fetches that have asked for their KV cache are to take it, which frees it in the context engine.
        if self._asking:
            await asyncio.wait(self._asking, timeout=FAREWELL_S)
        for task in list(self._fetches):
            task.cancel()
        await asyncio.gather(*self._fetches, *self._serving, return_exceptions=True)
