"""A server that answers at an exact pace, as Triton with this project's model and as OpenAI's API.

    python -m support.paced_server [--step-ms 10] [--tokens 1] [--first-ms 50] [--break-every N]

It prints its port. Each stream gets `--tokens` tokens in every chunk, `--step-ms` after the chunk before; so a step of
10 ms with 8 tokens is an ITL of 1.25 ms. Every N-th stream breaks with an error event after its first chunk.
"""

import argparse
import asyncio
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httptools
import uvloop

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_DEFAULT_TOKENS = 16
_INFO = json.dumps({"name": "paced", "checkpoint": "paced", "max_seq_len": 65536})
"""What the task "describe" answers."""


@dataclasses.dataclass(frozen=True)
class Pace:
    step_s: float = 0.01
    tokens: int = 1
    first_s: float = 0.05
    break_every: int = 0


class PacedServer(asyncio.Protocol):
    pace = Pace()
    metadata = b""
    num_streams = 0

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""
        self._body = bytearray()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path, self._body = url, bytearray()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if b'"describe"' in self._body:
            event = b"data: %b\n\n" % json.dumps({"model_info": _INFO, "finish_reason": "stop"}).encode()
            self._transport.write(_HEAD + b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event))
        elif b"completions" in self._path or self._path.endswith(b"generate_stream"):
            self._begin(json.loads(bytes(self._body)))
        elif self._path.endswith(b"/ready") or self._path.endswith(b"/live"):
            self._write_whole(b"200 OK", b"")
        elif b"/v2/models/" in self._path:
            self._write_whole(b"200 OK", self.metadata)
        elif self._path.endswith(b"/v1/models"):
            self._write_whole(b"200 OK", b'{"object": "list", "data": [{"id": "paced", "object": "model"}]}')
        else:
            self._write_whole(b"404 Not Found", b"{}")

    def _write_whole(self, status: bytes, body: bytes) -> None:
        head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        self._transport.write(head % (status, len(body)) + body)

    def _begin(self, body: dict[str, Any]) -> None:
        PacedServer.num_streams += 1
        breaks = bool(self.pace.break_every) and PacedServer.num_streams % self.pace.break_every == 0
        is_openai = b"completions" in self._path
        num = int(body.get("max_tokens") or body.get("sampling_param_max_tokens") or _DEFAULT_TOKENS)
        prompt = body.get("prompt") or body.get("input_ids") or body.get("text_input") or ""
        events = _openai_events if is_openai else _triton_events
        length = len(prompt) if isinstance(prompt, (str, list)) else 1  # Triton's JSON: one element is no list
        parts = events(length, num, self.pace.tokens, breaks)
        self._transport.write(_HEAD)
        loop = asyncio.get_running_loop()
        due = loop.time() + self.pace.first_s
        loop.call_at(due, self._write_next, due, parts)

    def _write_next(self, due: float, parts: Iterator[tuple[bytes, bool]]) -> None:
        if self._transport.is_closing():
            return
        event, is_last = next(parts)
        self._transport.write(b"%x\r\n%b\r\n" % (len(event), event) + (b"0\r\n\r\n" if is_last else b""))
        if not is_last:
            due += self.pace.step_s
            asyncio.get_running_loop().call_at(due, self._write_next, due, parts)


def _counts(num: int, each: int) -> Iterator[int]:
    while num > each:
        yield each
        num -= each
    yield num


def _triton_events(prompt: int, num: int, each: int, breaks: bool) -> Iterator[tuple[bytes, bool]]:
    sent = 0
    for count in _counts(num, each):
        sent += count
        document: dict[str, Any] = {"text_output": "a " * count, "num_output_tokens": count}
        if sent == num:
            document |= {"finish_reason": "length", "num_input_tokens": prompt}
        yield b"data: %b\n\n" % json.dumps(document).encode(), sent == num
        if breaks:
            yield b'data: {"error": "[E_INTERNAL] the engine has died"}\n\n', True


def _openai_events(prompt: int, num: int, each: int, breaks: bool) -> Iterator[tuple[bytes, bool]]:
    sent = 0
    for count in _counts(num, each):
        sent += count
        reason = "length" if sent == num else None
        usage = {"prompt_tokens": prompt, "completion_tokens": sent}
        choice = {"index": 0, "text": "a " * count, "delta": {"content": "a " * count}, "finish_reason": reason}
        event = b"data: %b\n\n" % json.dumps({"choices": [choice], "usage": usage}).encode()
        yield event + (b"data: [DONE]\n\n" if reason else b""), reason is not None
        if breaks:
            yield b'data: {"error": {"message": "the engine has died"}}\n\ndata: [DONE]\n\n', True


async def _serve(pace: Pace) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "model_repository/tensorrt_llm/1"))
    from support.contract_metadata import METADATA

    PacedServer.pace = pace
    document = dataclasses.asdict(METADATA)
    PacedServer.metadata = json.dumps(document).encode()
    server = await asyncio.get_running_loop().create_server(PacedServer, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def paced_server(*options: str) -> Iterator[str]:
    """The server in a process of its own; yields host:port."""
    command = [sys.executable, "-m", "support.paced_server", *options]
    with subprocess.Popen(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--first-ms", type=float, default=50.0)
    parser.add_argument("--break-every", type=int, default=0)
    given = parser.parse_args()
    uvloop.run(_serve(Pace(given.step_ms / 1000, given.tokens, given.first_ms / 1000, given.break_every)))


if __name__ == "__main__":
    _main()
