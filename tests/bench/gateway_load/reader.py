"""Opens streams, reads them, and says how late their tokens were.

    python -m bench.gateway_load.reader URL STREAMS SPREAD_S [BODY]

As cheap as a reader gets: asyncio.Protocol, httptools, and msgspec where the events are Triton's. Writes one line of
JSON: num_chunks, cpu_us (of this process for a chunk), and the lags in microseconds of first tokens and of later ones,
from CLOCK_MONOTONIC in their texts.
"""

import asyncio
import json
import re
import sys
import time
from array import array
from statistics import median
from urllib.parse import urlsplit

import httptools
import msgspec
import uvloop

_STAMP = re.compile(rb'"(?:content|text)":"(\d+) ')


class _Event(msgspec.Struct):
    text_output: str = ""
    finish_reason: str = ""


_decode = msgspec.json.Decoder(_Event).decode


class Reader(asyncio.Protocol):
    first_us = array("q")
    later_us = array("q")
    num_chunks = 0

    def __init__(self, request: bytes, tritons: bool) -> None:
        self.ended = asyncio.get_running_loop().create_future()
        self._request = request
        self._tritons = tritons
        self._parser = httptools.HttpResponseParser(self)
        self._num_stamps = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(ConnectionError("the stream broke off"))

    def on_body(self, body: bytes) -> None:
        now_us = time.monotonic_ns() // 1000
        for event in body.split(b"\n\n"):
            if self._tritons and event:
                stamps = [text] if (text := _decode(event[6:]).text_output) else []
            else:
                stamps = _STAMP.findall(event)
            for stamp in stamps:
                lag_us = now_us - int(stamp)
                (Reader.later_us if self._num_stamps else Reader.first_us).append(lag_us)
                self._num_stamps += 1
                Reader.num_chunks += 1

    def on_message_complete(self) -> None:
        assert self._parser.get_status_code() == 200, self._parser.get_status_code()
        self.ended.set_result(None)
        self._transport.close()


async def _read(url: str, num_streams: int, spread_s: float, body: bytes) -> None:
    parts = urlsplit(url)
    head = f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
    request = head.encode() + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    tritons = parts.path.startswith("/v2")

    async def one(index: int) -> None:
        await asyncio.sleep(spread_s * index / num_streams)
        loop = asyncio.get_running_loop()
        _, reader = await loop.create_connection(lambda: Reader(request, tritons), parts.hostname, parts.port)
        await reader.ended

    await asyncio.gather(*map(one, range(num_streams)))


if __name__ == "__main__":
    _, address, streams, spread, *rest = sys.argv
    began_s = time.process_time()
    uvloop.run(_read(address, int(streams), float(spread), (rest or ["{}"])[0].encode()))
    cpu_us = (time.process_time() - began_s) * 1e6
    later = sorted(Reader.later_us)
    found = {
        "cpu_us": cpu_us / Reader.num_chunks,
        "first_p50_us": median(Reader.first_us),
        "later_p50_us": median(later),
        "later_p99_us": later[len(later) * 99 // 100],
        "num_chunks": Reader.num_chunks,
    }
    print(json.dumps(found))
