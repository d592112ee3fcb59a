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

from deepseek_backend.engines.context_handover import ContextHandover
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

_KEY = re.compile(r"[0-9a-f]{32}")
_READ_LIMIT_BYTES = 256


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
        self._sending: dict[str, asyncio.StreamWriter] = {}
        self._num_unknown = 0
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
        key = secrets.token_hex(16)
        self._loop.call(self._keep, key, freed)
        return KvTicket(host=self._host, port=self._port, key=key, script=script)

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
            asyncio.start_server(self._answer, sock=listener, limit=_READ_LIMIT_BYTES)
        )

    def _keep(self, key: str, freed: Callable[[], None]) -> None:
        self._held[key] = freed
        if self._timeout_s is not None:
            asyncio.get_running_loop().call_later(self._timeout_s, self._expire, key)

    def _expire(self, key: str) -> None:
        if (freed := self._held.pop(key, None)) is not None:
            freed()
        elif (writer := self._sending.get(key)) is not None:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection. Whatever a stranger sends or leaves out, it only ends the stranger's connection."""
        try:
            key = await self._read_key(reader)
            freed = self._held.pop(key, None)
            writer.write(GONE if freed is None else TAKEN)
            if freed is not None:
                self._sending[key] = writer
                try:
                    with suppress(OSError):
                        await reader.read(1)
                finally:
                    del self._sending[key]
                    freed()
        finally:
            writer.close()

    async def _read_key(self, reader: asyncio.StreamReader) -> str:
        """Return the key; "" where none came."""
        if self._num_unknown >= MAX_UNKNOWN:
            return ""
        self._num_unknown += 1
        try:
            sent = await asyncio.wait_for(reader.readexactly(len(GREETING) + 32), PATIENCE_S)
        except (asyncio.IncompleteReadError, asyncio.TimeoutError, OSError):
            return ""
        finally:
            self._num_unknown -= 1
        return sent.removeprefix(GREETING).decode(errors="replace") if sent.startswith(GREETING) else ""

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
            (await self._serving).close()
        if self._asking:
            await asyncio.wait(self._asking, timeout=FAREWELL_S)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
