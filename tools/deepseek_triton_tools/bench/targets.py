"""Servers that a benchmark asks, of one interface; a model on Triton is asked by our own client."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

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
from deepseek_triton_tools.bench.result import RequestRecord

Endpoint = Literal["triton-http", "triton-grpc", "openai"]

BenchPrompt: TypeAlias = "str | Sequence[int] | list[dict[str, str]]"
"""Text, token ids, or the messages of a chat."""
RunClock: TypeAlias = Callable[[], float]
"""Seconds since the start of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSettings:
    """How to reach the servers. Goes to the load processes, so that everything in it can be pickled."""

    urls: tuple[str, ...]
    """Requests go to them in turn."""
    endpoint: Endpoint
    model: str
    model_version: str = ""
    chat: bool = False
    """Send prompts as a message of the user, by the model's chat template."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Sampling fields of every request."""
    timeout_s: float | None = None
    """Limit of a whole answer."""
    token: str | None = field(default=None, repr=False)
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    @property
    def tls(self) -> Tls:
        return Tls(ca=self.ca, certificate=self.certificate, key=self.key)


@dataclass(frozen=True, slots=True)
class BenchAnswer:
    """The next turn of a conversation is put behind it."""

    text: str = ""
    token_ids: tuple[int, ...] = ()


class BenchTarget(Protocol):
    """One server. Requests may run at the same time."""

    async def ask(
        self, prompt: BenchPrompt, fields: Mapping[str, Any], record: RequestRecord, *, keep_ids: bool
    ) -> BenchAnswer:
        """Send a request, and note in `record` what comes and when: all but `index`, `turn` and `due_s`.

        Never raises for what a server does. When it is cancelled, the request is left, and `record` says so.
        """
        ...

    async def close(self) -> None: ...


def counted_chunks(times: Sequence[float], tokens: Sequence[int], total: int) -> tuple[list[float], list[int]]:
    """Return the times of chunks and their numbers of tokens, which add up to `total` and are above 0.

    A chunk that brought no token is left out. Where a server doesn't tell the chunks' own numbers, the tokens are
    divided evenly.

    >>> counted_chunks([0.1, 0.2, 0.3], [2, 0, 1], 3)
    ([0.1, 0.3], [2, 1])
    >>> counted_chunks([0.1, 0.2, 0.3], [0, 0, 0], 8)
    ([0.1, 0.2, 0.3], [3, 3, 2])
    """
    if sum(tokens) == total:
        counted = [(time, number) for time, number in zip(times, tokens, strict=True) if number > 0]
        return [time for time, _ in counted], [number for _, number in counted]
    num_chunks = min(len(times), total)
    each, rest = divmod(total, max(1, num_chunks))
    return list(times[:num_chunks]), [each + (number < rest) for number in range(num_chunks)]


# A stream that had a token and then none for so long has lost its end (docs/tritonserver.md), and would stay open.
_STALLED_S = 300.0


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
            record.outcome, record.error = "cancelled", one_line(str(error))
        except DeepseekTritonError as error:
            record.outcome, record.error = "failed", one_line(str(error))
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
        "balance": "round_robin",
        "tls": settings.tls,
        "token": settings.token,
    }


def one_line(error: str) -> str:
    """Without the bytes that came, so that equal errors are counted together."""
    return " ".join(error.partition(": bytearray(")[0].split())[:200]
