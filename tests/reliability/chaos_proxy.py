"""A TCP proxy on the loopback address that can delay, hold and cut what it carries."""

import asyncio
import contextlib
import random
import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class Weather:
    """How the network behaves. `delay_s` holds each piece up; `cut_chance` ends a connection, with a reset, at a piece;
    `is_held` lets nothing through until it changes; `is_closed` resets connections that come."""

    delay_s: float = 0.0
    cut_chance: float = 0.0
    is_held: bool = False
    is_closed: bool = False


FINE = Weather()


class ChaosProxy:
    """Carries connections to a port of the loopback address, in a thread of its own."""

    def __init__(self, to_port: int) -> None:
        self.weather = FINE
        self.port = 0
        self._to_port = to_port
        self._chance = random.Random(to_port)
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="chaos-proxy", daemon=True)
        self._thread.start()
        started.wait()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def cut_all(self) -> None:
        """Reset every connection."""
        self._loop.call_soon_threadsafe(lambda: [writer.transport.abort() for writer in tuple(self._writers)])

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        self._loop.run_forever()
        server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.weather.is_closed:
            writer.transport.abort()
            return
        try:
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._to_port)
        except OSError:
            writer.transport.abort()
            return
        await asyncio.gather(self._carry(reader, to_writer), self._carry(to_reader, writer))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while data := await reader.read(65536):
                weather = self.weather
                if weather.delay_s:
                    await asyncio.sleep(weather.delay_s)
                while self.weather.is_held:
                    await asyncio.sleep(0.02)
                if self._chance.random() < self.weather.cut_chance:
                    writer.transport.abort()
                    return
                writer.write(data)
                await writer.drain()
            with contextlib.suppress(OSError, RuntimeError):
                writer.write_eof()
        except OSError:
            writer.transport.abort()  # the other side has gone: so does this one
        finally:
            self._writers.discard(writer)
