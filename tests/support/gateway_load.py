"""Thousands of mixed requests to a gateway, each judged by itself: answered whole, refused, or what else.

The client is asyncio's streams and a few lines of HTTP, one connection for each request, so that it costs little and
nothing of ours hides between the gateway and the judgement.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import msgspec

RETRYABLE = {429, 503}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
_AT_ONCE = 48
_NO_ANSWER_S = 200.0


@dataclass(frozen=True)
class Asked:
    """One request. leave: when the client goes: "at once" or "begun"; "" for never. wrong: the status that it gets."""

    kind: str
    path: str
    body: Mapping[str, Any]
    leave: str = ""
    wrong: int = 0

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))


@dataclass
class Outcomes:
    """How many requests of each kind ended how, and the first of those that ended as none may."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    strange: list[str] = field(default_factory=list)
    ended: int = 0

    def add(self, asked: Asked, outcome: str) -> None:
        self.ended += 1
        name, _, detail = outcome.partition(": ")
        self.counts[asked.kind, name] += 1
        if name == "strange" and len(self.strange) < 20:
            self.strange.append(f"{asked.kind} {asked.body}: {detail}")

    def of(self, outcome: str) -> int:
        return sum(count for (_, name), count in self.counts.items() if name == outcome)

    def table(self) -> str:
        return "\n".join(f"{kind}: {count} {name}" for (kind, name), count in sorted(self.counts.items()))


def mixed(number: int, model: str) -> Asked:
    """The request of this number."""
    rng = random.Random(number)
    messages = [
        {"role": "system", "content": f"You are number {number % 5}."},
        {"role": "user", "content": f"Question {number % 300}. " + "word " * rng.choice((2, 10, 300))},
    ]
    if number % 3 == 0:
        messages += [{"role": "assistant", "content": "An answer."}, {"role": "user", "content": "And then?"}]
    size = rng.choice((1, 4, 8, 16, 60))
    usual = {"model": model, "max_tokens": size, "ignore_eos": True, "temperature": 0}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    chat, plain = "/v1/chat/completions", "/v1/completions"
    prompt = {"prompt": f"Prompt {number % 50} " + "word " * size}
    kinds: list[tuple[int, Callable[[], Asked]]] = [
        (25, lambda: Asked("chat stream", chat, {"messages": messages, **usual, **streamed})),
        (20, lambda: Asked("chat", chat, {"messages": messages, **usual})),
        (12, lambda: Asked("completion stream", plain, {**prompt, **usual, **streamed})),
        (12, lambda: Asked("completion", plain, {**prompt, **usual})),
        (6, lambda: Asked("tools", chat, {"messages": messages, "tools": [TOOL], **usual, **streamed})),
        (3, lambda: Asked("long stream", chat, {"messages": messages, **usual, **streamed, "max_tokens": 400})),
        (8, lambda: Asked("wrong value", chat, {"messages": messages, **usual, "temperature": -1}, wrong=400)),
        (4, lambda: Asked("wrong name", chat, {"messages": messages, **usual, "temprature": 1}, wrong=400)),
        (6, lambda: Asked("leaves", chat, {"messages": messages, **usual, **streamed, "max_tokens": 400}, "begun")),
        (4, lambda: Asked("leaves at once", chat, {"messages": messages, **usual, "max_tokens": 400}, "at once")),
    ]
    return rng.choices([make for _, make in kinds], [weight for weight, _ in kinds])[0]()


async def load(url: str, model: str, num_requests: int, outcomes: Outcomes, *, has_tools: bool = True) -> None:
    """Send them all, some dozens at the same time. A model without tools refuses those that have such."""
    numbers = iter(range(num_requests))

    async def worker() -> None:
        for number in numbers:
            asked = mixed(number, model)
            if asked.kind == "tools" and not has_tools:
                asked = replace(asked, wrong=400)
            try:
                outcome = await asyncio.wait_for(_exchange(url, asked), _NO_ANSWER_S)
            except asyncio.TimeoutError:
                outcome = "strange: no answer"
            except (OSError, EOFError) as error:
                outcome = f"strange: {error!r}"
            outcomes.add(asked, outcome)

    await asyncio.gather(*(worker() for _ in range(_AT_ONCE)))


async def _exchange(url: str, asked: Asked) -> str:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 20)
    try:
        body = json.dumps(asked.body).encode()
        head = f"POST {asked.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        if asked.leave == "at once":
            return "left"
        status = int((await reader.readuntil(b"\r\n")).split()[1])
        headers = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        if asked.leave and status == 200:
            await reader.readuntil(b"data:")
            return "left"
        rest = await reader.read(-1)
        return judged(asked, status, headers, _dechunked(rest) if "transfer-encoding: chunked" in headers else rest)
    finally:
        writer.close()


def _dechunked(data: bytes) -> bytes:
    """Raises EOFError where the last chunk is missing."""
    found: list[bytes] = []
    at = 0
    while True:
        line, mark, _ = data[at:].partition(b"\r\n")
        if not mark:
            raise EOFError("the response has no end")
        size, at = int(line, 16), at + len(line) + 2
        if not size:
            return b"".join(found)
        found.append(data[at : at + size])
        at += size + 2


def judged(asked: Asked, status: int, headers: str, body: bytes) -> str:
    """How it ended: answered, refused (by an error that may be sent again), failed (a stream that had begun, with one
    error event), told (that it was wrong), or "strange: " and why."""
    try:
        if status == 200 and asked.stream:
            return _judged_stream(asked, body)
        document = msgspec.json.decode(body)
        if status == 200:
            return _judged_answer(asked, document["choices"], document["usage"])
        if not document["error"]["message"]:
            return "strange: an error without a message"
    except (msgspec.MsgspecError, KeyError, TypeError, IndexError) as error:
        return f"strange: {error!r} in status {status} {body[-300:]!r}"
    if status in RETRYABLE:
        return "refused" if "retry-after:" in headers else "strange: no Retry-After"
    return "told" if status == asked.wrong else f"strange: status {status}: {document['error']}"


def _judged_stream(asked: Asked, body: bytes) -> str:
    events = [event.removeprefix(b"data: ") for event in body.split(b"\n\n") if event.startswith(b"data: ")]
    if events[-1] != b"[DONE]":
        errors = [event for event in events if b'"error"' in event]
        if errors == events[-1:] and msgspec.json.decode(errors[0])["error"]["message"]:
            return "failed"
        return f"strange: the stream ends with {body[-300:]!r}"
    chunks = [msgspec.json.decode(event) for event in events[:-1]]
    ends = [choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    if len(usages) != 1 or len({chunk["id"] for chunk in chunks}) != 1:
        return f"strange: {len(usages)} usages, {len({chunk['id'] for chunk in chunks})} ids"
    return _judged_answer(asked, ends, usages[0])


def _judged_answer(asked: Asked, choices: list[dict[str, Any]], usage: dict[str, Any]) -> str:
    """The simulated engine makes exactly as many tokens as it was asked for."""
    if asked.wrong:
        return "strange: it was wrong, and was answered"
    reasons = [choice["finish_reason"] for choice in choices]
    if reasons == ["length"] and usage["completion_tokens"] == asked.body["max_tokens"]:
        return "answered"
    return f"strange: {reasons}, {usage}"
