"""A model on Triton, asked by our own asynchronous client over HTTP or gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from deepseek_triton_client import (
    AsyncClient,
    AsyncStream,
    Cancelled,
    DeepseekTritonError,
    Retries,
    SamplingParams,
    Timeouts,
    Tls,
)
from deepseek_triton_tools.bench.load.bench_target import (
    BenchAnswer,
    BenchPrompt,
    RunClock,
    TargetSettings,
    counted_chunks,
)
from deepseek_triton_tools.bench.measuring.request_record import RequestRecord

_STALLED_S = 300.0
"""A stream that had a token and then none for so long has lost its end (docs/tritonserver.md), and would stay open."""


class TritonTarget:
    """See `BenchTarget`."""

    def __init__(self, settings: TargetSettings, url: str, now: RunClock) -> None:
        self._client = AsyncClient(url, **client_arguments(settings))
        self._now = now
        self._url = url
        self._ask: Callable[..., AsyncStream] = self._client.stream_chat if settings.chat else self._client.stream
        self._params = SamplingParams(return_num_output_tokens=True).merged(settings.fields)
        self._reads_ids = self._params.merged({"return_output_ids": True})

    async def ask(
        self, prompt: BenchPrompt, fields: Mapping[str, Any], record: RequestRecord, *, keep_ids: bool
    ) -> BenchAnswer:
        record.url = self._url
        record.sent_s = self._now()
        times: list[float] = []
        tokens: list[int] = []
        ids: list[int] = []
        text: list[str] = []
        try:
            async with self._ask(prompt, self._reads_ids if keep_ids else self._params, **fields) as stream:
                async for chunk in stream:
                    number = chunk.num_output_tokens
                    if number or (number is None and (chunk.text or chunk.reasoning)):
                        times.append(self._now())
                        tokens.append(number or 0)
                        record.num_output_tokens += number or 1
                    text.append(chunk.text)
                    ids += chunk.output_ids
                    if chunk.num_input_tokens is not None:
                        record.num_input_tokens = chunk.num_input_tokens
                    if chunk.num_cached_tokens is not None:
                        record.num_cached_tokens = chunk.num_cached_tokens
                    if chunk.finish_reason is not None:
                        record.finish_reason = chunk.finish_reason
        except Cancelled as error:
            record.outcome, record.error = "cancelled", _one_line(error)
        except DeepseekTritonError as error:
            record.outcome, record.error = "failed", _one_line(error)
        except asyncio.CancelledError:
            record.outcome = "cancelled"
            raise
        finally:
            record.ended_s = self._now()
            # Other models count only at the end, or not at all: then each chunk counts as a token.
            record.num_output_tokens = sum(tokens) or len(tokens)
            record.chunk_s, record.chunk_tokens = counted_chunks(times, tokens, record.num_output_tokens)
        if record.finish_reason == "timeout":
            record.outcome, record.error = "failed", 'finish reason "timeout": the server\'s time limit'
        elif record.finish_reason == "cancelled":
            record.outcome = "cancelled"
        return BenchAnswer("".join(text), tuple(ids))

    async def close(self) -> None:
        await self._client.close()


def client_arguments(settings: TargetSettings) -> dict[str, Any]:
    """Return the arguments of a client that sends nothing twice: a refusal is a figure here."""
    return {
        "model_name": settings.model,
        "model_version": settings.model_version,
        "timeouts": Timeouts(total=settings.timeout_s, between_tokens=_STALLED_S),
        "retries": Retries(attempts=1),
        "context_urls": settings.context_urls,
        "balance": "round_robin",
        "tls": Tls(ca=settings.ca, certificate=settings.certificate, key=settings.key),
        "token": settings.token,
    }


def _one_line(error: DeepseekTritonError) -> str:
    """Without the bytes that came, so that equal errors are counted together."""
    return " ".join(str(error).partition(": bytearray(")[0].split())[:200]
