"""A server with OpenAI's API, asked over aiohttp."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal

import aiohttp

from deepseek_triton_tools.bench.result import RequestRecord
from deepseek_triton_tools.bench.targets import BenchAnswer, BenchPrompt, RunClock, TargetSettings, counted_chunks

_NOT_OPENAI = (ValueError, TypeError, AttributeError, LookupError)
"""Raised where an event has another form than OpenAI's."""
_FINISHED = b"[DONE]"
_LIMIT_REASONS = {"stop", "length", "tool_calls"}
"""Finish reasons of whole answers."""


class OpenAITarget:
    """See `BenchTarget`. Token ids are sent to /completions; chats to /chat/completions."""

    def __init__(self, settings: TargetSettings, url: str, now: RunClock) -> None:
        """Call it in a running event loop."""
        self._url = f"{url.rstrip('/')}/{'chat/completions' if settings.chat else 'completions'}"
        self._now = now
        self._content = "messages" if settings.chat else "prompt"
        self._body = {"model": settings.model, "stream": True, **settings.fields}
        self._counts_each_chunk: bool | None = None
        """Whether the server takes `continuous_usage_stats`, which is vLLM's; None: nobody has asked yet."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=tls_of(settings)),
            timeout=aiohttp.ClientTimeout(total=settings.timeout_s, sock_connect=10),
            headers={"Authorization": f"Bearer {settings.token}"} if settings.token else {},
        )

    async def ask(
        self, prompt: BenchPrompt, fields: Mapping[str, Any], record: RequestRecord, *, keep_ids: bool
    ) -> BenchAnswer:
        record.url, record.sent_s = self._url, self._now()
        usage = {"include_usage": True} | ({} if self._counts_each_chunk is False else {"continuous_usage_stats": True})
        body = {**self._body, self._content: prompt, **fields, "stream_options": usage}
        answer = _StreamedAnswer(self._now)
        refused = False
        try:
            async with self._session.post(self._url, json=body) as response:
                if response.status == 200:
                    self._counts_each_chunk = "continuous_usage_stats" in usage
                    async for event in _events(response.content):
                        answer.add(event)
                        record.num_output_tokens = answer.num_tokens
                else:
                    record.outcome, record.error = "failed", await _refusal(response)
                    refused = self._counts_each_chunk is None and "continuous_usage" in record.error
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, *_NOT_OPENAI) as error:
            record.outcome, record.error = "failed", _one_line(f"{type(error).__name__}: {error}")
        except asyncio.CancelledError:
            record.outcome = "cancelled"
            raise
        finally:
            answer.write(record)
            record.ended_s = self._now()
        if refused:
            self._counts_each_chunk = False
            record.outcome, record.error = "completed", ""
            return await self.ask(prompt, fields, record, keep_ids=keep_ids)
        return BenchAnswer("".join(answer.text))

    async def close(self) -> None:
        await self._session.close()


class _StreamedAnswer:
    """The events of one answer, as they come."""

    def __init__(self, now: RunClock) -> None:
        self._now = now
        self.text: list[str] = []
        self._times: list[float] = []
        self._tokens: list[int] = []
        self._usage: dict[str, Any] = {}
        self._finish_reason: str | None = None
        self._error = ""
        self._ended = False

    def add(self, event: bytes) -> None:
        """Raises one of _NOT_OPENAI for an event of another form."""
        if event == _FINISHED:
            self._ended = True
            return
        document = json.loads(event)
        if error := document.get("error"):
            self._error = error.get("message", str(error)) if isinstance(error, dict) else str(error)
            return
        before = self._usage.get("completion_tokens") or 0
        self._usage = {**self._usage, **(document.get("usage") or {})}
        new = (self._usage.get("completion_tokens") or 0) - before
        for choice in document.get("choices") or ():
            delta = choice.get("delta") or choice
            text = delta.get("content") or delta.get("text") or ""
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            if new > 0 or text or delta.get("reasoning_content") or delta.get("reasoning"):
                self._times.append(self._now())
                self._tokens.append(new)
            self.text.append(text)

    @property
    def num_tokens(self) -> int:
        """Tokens so far, by the server's count; chunks where it gives none."""
        return self._usage.get("completion_tokens") or len(self._times)

    def write(self, record: RequestRecord) -> None:
        record.num_input_tokens = self._usage.get("prompt_tokens") or 0
        record.num_cached_tokens = (self._usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        record.num_output_tokens = self.num_tokens
        record.chunk_s, record.chunk_tokens = counted_chunks(self._times, self._tokens, record.num_output_tokens)
        record.finish_reason = self._finish_reason
        if record.outcome == "completed" and (self._error or not self._ended):
            record.outcome, record.error = "failed", _one_line(self._error or "the stream ended without [DONE]")
        elif record.outcome == "completed" and self._finish_reason not in _LIMIT_REASONS:
            record.outcome, record.error = "failed", f"finish reason {self._finish_reason!r}"


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each server-sent event; every server of this API writes an event as one line."""
    rest = b""
    async for data in content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


async def _refusal(response: aiohttp.ClientResponse) -> str:
    text = (await response.content.read(4096)).decode(errors="replace")
    try:
        error = json.loads(text)["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, LookupError, TypeError):
        pass  # not OpenAI's form: the body itself says what is wrong
    return _one_line(f"{response.status}: {text}")


def tls_of(settings: TargetSettings) -> ssl.SSLContext | Literal[True]:
    """Return a context for the settings' certificates; True: the usual one."""
    if not settings.ca and not settings.certificate:
        return True
    context = ssl.create_default_context(cafile=settings.ca)
    if settings.certificate:
        context.load_cert_chain(settings.certificate, settings.key)
    return context


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]
